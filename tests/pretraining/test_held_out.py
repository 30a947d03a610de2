"""Images that are never trained on: which, how many, and what is told by them."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from light import forget_images
from PIL import Image
from rich.console import Console

import mae
from mae.config import RunConfig
from mae.data.dataset.images import ImageSet
from mae.data.decode.limits import UnreadableImage
from mae.data.loading.loader import TrainingLoader, normalise
from mae.data.packs.writer import pack
from mae.errors import MAEError, UsageError
from mae.modalities.images.crop import central_crop
from mae.pretraining.build import fresh_model, make_loader
from mae.pretraining.derived import num_held_out
from mae.pretraining.resolve import prepare_run
from mae.pretraining.watch import online_eval as monitor
from mae.pretraining.watch.online_eval import make_monitor
from mae.randomness import FIXED_EPOCH, sample_keys
from mae.training.distributed import World

CPU = torch.device("cpu")


def prepared(tmp_path: Path, **options: Any) -> Any:
    sizes = {"img_size": (8, 8), "patch_size": (2, 2)}
    config = RunConfig.of(source="builtin:digits", model="mae_vit_lesson_patch4", **sizes, **options)
    return prepare_run(config, None, CPU, World(), resume=False)


@pytest.mark.parametrize(
    ("share", "images", "expected"),
    [(0.02, 799, 0), (0.02, 800, 16), (0.02, 1_000_000, 2000), (0.0, 5000, 0), (0.5, 40, 20), (0.5, 30, 0)],
)
def test_a_share_but_neither_too_few_nor_too_many(share: float, images: int, expected: int) -> None:
    assert num_held_out(RunConfig.of(held_out=share), images) == expected


@pytest.mark.parametrize("share", [-0.1, 0.6, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="--held-out is .*; expected"):
        RunConfig.of(held_out=share)


@pytest.mark.digits
def test_they_and_the_others_are_all_images_and_no_seed_changes_them(tmp_path: Path) -> None:
    first, second = prepared(tmp_path, seed=0), prepared(tmp_path, seed=5)
    assert torch.equal(torch.cat([first.trained, first.held_out]).sort().values, torch.arange(1438))
    assert torch.equal(first.held_out, second.held_out) and len(first.held_out) == 28
    assert first.steps_per_epoch == 1410 // 64


@pytest.mark.digits
def test_none_of_them_is_ever_trained_on(
    pretrain: Callable[..., mae.PretrainResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    iterate = TrainingLoader.iterate

    def watched(self: TrainingLoader, step: int) -> Any:
        for batch in iterate(self, step):
            seen.append(batch.shown)
            yield batch

    monkeypatch.setattr(TrainingLoader, "iterate", watched)
    result = pretrain(batch_size=128, steps=12, held_out=0.02)  # over an epoch
    held_out = set(prepared(result.folder).held_out.tolist())
    trained = set(torch.cat(seen).tolist())
    assert len(held_out) == 28 and not held_out & trained and len(trained) >= 1408  # the rest of an epoch is dropped


@pytest.mark.parametrize("kind", ["files", "pack"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("views", "workers"), [(1, 0), (4, 0), (2, 1)])
def test_none_is_in_a_batch_of_any_epoch_process_or_view_nor_in_place_of_a_broken_one(
    tmp_path: Path, kind: str, world: int, views: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step on, and from one in the midst of an epoch, where a run goes on."""
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for number in range(96):
        Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(tmp_path / "images" / f"{number:02d}.png")
    source = tmp_path / "images"
    if kind == "pack":
        pack(str(source), source := tmp_path / "pack", per_shard=12, workers=1)
    forget_images(monkeypatch)
    config = RunConfig.of(
        source=str(source), model="mae_vit_lesson_patch4", img_size=(8, 8), patch_size=(2, 2), batch_size=16,
        accumulate=2 if world * views < 8 else 1, repeated_aug=views, workers=workers,
        held_out=0.25, max_unreadable=0.5,
    )  # fmt: skip
    run = prepare_run(config, None, CPU, World(), resume=False)
    held_out, get = set(run.held_out.tolist()), ImageSet.get
    broken = set(run.trained[::5].tolist())

    def some(self: ImageSet, index: int) -> torch.Tensor:
        if index in broken:
            raise UnreadableImage(f"{index} cannot be read")
        return get(self, index)

    monkeypatch.setattr(ImageSet, "get", some)
    shown: set[int] = set()
    for rank in range(world):
        loader = make_loader(replace(run, world=World(rank=rank, size=world, local_rank=rank, local_size=world)))
        for start, steps in ((0, 3 * run.steps_per_epoch), (run.steps_per_epoch // 2 + 1, 2)):
            with closing(loader.iterate(start)) as batches:
                for batch in islice(batches, steps * config.machine.accumulate):
                    assert not held_out & (set(batch.shown.tolist()) | set(batch.ids.tolist()))
                    shown |= set(batch.shown.tolist())
    # Of the others none is missing but the broken ones, and what the end of each epoch drops.
    assert len(held_out) == 24 and shown <= set(run.trained.tolist()) - broken
    assert len(shown) >= 0.9 * (len(run.trained) - len(broken))


@pytest.mark.digits
def test_their_loss_is_measured_beside_that_of_trained_images(pretrain: Callable[..., mae.PretrainResult]) -> None:
    result = pretrain(steps=60, lr=2e-3, monitor_every=1.0, held_out=0.02)
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    looks = [row["evaluation"] for row in rows if "evaluation" in row]
    assert len(looks) >= 2 and all({"held_out", "held_out_train"} <= look.keys() for look in looks)
    assert looks[-1]["held_out"] < 0.9 * looks[0]["held_out"]
    # Images, masks and normalisation are those of a run: the loss is that of the model on them.
    model, ready = result.load_model(), prepared(result.folder)
    numbers = ready.held_out
    crops = torch.stack([central_crop(ready.images.get(int(number)), (8, 8)) for number in numbers])
    images = normalise(crops, *ready.statistics())
    with torch.no_grad():
        loss = model(images, plan=model.plan(images, keys=sample_keys(0, FIXED_EPOCH, numbers))).loss
    assert looks[-1]["held_out"] == pytest.approx(float(loss), rel=1e-5)


def test_without_them_nothing_is_said(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert not any("held_out" in row.get("evaluation", {}) for row in rows)
    assert any("effective_rank" in row.get("evaluation", {}) for row in rows)


@pytest.mark.digits
def test_a_batch_larger_than_what_is_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="holds 1438 images, 28 of them held out; give at most --batch-size 1410; 28 makes more steps"
    ):
        prepared(tmp_path, batch_size=1420)


def test_a_name_in_what_could_not_be_measured_cannot_steer_the_terminal(tmp_path: Path) -> None:
    ready = prepared(tmp_path, batch_size=16)
    measure = make_monitor(ready, fresh_model(ready), console := Console(record=True, file=StringIO()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "_encode", fail := Mock(side_effect=MAEError("\x1b[2J.png is gone")))
        measure.run(3)
    assert fail.called and "step 3: label-free numbers could not be measured, the run goes on: \ufffd[2J.png" in (
        console.export_text(styles=True)
    )
