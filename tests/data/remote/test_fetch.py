"""Packs behind URLs: whatever a server does, what is read is right, or there is one clear error."""

import contextlib
import hashlib
import itertools
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import torch
from data.flaky import Fault, Flaky, always, first, honest, keyed, serving
from data.packs import contents, packed, some_images
from data.pictures import loaded, probed

from mae.cli import pack as command
from mae.data.dataset.images import load_images
from mae.data.loading.loader import TrainingLoader
from mae.data.remote import fetch as remote
from mae.data.remote import http as transport
from mae.data.remote.cache import FOLDER, GIGABYTES, Cache
from mae.data.remote.fetch import RemoteStorage
from mae.data.remote.storage import LocalStorage, Storage, StoredFile
from mae.data.sources.open import open_labelled, open_source
from mae.data.sources.pack import open_pack
from mae.errors import MAEError, UsageError

CONTENT = np.random.default_rng(0).bytes(300_000)
FILE = StoredFile(name="a.bin", num_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Waits and limits of a test's length, a cache of its own, and no proxy on the way to this machine."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(transport, "STALL_SECONDS", 0.3)
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Flaky]:
    """A server of a folder `pack` that holds `FILE`."""
    (tmp_path / "served/pack").mkdir(parents=True)
    (tmp_path / "served/pack/a.bin").write_bytes(CONTENT)
    with serving(tmp_path / "served") as flaky:
        yield flaky


@pytest.fixture
def remote_pack(tmp_path: Path, tree: Callable[[dict[str, bytes]], Path]) -> Iterator[tuple[Flaky, Path]]:
    """A server of a folder `pack`, and where that lies: twelve images of two classes in shards of three."""
    packed(tmp_path / "served/pack", tree(some_images(12)))
    with serving(tmp_path / "served") as flaky:
        yield flaky, tmp_path / "served/pack"


def storage_of(flaky: Flaky, below: str = "pack") -> RemoteStorage:
    return remote.open_remote(f"{flaky.url}/{below}")


def kept() -> list[str]:
    return [path.name for path in Path(os.environ[FOLDER]).iterdir() if path.is_file()]


HALF = Fault(cut=200_000, pause=0.05)
MISBEHAVIOURS = {
    "none": honest,
    "busy": first(Fault(status=503), Fault(status=500)),
    "too many requests": first(Fault(status=429), Fault(status=408)),
    "nothing for long": first(Fault(silence=1.0)),
    "stops in the middle": first(Fault(pause=1.0)),
    "a byte a time": first(Fault(drip=0.02)),
    "cut": first(HALF, Fault(cut=0), Fault(cut=1)),
    "flipped": first(Fault(flip=0), Fault(flip=299_999)),
    "flipped, then cut": first(Fault(flip=9, cut=200_000, pause=0.05)),
    "cut, no ranges": first(HALF, Fault(ignores_range=True)),
    "cut, wrong range": first(HALF, Fault(shift=7)),
    "tells less": first(Fault(length=1000)),
    "tells more": first(Fault(length=300_007)),
    "tells nothing and cuts": first(Fault(headers=(("Connection", "close"),), length=10, cut=10)),
    "endless": first(Fault(endless=True)),
    "compressed": first(Fault(status=502, headers=(("Content-Encoding", "gzip"),))),
    "all of it": keyed(3, 0.5, HALF, Fault(status=503), Fault(flip=5), Fault(length=9), Fault(endless=True)),
}


@pytest.mark.parametrize("spoil", MISBEHAVIOURS.values(), ids=MISBEHAVIOURS)
def test_whatever_the_server_does_the_bytes_are_right(served, spoil):
    served.spoil = spoil
    storage = storage_of(served)
    assert storage.local(FILE).read_bytes() == CONTENT
    asked = len(served.asked)
    assert storage.part(FILE, 100, 50) == CONTENT[100:150]
    assert len(served.asked) == asked and kept() == [FILE.sha256]


def test_a_cut_body_goes_on_where_it_stopped(served):
    served.spoil = first(HALF)
    storage_of(served).local(FILE)
    whole, rest = served.ranges("pack/a.bin")
    assert whole == "" and rest.startswith("bytes=") and int(rest[6:-1]) >= 100_000


