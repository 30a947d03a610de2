"""A model in one file: weights as safetensors, what they are in the header; never a pickle.

The header's text under the key `mae` is a JSON record: format, kind of model, configuration, grid, names of the
channels, kind of target, where the weights come from, and a probe (see `mae.models.fingerprint`), which is recomputed
when the file is loaded.
"""

import json
import platform
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mae import records
from mae.core.kinds import MissingPackage
from mae.core.method import MethodConfig
from mae.errors import MAEError, UsageError
from mae.models.fingerprint import TOLERANCE, OutputFingerprint, config_of_file, output_fingerprint
from mae.models.kinds import (
    CLASSIFIERS,
    DETECTOR,
    KINDS,
    POOLED_PROBE,
    SEGMENTER,
    WITH_CLASSES,
    Classes,
    ObjectsFound,
    build,
    classes_of,
    kind_of,
    objects_found_by,
    rebuilt,
)
from mae.models.load_report import MAX_SHOWN, LoadReport, count_part, first_names, printable
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.randomness import drawing_from
from mae.version import __version__

FORMAT = 4
_KEY = "mae"
_ORIGIN = ("recipe", "data_source", "data_fingerprint", "init_from", "imported_from")
# A tensor takes some 150 bytes of the header, and the deepest model has 6,200 of them; the record may take twice its
# length, as text within text. The library itself would read 100 MB.
_MAX_HEADER, _MAX_RECORD, _MAX_DEPTH = 4 << 20, 1 << 20, 8
_MAX_AXES = 64  # PyTorch computes with no more, and takes a time of their square
_FRESH_SEED = 0


def model_metadata(
    model: PretrainedEncoder,
    *,
    licence: str | None = None,
    origin: Mapping[str, Any] | None = None,
    probe: OutputFingerprint | None = None,
) -> dict[str, str]:
    """What a model's file says of the model, as safetensors' header wants it: text.

    Args:
        model: a model made by `create_model` or `build_model`, an encoder alone, or a classifier.
        licence: the terms its weights come under, where they have any.
        origin: `recipe`, `data_source`, `data_fingerprint`, `init_from` and `imported_from`, JSON values, as far as
            they are known.
        probe: `output_fingerprint(model)`, made of the very weights that are stored; None: the file cannot be verified.

    Raises:
        UsageError: an unknown origin, or more than a header may hold.
    """
    config = model.config
    if config is None:
        raise ValueError("this model was put together by hand and has no configuration to store; use build_model")
    origin = origin or {}
    records.check_known(origin, _ORIGIN, what="origin of a model")
    versions = {"mae": __version__, "torch": torch.__version__, "python": platform.python_version()}
    record = {
        "format": FORMAT,
        "kind": kind_of(model),
        "config": config_of_file(config).to_json(),
        "grid": list(config.layout.grid),
        "channels": None if config.tokenizer.channels is None else list(config.tokenizer.channels),
        "target": config.target.kind if isinstance(model, MaskedAutoencoder) else None,
        "classes": None if (classes := classes_of(model)) is None else asdict(classes),
        "objects": asdict(found) if (found := objects_found_by(model)) else None,
        "origin": {**{name: origin.get(name) for name in _ORIGIN}, "versions": versions, "licence": licence},
        "probe": None if probe is None else records.to_json(probe),
    }
    text = json.dumps(record, allow_nan=False)
    if too_much := _too_much(text, record):
        raise UsageError(f"what the model's file is to say of it {too_much}; shorten its origin")
    return {_KEY: text}


def save_model(model: PretrainedEncoder, path: Path, metadata: dict[str, str]) -> None:
    """Write a model's file whole or not at all: aside, then renamed.

    Args:
        model: whose weights.
        path: the file; its folder is made if need be.
        metadata: `model_metadata` of it.

    Raises:
        MAEError: it cannot be written; nothing half-written is left.
    """
    beside = records.aside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, beside, metadata)
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise MAEError(f"{path} cannot be written: {error}") from error
    finally:  # also where it was interrupted
        with suppress(OSError):
            beside.unlink()


