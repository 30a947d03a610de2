"""Features of a whole source: computed once, stored beside the run, read memory-mapped by every protocol.

Several processes deal the batches out among them, whole ones, so that features are bit for bit those of one process.
The main one writes them, where the others see them too.
"""

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from tokenize import TokenError
from typing import IO, Any

import numpy as np
import psutil
import torch
from jaxtyping import Int64
from numpy.lib.format import dtype_to_descr, write_array_header_2_0
from rich.console import Console
from rich.progress import track
from torch import Tensor

from mae.data import sampled
from mae.data.content import contents_of
from mae.data.copies import near_copies
from mae.data.images import ImageSet, load_images
from mae.data.loaders import evaluation_batches, normalise
from mae.data.sources import Source
from mae.data.units import check_units
from mae.errors import MAEError, UsageError
from mae.evaluation.extractors import PATCHES, Extractor, Preprocessing, Reading, preprocessing_text
from mae.records import read_json, write_json
from mae.report.canvas import visible
from mae.training.distributed import World

BATCH_SIZE = 128
"""Images that an extractor is given at a time."""

_DIGESTED = 4096
"""Images that are digested at a time, over all processes."""

_FORMAT = 2
_ASIDE = ".writing-"


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


class Opened:
    """A source whose images are looked at only when somebody asks for them; kept in memory they are decoded once.

    Args:
        source: where the images are.
        max_unreadable: share of the files that may be unreadable.
        keep: whether to keep them in memory if they are few; not where each of many processes looks at some.
    """

    def __init__(self, source: Source, *, max_unreadable: float = 0.01, keep: bool = True) -> None:
        self.source = source
        self._max_unreadable = max_unreadable
        self._memory_limit = None if keep else 0
        self._images: dict[Reading, ImageSet] = {}
        self._compared: set[str] = set()

    @cached_property
    def version(self) -> str:
        """See `sampled.version`; told once, since of a million names it takes seconds."""
        return sampled.version(self.source)

    def images(self, reading: Reading) -> ImageSet:
        """The images with these channels.

        Raises:
            UsageError: they have no channel of a name.
            MAEError: too many unreadable files.
        """
        if reading not in self._images:
            in_chans, channels, no_data, pixel_dtype = reading
            self._images[reading] = load_images(
                self.source,
                in_chans=in_chans,
                channels=channels,
                no_data=no_data,
                pixel_dtype=pixel_dtype,
                max_unreadable=self._max_unreadable,
                memory_limit=self._memory_limit,
            )
        return self._images[reading]

    def compared(self, wanted: Preprocessing) -> str | None:
        """What is unusual about the values for a model, the first time that this is asked; see `check_units`."""
        if (what := preprocessing_text(wanted)) in self._compared:
            return None
        images = self.images(wanted.reading)
        unusual = check_units(images, mean=wanted.mean, std=wanted.std, pixel_dtype=wanted.pixel_dtype)
        self._compared.add(what)
        return unusual


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

    def near_copies(self, train: Opened, test: Opened, reading: Reading) -> Int64[Tensor, " m"]:
        """For each readable image of `test` the row among those of `train` which it is a near copy of; -1: of none."""
        contents = [self._contents(opened, reading) for opened in (train, test)]
        digests = hashlib.sha256()
        for part in contents:
            digests.update(part["digests"].numpy().data)
        key = {"kind": "near copies", "images": digests.hexdigest()[:16]}

        def compute() -> Iterator[Mapping[str, np.ndarray]]:
            # One process finds them for all.
            found = [near_copies(*(part["outlines"].numpy() for part in contents))] if self.world.is_main else []
            yield from ({"nearest": nearest} for nearest in found)

        return self._stored(self.folder, key, len(contents[1]["digests"]), compute)["nearest"]

    def _contents(self, opened: Opened, reading: Reading) -> dict[str, Tensor]:
        key = {"kind": "content", "data": opened.version, "reading": repr(reading)}
        return self._stored(self.folder, key, None, lambda: self._looked_at(opened.images(reading)))

    def _looked_at(self, images: ImageSet) -> Iterator[Mapping[str, np.ndarray]]:
        def look(numbers: Tensor) -> Mapping[str, Tensor]:
            contents = contents_of(images, numbers)._asdict()
            told = torch.frombuffer(bytearray(json.dumps(contents["unreadable"]).encode()), dtype=torch.uint8)
            return {**contents, "unreadable": told}

        parts = images.readable.split(max(BATCH_SIZE, _DIGESTED // self.world.size))
        found: dict[str, list[np.ndarray]] = {"digests": [], "numbers": [], "outlines": []}
        for part in self.world.in_turns(parts, look):
            images.report_unreadable(json.loads(part["unreadable"].numpy().tobytes()))
            for name, values in found.items():
                values.append(part[name].numpy())
        yield {name: np.concatenate(values) for name, values in found.items()}

    def _extracted(
        self, extractor: Extractor, opened: Opened, *, only_patches: bool
    ) -> Iterator[Mapping[str, np.ndarray]]:
        """The features, batch by batch."""
        images = self.images(opened, extractor.preprocessing)
        what = f"{'patch tokens' if only_patches else 'features'} of {opened.source.name}: {extractor.name}"
        if not self.console.is_terminal:  # no bar there, and this can take long
            told = f"computing {what}, {len(images.readable):,} images"
            self.console.print(told, highlight=False, markup=False, soft_wrap=True)
        batches = computed_batches(
            images,
            extractor.preprocessing,
            lambda batch, _: _wanted(extractor.named(batch), len(batch), only_patches, extractor.name),
            device=self.device,
            world=self.world,
            only_main=True,
        )
        total = -(-len(images.readable) // BATCH_SIZE)
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
        key: Mapping[str, str],
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
        told = {"format": _FORMAT, **key}
        folder = root / hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
        if not self.world.from_main(lambda: _read(folder) is not None):
            if self.world.is_main:
                _write(folder, told, count, compute())
            else:
                deque(compute(), maxlen=0)
            self.world.from_main(lambda: None)  # the others wait until everything is written
        if (found := _read(folder)) is None:
            raise MAEError(
                f"{folder} was written, and process {self.world.rank} of {self.world.size} cannot read it; of several "
                "machines all must share --out"
            )
        return found


def computed_batches(
    images: ImageSet,
    preprocessing: Preprocessing,
    compute: Callable[[Tensor, Tensor], Mapping[str, Tensor]],
    *,
    device: torch.device,
    world: World,
    numbers: Tensor | None = None,
    only_main: bool = False,
) -> Iterator[Mapping[str, Tensor]]:
    """What is computed from batches of central crops, in their order, in every process; see `World.in_turns`.

    Args:
        images: where they come from.
        preprocessing: how they are cropped and normalised.
        compute: is given the normalised images of a batch and their numbers.
        device: where the images go.
        world: the processes that compute.
        numbers: which images; None: every readable one.
        only_main: see `World.in_turns`.
    """

    def of(part: Tensor) -> Mapping[str, Tensor]:
        batch = next(normalised_batches(images, preprocessing, device=device, numbers=part))
        return compute(batch, part)

    parts = (images.readable if numbers is None else numbers).split(BATCH_SIZE)
    return world.in_turns(parts, of, only_main=only_main)


def _write(folder: Path, told: Mapping[str, Any], count: int | None, parts: Iterable[Mapping[str, np.ndarray]]) -> None:
    aside = folder.parent / f"{_ASIDE}{folder.name}-{os.getpid()}"  # another process may be at the same
    try:
        for leftover in folder.parent.glob(f"{_ASIDE}{folder.name}-*"):
            if leftover == aside or not psutil.pid_exists(int(leftover.name.rpartition("-")[2])):
                shutil.rmtree(leftover)
        aside.mkdir(parents=True)
        _write_arrays(aside, count, parts)
        arrays = sorted(path.stem for path in aside.glob("*.npy"))
        write_json(aside / "key.json", {**told, "arrays": arrays})
        if _read(folder) is not None:  # the other one was faster
            return
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    except OSError as error:
        raise MAEError(f"could not store features in {folder}: {error}; free space there") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_arrays(aside: Path, count: int | None, parts: Iterable[Mapping[str, np.ndarray]]) -> None:
    # Written row by row, since a mapped file that meets a full disk ends the process without a word.
    files: dict[str, IO[bytes]] = {}
    with ExitStack() as stack:
        for part in parts:
            for name, values in part.items():
                if name not in files:
                    files[name] = stack.enter_context((aside / f"{name}.npy").open("wb"))
                    shape = (len(values) if count is None else count, *values.shape[1:])
                    write_header(files[name], values.dtype, shape)
                files[name].write(values.data)


def write_header(file: IO[bytes], dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Begin a `.npy` file whose rows are written after it, for arrays that memory cannot hold."""
    write_array_header_2_0(file, {"descr": dtype_to_descr(dtype), "fortran_order": False, "shape": shape})


def normalised_batches(
    images: ImageSet, preprocessing: Preprocessing, *, device: torch.device, numbers: Tensor | None = None
) -> Iterator[Tensor]:
    """Central crops as an extractor wants them, in order, on the device; the last batch may be smaller.

    Args:
        images: where they come from.
        preprocessing: how they are cropped and normalised.
        device: where they go.
        numbers: which images; None: every readable one.
    """
    mean, std = (torch.tensor(values, device=device) for values in (preprocessing.mean, preprocessing.std))
    crops = evaluation_batches(
        images,
        img_size=preprocessing.img_size,
        batch_size=BATCH_SIZE,
        crop_share=preprocessing.crop_share,
        interpolation=preprocessing.interpolation,
        numbers=numbers,
    )
    for batch in crops:
        yield normalise(batch.to(device), mean, std)


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


def _read(folder: Path) -> dict[str, Tensor] | None:
    """The arrays of a stored folder, memory-mapped; None where there is none, or a file is damaged."""
    if not (folder / "key.json").is_file():
        return None
    try:
        names = read_json(folder / "key.json")["arrays"]
        if any(Path(name).name != name for name in names):  # leads out of the folder
            return None
        # "c": what is written to the tensor stays in memory
        return {
            name: torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)) for name in names
        }
    # numpy reads a header as Python's own literals, and its tokenizer has errors of its own.
    except (OSError, ValueError, TypeError, EOFError, KeyError, SyntaxError, TokenError):
        return None
