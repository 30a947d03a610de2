"""A model from weights that others wrote."""

from dataclasses import replace
from math import isnan
from pathlib import Path

import torch

from mae import records
from mae.errors import MAEError, UsageError
from mae.interop.checks import check_weights, is_trained
from mae.interop.hints import IMAGENET_MEAN, IMAGENET_STD, check_described, licence_beside, overridden, told_beside
from mae.interop.layouts import Named, bring_to_official
from mae.interop.official import Converted, Told, convert
from mae.interop.photographs import better_arrangement, photograph_shares, shows_photographs
from mae.interop.proof import prove_encoder
from mae.interop.reading import read_foreign
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.models.storage import CLASSIFIER, ENCODER, MASKED_AUTOENCODER, LoadReport, build, check_names, count_part
from mae.models.zoo import make_target
from mae.randomness import drawing_from

_FRESH_SEED, _NUM_NAMED = 0, 3
_TARGETS = {True: "standardised patches", False: "plain pixels"}


def load_foreign(
    path: Path, *, told: Told | None = None, allow_partial: float | None = None, see_photographs: bool = True
) -> tuple[PretrainedEncoder, LoadReport]:
    """The model in a file or folder that others wrote, on the CPU, in evaluation mode, and what was loaded.

    Recognised by what its tensors are called, whatever the file's name: the official code's checkpoints, timm's and
    lightly's vision transformers, transformers' ViTMAE and ViT, mmpretrain's MAE, behind the usual wrappers. With a
    head on the mean token, as fine-tuning leaves it, it is an `ImageClassifier`. With a
    decoder it is a `MaskedAutoencoder`, and of colour images it must then predict photographs better than their mean
    colour does; where nobody says what its target was, that tells it too.

    Args:
        path: a file of safetensors or of `torch.save`, or a folder that `save_pretrained` or timm wrote.
        told: what neither shapes nor the files beside the weights say, or say otherwise.
        allow_partial: share of the encoder's values that is enough, see `mae.models.storage.load_with_report`.
        see_photographs: False for a model of images that are nothing like photographs.

    Raises:
        UsageError: nothing that is known, or something that nobody says; the option to give is named.
        MAEError: damaged, less than is allowed, or weights that no such model was trained to.
    """
    if allow_partial is not None and not 0 < allow_partial <= 1:
        raise UsageError(f"--allow-partial is {allow_partial}; expected a share of the encoder above 0 and at most 1")
    foreign = read_foreign(path)
    named = bring_to_official(path, foreign.tensors)
    check_described(foreign)
    said = overridden(told_beside(foreign), told or Told())
    known = _completed(path, named, said)
    try:
        converted = convert(named.encoder, named.decoder, known)
    except (MAEError, UsageError) as error:
        raise type(error)(f"{path} ({named.layout.name}): {error}") from error
    model, report = _filled(path, named, converted, licence_beside(foreign), allow_partial)
    check_weights(path, converted, biased=_has_biases(named), rows_first=bool(known.rows_first))
    notes = list(report.notes)
    if said.mean is None:
        notes.append("channel statistics are not known" if known.mean is None else "channel statistics are ImageNet's")
    if report.encoder.tensors == report.encoder.tensors_expected:
        notes.append(prove_encoder(foreign, named, model, is_sines=converted.positions == "sincos2d"))
    if isinstance(model, MaskedAutoencoder):
        notes.append(_settle_target(path, model, known, see_photographs=see_photographs and not report.missing))
    return model, replace(report, notes=tuple(notes))


def _has_biases(named: Named) -> bool:
    return any(name.endswith(".attn.qkv.bias") for name in named.encoder)


def _settle_target(path: Path, model: MaskedAutoencoder, known: Told, *, see_photographs: bool) -> str:
    """Give the model the target that it was trained to, and tell how that is known.

    Raises:
        UsageError: nobody says, and photographs cannot.
        MAEError: it predicts no photograph, or would as something else.
    """
    config, kind = model.config, known.norm_pix_loss
    assert config is not None
    if see_photographs and shows_photographs(config) and is_trained(model.state_dict()):
        kind, note = _seen_target(path, model, kind)
    elif kind is None:
        raise UsageError(f"{path} does not say what its decoder predicts; give --norm-pix-loss True or False")
    else:
        note = f"is said to predict {_TARGETS[kind]}, which was not tried on photographs"
    if kind != config.norm_pix_loss:
        model.config = replace(config, norm_pix_loss=kind)
        model.target = make_target(model.config)
    return note


