"""A model card from what a model's file and its run say of themselves, and from nothing else."""

import re
from collections.abc import Iterator, Mapping
from math import nan
from pathlib import Path
from typing import Any

from mae.errors import UsageError
from mae.evaluation.extractors import model_extractor
from mae.evaluation.finetune import CLASSIFIER_FILE
from mae.evaluation.run import digest_of
from mae.interop.catalogue import public_weights
from mae.models.config import ModelConfig
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.models.storage import Classes, LoadReport, classes_of
from mae.records import read_json
from mae.training.run_folder import RunFolder
from mae.training.run_records import read_image_facts, read_summary

_NOT_SAID = "not said"
_UNITS = {
    "uint8": "trained on uint8 files; value / 255",
    "uint16": "trained on uint16 files; value / 65535",
    "float32": "trained on float32 files; the value itself",
    None: "in [0, 1]; type of the files not said",
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
    """What the model is, what it was trained on and how, what it reached, what it cannot do, and its terms; Markdown.

    Args:
        model: what is described.
        report: how it was loaded.
        path: where it was loaded from; of a run folder its records are told too.
        licence: terms the weights come under; None: not known.
        library: that the card is for, such as `timm`; None for none.
        usage: Python that reads it.
        whole: whether the decoder, where there is one, goes with it.
    """
    config = model.config
    assert config is not None  # it was loaded by one
    named = "other" if licence and not _LICENCE_NAME.fullmatch(licence) else licence
    head = {"license": named and named.lower(), "library_name": library}
    decoder = model if whole and isinstance(model, MaskedAutoencoder) else None
    classes = classes_of(model)
    is_mae = _is_mae(model, report)
    encoder = "the encoder of a masked autoencoder" if is_mae else "a vision transformer's encoder"
    title = encoder.capitalize() if decoder is None else "A masked autoencoder"
    if classes is not None:
        title = f"An image classifier on {encoder}"
    task = "image-feature-extraction" if classes is None else "image-classification"
    tags = ["masked-autoencoder", task] if is_mae else [task]
    lines = [
        "---",
        *(f"{name}: {value}" for name, value in head.items() if value is not None),
        f"tags: [{', '.join(tags)}]",
        "---",
        "",
        f"# {title}",
        "",
        *_table("", "", _what(model, config)),
        *_table("", "", [] if decoder is None else _decoder(config)),
        *_table("", "", [] if classes is None else _head(classes)),
        "## Training",
        "",
        *_table("", "", _training(report, path)),
        "## Results",
        "",
        *(_table("protocol, images, features", "top-1", list(_results(model, path))) or ["None are recorded.", ""]),
        "## Limits",
        "",
        *_limits(config, classes, is_mae=is_mae),
        "",
        "## Use",
        "",
        "```python",
        usage,
        "```",
        "",
        f"Licence of the weights: {_cell(licence or _NOT_SAID)}.",
        "",
    ]
    return "\n".join(lines)


Rows = list[tuple[str, str]]


def _table(first: str, second: str, rows: Rows) -> list[str]:
    if not rows:
        return []
    cells = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows]
    return [f"| {first} | {second} |", "| --- | --- |", *cells, ""]


