"""Learned pooling of frozen patch tokens (Przewięźlikowski et al. 2024, "Beyond [cls]") beside their mean."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mae.evaluation.protocol import THIS_MODEL, ProtocolResult
from mae.evaluation.protocols.attentive_probe import AttentiveProbe

if TYPE_CHECKING:
    from torch import Tensor

    from mae.evaluation.common.attentive_training import AttentiveResult
    from mae.evaluation.common.pooled_head import PooledHead
    from mae.evaluation.common.task import LabelledTask
    from mae.evaluation.common.verdict import Difference
    from mae.models.classifier import Classifier

    Trained = AttentiveResult[PooledHead]

_LEARNED, _MEAN = "learned", "mean"
_FOUND = {"better": "better than", "worse": "worse than", "unclear": "not shown to differ from"}


@dataclass(frozen=True, kw_only=True)
class PooledProbe(AttentiveProbe):
    """A softmax over the stored patch tokens of one learned linear score weighs their mean; a linear head; AdamW.

    The mean of the tokens under the same head, trained in the same way, stands beside it, and the learned pooling of
    random weights. Learning rates are chosen as by the attentive probe.

    Raises:
        UsageError: values out of range.
    """

    name = "pooled_probe"
    title = "Learned pooling of frozen patch tokens"
    summary = "one learned score weighs frozen patch tokens; a linear classifier on their mean"

    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    """Peak learning rates to try; a linear head on few images wants higher ones than attention does."""
    baselines: bool = True
    """Evaluate random weights too."""

    def run(self, task: "LabelledTask") -> ProtocolResult:
        """Train and evaluate; see `EvaluationProtocol`."""
        from mae.evaluation.common.pooled_head import PooledHead
        from mae.evaluation.extractors.extractor import baseline_extractors

        trained: dict[tuple[str, str], Trained] = {
            (THIS_MODEL, _LEARNED): self.trained(task, PooledHead),
            (THIS_MODEL, _MEAN): self.trained(task, partial(PooledHead, learned=False)),
        }
        for baseline in baseline_extractors(task.extractor) if self.baselines else ():
            if baseline.model is not None:  # pixels have no tokens
                trained[baseline.name, _LEARNED] = self.trained(task, PooledHead, baseline)
        return _result(task, trained)


def _result(task: "LabelledTask", trained: "Mapping[tuple[str, str], Trained]") -> ProtocolResult:
    ours = trained[THIS_MODEL, _LEARNED]
    numbers: dict[str, Any] = {}
    for (who, pooling), of in trained.items():
        numbers.setdefault(who, {})[pooling] = _numbers(task, of)
    difference = _over_mean(task, trained)
    note = "Learning rates chosen on a tenth of the training part."
    at_end = [f"{who}, {pooling}" for (who, pooling), of in trained.items() if of.at_end]
    if at_end and len(ours.rates) > 1:
        note += f" At the end of those tried, so that a still better one may lie beyond: {'; '.join(at_end)}."
    if difference is not None:
        note += f" The learned pooling is {_FOUND[difference.answer]} {difference}."
        numbers["over_mean"] = {end: getattr(difference, end) for end in ("share", "low", "high")}
    best = [row for row in ours.curve if row["rate"] == ours.best_rate]
    return ProtocolResult(
        numbers={**numbers, "curve": ours.curve},
        header=("patch tokens, pooled", "top-1", f"top-{ours.ranking.shape[1]}", "rate"),
        rows=tuple(
            (f"{who}, {pooling}", f"{of['top1']:.1%}", f"{of['top5']:.1%}", f"{of['rate']:g}")
            for who, pooling in trained
            for of in [numbers[who][pooling]]
        ),
        note=note,
        ranking=ours.ranking,
        ranked_by=_LEARNED,
        baselines={who: of.ranking[:, 0] for (who, _), of in trained.items() if who != THIS_MODEL},
        curve=tuple({"epoch": row["epoch"], "held_out": row["held_out_accuracy"]} for row in best),
        classifier=_classifier(task, ours.probe),
    )


def _numbers(task: "LabelledTask", of: "Trained") -> dict[str, Any]:
    from mae.evaluation.common.metrics import top_k_accuracy

    labels = task.labels("test")
    return {
        "top1": top_k_accuracy(of.ranking[:, :1], labels),
        "top5": top_k_accuracy(of.ranking, labels),
        "rate": of.best_rate,
        "rate_at_end_of_grid": of.at_end,
        "held_out": dict(zip(map(str, of.rates), of.accuracies, strict=True)),
    }


def _over_mean(task: "LabelledTask", trained: "Mapping[tuple[str, str], Trained]") -> "Difference | None":
    """What the learned pooling gains; None where each test image has a near copy among the training images."""
    from mae.evaluation.common.verdict import compare

    predicted: dict[str, Tensor] = {
        THIS_MODEL: trained[THIS_MODEL, _LEARNED].ranking[:, 0],
        "the mean under the same head": trained[THIS_MODEL, _MEAN].ranking[:, 0],
    }
    found = compare(predicted, task.labels("test"), counted=task.near_copies < 0)
    return None if found is None else found.differences[0]


def _classifier(task: "LabelledTask", head: "PooledHead") -> "Classifier | None":
    """The encoder under pooling and head; None of a function."""
    from mae.models.classifier import PooledProbe as Stored

    model = task.extractor.model
    if model is None or model.config is None:
        return None
    classifier = Stored(
        encoder=model.encoder, num_classes=task.num_classes, class_names=task.class_names, config=model.config
    )
    classifier.load_state_dict({**classifier.state_dict(), **head.folded()})
    return classifier.to(task.device).eval()
