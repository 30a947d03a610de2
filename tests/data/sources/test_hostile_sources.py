"""Sources made to do harm: nothing is waited for, run out of or followed; tests/hostile has many more."""

import os
import tracemalloc
import zipfile

import pytest
from data.pictures import archive, loaded, names_of, png

from mae.data.decode.limits import UnreadableImage
from mae.data.sources.open import open_source
from mae.errors import UsageError


def test_a_link_to_itself_is_passed_over(tree):
    root = tree({"1.png": png()})
    (root / "2.png").symlink_to(root / "2.png")
    assert names_of(open_source(str(root), data_root=root)) == ["1.png"]


@pytest.mark.parametrize("suffix", ["zip", "txt"])
def test_pipes_are_no_source(tmp_path, suffix):
    os.mkfifo(tmp_path / f"pipe.{suffix}")
    with pytest.raises(UsageError, match="is a file, not a source of images"):
        open_source(str(tmp_path / f"pipe.{suffix}"), data_root=tmp_path)


def test_names_that_no_file_can_have_are_usage_errors(tree):
    root = tree({"nul.txt": b"a\0b.png\n", "long.txt": b"a" * 300, "longer.txt": b"a" * 100_000})
    for name in ("nul", "long", "longer"):
        with pytest.raises(UsageError, match="line 1: .{1,210} is not a file"):
            open_source(str(root / f"{name}.txt"), data_root=root)
    with pytest.raises(UsageError, match="aaa cannot be opened: File name too long"):
        open_source("a" * 300, data_root=root)


def test_zip_member_beyond_the_end_takes_no_memory(tmp_path):
    path = archive(tmp_path / "x.zip", {"far.png": png()}, zipfile.ZIP_STORED)
    raw = bytearray(path.read_bytes())
    entry = raw.rindex(b"PK\1\2")
    raw[entry + 20 : entry + 28] = (500 << 20).to_bytes(4, "little") * 2
    path.write_bytes(raw)
    source = open_source(str(path), data_root=tmp_path)
    tracemalloc.start()
    with pytest.raises(UnreadableImage, match="far.png reaches beyond the archive's end; the zip is broken"):
        loaded(source, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_zip_member_without_a_name_is_passed_over(tmp_path):
    path = archive(tmp_path / "x.zip", {"a": b"", "b.png": png()}, zipfile.ZIP_STORED)
    raw = path.read_bytes()
    start = raw.index(b"PK\1\2")
    unnamed = raw[:start] + raw[start : start + 28] + bytes(2) + raw[start + 30 : start + 46] + raw[start + 47 :]
    tail = unnamed.index(b"PK\5\6")
    size = int.from_bytes(unnamed[tail + 12 : tail + 16], "little") - 1
    path.write_bytes(unnamed[: tail + 12] + size.to_bytes(4, "little") + unnamed[tail + 16 :])
    assert names_of(open_source(str(path), data_root=tmp_path)) == ["b.png"]
