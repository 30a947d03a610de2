"""Masked-autoencoder pre-training on any images (He et al. 2021).

The names below are the public ones. Each is imported when it is first used, so that the command line can
print its help without loading PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from mae.version import __version__

if TYPE_CHECKING:
    from mae import plots as plots
    from mae.config import RunConfig as RunConfig
    from mae.core.kinds import register as register
    from mae.core.method import MethodConfig as MethodConfig
    from mae.core.types import MAEOutput as MAEOutput
    from mae.core.types import MaskPlan as MaskPlan
    from mae.data import datasets as datasets
    from mae.decoders.cross_attention import CrossDecoder as CrossDecoder
    from mae.encoders.vit import Features as Features
    from mae.encoders.vit import MAEEncoder as MAEEncoder
    from mae.errors import MAEError as MAEError
    from mae.errors import UsageError as UsageError
    from mae.evaluation.common.record import Evaluation as Evaluation
    from mae.evaluation.extractors.extractor import Extractor as Extractor
    from mae.evaluation.pictures.embed import embed as embed
    from mae.evaluation.pictures.nearest import neighbours as neighbours
    from mae.evaluation.pictures.predict import Predictions as Predictions
    from mae.evaluation.pictures.predict import predict as predict
    from mae.evaluation.pictures.reconstruct import reconstruct as reconstruct
    from mae.evaluation.run import evaluate as evaluate
    from mae.experiments.run import study as study
    from mae.exploration.run import explore as explore
    from mae.layers.mask_decoder import MAEDecoder as MAEDecoder
    from mae.models.classifier import ImageClassifier as ImageClassifier
    from mae.models.file import save as save
    from mae.models.masked_autoencoder import MaskedAutoencoder as MaskedAutoencoder
    from mae.models.preprocess import Preprocessing as Preprocessing
    from mae.models.presets import create_model as create_model
    from mae.models.presets import list_models as list_models
    from mae.models.pretrained import MapBackbone as MapBackbone
    from mae.models.pretrained import PretrainedEncoder as PretrainedEncoder
    from mae.models.transforms import transforms as transforms
    from mae.pretraining.run import PretrainResult as PretrainResult
    from mae.pretraining.run import load as load
    from mae.pretraining.run import pretrain as pretrain
    from mae.training.device import keep_freed_memory as keep_freed_memory
    from mae.training.log import Callback as Callback

_WHERE = {
    "RunConfig": "mae.config",
    "MAEError": "mae.errors",
    "UsageError": "mae.errors",
    "embed": "mae.evaluation.pictures.embed",
    "Predictions": "mae.evaluation.pictures.predict",
    "predict": "mae.evaluation.pictures.predict",
    "neighbours": "mae.evaluation.pictures.nearest",
    "Extractor": "mae.evaluation.extractors.extractor",
    "Preprocessing": "mae.models.preprocess",
    "reconstruct": "mae.evaluation.pictures.reconstruct",
    "Evaluation": "mae.evaluation.common.record",
    "evaluate": "mae.evaluation.run",
    "study": "mae.experiments.run",
    "explore": "mae.exploration.run",
    "ImageClassifier": "mae.models.classifier",
    "MethodConfig": "mae.core.method",
    "register": "mae.core.kinds",
    "CrossDecoder": "mae.decoders.cross_attention",
    "MAEDecoder": "mae.layers.mask_decoder",
    "Features": "mae.encoders.vit",
    "MAEEncoder": "mae.encoders.vit",
    "MaskedAutoencoder": "mae.models.masked_autoencoder",
    "MapBackbone": "mae.models.pretrained",
    "PretrainedEncoder": "mae.models.pretrained",
    "save": "mae.models.file",
    "transforms": "mae.models.transforms",
    "create_model": "mae.models.presets",
    "list_models": "mae.models.presets",
    "keep_freed_memory": "mae.training.device",
    "Callback": "mae.training.log",
    "datasets": "mae.data.datasets",
    "plots": "mae.plots",
    "PretrainResult": "mae.pretraining.run",
    "load": "mae.pretraining.run",
    "pretrain": "mae.pretraining.run",
    "MAEOutput": "mae.core.types",
    "MaskPlan": "mae.core.types",
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'mae' has no attribute {name!r}")
    if name in ("datasets", "plots"):  # modules
        return import_module(_WHERE[name])
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