def _cell(text: str) -> str:
    """Text that may come from a file, in one line of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _is_mae(model: PretrainedEncoder, report: LoadReport) -> bool:
    """Whether the encoder is known to be a masked autoencoder's; others' weights do not tell how they came about."""
    source = report.origin.get("imported_from")
    is_known = source is None or str(source).partition(",")[0] in public_weights()
    return is_known or isinstance(model, MaskedAutoencoder)


def _what(model: PretrainedEncoder, config: ModelConfig) -> Rows:
    parameters = sum(weight.numel() for weight in model.encoder.parameters())
    rows = [
        ("images", f"{config.img_size[0]} x {config.img_size[1]} pixels, {config.in_chans} channels"),
        ("patches", f"{config.patch_size[0]} x {config.patch_size[1]} pixels"),
        ("encoder", f"{config.embed_dim} wide, {config.depth} blocks, {config.num_heads} heads"),
        ("its parameters", f"{parameters:,}"),
        ("pixel values", _UNITS[config.pixel_dtype]),
        ("channel means", _NOT_SAID if config.mean is None else ", ".join(f"{value:g}" for value in config.mean)),
        ("channel deviations", _NOT_SAID if config.std is None else ", ".join(f"{value:g}" for value in config.std)),
    ]
    if config.channels is not None:
        rows.append(("channels", ", ".join(config.channels)))
    return rows


def _decoder(config: ModelConfig) -> Rows:
    width, depth, heads = config.decoder_embed_dim, config.decoder_depth, config.decoder_num_heads
    target = "patches standardised one by one" if config.norm_pix_loss else "plain pixels"
    return [
        ("decoder", f"{width} wide, {depth} blocks, {heads} heads"),
        ("predicts", f"{target}, {config.mask_ratio:.0%} of the patches hidden"),
    ]


def _head(classes: Classes) -> Rows:
    rows = [("classes", f"{classes.count:,}")]
    if classes.names:
        more = ", ..." if len(classes.names) > _SHOWN_CLASSES else ""
        rows.append(("their names", ", ".join(classes.names[:_SHOWN_CLASSES]) + more))
    return rows


def _training(report: LoadReport, path: Path) -> Rows:
    """What the file says of its origin and, of a run, what the run says; of a path its last part alone."""
    origin = report.origin
    source = origin.get("data_source")
    rows = [
        ("recipe", str(origin.get("recipe") or _NOT_SAID)),
        ("images from", Path(str(source)).name if source else _NOT_SAID),
        ("begun with", str(origin.get("init_from") or "")),
        ("imported from", str(origin.get("imported_from") or "")),
    ]
    run = RunFolder(path)
    if run.holds_run and run.data.exists():
        rows.append(("images", f"{read_image_facts(run.data, needed=('images',))['images']:,}"))
    if run.holds_run and run.summary.exists():
        summary = read_summary(run.summary, needed=("samples", "steps", "loss", "yardsticks"))
        rows.append(("images seen", f"{summary['samples']:,} in {summary['steps']:,} steps"))
        baseline = summary["yardsticks"].get("mean_of_visible", nan)
        rows.append(("loss", f"{summary['loss']:.4g}, of the mean predictor {baseline:.4g}"))
    return [(name, value) for name, value in rows if value]


def _results(model: PretrainedEncoder, path: Path) -> Iterator[tuple[str, str]]:
    """Accuracies that were recorded beside a run, of these very weights."""
    try:
        weights = digest_of(model_extractor(model, name="model").identity)
    except UsageError:  # without statistics nothing was ever evaluated
        return
    for file in sorted((_run_of(path) / "evaluation").glob("*.json")):
        record = read_json(file)
        result = record.get("result")
        if not isinstance(result, Mapping):
            continue
        training = result.get("training")
        is_trained_there = isinstance(training, Mapping) and Path(str(training.get("folder"))).name == path.parent.name
        if record.get("weights") != weights and not is_trained_there:
            continue
        source = Path(str(record["data"].get("source"))).name
        for features, value in _accuracies(result.get("this model", result)):
            yield f"{record['protocol']}, {source}, {features}", f"{value:.1%}"


def _run_of(path: Path) -> Path:
    """The run that weights belong to: those of a fine-tuning lie three folders below it."""
    return path.parents[3] if path.name == CLASSIFIER_FILE and len(path.parents) > 3 else path


def _accuracies(found: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every `top1` in a record, with what stands above it."""
    for key, value in found.items() if isinstance(found, Mapping) else ():
        if key == "top1" and isinstance(value, int | float):
            yield name or "whole model", float(value)
        else:
            yield from _accuracies(value, f"{name} {key}".strip())


def _limits(config: ModelConfig, classes: Classes | None, *, is_mae: bool) -> list[str]:
    trained = "It was trained without labels and" if is_mae else "How it was trained is not said. It"
    lines = [
        f"- {trained} names no classes; its features need a head of yours."
        if classes is None
        else "- It names one of its classes for every image, also for one that shows none of them.",
        "- What it learned is what its images show. On images of another kind try it before you trust it.",
    ]
    if config.pos_embed == "learned":
        lines.append(f"- Its positions know images of {config.img_size[0]} x {config.img_size[1]} pixels alone.")
    if config.mean is None:
        lines.append("- How its images were normalised is not known.")
    return lines
