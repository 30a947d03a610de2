"""Writing checkpoints while training goes on."""

import threading
from collections.abc import Callable

from mae.errors import MAEError

_PATIENCE_SECONDS = 1800.0


class BackgroundWriter:
    """Does one thing at a time beside the training; what goes wrong there is kept until it is asked for.

    Args:
        patience: seconds after which what is under way counts as hanging.
    """

    def __init__(self, *, patience: float = _PATIENCE_SECONDS) -> None:
        self._patience = patience
        self._failure: BaseException | None = None
        self._finished = threading.Event()
        self._finished.set()

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return not self._finished.is_set()

    @property
    def failed(self) -> bool:
        """Whether the last thing went wrong; `wait` raises it."""
        return self._failure is not None

    def begin(self, write: Callable[[], None]) -> None:
        """Start something, once what was under way has ended well.

        Raises:
            MAEError: that failed, or hangs.
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
        threading.Thread(target=run, name="checkpoint", daemon=True).start()

    def wait(self) -> None:
        """Until nothing is under way.

        Raises:
            MAEError: it failed, or hangs.
        """
        if not self._finished.wait(self._patience):
            raise MAEError(
                f"a checkpoint has not been written within {self._patience:g} s: the file system hangs; see to it, and "
                "go on with --resume from the checkpoint before"
            )
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