def _seen_target(path: Path, model: MaskedAutoencoder, kind: bool | None) -> tuple[bool, str]:
    """What photographs tell: whether the target standardises patches, and how well it is predicted."""
    shares = photograph_shares(model)
    if kind is None:
        kind = min(shares, key=lambda name: (isnan(shares[name]), shares[name]))
    note = f"predicts {_TARGETS[kind]} of photographs with {shares[kind]:.2f} of the error of their mean colour"
    if not shares[kind] < 1:  # nor may it be NaN
        raise MAEError(
            f"{path}: the model {note} (as {_TARGETS[not kind]} {shares[not kind]:.2f}), so it was changed on its way "
            "here (order of queries, keys and values, heads, positions), has another target (--norm-pix-loss) or was "
            "trained on images that are nothing like photographs: --no-photographs then"
        )
    if better := better_arrangement(model, norm_pix=kind):
        raise MAEError(f"{path}: the model {note}, and better with {better}: what wrote this file mixed them up")
    return kind, note


def _completed(path: Path, named: Named, told: Told) -> Told:
    """What nobody tells, as the layout has it."""
    norm_eps = named.layout.norm_eps if told.norm_eps is None else told.norm_eps
    if norm_eps is None:
        raise UsageError(
            f"{path} has {named.layout.name}'s names and no config.json beside it, which tells heads and norms; give "
            "the folder that save_pretrained wrote, or --num-heads and --norm-eps"
        )
    if told.mean is None and named.decoder and named.encoder["patch_embed.proj.weight"].shape[1] == len(IMAGENET_MEAN):
        told = replace(told, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    rows_first = named.layout.rows_first if told.rows_first is None else told.rows_first
    return replace(told, norm_eps=norm_eps, rows_first=rows_first)


def _filled(
    path: Path, named: Named, converted: Converted, licence: str | None, allow_partial: float | None
) -> tuple[PretrainedEncoder, LoadReport]:
    """A model with these weights in it, if they are those it has."""
    kind = MASKED_AUTOENCODER if named.decoder else ENCODER if converted.classes is None else CLASSIFIER
    with torch.device("meta"):
        expected = build(kind, converted.config, converted.classes).state_dict()
    weights = converted.weights
    found = {*weights, *converted.unknown}
    if strange := sorted(found - expected.keys()):
        shown = ", ".join(records.shown(name) for name in strange[:_NUM_NAMED])
        raise MAEError(
            f"{path} holds {len(strange)} tensors that no such model has ({shown}): its mathematics are others, or "
            "they belong to something else; save the model's tensors alone"
        )
    if allow_partial is None and (lacking := sorted(expected.keys() - found)):
        encoder = count_part("encoder.", expected, found)
        raise MAEError(
            f"{path} holds {encoder.tensors} of {encoder.tensors_expected} encoder tensors; {len(lacking)} of the "
            f"model's are missing ({', '.join(lacking[:_NUM_NAMED])}); get the file anew, or take what is there by "
            "--allow-partial SHARE"
        )
    check_names(path, found, expected, allow_partial=allow_partial)
    there = {name: weight for name, weight in weights.items() if name in expected}
    for name, weight in there.items():
        if weight.shape != expected[name].shape:
            shapes = f"{list(weight.shape)}; expected {list(expected[name].shape)}"
            raise MAEError(f"{path}: what becomes {name} has shape {shapes}")
    with drawing_from(_FRESH_SEED):  # the caller's numbers stay
        model = build(kind, converted.config, converted.classes)
    model.load_state_dict(there, strict=False)  # their names were compared above
    ignored = sorted({*converted.ignored, *named.elsewhere})
    missing = tuple(name for name in expected if name not in there)
    fresh = f"; {len(missing)} of its tensors were missing and are fresh" if missing else ""
    report = LoadReport(
        encoder=count_part("encoder.", expected, set(there)),
        decoder=count_part("decoder.", expected, set(there)),
        missing=missing,
        ignored=tuple(ignored),
        probe=None,
        channels=None,
        origin={"imported_from": f"{path.name} ({named.layout.name}){fresh}", "licence": licence},
        notes=converted.notes,
        classes=None if converted.classes is None else converted.classes.count,
    )
    return model.eval(), report
