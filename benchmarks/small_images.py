"""Three small labelled sets of images of 64 pixels: blood cells, textures, and solids under changing light.

Each is written as `train/CLASS/NNN.png` and `test/CLASS/NNN.png`. Textures and solids are drawn here, always the same
ones; neither colour nor brightness tells their class.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

SIDE = 64
PARTS = {"train": 0, "test": 1}
CELLS = ("WBC", "RBC", "Platelets")


def blood_cells(bccd: Path, out: Path, *, each: int = 150) -> None:
    """So many cells of each class for either part, cut out by the longer side of their boxes.

    Training and test cells lie in different photographs: those of even and of odd place in the order of their names.

    Args:
        bccd: a folder with `Annotations` in Pascal VOC's format and `JPEGImages`.
        out: where the set is written.
        each: cells of a class in a part.
    """
    for part, odd in PARTS.items():
        boxes: dict[str, list[tuple[Path, list[int]]]] = {name: [] for name in CELLS}
        for annotation in sorted((bccd / "Annotations").glob("*.xml"))[odd::2]:
            photograph = bccd / "JPEGImages" / f"{annotation.stem}.jpg"
            for cell in ElementTree.parse(annotation).iter("object"):
                ends = [int(cell.findtext(f"bndbox/{end}", "0")) for end in ("xmin", "ymin", "xmax", "ymax")]
                if ends[2] > ends[0] and ends[3] > ends[1]:
                    boxes[cell.findtext("name", "")].append((photograph, ends))
        for name, found in boxes.items():
            chosen = random.Random(f"{part} {name}").sample(found, each)
            _write(out, part, name, (_cut(photograph, ends) for photograph, ends in chosen))


def _cut(photograph: Path, ends: list[int]) -> Image.Image:
    left, top, right, bottom = ends
    with Image.open(photograph) as image:
        side = min(max(right - left, bottom - top), *image.size)
        x = min(max((left + right - side) // 2, 0), image.width - side)
        y = min(max((top + bottom - side) // 2, 0), image.height - side)
        return image.convert("RGB").crop((x, y, x + side, y + side)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def _write(out: Path, part: str, name: str, images: Iterator[Image.Image]) -> None:
    folder = out / part / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        image.save(folder / f"{number:03}.png")


def _drawn(out: Path, classes: dict[str, Callable[[np.random.Generator], np.ndarray]], *, each: int) -> None:
    """So many images of each class for either part, of a generator of their own."""
    for part, number in PARTS.items():
        for label, (name, draw) in enumerate(classes.items()):
            generator = np.random.default_rng([number, label])
            _write(out, part, name, (Image.fromarray(draw(generator)) for _ in range(each)))


# Textures: a pattern in [0, 1] over turned, scaled and moved coordinates, between two colours, under uneven light.

Pattern = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]


def _stripes(x: np.ndarray, y: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return np.sin(2 * np.pi * x) > 0


def _checks(x: np.ndarray, y: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return (np.floor(2 * x) + np.floor(2 * y)) % 2


def _dots(x: np.ndarray, y: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return np.hypot((x + 0.5 * (np.floor(y) % 2)) % 1 - 0.5, y % 1 - 0.5) < 0.3


def _bricks(x: np.ndarray, y: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    row = np.floor(2 * y)
    return ((x + 0.5 * (row % 2)) % 1 > 0.1) & ((2 * y) % 1 > 0.2)


def _waves(x: np.ndarray, y: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return np.sin(2 * np.pi * (x + 0.3 * np.sin(2 * np.pi * y))) > 0


def _zigzag(x: np.ndarray, y: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return np.sin(2 * np.pi * (x + np.abs(y % 1 - 0.5))) > 0


def _cracks(x: np.ndarray, y: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    centres = generator.uniform([x.min(), y.min()], [x.max(), y.max()], (60, 2))
    distances = np.sort(np.hypot(x[..., None] - centres[:, 0], y[..., None] - centres[:, 1]), axis=-1)
    return distances[..., 1] - distances[..., 0] > 0.08


def _clouds(x: np.ndarray, y: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    frequencies = np.hypot(*np.meshgrid(np.fft.fftfreq(SIDE), np.fft.fftfreq(SIDE)))
    frequencies[0, 0] = 1
    field = np.fft.ifft2(np.fft.fft2(generator.normal(size=(SIDE, SIDE))) / frequencies**1.5).real
    return (field - field.min()) / np.ptp(field)


_PATTERNS: dict[str, Pattern] = {
    "stripes": _stripes,
    "checks": _checks,
    "dots": _dots,
    "bricks": _bricks,
    "waves": _waves,
    "zigzag": _zigzag,
    "cracks": _cracks,
    "clouds": _clouds,
}


def _texture(pattern: Pattern, generator: np.random.Generator) -> np.ndarray:
    rows, columns = np.mgrid[:SIDE, :SIDE] / SIDE - 0.5
    angle, scale = generator.uniform(0, 2 * np.pi), generator.uniform(3, 7)
    move = generator.uniform(0, 10, 2)
    x = scale * (np.cos(angle) * columns - np.sin(angle) * rows) + move[0]
    y = scale * (np.sin(angle) * columns + np.cos(angle) * rows) + move[1]
    amount = np.asarray(pattern(x, y, generator), dtype=float)[..., None]
    first, second = _two_colours(generator)
    slope = generator.uniform(-0.4, 0.4, 2)
    light = 1 + slope[0] * rows + slope[1] * columns
    return _as_bytes((first * amount + second * (1 - amount)) * light[..., None], generator)


def _two_colours(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Any two that can be told apart."""
    while True:
        first, second = generator.uniform(0.1, 0.9, (2, 3))
        if np.abs(first - second).mean() > 0.2:
            return first, second


