"""The page as a folder of static files: ours, onnxruntime-web's, and a model's graphs."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import nn

from mae.errors import MAEError, UsageError
from mae.models.file import load_model
from mae.models.preprocess import official_crop_share
from mae.records import write_json
from mae.training.checkpoint import MODEL, good_checkpoints
from mae.training.run_folder import RunFolder, find_weights
from mae.web.graph import check_drawable, write_graph

STATIC, VENDOR = "static", "vendor"
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
"""Of onnxruntime-web; `make web` puts them into `VENDOR`, and a wheel carries them."""

_EXAMPLES = ("chelsea", "coffee", "astronaut", "rocket")
"""Photographs of scikit-image that are free of rights."""

_EXAMPLE_SIDE = 256

_MOST_BYTES = 1 << 30
"""Of all graphs together: a browser must fetch and hold them."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """What was written.

    Attributes:
        folder: any server of static files can show it.
        checkpoints: how many the page steps through.
    """

    folder: Path
    checkpoints: int


def write_site(model: Path, out: Path) -> Site:
    """Write the page of a model, or of a run with its checkpoints, into an empty or new folder.

    Of more checkpoints than fit into 1 GB some are taken, spread over the run, the newest among them.

    Args:
        model: a run folder, a checkpoint or a .safetensors file with a decoder.
        out: the folder.

    Raises:
        UsageError: no such model; one that cannot be drawn on, see `check_drawable`, or is larger than 1 GB; or no ONNX
            exporter.
        MAEError: onnxruntime-web is not there, a damaged file, or the disk is full.
    """
    runtime = vendored()
    weights = _weights(model)
    last = max(weights)
    newest = load_model(weights[last])
    check_drawable(newest)
    _check_exporter()
    (out / "models").mkdir(parents=True, exist_ok=True)
    for name in (entry.name for entry in (files("mae.web") / STATIC).iterdir()):
        shutil.copyfile(str(files("mae.web") / STATIC / name), out / name)
    (out / VENDOR).mkdir(exist_ok=True)
    for path in runtime:
        shutil.copyfile(path, out / VENDOR / path.name)
    _write_examples(out / "examples")
    graphs = []
    for step, path in _fitting(weights, newest):
        name = f"models/step-{step:08d}.onnx" if step >= 0 else "models/model.onnx"
        write_graph(newest if step == last else load_model(path), out / name)
        graphs.append({"file": name, "step": max(step, 0)})
    write_json(out / "model.json", _facts(newest, graphs))
    return Site(folder=out, checkpoints=len(graphs))


def check_ready() -> None:
    """Make sure that a page can be made, before something long is done for it.

    Raises:
        UsageError: no ONNX exporter.
        MAEError: onnxruntime-web is not there.
    """
    vendored()
    _check_exporter()


def vendored() -> list[Path]:
    """The files of onnxruntime-web.

    Raises:
        MAEError: they are not there, as in a source checkout in which `make web` was not called.
    """
    found = [Path(str(files("mae.web") / VENDOR / name)) for name in RUNTIME]
    if missing := [path.name for path in found if not path.is_file()]:
        raise MAEError(
            f"{', '.join(missing)} of onnxruntime-web are not in {found[0].parent}: wheels carry them, and a source "
            "checkout gets them by 'make web', which needs npm"
        )
    return found


def _weights(model: Path) -> dict[int, Path]:
    """The weights' files by step; a file that is no run's has step -1."""
    run = RunFolder(model)
    if model.is_dir() and run.holds_run and (kept := good_checkpoints(run.checkpoints)):
        return {step: path / MODEL for step, path in kept.items()}
    return {-1: find_weights(model)}


def _fitting(weights: Mapping[int, Path], model: nn.Module) -> list[tuple[int, Path]]:
    """As many as fit, in the order of their steps."""
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    count = min(len(weights), _MOST_BYTES // size)
    if not count:
        raise UsageError(
            f"the model takes {size / 1e9:.1f} GB, more than a browser holds; use 'mae reconstruct --mask'"
        )
    steps = sorted(weights, reverse=True)  # the newest first, so that it is always among them
    chosen = sorted(steps[round(at * (len(steps) - 1) / max(1, count - 1))] for at in range(count))
    return [(step, weights[step]) for step in chosen]


def _facts(model: Any, graphs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the page must know of the model."""
    layout = model.tokenizer.layout
    return {
        "size": list(layout.size),
        "patch": list(layout.patch),
        "channels": layout.channels,
        "grid": list(layout.grid),
        "crop_share": official_crop_share(layout.size),
        "ratio": model.masking.ratio,
        "normalised": bool(getattr(model.target, "norm", False)),
        "parameters": model.num_parameters(),
        "graphs": graphs,
        "examples": [f"examples/{name}.png" for name in _EXAMPLES],
    }


def _write_examples(folder: Path) -> None:
    from PIL import Image
    from skimage import data

    folder.mkdir(exist_ok=True)
    for name in _EXAMPLES:
        photo = Image.fromarray(getattr(data, name)())
        side = min(photo.size)
        left, top = (photo.width - side) // 2, (photo.height - side) // 2
        square = photo.crop((left, top, left + side, top + side))
        square.resize((_EXAMPLE_SIDE, _EXAMPLE_SIDE), Image.Resampling.LANCZOS).save(folder / f"{name}.png")


def _check_exporter() -> None:
    from importlib.util import find_spec

    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise UsageError(
            f"the page's graphs are ONNX files, which need {' and '.join(missing)}: pip install openmae[onnx]"
        )
