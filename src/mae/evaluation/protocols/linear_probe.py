"""A linear classifier on frozen features: a quick one on stored features, or the official recipe on images."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

from mae.errors import UsageError
from mae.evaluation.protocol import THIS_MODEL, EvaluationProtocol, ProtocolResult, against_baselines, headline
from mae.options import shown

if TYPE_CHECKING:
    from torch import Tensor

    from mae.evaluation.common.logistic import Logistic
    from mae.evaluation.common.supervised import SupervisedPlan
    from mae.evaluation.common.task import LabelledTask
    from mae.models.pretrained import PretrainedEncoder

_TOP = 5
_TRUST, _MOMENTUM = 0.001, 0.9
_OF_OFFICIAL = ("epochs", "batch_size", "accumulate", "base_lr", "warmup_epochs")
_ENOUGH = 10
"""Steps over the weights' size: on digits 5 to 30 reached the best accuracy, 3 lost 3 points, 1 lost 9."""


@dataclass(frozen=True, kw_only=True)
class LinearProbe(EvaluationProtocol):
    """By default the quick probe: logistic regression on stored features, its penalty chosen on a tenth of train.

    `official` is the paper's (He et al. 2021, A.1, "Linear probing"): BatchNorm without affine parameters, a linear
    layer, LARS, random crops and flips seen through the frozen encoder. Class token, mean of the patch tokens and both
    together are evaluated in one run.

    Raises:
        UsageError: values out of range.
    """

    name = "linear_probe"
    title = "Linear probe on frozen features"
    summary = "a linear classifier on frozen features: the quick one, or the official recipe"
    cheap = True

    official: bool = False
    """The paper's recipe on augmented images; much slower, since every image goes through the encoder each epoch."""
    epochs: float = 90.0
    """Official: epochs over the training images."""
    batch_size: Annotated[int | None, shown("16384; less where an epoch had fewer than 16 steps", "B")] = None
    """Official: images per step."""
    accumulate: int = 1
    """Official: micro-batches per step, to save memory; the norm then sees one at a time."""
    base_lr: float = 0.1
    """Official: peak learning rate for a batch of 256."""
    warmup_epochs: Annotated[float | None, shown("10, at most a ninth of the run", "E")] = None
    """Official: epochs over which the learning rate rises from 0."""
    baselines: bool = True
    """Quick: evaluate random weights and raw pixels too."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "base_lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise UsageError(f"{name} is {value}; expected a finite number above 0")
        if self.warmup_epochs is not None and not 0 <= self.warmup_epochs < inf:
            raise UsageError(f"warmup_epochs is {self.warmup_epochs}; expected 0 or more")
        changed = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if unread := [name for name in _OF_OFFICIAL if name in changed and not self.official]:
            raise UsageError(f"{unread[0]} is of the official recipe, which is not asked for; give official too")

    def run(self, task: "LabelledTask") -> ProtocolResult:
        """Train and evaluate; see `EvaluationProtocol`."""
        return _official(self, task) if self.official else _quick(self, task)


def _quick(options: LinearProbe, task: "LabelledTask") -> ProtocolResult:
    from mae.evaluation.common.joined_features import with_joined

    numbers: dict[str, dict[str, Any]] = {}
    rankings: dict[str, dict[str, Tensor]] = {}
    fits: dict[str, Logistic] = {}
    for who, features in task.contenders(baselines=options.baselines).items():
        numbers[who], rankings[who] = {}, {}
        with with_joined(features) as joined:
            for name, (train, test) in joined.items():
                numbers[who][name], rankings[who][name], fit = _fit(task, train, test)
                if who == THIS_MODEL:
                    fits[name] = fit
    ranking, ranked_by, others = against_baselines(rankings)
    named = [(f"{who}, {name}", of) for who, by_name in numbers.items() for name, of in by_name.items()]
    return ProtocolResult(
        numbers=numbers,
        header=("features", "top-1", f"top-{min(_TOP, task.num_classes)}", "penalty"),
        rows=tuple((what, f"{of['top1']:.1%}", f"{of['top5']:.1%}", f"{of['penalty']:.0e}") for what, of in named),
        note=" ".join(
            ["Logistic regression; the penalty was chosen on a tenth of the training part.", *_remarks(dict(named))]
        ),
        ranking=ranking,
        ranked_by=ranked_by,
        baselines=others,
        classifier=_classifier(task, ranked_by, *fits[ranked_by].folded()),
    )


def _classifier(task: "LabelledTask", feature: str, weight: "Tensor", bias: "Tensor") -> "PretrainedEncoder | None":
    """The encoder under a linear head on its feature; None of a function, and of a feature that only it has."""
    from mae.models.classifier import FEATURES
    from mae.models.classifier import LinearProbe as Probe

    model = task.extractor.model
    if model is None or model.config is None or feature not in FEATURES:
        return None
    probe = Probe(
        encoder=model.encoder,
        feature=feature,
        num_classes=task.num_classes,
        class_names=task.class_names,
        config=model.config,
    )
    probe.load_state_dict({**probe.state_dict(), "head.weight": weight, "head.bias": bias})
    return probe.to(task.device).eval()


def _fit(task: "LabelledTask", train: "Tensor", test: "Tensor") -> "tuple[dict[str, Any], Tensor, Logistic]":
    """The numbers of the quick probe on one feature, the ranking of the classes of each test image, and the probe."""
    from mae.evaluation.common.logistic import choose_penalty
    from mae.evaluation.common.metrics import top_k_accuracy

    labels = task.labels("test")
    choice = choose_penalty(
        train, task.labels("train"), num_classes=task.num_classes, seed=task.seed, device=task.device
    )
    ranking = choice.best.logits(test).topk(min(_TOP, task.num_classes), dim=1).indices
    numbers = {
        "top1": top_k_accuracy(ranking[:, :1], labels),
        "top5": top_k_accuracy(ranking, labels),
        "penalty": choice.best.penalty,
        "penalty_at_end_of_grid": choice.at_end,
        "held_out": dict(zip(map(str, choice.penalties), choice.accuracies, strict=True)),
        "converged": choice.best.converged and all(choice.converged),
    }
    return numbers, ranking, choice.best


def _remarks(numbers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a reader must know of the probes, each thing once with the probes that it is true of."""
    true_of = {
        "The best penalty is at the end of the grid": [
            name for name, of in numbers.items() if of["penalty_at_end_of_grid"]
        ],
        "The optimizer gave up before it converged": [name for name, of in numbers.items() if not of["converged"]],
    }
    return [
        f"{remark}: {'all' if len(names) == len(numbers) else '; '.join(names)}."
        for remark, names in true_of.items()
        if names
    ]


