"""`mae web MODEL`."""

from pathlib import Path
from typing import Annotated

import tyro

from mae.cli.early import check_use
from mae.options import shown


def run(args: list[str]) -> int:
    """Serve the page, or write it."""
    return tyro.cli(web, args=args, prog="mae web", config=(tyro.conf.FlagCreatePairsOff,))


def web(
    model: Annotated[str, tyro.conf.Positional],
    export: Annotated[Path | None, shown("serve the page until Ctrl-C", "FOLDER")] = None,
    port: int = 0,
    no_open: bool = False,
) -> int:
    """Draw a mask in the browser and see what a model makes of it; pictures never leave the browser.

    Args:
        model: a run folder, whose checkpoints the page steps through, one of its checkpoints or a .safetensors file.
        export: write the page into this new folder instead, which any server of static files can show.
        port: of 127.0.0.1; 0: a free one.
        no_open: only name the address, open no browser.
    """
    check_use(model)

    from rich.console import Console

    from mae.records import check_new
    from mae.web.page import serve_page, write_page

    console = Console()
    if export is None:
        return serve_page(Path(model), port=port, open_browser=not no_open, console=console)
    check_new(export)
    write_page(Path(model), export, console)
    return 0
