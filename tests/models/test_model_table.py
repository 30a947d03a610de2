"""The table of sizes in the documentation is what the code says now."""

import re

import pytest
from model_table import BEGIN, HEADER, PAGE, row, with_table

from mae.models.presets import ALIASES, list_models


def test_the_table_has_a_row_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)`", page, flags=re.MULTILINE) == list_models()
    assert all(f"`{alias}`" in page for alias in ALIASES)
    monkeypatch.setattr("model_table.table", lambda: "rows\n")
    assert f"{BEGIN}\nrows\n" in with_table(page)


@pytest.mark.parametrize("name", [*list_models()[:3], "mae_vit_base_patch16_dec512d8b"])
def test_a_row_is_up_to_date(name: str) -> None:
    """Of a few sizes, since operations take seconds to count; those of the others have tests of their parameters."""
    page = PAGE.read_text(encoding="utf-8")
    assert HEADER in page and row(name) in page, "out of date; run: python benchmarks/model_table.py"
