"""Values in the unit of a model: what converts how, what is refused, what passes with a word."""

import numpy as np
import pytest
from data.pictures import Pictures, noise

from mae.data.dataset.channels import divisor
from mae.data.dataset.images import load_images
from mae.data.dataset.units import check_units
from mae.errors import UsageError

TABLE = {
    ("uint8", "uint8"): 255, ("uint16", "uint8"): 65535, ("float32", "uint8"): 255,
    ("uint8", "uint16"): 255, ("uint16", "uint16"): 65535, ("float32", "uint16"): 65535,
    ("uint8", "float32"): 1, ("uint16", "float32"): 1, ("float32", "float32"): 1,
    ("uint8", None): 255, ("uint16", None): 65535, ("float32", None): 1,
}  # fmt: skip
"""By the type of a file and of a model."""


@pytest.mark.parametrize(("found", "pixel_dtype"), TABLE)
@pytest.mark.parametrize("nodata", [None, "7"])
@pytest.mark.parametrize("memory_limit", [None, 0])
def test_files_of_every_type_come_in_the_unit_of_a_model(found, pixel_dtype, nodata, memory_limit):
    pixels = [noise(5, 6, 2, seed).astype(found) for seed in range(3)]
    pixels[0][0, 0, 1] = 7
    images = load_images(
        Pictures(pixels), in_chans=2, pixel_dtype=pixel_dtype, nodata=nodata, memory_limit=memory_limit
    )
    given = images.get(0).numpy()
    given = given / np.float32(255) if given.dtype == np.uint8 else given
    expected = np.moveaxis(pixels[0], 2, 0) / TABLE[found, pixel_dtype]
    if nodata is not None:
        expected[np.moveaxis(pixels[0], 2, 0) == 7] = np.nan
    assert np.allclose(given, expected, rtol=1e-6, atol=0, equal_nan=True)
    assert divisor(np.dtype(found), pixel_dtype) == TABLE[found, pixel_dtype]
    assert images.pixel_dtype == (pixel_dtype or found)
    assert images.is_integer == ((pixel_dtype or found) != "float32")
    own = load_images(Pictures(pixels), in_chans=2, nodata=nodata)
    assert (images.fingerprint() == own.fingerprint()) == (pixel_dtype is None)


def test_only_a_model_mixes_integers_with_floats():
    mixed = Pictures([noise(4, 4).astype(dtype) for dtype in ("u1", "u2", "f4")])
    images = load_images(mixed, in_chans=3, pixel_dtype="uint8")
    for number, divided in enumerate((255, 65535, 255)):
        assert np.allclose(images.get(number).permute(1, 2, 0).numpy(), noise(4, 4) / divided)
    raw = load_images(mixed, in_chans=3, pixel_dtype="float32")
    assert all(np.array_equal(raw.get(number).permute(1, 2, 0).numpy(), noise(4, 4)) for number in range(3))


def judged(pixel_dtype, dtype: str, spread: float, shift: float, *, mean: float = 0.5, std: float = 0.25) -> str | None:
    """What is said of noise that lies so many of the model's deviations off and is spread out so many times as far."""
    rng, top = np.random.default_rng(0), TABLE[dtype, pixel_dtype]
    arrays = [(mean + std * (shift + spread * rng.standard_normal((16, 16, 3)))) * top for _ in range(8)]
    whole = [np.rint(array) if dtype != "float32" else array for array in arrays]
    images = load_images(
        Pictures([array.clip(0, np.iinfo(dtype).max if dtype != "float32" else None).astype(dtype) for array in whole]),
        in_chans=3,
        pixel_dtype=pixel_dtype,
    )
    return check_units(images, mean=(mean,) * 3, std=(std,) * 3, pixel_dtype=pixel_dtype)


BRIGHT = {"mean": 0.002, "std": 0.001}
CASES = {
    # type of the model's files, of these, spread and shift in the model's deviations, more, what is to come
    "like the training images": ("uint8", "uint16", 1, 0, {}, "passes"),
    "dark, of the model's own type": ("uint8", "uint8", 0.01, -2, {}, "passes"),
    "nearly black, of the model's own type": ("uint16", "uint16", 0.0001, -2, {}, "passes"),
    "bright beside dark, of the model's own type": ("uint8", "uint8", 200, 300, BRIGHT, "passes"),
    "dark, of another type": ("uint8", "uint16", 0.05, -1.9, {}, "warns"),
    "floats from 0 to 1 for uint8": ("uint8", "float32", 1 / 255, -2, {}, "refused"),
    "floats from 0 to 1 for uint16": ("uint16", "float32", 1 / 65535, -2, {}, "refused"),
    "12 bits in 16, then 8 bits": ("uint16", "uint8", 16, 20, {"mean": 0.03, "std": 0.01}, "refused"),
    "shares for a model of counts": ("float32", "float32", 1e-4, -3, {"mean": 3000, "std": 1000}, "refused"),
    "counts for a model of shares": ("float32", "float32", 4e3, 1e4, {}, "refused"),
    "mountains beside plains": ("float32", "float32", 80, 390, {"mean": 10, "std": 5}, "warns"),
    "floats for weights from elsewhere": (None, "float32", 1, 0, {}, "passes"),
    "floats of 8 bits for weights from elsewhere": (None, "float32", 255, 400, {}, "refused"),
    "dark, for weights from elsewhere": (None, "uint16", 0.02, -1.9, {}, "warns"),
    "integers for statistics of floats": (None, "uint16", 1e-5, -3, {"mean": 3000.0, "std": 1000.0}, "refused raw"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_scale_is_refused_and_unusual_images_are_not(case):
    pixel_dtype, dtype, spread, shift, statistics, expected = CASES[case]
    if expected == "refused raw":
        images = load_images(Pictures([noise(8, 8).astype("u2")] * 4), in_chans=3)
        with pytest.raises(UsageError, match="integers scaled to .0, 1., floats as they are"):
            check_units(images, mean=(3000.0,) * 3, std=(1000.0,) * 3, pixel_dtype=None)
    elif expected == "refused":
        with pytest.raises(UsageError, match=r"the values \(\w+\) have mean .* on another scale; save them as"):
            judged(pixel_dtype, dtype, spread, shift, **statistics)
    else:
        told = judged(pixel_dtype, dtype, spread, shift, **statistics)
        assert (told is not None) == (expected == "warns")
        assert told is None or "mean little unless they really are like this" in told


def test_plain_images_and_statistics_that_say_nothing_are_let_pass():
    for values in ([np.full((4, 4, 3), 9, "f4")] * 3, [np.full((4, 4, 3), 0, "u2")] * 3):
        images = load_images(Pictures(values), in_chans=3, pixel_dtype="float32")
        assert check_units(images, mean=(3.0,) * 3, std=(2.0,) * 3, pixel_dtype="float32") is None
    raw = load_images(Pictures([noise(8, 8).astype("f4") * 1000]), in_chans=3)
    assert check_units(raw, mean=(0.0,) * 3, std=(1.0,) * 3, pixel_dtype=None) is None
    empty = load_images(Pictures([np.full((4, 4, 3), -1, "f4")] * 2), in_chans=3, nodata="-1", pixel_dtype="float32")
    assert check_units(empty, mean=(3.0,) * 3, std=(2.0,) * 3, pixel_dtype="float32") is None
