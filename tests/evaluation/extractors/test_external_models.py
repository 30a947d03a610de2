"""Other projects' models: the features and the preprocessing must be their own."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import transformers
from data.pictures import Pictures
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from mae.data.dataset.images import load_images
from mae.errors import MAEError, UsageError
from mae.evaluation.extractors.batches import normalised_batches
from mae.evaluation.extractors.external_models import wrap_hf, wrap_timm
from mae.evaluation.extractors.extractor import PATCHES, weights_digest
from mae.evaluation.extractors.open import open_extractor

CPU = torch.device("cpu")
BATCH = torch.randn(3, 3, 160, 160, generator=torch.Generator().manual_seed(0))


def timm_model(name: str, **options) -> torch.nn.Module:
    """Every weight random, so that none hides behind a zero."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=0, **options).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


@pytest.mark.parametrize(
    ("name", "options", "prefix", "has_cls"),
    [
        ("test_vit", {}, 1, True),
        ("test_vit", {"reg_tokens": 3}, 4, True),
        ("test_vit", {"class_token": False, "global_pool": "avg"}, 0, False),
        ("test_vit", {"class_token": False, "reg_tokens": 2, "global_pool": "avg"}, 2, False),
    ],
)
@torch.no_grad()
def test_a_transformer_of_timm(name, options, prefix, has_cls):
    model = timm_model(name, **options)
    tokens = model.forward_features(BATCH)
    named = wrap_timm(model, name="x").named(BATCH)
    assert list(named) == ["pooled", *(["cls"] if has_cls else []), "mean", PATCHES]
    expected = {"mean": tokens[:, prefix:].mean(dim=1), PATCHES: tokens[:, prefix:], "cls": tokens[:, 0]}
    expected["pooled"] = model.forward_head(tokens, pre_logits=True)
    assert tokens.shape[1] == prefix + 100
    for key, values in named.items():
        torch.testing.assert_close(values, expected[key], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "last"), [("test_resnet", False), ("test_convnext", False), ("swin_tiny_patch4_window7_224", True)]
)
@torch.no_grad()
def test_a_map_of_timm(name, last):
    options = {"img_size": 64, "window_size": 2, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 1)} if last else {}
    model, batch = timm_model(name, **options), BATCH[..., :64, :64]
    cells = model.forward_features(batch)
    named = wrap_timm(model, name="x").named(batch)
    torch.testing.assert_close(named["pooled"], model.forward_head(cells, pre_logits=True), atol=1e-5, rtol=1e-5)
    cells = cells if last else cells.permute(0, 2, 3, 1)
    assert list(named) == ["pooled", PATCHES]
    torch.testing.assert_close(named[PATCHES], cells.reshape(3, -1, model.num_features), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_where_timm_does_not_say_what_leads_there_is_only_its_own_feature():
    model = timm.models.volo.VOLO(
        layers=(1, 1, 1, 1), img_size=64, embed_dims=(24,) * 4, num_heads=(2,) * 4, num_classes=0
    )
    assert list(wrap_timm(model, name="x").named(BATCH[..., :64, :64])) == ["pooled"]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"crop_mode": "squash", "crop_pct": 1.0},
        {"interpolation": "bilinear", "crop_pct": 0.8, "mean": (0.1, 0.2, 0.3)},
    ],
)
@pytest.mark.parametrize("size", [(200, 311), (400, 170), (97, 98)])
def test_images_are_made_as_timm_makes_them(size, changed):
    model = timm_model("test_vit", pretrained_cfg_overlay=changed)
    config = timm.data.resolve_model_data_config(model)
    rows, columns = np.mgrid[: size[0], : size[1]] / 9
    pixels = np.uint8(127 + 127 * np.stack([np.sin(rows), np.cos(columns + rows), np.sin(columns * rows / 40)], -1))
    theirs = timm.data.create_transform(**config, is_training=False)(Image.fromarray(pixels))
    images = load_images(Pictures([pixels]), in_chans=3)
    ours = next(normalised_batches(images, wrap_timm(model, name="x").preprocessing, device=CPU))[0]
    # Pillow and torchvision both round to whole numbers, each pass in its own way: two levels of 255 apart at most.
    levels = (ours - theirs).abs() * torch.tensor(config["std"])[:, None, None] * 255
    assert levels.max() < 2.01 and levels.mean() < 0.3
    assert ours.shape == (3, *config["input_size"][1:])


