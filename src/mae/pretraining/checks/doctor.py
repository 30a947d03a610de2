"""The checks before a run: of its model, its images, its rate, and of what it needs of the machine."""

import copy
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from typing import Any

from mae.config import RunConfig
from mae.core.component import options_of
from mae.data.decode.jpeg import has_fast_decoder
from mae.data.inspect.findings import data_findings
from mae.data.inspect.report import inspect_images
from mae.data.loading.loader import normalise
from mae.errors import UsageError
from mae.findings import Finding
from mae.models.file import load_with_report
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.pretraining.build import fresh_model, make_loader, num_workers, some_images
from mae.pretraining.checks.model import Subject, check_model
from mae.pretraining.derived import in_smaller_parts, peak_rate, warmup_steps
from mae.pretraining.estimate.profile import (
    LONG_WAIT,
    available_memory,
    cost_of,
    measure_loading,
    measure_steps,
    pace_of,
)
from mae.pretraining.resolve import RunContext, prepare_run
from mae.pretraining.sanity import SHALLOW_DECODER
from mae.recipes import recipe_config
from mae.report.terminal.diagnosis import Diagnosis
from mae.training.device import choose_device
from mae.training.distributed import World
from mae.training.run_folder import RunFolder, find_weights

_IMAGES = 2  # enough for every check of the model, and of a large one on a CPU each costs seconds
"""Real crops that the model is checked with: each must come out right, so more would show no more."""
_FEW_COMPARED = 32
"""Images at once, below which a term that looks at their distribution or tells them apart has little to go by."""
_PROBED_PARTS = (2, 4)
_STEP_SECONDS, _LOADING_SECONDS, _DATA_SECONDS = 0.2, 0.2, 6.0
_MEMORY_SHARE = 0.9
_FEW_PATCHES, _FEW_VISIBLE = 16, 4
"""Of a 4 x 4 grid a quarter is 4 patches; with one visible patch there is no relation of patches to be seen."""
_HIGH_RATE = 0.01  # four times the largest of the official recipes
_REFERENCE = "imagenet_base"
_COMPARED = (
    "mask", "mask_ratio", "mask_schedule", "target", "norm_pix_loss", "loss", "laplacian", "uniformity",
    "focal_frequency",
    "epochs", "batch_size", "min_lr", "weight_decay", "betas", "clip_grad",
)  # fmt: skip


def examine(prepared: RunContext, model: MaskedAutoencoder) -> Diagnosis:
    """Check everything; neither the model nor the caller's random numbers are changed, nothing is written.

    Args:
        prepared: the run.
        model: as it begins, on the run's device.

    Raises:
        MAEError: images that cannot be read.
    """
    began = time.monotonic()
    whole = [*_cache(prepared), *_compared(prepared)]
    if prepared.world.size > 1:  # this process checks alone: a term that asks the others would wait for ever
        alone = tuple(term for term in prepared.method.terms if not term.reads_batch)
        method = replace(prepared.method, terms=alone)
        prepared = replace(prepared, config=replace(prepared.config, method=method), world=World())
        model = copy.deepcopy(model)
        model.keep_terms(alone)
    findings = [
        *check_model(_subject(prepared, model)),
        *_data(prepared),
        *_plan(prepared),
        *whole,
        *_machine(prepared, model),
    ]
    return Diagnosis(findings=tuple(findings), seconds=time.monotonic() - began)


def examine_source(config: RunConfig, *, given: Collection[str] = ()) -> Diagnosis:
    """Check a run as it would begin.

    Args:
        config: the run.
        given: see `prepare_run`.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: images that cannot be read.
    """
    prepared = prepare_run(config, None, choose_device(config.machine.device), World(), resume=False, given=given)
    return examine(prepared, fresh_model(prepared))


def examine_run(folder: Path, *, device: str) -> Diagnosis:
    """Check a run as it stands: its newest weights, on its own images.

    Raises:
        UsageError: no run is there, or its images are others now.
        MAEError: its weights or images cannot be read.
    """
    run = RunFolder(folder)
    if not run.holds_run:
        raise UsageError(f"{folder} holds no run (no {run.config.name} there)")
    config = RunConfig.read(run.config).override({"device": device})
    prepared = prepare_run(config, run, choose_device(device), World(), resume=True)
    model, report = load_with_report(find_weights(folder))
    assert isinstance(model, MaskedAutoencoder)  # it is of a run
    model = model.to(prepared.device)
    model.hand_in(prepared.network)
    found = examine(prepared, model)
    weights = Finding(name="weights", level="ok", value=report.line())
    return replace(found, findings=(weights, *found.findings))


def _subject(prepared: RunContext, model: MaskedAutoencoder) -> Subject:
    config, views = prepared.config, prepared.compared_views
    raw = next(some_images(prepared, _IMAGES, batch_size=views * _IMAGES, views=views).iterate(0))
    images = normalise(raw.images.to(prepared.device), *prepared.statistics())
    return Subject(
        model=model,
        images=images.nan_to_num(nan=0.0),  # the checks are of the model: gaps in the data would count against it
        numbers=prepared.trained,
        seed=config.optim.seed,
        views=views,
        mask_ratio=prepared.method.mask.ratio,
        betas=config.optim.betas,
        weight_decay=config.optim.weight_decay,
    )


def _data(prepared: RunContext) -> list[Finding]:
    model = prepared.method
    assert model.tokenizer.mean is not None and model.tokenizer.std is not None
    report = inspect_images(
        prepared.images,
        img_size=model.tokenizer.img_size,
        mean=model.tokenizer.mean,
        std=model.tokenizer.std,
        seed=prepared.config.optim.seed,
        seconds=_DATA_SECONDS,
    )
    # Those of ImageNet or of a model fit its weights: a shift is no mistake then.
    return data_findings(report, own_statistics=prepared.config.data.statistics == "data", note=prepared.note)


