"""Names of channels that stand in a `channels.txt` beside the images."""

from pathlib import Path
from stat import S_ISREG

from mae.errors import UsageError

NAMES_FILE = "channels.txt"
"""Beside the images: one channel name a line, in order."""

MAX_NAMES_BYTES = 1 << 16
_MAX_NAMES, _MAX_NAME = 1024, 100


def names_above(folder: Path) -> tuple[str, ...] | None:
    """The names in the nearest `channels.txt`, in a folder or above it; see `names_beside`."""
    above = (folder.absolute(), *folder.absolute().parents)
    return next((names for place in above if (names := names_beside(place)) is not None), None)


def names_beside(folder: Path) -> tuple[str, ...] | None:
    """The channel names in a folder's `channels.txt`; None where there is no such file.

    Raises:
        UsageError: as `parse_names`, or the file cannot be read.
    """
    path = folder / NAMES_FILE
    try:
        if not S_ISREG(path.stat().st_mode):
            return None
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None
    try:
        with path.open("rb") as file:
            return parse_names(file.read(MAX_NAMES_BYTES + 1), name=str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def parse_names(data: bytes, *, name: str) -> tuple[str, ...]:
    """The channel names in the content of a `channels.txt`.

    Args:
        data: the content; more than `MAX_NAMES_BYTES` is refused.
        name: the file's name for messages.

    Raises:
        UsageError: not one usable, unique name a line.
    """
    lines = data.decode("utf-8-sig", "replace").splitlines() if len(data) <= MAX_NAMES_BYTES else []
    names = tuple(line.strip() for line in lines if line.strip())
    usable = all(len(each) <= _MAX_NAME and "," not in each and each.isprintable() for each in names)
    if not usable or len(set(names)) < len(names) or not 0 < len(names) <= _MAX_NAMES:
        raise UsageError(
            f"{name} does not name channels; expected one name a line, up to {_MAX_NAMES:,} different names of at most "
            f"{_MAX_NAME} printable characters without commas"
        )
    return names
