from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from mae.errors import UsageError
from mae.records import check_known, from_json, to_json


@dataclass(frozen=True, kw_only=True)
class Thing:
    sides: tuple[int, int] = (1, 2)
    where: Path | None = None
    share: float = 0.5
    kind: Literal["a", "b"] = "a"
    on: bool = False

    def __post_init__(self) -> None:
        if self.share > 1:
            raise UsageError(f"share is {self.share}; at most 1")


def test_round_trip():
    thing = Thing(sides=(3, 4), where=Path("x/y"), share=1, kind="b", on=True)
    assert to_json(thing) == {"sides": [3, 4], "where": "x/y", "share": 1, "kind": "b", "on": True}
    assert from_json(Thing, to_json(thing), what="option") == thing
    assert from_json(Thing, {}, what="option") == Thing()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sides": [1, 2, 3]}, "option sides"),
        ({"sides": "12"}, "option sides is '12'"),
        ({"share": "0.5"}, "option share is '0.5'"),
        ({"kind": "c"}, "option kind is 'c'.*'a' or 'b'"),
        ({"on": 1}, "option on is 1.*boolean"),
        ({"share": 2}, "^share is 2.0; at most 1$"),
        ({"shared": 2}, "unknown option 'shared'; did you mean share"),
    ],
)
def test_wrong_values_are_named(values: dict[str, object], message: str):
    with pytest.raises(UsageError, match=message):
        from_json(Thing, values, what="option")


def test_unknown_names_without_a_near_one_list_some():
    with pytest.raises(UsageError, match="unknown part 'zzz'; did you mean a or b"):
        check_known({"zzz": 1}, ["b", "a"], what="part")
