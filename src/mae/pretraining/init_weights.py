"""A run that begins with weights that are there already, instead of fresh ones."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mae.config import RunConfig
from mae.core.compatibility import least_visible
from mae.core.method import MethodConfig, names_of
from mae.errors import UsageError
from mae.interop.adapt import fitting_ratio, resampled
from mae.interop.imports.open import open_model
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.presets import list_models, model_config
from mae.models.pretrained import PretrainedEncoder


@dataclass(frozen=True, kw_only=True, eq=False)
class InitWeights:
    """Weights to begin with.

    Attributes:
        model: they come from.
        config: its configuration without how it was trained; of an encoder alone with the decoder that is usual for its
            size, and where a teacher made the targets with pixels as targets.
        line: what was loaded, in one line.
        licence: the terms they come under, where they are known.
    """

    model: PretrainedEncoder
    config: MethodConfig
    line: str
    licence: str | None


def open_init_weights(path: str) -> InitWeights:
    """The weights at a path: of a run, a checkpoint, a file, or of others.

    Raises:
        UsageError: see `open_model`.
        MAEError: see `open_model`.
    """
    model, report = open_model(Path(path))
    assert model.config is not None  # it was loaded by one
    config, plain = model.config, MethodConfig()
    encoder, decoder, target = config.encoder, config.decoder, config.target
    if not isinstance(model, MaskedAutoencoder):
        named = _named_like(config)
        usual = plain if named is None else model_config(named)
        encoder, decoder, target = replace(encoder, mask_tokens=False), usual.decoder, usual.target
    elif target.needs:
        target = plain.target
    ratio = fitting_ratio(plain.mask.ratio, config.layout, least=least_visible(encoder, decoder))
    mask = replace(plain.mask, ratio=ratio)
    # How it was trained is no property of the weights. All at once: the parts must fit each other.
    config = replace(
        config, encoder=encoder, decoder=decoder, target=target, mask=mask, loss=plain.loss, terms=(),
        teacher=None, adapter=None,
    )  # fmt: skip
    left = ", relative positions left out" if any(".rel_pos." in name for name in model.state_dict()) else ""
    return InitWeights(model=model, config=config, line=report.line() + left, licence=report.origin.get("licence"))


def inherit_config(config: RunConfig, given: Collection[str], start: InitWeights) -> RunConfig:
    """The same run with what its weights say wherever the user does not: sizes, decoder, target, statistics.

    A configuration that brings `init_from` along, as that of a run does, has all this settled.

    Args:
        config: the run.
        given: names of the options that the user set.
        start: the weights.

    Raises:
        UsageError: an option that contradicts them, or an adapter that could not tell their channels apart.
    """
    if "init_from" not in given:
        return config
    weights = start.config
    if "model" in given:
        raise UsageError(f"--model is {config.model}, and --init-from says by itself what model it is; leave it out")
    # Mask tokens may come or go: features are made without them.
    fixed = {*names_of("encoder", weights.encoder.kind), "patch_size", "in_chans"} - {"encoder_mask_tokens"}
    asked_of, there_of = config.flat(), weights.flat()
    for name in sorted(fixed & set(given)):
        asked, there = asked_of[name], there_of[name]
        if asked not in (None, there):
            flag = name.replace("_", "-")
            way = (
                f"'mae import --in-chans {asked} --stem mean' makes such weights"
                if name == "in_chans"
                else "leave it out"
            )
            raise UsageError(f"--{flag} is {asked}, the weights of --init-from are for {there}; {way}")
    if "channels" in given and weights.tokenizer.channels not in (None, asked_of["channels"]):
        known = ",".join(weights.tokenizer.channels)
        raise UsageError(f"--channels differ from those that the weights of --init-from are for ({known})")
    if "statistics" in given and config.data.statistics == "model" and weights.tokenizer.mean is None:
        raise UsageError("--statistics is model, and the weights of --init-from know none; use --statistics data")
    _check_adapter(asked_of.get("adapter"), start)
    kept = {"encoder", "img_size", "channels", "nodata", *fixed}
    assert not isinstance(config.method, MethodConfig)
    for slot in ("decoder", "target") if isinstance(start.model, MaskedAutoencoder) else ():
        if slot not in config.method:  # as in a recipe that is about another decoder or target
            kept |= names_of(slot, getattr(weights, slot).kind)
    said = {name: value for name, value in config.method.items() if name in given or name not in kept}
    changed = replace(config, model=_called(weights), method=said)
    facts = {name: there_of[name] for name in ("in_chans", "channels", "nodata") if name not in given}
    changed = changed.override({name: value for name, value in facts.items() if value is not None})
    if "statistics" not in given:
        changed = changed.override({"statistics": "data" if weights.tokenizer.mean is None else "model"})
    return changed


def load_initial_weights(model: MaskedAutoencoder, start: InitWeights) -> None:
    """Put the weights into a fresh model; what `fresh_part` names stays fresh."""
    assert model.config is not None
    own, source = model.state_dict(), resampled(start.model, model.config.layout.grid)
    # How it was trained is no property of the weights: what terms have of their own begins anew.
    fresh = (*fresh_part(start, model.config), "term_heads.", "term_teachers.")
    taken = {name: tensor for name, tensor in source.items() if name in own and not name.startswith(fresh)}
    for name in taken:
        if name.startswith("decoder.pred."):  # behind the target's rows are those for terms
            width = model.config.outputs["target"]
            taken[name] = torch.cat([taken[name][:width], own[name][width:]])
    model.load_state_dict({**own, **taken})


def _check_adapter(adapter: object, start: InitWeights) -> None:
    """Refuse weights to adapt that lack a part of the encoder, or whose patch projection treats all channels alike.

    Both stay as they are.
    """
    if adapter is None:
        return
    if lacking := [part.split(".")[1] for part in fresh_part(start, start.config) if part.startswith("encoder.")]:
        raise UsageError(
            f"--adapter keeps most of the encoder as it is, and the weights of --init-from have no "
            f"{' and no '.join(lacking)}, which would stay untrained; leave --adapter out to train everything"
        )
    channels, weight = start.config.layout.channels, start.model.encoder.patch_embed.proj.weight
    kernels = weight.reshape(len(weight), channels, -1)
    if channels > 1 and bool((kernels == kernels[:, :1]).all()):
        raise UsageError(
            f"--adapter keeps the patch projection of the weights of --init-from, which is the same for all {channels} "
            "channels, so the model could never tell them apart; leave --adapter out to train everything"
        )


def fresh_part(start: InitWeights, config: MethodConfig) -> tuple[str, ...]:
    """How the names of those tensors begin that the weights are not taken for.

    Another target needs another last layer, and so do outputs of another width; another decoder shares nothing with
    the old one; a model trained with labels may have lost its encoder's last norm or class token. What the last layer
    says to other terms begins anew too, which is not told here.
    """
    if not isinstance(start.model, MaskedAutoencoder):
        there = start.model.state_dict()
        parts = {"encoder.norm.": True, "encoder.cls_token": config.encoder.cls_token}
        missing = (part for part, wanted in parts.items() if wanted and not any(key.startswith(part) for key in there))
        return ("decoder.", *missing)
    if start.config.decoder != config.decoder:
        return ("decoder.",)
    assert start.model.config is not None
    before, now = ((each.target, each.outputs["target"]) for each in (start.model.config, config))
    return ("decoder.pred.",) if before != now else ()


def _named_like(config: MethodConfig) -> str | None:
    """The first named model whose encoder has these sizes."""
    return next((name for name in list_models() if _sizes(model_config(name)) == _sizes(config)), None)


def _sizes(config: MethodConfig) -> tuple[int, int, int]:
    return config.encoder.embed_dim, config.encoder.depth, config.encoder.num_heads


def _called(config: MethodConfig) -> str:
    """A name for a model of any sizes."""
    named, patch = _named_like(config), config.layout.patch
    if named is not None:
        like = model_config(named)
        usual = {name: getattr(like.decoder, name) for name in ("mlp_ratio", "pos_embed")}
        decoder = replace(config.decoder, **{name: usual[name] for name in usual if hasattr(config.decoder, name)})
        if like.layout.patch == patch and like.decoder == decoder:
            return named
    return f"vit_{config.encoder.embed_dim}x{config.encoder.depth}_patch{'x'.join(map(str, dict.fromkeys(patch)))}"
