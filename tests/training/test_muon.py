"""Muon beside PyTorch's own, and beside AdamW for what is no matrix of a block."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_finite import weights_after_each_step
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from toy import Recorder, make_trainer

from mae.models.zoo import create_model
from mae.training import muon
from mae.training.muon import Muon, orthogonal
from mae.training.optimizer import make_optimizer

_SIZES = {"img_size": 8, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
_DECODER = {"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}


def in_float32(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    monkeypatch.setattr(muon, "computes_in_bf16", lambda device: not yes)


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 12)])
@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_singular_values_become_about_one(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], scale: float):
    in_float32(monkeypatch, True)
    matrix = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix)
    large = values > 0.05 * values[0]
    assert large.sum() > len(values) // 2
    # Seen from the matrix's own singular vectors it is diagonal: they stay what they were.
    seen = left.T @ found @ right.T
    assert_close(seen, seen.diagonal().diag(), atol=1e-4, rtol=0)
    assert ((seen.diagonal()[large] > 0.6) & (seen.diagonal()[large] < 1.25)).all()


def test_no_direction_is_none():
    assert torch.equal(orthogonal(torch.zeros(3, 5)), torch.zeros(3, 5))


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_steps_are_those_of_pytorchs_muon(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]):
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


def test_its_own_products_are_counted():
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


def test_matrices_of_blocks_alone_are_orthogonal():
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


def test_the_rest_moves_as_by_adamw():
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


def test_a_broken_step_moves_nothing(tmp_path: Path):
    trainer = make_trainer(tmp_path, broken_at={5}, optimizer=toy_muon)
    seen = weights_after_each_step(trainer, Recorder())
    assert seen[6] == seen[5] and all(seen[step] != seen[step + 1] for step in range(1, 12) if step != 5)
    assert torch.tensor(seen).isfinite().all()


def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path: Path):
    whole: Any = make_trainer(tmp_path / "whole", optimizer=toy_muon)
    whole.run()
    again = make_trainer(tmp_path / "again", optimizer=toy_muon)
    again.resume(tmp_path / "whole" / "step-00000008")
    again.run()
    assert all(map(torch.equal, again.module.parameters(), whole.module.parameters()))
