"""What a run says of itself: the header before it, the summary after it."""

import os
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console

from mae.contention import SPIN_COUNT, WAIT_POLICY
from mae.core.component import options_of
from mae.core.method import default_kind
from mae.data.dataset.images import ImageSet
from mae.evaluation.common.baselines import TrivialBaselines
from mae.evaluation.common.capabilities import predicts_pixels
from mae.meanings import meaning_of
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.pretraining.build import num_workers
from mae.pretraining.resolve import RunContext
from mae.pretraining.watch.online_eval import steps_between_looks, summarise_monitoring
from mae.recipes.reference import reference_for
from mae.records import write_json
from mae.report.figures.curves import draw_curve
from mae.report.terminal.console import NO_BASELINE, against, duration, show_table
from mae.text import by_channel
from mae.training.checkpoint import find_checkpoint
from mae.training.engine import Trainer
from mae.training.log import loss_rows, read_rows
from mae.training.run_folder import RunFolder

_SHOWN_UNREADABLE = 5
_SHOWN_CHANNELS = 16


def show_header(
    console: Console,
    prepared: RunContext,
    model: MaskedAutoencoder,
    trainer: Trainer,
    baselines: TrivialBaselines,
    *,
    compilation: str,
) -> None:
    """Say what will happen before it does; of `compilation` what is told, if anything."""
    going_on = f", going on from step {trainer.step}" if trainer.step else ""
    show_table(
        console,
        f"Pre-training in {prepared.folder.root}{going_on}",
        [
            ("model", _describe_model(prepared, model)),
            *([("begun with", _describe_start(prepared))] if "start" in prepared.found else []),
            ("images", _describe_images(prepared)),
            ("held out", _describe_held_out(prepared)),
            ("statistics", _describe_statistics(prepared)),
            ("crops", _describe_crops(prepared)),
            ("objective", _describe_objective(prepared, model)),
            *([] if prepared.method.teacher is None else [("teacher", _describe(prepared.method.teacher))]),
            ("batch", _describe_batch(prepared)),
            ("rate", _describe_rate(prepared, trainer)),
            ("length", f"{prepared.total_steps:,} steps, {prepared.steps_per_epoch:,} an epoch"),
            ("compute", _describe_compute(prepared, trainer)),
            *([("compiled", compilation)] if compilation else []),
            ("watched", _describe_watching(prepared)),
            ("baselines", _describe_baselines(prepared, baselines)),
        ],
    )


def _describe_model(prepared: RunContext, model: MaskedAutoencoder) -> str:
    encoder, decoder = (sum(p.numel() for p in part.parameters()) / 1e6 for part in (model.encoder, model.decoder))
    config = prepared.config
    told = f"{config.model}: encoder {encoder:.2f} M parameters, decoder {decoder:.2f} M"
    method = prepared.method
    if method.decoder.kind != default_kind("decoder"):
        told += f", decoder {method.decoder.kind}"
    if method.adapter is not None:
        trained = sum(p.numel() for p in model.encoder.parameters() if p.requires_grad) / 1e6
        told += f"; of the encoder {trained:.2f} M are trained (adapter {method.adapter.kind})"
    return told + ("" if method.mask.predicts_all else ", some of the masked patches predicted")


def _describe_start(prepared: RunContext) -> str:
    start = prepared.found["start"]
    fresh = "" if start["fresh"] is None else f"; with {start['fresh']}"
    licence = "" if start["licence"] is None else f"; licence: {start['licence']}"
    return f"{prepared.config.init_from}: {start['loaded']}{fresh}{licence}"


def _describe_images(prepared: RunContext) -> str:
    images = prepared.images
    sizes = " to ".join(dict.fromkeys("x".join(map(str, size)) for size in images.size_range()))
    lines = [f"{len(images):,} of {sizes} pixels, {_describe_channels(images)}; {prepared.note}"]
    if images.nodata is not None:
        lines.append(f"{images.nodata} in the files means no data: left out of statistics and loss")
    lines += images.left_out
    if images.unreadable:
        lines += _describe_unreadable(images.unreadable)
    return "\n".join(lines)


def _describe_unreadable(unreadable: Sequence[str]) -> list[str]:
    return [f"{len(unreadable)} unreadable; others are shown in their place:", *unreadable[:_SHOWN_UNREADABLE]]


def _describe_channels(images: ImageSet) -> str:
    count = f"{images.channels} channel{'' if images.channels == 1 else 's'}"
    if images.channel_names is None:
        return count
    more = ", ..." if images.channels > _SHOWN_CHANNELS else ""
    return f"{count} ({', '.join(images.channel_names[:_SHOWN_CHANNELS])}{more})"


