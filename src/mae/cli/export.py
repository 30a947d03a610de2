"""`mae export MODEL --to FORM --out DIR`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from mae.options import shown


def run(args: list[str]) -> int:
    """Write a model for another library and say how far its answers are from ours."""
    return tyro.cli(export, args=args, prog="mae export")


def export(
    model: Annotated[Path, tyro.conf.Positional],
    to: Literal["timm", "hf-vit", "hf-vitmae", "official", "onnx", "onnx-mae", "torch-export", "safetensors"],
    out: Path,
    licence: Annotated[str | None, shown("what the model's file says", "TEXT")] = None,
) -> int:
    """Write a model as timm, transformers, the official code or ONNX read it, and prove that they read the same.

    A fresh process reads the export by that library and answers the same images. Where it answers otherwise nothing is
    written.

    Args:
        model: a run folder, a checkpoint, a .safetensors file, or weights that others wrote.
        to: timm, hf-vit (the encoder), hf-vitmae (with its decoder), official, onnx (the encoder), onnx-mae (with its
            decoder), torch-export (the encoder, for PyTorch's own runtimes) or safetensors (this package's own).
        out: a new folder.
        licence: terms the weights come under.
    """
    from rich.console import Console

    from mae.interop.export import export_model
    from mae.report.canvas import visible

    done = export_model(model, to=to, out=out, licence=licence)
    console = Console()
    for name, difference in done.differences.items():
        console.print(f"{name:<24}largest difference {difference:.1e} of the largest value", highlight=False)
    console.print(f"Export in {visible(str(out))}, read it by:", soft_wrap=True, highlight=False, markup=False)
    console.print(visible(done.usage), soft_wrap=True, highlight=False, markup=False)
    return 0
