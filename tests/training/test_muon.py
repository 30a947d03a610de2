"""Muon against PyTorch's own, and against AdamW for what is no matrix of a block."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from toy import Output, Recorder, batches, make_trainer, weights_after_each_step

from mae.models.presets import create_model
from mae.training import muon
from mae.training.muon import Muon, orthogonal
from mae.training.optimizer import make_optimizer
from mae.training.settings import TrainingSettings

_SIZES = {"img_size": 8, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
_DECODER = {"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}


def in_float32(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    monkeypatch.setattr(muon, "computes_in_bf16", lambda device: not yes)


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 12)])
@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_orthogonal_singular_values(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], scale: float):
    in_float32(monkeypatch, True)
    matrix = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix)
    large = values > 0.05 * values[0]
    assert large.sum() > len(values) // 2
    # In the basis of the matrix's own singular vectors the result is diagonal.
    seen = left.T @ found @ right.T
    assert_close(seen, seen.diagonal().diag(), atol=1e-4, rtol=0)
    assert ((seen.diagonal()[large] > 0.6) & (seen.diagonal()[large] < 1.25)).all()


def plain(matrix: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz iterations, one after the other."""
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("small", ["equal", "falling", "tiny"])
@pytest.mark.parametrize("wide", [True, False])
def test_orthogonal_is_five_iterations(monkeypatch: pytest.MonkeyPatch, small: str, wide: bool):
    """In bfloat16 it is as far from them in float64 as they are themselves, also where singular values are small."""
    generator = torch.Generator().manual_seed(0)
    left, _, right = torch.linalg.svd(
        torch.randn(48, 192 if wide else 64, generator=generator, dtype=torch.float64), full_matrices=False
    )
    values = {"equal": torch.ones(48), "falling": torch.arange(1, 49) ** -1.5, "tiny": torch.logspace(0, -6, 48)}[small]
    matrix = left @ (values.double().unsqueeze(1) * right)
    expected = plain(matrix)

    def error(found: torch.Tensor) -> float:
        return float((found.double() - expected).norm() / expected.norm())

    in_float32(monkeypatch, True)
    assert error(orthogonal(matrix.float())) < 5e-5
    assert error(orthogonal(matrix.float().mT).mT) < 5e-5
    in_float32(monkeypatch, False)
    assert error(orthogonal(matrix.float())) < 1.5 * error(plain(matrix.bfloat16())) + 0.03


def test_orthogonal_of_zero_is_zero():
    assert torch.equal(orthogonal(torch.zeros(3, 5)), torch.zeros(3, 5))


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_steps_match_pytorchs_muon(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]):
    in_float32(monkeypatch, False)  # it knows bfloat16 alone
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = Muon([{"params": [ours], "weight_decay": 0.1, "orthogonal": True}], betas=(0.9, 0.95))
    peer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        gradient = torch.randn(shape, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.param_groups[0]["lr"] = 0.02
        mine.step()
        peer.step()
        moved = (theirs - start).norm()
        assert (
            float((ours - theirs).detach().norm() / moved.detach()) < 0.02
        )  # bfloat16's rounding, through five products


@pytest.mark.parametrize("skipped", [False, True])
def test_batches_of_matrices_take_the_same_steps(monkeypatch: pytest.MonkeyPatch, skipped: bool):
    """Those of one shape in one product, as on a GPU; not more of them at once than fit the bound."""
    in_float32(monkeypatch, True)
    found, sizes = [], []

    def noted(matrix: torch.Tensor) -> torch.Tensor:
        sizes.append(tuple(matrix.shape))
        return orthogonal(matrix)

    monkeypatch.setattr(muon, "orthogonal", noted)
    monkeypatch.setattr(muon, "_MOST_TOGETHER", 2 * 48 * 16)
    for batches_of in (False, True):
        monkeypatch.setattr(muon, "_gains_by_batches", lambda device, yes=batches_of: yes)
        generator = torch.Generator().manual_seed(0)
        shapes = [(16, 48), (16, 16), (16, 48), (48, 16), (16, 48), (16, 16)]
        matrices = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = Muon([{"params": matrices, "weight_decay": 0.1, "orthogonal": True}], betas=(0.9, 0.95))
        optimizer.param_groups[0]["lr"] = 0.02
        for step in range(3):
            for matrix in matrices:
                matrix.grad = torch.randn(matrix.shape, generator=generator)
            optimizer.found_inf = torch.tensor(float(skipped and step == 1))  # type: ignore[attr-defined]
            optimizer.step()
        found.append([matrix.detach() for matrix in matrices])
    assert sizes[:6] == shapes and sizes[18:22] == [(2, 16, 48), (16, 48), (2, 16, 16), (48, 16)]
    for alone, together in zip(*found, strict=True):
        assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_step_flops():
    model = make_model()
    optimizer = make_optimizer(model, weight_decay=0.05, betas=(0.9, 0.95), kind="muon")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert isinstance(optimizer, Muon) and optimizer.step_flops == counter.get_total_flops() > 0


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return create_model("mae_vit_lesson_patch4", decoder="cross", **_SIZES, **_DECODER)


def test_only_matrices_of_blocks_are_orthogonal():
    model = make_model()
    groups = make_optimizer(model, weight_decay=0.05, betas=(0.9, 0.95), kind="muon").param_groups
    names: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(p)]: group for group in groups for p in group["params"]}
    assert found.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    inside = {name for name, group in found.items() if group["orthogonal"]}
    assert {name.removeprefix("encoder.blocks.1.") for name in inside if name.startswith("encoder.blocks.1.")} == {
        "attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"
    }  # fmt: skip
    assert not {"decoder.pred.weight", "decoder.mixture", "encoder.patch_embed.proj.weight"} & inside
    assert all(group["weight_decay"] == (0.05 if dict(model.named_parameters())[name].ndim > 1 else 0.0)
               for name, group in found.items())  # fmt: skip


