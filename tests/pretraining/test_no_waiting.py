"""A step asks the device for nothing that its host would have to wait for, nor for what a kind of device cannot do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mae.config import RunConfig
from mae.core.contracts import Batch
from mae.core.types import Layout, MaskRequest
from mae.data.loading.loader import normalise
from mae.masks.random import RandomMasking
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.presets import create_model
from mae.pretraining.build import fresh_model, make_trainer
from mae.pretraining.resolve import prepare_run
from mae.recipes import recipe_config
from mae.training.distributed import World

# What makes the host wait: a value, or a size that depends on values.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "is_nonzero", "equal", "bincount")


# What does so on a GPU, though on a CPU nothing of it is seen below.
READING = ("tolist", "cpu", "numpy", "item", "unique", "repeat_interleave", "allclose", "tensor")


class NoReading(TorchFunctionMode):
    """Refuses calls that bring values to the host, or carry them from it at once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READING:
            raise AssertionError(f"{name} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


class NoWaiting(TorchDispatchMode):
    """Refuses what cannot be done without looking at values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_truth = name in ("index", "index_put") and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in WAITING or by_truth:
            raise AssertionError(f"{name} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


class NoFloat64(TorchDispatchMode):
    """Refuses 64-bit floats, which Apple's GPUs do not know."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in tree_leaves(found)):
            raise AssertionError(f"{func} gives 64-bit floats")
        return found


OPTIONS: dict[str, Any] = {
    "source": "builtin:digits", "model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2, "mlp_ratio": 0.5,
    "batch_size": 8, "steps": 3, "warmup_epochs": 0.0, "mask_warmup": 0.01, "device": "cpu", "workers": 0,
    "decoder_depth": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"decoder": "cross", "mask_predicted": 0.5},
        {"optimizer": "muon"},
        {"recipe": "improved", "accumulate": 2},
        {"recipe": "fast"},
        {"uniformity": 0.1, "uniformity_form": "squared_cosine", "laplacian": 0.1, "laplacian_raw": True},
        {
            "focal_frequency": 0.1,
            "target": "low_pass",
            "target_cutoff": 0.5,
            "loss": "smooth_l1",
        },
        {"clip_grad": None, "target": "hog", "target_cell": 2},
        {"target": "random_projection"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "plain",
)
def test_no_step_waits_for_the_device(tmp_path: Path, changes: dict[str, Any]):
    recipe = changes.get("recipe", "default")
    config = recipe_config(recipe).override({**OPTIONS, **changes, "out": str(tmp_path / "run")})
    trainer, batches = a_trainer(config)
    trainer._train_step(batches)  # the first one makes the averages
    with NoWaiting(), NoReading():
        trainer._train_step(batches)
    assert trainer.step == 2


MASKS = ("block", "inverse_block", "grid", "regular", "noise", "multi_block")


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "muon", "precision": "bf16"},
        {"recipe": "fast"},
        {"target": "hog", "target_cell": 2},
        {"laplacian": 0.1, "focal_frequency": 0.1, "target": "low_pass", "target_cutoff": 0.5},
        {"target": "features", "teacher": "ema", "mask": "attention"},
        {"target": "codes", "teacher": "codebook", "teacher_codes": 8, "loss": "cross_entropy"},
        {"code_prediction": 0.2, "code_prediction_codes": 8},
        {"mask": "hard", "teacher": "ema", "difficulty": 1.0},
        {"visreg": 0.1, "sigreg": 0.1, "repeated_aug": 2},
        {"infonce": 0.1, "vicreg": 0.1, "repeated_aug": 2},
        *({"mask": mask} for mask in MASKS),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_no_step_takes_64_bit_floats(tmp_path: Path, changes: dict[str, Any]):
    config = recipe_config(changes.get("recipe", "default")).override(
        {**OPTIONS, **changes, "out": str(tmp_path / "run")}
    )
    trainer, batches = a_trainer(config)
    with NoFloat64():
        trainer._train_step(batches)
        with pytest.raises(AssertionError, match="64-bit floats"):
            torch.ones(1).double()
    assert trainer.step == 1


def a_trainer(config: RunConfig) -> tuple[Any, Iterator[Any]]:
    prepared = prepare_run(config, None, torch.device("cpu"), World(), resume=False)
    trainer = make_trainer(prepared, fresh_model(prepared))
    there = iter([batch for batch, _ in zip(trainer.batches(0), range(4 * config.machine.accumulate), strict=False)])
    return trainer, there


@pytest.mark.parametrize("asks", [lambda t: float(t), lambda t: bool(t > 0), lambda t: t.reshape(1)[t.reshape(1) > 0],
                                  lambda t: t.tolist(), lambda t: t.cpu(), lambda t: torch.tensor([1.0])])  # fmt: skip
def test_a_step_that_waits_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: Any):
    config = RunConfig.of(lr=1e-3).override({**OPTIONS, "out": str(tmp_path / "run")})
    trainer, batches = a_trainer(config)
    forward = MaskedAutoencoder.forward

    def waits(self: MaskedAutoencoder, images: Tensor, **options: Any) -> Any:
        output = forward(self, images, **options)
        asks(output.loss.detach())
        return output

    monkeypatch.setattr(MaskedAutoencoder, "forward", waits)
    with NoWaiting(), NoReading(), pytest.raises(AssertionError, match="makes the host wait"):
        trainer._train_step(batches)


@pytest.mark.parametrize("gap", [False, True])
def test_a_codebook_waits_for_nothing(gap: bool):
    options = {"img_size": 8, "patch_size": 2, "target": "codes", "teacher": "codebook", "loss": "cross_entropy"}
    model = create_model("mae_vit_lesson_patch4", nodata="nan", **options)
    images = torch.rand(4, 3, 8, 8)
    images[0, :, :2, :2] = torch.nan if gap else 0.0
    batch = Batch(x=images, tokenizer=model.tokenizer, keys=torch.arange(4))
    assert model.teacher is not None
    with NoWaiting(), NoReading():
        codes = model.taught(batch, learning=True)["codes"]
        model.teacher.after_step(model, 0.1)
    assert bool(codes[0, 0].isnan().all()) is gap and model.teacher.used.sum() > 0


def test_masks_and_normalised_images_wait_for_nothing_either():
    request = MaskRequest(layout=Layout(size=(8, 8), patch=(2, 2), channels=3), keys=torch.arange(4), ratio=0.6)
    with NoWaiting(), NoReading():
        plan = RandomMasking(predicted=0.5).plan(request)
        images = normalise(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(3), torch.ones(3))
    assert plan.visible.shape == (4, 6) and images.dtype == torch.float32
