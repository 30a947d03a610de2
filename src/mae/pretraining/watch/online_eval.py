"""Looking at the features while a run goes on: label-free numbers always, k-NN and a probe where labels are lent.

Labels are for looking only: nothing of what is measured here reaches the training.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, UInt8
from rich.console import Console
from torch import Tensor

from mae.data.dataset import sampled
from mae.data.dataset.images import load_images
from mae.data.dataset.units import check_units
from mae.data.inspect.near_duplicates import near_copies, outline
from mae.data.loading.loader import normalise
from mae.data.loading.sampler import Numbers
from mae.data.loading.worker import CropDataset
from mae.data.sources.open import LabelledSplit, open_labelled
from mae.errors import MAEError, UsageError
from mae.evaluation.common.feature_stats import measure_spread
from mae.evaluation.common.logistic import fit_logistic
from mae.evaluation.common.metrics import majority_share, top_k_accuracy
from mae.evaluation.common.neighbours import knn_rank
from mae.modalities.images.crop import Augmentation
from mae.models.inference import undisturbed
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.pretraining.build import candidates, evaluated_crop, readable
from mae.pretraining.resolve import RunContext
from mae.pretraining.watch.looks import read_looks
from mae.randomness import FIXED_EPOCH, permutation, sample_keys
from mae.text import visible
from mae.training.device import autocast
from mae.training.settings import PeriodicTask

NEIGHBOURS = 20
PENALTY = 1e-3
"""Of the probe's weights: one value, since only the course of the numbers is looked at."""

_LOOKS = 8
_LABEL_FREE_IMAGES, _VIEWED_IMAGES = 256, 64
_HELD_OUT_IMAGES = 256
_TRAINED_PER_WATCHED = 10
"""Images trained on for each image that is watched, or more: a look at one costs about half a training image."""
_TRAIN_IMAGES, _TEST_IMAGES = 5000, 1000
_CROP_BYTES = 1 << 30
"""Of labelled crops in memory: all 6,000 up to 244 pixels square in colour, fewer of larger ones."""
_BATCH_SIZE = 128
ACCURACIES = ("knn", "probe")

_Pixels = UInt8[Tensor, "n C H W"] | Float32[Tensor, "n C H W"]


def make_monitor(prepared: RunContext, model: MaskedAutoencoder, console: Console) -> PeriodicTask:
    """What measures the features of the run's model as it goes; its `about` names the labelled images, by a digest.

    All images are read here, so what is wrong with them shows before the run begins. Numbers that cannot be measured
    later are left out, and the console says so: to watch a run never ends it.

    Raises:
        UsageError: `--monitor` names nothing labelled, or test images that are among its training images.
        MAEError: its images cannot be read.
    """
    watched: list[_Unlabelled | _HeldOut | _Labelled | _Teacher] = [_Unlabelled(prepared, model)]
    networks = {"": model.teacher, **{f"{kind}_": own for kind, own in model.term_teachers.items()}}
    learning = {prefix: network for prefix, network in networks.items() if hasattr(network, "numbers")}
    for prefix, network in learning.items():
        watched.append(_Teacher(network, prefix if len(learning) > 1 else ""))
    if len(prepared.held_out):
        watched.append(_HeldOut(prepared, model))
    about: dict[str, str] = {}
    if prepared.config.evaluation.monitor is not None:
        watched.append(labelled := _Labelled(prepared, model, prepared.config.evaluation.monitor, console))
        about["monitor"] = labelled.fingerprint

    def measure(step: int) -> Mapping[str, float]:
        numbers: dict[str, float] = {}
        for images in watched:
            try:
                with undisturbed(model):
                    numbers |= images.measure()
            except (MAEError, RuntimeError) as error:  # the latter where memory runs out or a factorisation fails
                what = f"step {step}: {images.what} could not be measured, the run goes on: {error}"
                console.print(visible(what), highlight=False, soft_wrap=True, markup=False)
        return numbers

    return PeriodicTask(every=steps_between_looks(prepared), run=measure, about=about)


