"""`mae demo`."""

from pathlib import Path

import tyro


def run(args: list[str]) -> int:
    """Pre-train on the embedded photographs, then evaluate the features and name the pictures."""
    return tyro.cli(demo, args=args, prog="mae demo")


def demo(out: Path | None = None, steps: int | None = None) -> int:
    """Pre-train a small model on photographs that come with installed libraries; some minutes on two CPU cores.

    Args:
        out: run folder (default: a new one under runs/).
        steps: optimizer steps (default: the recipe's).
    """
    from rich.console import Console

    from mae.cli.pretrain import stopped
    from mae.evaluation.run import evaluate
    from mae.pretraining.run import run_pretraining
    from mae.recipes import recipe_config

    console = Console()
    config = recipe_config("demo").override({"out": out} if steps is None else {"out": out, "steps": steps})
    result = run_pretraining(config, given=(), resume=False, console=console)
    if not result.finished:
        return stopped(console, result)
    console.print("\nWhich photograph is a square cut from? The squares to be recognised were never trained on.")
    evaluate("knn", result.folder, data=config.source, data_root=config.machine.data_root, ks=[20])
    console.print(f"\nLook at {result.folder / result.summary['panel']}", soft_wrap=True, highlight=False)
    return 0
