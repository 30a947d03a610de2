"""Label efficiency: what a model reaches with a part of the labels, beside training from scratch on the same images."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from mae.errors import UsageError
from mae.evaluation.common.share_of_labels import read_share, shown_share
from mae.evaluation.protocol import THIS_MODEL, EvaluationProtocol, ProtocolResult
from mae.evaluation.protocols.attentive_probe import AttentiveProbe
from mae.evaluation.protocols.finetune import Finetune
from mae.evaluation.protocols.linear_probe import LinearProbe

if TYPE_CHECKING:
    from torch import Tensor

    from mae.evaluation.common.task import LabelledTask
    from mae.evaluation.common.verdict import Verdict
    from mae.evaluation.extractors.extractor import Extractor

_FINETUNE, _SCRATCH = "fine-tuning", "from scratch"
_LINEAR, _ATTENTIVE = "linear probe", "attentive probe"
_METHODS = (_LINEAR, _ATTENTIVE, _FINETUNE, _SCRATCH)
_PROBE_EPOCHS, _PROBE_BATCH = 30, 256
_AXIS = "labels used, %"
_ENDS = ("share", "low", "high")


@dataclass(frozen=True, kw_only=True)
class Labels(EvaluationProtocol):
    """Linear probe, attentive probe, fine-tuning and training from scratch at each share of the training labels.

    The part of a share is drawn class by class, at least one image of each; a smaller part lies within a larger one.
    All are tested on the same images. Every training has as many steps at each share, since with few images the epochs
    of a recipe would be too few of them.

    Raises:
        UsageError: values out of range, or a share twice.
    """

    name = "labels"
    title = "Label efficiency"
    summary = "probes, fine-tuning and training from scratch on 1 %, 10 % and all of the labels"
    own_page = True

    shares: tuple[float | str, ...] = ("1%", "10%", "100%")
    """Shares of the training labels, such as 1% or 0.01."""
    steps: int = 1000
    """Optimizer steps of each fine-tuning and training from scratch, and the fewest of each attentive probe."""
    batch_size: int = 32
    """Images per step of fine-tuning and training from scratch; all of a part where it has fewer."""
    base_lr: float = 8e-3
    """Their peak learning rate for a batch of 256; the shorter a training, the higher it must be."""
    augment: bool = False
    """RandAugment and random erasing, which pay in long trainings alone."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if not 0 < self.base_lr < float("inf"):
            raise UsageError(f"base_lr is {self.base_lr}; expected a finite number above 0")
        fractions = [read_share(share) for share in self.shares]
        if not fractions or len(set(fractions)) < len(fractions):
            raise UsageError(f"shares is {list(self.shares)}; expected one or more different ones, such as 1% 10% 100%")

    def why_not(self, extractor: "Extractor") -> str | None:
        """See `EvaluationProtocol`."""
        return Finetune().why_not(extractor)

    def run(self, task: "LabelledTask") -> ProtocolResult:
        """Train and evaluate; see `EvaluationProtocol`."""
        from mae.evaluation.common.label_shares import draw_shares

        labels = task.labels("train")
        fractions = sorted(map(read_share, self.shares))
        parts = draw_shares(labels, fractions, seed=task.seed)
        sizes = [len(rows) for rows in parts]
        if len(set(sizes)) < len(sizes):
            raise UsageError(
                f"shares {_joined(map(shown_share, fractions))} of {len(labels):,} training images are "
                f"{_joined(sizes)} images, so two of them are the same part; give shares further apart"
            )
        self._announce(task, fractions, sizes)
        found: dict[str, dict[str, Tensor]] = {}
        notes: list[str] = []
        for fraction, rows in zip(fractions, parts, strict=True):
            share = shown_share(fraction)
            part = task if len(rows) == len(labels) else task.with_training_rows(rows)
            found[share], told = self._rankings(part, share)
            notes += [*_raised(labels, fraction, share), *told]
        return _result(task, found, dict(zip(found, sizes, strict=True)), notes)

    def _announce(self, task: "LabelledTask", fractions: list[float], sizes: list[int]) -> None:
        """What this will cost, before it begins."""
        parts = _joined(
            f"{shown_share(fraction)} ({size:,} images)" for fraction, size in zip(fractions, sizes, strict=True)
        )
        text = (
            f"{len(_METHODS) * len(sizes)} trainings, {len(_METHODS)} at each of {parts}; {2 * len(sizes)} of them "
            f"train the encoder for {self.steps:,} steps of up to {self.batch_size} images."
        )
        task.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _rankings(self, part: "LabelledTask", share: str) -> "tuple[dict[str, Tensor], list[str]]":
        """The ranking of the test images' classes by each method trained on a part; why one is left out."""
        import torch

        from mae.evaluation.common.hold_out import hold_out
        from mae.evaluation.common.label_shares import can_hold_out

        labels = part.labels("train")
        batch_size = min(self.batch_size, len(labels))
        short: dict[str, Any] = {
            "epochs": self.steps / (len(labels) // batch_size),
            "batch_size": batch_size,
            "base_lr": self.base_lr,
            "augment": self.augment,
            # Mixed images would be all that is ever learned in so few steps.
            "mixing": False,
        }
        protocols: dict[str, EvaluationProtocol] = {}
        notes = []
        if can_hold_out(labels):
            fitted, _ = hold_out(labels, seed=part.seed)
            an_epoch = -(-len(fitted) // _PROBE_BATCH)
            epochs = max(_PROBE_EPOCHS, -(-self.steps // an_epoch))
            protocols[_LINEAR] = LinearProbe(baselines=False)
            protocols[_ATTENTIVE] = AttentiveProbe(epochs=epochs, batch_size=_PROBE_BATCH)
        else:
            notes.append(
                f"{share} is one image a class, so none can be held out to choose a probe's options: no probes there."
            )
        protocols[_FINETUNE] = Finetune(**short)
        protocols[_SCRATCH] = Finetune(**short, from_scratch=True)
        rankings = {}
        for name, protocol in protocols.items():
            part.console.print(f"{share} of the labels: {name}", highlight=False, markup=False)
            ranking = protocol.run(part).ranking
            assert isinstance(ranking, torch.Tensor)
            rankings[name] = ranking
        return rankings, notes


def _joined(items: Any) -> str:
    return ", ".join(map(str, items))


def _raised(labels: "Tensor", fraction: float, share: str) -> list[str]:
    """That classes with less than an image at a share got one, where there are such."""
    import torch

    counts = torch.bincount(labels)
    present, raised = int((counts > 0).sum()), int(((counts > 0) & (fraction * counts < 0.5)).sum())
    return [f"{share} is no image of {raised} of {present} classes; each of these got one."] if raised else []


def _result(
    task: "LabelledTask", found: "Mapping[str, Mapping[str, Tensor]]", sizes: Mapping[str, int], notes: list[str]
) -> ProtocolResult:
    import torch

    from mae.evaluation.common.metrics import top_k_accuracy
    from mae.evaluation.common.verdict import compare

    labels = task.labels("test")
    everything = torch.ones_like(labels, dtype=torch.bool)
    verdicts: dict[str, dict[str, Verdict]] = {}
    for share, rankings in found.items():
        verdicts[share] = {}
        for name, ranking in rankings.items():
            others = {} if name == _SCRATCH else {_SCRATCH: rankings[_SCRATCH][:, 0]}
            verdict = compare({THIS_MODEL: ranking[:, 0], **others}, labels, counted=everything)
            assert verdict is not None
            verdicts[share][name] = verdict
    numbers = {
        share: {
            "images": sizes[share],
            **{
                name: {
                    **{end: getattr(verdict, end) for end in ("low", "high")},
                    "top1": verdict.accuracy,
                    "top5": top_k_accuracy(found[share][name], labels),
                    **{f"{end}_over_scratch": getattr(of, end) for of in verdict.differences for end in _ENDS},
                }
                for name, verdict in of_share.items()
            },
        }
        for share, of_share in verdicts.items()
    }
    share, method = _headline(found)
    return ProtocolResult(
        numbers=numbers,
        header=("labels, trained", "top-1", "95 % interval", "images"),
        rows=tuple(
            (
                f"{share}, {name}",
                f"{of.accuracy:.1%}",
                f"{100 * of.low:.1f} to {100 * of.high:.1f}",
                f"{sizes[share]:,}",
            )
            for share, of_share in verdicts.items()
            for name, of in of_share.items()
        ),
        note=" ".join([_enough(verdicts), *notes, "Intervals are over test images alone, one draw of each part."]),
        ranking=found[share][method],
        ranked_by=f"{method}, {share} of the labels",
        baselines={f"training {_SCRATCH} on the same {share} of the labels": found[share][_SCRATCH][:, 0]},
        curve=tuple(
            {_AXIS: float(share.removesuffix(" %")), **{name: of.accuracy for name, of in of_share.items()}}
            for share, of_share in verdicts.items()
        ),
        curve_over=_AXIS,
    )


def _headline(found: "Mapping[str, Mapping[str, Tensor]]") -> tuple[str, str]:
    """What the verdict is of: the linear probe at the smallest share that has one, else fine-tuning at the smallest."""
    probed = [share for share, rankings in found.items() if _LINEAR in rankings]
    return (probed[0], _LINEAR) if probed else (next(iter(found)), _FINETUNE)


def _enough(verdicts: "Mapping[str, Mapping[str, Verdict]]") -> str:
    """The smallest share at which the pre-trained model is as good as training from scratch with the most labels."""
    most = list(verdicts)[-1]
    goal = verdicts[most][_SCRATCH].accuracy
    told = f"training from scratch with {most} of the labels ({goal:.1%})"
    for share, of in verdicts.items():
        name, best = max(((name, of[name].accuracy) for name in of if name != _SCRATCH), key=itemgetter(1))
        if best >= goal:
            return f"With {share} of the labels the pre-trained model ({name}, {best:.1%}) is as good as {told}."
    return f"At no share is the pre-trained model as good as {told}."
