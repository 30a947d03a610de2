"""Valid inputs and what damage makes of them, seeded: the same number gives the same input."""

import io
import json
import tempfile
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from hostile import containers, images, models
from hostile.forge import strip_tiff

from mae.config import RunConfig

TELLING = (
    b"\0", b"\xff", b"\x7f", b"\x80", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\xff" * 8, b"\0\x40",
    b"\x40\0", b"[" * 64, b"{" * 64, b'"', b"\\ud800", b"NaN", b"1e999", b"-1", b"../", b"\n",
)  # fmt: skip
"""Values at the edges of what fields hold, and words that formats of text know."""


Damage = tuple[int, int, int]
"""Its kind, where it is done and what with, as shares of 65536."""
KINDS = 6
_SHARES = 1 << 16


def damages(rng: np.random.Generator) -> list[Damage]:
    """One to four kinds of damage."""
    return [(int(kind), int(at), int(what)) for kind, at, what in rng.integers(
        0, (KINDS, _SHARES, _SHARES), (rng.integers(1, 5), 3))]  # fmt: skip


def mutated(data: bytes, other: bytes, done: Iterable[Damage]) -> bytes:
    """Turned bits, other bytes, a piece cut, doubled, or taken from another input.

    The checksums of a PNG are made right again, since nothing would be read behind a wrong one.
    """
    changed = bytearray(data)
    for kind, share, what in done:
        # Most formats keep what matters at their beginning.
        reach = min(len(changed), 128) if share % 3 == 0 else len(changed)
        at = reach * share // _SHARES
        length = 1 + min(len(changed) // 2, 256) * what // _SHARES
        if kind == 0 and changed:
            changed[min(at, len(changed) - 1)] ^= 1 << what % 8
        elif kind == 1:
            value = TELLING[what % len(TELLING)]
            changed[at : at + len(value)] = value
        elif kind == 2:
            changed[at : at + 2] = what.to_bytes(2, "little")
        elif kind == 3:
            del changed[at : at + length]
        elif kind == 4:
            changed[at:at] = changed[at : at + length]
        else:
            start = len(other) * what // _SHARES
            changed[at : at + length] = other[start : start + length]
    return _with_checksums(bytes(changed)) if changed.startswith(b"\x89PNG\r\n\x1a\n") else bytes(changed)


def _with_checksums(png: bytes) -> bytes:
    """A PNG whose chunks have the checksums of what they hold, as far as they can be followed."""
    parts, at = [png[:8]], 8
    while at + 12 <= len(png):
        end = at + 8 + int.from_bytes(png[at : at + 4], "big")
        parts.append(png[at:end])
        if end + 4 > len(png):
            break
        parts.append(zlib.crc32(png[at + 4 : end]).to_bytes(4, "big"))
        at = end + 4
    return b"".join(parts)


def seeds() -> dict[str, list[bytes]]:
    """Valid inputs of each reader that reads one file."""
    pictures = [data for name, data, _, _ in images.valid() if name not in ("largest", "16384 x 164")]
    pictures += [strip_tiff(8, 8, bytes(80), compression=kind, more=[(33628, 4, [9] * 9)]) for kind in (1, 8, 32773)]
    archives = [data for name, data, _, _ in containers.archives() if len(data) < 4096]
    stored, deflated = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
    two = [("train/cat/a.png", containers.picture(1)), ("b.jpg", containers.picture(2)), ("c/", b"")]
    options = [text.encode("utf-8", "surrogateescape") for _, text, _, _ in models.configs() if len(text) < 4096]
    return {
        "image": pictures,
        "zip": [*archives, containers.zipped(two, stored), containers.zipped(two, deflated)],
        "tar": [data for _, data, _, _ in containers.tars() if len(data) < 20_000],
        "list": [b"a.png\n../list/a.png\n# a comment\n\nb.png\r\n", b"\xef\xbb\xbfa.png\n", b"/dev/zero\n"],
        "names": [b"red\ngreen\nblue\n", b"\xef\xbb\xbfB02\r\nB03\r\n\r\nB04\r\n", b"a\na\n"],
        "config": [*options, json.dumps(_every_option()).encode()],
        "model config": [json.dumps(models.SMALL.to_json()).encode()],
        "model": [_model()],
        "weights": [_saved(is_archive=True), _saved(is_archive=False)],
        "features": [_array(np.ones((3, 2), np.float32)), _array(np.ones((2, 4), np.float16)), _array(np.arange(3))],
        "coco": [_coco()],
        "yolo": [b"0 0.5 0.5 0.2 0.4\n1 .1 .1 .9 .1 .5 .9\n", b"1 0.1 0.1 0.9 0.1 0.5 0.9\n"],
        "yaml": [b"names: [cat, 'a dog', \"x\"] # two\ntrain: images\n", b"names:\n  0: cat\n  1: dog\npath: ../a\n"],
        "voc": [_VOC, b'<?xml version="1.0" encoding="utf-8"?>' + _VOC],
    }


def _coco() -> bytes:
    """Every kind of outline, on images of 6 x 8 pixels."""
    outlines = [
        [[1, 1, 5, 1, 5, 5]],
        {"size": [6, 8], "counts": [10, 5, 33]},
        {"size": [6, 8], "counts": "d0330004NN"},
        [[0, 0, 9, 0, 9, 7], [2.5, 2, 4, 2, 4, 4, 2, 4]],
    ]
    annotations = [
        {"id": row, "image_id": row % 2, "category_id": 1, "bbox": [1, 1, 4, 4], "segmentation": outline, "iscrowd": 0}
        for row, outline in enumerate(outlines)
    ]
    pictures = [{"id": row, "file_name": f"{name}.png", "height": 6, "width": 8} for row, name in enumerate("ab")]
    return json.dumps({"images": pictures, "annotations": annotations, "categories": [{"id": 1, "name": "c"}]}).encode()


_VOC = (
    b"<annotation><size><width>8</width><height>6</height></size><object><name>c</name><difficult>1</difficult><bndbox>"
    b"<xmin>1</xmin><ymin>2</ymin><xmax>5</xmax><ymax>6.5</ymax></bndbox></object></annotation>"
)


def _every_option() -> dict[str, object]:
    return RunConfig.of(source="photos", steps=5, img_size=(32, 32), lr=1e-3).to_json()


def _array(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def _model() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return models.write_small(Path(folder) / "model.safetensors").read_bytes()


def _saved(*, is_archive: bool) -> bytes:
    """A file of torch.save in its form of today, or of before 2020."""
    stream = io.BytesIO()
    content = {"model": {"weight": torch.ones(3, 4), "bias": torch.zeros(5)}, "args": Namespace(epochs=3), "epoch": 1}
    torch.save(content, stream, _use_new_zipfile_serialization=is_archive)
    return stream.getvalue()


class Desk:
    """Where inputs are laid before they are read.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("list", "features", "named"):
            (folder / name).mkdir()
        (folder / "list" / "a.png").write_bytes(containers.picture())
        (folder / "named" / "a.png").write_bytes(containers.picture())
        (folder / "features" / "key.json").write_text('{"arrays": ["x"]}')
        for place in ("coco", "yolo/images", "yaml/images", "voc/images"):
            for name in "ab":
                path = folder / place / f"{name}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(containers.picture())
        for place in ("yolo/labels", "yaml/labels", "voc/annotations"):
            (folder / place).mkdir()
        (folder / "yolo" / "labels" / "b.txt").write_bytes(b"0 0.5 0.5 0.5 0.5\n")
        (folder / "yaml" / "labels" / "b.txt").write_bytes(b"0 0.5 0.5 0.5 0.5\n")
        (folder / "voc" / "annotations" / "b.xml").write_bytes(_VOC)
        self._places = {
            "image": ("image", "image.bin", ""),
            "zip": ("source", "archive.zip", ""),
            "tar": ("source", "archive.tar", ""),
            "list": ("source", "list/list.txt", ""),
            "names": ("source", "named/channels.txt", "named"),
            "config": ("config", "config.json", ""),
            "model config": ("model config", "model.json", ""),
            "model": ("model", "model.safetensors", ""),
            "weights": ("weights", "weights.pth", ""),
            "features": ("features", "features/x.npy", "features"),
            "coco": ("labels", "coco/labels.json", "coco"),
            "yolo": ("labels", "yolo/labels/a.txt", "yolo"),
            "yaml": ("labels", "yaml/data.yaml", "yaml"),
            "voc": ("labels", "voc/annotations/a.xml", "voc"),
        }

    def lay(self, kind: str, data: bytes) -> tuple[str, Path]:
        """Write an input; the reader's name and what it is to read."""
        reader, place, read = self._places[kind]
        (self.folder / place).write_bytes(data)
        return reader, self.folder / (read or place)
