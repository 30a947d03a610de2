"""Load weights that another library wrote."""

from dataclasses import replace
from math import isnan
from pathlib import Path

import torch

from mae import records
from mae.errors import MAEError, UsageError
from mae.interop.imports.checks import check_weights, is_trained
from mae.interop.imports.convert import Converted, WeightMetadata, convert
from mae.interop.imports.naming import RenamedTensors, to_official_names
from mae.interop.imports.photo_sanity import accepts_photos, better_arrangement, photo_errors
from mae.interop.imports.proof import compare_with_library
from mae.interop.imports.reading import read_external
from mae.interop.imports.sidecar import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    check_pooling,
    check_sidecar,
    merged,
    sidecar_licence,
    sidecar_metadata,
)
from mae.models.file import check_names
from mae.models.kinds import CLASSIFIER, ENCODER, MASKED_AUTOENCODER, build
from mae.models.load_report import LoadReport, count_part
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.randomness import drawing_from

_FRESH_SEED, _NUM_NAMED = 0, 3
_TARGETS = {True: "per-patch normalised pixels", False: "pixels"}


def load_external(
    path: Path, *, metadata: WeightMetadata | None = None, allow_partial: float | None = None, photo_check: bool = True
) -> tuple[PretrainedEncoder, LoadReport]:
    """The model in a file or folder that another library wrote, on the CPU, in evaluation mode, and what was loaded.

    Recognised by its tensor names, whatever the file is called: checkpoints of the official code, vision transformers
    of timm and lightly, ViTMAE and ViT of transformers, MAE of mmpretrain, inside the usual wrappers. With a head on
    the mean token, as fine-tuning leaves it, the model is an `ImageClassifier`. With a decoder it is a
    `MaskedAutoencoder`; a model of colour images must then predict photos better than their mean colour does, which
    also identifies its target if the metadata does not.

    Args:
        path: a file of safetensors or of `torch.save`, or a folder that `save_pretrained` or timm wrote.
        metadata: what neither shapes nor the files beside the weights say; takes precedence over those files.
        allow_partial: sufficient share of the encoder's values, see `mae.models.file.load_with_report`.
        photo_check: False for a model of images that are nothing like photos.

    Raises:
        UsageError: no known model, or missing metadata; the message names the option to give.
        MAEError: damaged, fewer weights than allowed, or weights that cannot be a trained model's.
    """
    if allow_partial is not None and not 0 < allow_partial <= 1:
        raise UsageError(f"--allow-partial is {allow_partial}; expected a share of the encoder above 0 and at most 1")
    external = read_external(path)
    renamed = to_official_names(path, external.tensors)
    check_sidecar(external)
    stated = merged(sidecar_metadata(external), metadata or WeightMetadata())
    known = _completed(path, renamed, stated)
    try:
        converted = convert(renamed.encoder, renamed.decoder, known)
    except (MAEError, UsageError) as error:
        raise type(error)(f"{path} ({renamed.scheme.name}): {error}") from error
    if converted.classes is not None:
        check_pooling(external)
    model, report = _filled(path, renamed, converted, sidecar_licence(external), allow_partial)
    check_weights(path, converted, biased=_has_biases(renamed), rows_first=bool(known.rows_first))
    notes = list(report.notes)
    if stated.mean is None:
        notes.append("channel statistics are unknown" if known.mean is None else "channel statistics are ImageNet's")
    if report.encoder.tensors == report.encoder.tensors_expected:
        notes.append(compare_with_library(external, renamed, model, is_sines=converted.positions == "sincos2d"))
    if isinstance(model, MaskedAutoencoder):
        notes.append(_resolve_target(path, model, known, photo_check=photo_check and not report.missing))
    return model, replace(report, notes=tuple(notes))


def _has_biases(renamed: RenamedTensors) -> bool:
    return any(name.endswith(".attn.qkv.bias") for name in renamed.encoder)


def _resolve_target(path: Path, model: MaskedAutoencoder, known: WeightMetadata, *, photo_check: bool) -> str:
    """Set the target that the model was trained with; returns a note that says how it is known.

    Raises:
        UsageError: it is not stated, and photos cannot tell.
        MAEError: the model does not predict photos, or predicts them better with its weights rearranged.
    """
    config, kind = model.config, known.norm_pix_loss
    assert config is not None
    if photo_check and accepts_photos(config) and is_trained(model.state_dict()):
        kind, note = _checked_target(path, model, kind)
    elif kind is None:
        raise UsageError(f"{path} does not state what its decoder predicts; give --norm-pix-loss True or False")
    else:
        note = f"states that it predicts {_TARGETS[kind]}; not checked on photos"
    if kind != config.target.norm:
        model.config = config.override({"norm_pix_loss": kind})
        model.target = model.config.target
    return note


