"""Features of a frozen encoder against those that its own library computes, and what cannot be a teacher."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import interpolate, layer_norm
from torch.testing import assert_close

import mae
from mae.core.contracts import Batch
from mae.core.types import SourceNetwork
from mae.errors import UsageError
from mae.evaluation.extractors.extractor import PATCHES
from mae.evaluation.extractors.open import open_extractor
from mae.models.fingerprint import config_of_file
from mae.pretraining.teacher import open_network
from mae.teachers.frozen import FrozenTeacher

CPU = torch.device("cpu")
STUDENT: dict[str, Any] = {
    "embed_dim": 24, "depth": 2, "num_heads": 3, "decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2,
    "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.1),
}  # fmt: skip
MEAN, STD = (torch.tensor(STUDENT[name]).reshape(3, 1, 1) for name in ("mean", "std"))


def shaken(model: nn.Module) -> nn.Module:
    """With random numbers in every weight, so that none hides behind a zero."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2, generator=generator)
    return model.eval()


def own(folder: Path, **options: Any) -> str:
    sizes = {**STUDENT, "img_size": 32, "patch_size": 8, "depth": 3, "mean": (0.1, 0.2, 0.3), "std": (0.3, 0.2, 0.4)}
    torch.manual_seed(1)
    mae.save(mae.create_model("mae_vit_tiny_patch16", **{**sizes, **options}), folder / "own.safetensors")
    return str(folder / "own.safetensors")


def of_timm(folder: Path, name: str = "test_vit", **options: Any) -> str:
    timm.models.save_for_hf(
        shaken(timm.create_model(name, num_classes=0, **options)), folder / "timm", safe_serialization=True
    )
    return f"timm:local-dir:{folder / 'timm'}"


def of_hugging_face(folder: Path) -> str:
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, image_size=32, patch_size=8, num_register_tokens=3
    )
    shaken(transformers.Dinov2WithRegistersModel(config)).save_pretrained(folder / "hf")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "hf")
    return f"hf:{folder / 'hf'}"


def student(source: str, **options: Any) -> tuple[mae.MaskedAutoencoder, SourceNetwork]:
    """A model with this teacher, measured and handed in."""
    network = open_network(source, device=CPU)
    names = {name.removeprefix("teacher_"): value for name, value in options.items() if name.startswith("teacher_")}
    teacher = FrozenTeacher(source=source, **names).measured(network)
    rest = {name: value for name, value in options.items() if not name.startswith("teacher_")}
    sizes = {"img_size": network.size, "patch_size": network.size[0] // 4, **STUDENT, **rest}
    model = mae.create_model("mae_vit_tiny_patch16", **sizes, target="features", teacher=teacher)
    model.hand_in(network)
    return model, network


def taught(model: mae.MaskedAutoencoder, pixels: Tensor) -> Tensor:
    """What is predicted for images of values in [0, 1]."""
    batch = Batch(x=(pixels - MEAN) / STD, tokenizer=model.tokenizer)
    return model.target(batch, taught=model.taught(batch))


def pixels_of(size: tuple[int, int] = (32, 32), count: int = 2) -> Tensor:
    return torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("make", "patch"), [(own, 8), (of_timm, 16), (of_hugging_face, 8)])