def _describe_held_out(prepared: RunContext) -> str:
    count, share = len(prepared.held_out), prepared.config.data.held_out
    if count:
        return f"{count:,} of them, never trained on"
    return "none" if share == 0 else f"none: {share:.3g} of them is too few to tell anything"


def _describe_statistics(prepared: RunContext) -> str:
    mean, std = (by_channel(values.tolist(), digits=3) for values in prepared.statistics())
    return f"mean {mean}, std {std} (of {prepared.config.data.statistics})"


def _describe_crops(prepared: RunContext) -> str:
    config = prepared.method
    (height, width), (rows, columns) = config.layout.size, config.layout.grid
    data = prepared.config.data
    colours = f", colour jitter {data.color_jitter:g}" if data.color_jitter else ""
    colours += f", {data.grayscale:.3g} of them grey" if data.grayscale else ""
    decoded = ", of JPEGs decoded at a reduced scale" if data.reduced_decoding else ""
    shape = f"{height}x{width} pixels in a grid of {rows}x{columns} patches"
    return f"{shape}{colours}{decoded}, {_describe_ratio(prepared)}"


def _describe_ratio(prepared: RunContext) -> str:
    config = prepared.config
    start, end = (f"{100 * ratio:.3g}%" for ratio in (config.optim.mask_start, prepared.method.mask.ratio))
    if config.optim.mask_schedule == "const":
        return f"{end} masked"
    how = "drawn for each batch"
    if config.optim.mask_schedule != "random":
        how = f"{config.optim.mask_schedule} over {config.optim.mask_warmup:g} epochs"
    return f"{start} to {end} masked, {how}"


def _describe_objective(prepared: RunContext, model: MaskedAutoencoder) -> str:
    """Target and terms, each with its weight."""
    config = prepared.method
    views = prepared.compared_views
    images = f" over {prepared.part_size * prepared.world.size // views} images"
    images += "" if views == 1 else f" in {views} views"
    terms = [f"{term.weight:g} x {term.kind}{images if term.reads_batch else ''}" for term in config.terms]
    return f"target: {_describe(config.target)}; loss: " + " + ".join([f"{config.loss.kind} reconstruction", *terms])


def _describe(component: Any) -> str:
    """Its kind, and in brackets its options, those that were measured among them."""
    values = {name: _told(value) for name, value in options_of(component).items() if value is not None}
    options = ", ".join(f"{name} {value}" for name, value in values.items())
    return component.kind + (f" ({options})" if options else "")


