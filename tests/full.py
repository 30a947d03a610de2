"""A disk that is really full; the fixture `disk` makes one."""

import os
from contextlib import suppress
from pathlib import Path


def fill(disk: Path, *, leave: int) -> Path:
    """Take all but so many bytes."""
    wall = disk / "wall"
    with wall.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(wall, wall.stat().st_size - leave)
    return wall
