"""Whether five minutes of `mae pretrain` on a few hundred images beat random weights and raw pixels.

    python benchmarks/small_sets.py --bccd bccd/ --ours fast "fast --uniformity 0" --out small-sets

What is given to `--ours` are words of `mae pretrain`, a recipe first; what they leave open is what `mae pretrain`
chooses for the images. Three sets (small_images.py): blood cells cut out of photographs, drawn textures, and drawn
solids under changing light. The rate of each run on each set is measured first, so leave the machine alone for the
first minutes; the steps of a run fill the minutes at that rate. Then k-NN and logistic regression with 1, 5 and all
labels of each class, on the mean of the patch tokens: of few labels the mean over 20 draws, which are the same for all.
Beside them random weights of the same seeds, and raw pixels, which are the same for all seeds, with the same protocols.
Intervals are Student's over seeds, differences are paired by seed. The same command resumes.
"""

import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import small_images
import torch
from peers_table import BySeed, gap_in_points, interval
from rich.console import Console
from torch import Tensor

from mae.bench.end_to_end import EndToEnd, run_end_to_end_bench
from mae.bench.report import machine, markdown_row, script_parser
from mae.cli.pretrain import parse
from mae.config import RunConfig
from mae.data.sources.open import open_labelled
from mae.evaluation.common.logistic import choose_penalty, fit_logistic
from mae.evaluation.common.metrics import top_k_accuracy
from mae.evaluation.common.neighbours import few_shot_draws, knn_rank
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.extractors.extractor import baseline_extractors, model_extractor, random_weights
from mae.evaluation.protocol import THIS_MODEL
from mae.pretraining.run import run_pretraining
from mae.records import read_json, write_json

SETS = ("textures", "solids", "cells")
SHOTS = (1, 5)
DRAWS = 20
K = 20
FEW_PENALTY = 0.1
"""Of the regression on few labels, of which none can be spared to choose it."""
RANDOM, PIXELS = "random weights", "raw pixels"
CPU = torch.device("cpu")
Scores = dict[str, float]


def told(words: str, source: Path, changes: dict[str, Any]) -> tuple[RunConfig, set[str]]:
    """The run that the words stand for, and the names of what they and the changes say."""
    config, given, _, _ = parse([str(source), "--recipe", *shlex.split(words)])
    return config.override(changes), given | changes.keys()


def measured_steps(words: str, source: Path, args: Namespace) -> int:
    """Steps that fill the minutes; measured once and kept."""
    path = args.out / "measured.json"
    known: dict[str, Any] = read_json(path) if path.exists() else {}
    key = f"{words}, {source.parent.name}"
    if key not in known:
        config, _ = told(words, source, {"steps": 10_000})
        record = run_end_to_end_bench(EndToEnd(seconds=args.measuring), config, Console(quiet=True))
        images = record["batch_size"]
        known[key] = {"images_per_second": record["images_per_second"]["real"]["median"], "batch_size": images}
        write_json(path, known)
        print(f"{key}: {known[key]}", flush=True)
    return max(1, round(60 * args.minutes * known[key]["images_per_second"] / known[key]["batch_size"]))


def scores_of(model: Any, data: Path, seed: int, folder: Path) -> dict[str, Scores]:
    """Accuracies of the model and of its baselines, by what they were measured with."""
    task = LabelledTask(
        extractor=model_extractor(model, name="model"),
        folder=folder,
        device=CPU,
        seed=seed,
        console=Console(quiet=True),
        data=open_labelled(str(data), data_root=data),
    )
    contenders = {
        THIS_MODEL: (task.extractor, "mean"),
        RANDOM: (model_extractor(random_weights(model, seed), name=RANDOM), "mean"),
        PIXELS: (baseline_extractors(task.extractor)[-1], "pixels"),
    }
    return {
        who: accuracies(task, *(task.features(part, extractor)[name] for part in ("train", "test")))
        for who, (extractor, name) in contenders.items()
    }


def accuracies(task: LabelledTask, train: Tensor, test: Tensor) -> Scores:
    """By k-NN and by logistic regression, with few and with all labels."""
    labels, classes = task.labels("train"), task.num_classes
    found: Scores = {}
    for shots in SHOTS:
        # The same draws for every model and every seed: seeds then differ by their training alone.
        draws = few_shot_draws(labels, shots=shots, draws=DRAWS, seed=0, num_classes=classes)
        parts = [(train[rows], labels[rows]) for rows in draws]
        found[f"k-NN, {shots}"] = fmean(_knn(task, *part, test, k=shots) for part in parts)
        fits = [fit_logistic(*part, num_classes=classes, penalty=FEW_PENALTY, device=CPU) for part in parts]
        found[f"probe, {shots}"] = fmean(_top1(task, fit.logits(test).argmax(dim=1, keepdim=True)) for fit in fits)
    found["k-NN, all"] = _knn(task, train, labels, test, k=K)
    best = choose_penalty(train, labels, num_classes=classes, seed=0, device=CPU).best
    found["probe, all"] = _top1(task, best.logits(test).argmax(dim=1, keepdim=True))
    return found


