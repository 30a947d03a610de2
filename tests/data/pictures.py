"""Images and sources for the data tests, all made on the spot."""

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from mae.data.dataset.reading import ImageReader
from mae.data.decode.limits import ImageInfo, UnreadableImage
from mae.data.sources.source import Source

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Random uint8 pixels `[H, W, C]`."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(image: Image.Image, file_format: str = "PNG", **options: object) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def png(height: int = 12, width: int = 10, seed: int = 0, channels: int = 3) -> bytes:
    """A PNG of noise."""
    pixels = noise(height, width, channels, seed)
    return encoded(Image.fromarray(pixels[..., 0] if channels == 1 else pixels))


def loaded(source: Source, index: int) -> np.ndarray:
    """An image of a source, read and decoded."""
    return ImageReader(source=source).load(index)


def probed(source: Source, index: int) -> ImageInfo:
    """What is known of an image of a source from its header."""
    return ImageReader(source=source).probe(index)


class Pictures(Source):
    """A source in memory for tests; numbers in `broken` cannot be read, though their sizes are recorded."""

    name = "pictures"
    note = "for a test"

    def __init__(self, arrays: list[np.ndarray], broken: frozenset[int] = frozenset()) -> None:
        self.arrays, self.broken = arrays, broken

    def __len__(self) -> int:
        return len(self.arrays)

    def read(self, index: int) -> np.ndarray:
        if index in self.broken:
            raise UnreadableImage(f"{self.item_name(index)} is broken for this test")
        return self.arrays[index]

    def recorded(self, index: int) -> ImageInfo:
        height, width, channels = self.arrays[index].shape
        return ImageInfo(height=height, width=width, channels=channels, dtype=self.arrays[index].dtype)

    def item_name(self, index: int) -> str:
        return f"picture-{index}"

    def fingerprint(self) -> str:
        return "f" * 16

    def content(self, index: int) -> str:
        return "c" * 16

    def version(self) -> str:
        return "e" * 16

    def take(self, indices: np.ndarray, note: str) -> "Pictures":
        raise NotImplementedError


def archive(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as writer:
        for name, data in files.items():
            writer.writestr(name, data)
    return path


def names_of(source) -> list[str]:
    return [source.names[index] for index in range(len(source))]
