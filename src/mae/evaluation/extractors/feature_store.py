"""Features of a whole source: computed once, stored beside the run, read memory-mapped by every protocol.

Several processes deal the batches out among them, whole ones, so that features are bit for bit those of one process.
The main one writes them, where the others see them too.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from jaxtyping import Float32, Int64
from rich.console import Console
from rich.progress import track
from torch import Tensor

from mae.data.dataset.images import ImageSet
from mae.data.inspect.exact_duplicates import contents_of
from mae.data.inspect.near_duplicates import near_copies
from mae.errors import MAEError, UsageError
from mae.evaluation.extractors import batches as loading
from mae.evaluation.extractors.batches import computed_batches
from mae.evaluation.extractors.extractor import PATCHES, Extractor, preprocessing_text
from mae.evaluation.extractors.feature_arrays import read_arrays, write_arrays
from mae.evaluation.extractors.opened import Opened
from mae.models.preprocess import Preprocessing, Reading
from mae.text import visible
from mae.training.distributed import World

_DIGESTED = 4096
"""Images that are digested at a time, over all processes."""

_FORMAT = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureSet:
    """What an extractor makes of a source.

    Attributes:
        arrays: named features, `[n, D]` float32, and `patches` `[n, N, D]` float16 where they were asked for;
            memory-mapped: writing to them changes nothing on the disk.
        numbers: which images of the source the rows are of, in its order; an unreadable one has no row.
    """

    arrays: Mapping[str, Tensor]
    numbers: Int64[Tensor, " n"]


class FeatureStore:
    """Stored arrays by a key of all that decides them; what is not there is computed, by all processes together.

    Every process asks for the same in the same order.

    Args:
        folder: where they are kept, a folder for each key; all processes see it.
        device: where extractors compute.
        console: where progress is shown.
        world: the processes that compute together.
    """

    def __init__(self, folder: Path, *, device: torch.device, console: Console, world: World) -> None:
        self.folder = folder
        self.device = device
        self.console = console
        self.world = world
        # What cannot be known again by its weights is kept for the life of this store alone.
        self._passing: dict[int, tuple[Extractor, TemporaryDirectory[str] | None, Path]] = {}

    def features(self, extractor: Extractor, opened: Opened, *, patches: bool = False) -> FeatureSet:
        """An extractor's features of every readable image; patch tokens come alone, since they are large.

        Raises:
            MAEError: too many unreadable files, features that are not finite, or a disk that is full.
        """
        digests, numbers = self.digests(opened, extractor.preprocessing.reading)
        key = {
            "kind": PATCHES if patches else "pooled",
            "extractor": str(extractor.identity),
            "preprocessing": preprocessing_text(extractor.preprocessing),
            "images": hashlib.sha256(torch.stack([digests, numbers]).numpy().data).hexdigest()[:16],
        }
        root = self.folder if extractor.identity is not None else self._passing_folder(extractor)
        compute = partial(self._extracted, extractor, opened, only_patches=patches)
        return FeatureSet(arrays=self._stored(root, key, len(numbers), compute), numbers=numbers)

    def images(self, opened: Opened, preprocessing: Preprocessing) -> ImageSet:
        """The images of a source, each of which was tried once: those that are `readable` really are.

        Raises:
            UsageError: their values are in another unit than the model expects.
            MAEError: too many unreadable files.
        """
        _, numbers = self.digests(opened, preprocessing.reading)
        images = opened.images(preprocessing.reading)
        images.readable = numbers
        if unusual := opened.compared(preprocessing):
            self.console.print(visible(unusual), highlight=False, markup=False, soft_wrap=True)
        return images

    def digests(self, opened: Opened, reading: Reading) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
        """The digest of every readable image (see `Contents`), and their numbers in the source."""
        arrays = self._contents(opened, reading)
        return arrays["digests"], arrays["numbers"]

    def contents(self, opened: Opened, reading: Reading) -> tuple[Int64[Tensor, " n"], Float32[Tensor, "n waves"]]:
        """Digest and outline of every readable image; see `Contents`."""
        arrays = self._contents(opened, reading)
        return arrays["digests"], arrays["outlines"]

    def near_copies(self, train: Opened, test: Opened, reading: Reading) -> Int64[Tensor, " m"]:
        """For each readable image of `test` the row among those of `train` which it is a near copy of; -1: of none."""
        contents = [self._contents(opened, reading) for opened in (train, test)]
        digests = hashlib.sha256()
        for part in contents:
            digests.update(len(part["digests"]).to_bytes(8, "little"))  # where the one ends and the other begins
            digests.update(part["digests"].numpy().data)
        key = {"kind": "near copies", "images": digests.hexdigest()[:16]}

        def compute() -> Iterator[Mapping[str, np.ndarray]]:
            # One process finds them for all.
            results = [near_copies(*(part["outlines"].numpy() for part in contents))] if self.world.is_main else []
            yield from ({"nearest": nearest} for nearest in results)

        return self._stored(self.folder, key, len(contents[1]["digests"]), compute)["nearest"]

    def _contents(self, opened: Opened, reading: Reading) -> dict[str, Tensor]:
        key = {"kind": "content", "data": opened.version, "reading": repr(reading)}
        return self._stored(self.folder, key, None, lambda: self._read_contents(opened.images(reading)))

    def _read_contents(self, images: ImageSet) -> Iterator[Mapping[str, np.ndarray]]:
        def read(numbers: Tensor) -> Mapping[str, Tensor]:
            contents = contents_of(images, numbers)._asdict()
            unreadable = torch.frombuffer(bytearray(json.dumps(contents["unreadable"]).encode()), dtype=torch.uint8)
            return {**contents, "unreadable": unreadable}

        parts = images.readable.split(max(loading.BATCH_SIZE, _DIGESTED // self.world.size))
        arrays: dict[str, list[np.ndarray]] = {"digests": [], "numbers": [], "outlines": []}
        for part in self.world.in_turns(parts, read):
            images.report_unreadable(json.loads(part["unreadable"].numpy().tobytes()))
            for name, values in arrays.items():
                values.append(part[name].numpy())
        yield {name: np.concatenate(values) for name, values in arrays.items()}

    def _extracted(
        self, extractor: Extractor, opened: Opened, *, only_patches: bool
    ) -> Iterator[Mapping[str, np.ndarray]]:
        """The features, batch by batch."""
        images = self.images(opened, extractor.preprocessing)
        what = f"{'patch tokens' if only_patches else 'features'} of {opened.source.name}: {extractor.name}"
        if not self.console.is_terminal:  # no bar there, and this can take long
            text = f"computing {what}, {len(images.readable):,} images"
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        batches = computed_batches(
            images,
            extractor.preprocessing,
            lambda batch, _: _wanted(extractor.named(batch), len(batch), only_patches, extractor.name),
            device=self.device,
            world=self.world,
            only_main=True,
        )
        total = -(-len(images.readable) // loading.BATCH_SIZE)
        shown = track(
            batches, description=what, total=total, console=self.console, disable=not self.console.is_terminal
        )
        first: dict[str, Tensor] = {}
        for batch in shown:
            first = first or dict(batch)
            for name, values in batch.items():
                if values.shape[1:] != first[name].shape[1:]:
                    raise UsageError(_other_shape(extractor.name, name, values, "each image's the same"))
            yield {name: np.ascontiguousarray(values.cpu().numpy()) for name, values in batch.items()}

    def _passing_folder(self, extractor: Extractor) -> Path:
        if id(extractor) not in self._passing:
            made = TemporaryDirectory(prefix="mae-features-", dir=self._shared()) if self.world.is_main else None
            place = self.world.from_main(lambda: made and made.name)
            self._passing[id(extractor)] = (extractor, made, Path(place))
        return self._passing[id(extractor)][2]

    def _shared(self) -> Path | None:
        """A folder that all processes see; None: one process needs none."""
        if self.world.size == 1:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def _stored(
        self,
        root: Path,
        key: Mapping[str, object],
        count: int | None,
        compute: Callable[[], Iterable[Mapping[str, np.ndarray]]],
    ) -> dict[str, Tensor]:
        """The arrays of a key; a folder is there whole, under its name, or not at all.

        Args:
            root: holds the folder.
            key: all that decides the arrays.
            count: their rows; None: the first part has all of them.
            compute: gives them part by part.
        """
        key = {"format": _FORMAT, **key}
        folder = root / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        if not self.world.from_main(lambda: read_arrays(folder) is not None):
            if self.world.is_main:
                write_arrays(folder, key, count, compute())
            else:
                deque(compute(), maxlen=0)
            self.world.from_main(lambda: None)  # the others wait until everything is written
        if (arrays := read_arrays(folder)) is None:
            raise MAEError(
                f"{folder} was written, but process {self.world.rank} of {self.world.size} cannot read it; on several "
                "machines all must share --out"
            )
        return arrays


def _wanted(named: Mapping[str, Tensor], count: int, only_patches: bool, extractor: str) -> dict[str, Tensor]:
    """The features that are asked for, as they are stored."""
    if only_patches and PATCHES not in named:
        raise UsageError(f"{extractor} gives no patch tokens, only {', '.join(named)}; this protocol needs them")
    wanted = {name: values for name, values in named.items() if (name == PATCHES) == only_patches}
    if not wanted:
        raise UsageError(f"{extractor} gives no feature of the whole image, only patch tokens; give a mean of them too")
    return {name: _checked(values, count, name, extractor) for name, values in wanted.items()}


def _checked(values: Tensor, count: int, name: str, extractor: str) -> Tensor:
    if len(values) != count or values.ndim != (3 if name == PATCHES else 2):
        raise UsageError(_other_shape(extractor, name, values, f"one for each of {count} images"))
    if not bool(values.isfinite().all()):
        raise MAEError(f"{extractor}: its features hold values that are not finite; the model is broken")
    kept = values.half() if name == PATCHES else values.float()
    if not bool(kept.isfinite().all()):
        raise MAEError(f"{extractor}: its patch tokens hold values over 65504, too large to be stored in 16 bits")
    return kept


def _other_shape(extractor: str, name: str, values: Tensor, expected: str) -> str:
    axes = "[images, patches, width]" if name == PATCHES else "[images, width]"
    return f"{extractor} gives {name} of shape {list(values.shape)}; expected {axes}, {expected}"
