"""The classes that a trained classifier gives to images."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from rich.console import Console
from torch import Tensor

from mae import fragments
from mae.credentials import concealed
from mae.data.dataset.images import ImageSet, load_images
from mae.data.dataset.units import check_units
from mae.data.decode.limits import UnreadableImage
from mae.data.loading.loader import normalise
from mae.data.sources.folder import count_of
from mae.data.sources.open import open_held_out
from mae.errors import MAEError, UsageError
from mae.evaluation.extractors.batches import BATCH_SIZE
from mae.evaluation.extractors.extractor import Extractor, model_extractor
from mae.evaluation.pictures.examples import write_examples
from mae.models.classifier import Classifier
from mae.models.file import is_classifier, is_from_scratch, load_with_report
from mae.models.given_images import seen_crop
from mae.models.inference import undisturbed
from mae.models.preprocess import Preprocessing
from mae.records import check_new
from mae.report.figures.canvas import whole_file
from mae.text import visible, without_common_folders
from mae.training.device import choose_device
from mae.training.run_folder import RunFolder, check_model

TOP = 5
"""Classes that are told of an image, unless another number is asked for."""

_SHOWN, _BEST = 12, 3  # in a notebook: images, classes of each
_ROWS, _SURE, _UNSURE = 12, 5, 2
"""Of the picture: classes, the surest images of each, and the least sure ones."""
_HOW = "train one: mae evaluate linear_probe MODEL --data LABELLED, or mae evaluate finetune MODEL --data LABELLED"


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """What a classifier says of images.

    Attributes:
        names: of the images that could be read, in the order of the source.
        class_names: in the order of the probabilities.
        probabilities: of each class for each image; a row adds up to 1.
        unreadable: what is wrong with each image that could not be read, by its name.
    """

    names: tuple[str, ...]
    class_names: tuple[str, ...]
    probabilities: Float[Tensor, "n K"]
    unreadable: Mapping[str, str]

    @property
    def classes(self) -> list[str]:
        """The most probable class of each image."""
        return [self.class_names[number] for number in self.probabilities.argmax(dim=1).tolist()]

    def top(self, count: int = TOP) -> list[list[tuple[str, float]]]:
        """The most probable classes of each image with their probabilities, best first; at most all classes."""
        best = self.probabilities.topk(min(count, len(self.class_names)), dim=1)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [[(self.class_names[number], value) for number, value in zip(*row, strict=True)] for row in rows]

    def _repr_html_(self) -> str:
        rows = [
            (name, *(f"{named} {value:.1%}" for named, value in best))
            for name, best in zip(self.names[:_SHOWN], self.top(_BEST)[:_SHOWN], strict=True)
        ]
        unread = f", {len(self.unreadable):,} unreadable" if self.unreadable else ""
        first = f", the first {_SHOWN}" if len(self.names) > _SHOWN else ""
        header = ("image", "most probable", *[f"{rank + 2}." for rank in range(min(_BEST, len(self.class_names)) - 1)])
        return fragments.table(
            f"Predictions of {count_of(len(self.names), 'image')}{first}{unread}", rows, header=header
        )


def predict(
    model: Classifier | str | Path,
    source: str | Path,
    *,
    out: str | Path | None = None,
    sheet: str | Path | None = None,
    top: int = TOP,
    data_root: str | Path = "data",
    device: str = "auto",
    quiet: bool = False,
) -> Predictions:
    """Name the class of every image, like the command `mae predict`.

    Args:
        model: a classifier that `mae evaluate linear_probe` or `mae evaluate finetune` trained: its file, the folder of
            a run that holds one, or what `mae.load` gives of it.
        source: images, see `mae.embed`; of those with a test part that part.
        out: a new file that ends in `.csv` or `.json`: a row an image with its name, its class and the most probable
            classes with their probabilities; None: none is written.
        sheet: a new PNG: the surest and the least sure images of each predicted class; None: none is drawn.
        top: how many classes a row of `out` holds at the most.
        data_root: where sets known by name are kept.
        device: `auto`, `cpu`, `cuda` or `mps`.
        quiet: show nothing.

    Raises:
        UsageError: no classifier or images, a file that is there already or of another kind.
        MAEError: images that cannot be read, or a damaged file.
    """
    if top < 1:
        raise UsageError(f"top is {top}; expected 1 or more")
    check_outputs(out, sheet)
    path = None if isinstance(model, Classifier) else find_classifier(Path(model))
    classifier = model if isinstance(model, Classifier) else load_classifier(path)
    where = choose_device(device)
    wanted = model_extractor(deepcopy(classifier).to(where), name="classifier")
    console = Console(quiet=quiet)
    images = images_for(
        concealed(str(source)),
        Path(data_root),
        wanted.preprocessing,
        tell=lambda line: console.print(visible(line), highlight=False, markup=False, soft_wrap=True),
    )
    numbers, shares, unreadable = _probabilities(wanted, images, where)
    found = Predictions(
        names=tuple(images.item_name(number) for number in numbers.tolist()),
        class_names=classifier.class_names or tuple(f"class {number}" for number in range(classifier.num_classes)),
        probabilities=shares,
        unreadable=unreadable,
    )
    # The table gets its name last: where the sheet fails, a finished table would have the same command refused.
    with nullcontext() if out is None else _table(Path(out), found, top):
        if sheet is not None:
            _draw(found, images, numbers, title=f"Classes of {source}", path=Path(sheet))
    return found


@contextmanager
def _table(path: Path, found: Predictions, top: int) -> Iterator[None]:
    """Write the predictions, and name the file at the end of what is done meanwhile."""
    with whole_file(path, what="table") as unfinished:
        write_names(unfinished, _as_json(found, top) if path.suffix == ".json" else _as_csv(found, top))
        yield


def write_names(path: Path, text: str) -> None:
    """Write text with names of files as the system has them: they may hold bytes that are no text."""
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


def check_outputs(out: str | Path | None, sheet: str | Path | None) -> None:
    """Refuse files that cannot be written, before anything is computed.

    Raises:
        UsageError: another suffix, or a file that exists.
    """
    for file, suffixes in ((out, (".csv", ".json")), (sheet, (".png",))):
        if file is not None and Path(file).suffix not in suffixes:
            raise UsageError(f"{file} cannot be written; end its name with {' or '.join(suffixes)}")
        if file is not None:
            check_new(Path(file))


def only_file(path: Path, name: str, is_kind: Callable[[Path], bool]) -> Path | None:
    """A file of a kind of model: the path itself, that in a folder, or the only one below; None where there is none.

    Raises:
        UsageError: several.
    """
    if not path.is_dir():
        return path if path.is_file() and is_kind(path) else None
    if is_kind(path / name):
        return path / name
    found = sorted(file for file in path.rglob(name) if is_kind(file))
    if len(found) > 1:
        told = (f"{file} (trained from scratch)" if is_from_scratch(file) else str(file) for file in found)
        raise UsageError(f"{path} holds {len(found)} of {name}; name one of {', '.join(told)}")
    return found[0] if found else None


def find_classifier(path: Path) -> Path:
    """The file of a classifier: itself, or the only one in the folder of a run.

    Raises:
        UsageError: none or several.
    """
    check_model(path)
    if path.is_file():
        return path
    found = classifiers_in(path)
    if not found:
        what = "a run" if RunFolder(path).holds_run else "a folder"
        raise UsageError(f"{path} is {what} without a trained classifier; {_HOW}")
    if len(found) > 1:
        raise UsageError(f"{path} holds {len(found)} classifiers; name one of {', '.join(map(str, found))}")
    return found[0]


def classifiers_in(folder: Path) -> list[Path]:
    """The files of the classifiers that a run's folder holds."""
    known = [*folder.glob("evaluation/*.safetensors"), *folder.rglob("classifier.safetensors")]
    return sorted({file for file in known if is_classifier(file)})


