"""A model's own extractor with the vector that a pooled probe of it learned to make of its patch tokens."""

from dataclasses import replace
from pathlib import Path

import torch

from mae.errors import UsageError
from mae.evaluation.extractors.extractor import LEARNED, Extractor, model_extractor, weights_digest
from mae.models.classifier import Classifier
from mae.models.file import is_classifier, load_with_report


def with_learned_pooling(extractor: Extractor, pool: str | Path, *, folder: Path, device: torch.device) -> Extractor:
    """The extractor that gives `learned` too; itself, if it does already.

    Args:
        extractor: of a model of this package.
        pool: `learned`: the pooling that the model itself or a pooled probe in `folder` learned; else the file of a
            pooled probe, or a folder that holds one.
        folder: where results of the model are kept.
        device: where it computes.

    Raises:
        UsageError: no model of this package, no pooled probe or several, or one of another encoder.
        MAEError: a damaged file.
    """
    model, how = extractor.model, f"make one: mae evaluate pooled_probe {extractor.name} --data LABELLED"
    if model is None:
        raise UsageError(f"{extractor.name} is no model of this package; only of one is a learned pooling kept")
    if pool == LEARNED and isinstance(model, Classifier) and model.pooling is not None:
        return extractor
    path = _find(folder if pool == LEARNED else Path(pool), how)
    found = load_with_report(path)[0]
    if weights_digest(found.encoder) != weights_digest(model.encoder):
        raise UsageError(f"the pooling in {path} was learned on an encoder with other weights than this one's; {how}")
    return replace(
        model_extractor(found.to(device), name=f"{extractor.name}, pooled by {path}"), licence=extractor.licence
    )


def _find(path: Path, how: str) -> Path:
    """The file of a pooled probe: itself, or the only one in the folder of a run."""
    if path.is_dir():
        held = sorted(file for file in path.glob("evaluation/*.safetensors") if is_classifier(file, pools=True))
        if len(held) > 1:
            raise UsageError(f"{path} holds {len(held)} learned poolings; name one of {', '.join(map(str, held))}")
        if held:
            return held[0]
    elif is_classifier(path, pools=True):
        return path
    raise UsageError(f"there is no learned pooling in {path}; {how}")
