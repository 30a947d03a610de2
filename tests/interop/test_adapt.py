"""An encoder for other sizes and channels: by named rules, equal to timm's, and told."""

from pathlib import Path

import pytest
import torch
from foreign import HEADS, official, saved
from timm.layers import resample_abs_pos_embed
from timm.models import adapt_input_conv
from tiny import images_for, tiny_model
from torch.testing import assert_close

from mae.errors import UsageError
from mae.interop.adapt import Stem, resample, resized, with_channels
from mae.interop.imports.convert import WeightMetadata
from mae.interop.imports.open import ImportOverrides, import_model
from mae.masks.grid import GridMasking
from mae.masks.random import RandomMasking
from mae.models.detector import DetectionHead, Detector, build_detector
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder

TOLD = WeightMetadata(**HEADS, norm_pix_loss=True)


@pytest.mark.parametrize("new", [(2, 3), (8, 12), (7, 5), (4, 6)], ids=str)
def test_learned_positions_are_resampled_as_timm_does(new: tuple[int, int]) -> None:
    table = torch.randn(24, 16)
    expected = resample_abs_pos_embed(table.unsqueeze(0), list(new), [4, 6], num_prefix_tokens=0)[0]
    assert_close(resample(table, (4, 6), new), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["sincos2d", "learned"])
def test_a_model_takes_another_size(kind: str) -> None:
    model = tiny_model(pos_embed=kind).eval()
    larger, note = resized(model, (32, 24))
    assert isinstance(larger, MaskedAutoencoder) and larger.config is not None and larger.config.layout.grid == (8, 6)
    assert (
        note == f"position embedding {'computed for' if kind == 'sincos2d' else 'resampled (bicubic) to'} a grid of 8x6"
    )
    images = torch.randn(1, 3, 32, 24)
    assert larger.encode(images).patches.shape == (1, 48, 24)
    if kind == "sincos2d":  # any size is known to it
        assert torch.equal(larger.encode(images).patches, model.encode(images).patches)
    same, _ = resized(model, (16, 24))
    assert torch.equal(same.encode(images_for(model)).patches, model.encode(images_for(model)).patches)


def test_a_mask_that_smaller_images_have_no_room_for_is_random_there() -> None:
    model = tiny_model(mask="grid", mask_cell=3)
    same, smaller = resized(model, (32, 24))[0], resized(model, (8, 12))[0]
    assert same.config is not None and same.config.mask == GridMasking(cell=3)
    assert smaller.config is not None and smaller.config.mask == RandomMasking()


@pytest.mark.parametrize(
    ("size", "visible"), [((8, 8), 1), ((4, 12), 1), ((4, 8), 1), ((16, 24), 2)], ids=["four", "three", "two", "enough"]
)
def test_a_mask_ratio_that_leaves_nothing_of_smaller_images_is_lowered(size: tuple[int, int], visible: int) -> None:
    model = tiny_model(mask_ratio=0.9, mask_predicted=0.5)
    config = resized(model, size)[0].config
    assert config is not None and config.mask.num_visible(config.layout) == visible
    assert isinstance(config.mask, RandomMasking) and config.mask.predicted == 0.5
    assert (config.mask.ratio == 0.9) == (size == (16, 24))
    with pytest.raises(UsageError, match="1x1 = 1 patches leaves 0 visible and 1 masked"):
        resized(model, (4, 4))


def test_it_leaves_as_many_patches_as_the_decoder_needs() -> None:
    model = tiny_model(decoder="cross", cls_token=False)
    config = resized(model, (4, 16))[0].config
    assert config is not None and config.mask.num_visible(config.layout) == 2
    with pytest.raises(UsageError, match="1x2 = 2 patches leaves 0 visible"):
        resized(model, (4, 8))


def test_a_detector_takes_other_channels_and_finds_the_same() -> None:
    config = tiny_model(mean=(0.1,) * 3, std=(0.2,) * 3).config
    assert config is not None
    detector = build_detector(config, DetectionHead(size=16, channels=8), class_names=("a", "b"), pretrained=None)
    grey, _ = with_channels(detector, 1, "mean", mean=(0.1,), std=(0.2,))
    assert isinstance(grey, Detector) and grey.class_names == ("a", "b")
    image = torch.rand(1, 1, 16, 24)
    assert_close(grey.answer(image)[1], detector.eval().answer(image.expand(-1, 3, -1, -1))[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 5, 6, 13])
@pytest.mark.parametrize("stem", ["mean", "repeat"])
def test_channels_change_by_a_named_rule(stem: Stem, channels: int) -> None:
    model = tiny_model(mean=(0.1, 0.2, 0.3), std=(0.1, 0.2, 0.3)).eval()
    changed, note = with_channels(model, channels, stem)
    assert type(changed) is PretrainedEncoder and changed.config is not None
    assert changed.config.tokenizer.mean is None and changed.config.layout.channels == channels
    assert note == f"patch embedding adapted from 3 to {channels} channels ({stem}), decoder dropped"
    grey = images_for(model)[:, :1]
    expected = model.encode(grey.expand(-1, 3, -1, -1)).patches
    if stem == "mean" or channels % 3 == 0:
        assert_close(changed.encode(grey.expand(-1, channels, -1, -1)).patches, expected, rtol=1e-4, atol=1e-4)
    kernel = changed.encoder.patch_embed.proj.weight.reshape(24, channels, 4, 4)
    old = model.encoder.patch_embed.proj.weight.reshape(24, 3, 4, 4)
    if stem == "repeat" and channels > 1:  # of one channel timm takes the sum, which is what mean gives
        assert_close(kernel, adapt_input_conv(channels, old.detach()))
    if stem == "mean" and channels == 1:
        assert_close(kernel, adapt_input_conv(1, old.detach()))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (ImportOverrides(in_chans=13), "--in-chans and --stem go together"),
        (ImportOverrides(stem="mean"), "--in-chans and --stem go together"),
        (ImportOverrides(img_size=(17, 24)), "not a multiple of the patch size"),
        (ImportOverrides(in_chans=0, stem="mean"), "in_chans is 0"),
        (ImportOverrides(in_chans=2, stem="mean", mean=(0.5,) * 3, std=(0.5,) * 3), "expected 2 finite numbers"),
        (ImportOverrides(mean=(0.5,) * 3), "--mean and --std go together"),
    ],
    ids=["no stem", "no channels", "size", "none", "statistics", "half of them"],
)
def test_what_cannot_be_done_is_refused(overrides: ImportOverrides, says: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", official(tiny_model()))
    with pytest.raises(UsageError, match=says):
        import_model(path, tmp_path / "out", overrides=overrides, metadata=TOLD, allow_partial=None, photo_check=False)
    assert [found.name for found in tmp_path.iterdir()] == ["w.pth"]


def test_an_import_adapts_and_says_so(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", official(tiny_model()))
    overrides = ImportOverrides(img_size=(32, 48), in_chans=2, stem="repeat", mean=(0.5, 0.4), std=(0.2, 0.1))
    model, report = import_model(
        path, tmp_path / "out", overrides=overrides, metadata=TOLD, allow_partial=None, photo_check=False
    )
    assert model.config is not None and (model.config.layout.size, model.config.layout.channels) == ((32, 48), 2)
    assert model.config.tokenizer.mean == (0.5, 0.4) and model.config.tokenizer.std == (0.2, 0.1)
    assert "adapted from 3 to 2 channels (repeat)" in report.line() and "grid of 8x12" in report.line()