def load_classifier(path: Path | None) -> Classifier:
    """The classifier in a file.

    Raises:
        UsageError: a model that names no classes.
        MAEError: a damaged file.
    """
    assert path is not None
    model = load_with_report(path)[0]
    if not isinstance(model, Classifier):
        raise UsageError(f"{path} is a model that names no classes; {_HOW}")
    return model


def images_for(source: str, data_root: Path, wanted: Preprocessing, *, tell: Callable[[str], object]) -> ImageSet:
    """The images with a model's channels, however many of their files are broken.

    Args:
        source: images, see `mae.embed`; of those with a test part that part.
        data_root: where sets known by name are kept.
        wanted: what the model expects of images.
        tell: is given what is unusual about their values, if anything is.

    Raises:
        UsageError: no images, or values in another unit than the model expects.
    """
    in_chans, channels, nodata, pixel_dtype = wanted.reading
    images = load_images(
        open_held_out(source, data_root=data_root),
        in_chans=in_chans,
        channels=channels,
        nodata=nodata,
        pixel_dtype=pixel_dtype,
        max_unreadable=1.0,
    )
    if unusual := check_units(images, mean=wanted.mean, std=wanted.std, pixel_dtype=pixel_dtype):
        tell(unusual)
    return images


def name_within(name: str, source: str) -> str:
    """An item's name relative to its source, or to the folder of a list of files or tars; as it is outside of these."""
    folders = (folder for folder in (Path(source), Path(source).parent) if Path(name).is_relative_to(folder))
    within = next(folders, None)
    return name if within is None else Path(name).relative_to(within).as_posix()


