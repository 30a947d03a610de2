"""The HTML page: one file, nothing outside, nothing in a text that acts."""

import hashlib
import json
import re
from base64 import b64decode, b64encode
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import Markup

from mae.errors import MAEError
from mae.report.html import page
from mae.report.html.page import Interactive, Section, write_page

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
HOSTILE = "</td><script>alert(1)</script> & \"quoted\" 'single' \u202e \udcff \x00 é 猫"


class Outline(HTMLParser):
    """Tags with their attributes, and the text of each."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1], data))


def written(path: Path, **parts) -> tuple[str, Outline]:
    write_page(path, **{"title": "t", "facts": [], "sections": [], **parts})
    source = path.read_bytes().decode("ascii")
    outline = Outline(source)
    assert outline.open == []
    return source, outline


def test_everything_is_there_in_order(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    section = Section(
        title="Protocols",
        text="first\n\nsecond",
        header=["protocol", "top-1"],
        rows=[["k-NN", "71.3 %"], ["probe", "–"]],
        pictures=[tmp_path / "a.png"],
    )
    facts = [("model", "base"), ("images", "12")]
    source, outline = written(
        tmp_path / "new" / "p.html", title="Run", facts=facts, sections=[section, Section(title="B")]
    )
    texts = [(tag, text) for tag, text in outline.texts if tag != "style"]
    assert texts == [
        ("title", "Run"), ("h1", "Run"), ("dt", "model"), ("dd", "base"), ("dt", "images"), ("dd", "12"),
        ("h2", "Protocols"), ("p", "first"), ("p", "second"), ("th", "protocol"), ("th", "top-1"),
        ("td", "k-NN"), ("td", "71.3 %"), ("td", "probe"), ("td", "–"), ("h2", "B"),
    ]  # fmt: skip
    assert [attrs.get("class") for tag, attrs in outline.tags if tag in ("th", "td")] == [None, "number"] * 3
    [image] = [attrs for tag, attrs in outline.tags if tag == "img"]
    assert b64decode(image["src"].removeprefix("data:image/png;base64,")) == PNG and image["alt"] == "Protocols"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["p.html"]


def test_who_does_not_see_pictures_is_told_what_they_show(tmp_path):
    pictures = [tmp_path / f"step-0000000{number}.png" for number in (1, 2)]
    for picture in pictures:
        picture.write_bytes(PNG)
    sections = [Section(title="Latest <b>", pictures=pictures[:1]), Section(title="All", pictures=pictures)]
    _, outline = written(tmp_path / "p.html", sections=sections)
    said = [attrs["alt"] for tag, attrs in outline.tags if tag == "img"]
    assert said == ["Latest <b>", "All: step-00000001", "All: step-00000002"]


def test_the_page_needs_nothing_else(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    source, outline = written(tmp_path / "p.html", sections=[Section(title="s", pictures=[tmp_path / "a.png"])])
    assert not {tag for tag, _ in outline.tags} & {"script", "link", "iframe", "object", "base"}
    addresses = [value for _, attrs in outline.tags for name, value in attrs.items() if name in ("src", "href")]
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    assert not re.search(r"https?:|//|url\(|@import|javascript:", re.sub(r"base64,[^\"]*", "", source))
    assert "prefers-color-scheme: dark" in source and "@media print" in source and 'name="viewport"' in source


def test_a_page_is_read_again_only_where_that_is_asked(tmp_path):
    def again(**parts) -> list[str]:
        _, outline = written(tmp_path / "p.html", **parts)
        return [attrs["content"] for tag, attrs in outline.tags if attrs.get("http-equiv") == "refresh"]

    assert again() == [] and again(refresh=10) == ["10"]


def test_no_text_acts(tmp_path):
    picture = tmp_path / '"><script>.png'.replace("/", "")
    picture.write_bytes(PNG)
    section = Section(
        title=HOSTILE, text=HOSTILE, header=[HOSTILE], rows=[[HOSTILE]], commands=[HOSTILE], pictures=[picture] * 2
    )
    source, outline = written(tmp_path / "p.html", title=HOSTILE, facts=[(HOSTILE, HOSTILE)], sections=[section])
    assert "<script" not in source and "script" not in {tag for tag, _ in outline.tags}
    shown = HOSTILE.replace("\u202e", "\ufffd").replace("\udcff", "\ufffd").replace("\x00", "\ufffd")
    assert [text for tag, text in outline.texts if tag != "style"] == [shown] * 9
    assert [attrs["alt"] for tag, attrs in outline.tags if tag == "img"] == [f'{shown}: "><script>'] * 2


def test_a_section_without_a_header_has_no_table_and_no_facts_no_list(tmp_path):
    _, outline = written(tmp_path / "p.html", sections=[Section(title="s", text="  ")])
    assert not {tag for tag, _ in outline.tags} & {"table", "dl", "p", "img"}


def test_commands_are_shown_as_they_are_and_last(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    commands = ["mae pretrain --data <here> \\", "  --epochs 2", "", "mae evaluate 'a b'"]
    section = Section(title="s", header=["h"], rows=[["x"]], pictures=[tmp_path / "a.png"], commands=commands)
    source, outline = written(tmp_path / "p.html", sections=[section])
    assert [text for tag, text in outline.texts if tag == "pre"] == ["\n".join(commands)]
    assert source.index("<table") < source.index("<img") < source.index("<pre") and source.count("<pre") == 1


def test_marked_cells_stand_out_and_others_keep_their_side(tmp_path):
    section = Section(
        title="s",
        header=["better", "n"],
        rows=[["better", "1"], ["worse", "2"], ["not better", "3"]],
        marks={"better": "good", "worse": "bad"},
    )
    _, outline = written(tmp_path / "p.html", sections=[section])
    classes = [(tag, attrs.get("class")) for tag, attrs in outline.tags if tag in ("th", "td")]
    assert classes[:2] == [("th", None), ("th", "number")]  # a heading is no verdict
    assert [kind for _, kind in classes[2:]] == ["good", "number", "bad", "number", None, "number"]


def test_a_missing_picture_and_a_failed_write_leave_the_old_page(tmp_path, monkeypatch):
    path = tmp_path / "p.html"
    path.write_text("old")
    with pytest.raises(MAEError, match="cannot read the picture.*gone.png: No such file"):
        write_page(path, title="t", facts=[], sections=[Section(title="s", pictures=[tmp_path / "gone.png"])])
    with pytest.raises(MAEError, match="cannot write the page"):
        write_page(path / "p.html", title="t", facts=[], sections=[])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page, "write_whole", full)
    with pytest.raises(MAEError, match="No space left"):
        write_page(path, title="t", facts=[], sections=[])
    assert path.read_text() == "old"


def interactive(**changes) -> Interactive:
    parts = {"html": Markup('<p id="here">live</p>'), "style": "#here { color: red; }", "script": 'say("here");'}
    return Interactive(**{**parts, "data_id": "here-data", "data": {"name": HOSTILE}, **changes})


def policy_of(outline: Outline) -> str:
    [policy] = [attrs["content"] for tag, attrs in outline.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    return policy


def test_a_browser_is_told_to_fetch_nothing_and_to_run_no_script(tmp_path):
    _, outline = written(tmp_path / "p.html", sections=[Section(title="s")])
    assert policy_of(outline) == (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'none'; base-uri 'none'; "
        "form-action 'none'"
    )


def test_only_the_script_of_an_interactive_section_may_run(tmp_path):
    source, outline = written(tmp_path / "p.html", sections=[Section(title="s", interactive=interactive())])
    [script] = [text for tag, text in outline.texts if tag == "script" and "say" in text]
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy_of(outline)
    assert [attrs for tag, attrs in outline.tags if tag == "script"] == [
        {"type": "application/json", "id": "here-data"},
        {"type": "module"},
    ]
    assert '<p id="here">live</p>' in source and "#here { color: red; }" in source


def test_texts_that_a_script_reads_do_not_act_and_come_whole(tmp_path):
    source, outline = written(tmp_path / "p.html", sections=[Section(title="s", interactive=interactive())])
    [text] = [text for tag, text in outline.texts if tag == "script" and "say" not in text]
    assert json.loads(text) == {"name": HOSTILE}
    assert "<script>alert" not in source and source.count("</script>") == 2
