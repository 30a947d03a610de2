"""Weights of others: what comes in is the same model, and what was changed on its way is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from foreign import HEADS, TIMM_VIT, as_checkpoint, lightly, lightly_1_6, mmpretrain, official, saved
from safetensors.torch import save_file
from tiny import images_for, tiny_model
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, ViTMAEForPreTraining

from mae.bench.peer import make_peer, peer_noise
from mae.errors import MAEError, UsageError
from mae.interop.imports.convert import WeightMetadata
from mae.interop.imports.load import load_external
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder

TOLD = WeightMetadata(**HEADS, norm_pix_loss=True)
WRITERS: dict[str, Callable[[MaskedAutoencoder], dict[str, Tensor]]] = {
    "official": official,
    "lightly": lightly,
    "lightly 1.6": lightly_1_6,
    "mmpretrain": mmpretrain,
}
SIZES: dict[str, dict[str, Any]] = {
    "wide": {},
    "square": {"img_size": 16},
    "one channel": {"in_chans": 1},
    "13 channels": {"in_chans": 13, "img_size": 8},
    "rectangular patch": {"patch_size": (4, 8), "img_size": (16, 24)},
    "no class token": {"cls_token": False},
    "learned positions": {"pos_embed": "learned", "img_size": 16},
}


def load(path: Path, told: WeightMetadata = TOLD, **options: Any) -> tuple[PretrainedEncoder, Any]:
    return load_external(path, metadata=told, **{"photo_check": False, **options})


def assert_same(loaded: PretrainedEncoder, model: PretrainedEncoder) -> None:
    """The same tensors, bit for bit, in the same architecture."""
    expected = model.state_dict()
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    images = images_for(model)  # type: ignore[arg-type]
    assert torch.equal(loaded.encode(images).patches, model.encode(images).patches)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_masked_autoencoder_comes_in_bit_by_bit(writer: str, size: str, tmp_path: Path) -> None:
    model = tiny_model(**SIZES[size]).eval()
    loaded, report = load(saved(tmp_path / "w.pth", WRITERS[writer](model)))
    assert isinstance(loaded, MaskedAutoencoder)
    assert_same(loaded, model)
    plan = model.plan(images_for(model), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(images_for(model), plan=plan).loss, model(images_for(model), plan=plan).loss)
    assert report.encoder.tensors == report.encoder.tensors_expected and not report.missing
    assert "same outputs as timm's plain vision transformer" in report.line()
    assert report.ignored == (("backbone.mask_token",) if writer.startswith("lightly") else ())


@pytest.mark.parametrize("size", SIZES)
def test_an_encoder_alone_comes_in_bit_by_bit(size: str, tmp_path: Path) -> None:
    model = tiny_model(**SIZES[size]).eval()
    alone = PretrainedEncoder(encoder=model.encoder, config=model.config)
    path = tmp_path / "model.safetensors"
    save_file(official(alone), path)
    loaded, report = load(path)
    assert type(loaded) is PretrainedEncoder
    assert_same(loaded, alone)
    assert "no decoder" in report.line() and "same outputs as timm's plain vision transformer" in report.line()


def test_a_decoder_that_lost_its_first_layer_is_not_left_behind_without_a_word(tmp_path: Path) -> None:
    tensors = official(tiny_model())
    cut = {name: tensor for name, tensor in tensors.items() if not name.startswith("decoder_embed.")}
    with pytest.raises(MAEError, match=r"tensors that no such model has \('decoder_blocks\.0\."):
        load(saved(tmp_path / "w.pth", cut))


def test_a_mask_token_beside_an_encoder_is_named_as_left_behind(tmp_path: Path) -> None:
    model = tiny_model()
    alone = official(PretrainedEncoder(encoder=model.encoder, config=model.config))
    _, report = load(saved(tmp_path / "w.pth", alone | {"mask_token": torch.zeros(1, 24)}))  # as DINOv2's code saves it
    assert report.ignored == ("mask_token",)


WRAPPERS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "module.": lambda tensors: {f"module.{name}": tensor for name, tensor in tensors.items()},
    "compiled": lambda tensors: {"model": {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}},
    "compiled in parts": lambda tensors: {name.replace(".attn.", "._orig_mod.attn."): t for name, t in tensors.items()},
    "Lightning": lambda tensors: {
        "state_dict": {f"model.{name}": tensor for name, tensor in tensors.items()},
        "pytorch-lightning_version": "2.5.0",
        "hyper_parameters": {"lr": 1e-3},
    },
    "FSDP": lambda tensors: {
        f"_fsdp_wrapped_module.{name}".replace("0.", "0._fsdp_wrapped_module.", 1): t for name, t in tensors.items()
    },
    "official training": lambda tensors: as_checkpoint(tensors, norm_pix_loss=True, mask_ratio=0.6, input_size=16),
    "half precision": lambda tensors: {name: tensor.half() for name, tensor in tensors.items()},
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_wrapped_comes_in_too(wrapper: str, tmp_path: Path) -> None:
    model = tiny_model(img_size=16, mask_ratio=0.6 if wrapper == "official training" else 0.75).eval()
    if wrapper == "half precision":
        model.load_state_dict({name: tensor.half().float() for name, tensor in model.state_dict().items()})
    told = WeightMetadata(**HEADS) if wrapper == "official training" else TOLD
    loaded, _ = load(saved(tmp_path / "w.ckpt", WRAPPERS[wrapper](official(model))), told)
    assert_same(loaded, model)
    assert loaded.config is not None and model.config is not None
    assert loaded.config.mask.ratio == model.config.mask.ratio and loaded.config.tokenizer.mean == (0.485, 0.456, 0.406)


def assert_same_predictions(model: MaskedAutoencoder, peer: ViTMAEForPreTraining) -> None:
    """Loss, prediction and mask of both, with the same patches masked."""
    images = images_for(model)
    plan = model.plan(images, generator=torch.Generator().manual_seed(2))
    loss, pred, mask = model(images, plan=plan.predict_all())
    theirs = peer(images, noise=peer_noise(plan))
    assert torch.equal(mask, theirs.mask)
    assert_close(loss, theirs.loss, rtol=1e-5, atol=1e-5)
    assert_close(pred, theirs.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    "changes", [{}, {"norm_eps": 1e-12}, {"norm_pix_loss": False}, {"in_chans": 13, "img_size": 8}]
)
def test_hugging_faces_masked_autoencoder_is_the_same_in_numbers(
    changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    model = tiny_model(**{"img_size": 16, **changes}).eval()
    peer = make_peer(model)
    peer.config.image_size = 16 if "img_size" not in changes else 8
    ViTMAEForPreTraining.save_pretrained(peer, tmp_path)
    if name != "model.safetensors":  # as older versions wrote it, whose names are the new one's when in memory
        (tmp_path / "model.safetensors").unlink()
        torch.save(peer.state_dict(), tmp_path / name)
    loaded, report = load(tmp_path, WeightMetadata())
    assert isinstance(loaded, MaskedAutoencoder) and "same outputs as transformers" in report.line()
    assert loaded.config is not None and model.config is not None
    assert loaded.config.encoder.norm_eps == model.config.encoder.norm_eps
    assert_same_predictions(loaded, peer)
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key


@pytest.mark.parametrize("size", [(8, 32), (28, 12), (16, 24)])
def test_hugging_faces_rectangles_are_the_same_in_numbers(size: tuple[int, int], tmp_path: Path) -> None:
    """Rows and columns told apart: nothing of a square grid can hide an exchange of them."""
    model = tiny_model(img_size=size).eval()
    peer = make_peer(model)
    peer.config.image_size = list(size)
    ViTMAEForPreTraining.save_pretrained(peer, tmp_path)
    loaded, _ = load(tmp_path, WeightMetadata())
    assert isinstance(loaded, MaskedAutoencoder) and loaded.config is not None and loaded.config.layout.size == size
    assert_same_predictions(loaded, peer)


@pytest.mark.parametrize("said", [[32, 8], 16])
def test_sines_of_another_grid_than_the_folder_says_are_refused(said: Any, tmp_path: Path) -> None:
    """As many patches, so that everything fits, and each patch at another's place."""
    peer = make_peer(tiny_model(img_size=(8, 32)))
    peer.config.image_size = said
    ViTMAEForPreTraining.save_pretrained(peer, tmp_path)
    grid = "8x2" if said == [32, 8] else "4x4"
    with pytest.raises(
        UsageError, match=f"the sine-cosine table of a 2x8 patch grid, .* makes {grid}; .*--trained-size"
    ):
        load(tmp_path, WeightMetadata())
    loaded, _ = load(tmp_path, WeightMetadata(trained_size=(8, 32)))
    assert loaded.config is not None and loaded.config.layout.size == (8, 32)