def _plan(prepared: RunContext) -> Iterator[Finding]:
    """Rate and schedule beside the official recipe, and what is known to make features worse."""
    yield _patches(prepared)
    config, official = prepared.config, recipe_config(_REFERENCE)
    assert config.optim.batch_size is not None and official.optim.base_lr is not None
    given, theirs = config.flat(), official.flat()
    differing = [
        f"{name} {given[name]} ({theirs[name]})" for name in _COMPARED if name in given and given[name] != theirs[name]
    ]
    base = peak_rate(config) * 256 / config.optim.batch_size
    warmup = warmup_steps(config, len(prepared.images)) / prepared.total_steps
    ours = f"peak {peak_rate(config):.3g}, {base:.2g} for each 256 images ({official.optim.base_lr:.2g}); "
    ours += f"warm-up {warmup:.0%} of {prepared.total_steps:,} steps (5%)"
    high = peak_rate(config) > _HIGH_RATE
    advice = "AdamW moves every weight by about the rate in a step: such a rate diverges; 1e-3 suits most models"
    schedule = f"{ours}; official values in brackets"
    yield _noted("rate and schedule", schedule, advice if high else "", level="warn" if high else "ok")
    yield _noted("differs from the official recipe", "; ".join(differing) or "in nothing", "", level="ok")
    depth = options_of(prepared.method.decoder).get("depth", inf)  # one without blocks is none that is too shallow
    if depth < SHALLOW_DECODER:
        yield _noted(
            "decoder",
            f"{depth} blocks",
            f"a decoder of {SHALLOW_DECODER} blocks or more leaves better frozen features",
            level="note",
        )


def _patches(prepared: RunContext) -> Finding:
    """Whether an image has patches enough that the masked ones can be told from the visible ones."""
    layout = prepared.method.layout
    visible = prepared.method.mask.num_visible(layout)
    value = f"{layout.num_tokens} an image, {visible} of them visible"
    if layout.num_tokens >= _FEW_PATCHES and visible >= _FEW_VISIBLE:
        return _noted("patches", value, "", level="ok")
    wanted = min(side // 4 for side in layout.size)
    smaller = f"--patch-size {wanted}" if wanted >= 1 else "smaller patches"
    larger = "x".join(str(4 * patch) for patch in layout.patch)
    advice = (
        f"too few to learn from: give {smaller} or less, or --img-size {larger} or more if the images hold that much"
    )
    return _noted("patches", value, advice, level="stop" if visible < 2 else "warn")


def _cache(prepared: RunContext) -> Iterator[Finding]:
    """Room for the blocks that the processes of this machine read at a time, and for those that come next."""
    sizes, fetched = prepared.images.block_sizes, prepared.images.cache_footprint
    if sizes is None or fetched is None:
        return
    block, room = fetched
    blocks = 2 * prepared.world.local_size * make_loader(prepared).order().most_blocks
    needed = min(blocks, len(sizes)) * block
    value = f"{needed / 1e9:.2f} GB of shards are read or fetched at a time, the cache may hold {room / 1e9:.2f} GB"
    advice = f"they would be fetched over and over: set OPENMAE_CACHE_GB={ceil(needed / 1e9)} or more"
    yield _noted("cache", value, advice if room < needed else "", level="warn" if room < needed else "ok")


def _compared(prepared: RunContext) -> Iterator[Finding]:
    """Whether terms that compare images with each other are given enough of them."""
    terms = [term.kind for term in prepared.method.terms if term.reads_views]
    config = prepared.config
    if not terms:
        return
    assert config.optim.batch_size is not None
    count = config.optim.batch_size // config.machine.accumulate // prepared.compared_views
    advice = "of so few a distribution says little: raise --batch-size, or lower --accumulate"
    few = count < _FEW_COMPARED
    value = f"{', '.join(terms)}: {count} at once"
    yield _noted("images compared", value, advice if few else "", level="warn" if few else "ok")


def _machine(prepared: RunContext, model: MaskedAutoencoder) -> list[Finding]:
    """Memory needed beside memory there, and the loader's rate beside the model's."""
    sizes = [prepared.compared_views * size for size in _PROBED_PARTS]
    costs = measure_steps(prepared, part_sizes=sizes, seconds=_STEP_SECONDS, model=model)
    cost = cost_of(costs, prepared.part_size)
    there = available_memory(prepared.device)
    value = f"{cost.peak_bytes / 1e9:.2f} GB for {prepared.part_size} images at once, {there / 1e9:.2f} GB there"
    advice = in_smaller_parts(prepared.config)
    enough = cost.peak_bytes < _MEMORY_SHARE * there
    memory = _noted("memory", value, "" if enough else advice, level="ok" if enough else "warn")
    model_rate = prepared.part_size / cost.seconds
    loader_rate = measure_loading(prepared, seconds=_LOADING_SECONDS)
    pace = pace_of(model_rate, loader_rate, num_workers(prepared))
    value = (
        f"model {model_rate:,.0f} images/s, loader {loader_rate:,.0f}: {pace.data_wait:.0%} of the time spent waiting"
    )
    slow = pace.data_wait > LONG_WAIT
    advice = "the images limit: give more --workers, or store them smaller" if slow else ""
    if slow and not has_fast_decoder():
        advice += "; with torchcodec (pip install 'openmae[fast]') JPEGs are decoded faster"
    return [memory, _noted("speed", value, advice, level="note" if slow else "ok")]


def _noted(name: str, value: str, advice: str, *, level: Any) -> Finding:
    return Finding(name=name, level=level, value=value, advice=advice)