def _probabilities(
    extractor: Extractor, images: ImageSet, device: torch.device
) -> tuple[Int64[Tensor, " n"], Float[Tensor, "n K"], dict[str, str]]:
    """The readable images by their numbers, the probabilities of their classes, and what is wrong with the others."""
    wanted, numbers, shares, unreadable = extractor.preprocessing, list[int](), list[Tensor](), dict[str, str]()
    mean, std = (torch.tensor(values, device=device) for values in (wanted.mean, wanted.std))
    assert extractor.model is not None
    with undisturbed(extractor.model):
        for part in torch.arange(len(images)).split(BATCH_SIZE):
            crops = []
            for number in part.tolist():
                try:
                    whole = images.get(number)
                except UnreadableImage as error:
                    unreadable[images.item_name(number)] = str(error)
                    continue
                crops.append(seen_crop(whole, wanted))
                numbers.append(number)
            if crops:
                logits = extractor.model(normalise(torch.stack(crops).to(device), mean, std))
                shares.append(logits.float().softmax(dim=1).cpu())
    if not shares:
        raise MAEError(f"no image can be read: {next(iter(unreadable.values()), 'there is none')}")
    return torch.tensor(numbers), torch.cat(shares), unreadable


def _as_csv(found: Predictions, top: int) -> str:
    """A row an image; images that cannot be read have a name and no class."""
    shown = min(top, len(found.class_names))
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    more = [f"{what}_{place}" for place in range(2, shown + 1) for what in ("class", "probability")]
    rows.writerow(["name", "class", "probability", *more, "problem"])
    for name, best in zip(found.names, found.top(top), strict=True):
        rows.writerow([name, *(cell for label, share in best for cell in (label, f"{share:.6f}")), ""])
    rows.writerows([name, *[""] * (2 * shown), problem] for name, problem in found.unreadable.items())
    return lines.getvalue()


def _as_json(found: Predictions, top: int) -> str:
    rows = [
        {"name": name, "class": best[0][0], "probability": best[0][1], "top": [list(pair) for pair in best]}
        for name, best in zip(found.names, found.top(top), strict=True)
    ]
    return json.dumps({"images": rows, "unreadable": dict(found.unreadable)}, indent=1) + "\n"


def _draw(found: Predictions, images: ImageSet, numbers: Int64[Tensor, " n"], *, title: str, path: Path) -> None:
    """A row for each predicted class, the commonest first: its surest images, then those it is least sure of."""
    sure, predicted = found.probabilities.max(dim=1)
    found = replace(found, names=tuple(without_common_folders(found.names)))
    counts = torch.bincount(predicted, minlength=len(found.class_names))
    order = [label for label in counts.argsort(descending=True, stable=True).tolist() if counts[label]]
    rows = [_examples(label, predicted, sure) for label in order[:_ROWS]]
    left_out = f" {len(order) - _ROWS} more classes are left out." if len(order) > _ROWS else ""
    write_examples(
        images,
        [[None if row is None else int(numbers[row]) for row in each] for each in rows],
        notes=[
            [_notes(found, label, counts, sure, row) for row in each] for label, each in zip(order, rows, strict=False)
        ],
        names=["surest", *[""] * (_SURE - 1), "least sure", *[""] * (_UNSURE - 1)],
        title=title,
        caption=f"{count_of(len(found.names), 'image')}; a row for each class that was predicted, the commonest first."
        f"{left_out}",
        path=path,
    )


def _examples(label: int, predicted: Int64[Tensor, " n"], sure: Float[Tensor, " n"]) -> list[int | None]:
    """Rows of the surest images of a class, and of the least sure ones, none twice."""
    rows = (predicted == label).nonzero()[:, 0]
    falling = rows[sure[rows].argsort(descending=True, stable=True)].tolist()
    surest, rest = falling[:_SURE], falling[_SURE:]
    shown = [*surest, *[None] * (_SURE - len(surest)), *rest[-_UNSURE:]]
    return [*shown, *[None] * (_SURE + _UNSURE - len(shown))]


def _notes(
    found: Predictions, label: int, counts: Int64[Tensor, " K"], sure: Float[Tensor, " n"], row: int | None
) -> Sequence[str]:
    if row is None:
        return ["", ""]
    return [f"{found.class_names[label]} ({int(counts[label]):,})", f"{sure[row]:.0%} {found.names[row]}"]