def test_another_range_than_was_asked_for_is_not_taken(served):
    served.spoil = first(HALF, Fault(shift=7))
    storage_of(served).local(FILE)
    whole, rest, again = served.ranges("pack/a.bin")
    assert whole == "" and rest == again


def test_a_server_that_cannot_go_on_begins_anew_in_the_same_answer(served):
    served.spoil = first(HALF, Fault(ignores_range=True))
    storage_of(served).local(FILE)
    assert len(served.asked) == 2


@pytest.mark.parametrize(
    "fault", [Fault(pause=5), Fault(drip=0.02), Fault(head_drip=0.02)], ids=["body", "drip", "head"]
)
def test_a_server_that_stalls_is_left(served, monkeypatch, fault):
    monkeypatch.setattr(transport, "CONNECT_SECONDS", 0.3)
    served.spoil = first(fault)
    started = time.monotonic()
    assert storage_of(served).local(FILE).read_bytes() == CONTENT
    assert len(served.asked) == 2 and time.monotonic() - started < 4


def test_a_body_of_other_content_is_fetched_from_its_beginning(served):
    served.spoil = first(Fault(flip=5), HALF, Fault(flip=5))
    storage_of(served).local(FILE)
    asked = served.ranges("pack/a.bin")
    assert [bool(each) for each in asked] == [False, False, True, False]


LASTING = {
    "busy": (Fault(status=503), "HTTP status 503"),
    "flipped": (Fault(flip=5), "its checksum is .*; expected"),
    "cut": (Fault(cut=0), "truncated"),
    "endless": (Fault(endless=True), "more than 300,000 bytes came"),
    "silent": (Fault(silence=5.0), r"sent nothing for 0\.05 s"),
    "shorter": (Fault(cut=7, length=7, ignores_range=True), "it ended after 7 of 300,000 bytes"),
}


@pytest.mark.parametrize(("fault", "what"), LASTING.values(), ids=LASTING)
def test_what_lasts_is_one_error_that_names_url_tries_and_fault(served, monkeypatch, fault, what):
    monkeypatch.setattr(transport, "STALL_SECONDS", 0.05 if fault.silence else 0.3)
    monkeypatch.setattr(transport, "CONNECT_SECONDS", 0.05 if fault.silence else 10)
    served.spoil = always(fault)
    with pytest.raises(
        MAEError, match=rf"^{served.url}/pack/a.bin cannot be fetched after 8 tries; the last error: .*{what}"
    ):
        storage_of(served).local(FILE)
    assert len(served.asked) == 8 and kept() == []


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 418])
def test_a_refusal_is_not_tried_again(served, status):
    served.spoil = always(Fault(status=status))
    with pytest.raises(MAEError, match=f"a.bin cannot be fetched: HTTP status {status}") as raised:
        storage_of(served).local(FILE)
    assert not isinstance(raised.value, UsageError) and len(served.asked) == 1
    with pytest.raises(UsageError, match=f"pack.json cannot be fetched: HTTP status {status}"):
        storage_of(served).whole("pack.json", limit=10)


def test_a_server_that_is_not_there_is_one_error():
    with serving(Path()) as gone:
        pass
    with pytest.raises(MAEError, match="after 8 tries; .*ClientConnectorError: Cannot connect to host 127"):
        storage_of(gone).local(FILE)


def test_progress_counts_and_a_long_file_may_be_cut_often(served, monkeypatch):
    monkeypatch.setattr(remote, "_PROGRESS", 10_000)
    monkeypatch.setattr(transport, "_CHUNK", 4096)
    monkeypatch.setattr(remote, "TRIES", 2)
    served.spoil = always(Fault(cut=40_000, pause=0.02))
    assert storage_of(served).local(FILE).read_bytes() == CONTENT
    assert len(served.asked) > 4


def test_waits_double_up_to_a_limit_and_differ_between_files(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.5)
    waits = [remote._wait("https://host/a", failures) for failures in range(1, 12)]
    for failures, wait in enumerate(waits):
        longest = min(0.5 * 2**failures, 30)
        assert longest / 2 <= wait < longest
    assert waits[0] != remote._wait("https://host/b", 1)