def save(model: PretrainedEncoder, path: str | Path, *, licence: str | None = None) -> None:
    """Write a model as a file that says what it is, which `mae.load` and every command read.

    For loops of your own: a run does so by itself, and tells its recipe and images too.

    Args:
        model: a masked autoencoder, an encoder alone or a classifier, in any mode, on any device. Floating-point values
            of any type are stored as float32.
        path: the file, such as `mine.safetensors`; one that is there is replaced.
        licence: the terms its weights come under, where they have any.

    Raises:
        UsageError: it is no model of this package, its weights are not all finite or not those that its configuration
            describes, or the path is a folder.
        ValueError: the model was put together by hand and has no configuration.
        MAEError: it cannot be written; nothing half-written is left.
    """
    if not isinstance(model, PretrainedEncoder):
        raise UsageError(f"the model is of type {type(model).__name__}; expected one of this package's")
    if Path(path).is_dir():
        raise UsageError(f"{path} is a folder; expected a file, such as {Path(path) / 'mine.safetensors'}")
    weights = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    if wrong := [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]:
        raise UsageError(f"the weights {wrong[0]} are not all finite; such a model is not saved")
    if model.config is not None:
        _check_described(model, model.config)
    if model.config is not None and any(tensor.dtype != torch.float32 for tensor in weights.values()):
        model = rebuilt(model, model.config, model.state_dict())  # a copy; positions that are fixed were rounded too
    save_model(model, Path(path), model_metadata(model, licence=licence, probe=output_fingerprint(model)))


def _check_described(model: PretrainedEncoder, config: MethodConfig) -> None:
    """Refuse a model that was changed behind its configuration: its file could not be read.

    Raises:
        UsageError: that.
    """
    with torch.device("meta"):
        expected = build(kind_of(model), config, classes_of(model), objects_found_by(model)).state_dict()
    found = model.state_dict()
    shapes, described = ({(name, each.shape) for name, each in of.items()} for of in (found, expected))
    if strange := sorted({name for name, _ in shapes ^ described}):
        raise UsageError(
            f"the model's weights are not those that its configuration describes ({first_names(strange)}), so that its "
            "file could not be read; undo what was changed, as by torch.compile of a part or LoRA that was not merged"
        )


def is_own(path: Path) -> bool:
    """Whether this package wrote a file, which may have lost its record since; False where it cannot be read."""
    try:
        check_header(path)
        with safe_open(path, framework="pt") as file:
            kernel = "encoder.patch_embed.proj.weight"  # of others it has a rank of 4
            ours = kernel in file.keys() and len(file.get_slice(kernel).get_shape()) == 2
            return ours or _KEY in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def is_classifier(path: Path, *, pools: bool = False) -> bool:
    """Whether a file of this package holds a model that names classes; False where it cannot be read.

    Args:
        path: the file.
        pools: whether it must have learned to make one vector of patch tokens, too.
    """
    kind = _kind_in(path)
    return kind in CLASSIFIERS and (not pools or kind == POOLED_PROBE)


def is_segmenter(path: Path) -> bool:
    """Whether a file of this package holds a model of the classes of pixels; False where it cannot be read."""
    return _kind_in(path) == SEGMENTER


def is_from_scratch(path: Path) -> bool:
    """Whether a file tells what it was trained on and no weights that this began with; False where it cannot be read.

    A file of `save` tells neither.
    """
    record = _record_in(path)
    told = {} if record is None else record.origin
    return told.get("data_source") is not None and told.get("init_from") is None


def _kind_in(path: Path) -> str | None:
    """The kind of the model in a file of this package; None where it cannot be read."""
    record = _record_in(path)
    return None if record is None else record.kind


