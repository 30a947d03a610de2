"""`mae demo`."""

from pathlib import Path
from typing import TYPE_CHECKING

import tyro

if TYPE_CHECKING:
    from rich.console import Console

_PLACE = Path("runs/demo")
"""Of the run whose page is shown: found again by the next `mae demo --web`."""


def run(args: list[str]) -> int:
    """Pre-train on the embedded photographs, then evaluate the features and name the pictures."""
    return tyro.cli(demo, args=args, prog="mae demo", config=(tyro.conf.FlagCreatePairsOff,))


def demo(out: Path | None = None, steps: int | None = None, web: bool = False) -> int:
    """Pre-train a small model on photographs that come with installed libraries; some minutes on two CPU cores.

    Args:
        out: run folder (default: a new one under runs/; with --web runs/demo).
        steps: optimizer steps (default: the recipe's).
        web: then draw masks on pictures in the browser, see 'mae web'; a demo that is in the run folder already is not
            trained again, and one that was stopped is resumed.
    """
    from rich.console import Console

    from mae.training.run_folder import RunFolder

    console = Console()
    if not web:
        return _train(out, steps, resume=False, console=console)

    from mae.web.page import serve_page
    from mae.web.site import check_ready

    check_ready()
    folder = RunFolder(out or _PLACE)
    if not folder.summary.is_file() and (code := _train(folder.root, steps, resume=True, console=console)):
        return code
    return serve_page(folder.root, port=0, open_browser=True, console=console)


def _train(out: Path | None, steps: int | None, *, resume: bool, console: "Console") -> int:
    """The run and what its features are worth; the exit code."""
    from mae.cli.pretrain import stopped
    from mae.evaluation.run import evaluate
    from mae.pretraining.run import run_pretraining
    from mae.recipes import recipe_config

    config = recipe_config("demo").override({"out": out} if steps is None else {"out": out, "steps": steps})
    result = run_pretraining(config, given=(), resume=resume, console=console)
    if not result.finished:
        return stopped(console, result)
    console.print("\nWhich photograph is a square cut from? The squares to be recognised were never trained on.")
    evaluate("knn", result.folder, data=config.source, data_root=config.machine.data_root, ks=[20])
    console.print(f"\nLook at {result.folder / result.summary['panel']}", soft_wrap=True, highlight=False)
    return 0
