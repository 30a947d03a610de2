"""The kinds of error a user can meet; the command line turns each into one line and an exit code.

Every message names the file or option, what was found, what was expected and what to do.
"""


class MAEError(Exception):
    """Something failed while working: unreadable data, a full disk, a loss that is not finite (exit code 1).

    Attributes:
        told_by_main: whether the main process of several tells the user the same.
    """

    told_by_main = False


class UsageError(MAEError, ValueError):
    """The request itself cannot be carried out as asked: a wrong option, name or size (exit code 2)."""


class Stopped(KeyboardInterrupt):
    """A signal stopped a training, which is saved and goes on when asked for again (exit code 130 or 75).

    Attributes:
        by: the signal's number; SIGTERM stands for every one but Ctrl-C's SIGINT.
    """

    def __init__(self, text: str, *, by: int) -> None:
        super().__init__(text)
        self.by = by