def _record_in(path: Path) -> "_Record | None":
    try:
        check_header(path)
        with safe_open(path, framework="pt") as file:
            return _read_record(path, file.metadata() or {})
    except (OSError, SafetensorError, MAEError):
        return None


def is_detector(path: Path) -> bool:
    """Whether a file of this package holds a model that finds objects; False where it cannot be read."""
    return _kind_in(path) == DETECTOR


def load_model(path: Path, *, merged: bool = True) -> MaskedAutoencoder:
    """The model in a file written by a run, on the CPU, in evaluation mode; see `load_with_report`.

    Args:
        path: the file.
        merged: see `load_with_report`.

    Raises:
        UsageError: the file holds an encoder without a decoder.
        MAEError: not such a file, damaged, weights that do not fit its configuration or are not finite, or that do not
            reproduce its probe.
    """
    model = load_with_report(path, merged=merged)[0]
    if not isinstance(model, MaskedAutoencoder):
        raise UsageError(_without_decoder(path))
    return model


def load_with_report(
    path: Path, *, allow_partial: float | None = None, merged: bool = True
) -> tuple[PretrainedEncoder, LoadReport]:
    """The model in a file of this package, on the CPU, in evaluation mode, and what was loaded.

    It is a `MaskedAutoencoder` unless the file says that it is of an encoder alone or of an `ImageClassifier`.

    The file may come from anyone: its header is bounded, its configuration is checked value by value, and its tensors
    must have exactly the names, shapes and types of that configuration's model before any of them is read. Then the
    model must answer as the file's probe says.

    Args:
        path: the file.
        allow_partial: share of the encoder's values that is enough, above 0 and at most 1. Tensors that are missing,
            the decoder's too, are then freshly initialised, the same at each load, those the model does not have are
            ignored, and the probe is compared only if nothing is missing. None: every tensor, and no other.
        merged: fold what an adapter learned into the encoder's own weights, which leaves a plain model; False: as the
            run has it that trains it.

    Raises:
        UsageError: the file holds an encoder without a decoder, or a share out of range.
        MAEError: not such a file, damaged, less than is allowed, weights that do not fit its configuration or are not
            finite, or that do not reproduce its probe.
    """
    if allow_partial is not None and not 0 < allow_partial <= 1:
        raise UsageError(f"allow_partial is {allow_partial}; expected a share of the encoder above 0 and at most 1")
    record, expected, found, weights = _read(path, allow_partial=allow_partial)
    with drawing_from(_FRESH_SEED):  # the caller's numbers stay
        model = build(record.kind, record.config, record.classes, record.objects)
    model.load_state_dict(weights, strict=False)  # their names were compared above
    del weights  # before the probe takes memory of its own
    model.eval()
    report = LoadReport(
        encoder=count_part("encoder.", expected, found),
        decoder=count_part("decoder.", expected, found),
        missing=tuple(name for name in expected if name not in found),
        ignored=tuple(sorted(found - expected.keys())),
        probe=_reproduce(path, model, record) if found >= expected.keys() else None,
        channels=record.config.tokenizer.channels,
        origin=record.origin,
        classes=None if record.classes is None else record.classes.count,
    )
    if merged:
        _merge_adapter(model)
    return model, report


def _merge_adapter(model: PretrainedEncoder) -> None:
    """Make an adapted encoder plain, in place."""
    config = model.config
    if config is not None and config.adapter is not None:
        config.adapter.merge(model.encoder)
        model.config = replace(config, adapter=None)


@dataclass(frozen=True, kw_only=True)
class _Record:
    """The header's record."""

    kind: str
    config: MethodConfig
    described: Mapping[str, Any]  # the configuration as it stands there, without options that have come since
    origin: Mapping[str, Any]
    probe: OutputFingerprint | None
    classes: Classes | None = None
    objects: ObjectsFound | None = None


