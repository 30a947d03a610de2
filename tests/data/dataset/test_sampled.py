"""What tells that images were changed in place, and how little of them is read for it."""

import os
from pathlib import Path

import numpy as np
import pytest
from data.pictures import archive, png

from mae.data.dataset import sampled
from mae.data.items import digest_of_file, digest_of_parts
from mae.data.sources import memory as arrays
from mae.data.sources.open import open_source


def changed(path: Path, place: int) -> None:
    """One bit, and neither size nor times."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def both(root: Path) -> tuple[str, str]:
    source = open_source(str(root), data_root=root)
    return sampled.fingerprint(source), sampled.version(source)


@pytest.mark.parametrize("place", [0, 30, -1])
def test_one_bit_of_one_file_changes_fingerprint_and_version(tree, place):
    root = tree({f"{number}.png": png(seed=number) for number in range(5)})
    before = both(root)
    assert both(root) == before
    changed(root / "3.png", place)
    assert all(one != other for one, other in zip(before, both(root), strict=True))


def test_a_copied_folder_has_the_same_fingerprint(tree, tmp_path):
    root = tree({"a.png": png(seed=1), "b.png": png(seed=2)})
    before = both(root)
    moved = root.rename(tmp_path / "moved")
    for path in moved.iterdir():
        os.utime(path, ns=(1, 1))
    after = both(moved)
    assert after[0] == before[0] and after[1] != before[1]


@pytest.mark.parametrize("kind", ["zip", "tar", "list.txt"])
def test_other_kinds_of_files_tell_a_change_too(tree, tmp_path, kind):
    import tarfile

    found = []
    for number in range(2):
        files = {"a.png": png(seed=1), "b.png": png(seed=2)}
        if number:
            files["b.png"] = files["b.png"][:-20] + bytes([files["b.png"][-20] ^ 1]) + files["b.png"][-19:]
        if kind == "zip":
            path = archive(tmp_path / "x.zip", files)
        else:
            root = tree(files | {"list.txt": b"a.png\nb.png\n"})
            path = root / kind
            if kind == "tar":
                path = tmp_path / "x.tar"
                with tarfile.open(path, "w") as tar:
                    for name in ("a.png", "b.png"):
                        tar.add(root / name, name)
        os.utime(path, ns=(1, 1))
        found.append(sampled.fingerprint(open_source(str(path), data_root=tmp_path)))
    assert found[0] != found[1]


def test_one_pixel_of_an_array_changes_the_fingerprint():
    pixels = np.zeros((6, 4, 4, 3), np.uint8)
    source = arrays.whole_array(pixels, name="x", note="")
    before = sampled.fingerprint(source)
    pixels[5, 3, 3, 2] = 1
    assert sampled.fingerprint(source) != before


def test_of_a_large_file_little_is_read(tmp_path):
    path, size = tmp_path / "large.npy", 1 << 30
    with path.open("wb") as file:
        file.truncate(size)  # takes no room
    read = []
    digest = digest_of_parts(lambda place, length: read.append((place, length)) or bytes(length), size)
    assert digest == digest_of_file(path)
    assert sum(length for _, length in read) == 64 << 10 and read[0][0] == 0 and sum(read[-1]) == size
    assert len({place for place, _ in read}) == 8
    with path.open("r+b") as file:
        file.seek(size - 1)
        file.write(b"x")
    assert digest != digest_of_file(path)


@pytest.mark.parametrize("size", [0, 1, 64 << 10, (64 << 10) + 1, 70_000])
def test_of_any_size_parts_lie_inside(size):
    def read(place: int, length: int) -> bytes:
        assert 0 <= place <= place + length <= size
        return bytes(length)

    assert len(digest_of_parts(read, size)) == 16


def test_the_sample_is_bounded_and_says_which_items(monkeypatch):
    source = arrays.whole_array(np.zeros((1000, 1, 1, 1), np.uint8), name="x", note="")
    found = sampled.sampled(source)
    assert len(found.numbers) == len(set(found.numbers)) == len(found.contents) == sampled.SAMPLED
    assert max(found.numbers) < 1000 and found == sampled.sampled(source)


def test_an_item_that_cannot_be_read_is_told(tree):
    root = tree({"a.png": png(seed=1), "b.png": png(seed=2)})
    source = open_source(str(root), data_root=root)
    (root / "a.png").unlink()
    assert [bool(each) for each in sampled.sampled(source).contents] == [False, True]
