"""A model as others read it, and the proof that they read the same: every export is asked in a process of its own."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mae import records
from mae.errors import MAEError, UsageError
from mae.evaluation.record import versions
from mae.interop.answer import Inputs, answers_of
from mae.interop.card import model_card
from mae.interop.forms import FORMS, Form
from mae.interop.opening import open_model
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder

TOLERANCE = 1e-5
"""Largest difference of what the library answers, relative to the largest value, in float32."""

PROOF, CARD = "proof.json", "README.md"
"""What was compared, and what the model is, in the export's folder."""

_IMAGES, _SEED = 2, 0


@dataclass(frozen=True, kw_only=True)
class Export:
    """A model that was written for others.

    Attributes:
        folder: what they read.
        differences: the largest difference of each answer, relative to its largest value.
        usage: Python that reads it.
    """

    folder: Path
    differences: Mapping[str, float]
    usage: str


def export_model(path: Path, *, to: str, out: Path, licence: str | None = None) -> Export:
    """Write a model for others, have them read it in a fresh process, and compare their answers with ours.

    Args:
        path: a run folder, a checkpoint, a file of a model, or weights that others wrote.
        to: a name of `FORMS`.
        out: a new folder.
        licence: the terms the weights come under; None: what the model's file says.

    Raises:
        UsageError: no such form, a model that it cannot hold, the library is not installed, or `out` is there already.
        MAEError: the library cannot read it or answers otherwise; nothing is left then.
    """
    records.check_known([to], list(FORMS), what="form to export to")
    form = FORMS[to]
    if out.exists():
        raise UsageError(f"{out} is there already; give --out another name, or delete it first")
    if lacking := [name for name in form.needs if find_spec(name) is None]:
        raise UsageError(f"--to {to} needs {' and '.join(lacking)}: pip install {' '.join(lacking)}")
    model, report = open_model(path)
    form.check(model)
    beside = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        terms = licence or report.origin.get("licence")
        form.write(model, beside, terms)
        differences = _prove(model, form, beside)
        whole = "prediction" in differences
        card = model_card(
            model,
            report,
            path=path,
            licence=terms,
            library=form.needs[0] if form.needs else None,
            usage=form.usage(Path(out.name)),
            whole=whole,
        )
        (beside / CARD).write_text(card, encoding="utf-8", errors="backslashreplace")
        beside.chmod(0o755)
        proof = {"form": to, "differences": differences, "tolerance": TOLERANCE, "versions": versions()}
        records.write_json(beside / PROOF, proof)
        beside.replace(out)
    except (OSError, SafetensorError) as error:
        raise MAEError(f"{out} cannot be written: {error}") from error
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
    return Export(folder=out, differences=differences, usage=form.usage(out))


def _prove(model: PretrainedEncoder, form: Form, folder: Path) -> dict[str, float]:
    """The largest difference of each answer.

    Raises:
        MAEError: the library could not answer, or answered otherwise.
    """
    inputs = _inputs(model)
    theirs = _asked(form.name, folder, inputs)
    ours = answers_of(model, inputs)
    differences = {name: _difference(theirs[name], ours[name.partition(",")[0]]) for name in theirs}
    worst = max(differences, key=lambda name: differences[name])
    if not differences[worst] <= TOLERANCE:
        raise MAEError(
            f"the export to {form.name} does not answer as the model does: {worst} differs by {differences[worst]:.1e} "
            f"of its largest value, at most {TOLERANCE:.0e} is rounding; nothing was written"
        )
    return differences


def _inputs(model: PretrainedEncoder) -> Inputs:
    config = model.config
    assert config is not None
    generator = torch.Generator().manual_seed(_SEED)
    images = torch.randn(_IMAGES, config.in_chans, *config.img_size, generator=generator)
    if not isinstance(model, MaskedAutoencoder):
        return {"images": images}
    return {"images": images, "order": torch.rand(_IMAGES, config.num_tokens, generator=generator).argsort(dim=1)}


def _asked(form: str, folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """What a fresh process answers that reads the folder by the library."""
    with TemporaryDirectory(prefix="mae-export-") as aside:
        asked, answered = Path(aside) / "asked.safetensors", Path(aside) / "answered.safetensors"
        save_file(dict(inputs), asked)
        command = [sys.executable, "-m", "mae.interop.answer", form, str(folder), str(asked), str(answered)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            raise MAEError(f"the export to {form} cannot be read by its library: {last}; nothing was written")
        return load_file(answered)


def _difference(theirs: Tensor, ours: Tensor) -> float:
    if theirs.shape != ours.shape:
        return float("inf")
    return float((theirs - ours).detach().abs().max() / ours.detach().abs().max().clamp(min=torch.finfo().tiny))
