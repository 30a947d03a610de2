"""`mae watch RUN`."""

from pathlib import Path
from typing import Annotated

import tyro


def run(args: list[str]) -> int:
    """Show the state of a run until it is over."""
    return tyro.cli(watch, args=args, prog="mae watch")


def watch(
    run: Annotated[Path, tyro.conf.Positional],
    page: Path | None = None,
    every: int = 10,
    once: bool = False,
) -> int:
    """Show the state of a run, live or over, until it is finished or Ctrl-C is pressed; nothing in its folder changes.

    Args:
        run: the run's folder.
        page: an HTML file to write as well, with curves and pictures; it needs no other file and shows the newest
            state by itself.
        every: seconds between two versions of the page.
        once: show the state once; so it is anyway where the output is no terminal and there is no page.
    """
    from rich.console import Console

    from mae.pretraining import watch as watching

    watching.watch(run, page=page, every=every, once=once, console=Console())
    return 0
