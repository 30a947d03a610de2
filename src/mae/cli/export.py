"""`mae export MODEL --to FORMAT --out DIR`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from mae.options import shown


def run(args: list[str]) -> int:
    """Convert a model for another library and compare its outputs with ours."""
    return tyro.cli(export, args=args, prog="mae export")


def export(
    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    to: Literal["timm", "hf-vit", "hf-vitmae", "official", "onnx", "onnx-mae", "torch-export", "safetensors"],
    out: Path,
    licence: Annotated[str | None, shown("as stated in the model's file", "TEXT")] = None,
) -> int:
    """Convert a model for timm, transformers, the official code or ONNX, and check that its outputs are the same.

    A fresh process loads the export with that library and runs it on the same images. If its outputs differ, nothing
    is written.

    Args:
        model: a run folder, a checkpoint, a .safetensors file, or weights of another library.
        to: timm, hf-vit (the encoder), hf-vitmae (with its decoder), official, onnx (the encoder), onnx-mae (with its
            decoder), torch-export (the encoder, for PyTorch's own runtimes) or safetensors (this package's own).
        out: a new folder.
        licence: licence of the weights.
    """
    from rich.console import Console

    from mae.interop.exports.export import export_model
    from mae.text import visible

    done = export_model(model, to=to, out=out, licence=licence)
    console = Console()
    for name, difference in done.differences.items():
        console.print(f"{name:<24}differs by at most {difference:.1e} of the largest value", highlight=False)
    console.print(f"Export in {visible(str(out))}; load it with:", soft_wrap=True, highlight=False, markup=False)
    console.print(visible(done.usage), soft_wrap=True, highlight=False, markup=False)
    return 0
