"""One model on some images: what every protocol is given."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Int64, UInt8
from rich.console import Console
from torch import Tensor

from mae.data.annotations.detection import DetectionData, DetectionSplit
from mae.data.annotations.objects import Objects
from mae.data.annotations.segmentation import SegmentationData, SegmentationSplit
from mae.data.dataset.images import ImageSet
from mae.data.inspect.exact_duplicates import same_content
from mae.data.sources.labels import LabelledData, LabelledSplit
from mae.data.sources.open import WITH_SPLITS, Source, open_all
from mae.evaluation.common.dense import grid_of, resized_map
from mae.evaluation.common.metrics import majority_share
from mae.evaluation.extractors.extractor import PATCHES, Extractor, baseline_extractors, show_loaded
from mae.evaluation.extractors.feature_store import FeatureSet, FeatureStore
from mae.evaluation.extractors.learned_pooling import with_learned_pooling
from mae.evaluation.extractors.open import open_extractor, usual_folder
from mae.evaluation.extractors.opened import MAX_UNREADABLE, Opened
from mae.evaluation.protocol import THIS_MODEL
from mae.training.distributed import World

Part = Literal["train", "test"]
_OfTwoParts = TypeVar("_OfTwoParts", bound="_TwoPartTask")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Task:
    """One model on some images. Nothing is opened or computed before it is asked for, and nothing twice.

    Attributes:
        extractor: the model.
        folder: where features and results are kept.
        device: where to compute.
        seed: decides what a protocol draws.
        console: where progress is shown.
        store: keeps the features; None: a new one in the folder.
        world: the processes that evaluate together; each does all that is not dealt out among them.
        max_unreadable: share of the images that may be unreadable.
    """

    extractor: Extractor
    folder: Path
    device: torch.device
    seed: int
    console: Console
    store: FeatureStore | None = None
    world: World = World()
    max_unreadable: float = MAX_UNREADABLE

    @cached_property
    def _store(self) -> FeatureStore:
        folder = self.folder / "features"
        return self.store or FeatureStore(folder, device=self.device, console=self.console, world=self.world)

    def _open(self, source: Source) -> Opened:
        return Opened(source, max_unreadable=self.max_unreadable, keep=self.world.size == 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class _TwoPartTask(_Task):
    """One model on a set with a part to learn from and a part to be evaluated on."""

    data: LabelledData | SegmentationData | DetectionData

    @cached_property
    def _opened(self) -> dict[str, Opened]:
        return {"train": self._open(self.data.train.source), "test": self._open(self.data.test.source)}

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes, in the order of their numbers."""
        return self.data.class_names

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    def images(self, part: Part) -> ImageSet:
        """The images of a part, with the model's channels; its `readable` ones are the rows of features."""
        return self._store.images(self._opened[part], self.extractor.preprocessing)

    def with_model(self: _OfTwoParts, extractor: Extractor, *, seed: int | None = None) -> _OfTwoParts:
        """The task of another model on the same images, which are not opened again where they are read alike."""
        other = replace(self, extractor=extractor, seed=self.seed if seed is None else seed, store=self._store)
        other.__dict__["_opened"] = self._opened
        return other

    def with_few_test_images(self: _OfTwoParts, count: int) -> _OfTwoParts:
        """The task with so many of the test images, spread over all; with all where they come as one piece."""
        source = self.data.test.source
        kept = torch.linspace(0, len(source) - 1, min(count, len(source))).round().long()
        if not isinstance(self.data, LabelledData):
            data: Any = self.data.without(set(range(len(source))) - set(kept.tolist()))
        elif (take := getattr(source, "take", None)) is None:
            return self
        else:
            some = take(kept.numpy(), f"{len(kept):,} of {len(source):,} test images")
            data = replace(self.data, test=LabelledSplit(source=some, labels=self.data.test.labels[kept]))
        other = replace(self, data=data, store=self._store)
        other.__dict__["_opened"] = {"train": self._opened["train"], "test": other._open(data.test.source)}
        return other

    def overlap(self) -> list[tuple[int, int]]:
        """Numbers of each test image with the pixels of a training image, behind that of the first such one."""
        reading = self.extractor.preprocessing.reading
        (train, of_train), (test, of_test) = (
            self._store.digests(self._opened[part], reading) for part in ("train", "test")
        )
        return [(int(of_train[first]), int(of_test[second])) for first, second in same_content(train, test)]


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledTask(_TwoPartTask):
    """One model on one labelled set.

    Attributes:
        data: labelled images in two parts.
    """

    data: LabelledData

    @cached_property
    def _splits(self) -> dict[str, LabelledSplit]:
        return {"train": self.data.train, "test": self.data.test}

    def with_training_rows(self, rows: Int64[Tensor, " part"]) -> "LabelledTask":
        """The task with these training images only, as rows of `labels("train")`, and the same test images."""
        numbers, split = self.images("train").readable[rows], self.data.train
        source = split.source.take(numbers.numpy(), f"{len(numbers):,} of {len(split.labels):,} training images")
        train = LabelledSplit(source=source, labels=split.labels[numbers])
        return replace(self, data=replace(self.data, train=train), store=self._store)

    def class_of(self, part: Part) -> Int64[Tensor, " n"]:
        """The class of every image of a part by its number, readable or not."""
        return self._splits[part].labels

    def labels(self, part: Part) -> Int64[Tensor, " n"]:
        """The class of each readable image of a part, as rows of its features and of its batches come."""
        _, numbers = self._store.digests(self._opened[part], self.extractor.preprocessing.reading)
        return self.class_of(part)[numbers]

    def features(self, part: Part, extractor: Extractor | None = None) -> Mapping[str, Tensor]:
        """Named features `[n, D]` of a part, of the model or of another on the same images."""
        return self._store.features(extractor or self.extractor, self._opened[part]).arrays

    def patches(self, part: Part, extractor: Extractor | None = None) -> Tensor:
        """Patch tokens `[n, N, D]` of a part, float16, of the model or of another on the same images."""
        return self._store.features(extractor or self.extractor, self._opened[part], patches=True).arrays[PATCHES]

    def contenders(self, *, baselines: bool) -> dict[str, dict[str, tuple[Tensor, Tensor]]]:
        """Training and test features by feature name, by model: `THIS_MODEL`, then the baselines.

        Args:
            baselines: whether to include them.
        """
        contenders = {}
        for extractor in [self.extractor, *(baseline_extractors(self.extractor) if baselines else [])]:
            train, test = self.features("train", extractor), self.features("test", extractor)
            who = THIS_MODEL if extractor is self.extractor else extractor.name
            contenders[who] = {name: (train[name], test[name]) for name in train}
        return contenders

    @cached_property
    def near_copies(self) -> Int64[Tensor, " m"]:
        """For each readable test image the row of a training image which it nearly shows; -1: there is none."""
        return self._store.near_copies(
            self._opened["train"], self._opened["test"], self.extractor.preprocessing.reading
        )

    def majority(self) -> float:
        """The share that the commonest training class has in the test part, of the readable images."""
        return majority_share(self.labels("train"), self.labels("test"), num_classes=self.num_classes)

    def facts(self) -> dict[str, Any]:
        """What the set holds, for the record."""
        return {
            "note": self.data.note,
            "classes": self.num_classes,
            "train": len(self._splits["train"].labels),
            "test": len(self._splits["test"].labels),
            **{f"{part}_version": opened.version for part, opened in self._opened.items()},
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentationTask(_TwoPartTask):
    """One model on images with masks.

    Its extractor resizes whole images to its size, whatever their shape, see `of_whole_images`; masks follow.

    Attributes:
        data: images and masks in two parts.
    """

    data: SegmentationData

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the model's patches; those of a function are taken for square.

        Raises:
            UsageError: no such grid covers the image.
        """
        return patch_grid(self.extractor, self.patches("train"))

    def patches(self, part: Part, extractor: Extractor | None = None) -> Float[Tensor, "n N D"]:
        """Patch tokens of a part, float16, of the model or of another one that sees whole images of the same size."""
        return self._store.features(extractor or self.extractor, self._opened[part], patches=True).arrays[PATCHES]

    def maps(self, part: Part) -> UInt8[Tensor, "n H W"]:
        """The class of each pixel of the readable images of a part, in the size that the model sees.

        Raises:
            MAEError: a mask that cannot be read, is of another size than its image, or holds an unknown value.
        """
        split: SegmentationSplit = getattr(self.data, part)
        _, numbers = self._store.digests(self._opened[part], self.extractor.preprocessing.reading)
        size = self.extractor.preprocessing.img_size
        return torch.stack([resized_map(split.labels(number), size) for number in numbers.tolist()])

    def facts(self) -> dict[str, Any]:
        """What the set holds, for the record."""
        return {
            "note": self.data.note,
            "classes": self.num_classes,
            "train": len(self.data.train.masks),
            "test": len(self.data.test.masks),
            "train_version": self.data.train.version(),
            "test_version": self.data.test.version(),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class DetectionTask(_TwoPartTask):
    """One model on images with objects.

    Its extractor sees whole images, as that of a `SegmentationTask` does.

    Attributes:
        data: images and objects in two parts.
    """

    data: DetectionData

    def objects(self, part: Part) -> list[Objects]:
        """The objects of the readable images of a part, in pixels of the image as its file has it, turned upright.

        Raises:
            MAEError: an image of another size than its labels were made for.
        """
        split: DetectionSplit = getattr(self.data, part)
        return [split.objects(number) for number in self.images(part).readable.tolist()]

    def facts(self) -> dict[str, Any]:
        """What the set holds, for the record."""
        parts = {"train": self.data.train, "test": self.data.test}
        return {
            "note": self.data.note,
            "classes": self.num_classes,
            **{part: len(split.written) for part, split in parts.items()},
            **{f"{part}_objects": sum(map(len, split.written)) for part, split in parts.items()},
            **{f"{part}_version": split.version() for part, split in parts.items()},
        }


def patch_grid(extractor: Extractor, patches: Float[Tensor, "n N D"]) -> tuple[int, int]:
    """Rows and columns of the patches that a model gives; those of a function are taken for square.

    Raises:
        UsageError: no such grid covers the image.
    """
    model = extractor.model
    if model is not None and model.config is not None:
        rows, columns = model.config.layout.grid
        return rows, columns
    return grid_of(patches.shape[1], extractor.preprocessing.img_size)


def of_whole_images(extractor: Extractor) -> Extractor:
    """The same extractor on whole images, which are resized to its size whatever their shape."""
    return replace(extractor, preprocessing=replace(extractor.preprocessing, crop_share=None))


@dataclass(frozen=True, kw_only=True, eq=False)
class UnlabelledTask(_Task):
    """One model on images without labels, for protocols that need none.

    Attributes:
        source: the images.
    """

    source: Source

    @cached_property
    def _opened(self) -> Opened:
        return self._open(self.source)

    def images(self) -> ImageSet:
        """The images, with the model's channels; its `readable` ones are the rows of features."""
        return self._store.images(self._opened, self.extractor.preprocessing)

    def facts(self) -> dict[str, Any]:
        """What the source holds, for the record."""
        return {"note": self.source.note, "images": len(self.source), "version": self._opened.version}

    def features(self, extractor: Extractor | None = None) -> FeatureSet:
        """Named features `[n, D]`, of the model or of another on the same images."""
        return self._store.features(extractor or self.extractor, self._opened)

    def contents(self) -> tuple[Int64[Tensor, " n"], Float[Tensor, "n waves"]]:
        """Digest and outline of each readable image; see `Contents`."""
        return self._store.contents(self._opened, self.extractor.preprocessing.reading)

    def with_learned_pooling(self, pool: str | Path) -> "UnlabelledTask":
        """The task of the model with what was learned to be made of its patch tokens; see `with_learned_pooling`."""
        extractor = with_learned_pooling(self.extractor, pool, folder=self.folder, device=self.device)
        return replace(self, extractor=extractor)

    def patches(self, extractor: Extractor | None = None) -> FeatureSet:
        """Patch tokens `[n, N, D]`, float16, of the model or of another on the same images."""
        return self._store.features(extractor or self.extractor, self._opened, patches=True)


def open_images(
    model: Any, source: str, *, data_root: Path, device: torch.device, console: Console, world: World
) -> UnlabelledTask:
    """A model on unlabelled images: all of them, but of a set known by name the part to pre-train on, which is told.

    Progress is shown by the main process alone.

    Raises:
        UsageError: no such model or images.
        MAEError: a damaged file.
    """
    if not world.is_main:
        console = Console(quiet=True)
    with world.main_first():  # a download goes to one folder
        extractor, opened = open_extractor(model, device=device), open_all(source, data_root=data_root)
    show_loaded(console, extractor.loaded)
    if source in WITH_SPLITS:
        console.print(f"{source}: {opened.note}; its test images are left out", soft_wrap=True, highlight=False)
    return UnlabelledTask(
        extractor=extractor,
        source=opened,
        folder=usual_folder(model, extractor),
        device=device,
        seed=0,
        console=console,
        world=world,
    )
