"""What git ignores, since a package manager fetches it, is in the wheel all the same."""

import shutil
from pathlib import Path

import pytest

from mae.web.site import RUNTIME, VENDOR

ROOT = Path(__file__).parents[2]


def test_a_wheel_carries_the_page_and_its_runtime(tmp_path: Path):
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE", "src/mae/version.py", "src/mae/web"):
        source, copy = ROOT / name, tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, copy) if source.is_dir() else shutil.copyfile(source, copy)
    vendor = tmp_path / "src/mae/web" / VENDOR
    vendor.mkdir(exist_ok=True)
    for name in RUNTIME:
        (vendor / name).touch()
    carried = {file.distribution_path for file in wheel.WheelBuilder(str(tmp_path)).recurse_included_files()}
    assert {f"mae/web/{VENDOR}/{name}" for name in RUNTIME} <= carried
    assert {"mae/web/static/index.html", "mae/web/static/page.js", "mae/web/static/vi.json"} <= carried
