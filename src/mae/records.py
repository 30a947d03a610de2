"""Frozen dataclasses to and from JSON, every value checked; files that are whole or absent."""

import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from difflib import get_close_matches
from math import isinf
from pathlib import Path
from stat import S_ISREG
from tempfile import mkdtemp
from typing import Any, Literal, TypeVar

from mae.errors import MAEError, UsageError

Record = TypeVar("Record")
PixelDtype = Literal["uint8", "uint16", "float32"]
"""Type of the pixels in image files, as models record it."""

_MAX_BYTES = 64 << 20
_MAX_SHOWN = 200
_MAX_NAME = 200


def to_json(record: Any) -> dict[str, Any]:
    """Plain JSON values, one key a field; paths as text, tuples as lists."""
    return json.loads(json.dumps(asdict(record), default=str))


def from_json(kind: type[Record], values: Mapping[str, Any], *, what: str) -> Record:
    """The inverse of `to_json`; fields that are not there keep their default.

    Args:
        kind: the dataclass.
        values: JSON values; tuples and paths pass too.
        what: what an entry is called in messages, such as `option`.

    Raises:
        UsageError: an unknown key (the nearest known is named), a value of the wrong kind, or one that the
            dataclass refuses.
    """
    from pydantic import TypeAdapter, ValidationError  # slow to import; printing help needs no JSON

    check_known(values, [field.name for field in fields(kind)], what=what)  # type: ignore[arg-type]
    try:
        return TypeAdapter(kind).validate_json(json_text(dict(values)), strict=True)
    except RecursionError as error:
        raise UsageError(f"{what}: nested too deeply; expected plain values") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "value_error":  # the dataclass's own words
            raise UsageError(first["msg"].removeprefix("Value error, ")) from error
        if first["type"] == "missing" and isinstance(first["loc"][-1], str):  # not so in a tuple that is too short
            raise UsageError(f"{what} {'.'.join(map(str, first['loc']))} is missing") from error
        if not first["loc"]:  # no value at fault but the text: half of a surrogate pair, nesting, a huge number
            raise UsageError(f"{what}: {first['msg'].lower()}; expected plain values") from error
        raise UsageError(f"{what} {first['loc'][0]} is {shown(first['input'])}: {first['msg'].lower()}") from error


def json_text(value: Any) -> str:
    """A value as JSON; numbers of NumPy and PyTorch are Python's own, paths are text."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """What JSON does not know: a number of NumPy's or PyTorch's as Python's own, paths and the rest as text."""
    return value.item() if getattr(value, "ndim", None) == 0 else str(value)


