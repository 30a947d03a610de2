"""A model card, from what the model's file and its run record and nothing else."""

import re
from collections.abc import Iterator, Mapping
from math import nan
from pathlib import Path
from typing import Any

from mae.core.method import MethodConfig
from mae.errors import UsageError
from mae.evaluation.common.finetuning import CLASSIFIER_FILE, DETECTOR_FILE, SEGMENTER_FILE
from mae.evaluation.extractors.extractor import model_extractor
from mae.evaluation.protocol import THIS_MODEL, EvaluationProtocol
from mae.evaluation.protocols import PROTOCOLS
from mae.evaluation.run import digest_of
from mae.interop.imports.catalogue import public_weights
from mae.models.kinds import classes_of, objects_found_by
from mae.models.load_report import LoadReport
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.records import read_json
from mae.training.run_folder import RunFolder
from mae.training.run_records import read_image_facts, read_summary

Rows = list[tuple[str, str]]

_UNKNOWN = "unknown"
_UNITS = {
    "uint8": "trained on uint8 files; value / 255",
    "uint16": "trained on uint16 files; value / 65535",
    "float32": "trained on float32 files; the value itself",
    None: "in [0, 1]; type of the files unknown",
}
_TASKS = {
    "": "image-feature-extraction",
    "image classifier": "image-classification",
    "image segmenter": "image-segmentation",
    "object detector": "object-detection",
}
_SHOWN_CLASSES = 20
_LICENCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")


def model_card(
    model: PretrainedEncoder,
    report: LoadReport,
    *,
    path: Path,
    licence: str | None,
    library: str | None,
    usage: str,
    whole: bool,
) -> str:
    """Markdown that says what the model is, how it was trained, its results, its limits and its licence.

    Args:
        model: the model to describe.
        report: how it was loaded.
        path: where it was loaded from; a run folder's records are included.
        licence: of the weights; None: unknown.
        library: that reads the export, such as `timm`; None: this package.
        usage: Python that loads it.
        whole: whether the export holds the decoder, if there is one.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here: imported only where a card is written

    config = model.config
    assert config is not None  # it was loaded by one
    is_mae = _is_mae(model, report)
    has_decoder = whole and isinstance(model, MaskedAutoencoder)
    encoder = "the encoder of a masked autoencoder" if is_mae else "a vision transformer's encoder"
    title = "A masked autoencoder" if has_decoder else encoder.capitalize()
    kind = _kind(model)
    cards = Environment(
        loader=PackageLoader("mae.interop.exports", "."),
        autoescape=False,  # Markdown: what comes from files passes through the filter `cell`
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    cards.filters["cell"] = _cell
    return cards.get_template("card.md.j2").render(
        licence_id=_licence_id(licence),
        library=library,
        tags=["masked-autoencoder", _TASKS[kind]] if is_mae else [_TASKS[kind]],
        title=f"An {kind} on {encoder}" if kind else title,
        model=_model(model, config),
        decoder=_decoder(config) if has_decoder else [],
        head=_head(model),
        training=_training(report, path),
        results=list(_results(model, path)),
        limits=_limits(config, kind, is_mae=is_mae),
        usage=usage,
        licence=licence or _UNKNOWN,
    )


def _kind(model: PretrainedEncoder) -> str:
    """What a head makes of the encoder; empty without one."""
    if objects_found_by(model) is not None:
        return "object detector"
    classes = classes_of(model)
    return "" if classes is None else "image classifier" if classes.head is None else "image segmenter"


def _licence_id(licence: str | None) -> str | None:
    """The licence as the card's metadata name it, where it can be no more than a name."""
    return "other" if licence and not _LICENCE_NAME.fullmatch(licence) else licence and licence.lower()


def _cell(text: str) -> str:
    """Text that may come from a file, safe in one line of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _is_mae(model: PretrainedEncoder, report: LoadReport) -> bool:
    """Whether the encoder is known to be a masked autoencoder's; imported weights do not say how they were trained."""
    source = report.origin.get("imported_from")
    is_known = source is None or str(source).partition(",")[0] in public_weights()
    return is_known or isinstance(model, MaskedAutoencoder)


def _model(model: PretrainedEncoder, config: MethodConfig) -> Rows:
    parameters = sum(weight.numel() for weight in model.encoder.parameters())
    rows = [
        ("images", f"{config.layout.size[0]} x {config.layout.size[1]} pixels, {config.layout.channels} channels"),
        ("patches", f"{config.layout.patch[0]} x {config.layout.patch[1]} pixels"),
        ("encoder", _sizes(config.encoder)),
        ("encoder parameters", f"{parameters:,}"),
        ("pixel values", _UNITS[config.tokenizer.pixel_dtype]),
        (
            "channel means",
            _UNKNOWN if config.tokenizer.mean is None else ", ".join(f"{value:g}" for value in config.tokenizer.mean),
        ),
        (
            "channel stds",
            _UNKNOWN if config.tokenizer.std is None else ", ".join(f"{value:g}" for value in config.tokenizer.std),
        ),
    ]
    if config.tokenizer.channels is not None:
        rows.append(("channels", ", ".join(config.tokenizer.channels)))
    if config.tokenizer.nodata is not None:
        rows.append(("no data", f"{config.tokenizer.nodata} in the files; NaN in what the model is given"))
    return rows


