"""What readers of labels give: the images of each part and what is written of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
from jaxtyping import Int64

from mae.data.annotations.objects import Objects
from mae.data.sources.folder import FileSource, count_of
from mae.errors import MAEError, UsageError

MOST_PIXELS = 1e7
"""Beyond any image: coordinates that are further off are no pixels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WrittenPart:
    """The images of a part.

    Attributes:
        source: the images.
        objects: of each; their class is -1 where it has no name.
        sizes: width and height of each image as told; 0 where nothing tells them.
    """

    source: FileSource
    objects: Sequence[Objects]
    sizes: Int64[np.ndarray, "n 2"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Written:
    """Labels as their files have them.

    Attributes:
        kind: what the format is called.
        parts: `train`, and `test` where there is one.
        class_names: in the order of their numbers.
        normalised: whether boxes and polygons are in shares of the image's sides.
        remarks: what a reader must know beside it, as how many images were left out.
    """

    kind: str
    parts: dict[str, WrittenPart]
    class_names: tuple[str, ...]
    normalised: bool = False
    remarks: tuple[str, ...] = ()


def check_any(source: FileSource | None, *, listed: int, part: str, name: str) -> FileSource:
    """The source that there is, of so many images listed.

    Raises:
        UsageError: there is none.
    """
    if not listed:
        raise UsageError(f"{name}: the {part} part holds no image; expected one or more")
    if source is None:
        raise UsageError(f"{name}: none of the labelled images of the {part} part is there; check the images' folder")
    return source


def left_out(count: int, what: str, *, of: str = "image") -> tuple[str, ...]:
    """A remark on images, or others, that are left out, if there are any."""
    return (f"{count_of(count, of)} {what} left out",) if count else ()


def check_inside(path: str, *, name: str) -> str:
    """A path in a labels' file, relative to the folder; refused where it leads out of it.

    Raises:
        MAEError: an absolute path, an address, one with `..`, or one that no file can have.
    """
    plain, elsewhere = PurePosixPath(path.replace("\\", "/")), PureWindowsPath(path).drive or "://" in path
    if not plain.parts or plain.is_absolute() or ".." in plain.parts or elsewhere or "\0" in path:
        raise MAEError(f"{name} names the image {path!r:.200}; expected a path inside the folder")
    return str(plain)


def read_text(path: Path, *, max_bytes: int) -> str:
    """A small text file.

    Raises:
        MAEError: it cannot be read, is too large, or no text.
    """
    try:
        if path.is_file() and path.stat().st_size <= max_bytes:
            return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise MAEError(f"{path} cannot be read as text: {error}") from error
    raise MAEError(f"{path} is no file of at most {max_bytes >> 10:,} KiB")
