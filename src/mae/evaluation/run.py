"""An evaluation from its request to its record: open, check, run the protocol, write."""

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from rich.console import Console

from mae import records
from mae.credentials import concealed
from mae.data.annotations.detection import open_detection
from mae.data.annotations.segmentation import open_segmentation
from mae.data.sources.names import check_apart
from mae.data.sources.open import open_held_out, open_labelled
from mae.errors import UsageError
from mae.evaluation import protocols
from mae.evaluation.common import finetuning
from mae.evaluation.common.dense_finetuning import DenseFinetuning
from mae.evaluation.common.metrics import confusion_matrix
from mae.evaluation.common.near_duplicates import accuracy_without_near_copies, count_near_copies, remark, warning
from mae.evaluation.common.overlap import Overlap, overlap_message, without_images
from mae.evaluation.common.record import Evaluation, digest_of, hardware, versions, write_csv, write_record
from mae.evaluation.common.task import DetectionTask, LabelledTask, SegmentationTask, UnlabelledTask, of_whole_images
from mae.evaluation.common.verdict import COMMONEST, Verdict, overall, verdict_of
from mae.evaluation.extractors.extractor import Extractor, show_loaded
from mae.evaluation.extractors.feature_store import FeatureStore
from mae.evaluation.extractors.open import open_extractor, usual_folder
from mae.evaluation.label_check import check_labels
from mae.evaluation.pictures.confused import draw_confused
from mae.evaluation.pictures.pooling import draw_pooling
from mae.evaluation.protocol import DetectionProtocol, EvaluationProtocol, ProtocolResult, SegmentationProtocol
from mae.report.figures.confusion import draw_confusion
from mae.report.figures.learning_curve import draw_learning_curve
from mae.report.html.page import Section, write_page
from mae.report.terminal.tables import show_grid
from mae.text import visible
from mae.training.device import explained_memory_failure
from mae.training.distributed import World, joined_world

_LESS_MEMORY = "fine-tuning computes a batch in micro-batches with --accumulate 2; all else also runs with --device cpu"
_LAYOUTS = {frozenset({"images", "masks"}): "segmentation", frozenset({"train2017", "val2017"}): "detection"}
"""What folders are for whose names would be taken for classes."""
_Task = TypeVar("_Task", LabelledTask, SegmentationTask, DetectionTask, UnlabelledTask)
_TwoParts = TypeVar("_TwoParts", LabelledTask, SegmentationTask, DetectionTask)


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
    """Evaluate a model by one of the field's protocols, like the command `mae evaluate`.

    Under `torchrun` every process calls this; the result is the same as with one.

    Args:
        protocol: the `name` of one of `mae.evaluation.protocols.PROTOCOLS`.
        model: a run folder, a checkpoint or a `.safetensors` file; `timm:NAME`; `hf:NAME_OR_PATH`; a
            `MaskedAutoencoder`; a `mae.Extractor`, which can hold any function.
        data: labelled images: a folder or `.zip` with a folder for each class, perhaps below `train/` and `test/`,
            or the name of a known set. `reconstruction`, `label_free` and `neighbours_patches` also take images
            without labels, `segmentation_knn` takes a folder of images with masks.
        test: the test part, where it is not in `data`.
        out: where results and features are kept; None: the run's folder, or a new one under `runs/`.
        data_root: where sets known by name are kept.
        device: `auto`, `cpu`, `cuda` or `mps`.
        seed: decides what the protocol draws, `0 <= seed < 2**63`.
        overlap: what to do where test images are among the training images: `error`, or `drop` them from the test.
        quiet: show nothing.
        options: the protocol's options, the fields of its class.

    Raises:
        UsageError: a wrong request, or a protocol that does not apply to the model.
        MAEError: it failed on the way.
    """
    chosen = records.from_json(protocols.find_protocol(protocol), options, what=f"option of {protocol}")
    with joined_world(device) as (world, where):
        evaluator = Evaluator(
            model,
            data=str(data),
            test=None if test is None else str(test),
            out=None if out is None else Path(out),
            data_root=Path(data_root),
            device=where,
            seed=seed,
            overlap=overlap,
            console=Console(quiet=quiet),
            world=world,
        )
        return evaluator.run(chosen)


