"""Rows of a log as trackers take them."""

from collections.abc import Mapping

from mae.training.log import LogRow


def numbers_of(row: LogRow) -> dict[str, float]:
    """The numbers of a row but its step, by name; those of a table as `table/name`, as in TensorBoard."""
    found: dict[str, float] = {}
    for name, value in row.items():
        table = (
            {f"{name}/{part}": number for part, number in value.items()}
            if isinstance(value, Mapping)
            else {name: value}
        )
        found |= {each: number for each, number in table.items() if number is not None}
    found.pop("step")
    return found
