"""What an extractor gives, what it must beat, and how a model is found by what the user typed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from light import light_runs
from sklearn.datasets import load_digits

import mae
from mae.errors import MAEError, UsageError
from mae.evaluation.extractors.extractor import (
    PATCHES,
    Extractor,
    Preprocessing,
    baseline_extractors,
    model_extractor,
    preprocessing_text,
    random_weights,
    raw_pixels,
    weights_digest,
)
from mae.evaluation.extractors.open import open_extractor, usual_folder
from mae.models.file import load_with_report
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.presets import create_model

CPU = torch.device("cpu")
IMAGES = (torch.from_numpy(load_digits().images).float()[:50, None] / 16 - 0.3) / 0.38
SMALL = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 32, "depth": 1, "decoder_depth": 1}


@pytest.fixture
def model() -> MaskedAutoencoder:
    torch.manual_seed(5)
    return create_model("mae_vit_lesson_patch4", **SMALL, mean=(0.3,), std=(0.38,))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    options = {
        "img_size": 8,
        "patch_size": 2,
        "batch_size": 32,
        "steps": 2,
        "workers": 0,
        "device": "cpu",
        "doctor": False,
    }
    with light_runs():
        mae.pretrain("builtin:digits", model="mae_vit_lesson_patch4", out=out, quiet=True, **options)
    return out


def test_a_models_features_are_those_of_encode(model):
    found = model_extractor(model, name="mine")
    named = found.named(IMAGES)
    with torch.no_grad():
        features = model.encode(IMAGES)
    assert list(named) == ["cls", "mean", PATCHES]
    for name in named:
        torch.testing.assert_close(named[name], getattr(features, name), atol=1e-5, rtol=1e-4)
        assert not named[name].requires_grad
    wanted = Preprocessing(img_size=(8, 8), in_chans=1, mean=(0.3,), std=(0.38,))
    assert (found.name, found.model, found.preprocessing) == ("mine", model, wanted)


def test_a_model_without_class_token_gives_none():
    model = create_model("mae_vit_lesson_patch4", **SMALL, mean=(0.3,), std=(0.38,), cls_token=False)
    assert list(model_extractor(model, name="mine").named(IMAGES)) == ["mean", PATCHES]


def test_a_half_precision_model_takes_float32_batches(model):
    exact = model_extractor(model, name="").named(IMAGES)["mean"]
    rough = model_extractor(model.to(torch.bfloat16), name="").named(IMAGES)["mean"]
    torch.testing.assert_close(rough.float(), exact, atol=0.1, rtol=0.1)


def test_a_model_that_does_not_say_how_its_images_are_normalised_is_refused(model):
    for config in (model.config.override({"mean": None, "std": None}), None):
        model.config = config
        with pytest.raises(UsageError, match="no channel statistics"):
            model_extractor(model, name="mine")


def test_the_identity_is_of_weights_and_architecture(model):
    torch.manual_seed(5)
    same = create_model("mae_vit_lesson_patch4", **SMALL, mean=(0.3,), std=(0.38,))
    identity = model_extractor(model, name="a").identity
    assert model_extractor(same, name="b").identity == identity
    # The same weights in other heads are another model.
    torch.manual_seed(5)
    heads = create_model("mae_vit_lesson_patch4", **SMALL, num_heads=8, mean=(0.3,), std=(0.38,))
    assert weights_digest(heads) == weights_digest(model) and model_extractor(heads, name="a").identity != identity
    with torch.no_grad():
        same.encoder.cls_token[..., -1] += 1e-6
    assert model_extractor(same, name="a").identity != identity


def test_digests_take_every_type():
    module = torch.nn.Module()
    module.register_buffer("empty", torch.empty(0))
    module.register_buffer("scalar", torch.tensor(3))
    module.register_buffer("flags", torch.tensor([True, False]))
    module.register_buffer("rough", torch.ones(3, 2, dtype=torch.bfloat16).T)
    before = weights_digest(module)
    module.flags[1] = True
    assert len(before) == 16 and weights_digest(module) != before


def test_raw_pixels_are_the_pixels_and_large_images_their_averages():
    assert torch.equal(raw_pixels(IMAGES), IMAGES.flatten(1))
    large = torch.randn(2, 3, 128, 32)
    torch.testing.assert_close(raw_pixels(large), large.unflatten(2, (32, 4)).mean(dim=3).flatten(1))


@pytest.mark.parametrize(("channels", "side"), [(1, 32), (3, 32), (4, 32), (5, 28), (13, 17), (200, 4), (5000, 1)])
def test_raw_pixels_of_many_channels_are_as_few_values_as_those_of_four(channels: int, side: int):
    images = torch.randn(2, channels, 64, 64)
    expected = torch.nn.functional.adaptive_avg_pool2d(images, (side, side)).flatten(1)
    assert torch.equal(raw_pixels(images), expected) and (expected.shape[1] <= 4096 or side == 1)
    wanted = Preprocessing(img_size=(64, 64), in_chans=channels, mean=(0.0,) * channels, std=(1.0,) * channels)
    pixels = baseline_extractors(Extractor(name="f", encode=raw_pixels, preprocessing=wanted))[-1]
    assert pixels.identity == f"pixels, sides up to {side}"


def test_random_weights_are_fresh_fixed_and_draw_from_no_global_generator(model):
    state = torch.get_rng_state()
    first = random_weights(model)
    torch.manual_seed(123)
    second = random_weights(model)
    assert model.config == first.config and not first.training
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.encoder.patch_embed.proj.weight, model.encoder.patch_embed.proj.weight)
    torch.set_rng_state(state)
    random_weights(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert next(random_weights(model.to(torch.bfloat16)).parameters()).dtype == torch.bfloat16


def test_random_weights_need_the_configuration(model):
    model.config = None
    with pytest.raises(UsageError, match="no configuration"):
        random_weights(model)


def test_baseline_extractors_are_random_weights_and_pixels(model):
    mine = model_extractor(model, name="mine")
    fresh, pixels = baseline_extractors(mine)
    assert (fresh.name, pixels.name) == ("random weights", "raw pixels")
    assert fresh.preprocessing == pixels.preprocessing == mine.preprocessing
    assert fresh.identity != mine.identity and pixels.identity is not None
    assert torch.equal(pixels.named(IMAGES)["pixels"], IMAGES.flatten(1))
    function = Extractor(name="f", encode=raw_pixels, preprocessing=mine.preprocessing)
    assert [other.name for other in baseline_extractors(function)] == ["raw pixels"]


def test_a_function_gives_a_tensor_or_a_dict():
    def extractor(encode):
        return Extractor(name="f", encode=encode, preprocessing=Preprocessing(img_size=(8, 8)))

    assert torch.equal(extractor(raw_pixels).named(IMAGES)["features"], IMAGES.flatten(1))
    assert list(extractor(lambda images: {"a": raw_pixels(images)}).named(IMAGES)) == ["a"]
    assert list(extractor(lambda images: {"layer-3_a+B": raw_pixels(images)}).named(IMAGES)) == ["layer-3_a+B"]
    with pytest.raises(UsageError, match="f gives ndarray; expected a tensor"):
        extractor(lambda images: raw_pixels(images).numpy()).named(IMAGES)


@pytest.mark.parametrize("name", ["a/b", "../x", "..", "", "a b", "a.b", "é", "a\n", 0, None])
def test_a_feature_that_could_be_no_file_is_refused(name):
    mine = Extractor(
        name="f", encode=lambda images: {name: raw_pixels(images)}, preprocessing=Preprocessing(img_size=(8, 8))
    )
    with pytest.raises(UsageError, match="^f calls a feature .*; expected letters, digits"):
        mine.named(IMAGES)


@pytest.mark.parametrize(
    ("size", "share"), [((224, 224), 0.875), ((32, 224), 0.875), ((256, 256), 1.0), ((32, 256), 1.0), ((256, 32), 1.0)]
)
def test_images_above_224_pixels_are_taken_whole(size, share):
    changes = {**SMALL, "img_size": size, "patch_size": 32}
    model = create_model("mae_vit_lesson_patch4", **changes, mean=(0.3,), std=(0.38,))
    assert model_extractor(model, name="mine").preprocessing.crop_share == share


def test_a_module_in_training_mode_is_refused():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5))
    mine = Extractor(name="f", encode=module, preprocessing=Preprocessing(img_size=(8, 8)))
    with pytest.raises(UsageError, match=r"^f is in training mode, .*; call \.eval\(\) on it$"):
        open_extractor(mine, device=CPU)
    module.eval()
    assert open_extractor(mine, device=CPU) is mine


def test_each_value_of_the_preprocessing_is_in_its_text():
    plain = Preprocessing(img_size=(8, 8))
    changes = {"img_size": (8, 9), "in_chans": 1, "mean": (0.1,) * 3, "std": (2.0,) * 3, "crop_share": 1.0}
    changes |= {"interpolation": "bilinear"}
    texts = {preprocessing_text(replace(plain, **{name: value})) for name, value in changes.items()}
    assert len(texts | {preprocessing_text(plain)}) == 7


def test_a_run_a_checkpoint_and_a_file_are_the_same_model(run, tmp_path):
    checkpoint = next(path for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))
    copied = tmp_path / "copied.safetensors"
    copied.write_bytes((checkpoint / "model.safetensors").read_bytes())
    specs = [run, str(run), checkpoint, checkpoint / "model.safetensors", copied]
    found = [open_extractor(spec, device=CPU) for spec in specs]
    assert len({extractor.identity for extractor in found}) == 1
    assert {extractor.loaded for extractor in found} == {load_with_report(copied)[1].line()}
    assert open_extractor(found[0].model, device=CPU).loaded is None  # of a model in memory nothing was loaded
    assert [extractor.name for extractor in found] == [str(spec) for spec in specs]
    assert all(extractor.model is not None and not extractor.model.training for extractor in found)
    folders = [usual_folder(spec, extractor) for spec, extractor in zip(specs, found, strict=True)]
    assert [folder.resolve() for folder in folders[:4]] == [run.resolve()] * 4
    assert folders[4].parent == Path("runs") and folders[4].name.endswith("copied.safetensors")


@pytest.mark.parametrize("spec", ["nowhere", "nowhere.safetensors", "."])
def test_nothing_there_is_reported(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="expected a run folder, one of its checkpoints or a .safetensors file"):
        open_extractor(spec, device=CPU)


def test_a_damaged_or_foreign_file_is_reported(run, tmp_path):
    path = tmp_path / "cut.safetensors"
    whole = next((run / "checkpoints").glob("step-*/model.safetensors")).read_bytes()
    for content in (b"", b"PK\3\4", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(MAEError, match="cut.safetensors cannot be read"):
            open_extractor(path, device=CPU)


def test_anything_else_is_refused_and_what_there_is_named():
    with pytest.raises(UsageError, match=r"the model is Linear; expected a run folder.*mae.Extractor"):
        open_extractor(torch.nn.Linear(2, 2), device=CPU)


def test_a_model_in_memory_is_left_as_it_is(model):
    model.train()
    model.decoder.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    extractor = open_extractor(model, device=CPU)
    assert {name: module.training for name, module in model.named_modules()} == modes
    with torch.no_grad():
        before = extractor.named(IMAGES)["mean"]
        model.encoder.patch_embed.proj.weight.zero_()  # trained on meanwhile
    assert torch.equal(extractor.named(IMAGES)["mean"], before)
    assert open_extractor(extractor, device=CPU) is extractor


def test_folders_of_models_without_a_run_can_be_made_anywhere():
    plain = Preprocessing(img_size=(8, 8))
    for name in ("timm:hf-hub:timm/vit_tiny", "a/b\\c:*?é", "x" * 300):
        folder = usual_folder(None, Extractor(name=name, encode=raw_pixels, preprocessing=plain))
        assert folder.parent == Path("runs") and len(folder.name) < 80 and not set(folder.name) & set('\\:*?"<>|')
