"""An evaluation from its request to its record: open, check, judge, write."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console

from mae import records
from mae.credentials import concealed
from mae.data.base import LabelledData, LabelledSplit, check_parts
from mae.data.sources import open_held_out, open_labelled
from mae.errors import UsageError
from mae.evaluation.bench import Bench, EvaluationProtocol, Gallery, Outcome
from mae.evaluation.extractors import Extractor, open_extractor, show_loaded
from mae.evaluation.features import FeatureStore
from mae.evaluation.near_copies import count_near_copies, judge_without_near_copies, remark, warning
from mae.evaluation.record import Evaluation, hardware, versions
from mae.evaluation.scores import confusion_matrix
from mae.records import write_json
from mae.report.canvas import visible
from mae.report.confusion import draw_confusion
from mae.report.learning_curve import draw_learning_curve
from mae.report.page import Section, write_page
from mae.report.tables import show_grid
from mae.training.device import explained_memory_failure
from mae.training.distributed import World, joined_world
from mae.training.run_folder import RunFolder

PROTOCOLS: Mapping[str, str] = {
    "knn": "Knn",
    "linear_probe": "LinearProbe",
    "attentive_probe": "AttentiveProbe",
    "finetune": "Finetune",
    "reconstruction": "Reconstruction",
    "label_free": "LabelFree",
}
"""Each protocol's file in this folder, and the class in it that holds its constants."""

TITLES: Mapping[str, str] = {
    "knn": "Weighted k-NN on frozen features",
    "linear_probe": "Linear probe on frozen features",
    "attentive_probe": "Attentive probe on frozen patch tokens",
    "finetune": "Fine-tuning",
    "reconstruction": "Reconstruction of hidden pixels",
    "label_free": "Features without labels",
}

CHEAP = ("label_free", "knn", "linear_probe", "reconstruction")
"""What `all` runs: minutes on a CPU once features are there."""

_WITHOUT_LABELS = ("reconstruction", "label_free")
_SHOWN = 3
_LESS_MEMORY = "fine-tuning computes the same batch in parts with --accumulate 2; all else runs with --device cpu"
Overlap = Literal["error", "drop"]


def find_protocol(name: str) -> type[EvaluationProtocol]:
    """The class of a protocol.

    Raises:
        UsageError: no such protocol; the nearest names are given.
    """
    records.check_known([name], list(PROTOCOLS), what="protocol")
    return getattr(import_module(f"mae.evaluation.{name}"), PROTOCOLS[name])


def evaluate(
    protocol: str,
    model: Any,
    *,
    data: str | Path,
    test: str | Path | None = None,
    out: str | Path | None = None,
    data_root: str | Path = "data",
    device: str = "auto",
    seed: int = 0,
    overlap: Overlap = "error",
    quiet: bool = False,
    **options: Any,
) -> Evaluation:
    """Judge a model by one of the field's protocols; does what the command `mae evaluate` does.

    Under `torchrun` every process calls this; what they find is what one would.

    Args:
        protocol: a name of `PROTOCOLS`.
        model: a run folder, a checkpoint or a `.safetensors` file; `timm:NAME`; `hf:NAME_OR_PATH`; a
            `MaskedAutoencoder`; a `mae.Extractor`, which can hold any function.
        data: labelled images: a folder or `.zip` with a folder for each class, perhaps below `train/` and `test/`,
            or the name of a known set. `reconstruction` and `label_free` also take images without labels.
        test: the test part, where it is not in `data`.
        out: where results and features are kept; None: the run's folder, or a new one under `runs/`.
        data_root: where sets known by name are kept.
        device: `auto`, `cpu`, `cuda` or `mps`.
        seed: decides what the protocol draws.
        overlap: what to do where test images are among the training images: `error`, or `drop` them from the test.
        quiet: show nothing.
        options: the protocol's constants, the fields of its class.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: it failed on the way.
    """
    kind = find_protocol(protocol)
    judge = records.from_json(kind, options, what=f"option of {protocol}")
    with joined_world(device) as (world, chosen):
        evaluator = Evaluator(
            model,
            data=str(data),
            test=None if test is None else str(test),
            out=None if out is None else Path(out),
            data_root=Path(data_root),
            device=chosen,
            seed=seed,
            overlap=overlap,
            console=Console(quiet=quiet),
            world=world,
        )
        return evaluator.judge(protocol, judge)


