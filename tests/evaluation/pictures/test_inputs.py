"""The mask of a user's own, and holes of which nothing may be used."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
import torch.nn.functional as F
from data.pictures import noise
from PIL import Image
from tiny_pictures import CPU, PATCH, SIDE, build, patches_of, uint8_images, write_mask

import mae
from mae.data.decode.image import decode
from mae.errors import UsageError
from mae.evaluation.pictures import reconstruct as pictures
from mae.evaluation.pictures.inputs import crop_mask, read_mask
from mae.models.given_images import InputImage, crop_image
from mae.models.preprocess import Preprocessing


def test_white_is_masked_and_black_is_not(tmp_path):
    white = np.zeros((SIDE, SIDE), dtype=bool)
    white[5, 9] = white[12:14, 0:6] = True
    found = mae.reconstruct(build(), uint8_images(), mask=write_mask(tmp_path / "m.png", white), **CPU)
    assert patches_of(found.hidden)[0].nonzero().flatten().tolist() == [6, 12, 13]
    assert found.hidden_share == (3 / 16,)
    same = mae.reconstruct(build(), uint8_images(), mask=torch.from_numpy(white), **CPU)
    assert torch.equal(same.pasted, found.pasted)
    small = torch.zeros(4, 4)
    small[1, 2] = small[3, :2] = 1
    assert torch.equal(mae.reconstruct(build(), uint8_images(), mask=small, **CPU).hidden, found.hidden)


@pytest.mark.parametrize("size", [(200, 300), (300, 170), (70, 50)])
def test_a_mask_in_the_image_s_size_is_cropped_exactly_as_the_image(size):
    """White where the image is white: so it is after the crop, but for the pixels at the rim."""
    white = torch.zeros(size, dtype=torch.bool)
    top, left = size[0] // 5, size[1] // 3
    white[top : 2 * top, left : left + size[1] // 6] = True
    pixels = np.where(white.numpy()[..., None], 255, 40).astype(np.uint8)
    image, wanted = InputImage(name="i", pixels=pixels), Preprocessing(img_size=(64, 64), in_chans=1)
    bright = (crop_image(image, wanted) > (255 + 40) / 2 / 255).float()
    found = crop_mask(white, image, wanted, (8, 8), is_hole=False)
    assert bright.any()
    assert (found >= bright[0].bool()).all()
    assert (found <= F.max_pool2d(bright, 5, 1, 2)[0].bool()).all()  # two pixels more at most


@pytest.mark.parametrize("inpaint", [False, True])
def test_a_line_thinner_than_a_resized_pixel_is_not_lost(inpaint):
    """One pixel in four of the image's: each patch on its way is hidden."""
    line = torch.zeros(64, 64)
    line[40] = 1
    found = mae.reconstruct(build(), uint8_images(side=64), mask=line, inpaint=inpaint, **CPU)
    row = int((40.5 / 64 * 18 - 1) / PATCH)  # resized to 18 pixels, of which the middle 16 are kept
    assert patches_of(found.hidden).reshape(4, 4)[row].all()
    assert patches_of(found.hidden).sum() <= 8


def test_the_mask_file_may_be_16_bit_or_coloured_white_or_have_soft_edges(tmp_path):
    white = np.zeros((40, 40), dtype=bool)
    white[10:20, 5:30] = True
    Image.fromarray(white.astype(np.uint16) * 65535).save(tmp_path / "16.png")
    Image.fromarray(white.astype(np.uint8)[..., None].repeat(3, axis=2) * 255).save(tmp_path / "c.png")
    Image.fromarray(white.astype(np.uint8) * 255).save(tmp_path / "j.jpg", quality=90)
    tifffile.imwrite(tmp_path / "f.tif", white.astype(np.float32) * 3 - 1)
    for name in ("16.png", "c.png", "j.jpg", "f.tif"):
        assert np.array_equal(read_mask(tmp_path / name).numpy(), white), name


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (np.full((16, 16), 128), "grey or coloured in 100% of its pixels; expected a black and white picture"),
        (np.full((16, 16, 3), [255, 0, 0]), "grey or coloured in 100%"),
        (noise(16, 16), "grey or coloured"),
        (np.ones((16, 16)), "no white pixel, its brightest value is 1 of 255"),
        (np.full((16, 16), 255), "hides 16 of 16 patches; at least one must be hidden and one visible (in the central"),
        (np.eye(15) * 255, "the mask has 15 x 15 pixels, width x height; expected 16 x 16 (the image image 1)"),
    ],
)
def test_a_mask_that_is_none_is_refused(tmp_path, mask, said):
    Image.fromarray(mask.astype(np.uint8)).save(tmp_path / "m.png")
    with pytest.raises(UsageError) as caught:
        mae.reconstruct(build(), uint8_images(), mask=tmp_path / "m.png", out=tmp_path / "o.png", **CPU)
    assert said in str(caught.value)
    assert not (tmp_path / "o.png").exists()


HOLE = np.zeros((50, 70), dtype=bool)
HOLE[18:24, 30:37] = HOLE[40, 20:60] = True


