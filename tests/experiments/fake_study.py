"""Synthetic studies: numbers with a known effect, losses in real files."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from mae.experiments.core.metrics import Metric
from mae.experiments.core.results import RunResult, StudyResult, Variant

PROBE = Metric(name="probe", title="linear probe, top-1", better="higher", kind="share")
LOSS = Metric(name="loss_50", title="loss at 50 %", better=None, kind="number")
PSNR = Metric(name="psnr", title="PSNR", better="higher", kind="decibel")
EPOCH = Metric(name="epoch", title="time per epoch", better="lower", kind="seconds")
METRICS = (PROBE, LOSS, PSNR, EPOCH)


def write_losses(folder: Path, *, level: float, samples: Sequence[int] = (100, 200, 300, 400)) -> None:
    """A run's metrics file; its total loss differs from the reconstruction term."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict] = [{"step": 0, "samples": 0, "evaluation": {"effective_rank": 3.0}}]
    rows += [
        {"step": at, "samples": at, "loss": 9.0 + level, "terms": {"reconstruction": level + 100 / at, "focal": 9.0}}
        for at in samples
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def fake_study(
    folder: Path,
    *,
    effects: Mapping[str, float],
    seeds: Sequence[int] = (0, 1, 2),
    left_out: Collection[tuple[str, int]] = (),
    xs: Mapping[str, float] | None = None,
    change: Callable[[str, int, dict[str, float]], None] = lambda variant, seed, numbers: None,
) -> StudyResult:
    """A study in which each variant's probe exceeds the first variant's by its effect (a share), with little noise.

    Args:
        folder: where the runs' losses go.
        effects: by variant; the first is the reference.
        seeds: of each variant.
        left_out: runs that are not done.
        xs: each variant's `x`.
        change: of a run's numbers, in place.
    """
    draw = np.random.default_rng(0)
    runs = []
    for variant, effect in effects.items():
        for seed in seeds:
            noise = float(draw.normal(0, 0.0005))
            numbers = {
                "probe": 0.44 + 0.01 * seed + effect + noise,
                "loss_50": 0.5,
                "psnr": 18.0 + noise,
                "epoch": 70.0,
            }
            change(variant, seed, numbers)
            run = folder / "runs" / f"{variant}-{seed}"
            if (variant, seed) not in left_out:
                write_losses(run, level=0.5 + 0.1 * seed)
                commands = (f"mae pretrain --out {variant}-{seed} --seed {seed}", f"mae evaluate {variant}-{seed}")
                runs.append(RunResult(variant=variant, seed=seed, folder=run, numbers=numbers, commands=commands))
    return StudyResult(
        name="compare",
        question="Does it help?",
        reference=next(iter(effects)),
        variants=tuple(
            Variant(
                name=variant,
                what=f"{variant} in words",
                options={"depth": 4, "width": 8 if effect else 6},
                x=xs[variant] if xs else None,
            )
            for variant, effect in effects.items()
        ),
        seeds=tuple(seeds),
        metrics=METRICS,
        runs=tuple(runs),
        facts=(("data", "12 images"), ("versions", "torch 2")),
        notes=("A note for readers.",),
        axis="mask ratio",
    )
