"""Images as users of timm, torchvision and Transformers hand them over, against what evaluation makes of files."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data.pictures import noise
from PIL import Image
from tiny import tiny_model
from torch.utils.data import DataLoader

import mae
from mae.errors import UsageError
from mae.models.classifier import LinearProbe
from mae.models.pretrained import PretrainedEncoder

STATISTICS = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3)}


@pytest.fixture(scope="module")
def model() -> PretrainedEncoder:
    return tiny_model(**STATISTICS)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for label in ("cat", "dog"):
        for number in range(5):
            path = tmp_path / "photos" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise(30, 41, seed=number)).save(path)
    return tmp_path / "photos"


def test_a_file_gives_the_features_that_embed_writes(model: PretrainedEncoder, photos: Path, tmp_path: Path):
    mae.embed(model, photos, out=tmp_path / "features.npz", features=("mean",), quiet=True, device="cpu")
    stored = np.load(tmp_path / "features.npz")
    images = model.preprocess([photos.parent / str(name) for name in stored["names"]])
    assert images.shape == (10, 3, 16, 24)
    with torch.no_grad():
        found = model.eval().encode(images).mean.numpy()
    assert np.allclose(found, stored["mean"], atol=1e-5)


def test_whatever_holds_the_image_gives_the_same(model: PretrainedEncoder, photos: Path):
    path = photos / "cat" / "0.png"
    expected = model.preprocess(path)
    with Image.open(path) as picture:
        pixels = np.array(picture)
        given = [picture, picture.convert("RGBA"), pixels, torch.from_numpy(pixels).permute(2, 0, 1), str(path)]
        for image in given:
            assert torch.equal(model.preprocess(image), expected)
        assert torch.equal(model.preprocess(given), expected.expand(5, -1, -1, -1))
    assert torch.equal(model.preprocess(np.stack([pixels, pixels])), expected.expand(2, -1, -1, -1))
    assert torch.equal(mae.transforms(model)(path), expected[0])
    grey = pixels[..., 0]
    assert torch.equal(model.preprocess(grey), model.preprocess(np.stack([grey] * 3, axis=-1)))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA", "1", "CMYK", "I", "F", "I;16"])
def test_an_image_of_pillow_is_that_of_its_file(mode: str, tmp_path: Path):
    channels = 4 if mode == "RGBA" else 3
    unit = 255 * 400 if mode == "I" else 1
    statistics = {"mean": (0.5 * unit,) * channels, "std": (0.25 * unit,) * channels}
    pixels = noise(30, 41)
    if mode in ("I", "F", "I;16"):
        kinds = {"I": (np.int32, 400), "F": (np.float32, 1 / 255), "I;16": (np.uint16, 257)}
        picture = Image.fromarray((pixels[..., 0].astype(np.float64) * kinds[mode][1]).astype(kinds[mode][0]))
    else:
        see_through = Image.fromarray(np.dstack([pixels, pixels[..., 1]]))
        picture = see_through.convert("RGB") if mode == "CMYK" else see_through
        picture = picture.quantize(16) if mode in ("P", "PA") else picture
        picture = picture.convert(mode)
    path = tmp_path / ("image.tif" if mode in ("CMYK", "I", "F") else "image.png")
    if mode == "PA":  # which no file holds
        path = path.with_name("p.png")
        picture.convert("RGBA").save(path)
    else:
        picture.save(path)
    scale = {"pixel_dtype": "float32"} if mode in ("I", "F") else {}
    for in_chans in {3, channels}:
        shown = {name: values[:in_chans] for name, values in statistics.items()}
        wanted = tiny_model(in_chans=in_chans, **shown, **scale)
        assert torch.equal(wanted.preprocess(picture), wanted.preprocess(path))


def test_loader_processes_take_the_transform(model: PretrainedEncoder):
    transform = mae.transforms(model)
    image = torch.from_numpy(noise(30, 41)).permute(2, 0, 1)
    assert torch.equal(pickle.loads(pickle.dumps(transform))(image), transform(image))


def test_channels_of_a_data_set_are_chosen_by_the_models_names(tmp_path: Path):
    told = {"in_chans": 2, "mean": (0.5, 0.4), "std": (0.2, 0.25)}
    chosen = tiny_model(channels=("nir", "red"), **told)
    (tmp_path / "channels.txt").write_text("red\ngreen\nnir\n")
    np.save(tmp_path / "0.npy", noise(30, 41))
    (shown,) = mae.datasets.open(tmp_path, transform=mae.transforms(chosen))
    assert torch.equal(shown, chosen.preprocess(tmp_path / "0.npy")[0])
    (bands,) = mae.datasets.open(tmp_path, channels=["green"])
    assert torch.equal(bands, torch.from_numpy(noise(30, 41)[..., 1])[None])
    with pytest.raises(UsageError, match="has no channel 'blue'"):
        mae.datasets.open(tmp_path, channels=["blue"])


def test_grey_images_are_colour_for_a_model_that_names_it(tmp_path: Path):
    named = tiny_model(channels=("r", "g", "b"), **STATISTICS)
    Image.fromarray(noise(30, 41)[..., 0]).save(tmp_path / "0.png")
    (shown,) = mae.datasets.open(tmp_path, transform=mae.transforms(named))
    assert torch.equal(shown, named.preprocess(tmp_path / "0.png")[0])


def test_a_photo_held_on_its_side_is_turned(model: PretrainedEncoder, tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(noise(30, 41)).save(tmp_path / "photo.png", exif=exif)
    with Image.open(tmp_path / "photo.png") as picture:
        assert torch.equal(model.preprocess(picture), model.preprocess(tmp_path / "photo.png"))
        assert not torch.equal(model.preprocess(picture), model.preprocess(np.asarray(picture)))


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (np.zeros(5, dtype=np.uint8), r"image 1 has the shape \(5,\); expected \[height, width, channels\]"),
        (np.zeros((8, 8, 3), dtype=np.int64), "image 1 is of type int64; expected pixel values as in the files"),
        (torch.zeros(3, 8, 8, dtype=torch.bfloat16), "image 1 is of type bfloat16; expected pixel values as in"),
        (np.zeros((8, 8, 5), dtype=np.uint8), "image 1 has 5 channels; the model expects 3"),
        ([np.zeros((8, 8, 3), np.float32), np.zeros((8, 8, 3), np.uint8)], "floating point and some are not"),
        ("gone.jpg", "gone.jpg is not there; expected an image file"),
        ([], "no image is given"),
    ],
)
def test_what_is_no_image_is_refused(model: PretrainedEncoder, image, says: str):
    with pytest.raises(UsageError, match=says):
        model.preprocess(image)


def test_values_that_are_unusual_for_the_model_are_told(caplog: pytest.LogCaptureFixture):
    """As evaluations tell it: 16-bit files of a sensor that fills 12 of the bits."""
    model, twelve_bits = tiny_model(pixel_dtype="uint8", **STATISTICS), noise(30, 41).astype(np.uint16) * 16
    model.preprocess(twelve_bits)
    assert "image 1: the values (uint16) have mean" in caplog.text
    assert "features of such images mean little unless they really are like this" in caplog.text
    caplog.clear()
    model.preprocess(noise(30, 41))
    mae.transforms(model)(twelve_bits)  # a data set would say it of each image
    assert not caplog.text


def test_a_model_without_statistics_says_so():
    with pytest.raises(UsageError, match="holds no channel statistics"):
        tiny_model().preprocess(noise(8, 8))


def test_training_crops_are_random_and_normalised(model: PretrainedEncoder, photos: Path):
    data = mae.datasets.open(photos, split="train", transform=mae.transforms(model, training=True))
    torch.manual_seed(0)
    crops = [data[0][0] for _ in range(20)]
    assert all(crop.shape == (3, 16, 24) for crop in crops) and not torch.equal(crops[0], crops[1])
    torch.manual_seed(0)
    assert torch.equal(data[0][0], crops[0])
    wide = mae.transforms(model, training=True, crop_scale=(0.2, 1.0))
    assert mae.transforms(model, training=True).augmentation == replace(wide.augmentation, scale=(0.5, 1.0))
    # The same colours on average as the whole image, in the same units.
    whole = mae.transforms(model)(data.images.get(0))
    assert torch.allclose(torch.stack(crops).mean(dim=(0, 2, 3)), whole.mean(dim=(1, 2)), atol=0.1)


@pytest.mark.parametrize("training", [False, True])
def test_values_that_are_not_finite_are_in_no_crop(model: PretrainedEncoder, training: bool):
    transform = mae.transforms(model, training=training, crop_scale=(1.0, 1.0))
    with pytest.raises(UsageError, match="image 1 holds values that are not finite"):
        transform(np.full((20, 20, 3), np.nan, dtype=np.float32))


def test_a_source_is_a_plain_data_set(model: PretrainedEncoder, photos: Path):
    train, test = (mae.datasets.open(photos, split=split) for split in ("train", "test"))
    assert train.classes == test.classes == ("cat", "dog") and len(train) + len(test) == 10
    labels = [train.classes[label] for _, label in train]
    assert labels == [train.images.item_name(number).split("/")[-2] for number in range(len(train))]
    image, label = train[-1]
    assert image.dtype == torch.uint8 and image.shape == (3, 30, 41) and label == train.targets[-1]
    with pytest.raises(IndexError):
        train[len(train)]
    every = mae.datasets.open(photos, transform=mae.transforms(model))
    (batch,) = DataLoader(every, batch_size=10)
    assert batch.shape == (10, 3, 16, 24) and every.targets is None
    with pytest.raises(UsageError, match="the split is 'val'; expected 'train', 'test' or None"):
        mae.datasets.open(photos, split="val")


def test_a_classifier_names_classes_and_their_probabilities(model: PretrainedEncoder, photos: Path):
    probe = LinearProbe(encoder=model.encoder, feature="mean", num_classes=2, class_names=("cat", "dog"),
                        config=model.config).train()  # fmt: skip
    path = photos / "cat" / "0.png"
    shares = probe.predict_proba([path, path])
    assert shares.shape == (2, 2) and torch.allclose(shares.sum(dim=1), torch.ones(2))
    with torch.no_grad():
        assert torch.allclose(shares, probe.eval()(probe.preprocess([path, path])).softmax(dim=1))
    assert probe.predict(path) == [("cat", "dog")[int(shares[0].argmax())]]


def test_parameters_are_counted(model: PretrainedEncoder):
    counted = sum(weight.numel() for weight in model.parameters())
    assert model.num_parameters() == model.num_parameters(only_trainable=True) == counted
    probe = LinearProbe(encoder=model.encoder, feature="mean", num_classes=2, config=model.config)
    probe.head.requires_grad_(False)
    assert probe.num_parameters() - probe.num_parameters(only_trainable=True) == 24 * 2 + 2


def test_arrays_and_pretrained_are_told_what_to_do():
    # In another process: here wrong types are found before ours are asked.
    code = """
import mae, numpy
model = mae.create_model("mae_vit_lesson_patch4", mean=(0.5,) * 3, std=(0.2,) * 3)
for call in (
    lambda: model(numpy.zeros((1, 32, 32, 3))),
    lambda: model.preprocess(7),
    lambda: mae.create_model("mae_vit_lesson_patch4", pretrained=True),
    lambda: mae.create_model(pretrained=True),
    lambda: mae.create_model(),
):
    try:
        call()
    except mae.UsageError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    array, number, pretrained, nameless, nothing = done.stdout.splitlines()
    assert "of type ndarray; expected a tensor" in array and "model.preprocess" in array
    assert "image 1 is of type int; expected a file, an image of Pillow" in number
    assert "mae.load('official/base')" in pretrained and nameless == pretrained
    assert "takes the name of a model, such as 'mae_vit_" in nothing