def _checked_target(path: Path, model: MaskedAutoencoder, kind: bool | None) -> tuple[bool, str]:
    """Whether photos show a per-patch normalised target, and a note on how well it is predicted."""
    errors = photo_errors(model)
    if kind is None:
        kind = min(errors, key=lambda kind: (isnan(errors[kind]), errors[kind]))
    note = f"predicts {_TARGETS[kind]} of photos with {errors[kind]:.2f} times the error of their mean colour"
    if not errors[kind] < 1:  # nor may it be NaN
        raise MAEError(
            f"{path}: the model {note} ({errors[not kind]:.2f} for {_TARGETS[not kind]}). Either its conversion went "
            "wrong (order of queries, keys and values, heads, positions), or it has another target (--norm-pix-loss), "
            "or its training images are nothing like photos (--no-photo-check)"
        )
    if better := better_arrangement(model, norm_pix=kind):
        raise MAEError(
            f"{path}: the model {note}, and better with {better}: the program that wrote the file mixed them up"
        )
    return kind, note


def _completed(path: Path, renamed: RenamedTensors, metadata: WeightMetadata) -> WeightMetadata:
    """The metadata with the naming scheme's defaults for what is not stated."""
    norm_eps = renamed.scheme.norm_eps if metadata.norm_eps is None else metadata.norm_eps
    if norm_eps is None:
        raise UsageError(
            f"{path} has {renamed.scheme.name} tensor names but no config.json beside it, which states heads and norm "
            "epsilon; give the folder that save_pretrained wrote, or --num-heads and --norm-eps"
        )
    if (
        metadata.mean is None
        and not metadata.statistics_unknown
        and renamed.decoder
        and renamed.encoder["patch_embed.proj.weight"].shape[1] == len(IMAGENET_MEAN)
    ):
        metadata = replace(metadata, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    rows_first = renamed.scheme.rows_first if metadata.rows_first is None else metadata.rows_first
    return replace(metadata, norm_eps=norm_eps, rows_first=rows_first)


def _filled(
    path: Path, renamed: RenamedTensors, converted: Converted, licence: str | None, allow_partial: float | None
) -> tuple[PretrainedEncoder, LoadReport]:
    """A model with these weights, after checking that it has exactly such tensors."""
    kind = MASKED_AUTOENCODER if renamed.decoder else ENCODER if converted.classes is None else CLASSIFIER
    with torch.device("meta"):
        expected = build(kind, converted.config, converted.classes).state_dict()
    weights = converted.weights
    names = {*weights, *converted.unknown}
    if strange := sorted(names - expected.keys()):
        shown = ", ".join(records.shown(name) for name in strange[:_NUM_NAMED])
        raise MAEError(
            f"{path} holds {len(strange)} tensors that no such model has ({shown}): it is another architecture, or "
            "they belong to something else; save the model's tensors alone"
        )
    if allow_partial is None and (lacking := sorted(expected.keys() - names)):
        encoder = count_part("encoder.", expected, names)
        if any(name.endswith("fc_norm.weight") for name in (*converted.ignored, *renamed.elsewhere)):
            raise MAEError(
                f"{path} has its norm behind the mean of the patch tokens (fc_norm), which only classifiers have here; "
                "save it with its whole head"
            )
        raise MAEError(
            f"{path} holds {encoder.tensors} of {encoder.tensors_expected} encoder tensors; {len(lacking)} of the "
            f"model's are missing ({', '.join(lacking[:_NUM_NAMED])}); download the file again, or accept fewer with "
            "--allow-partial SHARE"
        )
    check_names(path, names, expected, allow_partial=allow_partial)
    there = {name: weight for name, weight in weights.items() if name in expected}
    for name, weight in there.items():
        if weight.shape != expected[name].shape:
            shapes = f"{list(weight.shape)}; expected {list(expected[name].shape)}"
            raise MAEError(f"{path}: {name} has shape {shapes}")
    with drawing_from(_FRESH_SEED):  # leaves the caller's random state alone
        model = build(kind, converted.config, converted.classes)
    model.load_state_dict(there, strict=False)  # their names were compared above
    ignored = sorted({*converted.ignored, *renamed.elsewhere})
    missing = tuple(name for name in expected if name not in there)
    fresh = f"; {len(missing)} of its tensors were missing and are initialised" if missing else ""
    report = LoadReport(
        encoder=count_part("encoder.", expected, set(there)),
        decoder=count_part("decoder.", expected, set(there)),
        missing=missing,
        ignored=tuple(ignored),
        probe=None,
        channels=None,
        origin={"imported_from": f"{path.name} ({renamed.scheme.name}){fresh}", "licence": licence},
        notes=converted.notes,
        classes=None if converted.classes is None else converted.classes.count,
    )
    return model.eval(), report
