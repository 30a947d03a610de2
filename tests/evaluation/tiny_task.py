"""Tiny labelled sets, models and tasks for the tests of the protocols."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tiny import tiny_config

from mae.data.sources.labels import LabelledData, LabelledSplit
from mae.data.sources.memory import whole_array
from mae.data.sources.source import Source
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.extractors.extractor import Extractor, model_extractor
from mae.evaluation.run import Evaluator
from mae.models.build import build_model
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.preprocess import Preprocessing
from mae.training.distributed import World

CPU = torch.device("cpu")
Part = tuple[Any, torch.Tensor]

NUM_TOKENS, DIM, NUM_CLASSES = 12, 16, 4  # of `hidden_signal`


def striped(count: int, *, seed: int, side: int = 16) -> tuple[np.ndarray, torch.Tensor]:
    """Noisy grey images `[n, side, side, 1]` with lying stripes, standing stripes or none; half are of the first."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(3, size=count, p=(0.5, 0.3, 0.2))
    rows, columns = np.mgrid[:side, :side]
    ways = np.stack([rows, columns, np.zeros_like(rows)])[labels]  # [n, side, side]
    phase, strength = rng.uniform(0, 2 * np.pi, (count, 1, 1)), rng.uniform(40, 80, (count, 1, 1))
    pixels = 128 + strength * np.sin(1.5 * ways + phase) + rng.normal(0, 15, ways.shape)
    return np.uint8(pixels.clip(0, 255))[..., None], torch.from_numpy(labels)


def hidden_signal(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise tokens, of which one at a random place holds a mark and the class; their mean knows neither."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (num,), generator=generator)
    tokens = torch.randn(num, NUM_TOKENS, DIM, generator=generator)
    place = torch.randint(NUM_TOKENS, (num,), generator=generator)
    tokens[range(num), place] += 4 * torch.eye(DIM)[labels] + 4 * torch.eye(DIM)[NUM_CLASSES]
    tokens = tokens - tokens.mean(dim=1, keepdim=True) + 0.3 * torch.randn(num, 1, DIM, generator=generator)
    return tokens, labels


def small_model(*, seed: int = 0, **changes: Any) -> MaskedAutoencoder:
    """A fresh model for grey images of 16 pixels; an option goes over its own."""
    torch.manual_seed(seed)
    options = {"img_size": 16, "in_chans": 1, "mean": (0.5,), "std": (0.25,), **changes}
    return build_model(tiny_config(**options))


def by_function(encode: Any, *, img_size: tuple[int, int], identity: str | None = "function") -> Extractor:
    """An extractor of grey images that are not normalised."""
    preprocessing = Preprocessing(img_size=img_size, in_chans=1, mean=(0.0,), std=(1.0,))
    return Extractor(name="function", encode=encode, preprocessing=preprocessing, identity=identity)


def make_task(
    folder: Path, model: MaskedAutoencoder | Extractor, *, train: Part, test: Part, num_classes: int = 3, seed: int = 0
) -> LabelledTask:
    """A task on the CPU; a part is an array `[n, H, W, C]` or a source, with labels."""
    extractor = model if isinstance(model, Extractor) else model_extractor(model, name="tiny")
    parts = [
        LabelledSplit(source=source(part[0], name), labels=part[1]) for name, part in (("train", train), ("test", test))
    ]
    data = LabelledData(
        train=parts[0], test=parts[1], class_names=tuple(f"class {k}" for k in range(num_classes)), note="for a test"
    )
    console = Console(quiet=True)
    return LabelledTask(extractor=extractor, data=data, folder=folder, device=CPU, seed=seed, console=console)


def evaluator(model: Any, data: Path, out: Path, **changes: Any) -> Evaluator:
    """One on the CPU that prints nothing; an option replaces its own."""
    options = {"test": None, "data_root": Path("data"), "seed": 0, "overlap": "error"}
    here = {"device": torch.device("cpu"), "world": World(), "console": Console(quiet=True)}
    return Evaluator(model, data=str(data), out=out, **here, **{**options, **changes})


def source(images: Any, name: str) -> Source:
    """An array as a source; a source as it is."""
    return whole_array(images, name=name, note="") if isinstance(images, np.ndarray) else images