def _read(
    path: Path, *, allow_partial: float | None
) -> tuple[_Record, Mapping[str, Tensor], set[str], dict[str, Tensor]]:
    """The record, the model's tensors without memory, the file's names, and the tensors of both."""
    try:
        check_header(path)
        with safe_open(path, framework="pt") as file:
            record = _read_record(path, file.metadata() or {})
            with torch.device("meta"):
                expected = build(record.kind, record.config, record.classes, record.objects).state_dict()
            found = set(file.keys())
            check_names(path, found, expected, allow_partial=allow_partial)
            loaded = [name for name in expected if name in found]
            _check_shapes(path, file, {name: expected[name] for name in loaded})
            weights = {name: file.get_tensor(name) for name in loaded}
    except (OSError, SafetensorError) as error:
        raise MAEError(f"{path} cannot be read as a safetensors file: {error}") from error
    for name, tensor in weights.items():
        if not bool(tensor.isfinite().all()):
            raise MAEError(f"{path}: tensor {name} holds values that are not finite; the file is damaged")
    return record, expected, found, weights


def check_header(path: Path) -> None:
    """Refuse a header that is too long, two entries of one name, of which readers take either, and too many axes."""
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith((b"PK\x03\x04", b"\x80\x02")):
            raise SafetensorError("it is a file of torch.save; 'mae import' brings such weights in")
        length = int.from_bytes(start, "little")
        if length > _MAX_HEADER:
            raise SafetensorError(f"its header claims {length:,} bytes; expected at most {_MAX_HEADER:,}")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SafetensorError(f"its header is no valid JSON: {error}") from error
    entries = header.values() if isinstance(header, dict) else ()
    shapes = [entry.get("shape") for entry in entries if isinstance(entry, dict)]
    if any(isinstance(shape, list) and len(shape) > _MAX_AXES for shape in shapes):
        raise SafetensorError(f"a tensor in it has more than {_MAX_AXES} axes")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it says {twice[:MAX_SHOWN]!r} twice")
    return made


def _read_record(path: Path, metadata: Mapping[str, str]) -> _Record:
    try:
        text = metadata[_KEY]
        record: Any = json.loads(text[: _MAX_RECORD + 1], object_pairs_hook=_unique)
        if too_much := _too_much(text, record):
            raise ValueError(f"its record {too_much}")
        if record["format"] != FORMAT:
            raise MAEError(
                f"{path} is of format {records.shown(record['format'])}; this version of mae reads format {FORMAT}"
            )
        config = MethodConfig.from_json(record["config"])
        kind = record["kind"]
        if kind not in KINDS:
            raise ValueError(f"its kind is {records.shown(kind)}; expected one of {', '.join(KINDS)}")
        if (grid := record["grid"]) != list(config.layout.grid):
            raise ValueError(f"its grid is {records.shown(grid)}; its configuration makes {list(config.layout.grid)}")
        names, probe = None if config.tokenizer.channels is None else list(config.tokenizer.channels), record["probe"]
        if record["channels"] != names:
            raise ValueError(f"its channels are {records.shown(record['channels'])}; its configuration names {names}")
        if not isinstance(licence := record["origin"].get("licence"), str | None):
            raise ValueError(f"its licence is {records.shown(licence)}; expected text")
        return _Record(
            kind=kind,
            config=config,
            described=record["config"],
            origin=dict(record["origin"]),
            probe=None if probe is None else records.from_json(OutputFingerprint, probe, what="probe's"),
            classes=records.from_json(Classes, record["classes"], what="classes'") if kind in WITH_CLASSES else None,
            objects=records.from_json(ObjectsFound, record["objects"], what="objects'") if kind == DETECTOR else None,
        )
    except MissingPackage as error:
        raise UsageError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise MAEError(
            f"{path} says nothing valid of its model in its header ({error!r}); expected a file written by mae "
            "('mae import' brings others in)"
        ) from error