@pytest.mark.parametrize("kind", ["uint8", "uint16", "float32"])
def test_what_stands_in_a_hole_changes_nothing_bit_for_bit(tmp_path, kind):
    """Also where the image is resized, which would mix the hole's pixels into those around it."""
    before = torch.from_numpy(noise(50, 70)).permute(2, 0, 1).unsqueeze(0)
    after = torch.where(torch.from_numpy(HOLE), 255 - before // 3, before)
    images = {
        "uint8": (before, after),
        "uint16": ((before.int() * 257).to(torch.uint16), (after.int() * 257).to(torch.uint16)),
        "float32": (
            before / 255,
            torch.where(torch.from_numpy(HOLE), torch.tensor(float("nan")), before / 255),
        ),
    }[kind]
    write_mask(tmp_path / "m.png", HOLE)
    found = []
    for number, each in enumerate(images):
        out = tmp_path / f"{number}" / "o.png"
        found.append(mae.reconstruct(build(), each, mask=tmp_path / "m.png", inpaint=True, out=out, **CPU))
    for name in ("input", "masked", "pasted", "full", "filled", "hidden", "hole"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name)), name
    assert found[0].filled.isfinite().all()
    assert [path.name for path in found[0].written] == ["o.png", f"o-filled.{'png' if kind == 'uint8' else 'tif'}"]
    for one, other in zip(found[0].written, found[1].written, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert found[0].leaky is None and found[0].error is None
    assert found[0].numbers == () and found[0].leaky_numbers == ()


def test_outside_the_hole_the_picture_is_the_user_s_own(tmp_path):
    pixels = noise(SIDE, SIDE)
    Image.fromarray(pixels).save(tmp_path / "i.png")
    hole = np.zeros((SIDE, SIDE), dtype=bool)
    hole[6:9, 2:7] = True
    mask = write_mask(tmp_path / "m.png", hole)
    found = mae.reconstruct(build(), tmp_path / "i.png", mask=mask, inpaint=True, out=tmp_path / "o.png", **CPU)
    assert np.array_equal(found.hole[0].numpy(), hole)
    assert patches_of(found.hidden)[0].nonzero().flatten().tolist() == [4, 5, 8, 9]
    assert torch.equal(found.filled[0, :, ~found.hole[0]], found.input[0, :, ~found.hole[0]])
    assert (found.input[0, :, found.hole[0]] == 0).all()
    assert torch.equal(found.filled[0, :, found.hole[0]], found.full[0, :, found.hole[0]])
    written = decode((tmp_path / "o-filled.png").read_bytes(), name="o")
    assert written.dtype == np.uint8 and np.array_equal(written[~hole], pixels[~hole])
    expected = (found.filled[0] * 255).round().clamp(0, 255).permute(1, 2, 0).numpy()
    assert np.array_equal(written, expected.astype(np.uint8))
    assert not np.array_equal(written[hole], pixels[hole])


@pytest.mark.parametrize(
    ("channels", "dtype", "suffix"),
    [
        (1, np.uint8, "png"),
        (1, np.uint16, "png"),
        (3, np.uint16, "tif"),
        (5, np.uint8, "tif"),
        (2, np.float32, "tif"),
        (3, np.float32, "tif"),
    ],
)
def test_the_filled_picture_keeps_the_type_of_the_image(tmp_path, channels, dtype, suffix):
    pixels = (noise(SIDE, SIDE, channels) * {np.uint8: 1, np.uint16: 250, np.float32: 1 / 255}[dtype]).astype(dtype)
    images = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
    hole = torch.zeros(SIDE, SIDE)
    hole[3:5, 3:9] = 1
    mae.reconstruct(build(channels=channels), images, mask=hole, inpaint=True, out=tmp_path / "o.png", **CPU)
    written = decode((tmp_path / f"o-filled.{suffix}").read_bytes(), name="o")
    assert written.dtype == dtype and written.shape == pixels.shape
    outside = ~hole.bool().numpy()
    assert np.array_equal(written[outside], pixels[outside])


def test_a_hole_needs_a_mask_by_which_it_is_known_in_full():
    with pytest.raises(UsageError, match=r"the mask has 4 x 4 pixels.*expected 20 x 20 \(the image image 1\)$"):
        mae.reconstruct(build(), uint8_images(side=20), mask=torch.eye(4), inpaint=True, **CPU)
    found = mae.reconstruct(build(), uint8_images(), mask=torch.eye(4), inpaint=True, **CPU)
    assert patches_of(found.hole)[0].nonzero().flatten().tolist() == [0, 5, 10, 15]
    changed = torch.where(found.hole.unsqueeze(1), 255 - uint8_images(), uint8_images())
    again = mae.reconstruct(build(), changed, mask=torch.eye(4), inpaint=True, **CPU)
    assert torch.equal(again.filled, found.filled)


def test_a_disk_that_is_full_leaves_no_half_a_picture(tmp_path, monkeypatch):
    def full(self, content):
        with self.open("wb") as file:
            file.write(content[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(pictures, "draw_inpainting", lambda *_, **__: None)
    with pytest.raises(mae.MAEError, match=r"o-filled\.png: No space left"):
        mae.reconstruct(build(), uint8_images(), mask=torch.eye(4), inpaint=True, out=tmp_path / "o.png", **CPU)
    assert list(tmp_path.iterdir()) == []
