"""A run that begins with weights that are there already, instead of fresh ones."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mae.config import PretrainConfig
from mae.errors import UsageError
from mae.interop.adapt import resized
from mae.interop.opening import open_model
from mae.models.classifier import ImageClassifier
from mae.models.config import ModelConfig
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.models.zoo import list_models, model_config

_FIXED = ("patch_size", "in_chans", "mlp_ratio", "cls_token", "pos_embed")
"""What the weights were made for: no option changes it."""
_ENCODER = ("embed_dim", "depth", "num_heads")
_DECODER = ("decoder", "decoder_embed_dim", "decoder_depth", "decoder_num_heads")
_TARGET = ("norm_pix_loss", "low_pass")


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """Weights to begin with.

    Attributes:
        model: they come from.
        config: its configuration; of an encoder alone with the decoder that is usual for its size.
        line: what was loaded, in one line.
        licence: the terms they come under, where they are known.
    """

    model: PretrainedEncoder
    config: ModelConfig
    line: str
    licence: str | None


def open_start(path: str) -> Start:
    """The weights at a path: of a run, a checkpoint, a file, or of others.

    Raises:
        UsageError: see `open_model`.
        MAEError: see `open_model`.
    """
    model, report = open_model(Path(path))
    assert model.config is not None  # it was loaded by one
    config = model.config
    if not isinstance(model, MaskedAutoencoder):
        named = _named_like(config)
        usual = ModelConfig() if named is None else model_config(named)
        config = replace(config, **{name: getattr(usual, name) for name in _DECODER})
    return Start(model=model, config=config, line=report.line(), licence=report.origin.get("licence"))


def as_weights_say(config: PretrainConfig, given: Collection[str], start: Start) -> PretrainConfig:
    """The same run with what its weights say wherever the user does not: sizes, decoder, target, statistics.

    A configuration that brings `init_from` along, as that of a run does, has all this settled.

    Args:
        config: the run.
        given: names of the options that the user set.
        start: the weights.

    Raises:
        UsageError: an option that contradicts them.
    """
    if "init_from" not in given:
        return config
    weights = start.config
    if "model" in given:
        raise UsageError(f"--model is {config.model}, and --init-from says by itself what model it is; leave it out")
    for name in _FIXED:
        asked, there = getattr(config, name), getattr(weights, name)
        if name in given and asked not in (None, there):
            flag = name.replace("_", "-")
            way = (
                f"'mae import --in-chans {asked} --stem mean' makes such weights"
                if name == "in_chans"
                else "leave it out"
            )
            raise UsageError(f"--{flag} is {asked}, the weights of --init-from are for {there}; {way}")
    if "channels" in given and weights.channels not in (None, config.channels):
        known = ",".join(weights.channels)
        raise UsageError(f"--channels differ from those that the weights of --init-from are for ({known})")
    if "statistics" in given and config.statistics == "model" and weights.mean is None:
        raise UsageError("--statistics is model, and the weights of --init-from know none; use --statistics data")
    kept = {"img_size", "channels", "no_data", *_FIXED}
    if isinstance(start.model, MaskedAutoencoder):
        kept |= {"decoder", "decoder_depth", *_TARGET}
    said: dict[str, Any] = {name: getattr(weights, name) for name in kept - set(given)}
    if "statistics" not in given:
        said["statistics"] = "data" if weights.mean is None else "model"
    return replace(config, model=_called(weights), **said)


def begin_with(model: MaskedAutoencoder, start: Start) -> None:
    """Put the weights into a fresh model; what `fresh_part` names stays fresh."""
    assert model.config is not None
    source, size = start.model, model.config.img_size
    if size != start.config.img_size:
        source, _ = resized(source, size)
    fresh = fresh_part(start, model.config)
    own = model.state_dict()
    taken = {name: tensor for name, tensor in source.state_dict().items() if name in own and not name.startswith(fresh)}
    model.load_state_dict({**own, **taken})


def fresh_part(start: Start, config: ModelConfig) -> tuple[str, ...]:
    """How the names of those tensors begin that the weights are not taken for.

    Another target needs another last layer; another decoder shares nothing with the old one; a classifier's encoder
    has lost its last norm.
    """
    if isinstance(start.model, ImageClassifier):
        return "decoder.", "encoder.norm."
    if not isinstance(start.model, MaskedAutoencoder) or _differ(start.config, config, _DECODER):
        return ("decoder.",)
    return ("decoder.pred.",) if _differ(start.config, config, _TARGET) else ()


def _differ(one: ModelConfig, other: ModelConfig, names: tuple[str, ...]) -> bool:
    return any(getattr(one, name) != getattr(other, name) for name in names)


def _named_like(config: ModelConfig) -> str | None:
    """The first named model whose encoder has these sizes."""
    return next((name for name in list_models() if not _differ(model_config(name), config, _ENCODER)), None)


def _called(config: ModelConfig) -> str:
    """A name for a model of any sizes."""
    named = _named_like(config)
    if named is not None and not _differ(model_config(named), config, ("patch_size", *_DECODER)):
        return named
    return f"vit_{config.embed_dim}x{config.depth}_patch{'x'.join(map(str, dict.fromkeys(config.patch_size)))}"
