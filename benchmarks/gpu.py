"""Everything that is to be measured on a GPU, one command: figures, and which goals they meet.

    python benchmarks/gpu.py photos/ --out gpu            # about fifteen minutes on an H200; photos/ holds JPEGs

Steps of ViT-Base and ViT-Large beside transformers' ViTMAE as its users run it (bf16 autocast, SDPA) and compiled,
their share of the measured matrix product and their memory; decoding; whole runs of `large` from JPEGs and of `base`
from a pack; how time and memory grow; which numbers of tokens suit it; a forward pass of one image. `--only step` and
so on take a part of it, `--seconds` is how long each thing is measured. Each part writes a JSON file into the folder,
which is to be removed before a part is measured again; goals of all files that lie there are told at the end, and do
not change the exit code.
"""

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from mae.bench.data import DataBench, jpegs_in, run_data_bench
from mae.bench.end_to_end import EndToEnd, run_end_to_end_bench
from mae.bench.report import script_parser
from mae.bench.step import StepBench, run_step_bench
from mae.config import RunConfig
from mae.data.packs.writer import pack
from mae.pretraining.estimate.profile import give_back
from mae.training.device import choose_device

BASE, LARGE = "mae_vit_base_patch16", "mae_vit_large_patch16"
BATCH = {BASE: 256, LARGE: 128}
COPIES = 10
"""Of each photograph, so that there are more than a batch holds."""
PARTS = ("step", "data", "end-to-end", "growth", "tokens", "latency")


def step(args: Namespace, console: Console) -> None:
    for name in (BASE, LARGE):
        bench = StepBench(
            models=(name,), decoders=("self", "cross", "cross:0.3333"), device=args.device, batch_size=BATCH[name],
            peer=True, compile=True, seconds=args.seconds, out=args.out / f"step-{name}.json",
        )  # fmt: skip
        run_step_bench(bench, console)


def data(args: Namespace, console: Console) -> None:
    run_data_bench(DataBench(source=str(args.photos), seconds=args.seconds, out=args.out / "data.json"), console)


def end_to_end(args: Namespace, console: Console) -> None:
    files, packed = args.out / "files", args.out / "packed"
    if not files.exists():
        begun = args.out / "files-begun"
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir()
        for number, photo in enumerate(COPIES * jpegs_in(args.photos)):
            shutil.copyfile(photo, begun / f"{number:06d}{photo.suffix}")
        begun.rename(files)
    if not packed.exists():
        pack(files, packed)
    for name, source in ((LARGE, files), (BASE, packed)):
        config = RunConfig.of(
            source=str(source), model=name, batch_size=BATCH[name], lr=1e-4, device=args.device, compile="on"
        )
        bench = EndToEnd(seconds=1.5 * args.seconds, from_files=True, json=args.out / f"end-to-end-{name}.json")
        run_end_to_end_bench(bench, config, console)


def growth(args: Namespace, console: Console) -> None:
    _beside("growth.py", args)


def tokens(args: Namespace, console: Console) -> None:
    _beside("tokens.py", args, "--model", LARGE, "--batch-size", "256", "--seconds", str(args.seconds))


def latency(args: Namespace, console: Console) -> None:
    _beside("latency.py", args, "--model", BASE)


def _beside(script: str, args: Namespace, *more: str) -> None:
    """Another benchmark of this folder."""
    give_back(choose_device(args.device))  # what this process holds would be taken from the other's
    path, out = Path(__file__).with_name(script), args.out / f"{Path(script).stem}.json"
    subprocess.run([sys.executable, str(path), "--device", args.device, *more, "--out", str(out)], check=True)


def goals(folder: Path) -> Iterator[tuple[str, bool]]:
    """Each goal that was measured, in words with its figure, and whether it is met."""
    for name, faster, share in ((BASE, 2.5, 0.4), (LARGE, 2.0, 0.5)):
        if (path := folder / f"step-{name}.json").exists():
            ways = {each["way"]: each for each in json.loads(path.read_text())["results"]}
            best = max((ways["self"], ways["self, compiled"]), key=lambda way: way["rate"]["median"])
            beside = best["beside"]["median"]
            compiled = beside / ways["ViTMAE, compiled"]["beside"]["median"]
            yield (
                f"{name}: {best['way']} {beside:.2f} times ViTMAE (goal {faster}), {compiled:.2f} times it compiled",
                beside >= faster,
            )
            yield (
                f"{name}: {best['of_matmul']:.0%} of the matrix product (goal {share:.0%})",
                best["of_matmul"] >= share,
            )
            less = best["peak_bytes"] / ways["ViTMAE"]["peak_bytes"]
            yield f"{name}: {less:.2f} times ViTMAE's memory (goal below 1)", less < 1
    for name, form in ((LARGE, "JPEGs"), (BASE, "a pack")):
        if (path := folder / f"end-to-end-{name}.json").exists():
            reached = json.loads(path.read_text())["share"]["median"]
            yield f"{name} from {form}: {reached:.0%} of the rate without loading (goal 95 %)", reached >= 0.95
    if (path := folder / "latency.json").exists():
        if graph := json.loads(path.read_text())["seconds"].get("ours, CUDA graph"):  # there is none on a CPU
            milliseconds = 1e3 * median(graph)
            yield f"{BASE}, features of one image: {milliseconds:.2f} ms (goal below 5)", milliseconds < 5
    if (path := folder / "data.json").exists():
        found = json.loads(path.read_text())
        ours = next(way["beside"]["median"] for way in found["ways"] if way["name"] == "ours")
        yield f"decoding: {ours:.2f} times Pillow (goal 1.55)", ours >= 1.55
        yield (
            f"the loader: {found['loader_overhead']:.0%} over decoding (goal below 10 %)",
            found["loader_overhead"] < 0.1,
        )


def main() -> None:
    parser = script_parser(__doc__, figures=False)
    parser.add_argument("photos", type=Path, help="a folder of JPEGs")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the figures")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=60, help="that each thing is measured, about")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu to try the script")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Any] = {
        "step": step,
        "data": data,
        "end-to-end": end_to_end,
        "growth": growth,
        "tokens": tokens,
        "latency": latency,
    }
    for name in args.only:
        parts[name](args, Console(width=140))
    for text, met in goals(args.out):
        print(f"{'met ' if met else 'OPEN'}  {text}")


if __name__ == "__main__":
    main()
