"""The reference curve of a recipe, from finished runs that differ in the seed alone.

    mae pretrain --recipe demo --seed 0 --out runs/demo-0
    mae pretrain --recipe demo --seed 1 --out runs/demo-1
    python benchmarks/reference_curve.py runs/demo-0 runs/demo-1 --hardware "2 cores of an AMD EPYC" \\
        --out src/mae/recipes/curves/demo.json

The reconstruction term over samples seen, mean and std over the seeds, at 60 places or fewer. Each place holds
the mean over the samples since the place before, so runs whose rows stand at other steps, such as one that was stopped
and went on, are averaged all the same.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mae import records
from mae.config import RunConfig
from mae.errors import UsageError
from mae.recipes.reference import MOST_POINTS, ReferenceCurve, kept_config
from mae.training.log import loss_rows, read_rows
from mae.training.run_folder import RunFolder
from mae.version import __version__

_OF_EACH_RUN = ("seed", "out")


def reference_curve(folders: Sequence[Path], *, hardware: str) -> ReferenceCurve:
    """The curve of some runs; they agree in everything but the seed.

    Raises:
        UsageError: fewer than two runs, one that is not finished, or runs that differ in more than the seed.
    """
    if len(folders) < 2:
        raise UsageError(f"{len(folders)} run(s) given; expected two or more, of different seeds")
    runs = [RunFolder(folder) for folder in folders]
    for run in runs:
        if not (run.holds_run and run.summary.is_file()):
            raise UsageError(f"{run.root} holds no finished run; give run folders that hold a {run.summary.name}")
    configs = [RunConfig.read(run.config) for run in runs]
    found, ends = ([records.read_json(getattr(run, kind)) for run in runs] for kind in ("data", "summary"))
    first = configs[0].flat()
    for folder, config, data in zip(folders, map(RunConfig.flat, configs), found, strict=True):
        other = [name for name in {**first, **config} if first.get(name) != config.get(name)]
        other = [name for name in other if name not in _OF_EACH_RUN]
        other += ["images"] if data["fingerprint"] != found[0]["fingerprint"] else []
        if other:
            raise UsageError(f"{folder} differs from {folders[0]} in {', '.join(other)}; expected the seed alone")
    rows = [loss_rows(read_rows(run.metrics)) for run in runs]
    for folder, own in zip(folders, rows, strict=True):
        last, expected = (of[-1]["samples"] if of else 0 for of in (own, rows[0]))
        if last != expected or not own:
            raise UsageError(f"{folder}: rows end after {last} samples, those of {folders[0]} after {expected}")
    samples, losses = _losses(rows)
    return ReferenceCurve(
        config=kept_config(configs[0]),
        images=found[0]["images"],
        fingerprint=found[0]["fingerprint"],
        seeds=tuple(config.optim.seed for config in configs),
        samples=tuple(samples.tolist()),
        loss=_rounded(losses.mean(axis=0)),
        std=_rounded(losses.std(axis=0, ddof=1)),
        mae_version=__version__,
        hardware=hardware,
        date=max(end["finished_at"] for end in ends)[:10],
    )


def _losses(runs: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Samples at the end of each stretch `[points]`, and the mean loss within it of each run `[runs, points]`."""
    points = min(MOST_POINTS, *(len(rows) for rows in runs))
    edges = np.linspace(0, runs[0][-1]["samples"], points + 1).round()
    means = []
    for rows in runs:
        ends = np.array([0, *(row["samples"] for row in rows)])
        losses = np.array([row["terms"]["reconstruction"] for row in rows])
        # A row is a mean over the samples since the row before: their sum is a straight line between two rows.
        sums = np.concatenate([[0.0], np.cumsum(losses * np.diff(ends))])
        means.append(np.diff(np.interp(edges, ends, sums)) / np.diff(edges))
    return edges[1:].astype(int), np.array(means)


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(f"{value:.5g}") for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of finished runs")
    parser.add_argument("--hardware", required=True, help="what the runs were made on, in words")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    args = parser.parse_args()
    try:
        curve = reference_curve(args.runs, hardware=args.hardware)
    except UsageError as error:
        parser.error(str(error))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    records.write_json(args.out, records.to_json(curve))
    print(f"{curve.label}: {len(curve.samples)} points, loss {curve.loss[-1]:.4g} ± {curve.std[-1]:.2g} at the end")


if __name__ == "__main__":
    main()
