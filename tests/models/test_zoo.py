"""Every named size: it builds, it learns, it has the parameters the paper's models have."""

import importlib

import pytest
import torch
from torch import nn

from mae.core.method import MethodConfig
from mae.errors import UsageError
from mae.models import presets as zoo
from mae.models.build import build_model
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.presets import ALIASES, create_model, list_models, model_config

# name: encoder width, blocks, heads, decoder width, blocks, heads, patch, image
EXPECTED = {
    "mae_vit_base_patch16_dec512d8b": (768, 12, 12, 512, 8, 16, 16, 224),
    "mae_vit_large_patch16_dec512d8b": (1024, 24, 16, 512, 8, 16, 16, 224),
    "mae_vit_huge_patch14_dec512d8b": (1280, 32, 16, 512, 8, 16, 14, 224),
    "mae_vit_lesson_patch4": (256, 4, 4, 128, 2, 4, 4, 32),
}


def on_meta(name: str) -> MaskedAutoencoder:
    with torch.device("meta"):
        return create_model(name)


def millions(module: torch.nn.Module) -> float:
    return sum(weight.numel() for weight in module.parameters()) / 1e6


@pytest.mark.parametrize("name", [*list_models(), *ALIASES])
def test_every_name_can_be_imported_and_builds_in_full_size(name: str) -> None:
    factory = getattr(importlib.import_module("mae.models.presets"), name)
    assert factory is getattr(zoo, ALIASES.get(name, name)) and zoo.find_model(name) is factory
    model = on_meta(name)
    assert model.config == on_meta(ALIASES.get(name, name)).config
    assert model.config is not None and factory.__doc__


@pytest.mark.parametrize("name", list_models())
def test_every_size_runs_forward_and_backward_and_trains_every_weight(name: str) -> None:
    config = on_meta(name).config
    assert config is not None
    encoder, patch = config.encoder, config.layout.patch
    size = (2 * patch[0], 2 * patch[1])
    depth = min(encoder.depth, 2) if encoder.embed_dim > 512 else encoder.depth  # widths in full, memory in bounds
    model = create_model(name, img_size=size, depth=depth)
    loss, pred, mask = model(torch.randn(2, 3, *size))
    assert loss.isfinite() and pred.shape == (2, 4, config.layout.token_values) and mask.sum() == 6
    loss.backward()
    for weight_name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), weight_name
        if not weight_name.endswith("attn.qkv.bias"):  # the bias of the keys shifts all scores alike
            assert weight.grad.abs().max() > 0, weight_name


@pytest.mark.parametrize("name", EXPECTED)
def test_sizes_are_those_of_the_papers(name: str) -> None:
    c = on_meta(name).config
    assert c is not None
    sizes = [size for part in (c.encoder, c.decoder) for size in (part.embed_dim, part.depth, part.num_heads)]
    assert (*sizes, c.layout.patch[0], c.layout.size[0]) == EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "whole", "encoder"),
    [
        ("mae_vit_base_patch16", 111.91, 86.57),
        ("mae_vit_large_patch16", 329.54, 304.3),
        ("mae_vit_huge_patch14", 657.07, 632.0),
    ],
)
def test_parameters_are_the_published_numbers(name: str, whole: float, encoder: float) -> None:
    """The published totals count both position tables with a row for the class token, although nothing trains them.

    The published encoder is the classifier's: with its own table and a head for 1000 classes.
    """
    model = on_meta(name)
    c = model.config
    assert c is not None
    rows = c.layout.num_tokens + 1
    tables = rows * (c.encoder.embed_dim + c.decoder.embed_dim) / 1e6
    assert millions(model) + tables == pytest.approx(whole, abs=0.005)
    head = 1000 * (c.encoder.embed_dim + 1) / 1e6
    digits = 0.006 if encoder == 86.57 else 0.06
    assert millions(model.encoder) + rows * c.encoder.embed_dim / 1e6 + head == pytest.approx(encoder, abs=digits)


def test_a_configuration_is_put_together_once() -> None:
    one = model_config("mae_vit_lesson_patch4", img_size=(64, 64))
    assert model_config("mae_vit_lesson_patch4", img_size=[64, 64]) is one
    assert model_config("mae_vit_lesson_patch4", img_size=(64, 32)) != one
    for _ in range(2):
        with pytest.raises(UsageError, match="image size 63x63"):
            model_config("mae_vit_lesson_patch4", img_size=63)
    assert model_config("mae_vit_lesson_patch4", depth=1).encoder.depth == 1
    with pytest.raises(UsageError, match="depth"):
        model_config("mae_vit_lesson_patch4", depth=True)


def test_vit_huge_is_drawn_from_its_range() -> None:
    """Its blocks are alike, so a few do: all of them are 2.6 GB."""
    torch.manual_seed(0)
    model = create_model("mae_vit_huge_patch14", depth=2)
    last = model.encoder.blocks[1].mlp.fc2.weight
    assert 0.99 * (6 / (5 * 1280)) ** 0.5 < last.abs().max() <= (6 / (5 * 1280)) ** 0.5


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("mae_vit_bas_patch16", "mae_vit_base_patch16"),
        ("mae_vit_compact", "mae_vit_compact_patch16"),
        ("vit_huge", "mae_vit_huge_patch14"),
        ("", "mae_vit_ultrasmall_patch16"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"unknown model '{wrong}'; nearest: .*{nearest}"):
        create_model(wrong)


def test_unknown_options_are_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown option 'image_size'.*img_size"):
        create_model("mae_vit_lesson_patch4", image_size=64)


def test_options_override_the_size() -> None:
    model = create_model("mae_vit_lesson_patch4", img_size=(16, 24), patch_size=(4, 8), in_chans=2, mask_ratio=0.5)
    assert model.encoder.grid == (4, 3) and model.encoder.embed_dim == 256
    assert model(torch.randn(1, 2, 16, 24)).mask.sum() == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"img_size": (30, 32)}, "not a multiple of the patch"),
        ({"mask_ratio": 1.0}, "mask_ratio"),
        ({"mask_ratio": 0.999}, "leaves 0 visible"),
        ({"num_heads": 5}, "5 heads"),
        ({"embed_dim": 6, "num_heads": 2}, "multiple of 4"),
        ({"pos_embed": "rope"}, "pos_embed"),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(changes: dict[str, object], message: str) -> None:
    options: dict[str, object] = {"img_size": (32, 32), "embed_dim": 24, "num_heads": 3, "depth": 1, "decoder_depth": 1}
    with pytest.raises(UsageError, match=message):
        build_model(MethodConfig().override(options | changes))


def test_equal_seeds_give_equal_weights() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(create_model("mae_vit_lesson_patch4"))
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("decoder", ["self", "cross"])
def test_every_norm_has_the_eps_that_was_asked_for(decoder: str) -> None:
    model = create_model("mae_vit_lesson_patch4", decoder=decoder, norm_eps=1e-3)
    norms = [layer.eps for layer in model.modules() if isinstance(layer, nn.LayerNorm)]
    assert set(norms) == {1e-3} and len(norms) > 10
