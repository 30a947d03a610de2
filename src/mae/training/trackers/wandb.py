"""Weights & Biases."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from mae.records import safe_name
from mae.training.log import LogRow
from mae.training.trackers.rows import numbers_of

_KILLED = 255  # W&B's own exit code of a run that was stopped before its end


class WandB:
    """Writes each number of a row into a run of W&B, with samples seen as its axis.

    The project is that of `WANDB_PROJECT`, else called as the folder that the run's folder is in; the run is called
    as the run's folder, in which W&B keeps its files. The command is not recorded: a URL in it may hold a password.

    Args:
        folder: the run's folder.
        run_id: the run to continue; None: a new one.
        config: the run's configuration.
        start_step: optimizer steps done before this part of the run.
        total_steps: of the whole run.

    Attributes:
        run_id: of the run that is written.

    Raises:
        wandb.Error: W&B cannot be reached, or knows no user.
    """

    def __init__(
        self, folder: Path, *, run_id: str | None, config: Mapping[str, Any], start_step: int, total_steps: int
    ) -> None:
        import wandb

        self.run_id = run_id or uuid4().hex[:12]
        self._step, self._total_steps = start_step, total_steps
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or safe_name(folder.resolve().parent.name) or None,
            name=folder.resolve().name,
            id=self.run_id,
            resume="allow",
            reinit="create_new",  # a run that a notebook has open stays as it is
            dir=folder,
            config=dict(config),
            settings=wandb.Settings(console="off", x_disable_meta=True),
        )
        self._run.define_metric("*", step_metric="samples")

    def log(self, row: LogRow) -> None:
        """Write each number of a row, and a warning into the run's summary."""
        self._step = row["step"]
        if "warning" in row:
            self._run.summary[f"warning/{row['warning']['name']}"] = row["warning"]["text"]
            return
        self._run.log(numbers_of(row), step=row["step"])

    def close(self) -> None:
        """Send what is left; a run that did not come to its last step counts as killed."""
        self._run.finish(exit_code=0 if self._step >= self._total_steps else _KILLED)