class Evaluator:
    """One model and one set, for any number of protocols; `evaluate` documents the arguments.

    All processes of `world` evaluate together: they deal out what is computed of images, and each does the rest. The
    main one writes and prints.
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
        records.check_known([overlap], get_args(Overlap), what="overlap")
        records.check_seed(seed)
        if out is not None:
            records.check_folder(out)
            for images in (data, test):
                if images is not None:
                    check_apart(out, images)
        self.console = console if world.is_main else Console(quiet=True)
        self.device, self.seed, self.world = device, seed, world
        with world.main_first():  # a download goes to one folder
            self.extractor = open_extractor(model, device=device)
        show_loaded(self.console, self.extractor.loaded)
        self.folder = out if out is not None else usual_folder(model, self.extractor)
        self._spec, self._test = concealed(data), None if test is None else concealed(test)
        self._data_root = data_root
        self._overlap = overlap
        self._labelled: LabelledTask | None = None
        self._unlabelled: UnlabelledTask | None = None
        self._store = FeatureStore(self.folder / "features", device=device, console=self.console, world=world)

    def run(self, protocol: EvaluationProtocol) -> Evaluation:
        """Run one protocol, show its table, write its record and pictures.

        Raises:
            UsageError: a wrong request, or a protocol that does not apply to the model.
            MAEError: it failed on the way.
        """
        result, record, verdict = self._run(protocol)
        if protocol.own_page:
            page = self.folder / "evaluation" / f"{protocol.name}.html"
            facts = {"answer": str(verdict or ""), "model": self.extractor.name, "source": self._spec}
            section = self._section_of(protocol, result, record, verdict)
            title = f"{protocol.title} of {self.extractor.name}"
            named = list(facts.items())
            self.world.from_main(lambda: write_page(page, title=title, facts=named, sections=[section]))
            self._print(f"Look at {page}")
        return record

    def run_all(self) -> Path:
        """Run the cheap protocols and put their tables and pictures on one page.

        Returns:
            The page.

        Raises:
            UsageError: see `labelled_task`.
            MAEError: it failed on the way.
        """
        facts = {"model": self.extractor.name, "source": self._spec, **self.labelled_task().facts()}
        if near := warning(count_near_copies(self.labelled_task())):
            facts["near copies"] = near
        verdicts: dict[str, Verdict] = {}
        sections = [self._section(kind(), verdicts) for kind in protocols.PROTOCOLS if kind.cheap]
        answer = overall(verdicts)
        self._print(answer, style="bold")
        page = self.folder / "evaluation" / "index.html"
        title = f"How good are the features of {self.extractor.name}?"
        named = [(name.replace("_", " "), str(value)) for name, value in {"answer": answer, **facts}.items()]
        self.world.from_main(lambda: write_page(page, title=title, facts=named, sections=sections))
        return page

    def labelled_task(self) -> LabelledTask:
        """The labelled set, checked.

        Raises:
            UsageError: not labelled, one class, classes that are missing, or the same image in both parts.
        """
        if self._labelled is None:
            with self.world.main_first():
                data = open_labelled(self._spec, data_root=self._data_root, test=self._test)
            if (kind := _LAYOUTS.get(frozenset(data.class_names))) is not None:
                raise UsageError(
                    f"{self._spec} holds {' and '.join(data.class_names)}, which are no classes but labels of another "
                    f"kind; expected a folder for each class, or use 'mae finetune {kind}'"
                )
            task = self._apart(LabelledTask, data)
            self._print(task.data.note)
            self._print(warning(count_near_copies(task)), style="yellow")
            self._labelled = task
        return self._labelled

    def unlabelled_task(self) -> UnlabelledTask:
        """The images for protocols without labels.

        Raises:
            UsageError: nothing of that name, or no images there.
        """
        if self._unlabelled is None:
            with self.world.main_first():
                source = open_held_out(self._test or self._spec, data_root=self._data_root)
            self._unlabelled = self._task(UnlabelledTask, source=source)
        return self._unlabelled

    def segmentation_task(self, ignore: tuple[int, ...]) -> SegmentationTask:
        """The images with masks, checked.

        Args:
            ignore: numbers in masks that do not count.

        Raises:
            UsageError: no folder of images and masks, or the same image in both parts.
            MAEError: a mask that cannot be read.
        """
        self._check_one_folder("masks")
        data = open_segmentation(self._spec, ignore=ignore)
        return self._apart(SegmentationTask, data, extractor=of_whole_images(self.extractor))

    def detection_task(self) -> DetectionTask:
        """The images with objects, checked.

        Raises:
            UsageError: no folder of images and labels, or the same image in both parts.
            MAEError: labels that cannot be read, or of a class without a name.
        """
        self._check_one_folder("labels")
        data = open_detection(self._spec)
        return self._apart(DetectionTask, data, extractor=of_whole_images(self.extractor))

    def _check_one_folder(self, what: str) -> None:
        if self._test is not None:
            raise UsageError(f"--test is for classes of images; put test images and their {what} into val/ of --data")

    def _apart(self, kind: type[_TwoParts], data: Any, *, extractor: Extractor | None = None) -> _TwoParts:
        """The task on some data; images that are in both parts are refused, or left out of the test."""
        task = self._task(kind, extractor=extractor, data=data)
        pairs = task.overlap()
        if pairs and self._overlap == "error":
            raise UsageError(overlap_message(data, pairs))
        if pairs:
            data = without_images(data, {second for _, second in pairs})
            task = self._task(kind, extractor=extractor, data=data)
        return task

    def task_of(self, protocol: EvaluationProtocol) -> LabelledTask | SegmentationTask | DetectionTask | UnlabelledTask:
        """What a protocol is given.

        Raises:
            UsageError: it does not apply to the model; see `labelled_task` and its like.
            MAEError: labels that cannot be read.
        """
        if reason := protocol.why_not(self.extractor):
            raise UsageError(reason)
        if isinstance(protocol, SegmentationProtocol):
            return self.segmentation_task(protocol.ignore)
        if isinstance(protocol, DetectionProtocol):
            return self.detection_task()
        return self.labelled_task() if protocol.labels == "classes" else self.unlabelled_task()

    def _task(self, kind: type[_Task], *, extractor: Extractor | None = None, **images: Any) -> _Task:
        return kind(
            extractor=extractor or self.extractor,
            folder=self.folder,
            device=self.device,
            seed=self.seed,
            console=self.console,
            store=self._store,
            world=self.world,
            **images,
        )

    def _section(self, protocol: EvaluationProtocol, verdicts: dict[str, Verdict]) -> Section:
        """A protocol's part of the page, and its verdict; where it does not apply to model or images, the reason."""
        if reason := protocol.why_not(self.extractor):
            return self._left_out(protocol, reason)
        try:
            result, record, verdict = self._run(protocol)
        except UsageError as error:  # such as too few images for this one
            return self._left_out(protocol, str(error))
        if verdict is not None:
            verdicts[protocol.title] = verdict
        return self._section_of(protocol, result, record, verdict)

    def _left_out(self, protocol: EvaluationProtocol, reason: str) -> Section:
        self._print(f"{protocol.title}: left out, {reason}.")
        return Section(title=protocol.title, text=f"Left out: {reason}.")

    def _section_of(
        self, protocol: EvaluationProtocol, result: ProtocolResult, record: Evaluation, verdict: Verdict | None
    ) -> Section:
        pictures = [self.folder / "evaluation" / picture for picture in record.pictures.values()]
        text = "\n\n".join(filter(None, [str(verdict or ""), result.note]))
        return Section(title=protocol.title, text=text, header=result.header, rows=result.rows, pictures=pictures)

    def _run(self, protocol: EvaluationProtocol) -> tuple[ProtocolResult, Evaluation, Verdict | None]:
        began = time.monotonic()
        task = self.task_of(protocol)
        if isinstance(protocol, DenseFinetuning) and protocol.doctor:
            self.world.from_main(partial(self._check_labels, protocol, task))
        # The caller's random numbers stay as they are.
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())), explained_memory_failure(_LESS_MEMORY):
            result = protocol.run(task)
        labelled = task if isinstance(task, LabelledTask) else None
        verdict = result.verdict or (verdict_of(labelled, result) if labelled else None)
        stem = f"{protocol.name}-{result.variant}" if result.variant else protocol.name
        path = self.folder / "evaluation" / f"{stem}.json"
        record = Evaluation(
            protocol=protocol.name,
            model=self.extractor.name,
            weights=digest_of(self.extractor.identity),
            data={"source": self._spec, "test_source": self._test, **task.facts()},
            options=asdict(protocol),  # type: ignore[call-overload]
            seed=self.seed,
            result=result.numbers,
            chance=1 / labelled.num_classes if labelled else None,
            majority=labelled.majority() if labelled else None,
            verdict=None if verdict is None else verdict.to_json(),
            near_copies=accuracy_without_near_copies(labelled, result) if labelled else None,
            pictures=self._draw(result, labelled, protocol.title, path),
            classifier=None if result.classifier is None else path.with_suffix(".safetensors").name,
            seconds=time.monotonic() - began,
            hardware=hardware(self.device),
            versions=versions(),
            finished_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )
        self.world.from_main(lambda: write_record(path, record))
        self.world.from_main(lambda: write_csv(path.with_suffix(".csv"), record))
        weights = path.with_suffix(".safetensors")
        if labelled is not None and result.classifier is not None:
            self.world.from_main(partial(finetuning.save, weights, result.classifier, labelled))
        result = replace(
            result,
            rows=(*result.rows, *_baseline_rows(record, len(result.header))),
            note=" ".join(filter(None, [result.note, remark(record.near_copies or {})])),
        )
        show_grid(self.console, f"{protocol.title}, {self._spec}", result.header, result.rows)
        self._print(str(verdict or ""), style="bold")
        self._print(result.note)
        if record.classifier is not None:
            self._print(f"Name the classes of other images: {shlex.join(['mae', 'predict', str(weights), 'IMAGES'])}")
        return result, record, verdict

    def _check_labels(self, protocol: DenseFinetuning, task: Any) -> None:
        check_labels(
            self._spec,
            task.data.train,
            ignore=getattr(protocol, "ignore", ()),
            dropped=self._overlap == "drop",
            picture=self.folder / "evaluation" / f"{protocol.name}-labels.png",
            console=self.console,
        )

    def _draw(self, result: ProtocolResult, task: LabelledTask | None, title: str, record: Path) -> dict[str, str]:
        """The pictures of a result, by what they show; drawn by the main process."""
        drawn = {**result.pictures, **({} if task is None else self._drawn_of_classes(result, task, title))}
        names = {what: f"{record.stem}-{what}.png" for what in drawn}
        for what, draw in drawn.items():
            self.world.from_main(partial(draw, path=record.with_name(names[what])))
        return names

    def _drawn_of_classes(
        self, result: ProtocolResult, task: LabelledTask, title: str
    ) -> dict[str, Callable[..., None]]:
        """What draws the pictures of a result on classes of images, by what they show."""
        drawn: dict[str, Callable[..., None]] = {}
        if result.curve:
            measured = [name for name in dict.fromkeys(chain(*result.curve)) if name != result.curve_over]
            drawn["curve"] = partial(
                draw_learning_curve,
                result.curve,
                series={name: name.replace("_", " ") for name in measured},
                levels={COMMONEST: task.majority(), "chance": 1 / task.num_classes},
                x=result.curve_over,
                title=title,
                log_x=result.curve_over != "epoch",
            )
        if result.ranking is not None:
            which = f"{title}: {result.ranked_by}" if result.ranked_by else title
            # Asked here: several processes ask for images and labels together, and only the main one draws.
            images, labels = task.images("test"), task.labels("test")
            matrix = confusion_matrix(result.ranking[:, 0], labels, task.num_classes)
            drawn["confusion"] = partial(draw_confusion, matrix, class_names=task.class_names, title=which)
            if (result.ranking[:, 0] != labels).any():
                drawn["confused"] = partial(
                    draw_confused,
                    images,
                    labels,
                    result.ranking[:, 0],
                    names=task.class_names,
                    title=f"Commonest confusions: {which}",
                )
        if result.classifier is not None and result.classifier.pooling is not None:
            images, wanted = task.images("test"), task.extractor.preprocessing
            drawn["pooling"] = partial(draw_pooling, images, result.classifier, wanted, title=f"{title}: test images")
        return drawn

    def _print(self, text: str, *, style: str | None = None) -> None:
        """A line of plain text, if there is any."""
        if text:
            self.console.print(visible(text), style=style, highlight=False, soft_wrap=True, markup=False)


def _baseline_rows(record: Evaluation, columns: int) -> list[tuple[str, ...]]:
    """What any accuracy must beat, as the last rows of its table."""
    if record.chance is None or record.majority is None:
        return []
    shares = {COMMONEST: record.majority, "chance": record.chance}
    return [(name, f"{share:.1%}", *[""] * (columns - 2)) for name, share in shares.items()]
