"""Files of `torch.save` by a reader of our own: equal to PyTorch's where both read, refused where it would fall."""

import argparse
import io
import pickle
import struct
import subprocess
import sys
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import saved
from hostile.mutations import mutated
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mae.errors import MAEError, UsageError
from mae.interop.imports.checkpoints import read_checkpoint
from mae.interop.imports.pickles import StoredTensor
from mae.interop.imports.reading import read_external

PLAIN = {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.linspace(-1, 1, 5, dtype=torch.float64)}
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
"""PyTorch itself writes them in archives alone."""


def archive(path: Path, **changes: Any) -> Path:
    """The archive that torch.save wrote, entry by entry, with other bytes, more entries or compression."""
    with zipfile.ZipFile(path) as old:
        entries = [(entry.filename, old.read(entry)) for entry in old.infolist()]
    others = changes.get("instead", {})
    entries = [(name, others.get(name.partition("/")[2], content)) for name, content in entries]
    entries = [(changes.get("names", {}).get(name, name), content) for name, content in entries]
    with zipfile.ZipFile(path, "w", changes.get("method", zipfile.ZIP_STORED)) as new:
        for name, content in [*entries, *changes.get("more", [])]:
            new.writestr(name, content)
    return path


def before_2020(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def contents(*, old: bool) -> dict[str, Any]:
    """What checkpoints hold, as many ways to store a tensor as there are plain ones."""
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    attributed, layers = base[:2].clone(), torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    attributed.note = "kept by nobody"  # type: ignore[attr-defined]
    marked = torch.nn.Parameter(base.clone())
    marked.no_weight_decay = True  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(layers.parameters())
    layers(base[:5, :3]).sum().backward()
    optimizer.step()
    dtypes = (torch.float64, torch.float16, torch.bfloat16, *(() if old else NARROW))
    tensors = {
        "whole": base, "turned": base.t(), "part": base[1:3, 2:], "steps": base[::2, ::3], "odd": torch.randn(17)[1:],
        "scalar": torch.tensor(2.5), "same": torch.ones(1).expand(5, 4), "parameter": torch.nn.Parameter(base.clone()),
        "attributed": attributed, "marked": marked, **{str(kind): torch.arange(7.0).to(kind) for kind in dtypes},
        **layers.state_dict(),
    }  # fmt: skip
    beside = [
        {1, 2},
        Counter("ab"),
        torch.device("cpu"),
        torch.float16,
        torch.Size([2]),
        b"abc",
        10**50,
        1j,
        (1, ("a", 2)),
    ]
    return {
        "model": OrderedDict(tensors),
        "optimizer": optimizer.state_dict(),
        "args": argparse.Namespace(epochs=3, name="x", sizes=(1, 2)),
        "beside": [*beside, torch.empty(0, 3), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)],
    }


def floats_in(path: Path) -> dict[str, Tensor]:
    checkpoint = read_checkpoint(path)
    found = checkpoint.content["model"]
    assert all(isinstance(tensor, StoredTensor) for tensor in found.values())
    return checkpoint.tensors({name: tensor for name, tensor in found.items() if tensor.dtype.is_floating_point})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("old", [False, True], ids=["archive", "before 2020"])
def test_every_tensor_is_as_pytorch_reads_it(old: bool, protocol: int, tmp_path: Path):
    path = tmp_path / "w.pth"
    torch.save(contents(old=old), path, pickle_protocol=protocol, _use_new_zipfile_serialization=not old)
    expected = torch.load(path, weights_only=False)["model"]
    found = floats_in(path)
    assert found.keys() == {name for name, tensor in expected.items() if tensor.is_floating_point()}
    for name, tensor in found.items():
        theirs = expected[name].detach()
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), name
        assert torch.equal(tensor.double(), theirs.double()), name
    assert read_external(path).options == {"epochs": 3, "name": "x"}


def test_tensors_may_be_changed_and_the_file_stays(tmp_path: Path):
    path = saved(tmp_path / "w.pth", PLAIN)
    before = path.read_bytes()
    read_external(path).tensors["weight"].zero_()
    assert path.read_bytes() == before


