"""Single files behind https addresses, of which little may be known before they come; kept in the user's cache."""

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from filelock import FileLock

from mae.credentials import shown
from mae.data.cache import Cache, Draft, WrongContent, note, noted
from mae.data.remote import fetch
from mae.data.storage import StoredFile
from mae.data.transport import Trouble, told_length
from mae.errors import MAEError

PROTOCOL = "https://"

_NOTES = "downloads"
_CHUNK = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Announced:
    """What is said of a file before it comes.

    Attributes:
        name: for messages.
        url: where it lies.
        most_bytes: it has no more.
        num_bytes: it has as many; None: not known.
        sha256: the first hexadecimal digits of its checksum, as many as are known, maybe none.
        md5: likewise.
        otherwise: what to do where it cannot be fetched.

    Raises:
        ValueError: another protocol than https.
    """

    name: str
    url: str
    most_bytes: int
    num_bytes: int | None
    sha256: str
    md5: str
    otherwise: str

    def __post_init__(self) -> None:
        if not self.url.startswith(PROTOCOL):
            raise ValueError(f"{self.url} does not begin with {PROTOCOL}")


def download(file: Announced, cache: Cache) -> tuple[Path, str]:
    """Where a file lies in the cache until others need its place, and its SHA-256; it is fetched if it is not there.

    Which file came is noted, so that the network is not asked while it is there. It must be as long as the server says,
    no longer than is announced, and have the announced digits of its checksums.

    Raises:
        UsageError: it is larger than the cache, the cache cannot be used, or packages for the network are missing.
        MAEError: it did not come, is another file, or cannot be written; nothing of it is kept.
    """
    key = json.dumps([file.url, file.num_bytes, file.sha256, file.md5])
    known = cache.root / _NOTES / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    arrive = partial(_arrive, file)
    try:
        known.parent.mkdir(mode=0o700, exist_ok=True)
        with FileLock(known.with_suffix(".lock"), mode=0o600):  # one process fetches, the others wait
            stored = noted(known)
            if stored is None or not (cache.root / stored.sha256).exists():
                expected = StoredFile(name=file.name, num_bytes=_length(file), sha256=file.sha256)
                _log.warning("fetching %s (%.3g GB) into %s", shown(file.url), expected.num_bytes / 1e9, cache.root)
                stored = cache.newcomer(expected, arrive)
                note(known, stored)
    except OSError as error:
        raise MAEError(f"what is fetched cannot be kept in {cache.root}: {error.strerror or error}") from error
    return cache.path(replace(stored, name=file.name), arrive), stored.sha256


def _length(file: Announced) -> int:
    """How long the file is, by its server's word, which must fit what is announced."""
    try:
        length = told_length(file.url)  # asked once: that there is no network is told at once
    except Trouble as trouble:
        raise MAEError(f"{shown(file.url)} cannot be fetched: {trouble}; {file.otherwise}") from None
    if length is None:
        raise MAEError(f"{shown(file.url)} is not fetched: its server does not say how long it is; {file.otherwise}")
    if length > file.most_bytes or length != (file.num_bytes or length):
        expected = f"at most {file.most_bytes:,}" if file.num_bytes is None else f"{file.num_bytes:,}"
        raise MAEError(f"{shown(file.url)} is not the file that was published: it has {length:,} bytes, not {expected}")
    return length


def _arrive(file: Announced, draft: Draft) -> None:
    try:
        fetch(file.url, draft, again=False)
        _check_md5(draft, file.md5)
    except WrongContent as wrong:
        raise MAEError(f"{shown(file.url)} is not the file that was published: {wrong}") from None
    except MAEError as error:
        raise type(error)(f"{error}; {file.otherwise}") from None


def _check_md5(draft: Draft, expected: str) -> None:
    if not expected:
        return
    md5 = hashlib.md5(usedforsecurity=False)
    draft.stream.seek(0)
    while data := draft.stream.read(_CHUNK):
        md5.update(data)
    if not md5.hexdigest().startswith(expected):
        raise WrongContent(f"its MD5 begins with {md5.hexdigest()[: len(expected)]}; expected {expected}")