def _as_bytes(image: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    noisy = image + generator.normal(scale=0.02, size=image.shape)
    return (255 * noisy.clip(0, 1)).round().astype(np.uint8)


# Solids: where parallel rays first meet the surface of a signed distance, lit from a random side.

Solid = Callable[[np.ndarray], np.ndarray]


def _sphere(p: np.ndarray) -> np.ndarray:
    return np.linalg.norm(p, axis=-1) - 0.6


def _cube(p: np.ndarray) -> np.ndarray:
    return _outside(np.abs(p) - 0.45)


def _cylinder(p: np.ndarray) -> np.ndarray:
    return _outside(np.stack([np.hypot(p[..., 0], p[..., 2]) - 0.4, np.abs(p[..., 1]) - 0.55], axis=-1))


def _ring(p: np.ndarray) -> np.ndarray:
    return np.hypot(np.hypot(p[..., 0], p[..., 2]) - 0.5, p[..., 1]) - 0.17


def _cone(p: np.ndarray) -> np.ndarray:
    slanted = 0.85 * np.hypot(p[..., 0], p[..., 2]) + 0.53 * (p[..., 1] - 0.6)
    return np.maximum(slanted, -0.5 - p[..., 1])


def _octahedron(p: np.ndarray) -> np.ndarray:
    return (np.abs(p).sum(axis=-1) - 0.75) / np.sqrt(3)


def _outside(q: np.ndarray) -> np.ndarray:
    return np.linalg.norm(np.maximum(q, 0), axis=-1) + np.minimum(q.max(axis=-1), 0)


_SOLIDS: dict[str, Solid] = {
    "sphere": _sphere,
    "cube": _cube,
    "cylinder": _cylinder,
    "ring": _ring,
    "cone": _cone,
    "octahedron": _octahedron,
}


def _lit(solid: Solid, generator: np.random.Generator) -> np.ndarray:
    turn, _ = np.linalg.qr(generator.normal(size=(3, 3)))
    size, move = generator.uniform(0.7, 1.1), generator.uniform(-0.2, 0.2, 2)

    def distance(p: np.ndarray) -> np.ndarray:
        return size * solid((p / size) @ turn)

    rows, columns = np.mgrid[:SIDE, :SIDE] / (SIDE / 2) - 1
    points = np.stack([columns - move[0], rows - move[1], np.full_like(rows, -2.0)], axis=-1)
    for _ in range(40):
        points[..., 2] += np.minimum(distance(points), 0.5)
    normal = np.stack([distance(points + step) - distance(points - step) for step in 1e-3 * np.eye(3)], axis=-1)
    normal /= np.linalg.norm(normal, axis=-1, keepdims=True) + 1e-9
    lamp = generator.normal(size=3) - [0, 0, 1]  # mostly from the viewer's side
    shade = 0.15 + 0.85 * (normal @ (lamp / np.linalg.norm(lamp))).clip(0)
    colour, ground = _two_colours(generator)
    slope = generator.uniform(-0.3, 0.3, 2)
    behind = ground * (1 + slope[0] * rows + slope[1] * columns)[..., None]
    hit = (np.abs(distance(points)) < 0.02)[..., None]
    return _as_bytes(np.where(hit, colour * shade[..., None], behind) * generator.uniform(0.6, 1.4), generator)


def textures(out: Path, *, each: int = 60) -> None:
    """Eight patterns, so many images of each for either part."""
    _drawn(out, {name: partial(_texture, of) for name, of in _PATTERNS.items()}, each=each)


def solids(out: Path, *, each: int = 80) -> None:
    """Six solids, so many images of each for either part."""
    _drawn(out, {name: partial(_lit, of) for name, of in _SOLIDS.items()}, each=each)
