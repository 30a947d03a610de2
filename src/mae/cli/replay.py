"""`mae replay RUN`."""

from pathlib import Path
from typing import Annotated

import tyro

from mae.config import Device


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

    from mae.pretraining.replay import replay
    from mae.report.console import show_table

    found = replay(path, device=device)
    rows = [("loss", f"{found.loss:.6g}"), ("gradient norm", f"{found.grad_norm:.6g}")]
    if found.reproduced:
        rows += [
            ("images", "\n".join(found.broken_images) or "each is finite by itself"),
            ("breaks first at", found.broken_at or "nowhere in the model; in the loss or the gradient"),
            ("gradients", f"{len(found.broken_gradients)} of the parameters have one that is not finite"),
        ]
    outcome = "breaks again" if found.reproduced else "is finite this time"
    show_table(Console(), f"Step {found.step + 1} {outcome}", rows)
    return 0
