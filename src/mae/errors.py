"""The two kinds of error a user can meet; the command line turns each into one line and an exit code.

Every message names the file or option, what was found, what was expected and what to do.
"""


class MAEError(Exception):
    """Something failed while working: unreadable data, a full disk, a loss that is not finite (exit code 1)."""


class UsageError(MAEError, ValueError):
    """The request itself cannot be carried out as asked: a wrong option, name or size (exit code 2)."""
