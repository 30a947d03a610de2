"""Weights that timm and Hugging Face know by name; here without a network, whose answers stand in."""

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from torch import nn
from torch.testing import assert_close
from transformers import Dinov2Config, Dinov2Model

import mae
from mae.errors import MAEError, UsageError
from mae.interop.imports.open import open_model

TINY = "vit_tiny_patch16_224.augreg_in21k"


@pytest.fixture
def without_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm makes the model that is asked for, with made-up weights instead of those of the hub."""
    create = timm.create_model

    def made_up(name: str, *, pretrained: bool = False, pretrained_cfg_overlay: Any = None, **options: Any) -> Any:
        model = create(name, **options)
        if pretrained:
            torch.manual_seed(0)
            for key, weight in model.named_parameters():
                nn.init.normal_(weight, mean=float("norm" in key and key.endswith("weight")), std=0.02)
        return model

    monkeypatch.setattr("timm.create_model", made_up)


@pytest.mark.usefixtures("without_hub")
def test_timms_names_are_opened_with_sizes_and_statistics():
    model, report = open_model(Path(f"timm:{TINY}"))
    assert model.config is not None
    assert model.config.encoder.embed_dim == 192 and model.config.encoder.num_heads == 3
    assert model.config.tokenizer.mean == (0.5, 0.5, 0.5)
    assert report.origin["imported_from"] == f"timm:{TINY}" and "same outputs as timm" in report.line()
    theirs, images = timm.create_model(TINY, pretrained=True, num_classes=0).eval(), torch.randn(1, 3, 224, 224)
    assert_close(model.encode(images).cls, theirs.forward_features(images)[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("without_hub")
def test_a_run_begins_with_them_and_adapts_them(tmp_path: Path):
    options = {"img_size": 32, "steps": 2, "batch_size": 4, "device": "cpu", "in_chans": 3, "doctor": False}
    run = mae.pretrain(
        "builtin:photos", init_from=f"timm:{TINY}", adapter="lora", out=tmp_path / "run", quiet=True, **options
    )
    start, end = mae.load(f"timm:{TINY}").state_dict(), run.load_model().state_dict()
    assert torch.equal(start["encoder.blocks.3.mlp.fc1.weight"], end["encoder.blocks.3.mlp.fc1.weight"])
    assert not torch.equal(start["encoder.blocks.11.mlp.fc1.weight"], end["encoder.blocks.11.mlp.fc1.weight"])


def test_a_name_of_the_hub_is_fetched_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28, "patch_size": 14}
    theirs = Dinov2Model(Dinov2Config(**sizes)).eval()
    theirs.save_pretrained(tmp_path / "hub")
    asked: dict[str, Any] = {}

    def fetched(name: str, *, local_dir: str, allow_patterns: list[str]) -> str:
        asked.update(name=name, patterns=allow_patterns)
        shutil.copytree(tmp_path / "hub", local_dir, dirs_exist_ok=True)
        return local_dir

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    model, report = open_model(Path("hf:somebody/dino"))
    images = torch.randn(1, 3, 28, 28)
    assert_close(model.encode(images).patches, theirs(images).last_hidden_state[:, 1:], rtol=1e-4, atol=1e-5)
    assert report.origin["imported_from"] == "hf:somebody/dino"
    assert asked["name"] == "somebody/dino"
    assert all(pattern.endswith(("safetensors", "json")) for pattern in asked["patterns"])


def test_what_cannot_be_had_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match="timm:vit_nonsense: timm has no such model"):
        open_model(Path("timm:vit_nonsense"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(UsageError, match="hf:here is a folder here; leave hf: out"):
        open_model(Path("hf:here"))

    def absent(*args: Any, **options: Any) -> str:
        raise OSError("no answer\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(MAEError, match="^hf:somebody/dino cannot be fetched: no answer$"):
        open_model(Path("hf:somebody/dino"))
