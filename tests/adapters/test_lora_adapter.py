"""Further training of weights that are there, by low-rank products: what stays, what comes out, and that it resumes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from light import without_pictures
from resuming import whole_and_resumed
from safetensors.torch import load_file
from torch.testing import assert_close

import mae
from mae.core.method import MethodConfig
from mae.errors import UsageError
from mae.models.build import build_model
from mae.models.file import load_model, load_with_report, model_metadata, save_model
from mae.training.checkpoint import MODEL
from mae.training.run_folder import find_weights

SMALL = MethodConfig().override({
    "img_size": (8, 8), "patch_size": (2, 2), "in_chans": 1, "embed_dim": 24, "depth": 3, "num_heads": 3,
    "mlp_ratio": 2.0, "decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2, "mean": (0.25,),
    "std": (0.5,), "pixel_dtype": "uint8",
})  # fmt: skip
ADAPTED = {"adapter": "lora", "adapter_rank": 4, "adapter_blocks": 1}


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(7)
    model = build_model(SMALL)
    save_model(model, tmp_path / "weights.safetensors", model_metadata(model))
    return tmp_path / "weights.safetensors"


def pretrain(weights: Path, out: Path, **options: Any) -> mae.PretrainResult:
    run = {"init_from": str(weights), "steps": 6, "batch_size": 8, "lr": 0.01, "device": "cpu", **ADAPTED, **options}
    return mae.pretrain("builtin:digits", out=out, quiet=True, **run)


def is_adapted(name: str) -> bool:
    """Whether a tensor of the merged encoder may differ from the weights that the run began with."""
    return name.startswith("encoder.blocks.2.") or ".attn.qkv.weight" in name or ".attn.proj.weight" in name


@pytest.mark.parametrize("alike", [True, False])
def test_channels_that_it_could_not_tell_apart_are_refused(alike: bool, tmp_path: Path):
    torch.manual_seed(7)
    model = build_model(SMALL.override({"in_chans": 3, "mean": None, "std": None}))
    with torch.no_grad():
        kernels = model.encoder.patch_embed.proj.weight.view(24, 3, 4)
        if alike:
            kernels[:] = kernels[:, :1].clone()
    save_model(model, tmp_path / "w.safetensors", model_metadata(model))
    run = {"init_from": str(tmp_path / "w.safetensors"), "steps": 1, "batch_size": 8, "out": tmp_path / "run"}
    if not alike:
        mae.pretrain("builtin:digits", quiet=True, **run, **ADAPTED)
        return
    with pytest.raises(UsageError, match="is the same for all 3 channels, so the model could never tell them apart"):
        mae.pretrain("builtin:digits", quiet=True, **run, **ADAPTED)
    assert not (tmp_path / "run").exists()
    mae.pretrain("builtin:digits", quiet=True, **run)


def test_a_mask_token_in_the_encoder_learns(weights: Path, tmp_path: Path):
    tokens = {"encoder_mask_tokens": True, "decoder": "linear"}
    model = pretrain(weights, tmp_path / "run", **tokens).load_model()
    fresh = pretrain(weights, tmp_path / "fresh", **tokens, steps=1, lr=1e-12).load_model()
    assert not torch.equal(model.encoder.mask_token, fresh.encoder.mask_token)


def test_all_else_of_the_encoder_stays_bit_for_bit(weights: Path, tmp_path: Path):
    found = pretrain(weights, tmp_path / "run").load_model()
    before, after = load_file(weights), found.state_dict()
    assert before.keys() == after.keys() and found.config is not None and found.config.adapter is None
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    encoder = {name for name in changed if name.startswith("encoder.")}
    assert encoder and all(map(is_adapted, encoder))
    assert {f"encoder.blocks.{block}.attn.qkv.weight" for block in (0, 1, 2)} <= encoder
    assert any(name.startswith("decoder.") for name in changed)
    for block in (0, 1):
        change = after[f"encoder.blocks.{block}.attn.qkv.weight"] - before[f"encoder.blocks.{block}.attn.qkv.weight"]
        assert torch.linalg.matrix_rank(change, rtol=1e-4) == 4


def test_merging_changes_nothing_but_rounding(weights: Path, tmp_path: Path):
    file = find_weights(pretrain(weights, tmp_path / "run").folder)
    raw, merged = load_model(file, merged=False), load_model(file)
    images = torch.randn(3, 1, 8, 8)
    assert raw.config is not None and raw.config.adapter is not None
    assert any(name.endswith(".up") for name in raw.state_dict())
    assert_close(merged.encode(images).patches, raw.encode(images).patches, rtol=1e-5, atol=1e-5)
    assert all(weight.requires_grad for weight in merged.parameters())


def frozen_and_trained(model: torch.nn.Module) -> tuple[set[str], set[str]]:
    named = dict(model.named_parameters())
    return {n for n, w in named.items() if not w.requires_grad}, {n for n, w in named.items() if w.requires_grad}


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_products_and_the_last_blocks_are_trained(blocks: int):
    frozen, trained = frozen_and_trained(build_model(SMALL.override({**ADAPTED, "adapter_blocks": blocks})).encoder)
    free = tuple(f"blocks.{number}." for number in range(3 - blocks, 3))
    assert all(name.startswith(free) or name.endswith((".up", ".down")) for name in trained)
    assert not any(name.startswith(free) or name.endswith((".up", ".down")) for name in frozen)
    assert sum(name.endswith(".up") for name in trained) == 2 * (3 - blocks)


def test_an_adapted_model_computes_at_first_what_its_weights_did(weights: Path):
    plain, adapted = mae.load(weights), build_model(SMALL.override(ADAPTED))
    adapted.load_state_dict(plain.state_dict(), strict=False)
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(plain.encode(images).patches, adapted.eval().encode(images).patches)


def test_a_run_that_was_stopped_resumes_bit_for_bit(weights: Path, tmp_path: Path):
    begun = partial(pretrain, weights, checkpoint_every=1)
    whole, resumed = whole_and_resumed(tmp_path, begun, meanwhile=weights.unlink)  # a run needs them but once
    one, other = (load_file(find_weights(run.folder)) for run in (whole, resumed))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_adapted_run_is_begun_with_again_and_exported_as_any_other(weights: Path, tmp_path: Path):
    first = pretrain(weights, tmp_path / "first")
    second = pretrain(first.folder, tmp_path / "second", steps=2)
    start, end = first.load_model().state_dict(), load_model(find_weights(second.folder), merged=False).state_dict()
    base = "encoder.blocks.0.attn.qkv.weight"
    assert torch.equal(start[base], end[base])  # what the first learned is in the weights that the second keeps
    model, report = load_with_report(find_weights(second.folder))
    assert report.probe is not None
    mae.save(model, tmp_path / "plain.safetensors")
    assert_close(mae.load(tmp_path / "plain.safetensors").encode(torch.zeros(1, 1, 8, 8)).mean,
                 model.encode(torch.zeros(1, 1, 8, 8)).mean, rtol=0, atol=0)  # fmt: skip


def test_the_file_of_the_run_itself_keeps_the_frozen_weights(weights: Path, tmp_path: Path):
    run = pretrain(weights, tmp_path / "run")
    stored, before = load_file(run.folder / "checkpoints" / f"step-{6:08d}" / MODEL), load_file(weights)
    kept = [name for name in before if name.startswith(("encoder.blocks.0.", "encoder.blocks.1.", "encoder.norm"))]
    assert len(kept) > 20 and all(torch.equal(stored[name], before[name]) for name in kept)


def test_fresh_weights_are_not_adapted(tmp_path: Path):
    with pytest.raises(UsageError, match="--adapter is lora, which keeps the weights .*give --init-from"):
        mae.pretrain("builtin:digits", adapter="lora", steps=300, out=tmp_path / "run", quiet=True)


def test_as_many_free_blocks_as_there_are_leave_nothing_to_adapt():
    with pytest.raises(UsageError, match="adapter_blocks is 3, and the encoder has 3 blocks; expected fewer"):
        SMALL.override({**ADAPTED, "adapter_blocks": 3})