def test_hugging_faces_classifier_leaves_its_head_behind(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    theirs = ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4, num_channels=3)).eval()
    for weight in theirs.parameters():
        nn.init.normal_(weight, std=0.2)
    theirs.save_pretrained(tmp_path)
    ViTImageProcessor(image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.6, 0.7]).save_pretrained(tmp_path)
    loaded, report = load(tmp_path, WeightMetadata())
    assert type(loaded) is PretrainedEncoder and loaded.config is not None
    assert loaded.config.tokenizer.mean == (0.1, 0.2, 0.3) and loaded.config.encoder.norm_eps == 1e-12
    assert report.ignored == ("classifier.bias", "classifier.weight")
    images = torch.randn(2, 3, 16, 16)
    expected = theirs.vit(images).last_hidden_state
    assert_close(loaded.encode(images).cls, expected[:, 0], rtol=1e-5, atol=1e-5)
    assert_close(loaded.encode(images).patches, expected[:, 1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", [True, False])
def test_timms_folder_tells_sizes_statistics_and_licence(cls: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pool = "token" if cls else "avg"
    theirs = timm.create_model(
        "vit_tiny_patch16_224", num_classes=5, class_token=cls, global_pool=pool, fc_norm=False, **TIMM_VIT
    )
    for weight in theirs.parameters():
        nn.init.normal_(weight, std=0.2)
    timm.models.save_for_hf(theirs, str(tmp_path), model_args={**TIMM_VIT}, safe_serialization=True)
    loaded, report = load(tmp_path, WeightMetadata())
    assert loaded.config is not None
    assert (
        loaded.config.layout.size == (32, 48)
        and loaded.config.encoder.num_heads == 3
        and loaded.config.tokenizer.mean == (0.5, 0.5, 0.5)
    )
    assert report.origin["licence"] == "apache-2.0"
    images = torch.randn(2, 3, 32, 48)
    expected = theirs.eval().forward_features(images)
    assert_close(loaded.encode(images).patches, expected[:, int(cls) :], rtol=1e-5, atol=1e-5)
    if not cls:
        assert loaded.encode(images).cls is None


def test_arguments_of_timms_model_stand_above_its_usual_size(tmp_path: Path) -> None:
    """timm before 1.0.31 writes an `input_size` of the architecture's name, however large the images were."""
    theirs = timm.create_model("vit_tiny_patch16_224", **TIMM_VIT | {"img_size": 32})
    timm.models.save_for_hf(theirs, str(tmp_path), model_args={**TIMM_VIT, "img_size": 32}, safe_serialization=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["pretrained_cfg"]["input_size"] = [3, 224, 224]
    path.write_text(json.dumps(config))
    loaded, _ = load(tmp_path, WeightMetadata())
    assert loaded.config is not None and loaded.config.layout.size == (32, 32)


def described(folder: Path, **changes: Any) -> None:
    """A folder as transformers writes it, with other entries in its configuration."""
    ViTMAEForPreTraining.save_pretrained(make_peer(tiny_model(img_size=16).eval()), folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_size": 16, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_labels": 3_000_000},
        {"attn_implementation": "kernels-community/flash-attn"},
        {"_name_or_path": "/", "dtype": "float16", "auto_map": {"AutoModel": "evil.Model"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_entries_of_a_configuration_that_name_no_size_go_unheard(changes: dict[str, Any], tmp_path: Path) -> None:
    described(tmp_path, image_size=[16, 16], **changes)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    _, report = load(tmp_path, WeightMetadata())
    assert "same outputs as transformers" in report.line()


def test_a_configuration_of_other_sizes_is_refused_before_they_are_made(tmp_path: Path) -> None:
    described(tmp_path, intermediate_size=1_000_000_000)
    with pytest.raises(MAEError, match="config.json and its tensors disagree on intermediate_size"):
        load(tmp_path, WeightMetadata())


def test_a_divided_model_needs_no_more_than_its_map(tmp_path: Path) -> None:
    described(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"any": "part.safetensors"}}))
    _, report = load(tmp_path, WeightMetadata())
    assert "same outputs as transformers" in report.line()


@pytest.mark.parametrize("side", [-16, 0])
def test_images_of_no_size_are_refused(side: int, tmp_path: Path) -> None:
    tensors = official(tiny_model(img_size=16))
    path = saved(tmp_path / "w.pth", as_checkpoint(tensors, input_size=side, norm_pix_loss=True))
    with pytest.raises(UsageError, match=f"image size {side}x{side} is not a multiple"):
        load(path, WeightMetadata(**HEADS))


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_ratio": 8 / 3, "embed_dim": 48, "decoder_embed_dim": 32},
        {"mlp_ratio": 1.3, "embed_dim": 36, "decoder_embed_dim": 28},
    ],
    ids=["8/3", "1.3"],
)
def test_widths_that_were_rounded_down_come_in(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(img_size=16, num_heads=2, decoder_num_heads=2, **changes)
    path = saved(tmp_path / "w.pth", official(model))
    loaded, _ = load(path, WeightMetadata(num_heads=2, decoder_num_heads=2, norm_pix_loss=True))
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key


def test_a_quotient_that_was_rounded_off_comes_in(tmp_path: Path) -> None:
    sizes = {**TIMM_VIT, "embed_dim": 336, "depth": 1, "num_heads": 2, "mlp_ratio": 816.5 / 336}
    vit = timm.models.vision_transformer.VisionTransformer(**sizes, num_classes=0)
    assert len(vit.state_dict()["blocks.0.mlp.fc1.weight"]) == 816 and int(336 * (816 / 336)) == 815
    loaded, _ = load(saved(tmp_path / "w.pth", vit.state_dict()), WeightMetadata(num_heads=2, trained_size=(32, 48)))
    assert loaded.encoder.state_dict()["blocks.0.mlp.fc1.weight"].shape == (816, 336)
