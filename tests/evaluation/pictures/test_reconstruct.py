"""Pictures of given images: what is hidden stays hidden, and what is shown is said."""

import numpy as np
import pytest
import tifffile
import torch
from data.pictures import encoded, noise, png
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_pictures import CPU, SIDE, build, patches_of, uint8_images, write_mask
from torch import nn

import mae
from mae.data.decode.image import decode
from mae.data.decode.limits import UnreadableImage
from mae.errors import UsageError
from mae.modalities.images.crop import central_crop
from mae.models.file import load_model, model_metadata
from mae.models.reconstruction import interpolate_statistics
from mae.targets.hog import HogTarget
from mae.targets.pixels import patch_statistics


def test_files_are_cropped_as_evaluation_does(tmp_path):
    (tmp_path / "a.png").write_bytes(png(30, 41))
    (tmp_path / "b.png").write_bytes(png(16, 16, seed=2))
    found = mae.reconstruct(build(), [tmp_path / "a.png", str(tmp_path / "b.png")], **CPU)
    for name, row in zip(("a.png", "b.png"), found.input, strict=True):
        whole = torch.from_numpy(decode((tmp_path / name).read_bytes(), name=name)).permute(2, 0, 1)
        assert torch.equal(row, central_crop(whole, (SIDE, SIDE), 0.875).float() / 255)
    assert found.names == (str(tmp_path / "a.png"), str(tmp_path / "b.png"))
    assert found.written == ()
    one = mae.reconstruct(build(), tmp_path / "a.png", **CPU)
    assert torch.equal(one.pasted, found.pasted[:1])


@pytest.mark.parametrize(
    ("channels", "content", "expected"),
    [
        (3, "grey 8", lambda: noise(16, 16, 1).repeat(3, axis=2) / 255),
        (1, "grey 16", lambda: noise(16, 16, 1).astype(np.uint16) * 200 / 65535),
        (3, "grey 16", lambda: (noise(16, 16, 1).astype(np.uint16) * 200).repeat(3, axis=2) / 65535),
        (1, "colour 8", lambda: np.rint(noise(16, 16) @ np.array([[0.299], [0.587], [0.114]])) / 255),
        (5, "bands", lambda: noise(16, 16, 5) / np.float32(255)),
    ],
)
def test_every_kind_of_image_the_data_room_reads_becomes_pixel_values(tmp_path, channels, content, expected):
    path = tmp_path / "i"
    if content == "bands":
        tifffile.imwrite(path, noise(16, 16, 5) / np.float32(255), planarconfig="contig")
    elif content == "grey 16":
        path.write_bytes(encoded(Image.fromarray(noise(16, 16, 1)[..., 0].astype(np.uint16) * 200)))
    else:
        path.write_bytes(png(16, 16, channels=1 if content == "grey 8" else 3))
    found = mae.reconstruct(build(channels=channels), path, out=tmp_path / "o.png", **CPU)
    np.testing.assert_allclose(found.input[0].permute(1, 2, 0).numpy(), expected(), atol=1e-6)
    assert found.written == (tmp_path / "o.png",) and (tmp_path / "o.png").is_file()


def test_a_tensor_gives_what_its_file_gives(tmp_path):
    (tmp_path / "a.png").write_bytes(png(20, 30))
    whole = torch.from_numpy(noise(20, 30)).permute(2, 0, 1).unsqueeze(0)
    of_file, of_tensor = (mae.reconstruct(build(), images, **CPU) for images in (tmp_path / "a.png", whole))
    assert torch.equal(of_file.pasted, of_tensor.pasted) and of_tensor.names == ("image 1",)
    scaled = mae.reconstruct(build(), uint8_images().float() / 255, **CPU)
    assert torch.equal(scaled.full, mae.reconstruct(build(), uint8_images(), **CPU).full)


def test_the_seed_and_the_position_decide_the_mask_and_nothing_else_does():
    images = uint8_images(2)
    first = mae.reconstruct(build(), images, seed=4, **CPU)
    assert torch.equal(first.hidden, mae.reconstruct(build(), images.flip(0), seed=4, **CPU).hidden)
    assert torch.equal(first.hidden[:1], mae.reconstruct(build(), images[:1], seed=4, **CPU).hidden)
    assert not torch.equal(first.hidden, mae.reconstruct(build(), images, seed=5, **CPU).hidden)
    assert not torch.equal(first.hidden[0], first.hidden[1])
    assert first.hidden_share == (0.75, 0.75) and patches_of(first.hidden).sum(dim=1).tolist() == [12, 12]


