"""`mae demo`."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from mae.errors import UsageError
from mae.options import shown

if TYPE_CHECKING:
    from rich.console import Console

    from mae.training.run_folder import RunFolder

_PLACE = Path("runs/demo")
"""Of the run whose page is shown: found again by the next `mae demo --web`."""


def run(args: list[str]) -> int:
    """Pre-train on the embedded photographs, then evaluate the features and name the pictures."""
    return tyro.cli(demo, args=args, prog="mae demo", config=(tyro.conf.FlagCreatePairsOff,))


def demo(
    out: Annotated[Path | None, shown("a new one under runs/; with --web runs/demo", "DIR")] = None,
    steps: Annotated[int | None, shown("the recipe's", "N")] = None,
    web: bool = False,
) -> int:
    """Pre-train a small model on photographs that come with installed libraries; some minutes on two CPU cores.

    Args:
        out: run folder.
        steps: optimizer steps.
        web: then draw masks on pictures in the browser, see 'mae web'; a demo that is in the run folder already is not
            trained again, and one that was stopped is resumed. Another run there is refused.
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
    if folder.holds_run:
        _check_own(folder, steps)
    if not folder.summary.is_file() and (code := _train(folder.root, steps, resume=True, console=console)):
        return code
    return serve_page(folder.root, port=0, open_browser=True, console=console)


def _check_own(folder: "RunFolder", steps: int | None) -> None:
    """Refuse to go on with, or to show as the demo, a run that is another.

    Raises:
        UsageError: that, or a demo of other steps than are asked for.
    """
    from mae.config import RunConfig, is_changeable
    from mae.models.presets import model_config
    from mae.recipes import recipe_config

    recipe, stored = recipe_config("demo"), RunConfig.read(folder.config).flat()
    assert isinstance(recipe.method, Mapping) and recipe.model is not None
    wanted = {**recipe.flat(), **model_config(recipe.model, **recipe.method).flat()}
    for name, value in wanted.items():  # a run decides by itself what its recipe leaves open
        if name == "steps" or value in (None, "auto") or is_changeable(name) or stored.get(name) == value:
            continue
        raise UsageError(
            f"{folder.root} holds another run than the demo ({name} is {stored.get(name)!r}, the demo's is {value!r}); "
            f"show it by 'mae web {shlex.quote(str(folder.root))}', or give the demo another --out"
        )
    if steps not in (None, stored["steps"]):
        raise UsageError(
            f"{folder.root} holds a demo of {stored['steps']} steps, and --steps asks for {steps}; leave --steps out, "
            "or give another --out"
        )


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
    panel = result.folder / result.summary["panel"]
    console.print(f"\nLook at {panel}", soft_wrap=True, highlight=False, markup=False)
    return 0
