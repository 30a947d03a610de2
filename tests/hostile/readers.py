"""Every reader of something from outside, as one kind of function: a path in, a line on what was read out.

Each must end in a value or in an `MAEError`; anything else is a fault of ours.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mae.config import RunConfig
from mae.core.method import MethodConfig
from mae.data.annotations.detection import open_detection
from mae.data.dataset import sampled
from mae.data.dataset.channels import ImageFormat
from mae.data.dataset.reading import ImageReader
from mae.data.decode.image import decode, probe
from mae.data.decode.limits import UnreadableImage
from mae.data.sources.open import open_source
from mae.errors import MAEError
from mae.evaluation.extractors.feature_arrays import read_arrays
from mae.interop.imports.reading import read_external
from mae.models.file import load_model
from mae.training.checkpoint import check


def outcome(read: Callable[[Path], str], path: Path) -> tuple[str, str]:
    """`ok` or `refused` with what was read or said; `crashed` with any other error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's words on what it then refuses
        try:
            return "ok", read(path)
        except MAEError as error:
            return "refused", str(error)
        except Exception as error:
            return "crashed", f"{type(error).__name__}: {error}"


def read_image(path: Path) -> str:
    """The image's shape and type; the header must have told the same."""
    data, name = path.read_bytes(), path.name
    try:
        info = probe(data, name=name)
    except UnreadableImage as refusal:
        try:
            decode(data, name=name)
        except UnreadableImage:
            raise refusal from None
        raise AssertionError(f"decoded, though its header was refused: {refusal}") from refusal
    told = f"{info.width}x{info.height}x{info.channels} {info.dtype}"
    pixels = ImageFormat(channels=info.channels, dtype=info.dtype).of(decode(data, name=name), name=name)
    height, width, channels = pixels.shape
    found = f"{width}x{height}x{channels} {pixels.dtype}"
    if found != told:
        raise AssertionError(f"the header told {told}, the pixels are {found}")
    return found


def read_source(path: Path) -> str:
    """How many images of a folder, list or archive can be read, of how many; refused where none can."""
    source = open_source(str(path), data_root=path.parent)
    sampled.fingerprint(source), sampled.version(source)
    reader, readable, refusals = ImageReader(source=source), 0, list[str]()
    for index in range(len(source)):
        try:
            readable += reader.load(index).size > 0
        except UnreadableImage as refusal:
            refusals.append(str(refusal))
    if not readable:
        raise UnreadableImage("; ".join(refusals))
    return f"{readable} of {len(source)}"


def read_config(path: Path) -> str:
    """A run's configuration; what was accepted must come back from JSON as it was."""
    config = RunConfig.read(path)
    assert RunConfig.from_json(config.to_json()).to_json() == config.to_json()
    return "configuration"


def read_model_config(path: Path) -> str:
    """A model's configuration, as it stands in the header of its file."""
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise MAEError(f"no JSON: {error}") from error
    if not isinstance(values, dict):
        raise MAEError("no object")
    MethodConfig.from_json(values)
    return "configuration"


def read_model(path: Path) -> str:
    """A model's file."""
    return f"{sum(weight.numel() for weight in load_model(path).parameters())} weights"


def read_weights(path: Path) -> str:
    """Weights that others wrote."""
    return f"{sum(weight.numel() for weight in read_external(path).tensors.values())} weights"


def read_checkpoint(path: Path) -> str:
    """A checkpoint's folder, compared with its manifest."""
    if wrong := check(path):
        raise MAEError(wrong)
    return "checkpoint"


def read_features(path: Path) -> str:
    """A folder of stored features; what is damaged is computed anew, which counts as refused here."""
    arrays = read_arrays(path)
    if arrays is None:
        raise MAEError(f"{path} is damaged")
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


def read_labels(path: Path) -> str:
    """How many objects the labels of a folder hold; every outline is drawn."""
    data, count = open_detection(path), 0
    for split in (data.train, data.test):
        for number in range(len(split.source)):
            objects = split.objects(number)
            assert (objects.boxes[:, :2] < objects.boxes[:, 2:]).all() and (objects.boxes >= 0).all()
            if objects.outlines is not None:
                objects.masks(6, 8)
            count += len(objects)
    return f"{count} objects"


def take_memory(path: Path) -> str:
    """Takes 2 GiB, to see that the limit bites."""
    return str(np.ones(2 << 30, dtype=np.uint8).sum())


def spin(path: Path) -> str:
    """Never ends, to see that the watch bites."""
    while True:
        pass


READERS: dict[str, Callable[[Path], str]] = {
    "image": read_image,
    "source": read_source,
    "config": read_config,
    "model config": read_model_config,
    "model": read_model,
    "weights": read_weights,
    "checkpoint": read_checkpoint,
    "features": read_features,
    "labels": read_labels,
}
CANARIES: dict[str, Callable[[Path], str]] = {"memory": take_memory, "spin": spin}
