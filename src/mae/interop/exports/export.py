"""A model as others read it, and the proof that they read the same: every export is asked in a process of its own."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mae import records
from mae.errors import MAEError, UsageError
from mae.evaluation.common.record import versions
from mae.interop.exports.card import model_card
from mae.interop.exports.formats import FORMATS, ExportFormat
from mae.interop.exports.graphs import num_visible
from mae.interop.exports.roundtrip import Inputs, model_outputs
from mae.interop.imports.open import open_model
from mae.models.classifier import Classifier, ImageClassifier
from mae.models.detector import Detector
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.preprocess import preprocessing_of
from mae.models.pretrained import PretrainedEncoder
from mae.models.segmenter import Segmenter

TOLERANCE = 1e-5
"""Largest difference from the library's outputs, relative to the largest value, in float32."""

DETECTOR_TOLERANCE = 1e-4
"""That of a detector, whose boxes magnify rounding: the last layers look at where the first ones found something."""

PROOF, CARD = "proof.json", "README.md"
"""The comparison and the model card, in the export's folder."""

_IMAGES, _SEED = 2, 0


@dataclass(frozen=True, kw_only=True)
class Export:
    """A model written for another library.

    Attributes:
        folder: what the library loads.
        differences: the largest difference of each output, relative to its largest value.
        usage: Python that loads it.
    """

    folder: Path
    differences: Mapping[str, float]
    usage: str


def export_model(path: Path, *, to: str, out: Path, licence: str | None = None) -> Export:
    """Write a model for another library, load it there in a fresh process, and compare its outputs with ours.

    Args:
        path: see `open_model`.
        to: a name in `FORMATS`.
        out: a new folder.
        licence: of the weights; None: as stated in the model's file.

    Raises:
        UsageError: an unknown format, a model it cannot hold, a library that is not installed, or `out` exists.
        MAEError: the library cannot load it or gives other outputs; nothing is left then.
    """
    records.check_known([to], list(FORMATS), what="export format")
    export_format = FORMATS[to]
    records.check_new(out)
    if missing := [name for name in export_format.needs if find_spec(name) is None]:
        raise UsageError(f"--to {to} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    model, report = open_model(path)
    has_head = isinstance(model, Classifier | Segmenter | Detector) and not isinstance(model, ImageClassifier)
    if has_head and not export_format.any_head:
        able = ", ".join(name for name, each in FORMATS.items() if each.any_head)
        raise UsageError(f"--to {to} has no place for the head of {path}; use {able}, or export its run")
    export_format.check(model)
    licence = licence or report.origin.get("licence")
    try:
        with records.whole_folder(out) as staging:
            export_format.write(model, staging, licence)
            differences = _differences(model, export_format, staging)
            whole = "prediction" in differences
            card = model_card(
                model,
                report,
                path=path,
                licence=licence,
                library=export_format.needs[0] if export_format.needs else None,
                usage=export_format.usage(Path(out.name)),
                whole=whole,
            )
            (staging / CARD).write_text(card, encoding="utf-8", errors="backslashreplace")
            proof = {"format": to, "differences": differences, "tolerance": _tolerance(model), "versions": versions()}
            records.write_json(staging / PROOF, proof)
    except SafetensorError as error:  # which stands for the system's own where weights are written
        raise MAEError(f"{out} cannot be written: {error}") from error
    return Export(folder=out, differences=differences, usage=export_format.usage(out))


def _differences(model: PretrainedEncoder, export_format: ExportFormat, folder: Path) -> dict[str, float]:
    """The largest difference of each output.

    Raises:
        MAEError: the library cannot load it, or gives other outputs.
    """
    inputs = _inputs(model)
    theirs = _library_outputs(export_format.name, folder, inputs)
    ours = model_outputs(model, inputs)
    if isinstance(model, Detector):
        theirs = _in_order(theirs, ours)
    differences = {name: _difference(theirs[name], ours[name.partition(",")[0]]) for name in theirs}
    worst = max(differences, key=lambda name: differences[name])
    if not differences[worst] <= (tolerance := _tolerance(model)):
        raise MAEError(
            f"the {export_format.name} export differs from the model: {worst} by {differences[worst]:.1e} of its "
            f"largest value; expected at most {tolerance:.0e}; nothing was written"
        )
    return differences


def _tolerance(model: PretrainedEncoder) -> float:
    return DETECTOR_TOLERANCE if isinstance(model, Detector) else TOLERANCE


def _inputs(model: PretrainedEncoder) -> Inputs:
    config = model.config
    assert config is not None
    generator = torch.Generator().manual_seed(_SEED)
    if isinstance(model, Detector):
        return _detector_inputs(model, generator)
    images = torch.randn(_IMAGES, config.layout.channels, *config.layout.size, generator=generator)
    if not isinstance(model, MaskedAutoencoder):
        return {"images": images}
    order = torch.rand(_IMAGES, config.layout.num_tokens, generator=generator).argsort(dim=1)
    return {"images": images, "order": order, "num_visible": torch.tensor(num_visible(model))}


def _detector_inputs(model: Detector, generator: torch.Generator) -> Inputs:
    """One image that is no square, and a threshold under which something is found in any image."""
    wanted, size = preprocessing_of(model.config), model.described.size
    mean, std = (torch.tensor(values)[:, None, None] for values in (wanted.mean, wanted.std))
    image = mean + std * torch.randn(len(mean), size, max(1, size * 3 // 4), generator=generator)
    return {"image": image, "threshold": torch.tensor(0.0)}


def _in_order(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their objects in our order, of which those of equal scores have none."""
    if theirs["boxes"].shape != ours["boxes"].shape:
        return theirs
    apart = 1 + ours["boxes"].max()  # objects of different classes are never taken for each other
    rows = [torch.cat([of["boxes"], apart * of["labels"][:, None]], dim=1) for of in (theirs, ours)]
    # By products, which are quicker, distances would be off by whole pixels.
    nearest = torch.cdist(rows[1], rows[0], compute_mode="donot_use_mm_for_euclid_dist").argmin(dim=1)
    return {name: tensor[nearest] for name, tensor in theirs.items()}


def _library_outputs(format_name: str, folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """The outputs of the library in a fresh process that loads the folder."""
    with TemporaryDirectory(prefix="mae-export-") as aside:
        inputs_file, outputs_file = Path(aside) / "inputs.safetensors", Path(aside) / "outputs.safetensors"
        save_file(dict(inputs), inputs_file)
        command = [
            sys.executable,
            "-P",  # nothing is imported from the folder in which the command is given
            "-m",
            "mae.interop.exports.roundtrip",
            format_name,
            str(folder),
            str(inputs_file),
            str(outputs_file),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise MAEError(f"the {format_name} export cannot be loaded by its library: {last}; nothing was written")
        return load_file(outputs_file)


def _difference(theirs: Tensor, ours: Tensor) -> float:
    if theirs.shape != ours.shape or not ours.numel():  # of nothing nothing is proved
        return float("inf")
    return float((theirs - ours).detach().abs().max() / ours.detach().abs().max().clamp(min=torch.finfo().tiny))
