"""The tables of `peers.py`: scores with intervals over seeds, and paired differences."""

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import t

from mae.bench.report import markdown_row
from mae.evaluation.protocol import THIS_MODEL
from mae.experiments.core.metrics import Metric
from mae.experiments.core.stats import CONFIDENCE, compare, summarise

RAW_PIXELS = "raw pixels"
K = "20"
DENSE_HEADS = {"knn": "dense k-NN", "logistic": "dense logistic"}
BySeed = dict[int, float]
Results = Sequence[Mapping[str, Any]]


def scores_of(result: Mapping[str, Any], who: str = THIS_MODEL) -> dict[str, float]:
    """The scores of a run by metric, on the feature that its method reads; of a baseline where it has one.

    Accuracies, and of frozen patches on images with masks the mean intersection over union.
    """
    feature = result["feature"] if who == THIS_MODEL else "pixels"
    found: dict[str, Any] = {}
    scores = result["scores"]
    if who in (of_knn := scores.get("knn", {})):
        found["k-NN"] = of_knn[who][feature][K]
    if who in (of_probe := scores.get("linear_probe", {})):
        found["linear probe"] = of_probe[who][feature]
    if who in (of_attention := scores.get("attentive_probe", {})):
        found["attentive probe"] = of_attention[who]["patches"]
    if who == THIS_MODEL:
        found |= {f"fine-tuning, {share}": of["fine-tuning"] for share, of in scores.get("finetune", {}).items()}
    dense = scores.get("segmentation_knn", {}).get(who, {})
    found |= {name: dense[head] for head, name in DENSE_HEADS.items() if head in dense}
    return {metric: of["mean_iou" if "mean_iou" in of else "top1"] for metric, of in found.items() if of is not None}


def interval(values: Sequence[float]) -> str:
    """Mean of shares in percent, with half of Student's 95 % interval where there are two or more."""
    summary = summarise(values)
    assert summary.mean is not None
    if summary.std is None:
        return f"{100 * summary.mean:.1f}"
    half = t.ppf(0.5 + CONFIDENCE / 2, summary.count - 1) * summary.std / sqrt(summary.count)
    return f"{100 * summary.mean:.1f} ± {100 * half:.1f}"


def gap_in_points(reference: BySeed, other: BySeed, metric: str) -> tuple[str, str, int]:
    """How far shares lie above others of the same seeds: mean and its interval in points, and how many pairs."""
    gap = compare(reference, other, Metric(name=metric, title=metric, better="higher", kind="share"))
    ends = "" if gap.low is None or gap.high is None else f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}"
    return "" if gap.mean is None else f"{100 * gap.mean:+.1f}", ends, gap.pairs


def write_tables(results: Results, path: Path) -> str:
    """Write both tables as Markdown; their text."""
    text = "\n".join([*score_rows(results), "", *difference_rows(results), ""])
    path.write_text(text)
    return text


def score_rows(results: Results) -> Iterator[str]:
    """A row for each method and time, baselines first, which are the same at any."""
    metrics = list(dict.fromkeys(metric for result in results for metric in scores_of(result)))
    yield markdown_row(
        ["method", "minutes", "took", "steps", "crops/s", "tokens/s", *(f"{name}, %" for name in metrics)]
    )
    yield markdown_row(["---"] * (6 + len(metrics)))
    for method, minutes in dict.fromkeys((result["method"], result["minutes"]) for result in results):
        runs = [run for run in results if (run["method"], run["minutes"]) == (method, minutes)]
        yield markdown_row([method, *_speed(runs), *_cells(runs, metrics, THIS_MODEL)])
        if not minutes:
            yield markdown_row([RAW_PIXELS, *_speed(runs), *_cells(runs, metrics, RAW_PIXELS)])


def _speed(runs: Results) -> list[str]:
    """Minutes asked for and taken, steps, crops and encoder tokens a second; empty for what was not trained."""
    if not runs[0]["minutes"]:
        return [""] * 5
    rates = [fmean(run[what] / run["seconds"] for run in runs) for what in ("crops", "tokens")]
    took = fmean(run["seconds"] for run in runs) / 60
    return [f"{runs[0]['minutes']:g}", f"{took:.2f}", f"{runs[0]['steps']:,}", *(f"{rate:,.0f}" for rate in rates)]


def _cells(runs: Results, metrics: Sequence[str], who: str) -> Iterator[str]:
    for metric in metrics:
        values = [scores[metric] for run in runs if metric in (scores := scores_of(run, who))]
        yield interval(values) if values else ""


def difference_rows(results: Results) -> Iterator[str]:
    """Each of ours against the best: the peer of the highest mean in the same minutes and metric.

    Without peers the others of ours are compared with the first.
    """
    yield markdown_row(["ours", "minutes", "metric", "beside", "difference, points", "95 % interval", "seeds"])
    yield markdown_row(["---"] * 7)
    trained = [result for result in results if result["minutes"]]
    for minutes in dict.fromkeys(result["minutes"] for result in trained):
        runs = [result for result in trained if result["minutes"] == minutes]
        for metric in dict.fromkeys(metric for run in runs for metric in scores_of(run)):
            peers, ours = (_by_method(runs, metric, peer=peer) for peer in (True, False))
            beside = max(peers, key=lambda name: fmean(peers[name].values())) if peers else next(iter(ours))
            reference = (peers or ours)[beside]
            for name, values in ours.items():
                if name != beside:
                    gap = gap_in_points(reference, values, metric)
                    yield markdown_row([name, f"{minutes:g}", metric, beside, *gap])


def _by_method(runs: Results, metric: str, *, peer: bool) -> dict[str, BySeed]:
    found: dict[str, BySeed] = {}
    for run in runs:
        scores = scores_of(run)
        if run["peer"] == peer and metric in scores:
            found.setdefault(run["method"], {})[run["seed"]] = scores[metric]
    return found