def save(model: torch.nn.Module, folder: Path, **options) -> Path:
    timm.models.save_for_hf(model, folder, **{"safe_serialization": True, **options})
    return folder


def test_a_folder_of_timm_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = timm_model("test_vit")
    state = torch.get_rng_state()
    found = open_extractor(f"timm:local-dir:{save(model, tmp_path / 'm')}", device=CPU)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        torch.testing.assert_close(found.named(BATCH)["cls"], model.forward_features(BATCH)[:, 0])
    assert found.model is None and found.identity == wrap_timm(model, name="y").identity
    assert found.name == f"timm:local-dir:{tmp_path / 'm'}"


def test_a_folder_with_a_pickle_alone_is_refused(tmp_path):
    folder = save(timm_model("test_vit"), tmp_path, safe_serialization=False)
    assert (folder / "pytorch_model.bin").is_file()
    with pytest.raises(UsageError, match="holds no model.safetensors; expected a folder that .*safe_serialization"):
        open_extractor(f"timm:local-dir:{folder}", device=CPU)
    with pytest.raises(UsageError, match="holds no model.safetensors"):
        open_extractor("timm:local-dir:/nowhere", device=CPU)


def test_a_pickle_on_the_hub_is_not_asked_for(monkeypatch):
    asked = []

    def download(repo_id, filename, **_):
        asked.append((repo_id, filename))
        raise LocalEntryNotFoundError("no such file\nand a second line")

    monkeypatch.setattr("timm.models._hub.hf_hub_download", download)
    with pytest.raises(MAEError, match=r"^timm:test_vit cannot be loaded: no such file$") as raised:
        open_extractor("timm:test_vit", device=CPU)
    assert not isinstance(raised.value, UsageError)
    assert asked == [("timm/test_vit.r160_in1k", "model.safetensors")]


def test_names_that_timm_does_not_know(monkeypatch):
    for name in ("vit_tiny_patch16_225", "test_vit.nonsense", "vit_giant_patch14_224", "zzz"):
        with pytest.raises(UsageError, match=r"no such model with weights as safetensors; (did you mean|'timm\.list)"):
            open_extractor(f"timm:{name}", device=CPU)
    with pytest.raises(UsageError, match=r"did you mean .*vit_tiny_patch16_224"):
        open_extractor("timm:vit_tiny_patch16_225", device=CPU)