def test_a_server_is_asked_again_when_it_wants_to_be(served, monkeypatch):
    slept = []
    monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=slept.append))
    served.spoil = first(
        Fault(status=429, headers=(("Retry-After", "7"),)),
        Fault(status=503, headers=(("Retry-After", "9999"),)),
        Fault(status=503, headers=(("Retry-After", "soon"),)),
    )
    storage_of(served).local(FILE)
    assert slept[0] == 7 and slept[1] == 30 and slept[2] < 1


def test_each_try_is_told(served, caplog):
    served.spoil = first(Fault(status=503))
    with caplog.at_level(logging.WARNING, "mae.data.remote.fetch"):
        storage_of(served).local(FILE)
    (line,) = caplog.messages
    assert line.startswith(f"{served.url}/pack/a.bin: HTTP status 503; trying again in 0.") and "1 of 7" in line


def test_a_small_file_is_read_up_to_its_limit(served):
    (served.root / "pack/pack.json").write_bytes(b"{}" * 50)
    storage = storage_of(served)
    assert storage.whole("pack.json", limit=100) == b"{}" * 50
    with pytest.raises(UsageError, match="pack.json has more than 99 bytes"):
        storage.whole("pack.json", limit=99)
    served.spoil = always(Fault(endless=True))
    with pytest.raises(UsageError, match="pack.json has more than 1,000,000 bytes"):
        storage.whole("pack.json", limit=1_000_000)


def test_parts_beyond_the_file_are_refused_before_anything_is_fetched(served):
    storage = storage_of(served)
    for offset, length in ((300_000, 1), (-1, 5), (5, -1)):
        with pytest.raises(MAEError, match="reach beyond"):
            storage.part(FILE, offset, length)
    assert served.asked == [] and storage.part(FILE, 300_000 - 3, 3) == CONTENT[-3:]


def test_the_version_is_that_of_what_pack_json_holds(served):
    path = served.root / "pack/pack.json"
    path.write_bytes(b"{}")
    one, again = storage_of(served), storage_of(served)
    assert one.version() == again.version() and len(one.version()) == 16
    path.write_bytes(b"[]")
    assert one.version() == again.version() != storage_of(served).version()


REFUSED = [
    ("ftp://host/a", "ftp:// is not a protocol that packs can be read by; expected https://, http://, s3://, gs://"),
    ("file:///etc", "file:// is not a protocol"),
    ("pipe://cat", "pipe:// is not a protocol"),
    ("simplecache::https://host/a", "simplecache::https:// is not a protocol"),
    ("https://host/a::file:///etc", "not the URL"),
    ("https:///a", "not the URL of a pack's folder; expected one such as https://host/folder"),
    ("https://host:port/a", "not the URL"),
    ("https://host/a#b", "not the URL"),
    ("https://host/a\nb", "not the URL"),
    ("s3://key:secret@bucket/a", "not the URL of a pack's folder; expected one such as s3://bucket/folder"),
    ("s3:///a", "not the URL"),
    ("gs://bucket/a?versionId=1", "not the URL"),
]


@pytest.mark.parametrize(("url", "what"), REFUSED)
def test_other_protocols_and_odd_urls_are_refused_by_name(tmp_path, url, what):
    with pytest.raises(UsageError, match=what) as raised:
        open_source(url, data_root=tmp_path)
    assert "secret" not in str(raised.value)


def test_credentials_go_to_the_server_and_into_no_message(served, caplog):
    url = f"http://me:hidden1@127.0.0.1:{served.port}/pack?sig=hidden2"
    served.spoil = first(Fault(status=503))
    storage = remote.open_remote(url)
    storage.local(FILE)
    assert served.credentials == ["Basic bWU6aGlkZGVuMQ=="] * 2
    served.spoil = always(Fault(status=403))
    other = StoredFile(name="b.bin", num_bytes=1, sha256="0" * 64)
    said = [storage.place, repr(storage), caplog.text]
    broken = remote.open_remote(url.replace("127.0.0.1", "a..b"))
    for each in (storage, broken):
        with pytest.raises(MAEError) as raised:
            each.local(other)
        said += traceback.format_exception(raised.value)
    assert not [text for text in said if "hidden" in text] and "trying again" in caplog.text