def _knn(task: LabelledTask, train: Tensor, labels: Tensor, test: Tensor, *, k: int) -> float:
    ranked = knn_rank(train, labels, test, ks=(k,), num_classes=task.num_classes, temperature=0.07, device=CPU)
    return _top1(task, ranked[k][:, :1])


def _top1(task: LabelledTask, ranking: Tensor) -> float:
    return top_k_accuracy(ranking, task.labels("test"))


def trained(words: str, data: Path, seed: int, args: Namespace) -> dict[str, Any]:
    """A run and its scores; what is there already is read."""
    steps = measured_steps(words, data / "train", args)
    folder = args.out / "runs" / data.name / f"{words}-{args.minutes:g}min-seed{seed}"
    path = folder / "scores.json"
    if not path.exists():
        config, given = told(words, data / "train", {"steps": steps, "seed": seed, "out": folder / "run"})
        begun = (folder / "run" / "config.json").exists()
        result = run_pretraining(config, given=given, resume=begun, console=Console(quiet=True))
        if not result.finished:  # a signal: what is there is no run of so many minutes
            raise SystemExit(128 + result.stopped_by)
        scores = scores_of(result.load_model(), data, seed, folder)
        write_json(path, {"steps": steps, "seconds": result.summary["seconds"], "scores": scores})
        print(f"{data.name}, {words}, seed {seed}: {scores}", flush=True)
    return {"set": data.name, "words": words, "seed": seed, **read_json(path)}


def rows(results: list[dict[str, Any]]) -> Iterator[str]:
    """The table: accuracies of each run and of the baselines, then differences to the better baseline."""
    metrics = list(results[0]["scores"][THIS_MODEL])
    yield markdown_row(["set", "features", *(f"{name}, %" for name in metrics)])
    yield markdown_row(["---"] * (2 + len(metrics)))
    for name in dict.fromkeys(result["set"] for result in results):
        of_set = [result for result in results if result["set"] == name]
        for words in dict.fromkeys(result["words"] for result in of_set):
            runs = [result for result in of_set if result["words"] == words]
            cells = (interval([run["scores"][THIS_MODEL][metric] for run in runs]) for metric in metrics)
            yield markdown_row([name, words, *cells])
            yield markdown_row([name, "above the better baseline", *(_gain(runs, metric) for metric in metrics)])
        random = {run["seed"]: run["scores"][RANDOM] for run in of_set}.values()
        yield markdown_row([name, RANDOM, *(interval([scores[metric] for scores in random]) for metric in metrics)])
        pixels = of_set[0]["scores"][PIXELS]
        yield markdown_row([name, PIXELS, *(interval([pixels[metric]]) for metric in metrics)])


def _gain(runs: list[dict[str, Any]], metric: str) -> str:
    """Points above the baseline with the better mean, and the ends of the interval."""

    def of(who: str) -> BySeed:
        return {run["seed"]: run["scores"][who][metric] for run in runs}

    better = max((RANDOM, PIXELS), key=lambda who: fmean(of(who).values()))
    mean, ends, _ = gap_in_points(of(better), of(THIS_MODEL), metric)
    return f"{mean} ({ends})" if ends else mean


def main(words: list[str] | None = None) -> None:
    parser = script_parser(__doc__, figures=False)
    parser.add_argument("--bccd", type=Path, help="photographs of blood cells with boxes; without it two sets")
    parser.add_argument("--ours", nargs="+", default=["fast", "default"], metavar="WORDS", help="of mae pretrain")
    parser.add_argument("--sets", nargs="+", choices=SETS, help="default: all that there are")
    parser.add_argument("--minutes", type=float, default=5.0, help="that each may train")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--measuring", type=float, default=20.0, help="seconds for each rate")
    parser.add_argument("--out", type=Path, default=Path("small-sets"))
    args = parser.parse_args(words)
    if args.bccd is None and "cells" in (args.sets or []):
        parser.error("--sets cells is cut out of photographs; give them with --bccd")
    makers = {
        "textures": small_images.textures,
        "solids": small_images.solids,
        "cells": lambda out: small_images.blood_cells(args.bccd, out),
    }
    sets = {name: makers[name] for name in args.sets or (SETS if args.bccd else SETS[:2])}
    for name, make in sets.items():
        if not (args.out / name).exists():  # a set that is there is whole
            make(args.out / f"{name}.part")
            (args.out / f"{name}.part").rename(args.out / name)
    for words in args.ours:  # all rates before the machine is busy with runs
        for name in sets:
            measured_steps(words, args.out / name / "train", args)
    results = [
        trained(words, args.out / name, seed, args) for name in sets for seed in args.seeds for words in args.ours
    ]
    table = "\n".join([*rows(results), ""])
    write_json(args.out / "results.json", {"machine": machine(CPU), "minutes": args.minutes, "results": results})
    (args.out / "table.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
