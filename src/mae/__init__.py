"""Masked-autoencoder pre-training on any images (He et al. 2021).

The names below are the public ones. Each is imported when it is first used, so that the command line can
print its help without loading PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from mae.version import __version__

if TYPE_CHECKING:
    from mae.config import PretrainConfig as PretrainConfig
    from mae.errors import MAEError as MAEError
    from mae.errors import UsageError as UsageError
    from mae.evaluation.embedding import embed as embed
    from mae.evaluation.embedding import neighbours as neighbours
    from mae.evaluation.extractors import Extractor as Extractor
    from mae.evaluation.extractors import Preprocessing as Preprocessing
    from mae.evaluation.pictures import reconstruct as reconstruct
    from mae.evaluation.record import Evaluation as Evaluation
    from mae.evaluation.run import evaluate as evaluate
    from mae.experiments.run import study as study
    from mae.models.classifier import ImageClassifier as ImageClassifier
    from mae.models.config import ModelConfig as ModelConfig
    from mae.models.decoder import CrossDecoder as CrossDecoder
    from mae.models.decoder import MAEDecoder as MAEDecoder
    from mae.models.encoder import Features as Features
    from mae.models.encoder import MAEEncoder as MAEEncoder
    from mae.models.masked_autoencoder import MaskedAutoencoder as MaskedAutoencoder
    from mae.models.pretrained import MapBackbone as MapBackbone
    from mae.models.pretrained import PretrainedEncoder as PretrainedEncoder
    from mae.models.storage import save as save
    from mae.models.zoo import create_model as create_model
    from mae.models.zoo import list_models as list_models
    from mae.pretraining.run import PretrainResult as PretrainResult
    from mae.pretraining.run import load as load
    from mae.pretraining.run import pretrain as pretrain
    from mae.types import MAEOutput as MAEOutput
    from mae.types import MaskPlan as MaskPlan

_WHERE = {
    "PretrainConfig": "mae.config",
    "MAEError": "mae.errors",
    "UsageError": "mae.errors",
    "embed": "mae.evaluation.embedding",
    "neighbours": "mae.evaluation.embedding",
    "Extractor": "mae.evaluation.extractors",
    "Preprocessing": "mae.evaluation.extractors",
    "reconstruct": "mae.evaluation.pictures",
    "Evaluation": "mae.evaluation.record",
    "evaluate": "mae.evaluation.run",
    "study": "mae.experiments.run",
    "ImageClassifier": "mae.models.classifier",
    "ModelConfig": "mae.models.config",
    "CrossDecoder": "mae.models.decoder",
    "MAEDecoder": "mae.models.decoder",
    "Features": "mae.models.encoder",
    "MAEEncoder": "mae.models.encoder",
    "MaskedAutoencoder": "mae.models.masked_autoencoder",
    "MapBackbone": "mae.models.pretrained",
    "PretrainedEncoder": "mae.models.pretrained",
    "save": "mae.models.storage",
    "create_model": "mae.models.zoo",
    "list_models": "mae.models.zoo",
    "PretrainResult": "mae.pretraining.run",
    "load": "mae.pretraining.run",
    "pretrain": "mae.pretraining.run",
    "MAEOutput": "mae.types",
    "MaskPlan": "mae.types",
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'mae' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
