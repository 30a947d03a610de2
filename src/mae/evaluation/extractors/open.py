"""The extractor that a user means: a run, a file, a model, another project's model, or a function."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mae.errors import UsageError
from mae.evaluation.extractors.external_models import hf_extractor, timm_extractor
from mae.evaluation.extractors.extractor import Extractor, model_extractor
from mae.models.file import load_with_report
from mae.models.pretrained import PretrainedEncoder
from mae.records import safe_name
from mae.training.run_folder import RunFolder, find_weights


def open_extractor(spec: Any, *, device: torch.device) -> Extractor:
    """The extractor that a user means.

    Args:
        spec: a run folder, a checkpoint or a `.safetensors` file; `timm:NAME`; `hf:NAME_OR_PATH`; a
            `MaskedAutoencoder` or `PretrainedEncoder`; an `Extractor`.
        device: where it computes.

    Raises:
        UsageError: nothing of that name, a package that is not installed, or a model that does not say how its
            images are normalised.
        MAEError: a damaged file.
    """
    if isinstance(spec, Extractor):
        if isinstance(spec.encode, nn.Module) and spec.encode.training:
            raise UsageError(f"{spec.name} is in training mode, so its features depend on chance; call .eval() on it")
        return spec
    if isinstance(spec, PretrainedEncoder):
        # A copy: the caller's model keeps its device and mode, and may be trained further meanwhile.
        return model_extractor(deepcopy(spec).to(device), name="model")
    if not isinstance(spec, (str, Path)):
        raise UsageError(
            f"the model is {type(spec).__name__}; expected a run folder, a .safetensors file, timm:NAME, hf:NAME, a "
            "MaskedAutoencoder, or a function put into mae.Extractor(name=…, encode=…, preprocessing=…)"
        )
    kind, _, name = str(spec).partition(":")
    if kind in ("timm", "hf") and name:
        return (timm_extractor if kind == "timm" else hf_extractor)(name, device=device)
    model, report = load_with_report(find_weights(Path(spec)))
    extractor = model_extractor(model.to(device), name=str(spec))
    return replace(extractor, loaded=report.line(), licence=report.origin.get("licence"))


def usual_folder(spec: Any, extractor: Extractor) -> Path:
    """Where results of a model are kept: in the run that it is of; for any other in a folder named after it."""
    path = Path(spec) if isinstance(spec, (str, Path)) else None
    if path is not None and path.exists():
        above = [path, *path.absolute().parents][:4]
        run = next((folder for folder in above if RunFolder(folder).holds_run), None)
        if run is not None:
            return run
    return Path("runs") / f"evaluate-{safe_name(extractor.name).strip('-.')[-60:]}"