class Evaluator:
    """One model and one set, judged by as many protocols as one likes; `evaluate` tells the arguments.

    All processes of `world` judge together: they deal out what is computed of images, and each does the rest. The main
    one writes and speaks.
    """

    def __init__(
        self,
        model: Any,
        *,
        data: str,
        test: str | None,
        out: Path | None,
        data_root: Path,
        device: torch.device,
        seed: int,
        overlap: Overlap,
        console: Console,
        world: World,
    ) -> None:
        self.console = console if world.is_main else Console(quiet=True)
        self.device = device
        self.seed = seed
        self.world = world
        with world.main_first():  # a download goes to one folder
            self.extractor = open_extractor(model, device=self.device)
        show_loaded(self.console, self.extractor.loaded)
        self.folder = out if out is not None else usual_folder(model, self.extractor)
        self._spec, self._test = concealed(data), None if test is None else concealed(test)
        self._data_root = data_root
        records.check_known([overlap], get_args(Overlap), what="overlap")
        self._overlap = overlap
        self._bench: Bench | None = None
        self._gallery: Gallery | None = None
        self._store = FeatureStore(self.folder / "features", device=self.device, console=self.console, world=self.world)

    def judge(self, name: str, protocol: EvaluationProtocol) -> Evaluation:
        """Run one protocol, show its table, write its record and pictures.

        Raises:
            UsageError: the request cannot be carried out as asked.
            MAEError: it failed on the way.
        """
        return self._judged(name, protocol)[1]

    def _judged(self, name: str, protocol: EvaluationProtocol) -> tuple[Outcome, Evaluation]:
        began = time.monotonic()
        subject: Bench | Gallery = self.gallery() if name in _WITHOUT_LABELS else self.bench()
        # The caller's random numbers stay as they are.
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())), explained_memory_failure(_LESS_MEMORY):
            outcome = protocol.run(subject)
        copied = judge_without_near_copies(subject, outcome) if isinstance(subject, Bench) else None
        place = self.folder / "evaluation"
        stem = f"{name}-{outcome.variant}" if outcome.variant else name
        record = Evaluation(
            protocol=name,
            model=self.extractor.name,
            weights=digest_of(self.extractor.identity),
            data={"source": self._spec, "test_source": self._test, **subject.facts()},
            constants=asdict(protocol),  # type: ignore[call-overload]
            seed=self.seed,
            result=outcome.result,
            chance=1 / subject.num_classes if isinstance(subject, Bench) else None,
            majority=subject.majority() if isinstance(subject, Bench) else None,
            near_copies=copied,
            pictures=self._draw(outcome, subject, TITLES[name], place / stem),
            seconds=time.monotonic() - began,
            hardware=hardware(self.device),
            versions=versions(),
            finished_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )
        self.world.from_main(lambda: _write(place / f"{stem}.json", record))
        outcome = replace(
            outcome,
            rows=(*outcome.rows, *_yardstick_rows(record, len(outcome.header))),
            note=" ".join(filter(None, [outcome.note, remark(copied) if copied else ""])),
        )
        show_grid(self.console, f"{TITLES[name]}, {self._spec}", outcome.header, outcome.rows)
        if outcome.note:
            self.console.print(outcome.note, highlight=False, markup=False)
        return outcome, record

    def _draw(self, outcome: Outcome, subject: Bench | Gallery, title: str, stem: Path) -> dict[str, str]:
        """The pictures of an outcome, by what they show; drawn by the main process."""
        if not isinstance(subject, Bench):
            return {}
        drawn: dict[str, Callable[..., None]] = {}
        if outcome.ranking is not None:
            matrix = confusion_matrix(outcome.ranking[:, 0], subject.labels("test"), num_classes=subject.num_classes)
            drawn["confusion"] = partial(draw_confusion, matrix, class_names=subject.class_names, title=title)
        if outcome.curve:
            drawn["curve"] = partial(
                draw_learning_curve,
                outcome.curve,
                series={name: name.replace("_", " ") for name in outcome.curve[0] if name != "epoch"},
                levels={"commonest class": subject.majority(), "chance": 1 / subject.num_classes},
                x="epoch",
                title=title,
            )
        names = {what: f"{stem.name}-{what}.png" for what in drawn}
        for what, draw in drawn.items():
            self.world.from_main(partial(draw, path=stem.parent / names[what]))
        return names

    def judge_all(self) -> Path:
        """Run the cheap protocols and put their tables and pictures on one page.

        Returns:
            The page.

        Raises:
            UsageError: see `bench`.
            MAEError: it failed on the way.
        """
        facts = {"model": self.extractor.name, "source": self._spec, **self.bench().facts()}
        if told := warning(count_near_copies(self.bench())):
            facts["near copies"] = told
        sections = []
        for name in CHEAP:
            if name == "reconstruction" and self.extractor.autoencoder is None:
                continue  # there is no decoder to draw with
            outcome, record = self._judged(name, find_protocol(name)())
            pictures = [self.folder / "evaluation" / picture for picture in record.pictures.values()]
            section = Section(
                title=TITLES[name], text=outcome.note, header=outcome.header, rows=outcome.rows, pictures=pictures
            )
            sections.append(section)
        page = self.folder / "evaluation" / "index.html"
        title = f"How good are the features of {self.extractor.name}?"
        named = [(name, str(value)) for name, value in facts.items()]
        self.world.from_main(lambda: write_page(page, title=title, facts=named, sections=sections))
        return page

    def bench(self) -> Bench:
        """The labelled set, checked.

        Raises:
            UsageError: not labelled, one class, classes that are missing, or the same image in both parts.
        """
        if self._bench is None:
            with self.world.main_first():
                data = open_labelled(self._spec, data_root=self._data_root, test=self._test)
            bench = self._on(data)
            pairs = bench.overlap()
            if pairs and self._overlap == "error":
                raise UsageError(_overlap_message(data, pairs))
            if pairs:
                bench = self._on(_without(data, {second for _, second in pairs}))
            self.console.print(visible(bench.data.note), highlight=False, soft_wrap=True, markup=False)
            if told := warning(count_near_copies(bench)):
                self.console.print(visible(told), style="yellow", highlight=False, soft_wrap=True, markup=False)
            self._bench = bench
        return self._bench

    def _on(self, data: LabelledData) -> Bench:
        return Bench(
            extractor=self.extractor,
            data=data,
            folder=self.folder,
            device=self.device,
            seed=self.seed,
            console=self.console,
            store=self._store,
            world=self.world,
        )

    def gallery(self) -> Gallery:
        """The images for protocols without labels.

        Raises:
            UsageError: nothing of that name, or no images there.
        """
        if self._gallery is None:
            with self.world.main_first():
                source = open_held_out(self._test or self._spec, data_root=self._data_root)
            self._gallery = Gallery(
                extractor=self.extractor,
                source=source,
                folder=self.folder,
                device=self.device,
                seed=self.seed,
                console=self.console,
                store=self._store,
                world=self.world,
            )
        return self._gallery


