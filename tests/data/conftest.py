"""Fixtures of the data tests."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[dict[str, bytes]], Path]:
    """Writes files below a new folder."""

    def write(files: dict[str, bytes]) -> Path:
        for name, data in files.items():
            path = tmp_path / "tree" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return tmp_path / "tree"

    return write