@torch.no_grad()
def test_tokens_are_those_of_the_extractor_for_its_own_images(
    make: Callable[..., str], patch: int, tmp_path: Path
) -> None:
    source = make(tmp_path)
    model, network = student(source, patch_size=patch)
    pixels = pixels_of((network.size[0], network.size[1]))
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (network.mean, network.std))
    expected = open_extractor(source, device=CPU).named((pixels - mean) / std)[PATCHES]
    # dBOT's norm is a module without parameters.
    norm = nn.LayerNorm(expected.shape[-1], elementwise_affine=False)
    found = taught(model, pixels)
    assert found.std() > 0.5 and model.target.width(model.tokenizer.layout, model.config.gives) == found.shape[-1]  # type: ignore[union-attr]
    assert_close(found, norm(expected), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def levels_of(source: str, pixels: Tensor) -> list[Tensor]:
    """The patch tokens after each block, by the libraries themselves."""
    kind, _, name = source.partition(":")
    if kind == "timm":
        model = timm.create_model(name, pretrained=True, num_classes=0).eval()
        mean, std = (torch.tensor(model.pretrained_cfg[each]).reshape(3, 1, 1) for each in ("mean", "std"))
        x = (pixels - mean) / std
        tokens = model.norm_pre(model._pos_embed(model.patch_embed(x)))
        levels = []
        for block in model.blocks:
            levels.append(tokens := block(tokens))
        return [*(each[:, 1:] for each in levels[:-1]), model.norm(levels[-1])[:, 1:]]
    if kind == "hf":
        model = transformers.AutoModel.from_pretrained(name).eval()
        output = model(pixel_values=(pixels - 0.5) / 0.5, output_hidden_states=True)
        return [*(each[:, 4:] for each in output.hidden_states[1:-1]), output.last_hidden_state[:, 4:]]
    encoder = mae.load(source)
    x = (pixels - torch.tensor([0.1, 0.2, 0.3]).reshape(3, 1, 1)) / torch.tensor([0.3, 0.2, 0.4]).reshape(3, 1, 1)
    features = encoder.encode(x, layers=range(3))
    return [*features.layers[:-1], features.patches]


@pytest.mark.parametrize(("make", "patch"), [(own, 8), (of_timm, 16), (of_hugging_face, 8)])
@pytest.mark.parametrize(("layers", "last"), [(2, None), (1, 1), (2, 2)])
def test_of_several_blocks_the_mean_of_their_normalised_tokens(
    make: Callable[..., str], patch: int, layers: int, last: int | None, tmp_path: Path
) -> None:
    source = make(tmp_path)
    model, network = student(source, patch_size=patch, teacher_layers=layers, teacher_last_layer=last)
    pixels = pixels_of((network.size[0], network.size[1]))
    levels = [layer_norm(level, level.shape[-1:]) for level in levels_of(source, pixels)]
    end = last or len(levels)
    mean = torch.stack(levels[end - layers : end]).mean(dim=0)
    expected = layer_norm(mean, mean.shape[-1:]) if layers > 1 else mean
    assert_close(taught(model, pixels), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("size", [(16, 16), (24, 48)])
@torch.no_grad()
def test_another_size_and_grid_are_resampled_where_that_is_asked_for(size: tuple[int, int], tmp_path: Path) -> None:
    source = own(tmp_path)
    model, network = student(source, img_size=size, patch_size=8, teacher_resample=True)
    pixels = pixels_of(size)
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (network.mean, network.std))
    images = interpolate((pixels - mean) / std, size=(32, 32), mode="bilinear", antialias=True)
    patches = open_extractor(source, device=CPU).named(images)[PATCHES]
    grid = interpolate(
        patches.mT.unflatten(2, (4, 4)), size=(size[0] // 8, size[1] // 8), mode="bilinear", antialias=True
    )
    tokens = grid.flatten(2).mT
    assert_close(taught(model, pixels), layer_norm(tokens, tokens.shape[-1:]), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_cells_of_a_convolutional_net_are_its_tokens(tmp_path: Path) -> None:
    source = of_timm(tmp_path, "test_resnet")
    with pytest.raises(UsageError, match=r"has 5x5 tokens of 160x160 pixels, and the run 4x4 of 32x32; give the same"):
        student(source, img_size=32, patch_size=8)
    model, _ = student(source, img_size=32, patch_size=8, teacher_resample=True)
    assert taught(model, pixels_of()).shape == (2, 16, model.config.teacher.width)  # type: ignore[union-attr]
    with pytest.raises(
        UsageError, match=r"teacher_layers is 2, and these blocks of .* give .*x10x10 and .*x5x5 values"
    ):
        student(source, img_size=32, patch_size=8, teacher_resample=True, teacher_layers=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 4}, r"own.safetensors has 4x4 tokens of 32x32 pixels, and the run 8x8 of 32x32; give the same"),
        ({"img_size": 64}, r"has 4x4 tokens of 32x32 pixels, and the run 8x8 of 64x64; .*--teacher-resample"),
        ({"in_chans": 1, "mean": (0.5,), "std": (0.2,)}, r"sees 3 channel\(s\), and .* have 1; .*--in-chans 3"),
        ({"teacher_layers": 4}, "teacher_layers is 4, and up to its last layer .* has 3 block"),
        ({"teacher_layers": 2, "teacher_last_layer": 1}, "teacher_layers is 2, and .* has 1 block"),
        ({"teacher_last_layer": 4}, "teacher_last_layer is 4, and .* has 3 block"),
        ({"mean": None, "std": None}, "the student's images have no mean and std"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        student(own(tmp_path), **{"patch_size": 8, **options})


def test_channels_of_other_names_are_refused(tmp_path: Path) -> None:
    source = own(tmp_path, channels=("red", "green", "blue"))
    with pytest.raises(UsageError, match="sees channels red,green,blue, and the run's images have blue,green,red"):
        student(source, patch_size=8, channels=("blue", "green", "red"))
    student(source, patch_size=8, channels=("red", "green", "blue"))
    student(source, patch_size=8)


def test_a_model_without_patch_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mae.evaluation.extractors.external_models._timm_blocks", lambda model, prefix, name: None)
    with pytest.raises(UsageError, match="gives no patch tokens; give a model that does, such as a ViT"):
        open_network(of_timm(tmp_path), device=CPU)


def test_a_model_of_several_branches_is_refused(tmp_path: Path) -> None:
    source = of_timm(tmp_path, "crossvit_tiny_240")
    with pytest.raises(UsageError, match="timm gives its tokens as a list of several, not as one map of patches"):
        student(source, img_size=240, patch_size=16, teacher_resample=True)


def test_merged_patches_of_hugging_face_are_refused(tmp_path: Path) -> None:
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 1], window_size=4
    )
    transformers.SwinModel(config).save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="SwinModel merges patches and does not say where its tokens lie"):
        student(f"hf:{tmp_path}")


