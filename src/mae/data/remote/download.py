"""Single files behind https URLs, of which little may be known in advance; stored in the user's cache."""

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from filelock import FileLock

from mae.credentials import shown
from mae.data.remote.cache import Cache, Draft, WrongContent, read_note, write_note
from mae.data.remote.fetch import fetch
from mae.data.remote.http import FetchError, remote_length
from mae.data.remote.storage import StoredFile
from mae.errors import MAEError

PROTOCOL = "https://"

_NOTES = "downloads"
_CHUNK = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Announced:
    """What is known of a file before it is fetched.

    Attributes:
        name: for messages.
        url: where it is.
        most_bytes: the maximum size.
        num_bytes: the exact size; None: not known.
        sha256: the first hexadecimal digits of its checksum, as far as known, maybe none.
        md5: likewise.
        otherwise: what to do if it cannot be fetched.

    Raises:
        ValueError: a protocol other than https.
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
    """The path of a file in the cache, valid until it is evicted, and its SHA-256; fetches it if needed.

    Its checksum is recorded, so that the network is not needed while it is cached. It must be as long as the server
    says, no longer than announced, and match the announced digits of its checksums.

    Raises:
        UsageError: it is larger than the cache, the cache cannot be used, or packages for the network are missing.
        MAEError: it cannot be fetched, is another file, or cannot be written; nothing of it is kept.
    """
    key = json.dumps([file.url, file.num_bytes, file.sha256, file.md5])
    known = cache.root / _NOTES / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    arrive = partial(_arrive, file)
    try:
        known.parent.mkdir(mode=0o700, exist_ok=True)
        with FileLock(known.with_suffix(".lock"), mode=0o600):  # one process fetches, the others wait
            stored = read_note(known)
            if stored is None or not (cache.root / stored.sha256).exists():
                expected = StoredFile(name=file.name, num_bytes=_length(file), sha256=file.sha256)
                _log.warning("fetching %s (%.3g GB) into %s", shown(file.url), expected.num_bytes / 1e9, cache.root)
                stored = cache.fetch_unknown(expected, arrive)
                write_note(known, stored)
    except OSError as error:
        raise MAEError(f"fetched files cannot be stored in {cache.root}: {error.strerror or error}") from error
    return cache.path(replace(stored, name=file.name), arrive), stored.sha256


def _length(file: Announced) -> int:
    """The file's size according to its server, which must match what is announced."""
    try:
        length = remote_length(file.url)  # asked once, so that a missing network is reported at once
    except FetchError as error:
        raise MAEError(f"{shown(file.url)} cannot be fetched: {error}; {file.otherwise}") from None
    if length is None:
        raise MAEError(f"{shown(file.url)} is not fetched: its server does not tell its size; {file.otherwise}")
    if length > file.most_bytes or length != (file.num_bytes or length):
        expected = f"at most {file.most_bytes:,}" if file.num_bytes is None else f"{file.num_bytes:,}"
        raise MAEError(f"{shown(file.url)} is not the published file: it has {length:,} bytes; expected {expected}")
    return length


def _arrive(file: Announced, draft: Draft) -> None:
    try:
        fetch(file.url, draft, again=False)
        _check_md5(draft, file.md5)
    except WrongContent as wrong:
        raise MAEError(f"{shown(file.url)} is not the published file: {wrong}") from None
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