def _decoder(config: MethodConfig) -> Rows:
    target = config.target.kind.replace("_", " ")
    if getattr(config.target, "norm", False):
        target = f"per-patch normalised {target}"
    return [
        ("decoder", _sizes(config.decoder)),
        ("predicts", f"{target}, {config.mask.ratio:.0%} of the patches masked"),
    ]


def _sizes(network: Any) -> str:
    """Width, depth and heads of an encoder or a decoder as far as its kind has them; of others the kind."""
    units = {"embed_dim": "wide", "depth": "blocks", "num_heads": "heads"}
    own = [f"{getattr(network, name)} {unit}" for name, unit in units.items() if hasattr(network, name)]
    return ", ".join(own) or network.kind


def _head(model: PretrainedEncoder) -> Rows:
    classes, objects = classes_of(model), objects_found_by(model)
    if classes is None and objects is None:
        return []
    names = classes.names if classes is not None else objects.names if objects is not None else ()
    rows = [("classes", f"{len(names) if classes is None else classes.count:,}")]
    if names:
        more = ", ..." if len(names) > _SHOWN_CLASSES else ""
        rows.append(("class names", ", ".join(names[:_SHOWN_CLASSES]) + more))
    if objects is not None:
        rows.append(("looks at", f"images resized to fit into {objects.head.size} x {objects.head.size} pixels"))
    return rows


def _training(report: LoadReport, path: Path) -> Rows:
    """What the file says of its origin, and what the run recorded; of paths only the last component."""
    origin = report.origin
    source = origin.get("data_source")
    rows = [
        ("recipe", str(origin.get("recipe") or _UNKNOWN)),
        ("images from", Path(str(source)).name if source else _UNKNOWN),
        ("initial weights", str(origin.get("init_from") or "")),
        ("imported from", str(origin.get("imported_from") or "")),
    ]
    run = RunFolder(path)
    if run.holds_run and run.data.exists():
        rows.append(("images", f"{read_image_facts(run.data, needed=('images',))['images']:,}"))
    if run.holds_run and run.summary.exists():
        summary = read_summary(run.summary, needed=("samples", "steps", "loss", "baselines"))
        rows.append(("images seen", f"{summary['samples']:,} in {summary['steps']:,} steps"))
        baseline = summary["baselines"].get("mean_of_visible", nan)
        rows.append(("loss", f"{summary['loss']:.4g}, {baseline:.4g} for the mean predictor"))
    return [(name, value) for name, value in rows if value]


def _results(model: PretrainedEncoder, path: Path) -> Iterator[tuple[str, str]]:
    """What stands for exactly these weights in the records beside the run."""
    try:
        weights = digest_of(model_extractor(model, name="model").identity)
    except UsageError:  # without statistics it was never evaluated
        return
    protocols = {protocol.name: protocol for protocol in PROTOCOLS}
    for file in sorted((_run_of(path) / "evaluation").glob("*.json")):
        record = read_json(file)
        result = record.get("result")
        if not isinstance(result, Mapping):
            continue
        training = result.get("training")
        is_trained_there = isinstance(training, Mapping) and Path(str(training.get("folder"))).name == path.parent.name
        # Trained from scratch, the evaluated weights gave no more than their shape.
        is_of_these = record.get("weights") == weights and not record["options"].get("from_scratch")
        if not (is_of_these or is_trained_there):
            continue
        source = Path(str(record["data"].get("source"))).name
        key, measure = protocols.get(record["protocol"], EvaluationProtocol).measure
        for features, value in _measured(result.get(THIS_MODEL, result), key):
            yield f"{file.stem}, {source}, {features}", f"{measure} {value:.1%}"


def _run_of(path: Path) -> Path:
    """The run that the weights belong to: fine-tuned ones lie three folders below it."""
    return (
        path.parents[3]
        if path.name in (CLASSIFIER_FILE, SEGMENTER_FILE, DETECTOR_FILE) and len(path.parents) > 3
        else path
    )


def _measured(numbers: Mapping[str, Any], key: str, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number of that key, with the keys above it; nothing below it, as where a class is called so."""
    if key in numbers:
        if numbers[key] is not None:  # nothing was there to be measured
            yield name or "whole model", float(numbers[key])
        return
    for above, inner in numbers.items():
        if isinstance(inner, Mapping):
            yield from _measured(inner, key, f"{name} {above}".strip())


def _limits(config: MethodConfig, kind: str, *, is_mae: bool) -> list[str]:
    trained = "It was trained without labels and" if is_mae else "How it was trained is unknown. It"
    lines = [
        {
            "": f"{trained} predicts no classes; its features need a head of your own.",
            "image classifier": "It predicts one of its classes for every image, including those that show none of "
            "them.",
            "image segmenter": "It predicts one of its classes for every pixel, including those that show none of "
            "them.",
            "object detector": "It finds objects of its classes alone, and may find them where none are.",
        }[kind],
        "Its features suit images like those it was trained on. Test it before you rely on it for other kinds.",
    ]
    if config.encoder.pos_embed == "learned" and kind != "object detector":  # which resamples it
        lines.append(
            f"Its learned position embedding is for images of {config.layout.size[0]} x {config.layout.size[1]} "
            "pixels only."
        )
    if config.tokenizer.mean is None:
        lines.append("How its training images were normalised is unknown.")
    return lines
