"""A learned query over frozen patch tokens (El-Nouby et al. 2024, AIM): what a mean of them may lose."""

from dataclasses import dataclass
from math import inf

from rich.progress import Progress

from mae.errors import UsageError
from mae.evaluation.attention_pooling import AttentiveResult, train_attentive
from mae.evaluation.bench import THIS_MODEL, Bench, Outcome
from mae.evaluation.scores import top_k_accuracy


@dataclass(frozen=True, kw_only=True)
class AttentiveProbe:
    """BatchNorm, one learned query a head, a linear head, on stored patch tokens; AdamW.

    A probe for each rate is trained side by side on nine tenths of the training part; the tenth chooses among them.

    Raises:
        UsageError: values out of range.
    """

    epochs: int = 30
    """Passes over the training images' tokens."""
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

    def run(self, bench: Bench) -> Outcome:
        """Train and judge; see `EvaluationProtocol`."""
        tokens, test_tokens = bench.patches("train"), bench.patches("test")
        with Progress(console=bench.console, transient=True, disable=not bench.console.is_terminal) as progress:
            task = progress.add_task("attentive probe", total=None)
            found = train_attentive(
                tokens,
                bench.labels("train"),
                test_tokens,
                num_classes=bench.num_classes,
                rates=self.rates,
                epochs=self.epochs,
                batch_size=self.batch_size,
                seed=bench.seed,
                device=bench.device,
                progress=lambda done, steps: progress.update(task, completed=done, total=steps),
            )
        return _outcome(bench, found)


def _outcome(bench: Bench, found: AttentiveResult) -> Outcome:
    labels = bench.labels("test")
    top1, top5 = top_k_accuracy(found.ranking[:, :1], labels), top_k_accuracy(found.ranking, labels)
    held_out = dict(zip(map(str, found.rates), found.accuracies, strict=True))
    note = f"Rate {found.best_rate:g}, chosen on a tenth of the training part."
    if found.at_end and len(found.rates) > 1:
        note += " It is at the end of those tried, so a still better one may lie beyond."
    best = [row for row in found.curve if row["rate"] == found.best_rate]
    return Outcome(
        result={
            THIS_MODEL: {"patches": {"top1": top1, "top5": top5}},
            "rate": found.best_rate,
            "rate_at_end_of_grid": found.at_end,
            "held_out": held_out,
            "curve": found.curve,
        },
        header=("features", "top-1", f"top-{found.ranking.shape[1]}"),
        rows=((f"{THIS_MODEL}, patch tokens", f"{top1:.1%}", f"{top5:.1%}"),),
        note=note,
        ranking=found.ranking,
        curve=tuple({"epoch": row["epoch"], "held_out": row["held_out_accuracy"]} for row in best),
    )
