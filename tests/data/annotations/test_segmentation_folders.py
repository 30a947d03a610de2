"""Images and masks as people keep them."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from pictures import SHARED
from PIL import Image

from mae.data.annotations.pixel_classes import IGNORED
from mae.data.annotations.segmentation import open_segmentation, read_mask
from mae.data.decode.image import decode_mask
from mae.data.decode.limits import UnreadableImage
from mae.data.inspect.labels import inspect_labels
from mae.errors import MAEError, UsageError

MASK = np.array([[0, 1, 2], [1, 255, 2]], dtype=np.uint8)


def image(path: Path, size: tuple[int, int] = (3, 2)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (7, 8, 9)).save(path)


def mask(path: Path, values: np.ndarray = MASK, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = Image.fromarray(values)
    (drawn if mode is None else drawn.convert(mode)).save(path)


@pytest.mark.parametrize(
    ("images", "masks"),
    [
        ("{part}/images/{name}.jpg", "{part}/masks/{name}.png"),
        ("images/{part}/{name}.jpg", "annotations/{part}/{name}.png"),
        ("{part}/{name}.jpg", "{part}annot/{name}.png"),
        ("{part}/Images/{name}.jpg", "{part}/Labels/{name}_mask.png"),
        ("{part}/images/deep/{name}.jpg", "{part}/masks/deep/gt-{name}.png"),
    ],
)
def test_folders_are_found_by_looking(tmp_path: Path, images: str, masks: str):
    for part, count in (("train", 3), ("val", 2)):
        for number in range(count):
            image(tmp_path / images.format(part=part, name=number))
            mask(tmp_path / masks.format(part=part, name=number))
    data = open_segmentation(tmp_path)
    assert data.note == "3 training images and 2 test images, masks of numbers, 3 classes"
    assert data.class_names == ("class 0", "class 1", "class 2") and len(data.test.masks) == 2
    assert data.train.labels(2).tolist() == MASK.tolist()
    assert all(
        path.stem.strip("_maskgt-") == Path(name).stem
        for path, name in zip(data.train.masks, data.train.source.names, strict=True)
    )


def test_without_parts_a_fifth_is_held_out_by_the_names(tmp_path: Path):
    for number in range(10):
        image(tmp_path / "images" / f"{number}.jpg")
        mask(tmp_path / "masks" / f"{number}.png")
    image(tmp_path / "images" / "without.jpg")
    first, again = open_segmentation(tmp_path), open_segmentation(tmp_path)
    assert first.note == (
        "8 training images and 2 test images, a fifth held out, masks of numbers, 3 classes; 1 image without a mask "
        "left out"
    )
    mask(tmp_path / "masks" / "alone.png")
    assert open_segmentation(tmp_path).note.endswith("left out; 1 mask without an image left out")
    assert list(first.test.source.names) == list(again.test.source.names)
    stems = [{Path(name).stem for name in part.source.names} for part in (first.train, first.test)]
    assert not stems[0] & stems[1] and stems[1] == {path.stem for path in first.test.masks}


def test_images_of_one_part_get_no_masks_of_another(tmp_path: Path):
    for part in ("train", "val", "test"):
        for number in range(2):
            image(tmp_path / "images" / part / f"{number}.jpg")
            if part != "val":
                mask(tmp_path / "masks" / part / f"{number}.png")
    data = open_segmentation(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in data.test.masks] == [
        *("masks/test/0.png", "masks/test/1.png")
    ]
    assert [data.test.source.item_name(row) for row in range(2)] == [
        str(tmp_path / "images" / "test" / f"{number}.jpg") for number in range(2)
    ]


def test_masks_of_every_kind_hold_the_same_numbers(tmp_path: Path):
    small = np.array([[0, 1], [2, 1]], dtype=np.uint8)
    palette = Image.fromarray(small)
    palette.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200])
    palette.convert("P").save(tmp_path / "palette.png")
    with Image.open(tmp_path / "palette.png") as written:
        assert written.mode == "P"
    mask(tmp_path / "grey.png", small)
    mask(tmp_path / "deep.png", small.astype(np.uint16))
    mask(tmp_path / "alpha.png", small, "LA")
    mask(tmp_path / "bitmap.bmp", small)
    Image.fromarray(small).save(tmp_path / "raster.tif")
    np.save(tmp_path / "array.npy", small.astype(np.int64))
    for path in sorted(tmp_path.iterdir()):
        assert read_mask(path).tolist() == small.tolist(), path.name
    colours = np.zeros((2, 2, 3), dtype=np.uint8)
    colours[0, 1] = 128, 64, 1
    mask(tmp_path / "colours.png", colours, "RGBA")
    assert (read_mask(tmp_path / "colours.png") == colours).all()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_grey_masks_of_few_bits_hold_their_numbers(bits: int):
    """Pillow spreads them over 0 to 255."""
    values = np.arange(16).reshape(2, 8) % 2**bits

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packed = [int("".join(f"{value:0{bits}b}" for value in row), 2).to_bytes(bits, "big") for row in values]
    header = struct.pack(">IIBBBBB", 8, 2, bits, 0, 0, 0, 0)
    lines = zlib.compress(b"".join(b"\0" + row for row in packed))
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")
    assert decode_mask(data, name="m.png").tolist() == values.tolist()


def test_grey_masks_of_16_bits_with_alpha_hold_their_numbers():
    values = np.array([[0, 1, 255], [256, 7, 65_535]], dtype=np.uint16)
    data = imagecodecs.png_encode(np.stack([values, np.full_like(values, 65_535)], axis=-1))
    assert decode_mask(data, name="m.png").tolist() == values.tolist()


def test_grey_masks_saved_as_colours_of_16_bits_hold_their_numbers():
    values = np.array([[0, 1, 255], [256, 7, 65_535]], dtype=np.uint16)
    for alpha in ([], [np.full_like(values, 65_535)]):
        data = imagecodecs.png_encode(np.stack([values] * 3 + alpha, axis=-1))
        assert decode_mask(data, name="m.png").tolist() == np.stack([values] * 3, axis=-1).tolist()


COLOURS = np.random.default_rng(0).integers(0, 65_535, (3, 256)).astype(np.uint16)


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("uint8", {"photometric": "palette", "colormap": COLOURS}),
        ("uint8", {"photometric": "miniswhite"}),
        ("uint16", {"photometric": "miniswhite"}),
        ("int32", {"photometric": "minisblack"}),
        ("float32", {"photometric": "minisblack"}),
    ],
)
def test_tiff_masks_hold_the_numbers_in_the_file(dtype: str, options: dict[str, Any], compression: str | None):
    """Of a palette its numbers, and nothing turned round, as pictures of the same files are."""
    values = (np.arange(12).reshape(3, 4) % 3).astype(dtype)
    file = io.BytesIO()
    tifffile.imwrite(file, values, compression=compression, **options)
    assert decode_mask(file.getvalue(), name="m.tif").tolist() == values.tolist()


@pytest.mark.parametrize("compression", ["raw", "packbits", "tiff_lzw", "tiff_adobe_deflate"])
def test_tiff_masks_of_few_bits_or_with_alpha_hold_their_numbers(compression: str):
    values = np.arange(12, dtype=np.uint8).reshape(3, 4) % 3
    transparent = Image.fromarray(np.dstack([values, np.zeros_like(values)]))
    for mask, expected in ((Image.fromarray(values > 0), values > 0), (transparent, values)):
        file = io.BytesIO()
        mask.save(file, "TIFF", compression=compression)
        assert decode_mask(file.getvalue(), name="m.tif").tolist() == expected.astype(int).tolist()


@pytest.mark.parametrize("photometric", [0, 1])
@pytest.mark.parametrize("bits", [2, 4])
def test_tiff_masks_of_two_and_four_bits_are_not_spread(bits: int, photometric: int):
    values = np.arange(8).reshape(1, 8) % 2**bits
    row = int("".join(f"{value:0{bits}b}" for value in values[0]), 2).to_bytes(bits, "big")
    entries = {256: 8, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 122, 277: 1, 278: 1, 279: bits}
    tags = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in entries.items())
    data = struct.pack("<2sHIH", b"II", 42, 8, len(entries)) + tags + bytes(4) + row
    assert decode_mask(data, name="m.tif").tolist() == values.tolist()


def test_tiff_masks_of_several_pages_are_refused(tmp_path: Path):
    pages = np.stack([MASK == number for number in range(3)]).astype(np.uint8)
    tifffile.imwrite(tmp_path / "1.tif", pages, photometric="minisblack")
    with pytest.raises(UnreadableImage, match=r"1.tif holds several pages, .* expected one with the number of each"):
        read_mask(tmp_path / "1.tif")


def test_masks_of_true_and_false_are_numbers(tmp_path: Path):
    np.save(tmp_path / "m.npy", np.array([[True, False]]))
    assert read_mask(tmp_path / "m.npy").tolist() == [[1, 0]]


@pytest.mark.parametrize("more", [{}, {"exif": Image.Exif()}, {"save_all": True}])
def test_masks_in_webp_are_read_where_it_loses_nothing(tmp_path: Path, more: dict[str, object]):
    if "save_all" in more:
        more = {**more, "append_images": [Image.new("L", (40, 30), 9)]}
    if "exif" in more:
        more["exif"][271] = "a maker"
    shades = Image.fromarray(np.arange(1200, dtype=np.uint8).reshape(30, 40) % 7)
    for name, lossless in (("kept.webp", True), ("lossy.webp", False)):
        shades.convert("RGB").save(tmp_path / name, lossless=lossless, **more)
    assert (read_mask(tmp_path / "kept.webp")[:, :, 0] == np.asarray(shades)).all()
    with pytest.raises(UnreadableImage, match="lossy.webp is a lossy WebP, whose compression changes the numbers"):
        read_mask(tmp_path / "lossy.webp")


def test_what_is_no_mask_is_refused(tmp_path: Path):
    image(tmp_path / "a.jpg")
    with pytest.raises(UnreadableImage, match="is a JPEG, whose compression changes the numbers of classes"):
        decode_mask((tmp_path / "a.jpg").read_bytes(), name="a.jpg")
    for values in (np.full((2, 2), 0.5, dtype=np.float32), np.full((2, 2), -1), np.full((2, 2), 70_000)):
        np.save(tmp_path / "b.npy", values)
        with pytest.raises(MAEError, match=rf"b.npy holds {values[0, 0]:g}; expected whole numbers of classes"):
            read_mask(tmp_path / "b.npy")
    np.save(tmp_path / "b.npy", np.zeros((9, 9, 2), dtype=np.uint8))
    with pytest.raises(MAEError, match="b.npy holds 2 channels; expected the numbers of classes in one"):
        read_mask(tmp_path / "b.npy")
    Image.new("L", (8, 8)).save(tmp_path / "b.tif", compression="jpeg")
    with pytest.raises(MAEError, match="b.tif is compressed with JPEG, which changes the numbers of classes"):
        read_mask(tmp_path / "b.tif")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n cut")
    with pytest.raises(MAEError, match="c.png is not a whole PNG image"):
        read_mask(tmp_path / "c.png")
    with pytest.raises(MAEError, match="cannot be read: No such file"):
        read_mask(tmp_path / "none.png")


def test_classes_come_from_the_list_and_colours_need_one(tmp_path: Path):
    for number in range(2):
        for part in ("train", "test"):
            image(tmp_path / part / "images" / f"{number}.png")
            colours = np.zeros((2, 3, 3), dtype=np.uint8)
            colours[0] = 128, 64, 128
            mask(tmp_path / part / "masks" / f"{number}.png", colours)
    with pytest.raises(UsageError, match=r"write classes.txt .*'road 128 64 128'"):
        open_segmentation(tmp_path)
    (tmp_path / "classes.txt").write_text("road 128 64 128\nsky 0 0 0\n")
    data = open_segmentation(tmp_path)
    assert data.class_names == ("road", "sky") and data.train.labels(0).tolist() == [[0] * 3, [1] * 3]
    assert "masks of colours" in data.note


@pytest.mark.parametrize("scale", [1, 256, 257])
@pytest.mark.parametrize("ending", ["png", "tif", "npy"])
def test_colours_of_16_bits_are_those_of_8(tmp_path: Path, ending: str, scale: int):
    colours = np.zeros((4, 5, 3), dtype=np.uint16)
    colours[:2], colours[3] = np.array([128, 0, 64]) * scale, 255 * scale
    for number in range(4):
        image(tmp_path / "images" / f"{number}.png", (5, 4))
    masks = [tmp_path / "masks" / f"{number}.{ending}" for number in range(4)]
    masks[0].parent.mkdir()
    # In one nothing but white, which alone may be a number.
    for path, values in zip(masks, [colours, colours, colours, np.full_like(colours, 255 * scale)], strict=True):
        if ending == "npy":
            np.save(path, values)
        else:
            path.write_bytes((imagecodecs.png_encode if ending == "png" else tiff_of)(values))
    (tmp_path / "classes.txt").write_text("road 128 0 64\nsky 0 0 0\nwhite 255 255 255\n")
    data = open_segmentation(tmp_path)
    found = {path: split.labels(row) for split in (data.train, data.test) for row, path in enumerate(split.masks)}
    assert found[masks[0]][:, 0].tolist() == [0, 0, 1, 2] and (found[masks[3]] == 2).all()
    findings = {each.name: each.level for each in inspect_labels(tmp_path)[0]}
    assert findings["palette"] == findings["values"] == "ok"


def tiff_of(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, values, photometric="rgb")
    return file.getvalue()


def test_colours_that_the_list_tells_need_not_be_in_the_first_masks(tmp_path: Path):
    colours = np.zeros((2, 3, 3), dtype=np.uint8)
    for number in range(40):
        image(tmp_path / "images" / f"{number:02d}.png")
        if number == 39:
            colours[0] = 128, 0, 0
        mask(tmp_path / "masks" / f"{number:02d}.png", colours)
    (tmp_path / "classes.txt").write_text("background 0 0 0\ndefect 128 0 0\n")
    data = open_segmentation(tmp_path)
    splits = (data.train, data.test)
    labels = {path.stem: split.labels(row) for split in splits for row, path in enumerate(split.masks)}
    assert "masks of colours" in data.note and not labels["00"].any()
    assert labels["39"].tolist() == [[1] * 3, [0] * 3]


def test_a_mask_of_another_size_or_of_an_image_that_exif_turns_is_refused(tmp_path: Path):
    for number in range(3):
        image(tmp_path / "images" / f"{number}.jpg")
        mask(tmp_path / "masks" / f"{number}.png")
    turned = Image.new("RGB", (3, 2))
    exif = Image.Exif()
    exif[274] = 6
    turned.save(tmp_path / "images" / "1.jpg", exif=exif)
    mask(tmp_path / "masks" / "2.png", MASK[:, :2])
    data = open_segmentation(tmp_path)
    parts = {
        Path(name).stem: (part, row) for part in (data.train, data.test) for row, name in enumerate(part.source.names)
    }
    assert (parts["0"][0].labels(parts["0"][1]) == np.where(MASK == 255, IGNORED, MASK)).all()
    for stem, size in (("1", "has 2 x 3 pixels, .*1.jpg, turned as its EXIF data say, 3 x 2"), ("2", "2 x 2 pixels")):
        part, row = parts[stem]
        with pytest.raises(MAEError, match=f"{stem}.png .*{size}"):
            part.labels(row)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ((), "holds no folders; expected images/ and masks/"),
        (("train/images/1.jpg", "val/images/1.jpg"), "holds train/, val/; expected images/ and masks/"),
        (("images/1.jpg", "masks/2.png"), r"no image of .*images has a mask in .*masks \(1.jpg, 2.png\)"),
        (("images/1.jpg", "masks/1.png"), "holds 1 image with a mask; expected 2 or more"),
        (("images/1.jpg", "images/2.jpg", "masks/1.png", "masks/1.bmp"), "expected one mask for each image"),
        (("images/1.jpg", "images/1.JPEG", "masks/1.png"), "holds 1.JPEG and 1.jpg for the mask 1.png; expected one"),
        (("images/1.txt", "masks/1.png"), "holds no images"),
    ],
)
def test_folders_that_hold_no_such_images_are_refused(tmp_path: Path, made: tuple[str, ...], told: str):
    for name in made:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".txt":
            path.write_text("")
        else:
            image(path) if path.suffix in (".jpg", ".JPEG") else mask(path)
    with pytest.raises(UsageError, match=told):
        open_segmentation(tmp_path)


def test_no_folder_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="is no folder; images with masks are read from folders"):
        open_segmentation(tmp_path / "none.zip")


def test_a_changed_mask_changes_the_version(tmp_path: Path):
    for number in range(5):
        image(tmp_path / "images" / f"{number}.jpg")
        mask(tmp_path / "masks" / f"{number}.png")
    train = open_segmentation(tmp_path).train
    before = train.version()
    assert before == open_segmentation(tmp_path).train.version()
    mask(train.masks[0], np.array([[0, 1, 2], [2, 2, 2]], dtype=np.uint8))
    assert before != open_segmentation(tmp_path).train.version()


def test_road_scenes_are_read_as_they_lie():
    if not (SHARED / "camvid").is_dir():
        pytest.skip(f"{SHARED / 'camvid'} is not there")
    data = open_segmentation(SHARED / "camvid")
    assert data.note == "367 training images and 101 test images, masks of numbers, 11 classes"
    assert data.class_names[0] == "sky" and "unlabelled" not in data.class_names
    for row in (0, 50, 100):
        labels = data.test.labels(row)
        assert labels.shape == (360, 480) and set(np.unique(labels)) <= {*range(11), IGNORED}