def test_of_several_ratios_the_masks_nest_and_each_row_is_what_its_ratio_alone_gives():
    images, ratios = uint8_images(2), [0.25, 0.5, 0.875]
    found = mae.reconstruct(build(), images, mask_ratio=ratios, **CPU)
    assert found.names == ("image 1",) * 3 + ("image 2",) * 3
    assert found.hidden_share == (0.25, 0.5, 0.875) * 2
    for number in range(2):
        low, middle, high = found.hidden[3 * number : 3 * number + 3]
        assert (low <= middle).all() and (middle <= high).all()
    for place, ratio in enumerate(ratios):
        alone = mae.reconstruct(build(), images, mask_ratio=ratio, **CPU)
        assert torch.equal(alone.pasted, found.pasted[place::3])
        assert alone.numbers == found.numbers[place::3]


def test_masked_pixels_change_only_the_leaky_picture():
    images = uint8_images(2)
    found = mae.reconstruct(build(), images, **CPU)
    other = torch.where(found.hidden.unsqueeze(1), 255 - images // 2, images)
    again = mae.reconstruct(build(), other, **CPU)
    assert torch.equal(again.pasted, found.pasted)
    assert torch.equal(again.full, found.full)
    assert torch.equal(again.masked, found.masked)
    assert not torch.equal(again.leaky, found.leaky)
    visible = ~found.hidden.unsqueeze(1).expand_as(images)
    for picture in (found.pasted, found.leaky, found.masked):
        assert torch.equal(picture[visible], found.input[visible])


def test_pictures_against_the_prediction_itself():
    """The decoder's numbers, times the statistics of visible neighbours, un-normalised by hand."""
    model, images = build().eval(), uint8_images(1)
    found = mae.reconstruct(model, images, mask_ratio=0.5, seed=2, **CPU)
    normal = (images.float() / 255 - 0.5) / 0.3
    hidden = patches_of(found.hidden)
    with torch.no_grad():
        output = model(normal, mask=hidden)
    cells = normal.unflatten(2, (4, 4)).unflatten(4, (4, 4)).permute(0, 2, 4, 3, 5, 1).reshape(1, 16, 48)
    true = patch_statistics(cells)
    estimated = interpolate_statistics(*true, output.plan, (4, 4))
    for (mean, deviation), picture in ((true, found.leaky), (estimated, found.pasted)):
        drawn = torch.where(hidden.unsqueeze(-1), output.pred * deviation + mean, cells) * 0.3 + 0.5
        drawn = drawn.reshape(1, 4, 4, 4, 4, 3).permute(0, 5, 1, 3, 2, 4).reshape(1, 3, 16, 16)
        torch.testing.assert_close(picture, drawn, atol=1e-5, rtol=0)
    means = torch.where(hidden.unsqueeze(-1), estimated[0], cells)
    colour = cells[~hidden].reshape(-1, 3).mean(dim=0).repeat(16)
    errors = [((guess - cells)[hidden] ** 2).sum() for guess in (means, colour)]
    assert found.numbers[0].means_r2 == pytest.approx(float(1 - errors[0] / errors[1]), abs=1e-4)
    torch.testing.assert_close(found.error, (found.pasted - images / 255).abs(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("norm_pix", [True, False])
def test_numbers_cover_masked_pixels_in_pixel_values(norm_pix):
    images = uint8_images(2)
    found = mae.reconstruct(build(norm_pix=norm_pix), images, **CPU)
    true, picture = images.double().numpy() / 255, found.pasted.double().numpy()
    for number, told in enumerate(found.numbers):
        hidden = found.hidden[number].numpy()
        errors = (picture[number] - true[number])[:, hidden] ** 2
        colour = true[number][:, ~hidden].mean(axis=1, keepdims=True)
        baseline = ((true[number][:, hidden] - colour) ** 2).mean()
        assert told.masked_mse == pytest.approx(errors.mean(), rel=1e-4)
        assert told.psnr == pytest.approx(-10 * np.log10(errors.mean()), abs=1e-3)
        assert told.r2 == pytest.approx(1 - errors.mean() / baseline, abs=1e-4)
        assert told.ssim is not None and -1 <= told.ssim <= 1
        assert (told.means_r2 is not None) == norm_pix
    assert (found.leaky is not None) == norm_pix and len(found.leaky_numbers) == (2 if norm_pix else 0)
    if found.leaky is not None:
        error = (found.leaky[0] - images[0] / 255)[:, found.hidden[0]].square().mean()
        assert found.leaky_numbers[0].masked_mse == pytest.approx(float(error), rel=1e-4)


def test_psnr_of_16_bits_is_by_the_part_that_images_fill():
    images = (noise(SIDE, SIDE, 1).astype(np.uint16) * 16)[None]  # of 12 bits
    (told,) = mae.reconstruct(build(channels=1), images, **CPU).numbers
    span = (int(images.max()) - int(images.min())) / 65535
    assert told.psnr == pytest.approx(10 * np.log10(span**2 / told.masked_mse), abs=1e-3)


def test_psnr_of_floating_point_images_is_by_their_own_range():
    images = torch.rand(1, 3, SIDE, SIDE) * 500 - 20
    (told,) = mae.reconstruct(build(mean=200.0, std=90.0), images, **CPU).numbers
    span = float(images.max() - images.min())
    assert told.psnr == pytest.approx(10 * np.log10(span**2 / told.masked_mse), abs=1e-3)
    constant = mae.reconstruct(build(mean=200.0, std=90.0), torch.full((1, 3, SIDE, SIDE), 7.0), **CPU)
    assert constant.numbers[0].r2 is None


def test_the_model_is_left_as_it_is():
    model = build().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    mae.reconstruct(model, uint8_images(), **CPU)
    assert model.training and all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_asked_for(tmp_path):
    images, mask = uint8_images(), torch.eye(4)
    refused = [
        ({"mask": mask, "mask_ratio": 0.5}, "give one of them"),
        ({"inpaint": True}, "--inpaint needs --mask"),
        ({"seed": -1}, "--seed is -1"),
        ({"mask_ratio": []}, "no mask ratio"),
        ({"mask_ratio": 1.5}, "mask_ratio is 1.5"),
        ({"mask_ratio": 0.99}, "mask_ratio 0.99 on a grid of 4x4 = 16 patches leaves 0 visible"),
        ({"out": tmp_path / "o.jpg"}, "expected a name that ends in .png"),
        ({"mask": torch.full((4, 4), 0.5)}, "of 0 and 1"),
        ({"mask": torch.ones(1, 4, 4)}, r"shape \(1, 4, 4\)"),
    ]
    for options, said in refused:
        with pytest.raises(UsageError, match=said):
            mae.reconstruct(build(), images, **options, **CPU)
    for wrong, said in [
        (images[0, 0], "has the shape"),
        (images.long(), "of type int64"),
        (images[:, :2], "has 2 channels; the model expects 3"),
        (images.float() * float("nan"), "not finite"),
        ([], "no image is given"),
        (tmp_path, "is a folder; expected an image file"),
        (tmp_path / "nowhere.png", "is not there; expected an image file"),
    ]:
        with pytest.raises(UsageError, match=said):
            mae.reconstruct(build(), wrong, **CPU)
    (tmp_path / "b.png").write_bytes(png()[:60])
    with pytest.raises(UnreadableImage, match=r"b\.png"):
        mae.reconstruct(build(), tmp_path / "b.png", **CPU)
    with pytest.raises(UsageError, match="49 rows do not fit on a sheet"):
        mae.reconstruct(build(), images.expand(49, -1, -1, -1), out=tmp_path / "o.png", **CPU)


def test_an_image_that_is_read_is_never_written_over(tmp_path):
    (tmp_path / "a.png").write_bytes(png(16, 16))
    write_mask(tmp_path / "m.png", np.eye(16))
    before = (tmp_path / "a.png").read_bytes()
    for out in ("a.png", "m.png"):
        with pytest.raises(UsageError, match="exists and is not overwritten"):
            mae.reconstruct(build(), tmp_path / "a.png", mask=tmp_path / "m.png", out=tmp_path / out, **CPU)
    Image.fromarray(noise(16, 16)).save(tmp_path / "o-filled.png")
    with pytest.raises(UsageError, match=r"o-filled\.png"):
        mae.reconstruct(
            build(), tmp_path / "o-filled.png", mask=tmp_path / "m.png", inpaint=True, out=tmp_path / "o.png", **CPU
        )
    assert (tmp_path / "a.png").read_bytes() == before
    drawn = mae.reconstruct(build(), tmp_path / "o-filled.png", out=tmp_path / "o.png", **CPU)
    assert drawn.written == (tmp_path / "o.png",)  # nothing is filled, so nothing is in danger
    (tmp_path / "a.tif").write_bytes(before)  # the content tells the format
    assert mae.reconstruct(build(), tmp_path / "a.tif", out=tmp_path / "a2.png", **CPU).written


def test_models_that_draw_nothing_are_refused(tmp_path):
    images = uint8_images()
    for name in ("timm:vit_tiny_patch16_224", "hf:facebook/vit-mae-base"):
        with pytest.raises(UsageError, match=f"{name} has no decoder"):
            mae.reconstruct(name, images, **CPU)
    with pytest.raises(UsageError, match="no channel statistics"):
        mae.reconstruct(build(statistics=False), images, **CPU)
    with pytest.raises(UsageError, match="the model is Linear"):
        mae.reconstruct(nn.Linear(2, 2), images, **CPU)
    model = build()
    model.target = HogTarget()
    with pytest.raises(UsageError, match="predicts hog, not pixels"):
        mae.reconstruct(model, images, **CPU)


def test_a_file_with_an_encoder_alone_says_so(tmp_path):
    model = build()
    whole, part = tmp_path / "m.safetensors", tmp_path / "e.safetensors"
    save_file(model.state_dict(), whole, model_metadata(model))
    tensors = load_file(whole)
    encoder = {name: tensor for name, tensor in tensors.items() if name.startswith("encoder.")}
    save_file(encoder, part, model_metadata(model))
    counts = f"{len(encoder)} of {len(encoder)} encoder tensors, 0 of {len(tensors) - len(encoder)} decoder tensors"
    with pytest.raises(UsageError) as caught:
        mae.reconstruct(part, uint8_images(), **CPU)
    assert counts in str(caught.value) and "reconstruction its decoder" in str(caught.value)
    del tensors["decoder.mask_token"]  # a decoder with a gap is a damaged file, not an encoder
    save_file(tensors, part, model_metadata(model))
    with pytest.raises(mae.MAEError, match="1 missing") as caught:
        load_model(part)
    assert not isinstance(caught.value, UsageError)
    assert torch.equal(
        mae.reconstruct(whole, uint8_images(), **CPU).full, mae.reconstruct(model, uint8_images(), **CPU).full
    )


@pytest.fixture
def drawn(monkeypatch) -> list[dict]:
    """The columns and texts of each sheet."""
    calls: list[dict] = []
    monkeypatch.setattr(
        "mae.report.figures.panels.write_sheet",
        lambda columns, **told: calls.append({"columns": {column.name: column for column in columns}, **told}),
    )
    return calls


def test_the_sheet_says_what_each_row_is(tmp_path, drawn):
    name = "a\x1b[2J$x$\n[bold]b.png"
    (tmp_path / name).write_bytes(png(16, 16))
    found = mae.reconstruct(build(), tmp_path / name, mask_ratio=[0.25, 0.75], out=tmp_path / "o.png", **CPU)
    (told,) = drawn
    columns = told["columns"]
    assert list(columns) == ["input", "masked", "reconstruction", "error", "leaky reconstruction"]
    assert columns["input"].notes[0] == ["a\ufffd[2J$x$\n[bold]b.png"]
    assert columns["masked"].notes == [["25% of patches masked"], ["75% of patches masked"]]
    for row, numbers in enumerate(found.numbers):
        assert columns["reconstruction"].notes[row][:2] == [f"PSNR {numbers.psnr:.1f} dB", f"R² {numbers.r2:.2f}"]
        assert columns["reconstruction"].notes[row][2] == f"means alone: R² {numbers.means_r2:.2f}"
    for row, numbers in enumerate(found.leaky_numbers):
        assert columns["leaky reconstruction"].notes[row] == [f"PSNR {numbers.psnr:.1f} dB", f"R² {numbers.r2:.2f}"]
    assert "leaks brightness and contrast" in columns["leaky reconstruction"].caption
    assert "statistics from visible patches" in columns["reconstruction"].caption
    caption = " ".join(told["caption"])
    assert "no masked pixel is read" in caption and "leaky reconstruction is given the true patch" in caption


def test_the_sheet_of_one_ratio_has_the_full_prediction_and_that_of_plain_pixels_no_leak(tmp_path, drawn):
    mae.reconstruct(build(norm_pix=False), uint8_images(), out=tmp_path / "o.png", **CPU)
    assert list(drawn[0]["columns"]) == ["input", "masked", "reconstruction", "full reconstruction", "error"]
    assert "no loss trains them" in drawn[0]["columns"]["full reconstruction"].caption
    assert "leaky" not in " ".join(drawn[0]["caption"])


def test_the_sheet_of_a_hole_shows_no_truth(tmp_path, drawn):
    mask = torch.zeros(SIDE, SIDE)
    mask[6, 2] = 1
    found = mae.reconstruct(build(), uint8_images(), mask=mask, inpaint=True, out=tmp_path / "o.png", **CPU)
    columns = drawn[0]["columns"]
    assert list(columns) == ["input with the hole", "filled", "masked patches"]
    own = found.input[0].permute(1, 2, 0)
    for name, covered in (("input with the hole", found.hole[0]), ("masked patches", found.hidden[0])):
        picture = columns[name].pictures[0]
        torch.testing.assert_close(picture[~covered], own[~covered], atol=1e-6, rtol=0)
        assert len(picture[covered].unique(dim=0)) == 1
    expected = found.filled[0].permute(1, 2, 0).clamp(0, 1)
    torch.testing.assert_close(columns["filled"].pictures[0], expected, atol=1e-6, rtol=0)