@pytest.mark.parametrize("spec", ["timm:test_vit", "hf:google/vit-base-patch16-224", "hf:/nowhere"])
def test_without_network_it_is_said_in_one_line(spec, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(MAEError, match=f"^{spec} cannot be loaded: ") as raised:
        open_extractor(spec, device=CPU)
    assert not isinstance(raised.value, UsageError) and "\n" not in str(raised.value)


@pytest.mark.parametrize(("package", "spec"), [("timm", "timm:test_vit"), ("transformers", "hf:x/y")])
def test_a_package_that_is_missing_is_named(package, spec, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(UsageError, match=f"needs the package {package}, .*pip install {package}"):
        open_extractor(spec, device=CPU)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def hf_model(kind: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, image_size=32, patch_size=8, **options)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


def processor(**options) -> transformers.ViTImageProcessor:
    return transformers.ViTImageProcessor(**{"size": {"height": 32, "width": 32}, **options})


SQUARES = BATCH[..., :32, :32]


@pytest.mark.parametrize("kind", ["ViT", "Beit"])
def test_a_checkpoint_of_16_bits(kind, tmp_path):
    model = hf_model(kind).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    processor().save_pretrained(tmp_path)
    named = open_extractor(f"hf:{tmp_path}", device=CPU).named(SQUARES)
    with torch.no_grad():
        tokens = model(pixel_values=SQUARES.bfloat16()).last_hidden_state
    torch.testing.assert_close(named[PATCHES].float(), tokens[:, 1:].float())


@pytest.mark.parametrize(
    ("kind", "options", "prefix"),
    [("ViT", {}, 1), ("Dinov2", {}, 1), ("Dinov2WithRegisters", {"num_register_tokens": 3}, 4)],
)
def test_a_transformer_of_hugging_face(kind, options, prefix, tmp_path):
    model = hf_model(kind, **options)
    model.save_pretrained(tmp_path)
    processor().save_pretrained(tmp_path)
    state = torch.get_rng_state()
    found = open_extractor(f"hf:{tmp_path}", device=CPU)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        output = model(pixel_values=SQUARES)
    tokens = output.last_hidden_state
    expected = {"cls": tokens[:, 0], "mean": tokens[:, prefix:].mean(dim=1), PATCHES: tokens[:, prefix:]}
    named = found.named(SQUARES)
    assert list(named) == ["pooled", "cls", "mean", PATCHES] and named[PATCHES].shape[1] == 16
    for name, values in {**expected, "pooled": output.pooler_output}.items():
        torch.testing.assert_close(named[name], values, atol=1e-5, rtol=1e-5)


def test_vit_mae_masks_nothing_and_keeps_the_order(tmp_path):
    model = hf_model("ViTMAE", decoder_hidden_size=16, decoder_num_attention_heads=2, decoder_num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    processor().save_pretrained(tmp_path)
    found = open_extractor(f"hf:{tmp_path}", device=CPU)
    assert model.config.mask_ratio == 0.75
    named = found.named(SQUARES)
    # By a plain ViT with the same weights, which has no way to hide or reorder anything.
    vit = hf_model("ViT")
    missing, _ = vit.load_state_dict(model.state_dict(), strict=False)
    assert missing == [] or all(name.startswith("pooler") for name in missing)
    with torch.no_grad():
        tokens = vit(pixel_values=SQUARES).last_hidden_state
    torch.testing.assert_close(named[PATCHES], tokens[:, 1:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(named["cls"], tokens[:, 0], atol=1e-4, rtol=1e-4)
    assert torch.equal(found.named(SQUARES)["mean"], named["mean"])


def test_tokens_that_find_objects_are_no_patches():
    config = transformers.YolosConfig(**SMALL, image_size=[32, 32], patch_size=8, num_detection_tokens=5)
    model = transformers.YolosModel(config).eval()
    found = wrap_hf(model, processor(), name="x")
    with torch.no_grad():
        output = model(pixel_values=SQUARES, output_hidden_states=True)
    tokens = output.last_hidden_state
    assert tokens.shape[1] == 1 + 16 + 5
    torch.testing.assert_close(found.named(SQUARES)[PATCHES], tokens[:, 1:17])
    torch.testing.assert_close(found.named(SQUARES)["mean"], tokens[:, 1:17].mean(dim=1))
    first, last = found.blocks.maps(SQUARES, [0, 1])
    torch.testing.assert_close(first.flatten(2).mT, output.hidden_states[1][:, 1:17])
    torch.testing.assert_close(last.flatten(2).mT, tokens[:, 1:17])


def test_a_decoder_of_objects_is_refused():
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], out_features=["stage1"])
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 16}
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, **sizes
    )
    with pytest.raises(UsageError, match="^hf:x is a DetrModel, whose decoder answers with tokens of objects, not of"):
        wrap_hf(transformers.DetrModel(config), processor(), name="hf:x")


def test_merged_patches_have_no_class_token():
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 1], window_size=4
    )
    model = transformers.SwinModel(config).eval()
    named = wrap_hf(model, processor(), name="x").named(SQUARES)
    with torch.no_grad():
        tokens = model(pixel_values=SQUARES).last_hidden_state
    assert "cls" not in named
    torch.testing.assert_close(named[PATCHES], tokens)
    torch.testing.assert_close(named["mean"], tokens.mean(dim=1))


