"""What a source may be called, told without opening it: nothing here needs PyTorch."""

import difflib
from contextlib import suppress
from pathlib import Path

from mae.data.remote.urls import MANIFEST, is_url
from mae.errors import UsageError

KNOWN = ("cifar10", "stl10", "imagenet", "builtin:photos", "builtin:digits")
"""Sets known by name."""

HUGGING_FACE = "hf:"
"""What names of Hugging Face sets begin with."""


def path_of(spec: str, data_root: Path) -> Path | None:
    """Where the files of a source are; None where it is none of files here."""
    if spec.startswith(HUGGING_FACE) or is_url(spec) or (spec in KNOWN and spec != "imagenet"):
        return None
    return data_root / "imagenet" if spec == "imagenet" else Path(spec)


def check_exists(spec: str, *, data_root: Path) -> None:
    """Refuse a source of files where there are none; what else may be wrong is found when it is opened.

    Raises:
        UsageError: nothing of that name; names near it are given.
    """
    path = path_of(spec, data_root)
    try:
        missing = path is not None and not path.exists() and "{" not in spec  # braces stand for several tars
    except OSError as error:  # a name that is too long
        raise UsageError(f"{spec} cannot be opened: {error.strerror or error}") from error
    if missing:
        assert path is not None
        raise UsageError(_missing(spec, path))


def check_apart(folder: Path, source: str) -> None:
    """Refuse a folder of results inside images: what is drawn there would be taken for images, and change the set.

    Raises:
        UsageError: it is inside.
    """
    images = Path(source)
    if (images / "train").is_dir():  # beside it are the other parts, or anything
        images = images / "train"
    if images.is_dir() and not (images / MANIFEST).is_file() and folder.resolve().is_relative_to(images.resolve()):
        raise UsageError(
            f"{folder} is inside {images}, where the pictures written to it would be taken for images; choose an --out "
            "that is not"
        )


def _missing(spec: str, path: Path) -> str:
    if spec == "imagenet":
        return f"imagenet is expected in {path}, which does not exist; put its train/ folder there"
    if path.is_symlink():
        return f"{spec} is a broken symbolic link; correct its target"
    neighbours: list[str] = []
    with suppress(OSError, ValueError):  # no folder, or one that may be entered but not listed
        neighbours = [str(path.parent / entry.name) for entry in path.parent.iterdir()]
    near = difflib.get_close_matches(spec, [*KNOWN, *sorted(neighbours)], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"expected a path or one of {', '.join(KNOWN)}"
    return f"{spec} does not exist; {hint}"