def with_directory(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The same entries behind another directory, and the fields of its end beyond four bytes as in large archives."""
    end = content.rindex(b"PK\6\6")
    size, start = struct.unpack_from("<QQ", content, end + 40)
    directory, ends = change(content[start : start + size]), bytearray(content[end:])
    ends[40:48] = struct.pack("<Q", len(directory))
    ends[56 + 8 : 56 + 16] = struct.pack("<Q", start + len(directory))
    ends[-10:-2] = b"\xff" * 8
    return content[:start] + directory + ends


def widened(directory: bytes) -> bytes:
    """An entry whose sizes and place stand in the wide fields alone, as of more than 4 GB."""
    name = b"w/data/0"
    at = directory.index(name) - 46
    numbers = struct.unpack_from("<LL", directory, at + 20) + struct.unpack_from("<L", directory, at + 42)
    extra = struct.pack("<HHBHHQQQ", 99, 1, 0, 1, 24, *numbers)
    entry = bytearray(directory[at : at + 46 + len(name)])
    entry[20:28], entry[30:32], entry[42:46] = b"\xff" * 8, struct.pack("<H", len(extra)), b"\xff" * 4
    return directory[:at] + entry + extra + directory[at + 46 + len(name) :]


def test_an_archive_of_wide_fields_is_read(tmp_path: Path):
    path = saved(tmp_path / "w.pth", {"model": PLAIN})
    path.write_bytes(with_directory(path.read_bytes(), widened))
    assert torch.equal(floats_in(path)["weight"], PLAIN["weight"])
    assert torch.equal(torch.load(path)["model"]["weight"], PLAIN["weight"])


def test_an_archive_without_checksums_is_read(tmp_path: Path):
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path / "w.pth", {"model": PLAIN})
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(floats_in(path)["weight"], PLAIN["weight"])


SHARED = b"\x80\x02}K\x01\x85" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(40)) + b"K\x01s."
DEEP = b"\x80\x02}K\x01" + b"\x85" * 3_000_000 + b"K\x01s."


def published(path: Path, steps: bytes) -> Path:
    """An archive whose pickle has a name in capitals: PyTorch reads it all the same."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in (("DATA.PKL", steps), ("version", b"3\n"), ("byteorder", b"little")):
            file.writestr(f"archive/{name}", content)
    return path


def test_a_pickle_named_in_capitals_is_refused(tmp_path: Path):
    """By PyTorch's reader the one is never done, heeding no signal, and the other ends the process."""
    (tmp_path / "read.py").write_text(
        "import sys\nfrom pathlib import Path\nfrom mae.errors import MAEError\n"
        "from mae.interop.imports.reading import read_external\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n        read_external(Path(path))\n"
        "    except MAEError as error:\n        sys.stdout.write(f'{error}\\n')\n"
    )
    paths = [published(tmp_path / f"{name}.pth", steps) for name, steps in (("hangs", SHARED), ("falls", DEEP))]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "read.py"), *map(str, paths)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.count("an archive with 0 entries FOLDER/data.pkl; expected one") == 2


@pytest.mark.parametrize("old", [False, True], ids=["archive", "before 2020"])
@pytest.mark.parametrize("steps", [SHARED, DEEP[:200_000] + b"K\x01s."], ids=["shared", "deep"])
def test_keys_that_nobody_could_hash_are_left_out(steps: bytes, old: bool, tmp_path: Path):
    path = tmp_path / "w.pth"
    if old:
        path.write_bytes(before_2020({}).replace(pickle.dumps({}, protocol=2), steps))
    else:
        archive(saved(path, {}), instead={"data.pkl": steps})
    with pytest.raises(UsageError, match="holds no recognisable weights"):
        read_external(path)


def patched(field: int, value: bytes, *, of: bytes = b"w/data/0") -> Callable[[bytes], bytes]:
    """Other bytes in an entry of the directory."""

    def change(content: bytes) -> bytes:
        at = content.rindex(of) - 46 + field
        return content[:at] + value + content[at + len(value) :]

    return change


