"""What every section of the page is given: a run or a model, and some images."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float32, Int64
from rich.console import Console
from torch import Tensor

from mae.data.dataset.images import ImageSet
from mae.data.sources.open import open_labelled
from mae.data.sources.source import Source
from mae.errors import MAEError, UsageError
from mae.evaluation.common.neighbours import nearest_others
from mae.evaluation.common.task import UnlabelledTask
from mae.exploration.dynamics import Dynamics, measure_dynamics
from mae.models.pretrained import PretrainedEncoder
from mae.text import visible, without_common_folders
from mae.training.run_folder import RunFolder

Projection = Literal["pca", "umap"]
"""How features become places on a map."""

NUM_NEIGHBOURS = 12
"""Neighbours of each image that are looked for, fewer in a set of fewer."""

FEATURE = "mean"
"""The feature of a whole image that is looked at, which every model has: the mean of its patch tokens."""

UNLABELLED = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class ExploreRun:
    """A run or a model on some images. Nothing is computed before it is asked for, and nothing twice.

    Attributes:
        folder: of the run; None where a model's file is looked into.
        checkpoints: the kept checkpoints of the run by step, in ascending order; empty without a run.
        task: the model and the images; gives named features and patch tokens, which are stored beside the run.
        labels: the class of each image of the task's source by its number, `UNLABELLED` where it has none; None where
            no image has one.
        class_names: the classes, in the order of their numbers; empty where no image has one.
        projection: how features become places on the map.
        pictures: a folder for the PNG files of the sections.
    """

    folder: RunFolder | None
    checkpoints: Mapping[int, Path]
    task: UnlabelledTask
    labels: Int64[Tensor, " images"] | None
    class_names: tuple[str, ...]
    projection: Projection
    pictures: Path

    @property
    def model(self) -> PretrainedEncoder:
        """The model, on `device` and in evaluation mode; a `MaskedAutoencoder` where it has a decoder."""
        assert self.task.extractor.model is not None  # `explore` takes no others
        return self.task.extractor.model

    @property
    def device(self) -> torch.device:
        """Where to compute."""
        return self.task.device

    @property
    def seed(self) -> int:
        """Decides what is drawn."""
        return self.task.seed

    @property
    def console(self) -> Console:
        """Where progress is shown."""
        return self.task.console

    @cached_property
    def images(self) -> ImageSet:
        """The images, with the model's channels; row i of all that is measured is of image `numbers[i]`."""
        return self.task.images()

    @property
    def numbers(self) -> Int64[Tensor, " n"]:
        """The numbers of the readable images."""
        return self.images.readable

    @cached_property
    def full_names(self) -> list[str]:
        """The name of each readable image."""
        return [self.images.item_name(number) for number in self.numbers.tolist()]

    @cached_property
    def names(self) -> list[str]:
        """What each readable image is called where it is shown: its name without the folders that all are in."""
        return [visible(name) for name in without_common_folders(self.full_names)]

    @cached_property
    def row_labels(self) -> Int64[Tensor, " n"]:
        """The class of each readable image, `UNLABELLED` where it has none."""
        return torch.full((len(self.numbers),), UNLABELLED) if self.labels is None else self.labels[self.numbers]

    @cached_property
    def centred(self) -> Float32[Tensor, "n D"]:
        """The feature of each readable image, minus the mean over all of them, which masked autoencoders have much of.

        Raises:
            UsageError: there are fewer than three images.
        """
        features = self.task.features().arrays[FEATURE]
        if len(features) < 3:
            raise UsageError(
                f"{self.task.source.name} holds {len(features)} readable images; a map of them takes three or more"
            )
        return features - features.mean(dim=0)

    @cached_property
    def dynamics(self) -> Dynamics:
        """The model over its training; without a run, beside random weights."""
        return measure_dynamics(
            self.task.extractor, self.checkpoints, self.images, self.row_labels, seed=self.seed, device=self.device
        )

    @cached_property
    def neighbours(self) -> tuple[Float32[Tensor, "n k"], Int64[Tensor, "n k"]]:
        """Centred cosines and rows of the nearest images of each, nearest first, itself left out."""
        rows = torch.arange(len(self.centred))
        return nearest_others(self.centred, rows, k=min(NUM_NEIGHBOURS, len(rows) - 1), device=self.device)


def labels_of(source: Source, spec: str, *, data_root: Path) -> tuple[Int64[Tensor, " images"] | None, tuple[str, ...]]:
    """The class of each image of a source, and the classes' names, where the source has classes; see `ExploreRun`.

    Images find their class by name, since parts to learn from and to test on are cut otherwise than the source is.
    """
    try:
        data = open_labelled(spec, data_root=data_root)
    except (UsageError, MAEError):  # images need no labels
        return None, ()
    known = {
        split.source.item_name(number): label
        for split in (data.train, data.test)
        for number, label in enumerate(split.labels.tolist())
    }
    labels = torch.tensor([known.get(source.item_name(number), UNLABELLED) for number in range(len(source))])
    return (None, ()) if bool((labels == UNLABELLED).all()) else (labels, data.class_names)
