"""The files in the folder of a run; what it lacks is told without PyTorch, which nothing at the top here imports."""

import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from mae.credentials import shown
from mae.errors import MAEError, UsageError
from mae.records import aside, check_folder, read_json, write_json
from mae.training.lock import HOLDER, LOCK
from mae.training.state import MANIFEST, MODEL

_EXPECTED = "expected a run folder, one of its checkpoints or a .safetensors file"
_LOOKED_AT = 100
_REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)  # a path has one of the slashes


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
    def tracking(self) -> Path:
        """Which run of W&B and of MLflow this one is."""
        return self.root / "tracking.json"

    @property
    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.is_file()

    @property
    def resume_command(self) -> str:
        """What a user types to go on with the run."""
        return f"mae pretrain --resume --out {shlex.quote(str(self.root))}"

    def check_new(self) -> None:
        """Make sure that a new run can begin here.

        Raises:
            UsageError: there is something in the folder already, it is a file, a remote address, or cannot be made.
        """
        check_local(self.root)
        if self.holds_run:
            raise UsageError(
                f"{self.root} holds another run; go on with it by '{self.resume_command}', or choose another --out"
            )
        if os.path.lexists(self.root) and not self._is_free():
            raise UsageError(f"{self.root} is there already and is not an empty folder; choose another --out")
        check_folder(self.root)

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

    def record_source(self, source: str) -> None:
        """Let the configuration say where the run's images are now; `data.json` keeps where they were at first."""
        config = read_json(self.config)
        if config.get("source") != source:
            write_json(self.config, {**config, "source": source})


def check_resumable(folder: RunFolder | None) -> RunFolder:
    """The folder of a run to go on with.

    Raises:
        UsageError: none is named, or it holds no run.
    """
    if folder is None:
        raise UsageError("--resume needs --out: the folder of the run to go on with")
    if not folder.holds_run:
        check_local(folder.root)
        raise UsageError(f"{folder.root} holds no run to go on with (no {folder.config.name} there)")
    return folder


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
    check_model(path)
    if path.is_file():
        return path

    from mae.training.checkpoint import check_weights, tell, usable_checkpoint

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
    what = "a run without a checkpoint yet" if run.holds_run else "a folder without a model"
    raise UsageError(f"{path} is {what}; {_EXPECTED}")


def check_local(path: Path) -> None:
    """Refuse a remote address where a run or a model should stand.

    Raises:
        UsageError: that.
    """
    if found := _REMOTE.fullmatch(path.as_posix()):
        place = shown(f"{found[1]}://{found[2]}")
        raise UsageError(
            f"{place} is a remote address, and runs and models are read and written on this machine alone; name a "
            "local path, and copy them from there or to there"
        )


def check_model(path: Path) -> None:
    """Refuse what is surely no model: nothing, or images, which stand after the model in every command.

    Raises:
        UsageError: that.
    """
    if not path.exists():
        check_local(path)
        near = get_close_matches(path.name, [entry.name for entry in siblings(path)], n=1, cutoff=0.6)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise UsageError(f"{path} is not there; {_EXPECTED}{hint}")
    what = (
        "an image" if path.is_file() and _is_image(path.name) else "a folder of images" if _holds_images(path) else ""
    )
    if what:
        raise UsageError(f"{path} is {what}, and the model comes first; {_EXPECTED}, and the images after it")


def siblings(path: Path) -> list[Path]:
    """What is in the folder that a path would be in."""
    return sorted(path.parent.iterdir()) if path.parent.is_dir() else []


def _holds_images(folder: Path) -> bool:
    """Whether a folder, or the first folder in it, begins with images and is none that holds a model."""
    if not folder.is_dir() or any(
        (folder / name).exists() for name in ("config.json", "checkpoints", "evaluation", MODEL)
    ):
        return False
    entries = sorted(folder.iterdir())[:_LOOKED_AT]
    inside = [entry for entry in entries if entry.is_dir()][:1]
    names = [entry.name for entry in (*entries, *(each for first in inside for each in islice(first.iterdir(), 1)))]
    return any(map(_is_image, names))


def _is_image(name: str) -> bool:
    return (guess_type(name)[0] or "").startswith("image/")
