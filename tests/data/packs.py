"""Packs for tests, of images made on the spot."""

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from data.pictures import encoded, noise
from numpy.lib import format as npy_format
from PIL import Image

from mae.data.packs.writer import PackResult, pack
from mae.data.sources.pack_format import INDEX, Manifest, read_manifest


def jpeg(height: int = 12, width: int = 10, seed: int = 0, **options: object) -> bytes:
    """A JPEG of noise that is smooth enough to be kept by one."""
    small = noise(max(height // 4, 1), max(width // 4, 1), 3, seed)
    return encoded(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC), "JPEG", **options)


def turned(height: int = 12, width: int = 20, seed: int = 0) -> bytes:
    """A JPEG whose EXIF says that it must be turned by a quarter: shown, it is `width` high and `height` wide."""
    exif = Image.Exif()
    exif[274] = 6
    return jpeg(height, width, seed, exif=exif)


def some_images(count: int = 10) -> dict[str, bytes]:
    """Files of two classes."""
    return {f"{('cat', 'dog')[number % 2]}/{number:02d}.jpg": jpeg(seed=number) for number in range(count)}


def packed(folder: Path, source: Path | str, **options: object) -> PackResult:
    """A pack in this process, its shards of three images."""
    return pack(source, folder, **({"per_shard": 3, "workers": 1} | options))


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a pack, those of its working folder too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changed(folder: Path, change: Callable[[np.ndarray], None]) -> None:
    """Changes the rows of a pack's first index and makes every checksum fit again."""
    path = folder / "shard-000000.index.npy"
    rows = np.load(path)
    assert rows.dtype == INDEX
    change(rows)
    replaced(folder, "index", path, as_npy(rows))


def as_npy(values: np.ndarray) -> bytes:
    """An NPY file."""
    stream = io.BytesIO()
    npy_format.write_array(stream, values, version=(1, 0), allow_pickle=True)
    return stream.getvalue()


def replaced(folder: Path, kind: str, path: Path, data: bytes) -> None:
    """Puts another file of a pack's first shard in place, and its size and checksum into `pack.json`."""
    path.write_bytes(data)
    told = json.loads((folder / "pack.json").read_text())
    told["shards"][0][kind] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "pack.json").write_text(json.dumps(told))


def manifest(folder: Path) -> Manifest:
    """What its `pack.json` tells."""
    return read_manifest((folder / "pack.json").read_bytes(), place=str(folder))