def digest_of(identity: str | None) -> str | None:
    """An extractor's identity as records hold it: 16 hexadecimal digits."""
    return None if identity is None else hashlib.sha256(identity.encode()).hexdigest()[:16]


def _write(path: Path, record: Evaluation) -> None:
    """Write the record; one of another model, set or other constants that stands there is kept under `earlier/`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = records.to_json(record)
    before = records.read_json(path) if path.exists() else written
    if any(before.get(name) != written[name] for name in ("weights", "data", "constants", "seed")):
        earlier = path.parent / "earlier"
        earlier.mkdir(exist_ok=True)
        path.replace(earlier / f"{path.stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.json")
    write_json(path, written)


def _yardstick_rows(record: Evaluation, columns: int) -> list[tuple[str, ...]]:
    """What any accuracy must beat, as the last rows of its table."""
    if record.chance is None or record.majority is None:
        return []
    shares = {"commonest class": record.majority, "chance": record.chance}
    return [(name, f"{share:.1%}", *[""] * (columns - 2)) for name, share in shares.items()]


def usual_folder(spec: Any, extractor: Extractor) -> Path:
    """The run that a model is of; for any other a folder named after it."""
    path = Path(spec) if isinstance(spec, (str, Path)) else None
    if path is not None and path.exists():
        above = [path, *path.absolute().parents][:4]
        run = next((folder for folder in above if RunFolder(folder).holds_run), None)
        if run is not None:
            return run
    return Path("runs") / f"evaluate-{records.safe_name(extractor.name).strip('-.')[-60:]}"


def _overlap_message(data: LabelledData, pairs: list[tuple[int, int]]) -> str:
    shown = "; ".join(
        f"{data.train.source.item_name(first)} and {data.test.source.item_name(second)}"
        for first, second in pairs[:_SHOWN]
    )
    return (
        f"{len(pairs):,} test images are among the training images too, so a test would ask what was taught: {shown}. "
        "Remove them from one part, or leave them out of the test with --overlap drop"
    )


def _without(data: LabelledData, numbers: set[int]) -> LabelledData:
    kept = torch.tensor([number for number in range(len(data.test.labels)) if number not in numbers])
    if len(kept) == 0:
        raise UsageError("every test image is among the training images; give another test part with --test")
    take = getattr(data.test.source, "take", None)
    if take is None:
        raise UsageError(f"{data.test.source.name} comes whole; its test images cannot be left out")
    source = take(kept.numpy(), f"{len(kept):,} test images that are not among the training images")
    test = LabelledSplit(source=source, labels=data.test.labels[kept])
    check_parts(data.class_names, [data.class_names[label] for label in test.labels.tolist()], name=source.name)
    return replace(data, test=test, note=f"{data.note}; {len(numbers):,} test images left out: trained on")
