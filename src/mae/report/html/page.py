"""One HTML file that shows results: text, tables and pictures, nothing fetched from anywhere."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mae.errors import MAEError
from mae.records import write_whole
from mae.report.terminal.tables import numeric_columns
from mae.text import visible

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True, kw_only=True)
class Interactive:
    """What a script makes of a section.

    Attributes:
        html: markup, put into the section as it is; all text in it that comes from outside must be escaped.
        style: rules for it, in CSS.
        script: an ES module of ours in ASCII, which runs once the page is there. No other script may run on the page.
        data_id: the id of an element whose text is `data` as JSON, for the script to read.
        data: JSON values, whatever texts they hold.
    """

    html: "Markup"
    style: str
    script: str
    data_id: str
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section of the page, under its own heading.

    Attributes:
        title: the heading.
        text: paragraphs, an empty line between them.
        header: of the table, one a column; empty if there is no table.
        rows: of the table, each as long as the header; columns of numbers are right-aligned.
        marks: cells of exactly this text stand out as good or bad news; the text itself must say which.
        pictures: PNG files, shown below the table. Their alternative text is the title, and the file's name if several.
        commands: lines to copy, shown last and unchanged; long ones wrap.
        interactive: shown below the text, where a script runs; None: no script.
    """

    title: str
    text: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    marks: Mapping[str, Literal["good", "bad"]] = field(default_factory=dict)
    pictures: Sequence[Path] = ()
    commands: Sequence[str] = ()
    interactive: Interactive | None = None


def write_page(
    path: Path,
    *,
    title: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    refresh: int | None = None,
) -> None:
    """Write one self-contained HTML file: style and pictures are inside, there is no address and nothing is fetched.

    A browser is told to run no script but those of interactive sections, known by their hashes, and to fetch nothing.
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
    pages.globals.update(numeric_columns=numeric_columns, base64_of=_base64, policy=_policy(sections))
    page = pages.get_template("page.html.j2").render(title=title, facts=facts, sections=sections, refresh=refresh)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Character references for all but ASCII: the file reads the same whatever encoding the system writes text in.
        write_whole(path, page.encode("ascii", "xmlcharrefreplace").decode("ascii"))
    except OSError as error:
        raise MAEError(f"cannot write the page {path}: {error.strerror or error}") from error


def _policy(sections: Sequence[Section]) -> str:
    """What a browser may do with the page (Content Security Policy)."""
    scripts = [section.interactive.script for section in sections if section.interactive is not None]
    hashes = [b64encode(sha256(script.encode("ascii")).digest()).decode("ascii") for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes) or "'none'"
    return (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src {allowed}; base-uri 'none'; form-action 'none'"
    )


def _printable(value: Any) -> Any:
    """Text without control characters, before it is escaped; what is markup already stays as it is."""
    return visible(value) if type(value) is str else value


def _base64(path: Path) -> Any:
    from markupsafe import Markup

    try:
        return Markup(b64encode(path.read_bytes()).decode("ascii"))
    except OSError as error:
        raise MAEError(f"cannot read the picture {path}: {error.strerror or error}") from error
