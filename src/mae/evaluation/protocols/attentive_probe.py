"""A learned query over frozen patch tokens (El-Nouby et al. 2024, AIM): what a mean of them may lose."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, TypeVar

from mae.errors import UsageError
from mae.evaluation.protocol import THIS_MODEL, EvaluationProtocol, ProtocolResult

if TYPE_CHECKING:
    from torch import nn

    from mae.evaluation.common.attentive_training import AttentiveResult
    from mae.evaluation.common.task import LabelledTask
    from mae.evaluation.extractors.extractor import Extractor
    from mae.layers.attention_pooling import AttentionPooling
    from mae.models.classifier import Classifier

Probe = TypeVar("Probe", bound="nn.Module")


@dataclass(frozen=True, kw_only=True)
class AttentiveProbe(EvaluationProtocol):
    """BatchNorm, one learned query a head, a linear head, on stored patch tokens; AdamW.

    A probe for each learning rate is trained side by side on nine tenths of the training part; the tenth chooses among
    them.

    Raises:
        UsageError: values out of range.
    """

    name = "attentive_probe"
    title = "Attentive probe on frozen patch tokens"
    summary = "a learned query over frozen patch tokens, and a linear classifier"

    epochs: int = 30
    """Epochs over the training images' tokens."""
    batch_size: int = 256
    """Images per step."""
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    """Peak learning rates to try."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if not self.rates or not all(0 < rate < inf for rate in self.rates):
            raise UsageError(f"rates is {list(self.rates)}; expected learning rates above 0")

    def run(self, task: "LabelledTask") -> ProtocolResult:
        """Train and evaluate; see `EvaluationProtocol`."""
        from mae.layers.attention_pooling import AttentionPooling

        return _result(task, self.trained(task, AttentionPooling))

    def trained(
        self, task: "LabelledTask", make: "Callable[..., Probe]", extractor: "Extractor | None" = None
    ) -> "AttentiveResult[Probe]":
        """Probes trained on the patch tokens of the task's model, or of another; see `train_attentive`."""
        from rich.progress import Progress

        from mae.evaluation.common.attentive_training import train_attentive

        tokens, test_tokens = (task.patches(part, extractor) for part in ("train", "test"))
        with Progress(console=task.console, transient=True, disable=not task.console.is_terminal) as progress:
            bar = progress.add_task(self.name.replace("_", " "), total=None)
            return train_attentive(
                tokens,
                task.labels("train"),
                test_tokens,
                make=make,
                num_classes=task.num_classes,
                rates=self.rates,
                epochs=self.epochs,
                batch_size=self.batch_size,
                seed=task.seed,
                device=task.device,
                progress=lambda done, steps: progress.update(bar, completed=done, total=steps),
            )


def _result(task: "LabelledTask", trained: "AttentiveResult[AttentionPooling]") -> ProtocolResult:
    from mae.evaluation.common.metrics import top_k_accuracy

    labels = task.labels("test")
    top1, top5 = top_k_accuracy(trained.ranking[:, :1], labels), top_k_accuracy(trained.ranking, labels)
    note = f"Learning rate {trained.best_rate:g}, chosen on a tenth of the training part."
    if trained.at_end and len(trained.rates) > 1:
        note += " It is at the end of those tried, so a still better one may lie beyond."
    best = [row for row in trained.curve if row["rate"] == trained.best_rate]
    return ProtocolResult(
        numbers={
            THIS_MODEL: {"patches": {"top1": top1, "top5": top5}},
            "rate": trained.best_rate,
            "rate_at_end_of_grid": trained.at_end,
            "held_out": dict(zip(map(str, trained.rates), trained.accuracies, strict=True)),
            "curve": trained.curve,
        },
        header=("features", "top-1", f"top-{trained.ranking.shape[1]}"),
        rows=((f"{THIS_MODEL}, patch tokens", f"{top1:.1%}", f"{top5:.1%}"),),
        note=note,
        ranking=trained.ranking,
        curve=tuple({"epoch": row["epoch"], "held_out": row["held_out_accuracy"]} for row in best),
        classifier=_classifier(task, trained),
    )


def _classifier(task: "LabelledTask", trained: "AttentiveResult[AttentionPooling]") -> "Classifier | None":
    """The encoder under the trained probe; None of a function."""
    from mae.models.classifier import AttentiveProbe as Stored

    model = task.extractor.model
    if model is None or model.config is None:
        return None
    classifier = Stored(
        encoder=model.encoder, num_classes=task.num_classes, class_names=task.class_names, config=model.config
    )
    classifier.head = trained.probe
    return classifier.to(task.device).eval()