def test_another_network_than_the_measured_one_is_refused(tmp_path: Path) -> None:
    model, _ = student(own(tmp_path), patch_size=8)
    other = open_network(own(tmp_path, depth=2), device=CPU)
    with pytest.raises(UsageError, match="is not the network that this teacher was measured of"):
        model.hand_in(other)


def test_a_model_file_is_read_without_the_teacher(tmp_path: Path) -> None:
    model, _ = student(own(tmp_path), patch_size=8)
    assert model.teacher is not None and model.teacher.state_dict() == {}
    mae.save(model, tmp_path / "student.safetensors")
    (tmp_path / "own.safetensors").unlink()
    again = mae.load(tmp_path / "student.safetensors")
    assert isinstance(again, mae.MaskedAutoencoder) and again.teacher is None
    assert model.config is not None and again.config == config_of_file(model.config)
    assert again.config.teacher.source == "own.safetensors"  # no folder goes into a file
    assert not any("teacher" in name for name in again.state_dict())
    x = (pixels_of() - MEAN) / STD
    assert torch.equal(again.encode(x).mean, model.eval().encode(x).mean)
    with pytest.raises(UsageError, match=r"loss compares with a teacher, and no model's file holds one .*own\.safet"):
        again(x)


def test_it_gives_no_gradient_and_copies_share_it(tmp_path: Path) -> None:
    model, network = student(own(tmp_path), patch_size=8)
    x = (pixels_of() - MEAN) / STD
    copied = copy.deepcopy(model).double()
    assert copied.teacher.network.maps is network.maps  # type: ignore[union-attr]
    before = model.taught(Batch(x=x, tokenizer=model.tokenizer))["tokens"]
    doubles = copied.taught(Batch(x=x.double(), tokenizer=model.tokenizer))["tokens"]
    assert_close(doubles, before.double(), rtol=1e-5, atol=1e-5)
    model.train()(x, mask=torch.arange(16).expand(2, 16) < 12).loss.backward()
    model.teacher.after_step(model, 0.5)  # type: ignore[union-attr, operator]
    assert torch.equal(model.taught(Batch(x=x, tokenizer=model.tokenizer))["tokens"], before)


def test_images_of_another_size_than_the_models_are_refused_where_they_are_not_resampled(tmp_path: Path) -> None:
    model, _ = student(own(tmp_path), patch_size=8)
    with pytest.raises(UsageError, match="sees images of 32x32 pixels, and these have 32x48; resize them"):
        model((pixels_of((32, 48)) - MEAN) / STD)
