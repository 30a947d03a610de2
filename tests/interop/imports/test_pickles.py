"""Pickles of others: whatever they are made of, they are read or refused in bounded time and memory."""

import struct
import time
from io import BytesIO
from typing import Any

import pytest

from mae.errors import MAEError
from mae.interop.imports.pickles import UNREAD, Options, read_pickle

BEGIN = b"\x80\x02"
CPU_SECONDS = 10.0
"""Many times what the slowest takes."""


def text(letters: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(letters)) + letters


def read(steps: bytes) -> Any:
    started = time.process_time()
    try:
        return read_pickle(BytesIO(BEGIN + steps))[0]
    finally:
        assert time.process_time() - started < CPU_SECONDS


SHARED = b"K\x01\x85" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(40))
WIDE = b"(" + b"K\x01" * 100_000 + b"tq\x01"
HELD: dict[str, tuple[bytes, type]] = {
    "deep tuple": (b"K\x01" + b"\x85" * 100_000, tuple),
    "deep list": (b"]" * 200_001 + b"a" * 200_000, list),
    "deep dictionary": (b"}" + (text(b"k") + b"}") * 100_000 + b"s" * 100_000, dict),
    "deep key": (b"}K\x01" + b"\x85" * 100_000 + b"K\x01s", dict),
    "shared key": (b"}" + SHARED + b"K\x01s", dict),
    "wide key": (b"}" + WIDE + b"K\x01s" + b"h\x01K\x01s" * 50_000, dict),
    "keys of one hash": (
        b"}("
        + b"".join(b"\x8a\x10" + ((2**61 - 1) * number).to_bytes(16, "little") + b"K\x01" for number in range(50_000))
        + b"u",
        dict,
    ),
    "keys that are equal": (
        b"}" + (text(b"a" * 4000) + b"q\x00K\x01s" + text(b"a" * 4000) + b"q\x01K\x01s") + b"h\x01K\x01s" * 100_000,
        dict,
    ),
    "key that cannot be hashed": (b"}]K\x01s", dict),
    "list in itself": (b"]q\x00h\x00a", list),
    "dictionary in itself": (b"}q\x00" + text(b"k") + b"h\x00s", dict),
    "place without end": (b"K\x01r\xff\xff\xff\x7f", int),
    "state again and again": (
        b"cargparse\nNamespace\n)\x81}(" + (text(b"k") + b"K\x01") * 50_000 + b"uq\x01b" + b"h\x01b" * 100_000,
        Options,
    ),
}


@pytest.mark.parametrize("what", HELD)
def test_what_would_take_hours_or_end_the_process_elsewhere_is_read(what: str):
    steps, kind = HELD[what]
    assert type(read(steps + b".")) is kind


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (b"]" * 1_000_001, "over 1,000,000 steps"),
        (b"}" + text(b"a" * 5000) + b"K\x01s.", "a name of 5,000 characters; expected at most 4,096"),
        (b"\x8d" + struct.pack("<Q", 1 << 60) + b"a.", "expected 1152921504606846976 bytes"),
        (b"\x8e" + struct.pack("<Q", (1 << 63) - 1) + b"a.", "expected 9223372036854775807 bytes"),
        (b"\x96" + struct.pack("<Q", 1 << 40) + b"a.", "expected 1099511627776 bytes"),
        (b"\x8b" + struct.pack("<i", 4) + b"\xff" * 4 + b".", "an instruction that torch.save does not write"),
        (b"\x97.", "an instruction that torch.save does not write"),
        (b"\x82\x01.", "an instruction that torch.save does not write"),
        (b"\x84\x01\x01\x01\x01.", "an instruction that torch.save does not write"),
        (b"(ios\nsystem\n.", "an instruction that torch.save does not write"),
        (b"]2.", "an instruction that torch.save does not write"),
        (b"(cos\nsystem\no.", r"Python objects besides its tensors \(os.system\)"),
        (text(b"os") + text(b"system") + b"\x93.", r"Python objects besides its tensors \(os.system\)"),
        (b"ccollections\nnamedtuple\n.", r"besides its tensors \(collections.namedtuple\)"),
        (b"ctorch\nload\n.", r"besides its tensors \(torch.load\)"),
        (b"c" + b"a" * 100_000 + b"\nb\n.", r"besides its tensors \('a{199}…\)"),
        (b"c\x1b[31m\nb\n.", r"besides its tensors \('\\x1b\[31m.b'\)"),
        (b"cbuiltins\nset\n" + WIDE + b"R.", "a call of something that cannot be called"),
        (b"ctorch\nfloat32\n)R.", "a call of something that cannot be called"),
        (b"ccollections\nOrderedDict\n]\x85R.", "its steps do not fit each other"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x01K\x01K\x01tR.", "a tensor without a storage"),
        (WIDE + b"Q.", "a storage that torch.save does not write"),
        (b"K\x01K\x02\x87.", "a tuple of more values than the stack holds"),
        (b"}(K\x01u.", "a key without a value"),
        (b"K\x01(u.", "items of something that is not a dictionary"),
        (b"K\x01K\x02a.", "values of something that is not a list"),
        (b"h\x05.", "its steps do not fit each other"),
        (b"t.", "its steps do not fit each other"),
        (b".", "its steps do not fit each other"),
        (b"", "exhausted before seeing STOP"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[:30],
)
def test_what_torch_would_not_write_is_refused(steps: bytes, says: str):
    with pytest.raises(MAEError, match=says) as caught:
        read(steps)
    assert len(str(caught.value)) < 600


STORAGE = b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + b"K\x0atQ"


@pytest.mark.parametrize(
    "sizes",
    [b"K\x00(K\x02t(t", b"K\x00]]", b"J\xff\xff\xff\xff))", b"K\x00\x88\x85K\x01\x85",
     b"K\x00J\xff\xff\xff\xff\x85K\x01\x85"],
    ids=["fewer strides", "lists", "an offset below 0", "a size of True", "a size below 0"],
)  # fmt: skip
def test_tensors_of_no_possible_shape_are_refused(sizes: bytes):
    with pytest.raises(MAEError, match="its pickle is damaged"):
        read(b"ctorch._utils\n_rebuild_tensor\n(" + STORAGE + sizes + b"tR.")


def test_plain_values_are_read():
    assert read(b"K\x07.") == 7
    assert read(b"](K\x01G" + struct.pack(">d", 2.5) + text("ä".encode()) + b"N\x88\x89e.") == [
        1, 2.5, "ä", None, True, False,
    ]  # fmt: skip
    assert read(b"}" + text(b"a") + b"}" + text(b"b") + b")ss.") == {"a": {"b": ()}}
    assert read(b"\x8a\x20" + b"\x7f" * 32 + b".") is UNREAD
