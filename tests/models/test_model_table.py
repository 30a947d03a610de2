"""The table of sizes in the documentation is what the code says now."""

from model_table import PAGE, with_table

from mae.models.zoo import ALIASES, list_models


def test_the_table_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "out of date; run: python benchmarks/model_table.py"
    assert all(f"`{name}`" in page for name in [*list_models(), *ALIASES])
