"""Single files from the network: what is kept is what was announced, or there is one clear error and nothing."""

import errno
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data.flaky import Fault, Flaky, always, first, serving

from mae.data.remote import download as downloads
from mae.data.remote import fetch as remote
from mae.data.remote import http as transport
from mae.data.remote.cache import FOLDER, GIGABYTES, Cache, Draft, user_cache
from mae.data.remote.download import Announced, download
from mae.errors import MAEError, UsageError

CONTENT = np.random.default_rng(0).bytes(300_000)
SHA256, MD5 = hashlib.sha256(CONTENT).hexdigest(), hashlib.md5(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Waits of a test's length, a cache of its own, no proxy, and this machine's server, which knows no TLS."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(transport, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(downloads, "PROTOCOL", "http://127.0.0.1")
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Flaky]:
    (tmp_path / "served").mkdir()
    (tmp_path / "served/w.pth").write_bytes(CONTENT)
    with serving(tmp_path / "served") as flaky:
        yield flaky


def announced(flaky: Flaky, **known: object) -> Announced:
    plain = {"num_bytes": None, "most_bytes": 400_000, "sha256": "", "md5": "", "otherwise": "carry it"}
    return Announced(name="some/weights", url=f"{flaky.url}/w.pth", **{**plain, **known})  # type: ignore[arg-type]


def kept(cache: Cache) -> list[str]:
    return [path.name for path in cache.root.iterdir() if path.is_file()]


@pytest.mark.parametrize(
    "known",
    [{}, {"sha256": SHA256, "num_bytes": 300_000}, {"sha256": SHA256[:8]}, {"md5": MD5[:6]}, {"md5": MD5}],
    ids=["nothing", "all", "8 of SHA-256", "6 of MD5", "MD5"],
)
def test_what_is_announced_comes_once(served, known):
    cache, file = user_cache(), announced(served, **known)
    path, sha256 = download(file, cache)
    assert path.read_bytes() == CONTENT and sha256 == SHA256 and kept(cache) == [SHA256]
    assert len(served.asked) == 2  # how long it is, and the file
    served.spoil = always(Fault(status=503))
    assert download(file, cache) == (path, sha256) and len(served.asked) == 2


OTHERS = {
    "SHA-256": ({"sha256": "0" * 64}, rf"its checksum is {SHA256[:12]}…; expected 000000000000…"),
    "digits of SHA-256": ({"sha256": SHA256[:7] + "g"}, "its checksum is"),
    "digits of MD5": ({"md5": "00000g"}, f"its MD5 begins with {MD5[:6]}; expected 00000g"),
    "longer": ({"num_bytes": 299_999}, "it has 300,000 bytes; expected 299,999"),
    "shorter": ({"num_bytes": 300_001}, "it has 300,000 bytes; expected 300,001"),
    "too long": ({"most_bytes": 299_999}, "it has 300,000 bytes; expected at most 299,999"),
}


@pytest.mark.parametrize(("known", "what"), OTHERS.values(), ids=OTHERS)
def test_another_file_is_refused_at_once(served, known, what):
    cache = user_cache()
    with pytest.raises(MAEError, match=rf"^{served.url}/w.pth is not the published file: {what}"):
        download(announced(served, **known), cache)
    assert kept(cache) == [] and len(served.asked) <= 2


LASTING = {
    "cut": (Fault(cut=1000), "after 8 tries; the last error: the response was truncated; carry it"),
    "endless": (Fault(endless=True), "is not the published file: more than 300,000 bytes came"),
    "busy": (Fault(status=503), "after 8 tries; the last error: HTTP status 503; carry it"),
    "gone": (Fault(status=404), "cannot be fetched: HTTP status 404: it is not there; carry it"),
}


@pytest.mark.parametrize(("fault", "what"), LASTING.values(), ids=LASTING)
def test_what_goes_wrong_on_the_way_is_one_error(served, fault, what):
    cache = user_cache()
    served.spoil = lambda path, number: fault if number else None  # the first answer tells the length
    with pytest.raises(MAEError, match=what):
        download(announced(served), cache)
    assert kept(cache) == []