@pytest.mark.parametrize(
    ("kind", "has_cls", "size"),
    [
        ("Pvt", True, (64, 64)),
        ("DINOv3ConvNext", False, (64, 64)),
        ("DINOv3ConvNext", False, (96, 160)),
        ("DINOv3ConvNext", False, (72, 72)),
    ],
)
def test_a_token_before_merged_patches_is_none_of_them(kind, has_cls, size):
    config = getattr(transformers, f"{kind}Config")(hidden_sizes=[8, 8, 10, 8], depths=[1, 1, 1, 1], image_size=size[0])
    model, batch = getattr(transformers, f"{kind}Model")(config).eval(), BATCH[:, :, : size[0], : size[1]]
    named = wrap_hf(model, processor(), name="x").named(batch)
    with torch.no_grad():
        tokens = model(pixel_values=batch).last_hidden_state
    assert tokens.shape[1] == 1 + (size[0] // 32) * (size[1] // 32)
    torch.testing.assert_close(named[PATCHES], tokens[:, 1:])
    torch.testing.assert_close(named["mean"], tokens[:, 1:].mean(dim=1))
    assert ("cls" in named) == has_cls


def test_the_stages_of_segformer_are_counted_from_its_first():
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2]
    )
    found = wrap_hf(transformers.SegformerModel(config), processor(), name="x")
    with torch.no_grad():
        maps = found.blocks.maps(SQUARES, [0, 1, 3])
    assert [each.shape[1:] for each in maps] == [(8, 8, 8), (8, 4, 4), (16, 1, 1)]


def test_maps_with_their_channels_last_are_turned():
    sizes = {**SMALL, "mlp_dim": 32, "output_channels": 12, "window_size": 2, "global_attn_indexes": [1]}
    model = transformers.SamVisionModel(transformers.SamVisionConfig(**sizes, image_size=32, patch_size=8)).eval()
    with torch.no_grad():
        first, last = wrap_hf(model, processor(), name="x").blocks.maps(SQUARES, [0, 1])
        output = model(pixel_values=SQUARES, output_hidden_states=True)
    torch.testing.assert_close(first, output.hidden_states[1].permute(0, 3, 1, 2))
    torch.testing.assert_close(last, output.last_hidden_state)
    assert first.shape[1:] == (16, 4, 4) and last.shape[1:] == (12, 4, 4)


def test_blocks_that_are_not_counted_are_refused():
    sizes = {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320}
    found = wrap_hf(
        transformers.EfficientNetModel(transformers.EfficientNetConfig(**sizes)).eval(), processor(), name="x"
    )
    last = found.blocks.depth - 1
    with torch.no_grad():
        assert found.blocks.maps(SQUARES, [last])[0].shape[1:] == (320, 1, 1)
    with pytest.raises(UsageError, match="EfficientNetModel does not give what leaves each of its 64 blocks"):
        found.blocks.maps(SQUARES, [last - 1, last])


def test_a_convolutional_net_of_hugging_face():
    config = transformers.ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1])
    model = transformers.ConvNextModel(config).eval()
    named = wrap_hf(model, transformers.ConvNextImageProcessor(size={"shortest_edge": 64}), name="x").named(BATCH)
    with torch.no_grad():
        output = model(pixel_values=BATCH)
    torch.testing.assert_close(named[PATCHES].transpose(1, 2).unflatten(2, (5, 5)), output.last_hidden_state)
    torch.testing.assert_close(named["pooled"], output.pooler_output.flatten(1))


PROCESSORS = {
    "bilinear": transformers.ViTImageProcessor(size={"height": 32, "width": 32}),
    "bicubic": transformers.ViTImageProcessor(size={"height": 32, "width": 32}, resample=3, image_mean=[0.1, 0.2, 0.3]),
    "plain": transformers.ViTImageProcessor(size={"height": 32, "width": 32}, do_normalize=False),
    "to two": transformers.ViTImageProcessor(size={"height": 32, "width": 32}, rescale_factor=1 / 127.5),
    "centre": transformers.BitImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}),
    "share": transformers.ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=0.8),
    "whole": transformers.ConvNextImageProcessor(size={"shortest_edge": 384}, crop_pct=0.8),
}


@pytest.mark.parametrize(
    ("which", "wide"), [*((which, 1.0) for which in PROCESSORS), ("bilinear", 1.6), ("bicubic", 0.7), ("plain", 1.6)]
)
def test_images_are_made_as_hugging_face_makes_them(which, wide):
    theirs_by = PROCESSORS[which]
    side = 640 if which == "whole" else 101
    rows, columns = np.mgrid[:side, : int(wide * side)] / (side / 12)
    pixels = np.uint8(127 + 127 * np.stack([np.sin(rows), np.cos(columns + rows), np.sin(columns * rows / 40)], -1))
    theirs = theirs_by(images=Image.fromarray(pixels), return_tensors="pt")["pixel_values"][0]
    preprocessing = wrap_hf(hf_model("ViT"), theirs_by, name="x").preprocessing
    ours = next(normalised_batches(load_images(Pictures([pixels]), in_chans=3), preprocessing, device=CPU))[0]
    levels = (ours - theirs).abs() * torch.tensor(preprocessing.std)[:, None, None] * 255
    assert levels.max() < 2.01 and levels.mean() < 0.3


