"""What tells two sources apart: the fingerprint of a run's images, and the version of what is kept of them."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from data.pictures import archive, png

from mae.data.sources import memory as arrays
from mae.data.sources.open import open_source


def test_fingerprint_changes_with_names_and_sizes_and_not_with_the_place(tree, tmp_path):
    root = tree({"a.png": png(), "b.png": png()})
    first = open_source(str(root), data_root=root).fingerprint()
    moved = root.rename(tmp_path / "moved")
    assert open_source(str(moved), data_root=root).fingerprint() == first
    (moved / "b.png").write_bytes(png(13))
    second = open_source(str(moved), data_root=root).fingerprint()
    (moved / "b.png").rename(moved / "c.png")
    assert len({first, second, open_source(str(moved), data_root=root).fingerprint()}) == 3
    assert len(first) == 16


def test_version_changes_when_a_file_is_changed_in_place(tree, tmp_path):
    root = tree({"a.png": png(seed=1), "b.png": png(seed=2), "list.txt": b"a.png\nb.png\n"})
    specs = [str(root), str(root / "list.txt")]
    first = [open_source(spec, data_root=root) for spec in specs]
    assert [open_source(spec, data_root=root).version() for spec in specs] == [source.version() for source in first]
    status, data = (root / "b.png").stat(), bytearray((root / "b.png").read_bytes())
    data[-20] ^= 1
    (root / "b.png").write_bytes(data)
    os.utime(root / "b.png", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    for spec, source in zip(specs, first, strict=True):
        again = open_source(spec, data_root=root)
        assert again.version() != source.version() and again.fingerprint() == source.fingerprint()
        assert len(again.version()) == 16
        changed, kept = ([one.take(np.array([n]), "") for one in (source, again)] for n in (1, 0))
        assert changed[0].version() != changed[1].version() and kept[0].version() == kept[1].version()
    (root / "b.png").rename(root / "c.png")
    assert open_source(specs[0], data_root=root).version() not in (first[0].version(), again.version())


def test_version_changes_with_the_folder(tree, tmp_path):
    """Two folders of files with the same names, sizes and times need not hold the same images."""
    root = tree({f"{folder}/{name}.png": png() for folder in ("a", "b") for name in ("x", "y")})
    for path in root.glob("*/*.png"):
        os.utime(path, ns=(0, 0))
    (root / "link").symlink_to(root / "a")
    (root / "list.txt").write_text("a/x.png\na/y.png\n")
    first, second, linked = (open_source(str(root / name), data_root=root) for name in ("a", "b", "link"))
    assert first.version() != second.version() and first.fingerprint() == second.fingerprint()
    assert first.version() == linked.version() == open_source(f"{root}/b/../a", data_root=root).version()
    assert first.take(np.array([0]), "").version() not in (first.version(), second.take(np.array([0]), "").version())
    listed = open_source(str(root / "list.txt"), data_root=root).version()
    moved = root.rename(tmp_path / "moved")
    assert open_source(str(moved / "a"), data_root=root).version() != first.version()
    assert open_source(str(moved / "list.txt"), data_root=root).version() != listed


def test_version_of_a_zip_is_of_its_checksums(tmp_path):
    data = png(seed=1)
    other = data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]
    found = []
    for number, second in enumerate((data, data, other)):
        path = archive(tmp_path / f"{number}.zip", {"a.png": data, "b.png": second})
        os.utime(path, ns=(0, number))
        found.append(open_source(str(path), data_root=tmp_path))
    versions = [source.version() for source in found]
    prints = [source.fingerprint() for source in found]
    assert versions[0] == versions[1] != versions[2] and prints[0] == prints[1] != prints[2]
    assert found[0].content(1) == found[1].content(1) != found[2].content(1)
    assert len({source.take(np.array([0]), "").version() for source in found}) == 1


def test_version_of_arrays_and_photographs_is_of_their_pixels():
    pixels = np.arange(5 * 4 * 4 * 3, dtype=np.uint8).reshape(5, 4, 4, 3)
    source = arrays.whole_array(pixels, name="x", note="")
    changed = pixels.copy()
    changed[3, 1, 2, 0] ^= 1
    other = arrays.whole_array(changed, name="x", note="")
    assert source.version() != other.version() and source.fingerprint() == other.fingerprint()
    parts = [[one.take(np.array([n]), "").version() for one in (source, other)] for n in (2, 3)]
    assert parts[0][0] == parts[0][1] and parts[1][0] != parts[1][1]
    turned = arrays.whole_array(
        np.ascontiguousarray(pixels.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3), name="x", note=""
    )
    assert turned.version() == source.version()
    tiles = open_source("builtin:photos", data_root=Path("/nowhere"))
    photos = [photo.copy() for photo in tiles.photos]
    assert replace(tiles, photos=tuple(photos)).version() == tiles.version()
    photos[2][5, 5, 1] ^= 1
    assert replace(tiles, photos=tuple(photos)).version() != tiles.version()
