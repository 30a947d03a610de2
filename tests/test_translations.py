"""Translated pages say which English text they were made from; a page whose English has changed since is named."""

import re
from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRANSLATED = sorted((ROOT / "docs" / "vi").rglob("*.md"))


def stale(page: Path) -> str | None:
    """What to do about a translated page, if anything.

    Its front matter has `source`, the English page's path from here, and `source-sha256` of that page's text; or
    `source: none` where there is no English one.
    """
    front = re.match(r"---\n(.*?)^---\n", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    fields = dict(re.findall(r"^([\w-]+): *(\S+)", front[1] if front else "", flags=re.MULTILINE))
    if "source" not in fields:
        return f"{page} does not say what it translates; begin it with a front matter: source and source-sha256"
    if fields["source"] == "none":
        return None
    source = (page.parent / fields["source"]).resolve()
    if not source.is_file():
        return f"{page} translates {fields['source']}, which is not there; was it renamed?"
    now = sha256(source.read_text(encoding="utf-8").encode()).hexdigest()
    if fields.get("source-sha256") == now:
        return None
    return (
        f"{source} has changed since {page} was translated; see how by\n"
        f"    git diff $(git log -1 --format=%h -- {page}) -- {source}\n"
        f"then bring the translation up to date and write in its front matter\n    source-sha256: {now}"
    )


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_english_has_not_changed_since(page: Path):
    assert (told := stale(page)) is None, told


@pytest.fixture
def translated(tmp_path: Path) -> Path:
    (tmp_path / "learn").mkdir()
    (tmp_path / "vi").mkdir()
    english, page = tmp_path / "learn" / "masks.md", tmp_path / "vi" / "masks.md"
    english.write_text("# Masks\n")
    digest = sha256(english.read_bytes()).hexdigest()
    page.write_text(f"---\nsource: ../learn/masks.md\nsource-sha256: {digest}\n---\n\n# Mặt nạ\n", encoding="utf-8")
    return page


def test_a_translation_of_the_text_as_it_is(translated: Path):
    assert stale(translated) is None


def test_a_changed_english_text_is_told_with_the_command_that_shows_it(translated: Path):
    english = translated.parents[1] / "learn" / "masks.md"
    english.write_text("# Masks and ratios\n")
    told = stale(translated)
    assert told is not None and str(translated) in told
    assert f"git diff $(git log -1 --format=%h -- {translated}) -- {english.resolve()}" in told
    assert sha256(b"# Masks and ratios\n").hexdigest() in told


@pytest.mark.parametrize(
    ("front", "said"),
    [
        ("", "does not say what it translates"),
        ("---\ntitle: x\n---\n", "does not say what it translates"),
        ("---\nsource: ../learn/none.md\n---\n", "is not there"),
        ("---\nsource: ../learn/masks.md\n---\n", "has changed since"),
    ],
)
def test_a_page_without_its_source_is_told(translated: Path, front: str, said: str):
    translated.write_text(front + "# Mặt nạ\n", encoding="utf-8")
    assert said in str(stale(translated))


def test_a_page_of_its_own_needs_no_source(translated: Path):
    translated.write_text("---\nsource: none\n---\n\n# Thuật ngữ\n", encoding="utf-8")
    assert stale(translated) is None