def read_json(path: Path, *, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: of the file.
        max_bytes: size that is read; as objects it may take twenty times as much memory.

    Raises:
        UsageError: it cannot be read, is nested too deeply or too large, or holds something else.
    """
    try:
        status = path.stat()
        is_usable = S_ISREG(status.st_mode) and status.st_size <= max_bytes  # a pipe would be waited for
        values = json.loads(path.read_text(encoding="utf-8")) if is_usable else None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    if not is_usable:
        raise UsageError(f"{path} is no file of at most {max_bytes >> 20} MiB; expected a JSON object")
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds {type(values).__name__}; expected a JSON object")
    return values


def read_record(kind: type[Record], path: Path, *, what: str) -> Record:
    """The record in a JSON file.

    Args:
        kind: the dataclass.
        path: the file.
        what: what an entry is called in messages.

    Raises:
        UsageError: see `read_json` and `from_json`; the file is named.
    """
    values = read_json(path)
    try:
        return from_json(kind, values, what=what)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write an object to a JSON file, whole or not at all."""
    write_whole(path, json.dumps(values, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all: aside, then renamed.

    Names of files stand in it as the system has them: they may hold bytes that are no text.
    """
    try:
        aside(path).write_text(text, encoding="utf-8", errors="surrogateescape")
        aside(path).replace(path)
    except (OSError, UnicodeEncodeError):  # as where the disk is full
        with suppress(OSError):
            aside(path).unlink()
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path` that becomes `path` on success; whatever ends the work, nothing else is left.

    Raises:
        MAEError: the folder, or a file in it, cannot be written.
    """
    staging = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        yield staging
        staging.chmod(0o755)
        staging.replace(path)
    except OSError as error:  # which names a file that is gone by then, or none
        remedy = "free some space, or choose another place" if error.errno == errno.ENOSPC else "choose another place"
        raise MAEError(f"{path} cannot be written: {error.strerror or error}; {remedy}") from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def check_new(path: Path) -> None:
    """Refuse to write over what a user may want to keep, or where nothing can be written.

    Asked before the work, by everything that writes a named file.

    Raises:
        UsageError: it exists, or its folder is none or cannot be written to.
    """
    if path.exists():
        raise UsageError(f"{path} exists and is not overwritten; give another name or remove it")
    if reason := _why_not_into(path.parent):
        raise UsageError(f"{path} cannot be written: {reason}; give another name")


def check_folder(path: Path, *, option: str = "--out") -> None:
    """Refuse a folder that is there and none, or cannot be made, before the work whose results it is to hold.

    Args:
        path: the folder.
        option: how the user names it.

    Raises:
        UsageError: that.
    """
    if reason := _why_not_into(path):
        raise UsageError(f"{path} cannot be made: {reason}; choose another {option}")


def _why_not_into(folder: Path) -> str | None:
    """Why nothing can be written into a folder, which may have to be made first; None where it can."""
    there = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    if not there.is_dir():
        return f"{there} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} may not be written to"


def aside(path: Path) -> Path:
    """Where `write_whole` writes a file first."""
    return path.with_name(f".{path.name}.writing")


def check_text(value: object, *, name: str) -> None:
    """Refuse a path or name that is no text, for no JSON could hold it: bytes of a file's name that are not UTF-8.

    Raises:
        UsageError: it is none.
    """
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{value}: {name} holds bytes that are not text here; expected UTF-8: rename the file or folder, reach it "
            "by a link, or, where it looks right, set PYTHONUTF8=1"
        ) from error


def check_no_data(text: str, *, name: str) -> None:
    """Refuse what names no value for missing measurements; it is text, since JSON knows no NaN.

    Raises:
        UsageError: neither a finite number nor `nan`.
    """
    try:
        is_usable = not isinf(float(text))
    except ValueError:
        is_usable = False
    if not is_usable:
        raise UsageError(f"{name} is {shown(text)}; expected a finite number, or nan")


def safe_name(text: str) -> str:
    """The text as part of a file's name: what is no letter, digit, `-`, `_` or `.` becomes `-`."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text)


def short_name(text: str, *, keep_end: bool = False) -> str:
    """`safe_name` of at most 200 bytes, the first or the last: files may have 255, and a number and a suffix follow."""
    part = slice(-_MAX_NAME, None) if keep_end else slice(_MAX_NAME)
    return safe_name(text).encode()[part].decode(errors="ignore")


def check_seed(seed: int) -> None:
    """Refuse a seed that random numbers cannot be keyed by.

    Raises:
        UsageError: it is outside `0 <= seed < 2**63`.
    """
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"--seed is {seed}; expected a whole number from 0 to 2**63 - 1")


def check_known(given: Collection[str], known: Collection[str], *, what: str) -> None:
    """Refuse names that are not known.

    Raises:
        UsageError: the first unknown name, with the nearest known ones.
    """
    for name in given:
        if name not in known:
            if not known:
                raise UsageError(f"unknown {what} {shown(name)}; there is none yet")
            near = get_close_matches(name, known, n=3, cutoff=0.5) or sorted(known)
            raise UsageError(f"unknown {what} {shown(name)}; did you mean {' or '.join(near[:3])}?")


def shown(value: object) -> str:
    """A value in a message: not all of it where it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