def test_other_parameters_match_adamw():
    ours, theirs = make_model(), make_model()
    pairs = [
        make_optimizer(m, weight_decay=0.05, betas=(0.9, 0.95), kind=k) for m, k in ((ours, "muon"), (theirs, "adamw"))
    ]
    images = torch.randn(4, 3, 8, 8)
    for model, optimizer in zip((ours, theirs), pairs, strict=True):
        model(images, generator=torch.Generator().manual_seed(1)).loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        optimizer.step()
    inside = {id(p) for group in pairs[0].param_groups if group["orthogonal"] for p in group["params"]}
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other) == (id(mine) not in inside) or not mine.requires_grad, name


def toy_muon(module: nn.Module) -> Muon:
    weight, bias = module.named_parameters()
    return Muon(
        [{"params": [weight], "weight_decay": 0.1, "orthogonal": True},
         {"params": [bias], "weight_decay": 0.0, "orthogonal": False}],
        betas=(0.9, 0.95),
    )  # fmt: skip


def test_nonfinite_step_is_skipped(tmp_path: Path):
    trainer = make_trainer(tmp_path, broken_at={5}, optimizer=toy_muon)
    seen = weights_after_each_step(trainer, Recorder())
    assert seen[6] == seen[5] and all(seen[step] != seen[step + 1] for step in range(1, 12) if step != 5)
    assert torch.tensor(seen).isfinite().all()


def test_resume_is_bit_for_bit(tmp_path: Path):
    whole: Any = make_trainer(tmp_path / "whole", optimizer=toy_muon)
    whole.run()
    again = make_trainer(tmp_path / "again", optimizer=toy_muon)
    again.resume(tmp_path / "whole" / "step-00000008")
    again.run()
    assert all(map(torch.equal, again.module.parameters(), whole.module.parameters()))


class Hidden(nn.Module):
    """One hidden layer, whose matrix is one inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 6))
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        loss = (self.head(self.blocks(x).tanh()) - y).square().mean()
        return Output(loss=loss, terms={"square": loss})


def by_hand(settings: TrainingSettings) -> dict[str, torch.Tensor]:
    """The same training in float64: whole batches, singular values, AdamW a formula at a time."""
    torch.manual_seed(0)
    module = Hidden().double()
    named = dict(module.named_parameters())
    past = {name: torch.zeros(2, *p.shape, dtype=torch.float64) for name, p in named.items()}
    for step in range(settings.total_steps):
        batch = {name: values.double() for name, values in next(batches(step)).items()}
        gradients = dict(zip(named, torch.autograd.grad(module(**batch).loss, list(named.values())), strict=True))
        norm = float(torch.cat([g.flatten() for g in gradients.values()]).norm())
        rate, t = settings.schedule(settings.batch_size * step), step + 1
        for name, p in named.items():
            g, decay = gradients[name] * min(1.0, 1.0 / (norm + 1e-6)), 0.05 if p.ndim > 1 else 0.0
            first, second = past[name]
            if name == "blocks.0.weight":
                first.mul_(0.95).add_(g, alpha=0.05)
                u, s, v = torch.linalg.svd(0.05 * g + 0.95 * first, full_matrices=False)
                s = s / s.norm()
                for _ in range(5):
                    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
                move = u @ s.diag() @ v * 0.2 * max(p.shape) ** 0.5
            else:
                first.mul_(0.9).add_(g, alpha=0.1)
                second.mul_(0.95).add_(g**2, alpha=0.05)
                move = first / (1 - 0.9**t) / ((second / (1 - 0.95**t)).sqrt() + 1e-8)
            p.data.mul_(1 - rate * decay).sub_(rate * move)
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize("accumulate", [1, 2, 8])
def test_micro_batches_match_the_whole_batch(tmp_path: Path, accumulate: int, monkeypatch: pytest.MonkeyPatch):
    in_float32(monkeypatch, True)
    make = partial(make_optimizer, weight_decay=0.05, betas=(0.9, 0.95), kind="muon")
    trainer = make_trainer(tmp_path, module=Hidden, optimizer=make, accumulate=accumulate)
    trainer.run()
    expected = by_hand(trainer.settings)
    assert [group["orthogonal"] for group in trainer.optimizer.param_groups].count(True) == 1
    for name, parameter in trainer.module.named_parameters():
        torch.testing.assert_close(parameter.double(), expected[name], rtol=1e-4, atol=1e-5)
