"""JPEGs decoded at a reduced scale are Pillow's own drafts, and every other image is left to the plain way."""

import io

import numpy as np
import pytest
from data.pictures import encoded, noise, png
from PIL import Image, ImageOps

from mae.data.decode.image import decode, reducible
from mae.data.decode.limits import UnreadableImage


def photo(mode: str = "RGB", *, size: tuple[int, int] = (96, 64), orientation: int = 1, **options: object) -> bytes:
    exif = Image.Exif()
    if orientation > 1:
        exif[274] = orientation
    image = Image.fromarray(noise(8, 12)).resize(size, Image.Resampling.BICUBIC).convert(mode)
    return encoded(image, "JPEG", exif=exif, **options)


def draft(data: bytes, reduction: int) -> np.ndarray:
    """By the ways Pillow documents."""
    image = Image.open(io.BytesIO(data))
    orientation = image.getexif().get(274, 1)
    image.draft(image.mode, (image.width // reduction, image.height // reduction))
    image.load()
    image.getexif()[274] = orientation
    pixels = np.array(ImageOps.exif_transpose(image))
    return pixels.reshape(*pixels.shape[:2], -1)


FILES = {
    "plain": photo(),
    "grey": photo("L"),
    "fine": photo(quality=100, subsampling=0),
    "progressive": photo(progressive=True),
    "odd sides": photo(size=(101, 67)),
    "restarts": photo(restart_marker_rows=1),
    **{f"orientation {number}": photo(orientation=number) for number in range(2, 9)},
}


@pytest.mark.parametrize("reduction", [2, 4, 8])
@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_of_pillows_draft(name: str, reduction: int):
    known = reducible(FILES[name], name=name)
    assert known is not None and known.most == 8 and known[:2] == decode(FILES[name], name=name).shape[:2]
    found = decode(FILES[name], name=name, reduction=reduction)
    assert found.shape[:2] == (-(-known.height // reduction), -(-known.width // reduction))
    assert np.array_equal(found, draft(FILES[name], reduction))


@pytest.mark.parametrize(("size", "most"), [((96, 64), 8), ((96, 60), 4), ((94, 64), 2), ((95, 64), 1)])
def test_turned_files_are_reduced_as_far_as_their_sides_divide(size: tuple[int, int], most: int):
    """Else the last pixel, which stands for fewer of the whole image's, would be brought to the front."""
    turned, upright = (reducible(photo(size=size, orientation=number), name="x") for number in (6, 1))
    assert turned is not None and turned == (size[0], size[1], most)
    assert upright is not None and upright == (size[1], size[0], 8)


@pytest.mark.parametrize("data", [photo("CMYK"), png(), encoded(Image.new("RGB", (64, 64)), "WebP")])
def test_other_files_are_left_to_the_plain_way(data: bytes):
    assert reducible(data, name="x") is None


def test_what_is_cut_short_is_refused_alike():
    cut = photo(quality=95)[:-400]
    told = []
    for reduction in (1, 2, 8):
        with pytest.raises(UnreadableImage, match="x is not a whole JPEG image: .*truncated") as error:
            decode(cut, name="x", reduction=reduction)
        told.append(str(error.value).split("(")[0])
    assert len(set(told)) == 1


@pytest.mark.parametrize("sides", [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\1\x30\0"])
def test_sizes_over_the_limits_are_refused_before_anything_is_decoded(sides: bytes):
    data = bytearray(photo())
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = sides
    with pytest.raises(UnreadableImage):
        decode(bytes(data), name="x", reduction=8)


def test_files_of_too_many_scans_are_refused():
    scans = photo(progressive=True)
    at = scans.rindex(b"\xff\xda")
    with pytest.raises(UnreadableImage, match="scans; expected 100"):
        decode(scans[:at] + 101 * scans[at:-2] + scans[-2:], name="x", reduction=2)