def test_urls_in_the_words_of_other_libraries_lose_their_secrets():
    trouble = transport._fetch_error(ValueError("bad url='https://me:hidden@host/a?sig=hidden', and more"))
    assert str(trouble) == "ValueError: bad url='https://host/a', and more" and not trouble.permanent


def test_the_query_of_a_url_goes_with_each_request():
    storage = RemoteStorage(url="https://host/pack/?sig=a%2Bb", cache=Cache(root=Path(), max_bytes=1))
    assert storage._url("shard-000000.tar") == "https://host/pack/shard-000000.tar?sig=a%2Bb"
    assert storage.place == "https://host/pack"


def test_redirects_are_followed_a_few_times(served, tmp_path):
    with serving(served.root) as other:
        served.spoil = always(Fault(status=302, headers=(("Location", f"{other.url}/pack/a.bin"),)))
        url = f"http://me:hidden@127.0.0.1:{served.port}/pack"
        assert remote.open_remote(url).local(FILE).read_bytes() == CONTENT
        assert other.credentials == [""], "credentials stay with the server that they were given for"
        other.spoil = always(Fault(status=307, headers=(("Location", "a.bin"),)))
        (Path(os.environ[FOLDER]) / FILE.sha256).unlink()
        with pytest.raises(MAEError, match="more than 5 redirects"):
            storage_of(served).local(FILE)


@pytest.mark.parametrize(
    ("url", "location", "followed"),
    [
        ("https://a/b", "https://c/d", "https://c/d"),
        ("https://a/b", "c", "https://a/c"),
        ("http://a/b", "https://a/b", "https://a/b"),
        ("https://a/b", "http://a/b", None),
        ("http://a/b", "file:///etc/passwd", None),
        ("http://a/b", "", None),
    ],
)
def test_redirects_lead_to_the_web_alone_and_from_https_to_https(url, location, followed):
    if followed is not None:
        assert transport._followed(url, location) == followed
        return
    with pytest.raises(transport.FetchError, match="redirects to") as raised:
        transport._followed(url, location)
    assert raised.value.permanent


