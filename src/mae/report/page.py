"""One HTML file that says what was measured: text, tables and pictures, nothing fetched from anywhere."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal

from mae.errors import MAEError
from mae.records import write_whole
from mae.report.canvas import visible
from mae.report.tables import numeric_columns

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1d21; --faint: #626873; --line: #dcdfe4; --paper: #fff; --shade: #f5f6f8;
  --accent: #b5367a; --good: #1d5fa8; --bad: #a8500c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e8ea; --faint: #9aa1ac; --line: #363a42; --paper: #16181c;
  --shade: #1f2227; --accent: #ec7fb4; --good: #7db8f5; --bad: #f0a35e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 2.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  overflow-wrap: anywhere; }
h1 { margin: 0 0 1.25rem; padding-left: .8rem; border-left: .3rem solid var(--accent); font-size: 1.75rem;
  line-height: 1.2; }
h2 { margin: 2.75rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); font-size: 1.25rem; }
p { max-width: 46rem; margin: .6rem 0; white-space: pre-line; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.5rem; margin: 0; padding: 1rem 1.25rem;
  border-radius: .5rem; background: var(--shade); font-size: .94rem; }
dt { color: var(--faint); }
dd { margin: 0; white-space: pre-line; }
dt, dd, td, th, h1, h2, p { unicode-bidi: isolate; }
.wide { overflow-x: auto; margin: 1rem 0; overflow-wrap: break-word; }
table { border-collapse: collapse; font-size: .94rem; }
th, td { padding: .4rem 1.5rem .4rem 0; text-align: left; vertical-align: top; white-space: pre-line; }
th { border-bottom: 2px solid var(--line); color: var(--faint); font-weight: 600; }
td { border-bottom: 1px solid var(--line); min-width: 4rem; max-width: 30rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th { vertical-align: bottom; }
th.number { min-width: 4rem; white-space: pre-line; }
.good, .bad { font-weight: 600; }
.good { color: var(--good); }
.bad { color: var(--bad); }
pre { max-height: 30rem; margin: 1rem 0; padding: 1rem 1.25rem; overflow: auto; border-radius: .5rem;
  background: var(--shade); font: .82rem/1.6 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  white-space: pre-wrap; }
img { display: block; max-width: 100%; height: auto; border-radius: .4rem; background: #fff; }
@media (max-width: 34rem) { body { padding: 1.25rem .9rem 3rem; font-size: 15px; } h1 { font-size: 1.4rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; } th, td { padding-right: 1rem; }
  td { max-width: 14rem; } img { width: 36rem; max-width: none; } }
@media print { :root { --ink: #000; --faint: #444; --line: #bbb; --paper: #fff; --shade: #fff; --accent: #000;
    --good: #000; --bad: #000; color-scheme: light; }
  body { max-width: none; padding: 0; font-size: 10.5pt; } dl { border: 1px solid var(--line); }
  h2 { break-after: avoid; } tr, img { break-inside: avoid; } .wide { overflow: visible; }
  pre { max-height: none; border: 1px solid var(--line); } }
"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page under its own heading.

    Attributes:
        title: the heading.
        text: paragraphs, an empty line between them.
        header: of the table, one a column; empty where there is no table.
        rows: of the table, each as long as the header; columns of numbers are set to the right.
        marks: cells of exactly this text stand out as good or bad news; the text itself must say which.
        pictures: PNG files, shown below the table.
        commands: lines to be copied, shown last as they are; long ones wrap.
    """

    title: str
    text: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    marks: Mapping[str, Literal["good", "bad"]] = field(default_factory=dict)
    pictures: Sequence[Path] = ()
    commands: Sequence[str] = ()


def write_page(
    path: Path,
    *,
    title: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    refresh: int | None = None,
) -> None:
    """Write one HTML file that needs no other: style and pictures are inside, there is no script and no address.

    Readable on a bright or dark screen, on a phone and on paper. All text is shown as text, whatever it holds.

    Args:
        path: the page; its folder is made, an older file is replaced at once.
        title: of the page.
        facts: what must be known first, each a name and what it is.
        sections: in the order of reading.
        refresh: seconds until a browser reads the file again, for a page that is written again; None: it does not.

    Raises:
        MAEError: a picture cannot be read or the page cannot be written.
    """
    listed = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>\n" for name, value in facts)
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        + ("" if refresh is None else f'<meta http-equiv="refresh" content="{refresh:d}">\n')
        + f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{_text(title)}</h1>\n"
        + (f"<dl>\n{listed}</dl>\n" if listed else "")
        + "".join(map(_section, sections))
        + "</body>\n</html>\n"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # References for all but ASCII: the file then reads the same whatever encoding the system writes text in.
        write_whole(path, page.encode("ascii", "xmlcharrefreplace").decode("ascii"))
    except OSError as error:
        raise MAEError(f"cannot write the page {path}: {error.strerror or error}") from error


def _section(section: Section) -> str:
    paragraphs = "".join(f"<p>{_text(part)}</p>\n" for part in section.text.split("\n\n") if part.strip())
    pictures = "".join(map(_picture, section.pictures))
    table = _table(section) if section.header else ""
    commands = f"<pre>{_text(chr(10).join(section.commands))}</pre>\n" if section.commands else ""
    return f"<section>\n<h2>{_text(section.title)}</h2>\n{paragraphs}{table}{pictures}{commands}</section>\n"


def _table(section: Section) -> str:
    kinds = ["number" if numeric else "" for numeric in numeric_columns(section.header, section.rows)]

    def line(tag: str, cells: Sequence[str], marks: Mapping[str, str]) -> str:
        classes = (marks.get(cell, kind) for kind, cell in zip(kinds, cells, strict=True))
        named = (f' class="{name}"' if name else "" for name in classes)
        inner = (f"<{tag}{name}>{_text(cell)}</{tag}>" for name, cell in zip(named, cells, strict=True))
        return f"<tr>{''.join(inner)}</tr>\n"

    head, body = line("th", section.header, {}), "".join(line("td", row, section.marks) for row in section.rows)
    return f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>{body}</tbody>\n</table></div>\n'


def _picture(path: Path) -> str:
    try:
        data = b64encode(path.read_bytes()).decode("ascii")
    except OSError as error:
        raise MAEError(f"cannot read the picture {path}: {error.strerror or error}") from error
    name = _text(path.stem.replace("_", " "))
    return f'<div class="wide"><img alt="{name}" src="data:image/png;base64,{data}"></div>\n'


def _text(text: str) -> str:
    return escape(visible(text))
