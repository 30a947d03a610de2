"""Small images of the kinds that docs/domains speaks of: drawn, with the bands, bits and gaps of real ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image
from scipy.ndimage import gaussian_filter

SIDE = 64
_ROWS, _COLUMNS = np.mgrid[:SIDE, :SIDE]


def _disc(rng: np.random.Generator, radius: float) -> np.ndarray:
    row, column = rng.uniform(radius, SIDE - radius, 2)
    return np.hypot(_ROWS - row, _COLUMNS - column) < radius


def _write_bands(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, image, photometric="minisblack", planarconfig="contig")


def fields(folder: Path) -> None:
    """Fields of view of two stains, 12 bits in 16, larger than what a model sees."""
    rng = np.random.default_rng(0)
    for number in range(3):
        rows = [np.concatenate([_cells(rng, 6) for _ in range(3)], axis=1) for _ in range(2)]
        _write_bands(folder / f"{number}.tif", np.concatenate(rows))


def _cells(rng: np.random.Generator, radius: float) -> np.ndarray:
    image = rng.normal(200, 20, (SIDE, SIDE, 2))
    for _ in range(4):
        image[_disc(rng, radius)] += (1500, 300)
        image[_disc(rng, radius * 1.5)] += (0, 900)
    return image.clip(0, 4095).astype(np.uint16)


def cells(folder: Path) -> None:
    """Tiles of such fields."""
    rng = np.random.default_rng(8)
    for number in range(16):
        _write_bands(folder / f"{number}.tif", _cells(rng, 6))
    (folder / "channels.txt").write_text("dapi\nactin\n")


def cells_labelled(folder: Path) -> None:
    """Tiles of such fields, of two treatments, by plate."""
    rng = np.random.default_rng(1)
    for part, count in (("train", 8), ("test", 4)):
        for name, radius in (("control", 4), ("treated", 9)):
            for number in range(count):
                _write_bands(folder / part / name / f"{number}.tif", _cells(rng, radius))
    (folder / "channels.txt").write_text("dapi\nactin\n")


def tiles(folder: Path) -> None:
    """Four bands of reflectance in floating point, with gaps, named as Sentinel-2's."""
    rng = np.random.default_rng(2)
    for number in range(16):
        _write_bands(folder / f"{number}.tif", _ground(rng, wet=number % 2 == 0))
    (folder / "channels.txt").write_text("B02\nB03\nB04\nB08\n")


def _ground(rng: np.random.Generator, *, wet: bool) -> np.ndarray:
    relief = gaussian_filter(rng.normal(0, 1, (SIDE, SIDE, 4)), (4, 4, 0))
    image = np.array([0.05, 0.08, 0.1, 0.3]) * (1 + relief)
    image[_disc(rng, 20)] -= (0, 0.02, 0.06, 0.25 if wet else 0.05)
    image[:6, : int(rng.integers(4, 40))] = np.nan
    return image.astype(np.float32)


def tiles_labelled(folder: Path) -> None:
    """Such tiles of two regions, with and without water."""
    rng = np.random.default_rng(3)
    for part, count in (("train", 8), ("test", 4)):
        for name in ("dry", "water"):
            for number in range(count):
                _write_bands(folder / part / name / f"{number}.tif", _ground(rng, wet=name == "water"))
    (folder / "channels.txt").write_text("B02\nB03\nB04\nB08\n")


def scans(folder: Path) -> None:
    """Volumes of Hounsfield units, one a patient, on a field of view that air fills."""
    rng = np.random.default_rng(4)
    folder.mkdir()
    for number in range(4):
        np.save(folder / f"patient{number}.npy", np.stack([_slice(rng)[0] for _ in range(6)]))


def _slice(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    body, organ = np.hypot(_ROWS - 32, (_COLUMNS - 32) / 1.2) < 29, _disc(rng, 8)
    relief = 200 * gaussian_filter(rng.normal(0, 1, (SIDE, SIDE)), 2)
    image = np.where(body, 40 + relief, -1000)
    image[organ & body] += 120
    return image.astype(np.int16), (organ & body).astype(np.uint8)


def slices(folder: Path) -> None:
    """Clipped slices of such volumes."""
    rng = np.random.default_rng(9)
    folder.mkdir()
    for number in range(16):
        np.save(folder / f"{number}.npy", _slice(rng)[0].clip(-160, 240).astype(np.float32))


def slices_labelled(folder: Path) -> None:
    """Slices of such volumes, and which pixels are the organ's."""
    rng = np.random.default_rng(5)
    for part, count in (("train", 8), ("val", 4)):
        for kind in ("images", "masks"):
            (folder / part / kind).mkdir(parents=True)
        for number in range(count):
            image, mask = _slice(rng)
            np.save(folder / part / "images" / f"{number}.npy", image.clip(-160, 240).astype(np.float32))
            Image.fromarray(mask).save(folder / part / "masks" / f"{number}.png")
    (folder / "classes.txt").write_text("elsewhere\norgan\n")


def parts(folder: Path) -> None:
    """Grey photographs of a brushed surface without a fault."""
    rng = np.random.default_rng(6)
    folder.mkdir()
    for number in range(16):
        _surface(rng).save(folder / f"{number}.png")


def _surface(rng: np.random.Generator, *, scratched: bool = False) -> Image.Image:
    image = 120 + rng.normal(0, 12, (SIDE, 1)) + rng.normal(0, 3, (SIDE, SIDE))
    if scratched:
        slope, start = rng.uniform(0.3, 2), rng.uniform(10, 50)
        image[abs(_COLUMNS - start - slope * (_ROWS - 32)) < 1.5] += 80
    return Image.fromarray(image.clip(0, 255).astype(np.uint8))


def parts_labelled(folder: Path) -> None:
    """Such photographs with and without a scratch."""
    rng = np.random.default_rng(7)
    for part, count in (("train", 8), ("test", 4)):
        for name in ("good", "scratch"):
            place = folder / part / name
            place.mkdir(parents=True)
            for number in range(count):
                _surface(rng, scratched=name == "scratch").save(place / f"{number}.png")


DRAWN: dict[str, Callable[[Path], None]] = {
    "fields": fields,
    "cells": cells,
    "cells-labelled": cells_labelled,
    "tiles": tiles,
    "tiles-labelled": tiles_labelled,
    "scans": scans,
    "slices": slices,
    "slices-labelled": slices_labelled,
    "parts": parts,
    "parts-labelled": parts_labelled,
}
"""What draws the folder of each name."""
