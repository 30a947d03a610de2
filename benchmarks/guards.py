"""The cost of a run's guards: steps of the engine with them against steps without, in one process.

    python benchmarks/guards.py
    python benchmarks/guards.py --model mae_vit_base_patch16_dec512d8b --device cuda --batch-size 256

With: each step is checked to be finite, counted, skipped where it is not, and every row of the log goes to the health
checks. Without: the optimizer steps, and nobody reads the rows. Both train the same weights
on the same images and take turns; the ratio is taken turn by turn. Held-out loss, label-free numbers and checkpoints
are not in it: they are work of their own, done a few times a run.
"""

from argparse import Namespace
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mae.bench.report import machine, script_parser, write_figures
from mae.bench.timing import ratios, time_interleaved, timed
from mae.models.presets import create_model
from mae.training.distributed import World
from mae.training.engine import Trainer
from mae.training.optimizer import make_optimizer
from mae.training.resilience.health import (
    Collapse,
    DataWait,
    GradientGrowth,
    Health,
    LossSpike,
    NoBetterThanMean,
    Overfitting,
)
from mae.training.schedule import WarmupCosine
from mae.training.settings import CheckpointSpec, TrainingSettings


def parse_args() -> Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="mae_vit_lesson_patch4", help="a name of mae.models.presets")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda runs under bfloat16 autocast")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--turns", type=int, default=40, help="how often each is timed")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn, the last of which is logged")
    return parser.parse_args()


def make_turn(args: Namespace, folder: Path, *, guarded: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = create_model(args.model).to(args.device)
    assert model.config is not None
    images = torch.randn(args.batch_size, model.config.layout.channels, *model.config.layout.size, device=args.device)
    plan = model.plan(images, keys=torch.arange(args.batch_size, device=args.device))

    def batches(step: int) -> Generator[Mapping[str, Any], None, None]:
        while True:
            yield {"images": images, "plan": plan}

    device = torch.device(args.device)
    trainer = Trainer(
        module=model,
        optimizer=make_optimizer(model, weight_decay=0.05, betas=(0.9, 0.95)),
        batches=batches,
        settings=TrainingSettings(
            total_steps=10**6, batch_size=args.batch_size, accumulate=1, clip_grad=1.0, log_every=args.steps,
            schedule=WarmupCosine(peak=1e-4, floor=0.0, warmup_samples=0, total_samples=10**9),
            precision="bf16" if args.device == "cuda" else "fp32", checkpoint_every=None,
        ),
        checkpoints=CheckpointSpec(folder=folder, identity={}, metadata=lambda module: {}),
        device=device, world=World(),
    )  # fmt: skip
    mean = NoBetterThanMean(baseline=1e9, after=0, mean="the mean colour", advice="")
    signs = [LossSpike(), GradientGrowth(after=0), DataWait(str), Overfitting(), Collapse(), mean]
    observers = [Health(signs, [])] if guarded else []
    if not guarded:
        whole = torch.tensor(True, device=device)
        trainer._all_finite = lambda loss, norm: whole  # type: ignore[method-assign]
        trainer._update = lambda finite: trainer.optimizer.step()  # type: ignore[method-assign]
    stream = batches(0)

    def turn() -> None:
        for _ in range(args.steps):
            trainer._train_step(stream)
            if guarded and args.device == "cpu":
                trainer._check_nonfinite_steps(observers)
        if guarded and args.device != "cpu":
            trainer._check_nonfinite_steps(observers)
        trainer._log(observers)

    return turn


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    with TemporaryDirectory() as folder:
        turns = {guarded: make_turn(args, Path(folder), guarded=guarded) for guarded in (False, True)}
        ways = {name: partial(timed, turns[guarded], device) for name, guarded in (("without", False), ("with", True))}
        seconds = time_interleaved(ways, turns=args.turns, warm_ups=1)
    ratio, step = ratios(seconds["with"], seconds["without"]), median(seconds["without"]) / args.steps
    print(f"{args.model}, batch {args.batch_size}, {args.device}, {torch.get_num_threads()} thread(s)")
    print(f"a step without {1e3 * step:.1f} ms; with / without {ratio.text(4)}")
    write_figures(args.out, {"machine": machine(device), "model": args.model, "seconds": seconds})


if __name__ == "__main__":
    main()
