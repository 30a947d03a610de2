"""A linear classifier on frozen features: a quick one on stored features, or the official recipe on images."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mae.data.augmentation import Augmentation
from mae.errors import UsageError
from mae.evaluation.bench import THIS_MODEL, Bench, Outcome, headline
from mae.evaluation.features import computed_batches, normalised_batches, write_header
from mae.evaluation.logistic import choose_penalty
from mae.evaluation.scores import top_k_accuracy
from mae.evaluation.supervised import SupervisedPlan, largest_batch, train_with_labels
from mae.models.classifier import ClassifierOutput
from mae.options import shown
from mae.report.console import duration
from mae.report.inference import undisturbed
from mae.training.device import choose_precision
from mae.training.distributed import World
from mae.training.lars import LARS

_TOP = 5
_CHUNK = 8192
_TRUST, _MOMENTUM = 0.001, 0.9
_ENOUGH = 10
"""Steps over the weights' size: on digits 5 to 30 reached the best accuracy, 3 lost 3 points, 1 lost 9."""

_BOTH = ("cls", "mean")


@dataclass(frozen=True, kw_only=True)
class LinearProbe:
    """By default the quick probe: logistic regression on stored features, its penalty chosen on a tenth of train.

    `official` is the paper's (He et al. 2021, A.1, "Linear probing"): BatchNorm without affine parameters, a linear
    layer, LARS, random crops and flips seen through the frozen encoder. Class token, mean of the patch tokens and both
    together are judged in one run.

    Raises:
        UsageError: values out of range.
    """

    official: bool = False
    """The paper's recipe on augmented images; much slower, since every image goes through the encoder each epoch."""
    epochs: float = 90.0
    """Official: passes over the training images."""
    batch_size: Annotated[int | None, shown("16384; less where an epoch had fewer than 16 steps", "B")] = None
    """Official: images per step."""
    accumulate: int = 1
    """Official: parts a batch is computed in, to save memory; the norm then sees a part at a time."""
    base_lr: float = 0.1
    """Official: peak rate for a batch of 256."""
    warmup_epochs: Annotated[float | None, shown("10, at most a ninth of the run", "E")] = None
    """Official: passes over which the rate rises from 0."""
    comparators: bool = True
    """Quick: judge random weights and raw pixels beside it."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "base_lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise UsageError(f"{name} is {value}; expected a finite number above 0")
        if self.warmup_epochs is not None and not 0 <= self.warmup_epochs < inf:
            raise UsageError(f"warmup_epochs is {self.warmup_epochs}; expected 0 or more")

    def run(self, bench: Bench) -> Outcome:
        """Train and judge; see `EvaluationProtocol`."""
        return _official(self, bench) if self.official else _quick(self, bench)


def _quick(options: LinearProbe, bench: Bench) -> Outcome:
    labels, test_labels = bench.labels("train"), bench.labels("test")
    result: dict[str, dict[str, Any]] = {}
    rankings: dict[tuple[str, str], Tensor] = {}
    # Windows keeps files that are mapped.
    with TemporaryDirectory(prefix="mae-joined-", ignore_cleanup_errors=True) as aside:
        for who, features in bench.contenders(beside=options.comparators).items():
            result[who] = {}
            for name, (train, test) in _with_both(features, Path(aside) / str(len(result))).items():
                choice = choose_penalty(
                    train, labels, num_classes=bench.num_classes, seed=bench.seed, device=bench.device
                )
                ranking = choice.best.logits(test).topk(min(_TOP, bench.num_classes), dim=1).indices
                rankings[who, name] = ranking
                result[who][name] = {
                    "top1": top_k_accuracy(ranking[:, :1], test_labels),
                    "top5": top_k_accuracy(ranking, test_labels),
                    "penalty": choice.best.penalty,
                    "penalty_at_end_of_grid": choice.at_end,
                    "held_out": dict(zip(map(str, choice.penalties), choice.accuracies, strict=True)),
                    "converged": choice.best.converged and all(choice.converged),
                }
    rows = tuple(
        (f"{who}, {name}", f"{found['top1']:.1%}", f"{found['top5']:.1%}", f"{found['penalty']:.0e}")
        for who, by_name in result.items()
        for name, found in by_name.items()
    )
    remarks = [
        f"{who}, {name}: {remark}."
        for who, by_name in result.items()
        for name, found in by_name.items()
        for remark in _remarks(found)
    ]
    return Outcome(
        result=result,
        header=("features", "top-1", f"top-{min(_TOP, bench.num_classes)}", "penalty"),
        rows=rows,
        note=" ".join(["Logistic regression; the penalty was chosen on a tenth of the training part.", *remarks]),
        ranking=rankings[THIS_MODEL, headline(result[THIS_MODEL])],
        ranked_by=headline(result[THIS_MODEL]),
    )


def _remarks(found: Mapping[str, Any]) -> list[str]:
    remarks = ["the best penalty is at the end of the grid"] if found["penalty_at_end_of_grid"] else []
    return remarks if found["converged"] else [*remarks, "the optimizer gave up before it converged"]


def _with_both(features: Mapping[str, tuple[Tensor, Tensor]], aside: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """The features, and class token and mean side by side where a model has both."""
    if not all(name in features for name in _BOTH):
        return dict(features)
    aside.mkdir()
    joined = [_joined([features[name][part] for name in _BOTH], aside / f"{part}.npy") for part in (0, 1)]
    return {**features, "+".join(_BOTH): (joined[0], joined[1])}


def _joined(parts: list[Float[Tensor, "n _"]], path: Path) -> Float[Tensor, "n D"]:
    """Features side by side in a file, so that a million of them need no memory."""
    width = sum(part.shape[1] for part in parts)
    with path.open("wb") as file:
        write_header(file, np.dtype(np.float32), (len(parts[0]), width))
        for rows in zip(*(part.split(_CHUNK) for part in parts), strict=True):
            file.write(torch.cat(rows, dim=1).numpy().data)
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))


class ProbeHeads(nn.Module):
    """One linear head behind a BatchNorm for each feature of a frozen extractor, trained side by side.

    The heads share nothing, so each trains as it would alone.

    Args:
        encode: normalised images to named features `[B, D]`; it is not trained.
        widths: D of each feature that gets a head.
        num_classes: classes to tell apart.
        world: the processes that train together; the norms then see the whole batch.
    """

    def __init__(
        self,
        *,
        encode: Callable[[Tensor], Mapping[str, Tensor]],
        widths: Mapping[str, int],
        num_classes: int,
        world: World,
    ) -> None:
        super().__init__()
        self._encode = encode
        self._world = world
        self.norms = nn.ModuleDict(
            {name: nn.BatchNorm1d(width, eps=1e-6, affine=False) for name, width in widths.items()}
        )
        self.heads = nn.ModuleDict({name: _head(width, num_classes) for name, width in widths.items()})

    def forward(self, images: Float[Tensor, "B C H W"], target: Int64[Tensor, " B"]) -> ClassifierOutput:
        """Classify and judge by cross-entropy; the loss is the sum over the heads."""
        logits = self.logits(images)
        terms = {name: cross_entropy(scores.float(), target) for name, scores in logits.items()}
        loss = torch.stack(list(terms.values())).sum()
        return ClassifierOutput(loss=loss, terms=terms, logits=next(iter(logits.values())))

    def logits(self, images: Float[Tensor, "B C H W"]) -> dict[str, Float[Tensor, "B K"]]:
        """Scores of the classes by feature."""
        with torch.no_grad():
            features = dict(self._encode(images))
        if all(name in features for name in _BOTH):
            features["+".join(_BOTH)] = torch.cat([features[name] for name in _BOTH], dim=1)
        return {name: self.heads[name](self._normed(norm, features[name].float())) for name, norm in self.norms.items()}

    def _normed(self, norm: nn.Module, features: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        if not self.training or self._world.size == 1:
            return norm(features)
        # Frozen features need no gradient, so every process can have all of them.
        return norm(self._world.whole_batch(features)).chunk(self._world.size)[self._world.rank]


def _head(width: int, num_classes: int) -> nn.Linear:
    head = nn.Linear(width, num_classes)
    nn.init.trunc_normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    return head


def _official(options: LinearProbe, bench: Bench) -> Outcome:
    extractor = bench.extractor
    sample = next(normalised_batches(bench.images("test"), extractor.preprocessing, device=bench.device))[:2]
    widths = {name: values.shape[1] for name, values in extractor.named(sample).items() if values.ndim == 2}
    if all(name in widths for name in _BOTH):
        widths["+".join(_BOTH)] = sum(widths[name] for name in _BOTH)
    torch.manual_seed(bench.seed)
    probe = ProbeHeads(encode=extractor.named, widths=widths, num_classes=bench.num_classes, world=bench.world)
    probe = probe.to(bench.device)
    images = len(bench.images("train").readable)
    batch_size = largest_batch(options.batch_size, 16384, images=images, steps_an_epoch=16)
    if batch_size // options.accumulate < 2:
        raise UsageError(
            f"a batch of {batch_size} in {options.accumulate} part(s) leaves a part of one image, of which no norm can "
            "be taken; give a larger --batch-size, more images, or take the quick probe"
        )
    warmup = min(10.0, options.epochs / 9) if options.warmup_epochs is None else options.warmup_epochs
    settled = {"batch_size": batch_size, "warmup_epochs": warmup, "rate": options.base_lr * batch_size / 256}
    plan = SupervisedPlan(
        name="linear_probe",
        epochs=options.epochs,
        batch_size=batch_size,
        accumulate=options.accumulate,
        rate=settled["rate"],
        min_rate=0.0,
        warmup_epochs=warmup,
        augmentation=Augmentation(scale=(0.08, 1.0), draws=1),
        precision=choose_precision("auto", bench.device),
        identity={"widths": widths, **asdict(options)},
    )
    labels = bench.labels("test")

    def look() -> dict[str, float]:
        return {name: top_k_accuracy(ranked[:, :1], labels) for name, ranked in _rankings(bench, probe).items()}

    training = train_with_labels(
        bench,
        plan,
        probe.train(),
        LARS(probe.parameters(), momentum=_MOMENTUM, trust=_TRUST),
        prepare=lambda batch: {"images": batch.images, "target": batch.labels},
        look=look,
    )
    rankings = _rankings(bench, probe)
    found = {
        name: {"top1": top_k_accuracy(ranked[:, :1], labels), "top5": top_k_accuracy(ranked, labels)}
        for name, ranked in rankings.items()
    }
    return Outcome(
        result={
            THIS_MODEL: found,
            "settled": settled,
            "training": {"folder": str(training.folder), "seconds": training.seconds, "curve": training.curve},
        },
        header=("features", "top-1", f"top-{min(_TOP, bench.num_classes)}"),
        rows=tuple((f"{THIS_MODEL}, {name}", f"{of['top1']:.1%}", f"{of['top5']:.1%}") for name, of in found.items()),
        note=f"{_official_note(options, settled, images)} It took {duration(training.seconds)}; the heads are in "
        f"{training.folder}.",
        ranking=rankings[headline(found)],
        ranked_by=headline(found),
        curve=training.curve,
        variant="official",
    )


def _official_note(options: LinearProbe, settled: Mapping[str, Any], images: int) -> str:
    """What was done; and a warning where the rate, made for 115 million samples, leaves the weights as drawn."""
    note = f"BatchNorm and a linear layer by LARS, {options.epochs:g} epochs in batches of {settled['batch_size']}."
    steps = options.epochs * (images // settled["batch_size"])
    # A cosine is half its peak in the mean, and momentum repeats each step until it has come to so many.
    moved = steps * settled["rate"] / 2 * _TRUST / (1 - _MOMENTUM)
    if moved >= _ENOUGH:
        return note
    return (
        f"{note} A step of LARS is its rate times {_TRUST} of the weights' size; with momentum all {steps:,.0f} "
        f"together come to {moved:.2g} times that size, and a head wants about {_ENOUGH}. The official rate suits 90 "
        "epochs of ImageNet; give a higher --base-lr, more epochs, or take the quick probe."
    )


def _rankings(bench: Bench, probe: ProbeHeads) -> dict[str, Int64[Tensor, "m top"]]:
    """The classes of each readable test image by falling score, by feature."""
    top = min(_TOP, bench.num_classes)
    batches = computed_batches(
        bench.images("test"),
        bench.extractor.preprocessing,
        lambda images, _: {
            name: scores.topk(top, dim=1).indices.cpu() for name, scores in probe.logits(images).items()
        },
        device=bench.device,
        world=bench.world,
    )
    with undisturbed(probe):
        ranked = list(batches)
    return {name: torch.cat([batch[name] for batch in ranked]) for name in ranked[0]}
