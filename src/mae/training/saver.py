"""When a checkpoint is due, and writing it while training continues."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from torch import nn

from mae.errors import MAEError
from mae.training import checkpoint
from mae.training.checkpoint import Snapshot, with_weights
from mae.training.distributed import World
from mae.training.resilience.collective_status import StepStatus
from mae.training.settings import CheckpointSpec, TrainingSettings
from mae.training.state import TrainingState

SECONDS_BETWEEN_SAVES = 600.0
_KEPT_CHECKPOINTS = 2
_TIMEOUT_SECONDS = 1800.0


class BackgroundWriter:
    """Runs one function at a time in a thread; keeps its failure until `wait` or `begin` raises it.

    Args:
        what: what it writes, for messages.
        timeout: seconds after which the function counts as hanging.
    """

    def __init__(self, what: str, *, timeout: float = _TIMEOUT_SECONDS) -> None:
        self._what, self._timeout = what, timeout
        self._failure: BaseException | None = None
        self._finished = threading.Event()
        self._finished.set()

    @property
    def busy(self) -> bool:
        """Whether a function is running."""
        return not self._finished.is_set()

    @property
    def failed(self) -> bool:
        """Whether the last function failed; `wait` raises its error."""
        return self._failure is not None

    def begin(self, write: Callable[[], None]) -> None:
        """Start a function, once the last one has ended well.

        Raises:
            MAEError: the last one failed, or hangs.
        """
        self.wait()
        self._finished.clear()

        def run() -> None:
            try:
                write()
            except BaseException as error:  # whatever it is, it must end the run and not only this thread
                self._failure = error
            finally:
                self._finished.set()

        # A daemon: a file system that hangs must not keep the process from ending.
        threading.Thread(target=run, name=self._what, daemon=True).start()

    def wait(self) -> None:
        """Wait until no function is running.

        Raises:
            MAEError: the last one failed, or hangs.
        """
        if not self._finished.wait(self._timeout):
            raise MAEError(
                f"a {self._what} was not written within {self._timeout:g} s: the file system hangs; repair it, then "
                "resume from the previous checkpoint with --resume"
            )
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


class CheckpointSaver:
    """Decides when a checkpoint is due and writes it beside the training, one at a time.

    Every process calls the same methods at the same steps; the main one writes.

    Args:
        spec: where checkpoints go and what they hold.
        settings: of the training.
        world: the processes.
    """

    def __init__(self, spec: CheckpointSpec, *, settings: TrainingSettings, world: World) -> None:
        self._spec, self._settings, self._world = spec, settings, world
        self._writer = BackgroundWriter("checkpoint")
        self._saved_at = time.monotonic()
        self._pending: int | None = None  # the step of the checkpoint that is being written
        self.saved_step = -1

    def status(self, *, step: int, stop: int) -> StepStatus:
        """What this process reports to the others after a step."""
        by_time = self._settings.checkpoint_every is None
        return StepStatus(
            stop=stop,
            save_due=by_time and time.monotonic() - self._saved_at > SECONDS_BETWEEN_SAVES,
            saved=-1 if self._writer.busy else step,
            failed=self._writer.failed,
        )

    def is_due(self, step: int, status: StepStatus) -> bool:
        """Whether the settings name this step, or it is time.

        Args:
            step: optimizer steps done.
            status: of all processes; where it is read a step late, the first one after a save is from before it.
        """
        every = self._settings.checkpoint_every
        by_time = status.save_due and step > self.saved_step + 1
        return by_time or self._is_kept(step) or (every is not None and step % every == 0)

    def _is_kept(self, step: int) -> bool:
        every = self._settings.checkpoint_keep_every
        return every is not None and step % every == 0

    def is_written(self, status: StepStatus) -> bool:
        """Whether every process has written its part of the pending checkpoint, or one failed; then call `finish`."""
        return self._pending is not None and (status.failed or status.saved >= self._pending)

    def begin(self, snapshot: Snapshot, *, step: int, module: nn.Module, state: Mapping[str, object]) -> None:
        """Start writing a checkpoint.

        Args:
            snapshot: what it holds.
            step: optimizer steps done.
            module: the whole module, for the metadata; the main process's alone is used.
            state: the fields of `TrainingState`.
        """
        if self._world.is_main:
            seen = with_weights(module, snapshot.weights)
            made = TrainingState(**state)  # type: ignore[arg-type]
            self._writer.begin(partial(self._stage, snapshot, seen, made, self._is_kept(step)))
        self._pending = self.saved_step = step
        self._saved_at = time.monotonic()

    def _stage(self, snapshot: Snapshot, module: nn.Module, state: TrainingState, kept: bool) -> None:
        checkpoint.stage(self._spec.folder, snapshot, state=state, metadata=self._spec.metadata(module), kept=kept)

    def finish(self) -> None:
        """Commit the pending checkpoint, once it is written, and delete old ones."""
        if self._pending is not None:
            step, self._pending = self._pending, None
            self._world.from_main(partial(self._commit, step))

    def _commit(self, step: int) -> None:
        self._writer.wait()
        checkpoint.commit(self._spec.folder, step)
        checkpoint.prune(self._spec.folder, keep=_KEPT_CHECKPOINTS, step=step)

    def rescue(self) -> None:
        """Commit the pending checkpoint of a run that fails: it is whole nevertheless."""
        if self._pending is not None and self._world.is_main:
            with suppress(Exception):  # the run's own error is reported, and this may be it
                self._commit(self._pending)
