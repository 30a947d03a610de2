"""The cache of fetched files: what it gives is whole, it stays below its limit, and processes share it."""

import errno
import hashlib
import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mae.data.remote import cache as module
from mae.data.remote.cache import FOLDER, GIGABYTES, Cache, Draft, user_cache
from mae.data.remote.storage import StoredFile
from mae.errors import MAEError, UsageError

FORK = multiprocessing.get_context("fork")


def stored(content: bytes, name: str = "a.bin") -> StoredFile:
    return StoredFile(name=name, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def numbered(number: int, num_bytes: int = 1000) -> bytes:
    return bytes([number]) * num_bytes


def giving(content: bytes, fetched: list[str] | None = None) -> Callable[[Draft], None]:
    def fetch(draft: Draft) -> None:
        if fetched is not None:
            fetched.append(draft.file.name)
        draft.write(content)

    return fetch


def refusing(draft: Draft) -> None:
    raise AssertionError(f"{draft.file.name} is there and needs no fetching")


def kept(cache: Cache) -> set[str]:
    return {entry.name for entry in cache.root.iterdir() if entry.is_file()}


def read(cache: Cache, content: bytes, fetch: Callable[[Draft], None] = refusing) -> bytes:
    with cache.open(stored(content), fetch) as stream:
        return stream.read()


def put(cache: Cache, content: bytes) -> Path:
    return cache.path(stored(content), giving(content))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(root=tmp_path / "cache", max_bytes=3500)


def in_a_child(work: Callable[[], None]) -> multiprocessing.Process:
    child = FORK.Process(target=work)
    child.start()
    return child


def test_a_file_is_fetched_once_and_kept_by_its_content(cache):
    content, fetched = numbered(1), []
    assert read(cache, content, giving(content, fetched)) == content
    assert read(cache, content) == content
    assert cache.path(stored(content, "other name"), refusing).read_bytes() == content
    assert fetched == ["a.bin"] and kept(cache) == {stored(content).sha256}


def test_the_folder_is_for_its_owner_alone(cache):
    entry = put(cache, numbered(1))
    assert stat.S_IMODE(cache.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


@pytest.mark.parametrize("sent", [numbered(2), numbered(1)[:-1], numbered(1) + b"1", b""])
def test_other_content_is_never_kept(cache, sent):
    with pytest.raises(module.WrongContent):
        read(cache, numbered(1), giving(sent))
    assert kept(cache) == set()


def test_a_draft_can_begin_anew(cache):
    content = numbered(1)

    def fetch(draft: Draft) -> None:
        draft.write(numbered(2, 700))
        draft.restart()
        draft.write(content)

    assert read(cache, content, fetch) == content


def test_those_used_least_recently_make_room(cache, monkeypatch):
    monkeypatch.setattr(module, "_NOTED_SECONDS", 0)
    for number in (1, 2, 3):
        put(cache, numbered(number))
    read(cache, numbered(1))
    put(cache, numbered(4))
    assert kept(cache) == {stored(numbered(number)).sha256 for number in (1, 3, 4)}
    put(cache, numbered(5, 2400))
    assert kept(cache) == {stored(numbered(4)).sha256, stored(numbered(5, 2400)).sha256}


def test_uses_are_not_noted_at_each_read(cache):
    entry = put(cache, numbered(1))
    long_ago = time.time_ns() - 3600 * 10**9
    os.utime(entry, ns=(long_ago, entry.stat().st_mtime_ns))
    read(cache, numbered(1))
    noted = entry.stat().st_atime_ns
    assert noted > long_ago
    recently = time.time_ns() - 10**9
    os.utime(entry, ns=(recently, entry.stat().st_mtime_ns))
    cache.open(stored(numbered(1)), refusing).close()  # reading might set the time of its own
    assert entry.stat().st_atime_ns == recently


def test_a_cache_that_may_only_be_read_is_read(cache, monkeypatch):
    entry = put(cache, numbered(1))
    os.utime(entry, ns=(0, entry.stat().st_mtime_ns))

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert read(cache, numbered(1)) == numbered(1)


def test_an_open_file_is_read_to_its_end_after_it_made_room(cache):
    content = numbered(1)
    with cache.open(stored(content), giving(content)) as stream:
        put(cache, numbered(2, 3400))
        assert not (cache.root / stored(content).sha256).exists()
        assert stream.read() == content


def test_a_file_larger_than_the_cache_is_refused_before_it_is_fetched(cache):
    with pytest.raises(UsageError, match=f"set {GIGABYTES} to 1 or more"):
        cache.open(stored(bytes(3501)), refusing)


@pytest.mark.parametrize("damage", ["cut", "changed", "longer", "emptied"])
def test_a_damaged_entry_is_fetched_again(cache, damage):
    content, fetched = numbered(1), []
    entry = put(cache, content)
    damaged = {"cut": content[:-1], "changed": b"0" + content[1:], "longer": content + b"1", "emptied": b""}[damage]
    entry.write_bytes(damaged)
    assert read(cache, content, giving(content, fetched)) == content
    assert fetched == ["a.bin"]


def test_an_entry_that_is_not_marked_as_verified_is_read_through_once(cache, monkeypatch):
    """One that was written to since, or whose process died before the file was known to be on the disk."""
    content, checked = numbered(1), []
    entry = put(cache, content)
    sha256 = module._sha256
    monkeypatch.setattr(module, "_sha256", lambda stream: checked.append(stream) or sha256(stream))
    read(cache, content)
    assert checked == []
    os.utime(entry)
    read(cache, content)
    read(cache, content)
    assert len(checked) == 1


def test_a_file_is_on_the_disk_before_it_is_trusted(cache, monkeypatch):
    """The mark says that no crash can have lost its content; no machine that shares the folder verifies it again."""
    steps, fsync, utime = [], os.fsync, os.utime
    monkeypatch.setattr(os, "fsync", lambda file: (steps.append("on the disk"), fsync(file)))
    monkeypatch.setattr(os, "utime", lambda path, ns: (steps.append("marked"), utime(path, ns=ns)))
    entry = put(cache, numbered(1))
    assert steps == ["on the disk", "marked"]
    utime(entry)
    read(cache, numbered(1))
    assert steps == ["on the disk", "marked"] * 2


def test_one_process_fetches_and_the_others_wait(cache, tmp_path):
    content, told = numbered(1), tmp_path / "fetched"

    def fetch(draft: Draft) -> None:
        with told.open("ab") as file:
            file.write(b"x")
        time.sleep(0.2)
        draft.write(content)

    def work() -> None:
        assert read(cache, content, fetch) == content

    children = [in_a_child(work) for _ in range(3)]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0] and told.read_bytes() == b"x"


def test_two_processes_stay_below_the_limit_together(cache):
    largest = FORK.Value("q", 0)

    def fetch(content: bytes) -> Callable[[Draft], None]:
        def slowly(draft: Draft) -> None:
            draft.write(content[:500])
            time.sleep(0.01)
            with cache._locked("room"):
                total = sum(found.stat().st_size for found in os.scandir(cache.root) if found.is_file())
            with largest.get_lock():
                largest.value = max(largest.value, total)
            draft.write(content[500:])

        return slowly

    def work(offset: int) -> None:
        for number in range(24):
            content = numbered((number * 7 + offset) % 9, 1000 + number % 3)
            assert read(cache, content, fetch(content)) == content

    children = [in_a_child(lambda offset=offset: work(offset)) for offset in (0, 4)]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert 2000 < largest.value <= cache.max_bytes
    assert sum((cache.root / name).stat().st_size for name in kept(cache)) <= cache.max_bytes


def test_what_a_killed_process_left_is_removed(cache):
    def die(draft: Draft) -> None:
        draft.write(b"1" * 10)
        os.kill(os.getpid(), signal.SIGKILL)

    for number in (1, 2):
        child = in_a_child(lambda number=number: read(cache, numbered(number), die))
        child.join()
        assert child.exitcode == -signal.SIGKILL
    assert len(kept(cache)) == 1, "the second removed what the first had left"
    put(cache, numbered(2))
    assert kept(cache) == {stored(numbered(2)).sha256}


def test_what_a_living_process_is_fetching_stays(cache):
    begun, go_on = FORK.Event(), FORK.Event()

    def wait(draft: Draft) -> None:
        begun.set()
        go_on.wait()
        draft.write(numbered(1))

    child = in_a_child(lambda: read(cache, numbered(1), wait))
    begun.wait()
    put(cache, numbered(2, 2500))
    go_on.set()
    child.join()
    assert child.exitcode == 0 and kept(cache) == {stored(numbered(1)).sha256, stored(numbered(2, 2500)).sha256}


def test_a_full_disk_is_one_clear_error(cache):
    def full(draft: Draft) -> None:
        with open("/dev/full", "wb", buffering=0) as draft.stream:
            draft.write(numbered(1))

    with pytest.raises(MAEError, match=f"No space left on device; free some space, or set {FOLDER}"):
        read(cache, numbered(1), full)
    assert kept(cache) == set()


def test_a_folder_that_others_may_write_to_is_refused(cache):
    cache.root.mkdir(mode=0o700)
    for mode in (0o777, 0o720, 0o702):
        cache.root.chmod(mode)
        with pytest.raises(UsageError, match=f"others may write .*{FOLDER}"):
            cache.open(stored(numbered(1)), refusing)
    cache.root.chmod(0o755)
    cache.check()


def test_a_folder_of_another_user_is_refused(cache, monkeypatch):
    cache.check()
    owner = cache.root.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(UsageError, match=f"belongs to another user; set {FOLDER}"):
        cache.check()


@pytest.mark.parametrize("below", ["", "further"])
def test_a_file_where_the_folder_should_be_is_refused(tmp_path, below):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match=FOLDER):
        Cache(root=tmp_path / "file" / below, max_bytes=1).check()


def test_the_folder_and_its_size_are_told_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.delenv(GIGABYTES, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache() == Cache(root=tmp_path / ".cache/openmae", max_bytes=50_000_000_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_cache().root == tmp_path / "xdg/openmae"
    monkeypatch.setenv(FOLDER, "~/mine")
    monkeypatch.setenv(GIGABYTES, "0.5")
    assert user_cache() == Cache(root=tmp_path / "mine", max_bytes=500_000_000)


@pytest.mark.parametrize("told", ["0", "-1", "much", "nan", "inf", "1e12"])
def test_a_size_that_is_none_is_refused(tmp_path, monkeypatch, told):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(GIGABYTES, told)
    with pytest.raises(UsageError, match=GIGABYTES):
        user_cache()