def test_missing_packages_are_named(served, monkeypatch):
    def missing(*args: object, **options: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    monkeypatch.setattr(transport, "_filesystems", {})
    with pytest.raises(UsageError, match=r"s3:// needs extra packages: pip install 'openmae\[remote\]'"):
        open_source("s3://bucket/pack", data_root=Path())


def test_a_file_larger_than_the_cache_is_refused(served, monkeypatch):
    monkeypatch.setenv(GIGABYTES, "0.0002")
    with pytest.raises(UsageError, match=f"a.bin has 0.0003 GB.*set {GIGABYTES} to 1 or more"):
        storage_of(served).local(FILE)
    assert served.asked == []


def test_the_storage_is_one_and_can_be_sent_to_other_processes(served):
    storage = storage_of(served)
    storage.prefetch([FILE])
    copy = pickle.loads(pickle.dumps(storage))
    assert isinstance(storage, Storage) and copy == storage
    assert copy.part(FILE, 0, 5) == CONTENT[:5]


def waited(condition: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def files(served: Flaky, count: int) -> list[StoredFile]:
    found = []
    for number in range(count):
        content = CONTENT[: 1000 + number]
        (served.root / f"pack/{number}.bin").write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        found.append(StoredFile(name=f"{number}.bin", num_bytes=len(content), sha256=sha256))
    return found


def test_files_are_fetched_ahead_two_at_a_time_and_in_order(served):
    ahead, going, most, lock = files(served, 5), [0], [0], threading.Lock()

    def count(path: str, number: int) -> None:
        with lock:
            going[0] += 1
            most[0] = max(most[0], going[0])
        time.sleep(0.05)
        with lock:
            going[0] -= 1

    served.spoil = count
    storage = storage_of(served)
    storage.prefetch(ahead)
    storage.prefetch(ahead)
    assert waited(lambda: len([name for name in kept() if "." not in name]) == 5)
    asked = [path for path, _ in served.asked]
    assert most[0] == 2 and sorted(asked) == [f"/pack/{number}.bin" for number in range(5)]
    assert set(asked[:2]) == {"/pack/0.bin", "/pack/1.bin"}
    assert storage.local(ahead[4]).stat().st_size == 1004 and len(served.asked) == 5


def test_a_reader_waits_for_what_is_being_fetched_and_meets_its_error(served):
    first_file, second = files(served, 2)
    served.spoil = lambda path, number: Fault(silence=0.2, status=None if path.endswith("0.bin") else 403)
    storage = storage_of(served)
    storage.prefetch([first_file])
    assert waited(lambda: len(served.asked) == 1)
    assert storage.local(first_file).stat().st_size == 1000
    storage.prefetch([second])
    assert waited(lambda: len(served.asked) == 2)
    with pytest.raises(MAEError, match="1.bin cannot be fetched: HTTP status 403"):
        storage.local(second)
    assert len(served.asked) == 2


def test_what_failed_ahead_is_tried_again_by_its_reader(served):
    (file,) = files(served, 1)
    served.spoil = first(Fault(status=403))
    storage = storage_of(served)
    storage.prefetch([file])
    assert waited(lambda: len(served.asked) == 1 and storage._prefetcher._fetches[file.sha256].done())
    assert storage.local(file).stat().st_size == 1000


def test_what_is_not_begun_yet_is_fetched_by_its_reader(served, monkeypatch):
    monkeypatch.setattr(transport, "STALL_SECONDS", 10)
    slow, slower, wanted = files(served, 3)
    go_on = threading.Event()
    served.spoil = lambda path, number: None if path.endswith("2.bin") or go_on.wait(5) else None
    storage = storage_of(served)
    storage.prefetch([slow, slower, wanted])
    assert storage.local(wanted).stat().st_size == 1002
    assert kept() and slow.sha256 not in kept(), "it did not wait for those before it"
    go_on.set()


def test_forked_processes_fetch_for_themselves(served):
    one, two, three = files(served, 3)
    storage = storage_of(served)
    storage.local(one)
    served.spoil = always(Fault(silence=0.1))
    storage.prefetch([two])  # its thread is left behind by the fork
    assert waited(lambda: len(served.asked) == 2)

    def work() -> None:
        started = time.monotonic()
        assert storage.local(two).stat().st_size == 1001
        storage.prefetch([three])
        assert storage.local(three).stat().st_size == 1002
        assert time.monotonic() - started < 5

    children = [multiprocessing.get_context("fork").Process(target=work) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(8)
        child.kill()
    assert [child.exitcode for child in children] == [0, 0]
    assert storage.local(two).stat().st_size == 1001
    assert len(served.asked) == 3, "each file was fetched once, whoever asked for it"


def test_a_program_ends_while_files_are_fetched_ahead(served):
    served.spoil = always(Fault(pause=300))
    program = f"""
from mae.data.remote.fetch import open_remote
from mae.data.remote.storage import StoredFile
storage = open_remote({served.url + "/pack"!r})
storage.prefetch([StoredFile(name="a.bin", num_bytes={FILE.num_bytes}, sha256={FILE.sha256!r})])
input()
"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:
        try:
            assert waited(lambda: len(served.asked) == 1, seconds=60)
            _, said = process.communicate("\n", timeout=60)
        finally:
            process.kill()  # one that does not end would hold the test up
    assert process.returncode == 0 and said == ""


def same_images(one, two) -> bool:
    return list(one.names) == list(two.names) and all(
        np.array_equal(loaded(one, number), loaded(two, number)) for number in range(len(one))
    )


def test_a_pack_behind_a_url_is_the_same_as_on_the_disk(remote_pack, tmp_path):
    flaky, folder = remote_pack
    here = open_source(str(folder), data_root=tmp_path)
    there = open_source(f"{flaky.url}/pack/", data_root=tmp_path)
    assert there.name == f"{flaky.url}/pack" and there.fingerprint() == here.fingerprint()
    assert not [path for path, _ in flaky.asked if path.endswith(".tar")], "no tar is read to open a pack"
    for number in range(len(here)):
        assert probed(there, number) == probed(here, number)
    assert same_images(here, there)
    asked = [path for path, _ in flaky.asked]
    assert len(asked) == len(set(asked)) == 1 + 3 * 4


def test_the_classes_are_found_there_too(remote_pack, tmp_path):
    flaky, folder = remote_pack
    here, there = (open_labelled(place, data_root=tmp_path) for place in (str(folder), f"{flaky.url}/pack"))
    assert there.class_names == here.class_names == ("cat", "dog")
    assert torch.equal(there.train.labels, here.train.labels) and torch.equal(there.test.labels, here.test.labels)


def test_no_pack_there_is_told(served, tmp_path):
    with pytest.raises(UsageError, match=f"^{served.url}/none/pack.json cannot be fetched: HTTP status 404"):
        open_source(f"{served.url}/none", data_root=tmp_path)


def steps(source, workers: int) -> list[tuple[list[int], torch.Tensor]]:
    images = load_images(source, in_chans=None, memory_limit=0)
    loader = TrainingLoader(images=images, batch_size=4, accumulate=1, img_size=(8, 8), seed=1, workers=workers)
    with contextlib.closing(loader.iterate(1)) as batches:
        return [(batch.ids.tolist(), batch.images) for batch in itertools.islice(batches, 5)]


@pytest.mark.parametrize("workers", [0, 2])
def test_training_sees_the_same_from_a_server_that_fails_often(remote_pack, tmp_path, workers):
    flaky, folder = remote_pack
    expected = steps(open_source(str(folder), data_root=tmp_path), 0)
    flaky.spoil = keyed(1, 0.4, Fault(status=503), Fault(cut=600), Fault(flip=700), Fault(length=9), Fault(pause=1.0))
    found = steps(open_source(f"{flaky.url}/pack", data_root=tmp_path), workers)
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    assert all(torch.equal(one, two) for (_, one), (_, two) in zip(found, expected, strict=True))
    assert len(flaky.asked) > 13, "something failed"


def test_training_sees_the_same_from_a_cache_of_one_shard(remote_pack, tmp_path, monkeypatch):
    flaky, folder = remote_pack
    expected = steps(open_source(str(folder), data_root=tmp_path), 0)
    largest = max(path.stat().st_size for path in folder.glob("*.tar"))
    monkeypatch.setenv(GIGABYTES, str(1.5 * largest / 1e9))
    found = steps(open_source(f"{flaky.url}/pack", data_root=tmp_path), 2)
    assert all(torch.equal(one, two) for (_, one), (_, two) in zip(found, expected, strict=True))
    assert sum((Path(os.environ[FOLDER]) / name).stat().st_size for name in kept()) <= 1.5 * largest


def test_a_pack_is_verified_behind_a_url(remote_pack, capsys):
    flaky, folder = remote_pack
    assert command.run(["verify", f"{flaky.url}/pack"]) == 0
    assert "is intact" in capsys.readouterr().out
    tar = folder / "shard-000003.tar"
    tar.write_bytes(tar.read_bytes()[:-1] + b"1")
    for name in kept():
        (Path(os.environ[FOLDER]) / name).unlink()
    assert command.run(["verify", f"{flaky.url}/pack"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert f"{flaky.url}/pack/shard-000003.tar cannot be fetched after 8 tries; the last error: its checksum is" in told


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[fsspec.AbstractFileSystem]:
    """An S3 server on this machine, and a bucket named `bucket` there."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    monkeypatch.setattr(transport, "_filesystems", {})
    monkeypatch.setattr(transport, "STALL_SECONDS", 10)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/reset", data=b"").close()
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
    filesystem.mkdir("bucket")
    yield filesystem
    server.stop()


def test_a_pack_in_s3_is_the_same_as_on_the_disk(bucket, tree, tmp_path, monkeypatch):
    folder = tmp_path / "pack"
    packed(folder, tree(some_images(6)))
    for name, data in contents(folder).items():
        bucket.pipe(f"bucket/my packs/one/{name}", data)
    monkeypatch.setattr(transport, "_BLOCK", 1000)  # so that a tar takes several
    here = open_source(str(folder), data_root=tmp_path)
    with pytest.raises(UsageError, match="not the URL"):
        open_source("s3://bucket/my packs/one", data_root=tmp_path)
    for name, data in contents(folder).items():
        bucket.pipe(f"bucket/one/{name}", data)
    assert same_images(here, open_source("s3://bucket/one", data_root=tmp_path))


def test_faults_of_s3_are_tried_again_or_told(bucket, monkeypatch, tmp_path):
    bucket.pipe("bucket/pack/a.bin", CONTENT)
    storage = remote.open_remote("s3://bucket/pack")
    monkeypatch.setattr(transport, "_BLOCK", 100_000)
    filesystem = transport._filesystem("s3")
    raised = {0: ConnectionResetError("reset"), 2: TimeoutError()}
    changed = {3: lambda data: data[:-5], 4: lambda data: data + b"1"}
    cat_file, asked = filesystem.cat_file, []

    def spoilt(path: str, start: int, end: int) -> bytes:
        number = len(asked)
        asked.append(start)
        if number in raised:
            raise raised[number]
        return changed.get(number, bytes)(cat_file(path, start=start, end=end))

    monkeypatch.setattr(filesystem, "cat_file", spoilt)
    assert storage.local(FILE).read_bytes() == CONTENT
    assert asked == [0, 0, 100_000, 100_000, 199_995, 199_995, 299_995], "it went on from where it was"

    bucket.pipe("bucket/pack/short.bin", CONTENT[:10])
    for name, what in {"none.bin": "it is not there", "short.bin": "shorter than expected"}.items():
        with pytest.raises(MAEError, match=f"^s3://bucket/pack/{name} cannot be fetched.*{what}"):
            storage.local(StoredFile(name=name, num_bytes=11, sha256="0" * 64))
    with pytest.raises(UsageError, match="s3://none/pack.json cannot be fetched: it is not there"):
        remote.open_remote("s3://none").whole("pack.json", limit=10)


def test_s3_without_credentials_is_told_at_once(bucket, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UsageError, match="NoCredentialsError: Unable to locate credentials"):
        remote.open_remote("s3://bucket/pack").whole("pack.json", limit=10)


def test_google_storage_is_asked_in_blocks_by_its_own_package(monkeypatch, tmp_path):
    asked = []

    class Fake:
        def cat_file(self, path: str, start: int, end: int) -> bytes:
            asked.append((path, start, end))
            return CONTENT[start:end]

    def filesystem(protocol: str, **options: object) -> Fake:
        assert protocol == "gs"
        return Fake()

    monkeypatch.setattr(transport, "_filesystems", {})
    monkeypatch.setattr(transport, "_BLOCK", 200_000)
    monkeypatch.setattr(fsspec, "filesystem", filesystem)
    assert remote.open_remote("gs://bucket/pack").local(FILE).read_bytes() == CONTENT
    assert asked == [("bucket/pack/a.bin", 0, 200_000), ("bucket/pack/a.bin", 200_000, 300_000)]


def test_a_pack_opens_from_any_storage_alike(remote_pack):
    flaky, folder = remote_pack
    sources = [open_pack(storage, "name") for storage in (LocalStorage(root=folder), storage_of(flaky))]
    assert same_images(*sources) and np.array_equal(sources[0].block_sizes, sources[1].block_sizes)


def test_s3_with_wrong_credentials_is_told_at_once(bucket, monkeypatch):
    """And they are not."""
    bucket.pipe("bucket/pack/pack.json", b"{}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong-KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-SECRET")
    monkeypatch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)  # from now on credentials are looked at
    with pytest.raises(UsageError, match="s3://bucket/pack/pack.json cannot be fetched: access is denied") as raised:
        remote.open_remote("s3://bucket/pack").whole("pack.json", limit=10)
    assert "wrong" not in str(raised.value)


@pytest.mark.parametrize("place", ["http://example.org/pack", "s3://bucket/pack"])
def test_a_proxy_that_is_not_there_is_told_without_its_password(monkeypatch, place):
    monkeypatch.setattr(transport, "_filesystems", {})
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://user:SECRET@127.0.0.1:9")
    for name, value in {"KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{'ACCESS_' * (name == 'KEY_ID')}{name}", value)
    words = "after 8 tries; the last error: the proxy that http_proxy or https_proxy names cannot be reached"
    with pytest.raises(MAEError, match=words) as raised:
        remote.open_remote(place).whole("pack.json", limit=10)
    assert "SECRET" not in str(raised.value)
