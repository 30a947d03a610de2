"""The files in the folder of a run."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mae.errors import MAEError, UsageError
from mae.records import aside, write_json
from mae.training.checkpoint import check_weights, tell, usable_checkpoint
from mae.training.lock import HOLDER, LOCK
from mae.training.state import MANIFEST, MODEL


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run.

    Attributes:
        root: the run's folder.
    """

    root: Path

    @property
    def config(self) -> Path:
        """The run's configuration, `RunConfig` as JSON."""
        return self.root / "config.json"

    @property
    def data(self) -> Path:
        """Facts of the source: count, fingerprint, statistics, unreadable files."""
        return self.root / "data.json"

    @property
    def metrics(self) -> Path:
        """The log of the run, one JSON object per line."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The summary of a finished run."""
        return self.root / "summary.json"

    @property
    def ended(self) -> Path:
        """How the run ended; not there while it goes on, nor after it was killed."""
        return self.root / "ended.json"

    @property
    def summary_page(self) -> Path:
        """The run on one page, written when it ends."""
        return self.root / "summary.html"

    @property
    def checkpoints(self) -> Path:
        """Committed checkpoints, `step-…/`."""
        return self.root / "checkpoints"

    @property
    def panels(self) -> Path:
        """Pictures of reconstructions."""
        return self.root / "panels"

    def failure(self, step: int) -> Path:
        """The captured step after `step` steps, which ended the run."""
        return self.root / "failures" / f"step-{step + 1:08d}"

    def panel(self, step: int) -> Path:
        """The picture drawn after a step."""
        return self.panels / f"step-{step:08d}.png"

    @property
    def curve(self) -> Path:
        """The loss over the run, drawn at its end."""
        return self.root / "loss.png"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.is_file()

    def check_new(self) -> None:
        """Make sure that a new run can begin here.

        Raises:
            UsageError: there is something in the folder already, it is a file, or it cannot be made.
        """
        if self.holds_run:
            raise UsageError(f"{self.root} holds another run; go on with it by --resume, or choose another --out")
        if os.path.lexists(self.root) and not self._is_free():
            raise UsageError(f"{self.root} is there already and is not an empty folder; choose another --out")
        there = next(path for path in (self.root, *self.root.absolute().parents) if os.path.lexists(path))
        if not there.is_dir():
            raise UsageError(f"{self.root} cannot be made: {there} is not a folder; choose another --out")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UsageError(f"{self.root} cannot be made: {there} may not be written to; choose another --out")

    def _is_free(self) -> bool:
        """Whether the folder is empty, or holds what a start leaves that was killed before its run began."""
        if not self.root.is_dir():
            return False
        locks = {self.root / LOCK, self.root / HOLDER}
        leftovers = {self.panels, self.data, aside(self.data), aside(self.config), *locks}
        return leftovers.issuperset(self.root.iterdir()) and not (self.panels.is_dir() and any(self.panels.iterdir()))

    def begin(self, config: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Make the folder of a new run; `config.json` comes last, and makes it hold a run.

        Raises:
            UsageError: see `check_new`.
        """
        self.check_new()
        self.panels.mkdir(parents=True, exist_ok=True)
        write_json(self.data, data)
        write_json(self.config, config)


def new_run_folder(parent: Path, name: str) -> RunFolder:
    """A folder that does not exist yet: `parent/name`, `parent/name-2` and so on."""
    number, root = 1, parent / name
    while os.path.lexists(root):
        number += 1
        root = parent / f"{name}-{number}"
    return RunFolder(root)


def claim_run_folder(parent: Path, name: str) -> RunFolder:
    """Make the folder that `new_run_folder` names; two processes that do so at once get different ones."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = new_run_folder(parent, name)
        with suppress(FileExistsError):
            folder.root.mkdir()
            return folder


def find_weights(path: Path) -> Path:
    """The weights' file of a run folder, a checkpoint, or the file itself.

    Of a run it is that of the newest checkpoint that verifies; the log is told where a newer one is damaged.

    Raises:
        UsageError: nothing of that kind is there.
        MAEError: a run, and every checkpoint of it is damaged; a checkpoint, and its weights are.
    """
    if path.is_file():
        return path
    if (path / MODEL).is_file():
        if (path / MANIFEST).is_file() and (wrong := check_weights(path)):
            raise MAEError(f"{wrong}; put the file back from a copy, or take another checkpoint")
        return path / MODEL
    run = RunFolder(path)
    newest, note = usable_checkpoint(run.checkpoints)
    if note:
        tell(note)
    if newest is not None:
        return newest / MODEL
    without = "a run without a checkpoint yet" if run.holds_run else "a folder without a model"
    what = without if path.is_dir() else "not there"
    raise UsageError(f"{path} is {what}; expected a run folder, one of its checkpoints or a .safetensors file")