def test_a_pickle_of_hugging_face_is_refused(tmp_path):
    model = hf_model("ViT")
    model.config.save_pretrained(tmp_path)
    processor().save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(MAEError, match=r"cannot be loaded: .*safetensors"):
        open_extractor(f"hf:{tmp_path}", device=CPU)


def test_a_damaged_file_of_hugging_face_is_reported(tmp_path):
    hf_model("ViT").save_pretrained(tmp_path)
    processor().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(MAEError, match="cannot be loaded"):
        open_extractor(f"hf:{tmp_path}", device=CPU)


def test_a_model_of_text_is_refused():
    config = transformers.BertConfig(**SMALL, vocab_size=10)
    with pytest.raises(UsageError, match="is a BertModel; expected a model that takes images"):
        wrap_hf(transformers.BertModel(config), processor(), name="hf:bert")


def test_images_that_a_model_does_not_take_are_told_in_one_line():
    found = wrap_hf(hf_model("ViT"), processor(size={"height": 64, "width": 64}), name="hf:vit")
    says = r"^hf:vit does not take images of 3 x 64 x 64 .*preprocessor_config.json asks for: Input image size"
    for asked in (found.named, lambda images: found.blocks.maps(images, [0])):
        with pytest.raises(UsageError, match=says):
            asked(torch.zeros(1, 3, 64, 64))


def test_statistics_of_other_channels_than_the_models_are_refused():
    with pytest.raises(UsageError, match="^hf:grey takes images of 1 channel.s., and its .* image_mean of 3 values"):
        wrap_hf(hf_model("ViT", num_channels=1), processor(), name="hf:grey")
    assert wrap_hf(hf_model("ViT", num_channels=1), processor(do_normalize=False), name="x").preprocessing.mean == (0,)


def test_features_do_not_depend_on_the_batch():
    for found in (wrap_timm(timm_model("test_vit"), name="t"), wrap_hf(hf_model("ViT"), processor(), name="h")):
        images = BATCH if found.name == "t" else SQUARES
        alone, together = found.named(images[:1])["mean"], found.named(images)["mean"][:1]
        torch.testing.assert_close(normalize(alone), normalize(together), atol=1e-5, rtol=1e-4)


def test_equal_weights_in_another_architecture_are_another_model():
    """Stored features would be those of the other one."""
    models = [
        timm_model("test_vit", num_heads=heads, act_layer=act)
        for heads, act in ((2, "gelu"), (4, "gelu"), (2, "quick_gelu"))
    ]
    assert len({weights_digest(model) for model in models}) == 1
    assert len({wrap_timm(model, name="x").identity for model in models}) == 3
    assert wrap_timm(models[0], name="x").identity == wrap_timm(models[0], name="y").identity


def test_equal_weights_under_another_pooling_are_another_model():
    found = [
        wrap_timm(timm_model("test_vit", **options), name="x")
        for options in ({}, {"global_pool": "avg"}, {"global_pool": "avg", "pool_include_prefix": True})
    ]
    with torch.no_grad():
        pooled = [of.named(BATCH)["pooled"] for of in found]
    assert not any(torch.equal(one, other) for one, other in pairwise(pooled))
    assert len({of.identity for of in found}) == 3


def test_weights_that_a_checkpoint_lacks_are_not_drawn(tmp_path):
    PROCESSORS["bilinear"].save_pretrained(tmp_path)
    model = hf_model("ViT")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "pooler" not in name}
    assert len(kept) < len(weights)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    found = open_extractor(f"hf:{tmp_path}", device=CPU)
    assert list(found.named(BATCH[..., :32, :32])) == ["cls", "mean", PATCHES]  # `pooled` would be of random weights
    del kept[next(name for name in kept if "layer.0" in name or "layers.0" in name)]
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(MAEError, match=r"lacks 1 of the weights of ViTModel, such as .*layers?\.0\."):
        open_extractor(f"hf:{tmp_path}", device=CPU)