def _claiming(content: bytes) -> bytes:
    """A directory of 2 GiB."""
    at = content.rindex(b"PK\6\6") + 40
    return content[:at] + struct.pack("<Q", 2 << 30) + content[at + 8 :]


BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "something behind it": (lambda content: content + b"x", "is truncated, or followed by other data"),
    "another archive behind it": (lambda content: content + content, "end record is not where it claims"),
    "a comment": (lambda content: content[:-2] + b"\5\0" + b"words", "is truncated, or followed by other data"),
    "a comment with an end": (
        lambda content: content[:-2] + b"\x16\0" + content[-22:],
        "directory claims",
    ),
    "something before it": (lambda content: b"PK\3\4" + bytes(60) + content, "not where it claims"),
    "half": (lambda content: content[: len(content) // 2], "truncated"),
    "a directory beyond the end": (_claiming, "whose directory claims 2,147,483,648 bytes"),
    "an encrypted entry": (patched(8, b"\1\0"), "compressed or encrypted entries"),
    "a compressed entry": (patched(10, b"\x08\0"), "compressed or encrypted entries"),
    "an entry beyond the end": (patched(42, b"\xf0\xff\xff\x7f"), "not where the directory says"),
    "an entry of another": (patched(42, bytes(4)), "does not match its checksum"),
    "an entry of 2 GiB": (patched(20, struct.pack("<LL", 2 << 30, 2 << 30)), "not where the directory says"),
    "an entry of two sizes": (patched(20, struct.pack("<LL", 8, 48)), "two entries or two sizes"),
    "a smaller entry": (patched(20, struct.pack("<LL", 40, 40)), "does not match its checksum"),
    "another checksum": (patched(16, b"abcd"), "'weight' does not match its checksum"),
    "another checksum of the pickle": (
        patched(16, b"abcd", of=b"w/data.pkl"),
        "its pickle does not match its checksum",
    ),
    "a name that is no text": (patched(46, b"w/\xff\xff"), "invalid start byte"),
    "no storage": (patched(46, b"w/duta/0"), "'weight' has a storage of 48 bytes, of which the file holds 0"),
}


@pytest.mark.parametrize("what", BYTES)
def test_archives_that_programs_read_otherwise_are_refused(what: str, tmp_path: Path):
    change, says = BYTES[what]
    path = saved(tmp_path / "w.pth", PLAIN)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(MAEError, match=rf"w\.pth cannot be read: .*({says})"):
        read_external(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": zipfile.ZIP_DEFLATED}, "compressed or encrypted entries, which torch.save does not write"),
        ({"more": [("w/data.pkl", b"")]}, "two entries or two sizes of 'w/data.pkl'"),
        ({"more": [("w/DATA.PKL", b"")]}, "names differ only in case, of which PyTorch may read either"),
        ({"more": [("W/data/0", b"")]}, "names differ only in case"),
        ({"more": [("x/data.pkl", b"")]}, "an archive with 2 entries FOLDER/data.pkl; expected one"),
        ({"names": {"w/data.pkl": "w\\data.pkl"}}, "an archive with 0 entries"),
        ({"names": {"w/data.pkl": "./w/data.pkl"}}, "an archive with 0 entries"),
        ({"names": {"w/data.pkl": "w/inner/data.pkl"}}, "an archive with 0 entries"),
        ({"instead": {"data.pkl": bytes(65 << 20)}}, "bytes besides its tensors; expected at most"),
        ({"instead": {"byteorder": b"big"}}, "its data is big-endian"),
        ({"instead": {"data/0": bytes(8)}}, "'weight' has a storage of 48 bytes, of which the file holds 8"),
    ],
    ids=["compressed", "twice", "capitals", "a folder in capitals", "two", "backslash", "dot", "below", "large",
         "big-endian", "too few values"],
)  # fmt: skip
def test_archives_that_torch_would_not_write_are_refused(changes: dict[str, Any], says: str, tmp_path: Path):
    with pytest.raises(MAEError, match=says):
        read_external(archive(saved(tmp_path / "w.pth", PLAIN), **changes))


