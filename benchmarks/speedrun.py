"""A speed-run: how good the features are that two recipes learn in given minutes on this machine.

    python benchmarks/subset.py cifar10.zip cifar10-part.zip
    python benchmarks/speedrun.py cifar10.zip --data cifar10-part.zip --out speedrun
    python benchmarks/speedrun.py cifar10.zip --data cifar10-part.zip --minutes 30 10 --device cuda --out speedrun-gpu

Both train the same encoder. The rate of each is measured first, so leave the machine alone for two minutes; the number
of steps fills its minutes at that rate. Then `mae study quality` trains, evaluates and draws. The same command resumes,
at the rates that were measured first. One official run and one other train for 80 minutes by default, and each
evaluated checkpoint takes about three more.
"""

from argparse import Namespace
from pathlib import Path

from rich.console import Console

import mae
from mae.bench.end_to_end import EndToEnd, run_end_to_end_bench
from mae.bench.report import script_parser
from mae.config import RunConfig
from mae.recipes import recipe_config
from mae.records import read_json, write_json

MEASURING = 60.0
"""Seconds for each rate."""


def prepared(recipe: str, minutes: float, lr: float, rate: float | None, args: Namespace) -> Path:
    """The recipe with as many steps as fill its minutes, in a file that holds its whole configuration."""
    path: Path = args.out / f"{Path(recipe).stem}.json"
    if path.exists():
        return path
    sizes = {"model": args.model, "img_size": args.img_size, "batch_size": args.batch_size, "lr": lr}
    # Warm-up is not named: a tenth of the run.
    config = recipe_config(recipe).override(
        {**sizes, "epochs": 100, "warmup_epochs": None, "source": args.source, "device": args.device}
    )
    rate = rate or measured(config)
    steps = max(1, round(60 * minutes * rate / args.batch_size))
    print(f"{recipe}: {rate:.0f} images/s, {steps:,} steps fill {minutes:g} minutes", flush=True)
    write_json(path, config.override({"steps": steps}).to_json())
    return path


def measured(config: RunConfig) -> float:
    """Images a second of the run's own loop on its images."""
    record = run_end_to_end_bench(EndToEnd(seconds=MEASURING), config, Console(quiet=True))
    return record["images_per_second"]["real"]["median"]


def main() -> None:
    parser = script_parser(__doc__, figures=False)
    parser.add_argument("source", help="images to train on")
    parser.add_argument("--data", required=True, help="labelled images for the evaluations")
    parser.add_argument("--recipes", nargs=2, default=["cifar10", "fast"], help="the official one, and the other")
    parser.add_argument("--minutes", nargs=2, type=float, default=[60, 20], help="that each may train")
    parser.add_argument("--rates", nargs=2, type=float, help="images a second of each, instead of measuring them")
    parser.add_argument("--model", default="mae_vit_lesson_patch4")
    parser.add_argument("--img-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", nargs=2, type=float, default=[1e-3, 2e-3], help="peak learning rate of each")
    parser.add_argument("--checkpoints", type=int, default=6, help="of each run, that are evaluated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("speedrun"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    asked, mark = {name: str(value) for name, value in vars(args).items()}, args.out / "speedrun.json"
    if mark.exists() and read_json(mark) != asked:
        parser.error(f"{args.out} holds a speed-run of other options; give the same ones, or another --out")
    write_json(mark, asked)
    rates = args.rates or [None, None]
    recipes = [prepared(*each, args) for each in zip(args.recipes, args.minutes, args.lr, rates, strict=True)]
    done = mae.study(
        "quality", args.source, data=args.data, recipes=tuple(map(str, recipes)), checkpoints=args.checkpoints,
        seeds=args.seeds, finetune_epochs=0.0, device=args.device, out=args.out / "study",
    )  # fmt: skip
    print(done.report)


if __name__ == "__main__":
    main()
