"""The contents of the site are the list of pages in docs/README.md, and index.html leads to the first page."""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

LIST = Path("docs/README.md")
PAGE = re.compile(r"\[([^\]]+)\]\(([^)#:]+)\.md\)")


def groups(text: str) -> dict[str, list[tuple[str, str]]]:
    """Title and path without `.md` of the pages below each heading, relative to the list's folder."""
    sections = re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", text, flags=re.MULTILINE)
    return {heading: PAGE.findall(section) for heading, section in sections}


def toctrees(root: Path) -> str:
    """A hidden table of contents for each group."""
    blocks = [f"```{{toctree}}\n:hidden:\nAll pages </{LIST.with_suffix('')}>\n```"]
    for heading, pages in groups((root / LIST).read_text()).items():
        lines = [f"{title[0].upper()}{title[1:]} </{LIST.parent / path}>" for title, path in pages]
        blocks.append("\n".join(["```{toctree}", ":hidden:", f":caption: {heading}", *lines, "```"]))
    return "\n\n".join(blocks)


def _add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == app.config.root_doc:
        source[0] += "\n\n" + toctrees(Path(app.srcdir))


def _tell_language(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object) -> None:
    """A screen reader must know in which language to read a page."""
    if pagename.startswith("docs/vi/"):
        context["language"] = "vi"


def _lead_to_first_page(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        page = f"{app.config.root_doc}.html"
        text = f'<!doctype html><meta charset="utf-8"><title>{app.config.project}</title>'
        text += f'<meta http-equiv="refresh" content="0; url={page}"><a href="{page}">{app.config.project}</a>\n'
        (Path(app.outdir) / "index.html").write_text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _add_contents)
    app.connect("html-page-context", _tell_language)
    app.connect("build-finished", _lead_to_first_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
