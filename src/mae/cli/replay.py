"""`mae replay RUN`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from mae.config import Device, RunConfig

_MOST_NAMED = 5


def run(args: list[str]) -> int:
    """Compute a step again that ended a run, and tell what breaks."""
    return tyro.cli(replay_step, args=args, prog="mae replay")


def replay_step(path: Annotated[Path, tyro.conf.Positional], device: Device = "auto") -> int:
    """Compute the step again that ended a run because its loss was not finite, and tell what breaks.

    Args:
        path: the run's folder, or one under its failures/.
        device: where to compute.
    """
    from rich.console import Console

    from mae.pretraining.derived import images_per_step
    from mae.pretraining.watch.replay_step import replay
    from mae.report.terminal.console import show_table
    from mae.training.run_folder import RunFolder

    found = replay(path, device=device)
    rows = [("loss", f"{found.loss:.6g}"), ("gradient norm", f"{found.grad_norm:.6g}")]
    if found.reproduced:
        run = next(run for run in (RunFolder(path), RunFolder(path.absolute().parent.parent)) if run.holds_run)
        rows += [
            ("images", _in_words(found.broken_images, of=images_per_step(RunConfig.read(run.config)))),
            ("breaks first at", found.broken_at or "nowhere in the model; in the loss or the gradient"),
            ("gradients", f"{len(found.broken_gradients)} of the parameters have one that is not finite"),
        ]
    outcome = "breaks again" if found.reproduced else "is finite this time"
    show_table(Console(), f"Step {found.step + 1} {outcome}", rows)
    return 0


def _in_words(broken: Sequence[str], *, of: int | None) -> str:
    """Which images break by themselves; where all do, it is none of them."""
    if not broken:
        return "each is finite by itself"
    if len(broken) == of and of > 1:
        return f"all {of} of the batch: the weights, not one image"
    more = len(broken) - _MOST_NAMED
    return "\n".join([*broken[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])
