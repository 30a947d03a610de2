"""What the three additions of the recipe `improved` cost: step times beside the plain model's, in one run.

    python benchmarks/objective.py                    # compact at 224 px, batch 64, float32
    python benchmarks/objective.py --device cuda --batch-size 256 --out objective.json

All variants hold the same weights and see the same images; a step draws the mask, runs forward and backward and takes
one AdamW step. They take turns in one process, and every ratio is taken turn by turn to the plain step of that turn.

The two loss terms are timed at the plain model's mask ratio. The curriculum hides less at first, so its steps encode
more patches: the improved step is timed at each of the schedule's ratios, and `whole run` is their mean over a run of
so many epochs.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

import torch

from mae.bench.turns import timed
from mae.models.zoo import create_model
from mae.pretraining.settle import ratio_schedule
from mae.recipes.improved import improved
from mae.training.device import autocast, keep_freed_memory

RECIPE = improved()
PLAIN = "plain"
RUNS = (10, 100, 800)
STEPS_PER_EPOCH = 100


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mae_vit_compact_patch16", help="a name of mae.models.zoo")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda runs under bfloat16 autocast")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--turns", type=int, default=8, help="how often each variant is timed")
    parser.add_argument("--compile", action="store_true", help="compile the models")
    parser.add_argument("--out", type=Path, help="write the results as JSON here")
    return parser.parse_args()


def ratios(epochs: int) -> list[float]:
    """The mask ratio of each step of a run."""
    schedule = ratio_schedule(RECIPE)
    return [schedule.ratio(step, steps_per_epoch=STEPS_PER_EPOCH) for step in range(epochs * STEPS_PER_EPOCH)]


def variants() -> dict[str, tuple[dict[str, Any], float]]:
    """Name, model options and mask ratio of each variant."""
    both = {"laplacian": RECIPE.laplacian, "uniformity": RECIPE.uniformity}
    end = RECIPE.mask_ratio
    return {
        PLAIN: ({}, end),
        "laplacian": ({"laplacian": RECIPE.laplacian}, end),
        "uniformity": ({"uniformity": RECIPE.uniformity}, end),
        **{f"both, {ratio:.5g} hidden": (both, ratio) for ratio in sorted(set(ratios(RUNS[0])), reverse=True)},
    }


def make_step(name: str, options: Mapping[str, Any], ratio: float, args: argparse.Namespace) -> Callable[[], None]:
    torch.manual_seed(0)
    model = create_model(name, **options).to(args.device).train()
    assert model.config is not None
    images = torch.randn(args.batch_size, model.config.in_chans, *model.config.img_size, device=args.device)
    keys = torch.arange(args.batch_size, device=args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    grid = model.encoder.grid
    if args.compile:
        model.compile()

    def step() -> None:
        plan = model.masking.plan(grid, keys, ratio)
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
    for step in steps.values():
        step(), step()
    turns = []
    for turn in range(args.turns):
        names = list(steps) if turn % 2 == 0 else list(reversed(steps))  # neither always runs in the other's wake
        seconds = {name: timed(steps[name], torch.device(args.device)) for name in names}
        turns.append({name: seconds[name] / seconds[PLAIN] for name in steps} | {"seconds": seconds[PLAIN]})
    for epochs in RUNS:
        names = [f"both, {ratio:.5g} hidden" for ratio in ratios(epochs)]
        for measured in turns:
            measured[f"whole run of {epochs} epochs"] = mean(measured[name] for name in names)
    rows = {name: quantiles([measured[name] for measured in turns], n=4) for name in turns[0]}
    print(
        f"{args.model}, batch {args.batch_size}, {args.device}, {torch.get_num_threads()} thread(s), {args.turns} turns"
    )
    for name, (low, middle, high) in rows.items():
        print(f"{name:<26}{middle:8.3f} ({low:.3f}-{high:.3f})")
    if args.out:
        args.out.write_text(json.dumps({"model": args.model, "batch_size": args.batch_size, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
