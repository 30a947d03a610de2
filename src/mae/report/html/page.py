"""One HTML file that shows results: text, tables and pictures, nothing fetched from anywhere."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mae.errors import MAEError
from mae.records import write_whole
from mae.report.terminal.tables import numeric_columns
from mae.text import visible


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section of the page, under its own heading.

    Attributes:
        title: the heading.
        text: paragraphs, an empty line between them.
        header: of the table, one a column; empty if there is no table.
        rows: of the table, each as long as the header; columns of numbers are right-aligned.
        marks: cells of exactly this text stand out as good or bad news; the text itself must say which.
        pictures: PNG files, shown below the table.
        commands: lines to copy, shown last and unchanged; long ones wrap.
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
    """Write one self-contained HTML file: style and pictures are inside, there is no script and no address.

    Readable on a bright or dark screen, on a phone and on paper. All text is escaped, whatever it holds.

    Args:
        path: the page; its folder is created, an older file is replaced at once.
        title: of the page.
        facts: what the reader must know first, as pairs of name and value.
        sections: in the order of reading.
        refresh: seconds between reloads by the browser, for a page that is rewritten; None: never.

    Raises:
        MAEError: a picture cannot be read or the page cannot be written.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here: imported only where a page is written

    pages = Environment(
        loader=PackageLoader("mae.report.html", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.globals.update(numeric_columns=numeric_columns, base64_of=_base64)
    page = pages.get_template("page.html.j2").render(title=title, facts=facts, sections=sections, refresh=refresh)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Character references for all but ASCII: the file reads the same whatever encoding the system writes text in.
        write_whole(path, page.encode("ascii", "xmlcharrefreplace").decode("ascii"))
    except OSError as error:
        raise MAEError(f"cannot write the page {path}: {error.strerror or error}") from error


def _printable(value: Any) -> Any:
    """Text without control characters, before it is escaped; what is markup already stays as it is."""
    return visible(value) if type(value) is str else value


def _base64(path: Path) -> Any:
    from markupsafe import Markup

    try:
        return Markup(b64encode(path.read_bytes()).decode("ascii"))
    except OSError as error:
        raise MAEError(f"cannot read the picture {path}: {error.strerror or error}") from error
