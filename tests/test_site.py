"""The site of the documentation: it builds without a warning, has every public name, and needs no network."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from inspect import ismodule
from pathlib import Path

import pytest

import mae

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference" / "python"
NEEDED = ("furo", "myst_parser", "sphinx")

needs_sphinx = pytest.mark.skipif(
    not all(map(find_spec, NEEDED)), reason=f"the extra docs ({', '.join(NEEDED)}) is not installed"
)


def named(directive: str) -> set[str]:
    """The arguments of a directive on all pages of the reference."""
    found = re.findall(
        rf"^```{{{directive}}} (.+)$", "".join(map(Path.read_text, REFERENCE.glob("*.md"))), re.MULTILINE
    )
    return {argument for arguments in found for argument in arguments.split()}


def test_the_room_of_every_public_name_is_in_the_reference():
    rooms = {where.split(".")[1] for where in mae._WHERE.values()}
    assert rooms - named("public-names") == set(), "add the room to a directive in docs/reference/python/"
    assert {"mae.core.contracts", "mae.core.types"} <= named("classes-of")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-d", str(out / "doctrees")]
    paths = [str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [*command, "-c", "docs", ".", str(out / "html")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


@needs_sphinx
@pytest.mark.slow
def test_names_and_commands_are_on_the_site(site: Path):
    pages = {page.stem: page.read_text() for page in (site / "docs" / "reference").rglob("*.html")}
    ids = set(re.findall(r'id="(?:module-)?(mae\.[\w.]+)"', "".join(pages.values())))
    expected = {where if ismodule(getattr(mae, name)) else f"mae.{name}" for name, where in mae._WHERE.items()}
    assert expected - ids == set()
    assert {f"mae.core.contracts.{slot}" for slot in ("Mask", "Target", "Term")} <= ids
    models = re.sub(r"<[^>]+>", "", pages["models"])
    assert "Raises" in models and "images: Float[Tensor" in models
    assert "--norm-pix-loss" in pages["commands"] and "--mask-min-patches" in pages["components"]
    assert 'url=README.html"' in (site / "index.html").read_text()
    assert "quickstart" in (site / "searchindex.js").read_text()


@needs_sphinx
@pytest.mark.slow
def test_a_page_asks_nothing_of_a_network(site: Path):
    pages = [*site.rglob("*.html")]
    assert len(pages) > 30
    for page in pages:
        text = page.read_text()
        assert not re.search(r'<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)="(?:https?:)?//', text), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", style.read_text()), style