def _told(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _describe_baselines(prepared: RunContext, baselines: TrivialBaselines) -> str:
    told = ", ".join(f"{name} {loss:.4f}" for name, loss in baselines.as_dict().items())
    return f"{told} (of the teacher before the first step)" if prepared.method.target_changes else told


def _describe_batch(prepared: RunContext) -> str:
    config = prepared.config
    parts = (
        f"{prepared.world.size} process(es) x {config.machine.accumulate} micro-batch(es) x {prepared.part_size} images"
    )
    views = "" if config.data.repeated_aug == 1 else f", {config.data.repeated_aug} crops of each image"
    return f"{config.optim.batch_size} = {parts}{views}"


def _describe_rate(prepared: RunContext, trainer: Trainer) -> str:
    schedule, config = trainer.settings.schedule, prepared.config
    rule = "" if config.optim.lr is not None else f" ({config.optim.base_lr:g} for each 256 of the batch)"
    warmup = schedule.warmup_samples / trainer.settings.batch_size
    clip = "no clipping" if config.optim.clip_grad is None else f"gradients clipped at {config.optim.clip_grad:g}"
    return (
        f"{config.optim.optimizer}, peak {schedule.peak:.3g}{rule}, {warmup:.0f} warm-up steps, then a cosine to "
        f"{schedule.floor:g}; {clip}"
    )


def _describe_compute(prepared: RunContext, trainer: Trainer) -> str:
    compiled = ", compiled" if prepared.config.machine.compile == "on" else ""
    threads = _describe_threads() if prepared.device.type == "cpu" else ""
    loading = f"{num_workers(prepared)} loader process(es)"
    return f"{prepared.device}{threads}, {trainer.settings.precision}{compiled}; {loading}"


def _describe_threads() -> str:
    """How many threads compute, and what the environment says of how they wait for each other."""
    told = [f"{name}={os.environ[name]}" for name in (WAIT_POLICY, SPIN_COUNT) if name in os.environ]
    return f", {torch.get_num_threads()} thread(s)" + (f" ({', '.join(told)})" if told else "")


def _describe_watching(prepared: RunContext) -> str:
    lent = prepared.config.evaluation.monitor
    evaluated = "" if lent is None else f"; k-NN and probe on {lent}, looked at alone"
    every = f"label-free numbers, every {steps_between_looks(prepared):,} steps and at both ends{evaluated}"
    return f"{every}; an arrow says which way is better"


def summarise(prepared: RunContext, trainer: Trainer, baselines: TrivialBaselines) -> dict[str, Any]:
    """The run in numbers, written to `summary.json`; loss and terms are means over the last twentieth of the run.

    TrivialBaselines stand beside the reconstruction term: they know of no other.
    """
    folder = prepared.folder
    every_row = read_rows(folder.metrics)
    rows = loss_rows(every_row)
    last = rows[-max(1, len(rows) // 20) :]
    terms = {name: sum(row["terms"][name] for row in last) / len(last) for name in last[0]["terms"]}
    baseline = baselines.mean_of_visible
    reconstruction = [{"samples": row["samples"], "loss": row["terms"]["reconstruction"]} for row in rows]
    title = f"{prepared.config.model}" if len(terms) == 1 else f"{prepared.config.model}, reconstruction term"
    known = reference_for(prepared.config)
    draw_curve(
        reconstruction,
        baselines=baselines.as_dict(),
        path=folder.curve,
        title=title,
        reference=None if known is None else known.line(trainer.samples),
    )
    newest = find_checkpoint(folder.checkpoints)
    summary = {
        "model": prepared.config.model,
        "source": prepared.config.source,
        "steps": trainer.step,
        "samples": trainer.samples,
        "loss": sum(row["loss"] for row in last) / len(last),
        "terms": terms,
        "baselines": baselines.as_dict(),
        "loss_over_mean_predictor": terms["reconstruction"] / baseline if baseline >= NO_BASELINE else None,
        "evaluation": summarise_monitoring(every_row),
        "seconds": trainer.seconds,
        "images_per_second": _speed(rows),
        "unreadable": list(prepared.images.unreadable),
        "checkpoint": str(newest.relative_to(folder.root)) if newest else None,
        "panel": str(folder.panel(trainer.step).relative_to(folder.root)) if predicts_pixels(prepared.method) else None,
        "curve": str(folder.curve.relative_to(folder.root)),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_json(folder.summary, summary)
    return summary


def _describe_features(evaluation: Mapping[str, Mapping[str, float | None]]) -> list[tuple[str, str]]:
    """What was watched, by names in words, each with an arrow to where it is better."""
    named = ((meaning_of(name), watched) for name, watched in evaluation.items())
    return [(f"{meaning.name} {meaning.arrow}".strip(), _describe_watched(watched)) for meaning, watched in named]


def _describe_watched(watched: Mapping[str, float | None]) -> str:
    """What was watched of the features: where it began, where it ended, and the best there was on the way."""
    shape = ".1%" if "best" in watched else ".3g"
    last = "not measured" if watched["last"] is None else format(watched["last"], shape)
    text = f"{last} at the end, {format(watched['first'], shape)} at the first look"
    if "best" not in watched:
        return text
    return f"{text} (best {watched['best']:.1%} after step {watched['best_step']:,.0f}; the last model is the one kept)"


def _describe_loss(loss: float, terms: Mapping[str, float], baseline: float) -> str:
    """The loss beside its baseline, and its other terms where there are any."""
    reconstruction = terms["reconstruction"]
    beside = f"{against(reconstruction, baseline)} ({baseline:.4f})"
    if len(terms) == 1:
        return f"{loss:.4f}, {beside}"
    return f"{loss:.4f}; " + ", ".join(
        f"{name} {value:.4f}" + (f", {beside}" if name == "reconstruction" else "") for name, value in terms.items()
    )


def _speed(rows: Sequence[Mapping[str, Any]]) -> float:
    """Images a second over the whole run, time for pictures and checkpoints left out."""
    seen = [0, *(row["samples"] for row in rows)]
    images = [after - before for before, after in pairwise(seen)]
    return sum(images) / sum(count / row["images_per_second"] for count, row in zip(images, rows, strict=True))


def show_summary(console: Console, folder: RunFolder, summary: Mapping[str, Any]) -> None:
    """Say how it went and where everything is."""
    baseline = summary["baselines"]["mean_of_visible"]
    show_table(
        console,
        "Finished",
        [
            ("loss", _describe_loss(summary["loss"], summary["terms"], baseline)),
            *_describe_features(summary["evaluation"]),
            *([("images", "\n".join(_describe_unreadable(summary["unreadable"])))] if summary["unreadable"] else []),
            ("time", f"{duration(summary['seconds'])}, {summary['images_per_second']:,.0f} images/s"),
            ("model", str(folder.root / (summary["checkpoint"] or ""))),
            *([("pictures", str(folder.root / summary["panel"]))] if summary["panel"] else []),
            ("curve", str(folder.root / summary["curve"])),
            ("page", str(folder.summary_page)),
        ],
    )
