"""Every named size out to every form and in again: time, peak memory, how far the answers are apart, and the bits.

    python benchmarks/exports.py                             # all sizes, about half an hour; 20 GB of disk
    python benchmarks/exports.py --models mae_vit_huge_patch14_dec512d8b

Each size gets random weights, norms and biases too: nothing can hide behind a zero or a one. `mae export` writes
it and asks the library in a fresh process, `mae import` takes that folder in again; both are timed as a user runs them,
from a shell. Memory is the largest that one of their processes held, by the kernel's count.
"""

import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from mae.bench.report import markdown_row, script_parser
from mae.errors import UsageError
from mae.interop.exports.formats import FORMATS, OFFICIAL_FILE
from mae.models.file import load_model, model_metadata, save_model
from mae.models.presets import create_model, list_models
from mae.records import read_json

COMES_BACK = ("timm", "hf-vit", "hf-vitmae", "official", "safetensors")


def parse_args() -> Namespace:
    parser = script_parser(__doc__, figures=False)
    parser.add_argument("--models", nargs="+", default=list_models(), choices=list_models())
    parser.add_argument("--forms", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    return parser.parse_args()


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a command took."""

    seconds: float
    gigabytes: float


def run(*args: str) -> Taken:
    """`mae` with these arguments.

    Raises:
        SystemExit: it failed.
    """
    began = time.perf_counter()
    started = subprocess.Popen([sys.executable, "-m", "mae", *args], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(started.pid, 0)  # of the process and of those it waited for
    if status:
        raise SystemExit(f"mae {' '.join(args)} failed")
    return Taken(seconds=time.perf_counter() - began, gigabytes=usage.ru_maxrss * 1024 / 1e9)


def write_random(name: str, path: Path) -> None:
    """A model of a named size with random weights, as a file."""
    torch.manual_seed(0)
    model = create_model(name, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim < 2:
                weight.add_(torch.randn_like(weight), alpha=0.1)
            elif "mask_token" in key:
                weight.normal_(std=0.02)
    save_model(model, path, model_metadata(model))


def same_bits(one: Path, other: Path) -> bool:
    """Whether the second file's tensors are those of the first, of which it may lack the decoder's."""
    with safe_open(one, framework="pt") as a, safe_open(other, framework="pt") as b:
        names = set(b.keys())
        encoder = {name for name in a.keys() if name.startswith("encoder.")}
        known = names <= set(a.keys()) and names >= encoder
        return known and all(torch.equal(a.get_tensor(name), b.get_tensor(name)) for name in names)


def row(name: str, form: str, source: Path, folder: Path) -> list[str]:
    """A line of the table."""
    out, back = folder / "out", folder / "back"
    exported = run("export", str(source), "--to", form, "--out", str(out))
    worst = max(read_json(out / "proof.json")["differences"].values())
    cells = [name, form, f"{exported.seconds:.0f}", f"{exported.gigabytes:.1f}", f"{worst:.0e}"]
    if form not in COMES_BACK:
        return [*cells, "-", "-", "-"]
    # Random weights predict no photographs.
    told = ["--no-photographs"] if form != "safetensors" else []
    imported = run("import", str(out / OFFICIAL_FILE if form == "official" else out), "--out", str(back), *told)
    bits = "the same" if same_bits(source, back / "model.safetensors") else "DIFFER"
    return [*cells, f"{imported.seconds:.0f}", f"{imported.gigabytes:.1f}", bits]


def show(cells: Sequence[str]) -> None:
    print(markdown_row(cells), flush=True)


def main() -> None:
    args = parse_args()
    show(["model", "form", "export, s", "GB", "difference", "import, s", "GB", "bits"])
    show(["---"] * 8)
    for name in args.models:
        with tempfile.TemporaryDirectory(prefix="mae-exports-") as aside:
            source = Path(aside) / "model.safetensors"
            write_random(name, source)
            for form in args.forms:
                try:
                    FORMATS[form].check(load_model(source))
                except UsageError as error:
                    show([name, form, str(error), "", "", "", "", ""])
                    continue
                with tempfile.TemporaryDirectory(dir=aside) as folder:
                    show(row(name, form, source, Path(folder)))


if __name__ == "__main__":
    main()