def _official(options: LinearProbe, task: "LabelledTask") -> ProtocolResult:
    from mae.evaluation.common.classified_images import ClassifiedImages
    from mae.evaluation.common.metrics import top_k_accuracy
    from mae.evaluation.common.probe_heads import make_probe, rank_by_heads
    from mae.evaluation.common.supervised import train_with_labels
    from mae.modalities.images.crop import Augmentation
    from mae.report.terminal.console import duration
    from mae.training.lars import LARS

    probe, widths = make_probe(task)
    plan = _plan(options, task, widths)
    labels = task.labels("test")

    def accuracies() -> dict[str, float]:
        ranked = rank_by_heads(task, probe, top=1)
        return {name: top_k_accuracy(ranking, labels) for name, ranking in ranked.items()}

    training = train_with_labels(
        task,
        plan,
        probe.train(),
        LARS(probe.parameters(), momentum=_MOMENTUM, trust=_TRUST),
        batches=ClassifiedImages(
            task=task,
            batch_size=plan.batch_size,
            accumulate=plan.accumulate,
            augmentation=Augmentation(scale=(0.08, 1.0), draws=1),
            prepare=lambda batch: {"images": batch.images, "target": batch.labels},
        ),
        evaluate=accuracies,
    )
    rankings = rank_by_heads(task, probe, top=_TOP)
    numbers = {
        name: {"top1": top_k_accuracy(ranking[:, :1], labels), "top5": top_k_accuracy(ranking, labels)}
        for name, ranking in rankings.items()
    }
    resolved = {"batch_size": plan.batch_size, "warmup_epochs": plan.warmup_epochs, "rate": plan.rate}
    return ProtocolResult(
        numbers={
            THIS_MODEL: numbers,
            "resolved": resolved,
            "training": {"folder": str(training.folder), "seconds": training.seconds, "curve": training.curve},
        },
        header=("features", "top-1", f"top-{min(_TOP, task.num_classes)}"),
        rows=tuple((f"{THIS_MODEL}, {name}", f"{of['top1']:.1%}", f"{of['top5']:.1%}") for name, of in numbers.items()),
        note=f"{_official_note(options, plan, len(task.images('train').readable))} It took "
        f"{duration(training.seconds)}; the heads are in {training.folder}.",
        ranking=rankings[headline(rankings)],
        ranked_by=headline(rankings),
        classifier=_classifier(task, headline(rankings), *probe.folded(headline(rankings))),
        curve=training.curve,
        variant="official",
    )


def _plan(options: LinearProbe, task: "LabelledTask", widths: Mapping[str, int]) -> "SupervisedPlan":
    from mae.evaluation.common.supervised import SupervisedPlan, largest_batch
    from mae.training.device import choose_precision

    images = len(task.images("train").readable)
    batch_size = largest_batch(options.batch_size, 16384, images=images, steps_per_epoch=16)
    if batch_size // options.accumulate < 2:
        raise UsageError(
            f"a batch of {batch_size} in {options.accumulate} micro-batch(es) leaves a micro-batch of one image, of "
            "which no norm can be taken; give a larger --batch-size, more images, or use the quick probe"
        )
    return SupervisedPlan(
        name=LinearProbe.name,
        epochs=options.epochs,
        batch_size=batch_size,
        accumulate=options.accumulate,
        rate=options.base_lr * batch_size / 256,
        min_rate=0.0,
        warmup_epochs=min(10.0, options.epochs / 9) if options.warmup_epochs is None else options.warmup_epochs,
        precision=choose_precision("auto", task.device),
        identity={"widths": widths, **asdict(options)},
    )


def _official_note(options: LinearProbe, plan: "SupervisedPlan", images: int) -> str:
    """What was done; and a warning where the rate, made for 115 million samples, hardly moves the initial weights."""
    note = f"BatchNorm and a linear layer by LARS, {options.epochs:g} epochs in batches of {plan.batch_size}."
    steps = options.epochs * (images // plan.batch_size)
    # A cosine is half its peak in the mean, and momentum adds up each step 1 / (1 - momentum) times.
    moved = steps * plan.rate / 2 * _TRUST / (1 - _MOMENTUM)
    if moved >= _ENOUGH:
        return note
    return (
        f"{note} A step of LARS is its rate times {_TRUST} of the weights' size; with momentum all {steps:,.0f} "
        f"together come to {moved:.2g} times that size, and a head needs about {_ENOUGH}. The official rate suits 90 "
        "epochs of ImageNet; give a higher --base-lr, more epochs, or use the quick probe."
    )
