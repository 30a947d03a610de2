"""What the three additions of the recipe `improved` cost: step times beside the plain model's, in one run.

    python benchmarks/objective.py                    # compact at 224 px, batch 64, float32
    python benchmarks/objective.py --device cuda --batch-size 256 --out objective.json

All variants hold the same weights and see the same images; a step draws the mask, runs forward and backward and takes
one AdamW step. They take turns in one process, and every ratio is taken turn by turn to the plain step of that turn.

The two loss terms are timed at the plain model's mask ratio. The curriculum masks less at first, so its steps encode
more patches: the improved step is timed at each of the schedule's ratios, and `whole run` is their mean over a run of
so many epochs.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from statistics import mean
from typing import Any

import torch

from mae.bench.report import machine, script_parser, write_figures
from mae.bench.timing import quartiles, time_interleaved, timed
from mae.layers.compiled import compile_blocks
from mae.masks.schedule import RatioSchedule
from mae.models.presets import create_model
from mae.recipes.improved import improved
from mae.training.device import autocast, keep_freed_memory

TOLD = improved().flat()
PLAIN = "plain"
RUNS = (10, 100, 800)
STEPS_PER_EPOCH = 100


def parse_args() -> Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="mae_vit_compact_patch16", help="a name of mae.models.presets")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda runs under bfloat16 autocast")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--turns", type=int, default=8, help="how often each variant is timed")
    parser.add_argument("--compile", action="store_true", help="compile the models' blocks")
    return parser.parse_args()


def ratios(epochs: int) -> list[float]:
    """The mask ratio of each step of a run."""
    schedule = RatioSchedule(
        kind=TOLD["mask_schedule"], start=TOLD["mask_start"], end=TOLD["mask_ratio"], warmup=TOLD["mask_warmup"]
    )
    return [schedule.ratio(step, steps_per_epoch=STEPS_PER_EPOCH) for step in range(epochs * STEPS_PER_EPOCH)]


def variants() -> dict[str, tuple[dict[str, Any], float]]:
    """Name, model options and mask ratio of each variant."""
    both, end = {name: TOLD[name] for name in ("laplacian", "uniformity")}, TOLD["mask_ratio"]
    return {
        PLAIN: ({}, end),
        **{name: ({name: value}, end) for name, value in both.items()},
        **{f"both, {ratio:.5g} masked": (both, ratio) for ratio in sorted(set(ratios(RUNS[0])), reverse=True)},
    }


def make_step(name: str, options: Mapping[str, Any], ratio: float, args: Namespace) -> Callable[[], None]:
    torch.manual_seed(0)
    model = create_model(name, **options).to(args.device).train()
    assert model.config is not None
    images = torch.randn(args.batch_size, model.config.layout.channels, *model.config.layout.size, device=args.device)
    keys = torch.arange(args.batch_size, device=args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    if args.compile:
        compile_blocks(model)

    def step() -> None:
        plan = model.plan(images, keys=keys, ratio=ratio)
        with autocast("bf16" if args.device == "cuda" else "fp32", torch.device(args.device)):
            loss = model(images, plan=plan).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    args = parse_args()
    keep_freed_memory()  # as in training
    steps = {name: make_step(args.model, options, ratio, args) for name, (options, ratio) in variants().items()}
    device = torch.device(args.device)
    seconds = time_interleaved({name: partial(timed, step, device) for name, step in steps.items()}, turns=args.turns)
    relative = {name: [a / b for a, b in zip(each, seconds[PLAIN], strict=True)] for name, each in seconds.items()}
    for epochs in RUNS:
        names = [f"both, {ratio:.5g} masked" for ratio in ratios(epochs)]
        turns = zip(*(relative[name] for name in names), strict=True)
        relative[f"whole run of {epochs} epochs"] = [mean(turn) for turn in turns]
    rows = {name: quartiles(values) for name, values in (*relative.items(), ("seconds", seconds[PLAIN]))}
    print(
        f"{args.model}, batch {args.batch_size}, {args.device}, {torch.get_num_threads()} thread(s), {args.turns} turns"
    )
    for name, each in rows.items():
        print(f"{name:<26}{each.text(3)}")
    figures = {name: asdict(each) for name, each in rows.items()}
    about = {"machine": machine(device), "model": args.model, "batch_size": args.batch_size}
    write_figures(args.out, {**about, "rows": figures})


if __name__ == "__main__":
    main()