def test_a_cut_file_goes_on_where_it_stopped(served):
    served.spoil = first(Fault(), Fault(cut=200_000, pause=0.05))
    assert download(announced(served), user_cache())[0].read_bytes() == CONTENT
    assert served.ranges("w.pth")[-1].startswith("bytes=")


def test_a_server_that_does_not_say_how_much_it_sends_is_not_listened_to(served):
    served.spoil = always(Fault(endless=True))
    with pytest.raises(MAEError, match="its server does not tell its size; carry it"):
        download(announced(served), user_cache())
    assert len(served.asked) == 1


def test_without_a_network_one_error_comes_at_once_and_tells_the_address(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT", 60.0)
    with serving(tmp_path) as gone:
        pass
    started = time.monotonic()
    with pytest.raises(MAEError, match=f"^{gone.url}/w.pth cannot be fetched: .*Cannot connect.*; carry it$") as raised:
        download(announced(gone), user_cache())
    assert not isinstance(raised.value, UsageError) and time.monotonic() - started < 10


def test_a_full_disk_is_one_error(served, monkeypatch):
    def full(draft: Draft, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Draft, "write", full)
    cache = user_cache()
    with pytest.raises(MAEError, match="some/weights cannot be stored in .*: No space left on device; free some space"):
        download(announced(served), cache)
    assert kept(cache) == []


def test_a_file_over_the_cache_is_refused_before_it_comes(served, monkeypatch):
    monkeypatch.setenv(GIGABYTES, "0.0002")
    with pytest.raises(UsageError, match=f"some/weights has 0.0003 GB.*set {GIGABYTES}"):
        download(announced(served), user_cache())
    assert len(served.asked) == 1


def test_what_made_room_or_was_damaged_comes_again(served):
    cache, file = user_cache(), announced(served)
    path, _ = download(file, cache)
    path.unlink()
    assert download(file, cache)[0].read_bytes() == CONTENT
    path.write_bytes(b"0" * len(CONTENT))
    assert download(file, cache)[0].read_bytes() == CONTENT
    (served.root / "w.pth").write_bytes(CONTENT[::-1])
    path.write_bytes(b"0" * len(CONTENT))
    with pytest.raises(MAEError, match="is not the published file: its checksum is"):
        download(file, cache)
    assert download(file, cache)[0].read_bytes() == CONTENT[::-1]  # nothing is announced of it, and nothing was kept


def test_a_note_that_cannot_be_read_counts_for_nothing(served):
    cache, file = user_cache(), announced(served)
    download(file, cache)
    (written,) = (cache.root / "downloads").glob("*.json")
    for text in ("", "{}", '{"num_bytes": 300000, "sha256": "../served/w.pth"}', '{"num_bytes": -1, "sha256": "0"}'):
        written.write_text(text)
        assert download(file, cache)[1] == SHA256


def test_other_digits_are_another_question(served):
    cache = user_cache()
    download(announced(served), cache)
    with pytest.raises(MAEError, match="is not the published file"):
        download(announced(served, sha256="0" * 64), cache)


def test_two_at_once_fetch_once(served):
    cache, file, found = user_cache(), announced(served), []
    served.spoil = lambda path, number: Fault(pause=0.1)
    threads = [threading.Thread(target=lambda: found.append(download(file, cache))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len(set(found)) == 1 and len(served.asked) == 2


def test_what_a_killed_process_left_is_removed(served):
    cache = user_cache()
    left = cache.root / f"{hashlib.sha256(b'some/weights').hexdigest()}.{'0' * 16}"
    left.write_bytes(b"half")
    download(announced(served), cache)
    assert kept(cache) == [SHA256]


def test_nothing_but_https_is_asked(served, monkeypatch):
    file = announced(served)
    monkeypatch.setattr(downloads, "PROTOCOL", "https://")
    with pytest.raises(ValueError, match="does not begin with https://"):
        replace(file)