def _too_much(text: str, record: Any) -> str:
    """What is too large about a record; an empty string where nothing is."""
    if len(text) > _MAX_RECORD:
        return f"has {len(text):,} characters; at most {_MAX_RECORD:,} are read"
    level, depth = [record], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            return f"is nested more than {_MAX_DEPTH} deep"
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [value for values in inner for value in values]
    return ""


def check_names(path: Path, found: set[str], expected: Mapping[str, Tensor], *, allow_partial: float | None) -> None:
    """Refuse a file that lacks tensors of a model or holds others, unless enough of the encoder is there.

    Raises:
        UsageError: all that lacks is the decoder.
        MAEError: something else lacks or is too much, or less is there than is allowed.
    """
    if found == expected.keys():
        return
    missing, extra = sorted(expected.keys() - found), sorted(found - expected.keys())
    encoder = count_part("encoder.", expected, found)
    if allow_partial is not None:
        if (share := encoder.parameters / encoder.parameters_expected) < allow_partial:
            raise MAEError(
                f"{path} holds {encoder.in_tensors} encoder tensors, {share:.1%} of the encoder's values; "
                f"allow_partial asks for {allow_partial:.1%}: missing are {first_names(missing)}"
            )
        return
    decoder = sorted(name for name in expected if name.startswith("decoder."))
    if decoder and missing == decoder:
        tensors = (
            f"{encoder.tensors} of {encoder.tensors_expected} encoder tensors, 0 of {len(decoder)} decoder tensors"
        )
        raise UsageError(_without_decoder(path, tensors))
    raise MAEError(
        f"{path} does not hold the tensors of its own configuration: {len(missing)} missing "
        f"({first_names(missing) or 'none'}), {len(extra)} extra ({first_names(extra) or 'none'}); get the file anew, "
        "or take what is there by load_with_report(…, allow_partial=…)"
    )


def _without_decoder(path: Path, tensors: str = "") -> str:
    there = f" ({tensors})" if tensors else ""
    return (
        f"{path} holds an encoder only{there}; a masked autoencoder needs both, and reconstruction its decoder: use a "
        "checkpoint that pre-training wrote"
    )


def _check_shapes(path: Path, file: Any, expected: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        there = file.get_slice(name)
        dtype = "I64" if tensor.dtype == torch.int64 else "F32"  # a norm's count of batches is an integer
        found_as, expected_as = (there.get_dtype(), list(there.get_shape())), (dtype, list(tensor.shape))
        if found_as != expected_as:
            raise MAEError(f"{path}: tensor {name} is {found_as}; expected {expected_as}")


def _reproduce(path: Path, model: PretrainedEncoder, record: _Record) -> float | None:
    """The largest difference between the file's probe and the model's; None without one.

    Raises:
        MAEError: it is not the same model.
    """
    if (stored := record.probe) is None:
        return None
    found = output_fingerprint(model, described=record.described)
    if found is None or found.image_sha256 != stored.image_sha256:
        raise MAEError(
            f"{path}: the probe in its header is of another configuration than the one beside it, so the header was "
            "changed after it was written; get the file anew"
        )
    if (difference := stored.difference(found)) > TOLERANCE:
        raise MAEError(
            f"{path}: the loaded model does not reproduce the probe in its file (largest difference {difference:.1e} "
            f"of the largest value, rounding makes {TOLERANCE:.0e} at most): its tensors were changed after it was "
            "written, or this code computes something else with them (order of queries and keys, heads, positions, "
            "the norms' eps); get the file anew, or load it with the versions that wrote it: "
            f"{_versions(record.origin.get('versions'))}"
        )
    return difference


def _versions(stored: Any) -> str:
    """`mae 0.1.0, torch 2.15.0`; what a file of another origin may hold there instead, as it is."""
    if not isinstance(stored, dict):
        return "not known" if stored is None else records.shown(stored)
    return printable(", ".join(f"{name} {version}" for name, version in stored.items()))