def steps_between_looks(prepared: RunContext) -> int:
    """What `--monitor-every` says; else an eighth of the run, and no more looks than a short run can afford."""
    config = prepared.config
    assert config.optim.batch_size is not None
    if config.evaluation.monitor_every is not None:
        return max(1, round(config.evaluation.monitor_every * prepared.steps_per_epoch))
    lent = 0 if config.evaluation.monitor is None else _TRAIN_IMAGES + _TEST_IMAGES
    held_out = 2 * min(len(prepared.held_out), _HELD_OUT_IMAGES)
    watched = _LABEL_FREE_IMAGES + 2 * _VIEWED_IMAGES + held_out + lent
    return max(prepared.total_steps // _LOOKS, -(-_TRAINED_PER_WATCHED * watched // config.optim.batch_size))


def summarise_monitoring(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """First and last value of every number, and the best of an accuracy with its step; the last model is the one kept.

    A number that the last look lacks has None as its last value. Of accuracies those count that are of the labelled
    images which were looked at last.
    """
    measured = [(row["step"], row["evaluation"]) for row in read_looks(rows)]
    summary: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(name for _, numbers in measured for name in numbers):
        values = [(step, numbers[name]) for step, numbers in measured if name in numbers]
        summary[name] = {"first": values[0][1], "last": measured[-1][1].get(name)}
        if name in ACCURACIES:
            step, best = max(values, key=lambda pair: pair[1])  # of equal ones the earliest
            summary[name] |= {"best": best, "best_step": step}
    return summary


class _Unlabelled:
    """Some of the run's own images, and two random crops of a few, kept in memory."""

    what = "label-free numbers"

    def __init__(self, prepared: RunContext, model: MaskedAutoencoder) -> None:
        self._prepared, self._model = prepared, model
        images, size, seed = prepared.images, prepared.method.tokenizer.img_size, prepared.config.optim.seed
        order = candidates(images, seed, _LABEL_FREE_IMAGES)
        chosen = list(islice(readable(images, order), _LABEL_FREE_IMAGES))
        self._whole = torch.stack([evaluated_crop(image, size) for _, image in chosen])
        numbers = torch.tensor([number for number, _ in chosen[:_VIEWED_IMAGES]])
        crops = CropDataset(images=images, numbers=numbers, img_size=size, augmentation=Augmentation())
        keys = [sample_keys(seed, FIXED_EPOCH - view, numbers).tolist() for view in (0, 1)]
        self._views = [crops[numbers.tolist(), view].images for view in keys]

    def measure(self) -> dict[str, float]:
        features, *views = (
            _encode(self._prepared, self._model, images) for images in (self._whole, *self._views) if images is not None
        )
        spread = measure_spread(features, views=(views[0], views[1]) if len(views) == 2 else None)
        return {name: value for name, value in spread.as_dict().items() if value is not None}


class _Teacher:
    """What there is to watch of a teacher that learns, under names that begin with a prefix."""

    what = "numbers of the teacher"

    def __init__(self, network: Any, prefix: str) -> None:
        self._network, self._prefix = network, prefix

    def measure(self) -> dict[str, float]:
        return {self._prefix + name: value for name, value in self._network.numbers().items()}


class _HeldOut:
    """Images that are never trained on, and as many that are, each under a mask of its own that stays."""

    what = "held-out loss"

    def __init__(self, prepared: RunContext, model: MaskedAutoencoder) -> None:
        self._prepared, self._model = prepared, model
        self._held_out, self._trained = self._some(prepared.held_out), self._some(prepared.near(2 * _HELD_OUT_IMAGES))

    def _some(self, numbers: Numbers) -> tuple[_Pixels, Int64[Tensor, " n"]]:
        """Central crops, and the keys of their masks."""
        images, seed = self._prepared.images, self._prepared.config.optim.seed
        order = numbers[permutation(seed, FIXED_EPOCH, len(numbers))].tolist()
        chosen = list(islice(readable(images, order), _HELD_OUT_IMAGES))
        if not chosen:
            raise MAEError(f"{images.name}: none of {len(numbers):,} held-out images could be read; remove those files")
        size = self._prepared.method.tokenizer.img_size
        crops = torch.stack([evaluated_crop(image, size) for _, image in chosen])
        return crops, sample_keys(seed, FIXED_EPOCH, torch.tensor([number for number, _ in chosen]))

    def measure(self) -> dict[str, float]:
        return {"held_out": self._loss(*self._held_out), "held_out_train": self._loss(*self._trained)}

    def _loss(self, crops: _Pixels, keys: Int64[Tensor, " n"]) -> float:
        """The reconstruction term, a mean over the images."""
        prepared, total = self._prepared, 0.0
        for part, part_keys in zip(crops.split(_BATCH_SIZE), keys.split(_BATCH_SIZE), strict=True):
            images = normalise(part.to(prepared.device), *prepared.statistics())
            plan = self._model.plan(images, keys=part_keys)
            with autocast(prepared.config.optim.precision, prepared.device):
                total += len(part) * float(self._model(images, plan=plan).terms["reconstruction"])
        return total / len(crops)


class _Labelled:
    """The labelled images that were lent, kept in memory: some to learn from, some to be evaluated on.

    Attributes:
        fingerprint: of both parts, wherever they are.
    """

    what = "k-NN and probe"

    def __init__(self, prepared: RunContext, model: MaskedAutoencoder, spec: str, console: Console) -> None:
        self._prepared, self._model, self._console = prepared, model, console
        data = open_labelled(spec, data_root=prepared.config.machine.data_root)
        self.fingerprint = sampled.labelled_fingerprint(data)
        self._num_classes = len(data.class_names)
        self._train = self._some(data.train, _TRAIN_IMAGES)
        self._test = self._some(data.test, _TEST_IMAGES)
        seen = {crop.numpy().tobytes() for crop in self._train[0]}
        if twice := sum(crop.numpy().tobytes() in seen for crop in self._test[0]):
            raise UsageError(
                f"--monitor {spec}: {twice:,} of {len(self._test[0]):,} test images are among the training images too; "
                "remove them from one part"
            )
        near = near_copies(_outlines(self._train[0]), _outlines(self._test[0])) >= 0
        self._near = float(near.mean())
        if near.any():
            what = (
                f"--monitor {spec}: {near.sum():,} of {len(near):,} test images have a near copy among the training "
                "images, so k-NN and probe are higher than on new images; mae evaluate knn names some"
            )
            console.print(visible(what), style="yellow", highlight=False, soft_wrap=True, markup=False)

    def _some(self, split: LabelledSplit, most: int) -> tuple[_Pixels, Int64[Tensor, " n"]]:
        """CropDataset and their classes; of an unreadable image another one is taken."""
        config, model = self._prepared.config, self._prepared.method
        size = model.tokenizer.img_size
        images = load_images(
            split.source,
            in_chans=self._prepared.images.channels,
            channels=self._prepared.images.channel_names,
            nodata=model.tokenizer.nodata,
            pixel_dtype=model.tokenizer.pixel_dtype,
            max_unreadable=config.data.max_unreadable,
            memory_limit=0,  # only some of them are needed, and of those the crops
        )
        assert model.tokenizer.mean is not None and model.tokenizer.std is not None
        if unusual := check_units(
            images, mean=model.tokenizer.mean, std=model.tokenizer.std, pixel_dtype=model.tokenizer.pixel_dtype
        ):
            self._console.print(visible(unusual), highlight=False, soft_wrap=True, markup=False)
        one_image = images.channels * prod(size) * (1 if images.dtype == "uint8" else 4)
        fitting = max(1, _CROP_BYTES // one_image * most // (_TRAIN_IMAGES + _TEST_IMAGES))
        most = min(most, fitting)
        order = candidates(images, config.optim.seed, most)
        chosen = [(number, evaluated_crop(image, size)) for number, image in islice(readable(images, order), most)]
        if not chosen:
            raise MAEError(f"{images.name}: none of {len(images):,} images could be read; give others with --monitor")
        return torch.stack([crop for _, crop in chosen]), split.labels[[number for number, _ in chosen]]

    def measure(self) -> dict[str, float]:
        (train_crops, train_labels), (test_crops, test_labels) = self._train, self._test
        train, test = (_encode(self._prepared, self._model, crops) for crops in (train_crops, test_crops))
        classes, device = self._num_classes, self._prepared.device
        ranked = knn_rank(train, train_labels, test, ks=[NEIGHBOURS], num_classes=classes, top=1, device=device)
        probe = fit_logistic(train, train_labels, num_classes=classes, penalty=PENALTY, device=device)
        return {
            "knn": top_k_accuracy(ranked[NEIGHBOURS], test_labels),
            "probe": top_k_accuracy(probe.logits(test).argmax(dim=1, keepdim=True), test_labels),
            "commonest_class": majority_share(train_labels, test_labels, classes),
            "chance": 1 / classes,
            **({"near_copies": self._near} if self._near else {}),
        }


def _outlines(crops: _Pixels) -> Float32[np.ndarray, "n waves"]:
    return np.stack([outline(crop) for crop in crops])


def _encode(prepared: RunContext, model: MaskedAutoencoder, crops: _Pixels) -> Float[Tensor, "n D"]:
    """Mean tokens on the CPU, computed in the precision of the training."""
    parts: Iterable[Tensor] = (
        normalise(part.to(prepared.device), *prepared.statistics()) for part in crops.split(_BATCH_SIZE)
    )
    with autocast(prepared.config.optim.precision, prepared.device):
        return torch.cat([model.encode(images).mean.float().cpu() for images in parts])
