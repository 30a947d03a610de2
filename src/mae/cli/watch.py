"""`mae watch RUN`."""

from pathlib import Path
from typing import Annotated

import tyro

from mae.options import shown


def run(args: list[str]) -> int:
    """Show the state of a run until it finishes."""
    return tyro.cli(watch, args=args, prog="mae watch")


def watch(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    page: Annotated[Path | None, shown("none", "FILE")] = None,
    every: Annotated[int, tyro.conf.arg(metavar="SECONDS")] = 10,
    once: bool = False,
) -> int:
    """Show the state of a run until it finishes or Ctrl-C is pressed; its folder is only read.

    Args:
        run: the run's folder, or that of a training with labels in it.
        page: also write a self-contained HTML page with curves and pictures, which reloads by itself.
        every: seconds between updates of the page.
        once: show the state once and exit; the default if the output is not a terminal and there is no page.
    """
    from rich.console import Console

    from mae.pretraining.watch import status as watching

    watching.watch(run, page=page, every=every, once=once, console=Console())
    return 0