def test_entries_that_share_their_bytes_are_refused(tmp_path: Path):
    """Each would be compared with its checksum, so few bytes would take any time."""

    def repeated(directory: bytes) -> bytes:
        at = directory.index(b"w/data/0") - 46
        entry = directory[at : at + 46 + len(b"w/data/0")]
        return directory + b"".join(entry[:-1] + b"%c" % letter for letter in b"abcdefgh")

    path = saved(tmp_path / "w.pth", {"weight": torch.ones(10_000)})
    path.write_bytes(with_directory(path.read_bytes(), repeated))
    with pytest.raises(MAEError, match="entries that overlap"):
        read_external(path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda content: content[:-1], "data that is truncated"),
        (lambda content: content[:-40], "data that is truncated"),
        (
            lambda content: content.replace(pickle.dumps(1001, protocol=2), pickle.dumps(1002, protocol=2)),
            "did not write",
        ),
        (lambda content: content.replace(b"\x88X\n\0\0\0type", b"\x89X\n\0\0\0type"), "its data is big-endian"),
        (lambda content: content.replace(struct.pack("<q", 12), struct.pack("<q", -12)), "data that is truncated"),
        (lambda content: content.replace(struct.pack("<q", 12), struct.pack("<q", 1 << 61)), "data that is truncated"),
    ],
    ids=["cut", "cut more", "another protocol", "big-endian", "a count below 0", "a count without end"],
)
def test_pickles_in_a_row_that_are_damaged_are_refused(damage: Callable[[bytes], bytes], says: str, tmp_path: Path):
    content = before_2020(PLAIN)
    assert damage(content) != content
    (tmp_path / "w.pth").write_bytes(damage(content))
    with pytest.raises(MAEError, match=says):
        read_external(tmp_path / "w.pth")


def rebuilt(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """A tensor that torch.save writes as claimed, though no such one can be."""

    class Claim:
        def __reduce__(self) -> tuple[Any, ...]:
            storage = PLAIN["weight"].storage()
            return torch._utils._rebuild_tensor_v2, (storage, offset, shape, strides, False, OrderedDict())

    return Claim()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "claim",
    [(0, (13,), (1,)), (12, (), ()), (1, (3, 4), (4, 1)), (0, (2,), (12,)), (1 << 61, (1,), (1,)),
     (0, (1 << 31, 1 << 31), (0, 0)), (0, (1 << 40,), (1 << 40,))],
    ids=["too long", "behind it", "shifted", "a stride out", "a place without end", "any size", "any stride"],
)  # fmt: skip
def test_tensors_beyond_their_storage_are_refused(claim: tuple[Any, ...], tmp_path: Path):
    path = saved(tmp_path / "w.pth", {"weight": rebuilt(*claim)})
    with pytest.raises(MAEError, match=r"'weight' of shape \[.*\] does not fit into its storage of 12 values"):
        read_external(path)


SHARE = st.integers(0, (1 << 16) - 1)
DAMAGES = st.lists(st.tuples(st.integers(0, 5), SHARE, SHARE), min_size=1, max_size=3)
GOOD = {"archive": None, "before 2020": before_2020(PLAIN)}


@pytest.mark.parametrize("form", GOOD)
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(done=DAMAGES)
def test_damaged_files_are_read_or_refused(
    form: str, done: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.getbasetemp() / "damaged.pth"
    good = GOOD[form] or saved(path, PLAIN).read_bytes()
    path.write_bytes(mutated(good, good[::-1], done))
    started = time.process_time()
    try:
        found = read_external(path).tensors
    except MAEError:
        pass
    else:  # an archive has checksums
        assert form != "archive" or all(torch.equal(PLAIN[name], found[name]) for name in found.keys() & PLAIN.keys())
    assert time.process_time() - started < 5
