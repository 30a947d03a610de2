"""Decoding: what every kind of file becomes, and that hostile ones are refused early."""

import io
import time
import tracemalloc
import warnings
import zlib

import imagecodecs
import numpy as np
import pytest
import tifffile
from data.pictures import encoded, noise, png
from hostile import forge
from PIL import Image, ImageOps

from mae.data.decode import npy
from mae.data.decode.image import conform, decode, decode_mask, probe
from mae.data.decode.image import orientation as orientation_of
from mae.data.decode.limits import UnreadableImage

UINT8, UINT16, FLOAT32 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.float32)


def tiff(pixels: np.ndarray, **options: object) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, pixels, **options)
    return buffer.getvalue()


def checked(data: bytes) -> np.ndarray:
    """Decodes, and requires `probe` to have told the same beforehand."""
    told, pixels = probe(data, name="x"), decode(data, name="x")
    assert (told.height, told.width, told.channels, told.dtype) == (*pixels.shape, pixels.dtype)
    assert pixels.flags.c_contiguous
    return pixels


@pytest.mark.parametrize("file_format", ["PNG", "BMP", "TIFF", "WEBP"])
def test_colour_is_exact_in_lossless_formats(file_format):
    options = {"lossless": True} if file_format == "WEBP" else {}
    pixels = noise(9, 14)
    assert np.array_equal(checked(encoded(Image.fromarray(pixels), file_format, **options)), pixels)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_modes(mode):
    data = encoded(Image.fromarray(noise(24, 16)).convert(mode), "JPEG")
    expected = np.array(Image.open(io.BytesIO(data)).convert("L" if mode == "L" else "RGB")).reshape(24, 16, -1)
    assert np.array_equal(checked(data), expected)


def test_multi_picture_jpeg_gives_its_first_frame():
    frames = [Image.fromarray(noise(16, 16, seed=seed)) for seed in (0, 1)]
    data = encoded(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert np.array_equal(checked(data), np.array(Image.open(io.BytesIO(encoded(frames[0], "JPEG")))))


def test_content_decides_not_the_name():
    assert decode(png(), name="photo.jpg").shape == (12, 10, 3)


def test_sixteen_bit_grey_keeps_its_values():
    pixels = np.array([[0, 255, 256], [257, 40000, 65535]], dtype=np.uint16)
    for data in (encoded(Image.fromarray(pixels)), tiff(pixels), tiff(pixels, byteorder=">")):
        found = checked(data)
        assert found.dtype == UINT16 and np.array_equal(found[..., 0], pixels)


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("compression", [None, "zlib", "lzw"])
@pytest.mark.parametrize("tile", [None, (16, 16)])
def test_one_band_of_floats_keeps_its_values(byteorder: str, compression: str | None, tile: tuple[int, int] | None):
    pixels = np.random.default_rng(0).standard_normal((21, 35)).astype(np.float32)
    found = checked(tiff(pixels, photometric="minisblack", byteorder=byteorder, compression=compression, tile=tile))
    assert found.dtype == np.float32 and np.array_equal(found[..., 0], pixels)


@pytest.mark.parametrize("photometric", ["minisblack", "rgb"])
@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_three_bands_of_eight_bits_are_three_channels(photometric: str, planar: str):
    pixels = noise(9, 7, 3)
    stored = pixels if planar == "contig" else np.ascontiguousarray(np.moveaxis(pixels, 2, 0))
    found = checked(tiff(stored, photometric=photometric, planarconfig=planar))
    assert np.array_equal(found, pixels)


def test_one_bit_becomes_black_and_white():
    image = Image.fromarray(noise(8, 8, 1).squeeze()).convert("1")
    found = checked(encoded(image))
    assert found.shape == (8, 8, 1) and set(np.unique(found)) == {0, 255}


def test_palette_becomes_colour():
    image = Image.fromarray(noise(8, 8)).quantize(16)
    assert np.array_equal(checked(encoded(image)), np.array(image.convert("RGB")))


@pytest.mark.parametrize(("mode", "channels"), [("RGBA", 3), ("LA", 1)])
def test_alpha_is_composited_over_white(mode, channels):
    colours = np.full((1, 3, channels), 100, dtype=np.uint8)
    alpha = np.array([0, 255, 128], dtype=np.uint8).reshape(1, 3, 1)
    found = checked(encoded(Image.fromarray(np.concatenate([colours, alpha], axis=2))))
    assert found.shape == (1, 3, channels)
    assert found[0, :, 0].tolist() == pytest.approx([255, 100, 100 * 128 / 255 + 127], abs=1)


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_pngs_of_16_bits_keep_their_depth(channels):
    """Pillow makes 8 bits of them."""
    pixels = np.random.default_rng(0).integers(0, 65536, (7, 5, channels), dtype=np.uint16)
    data = imagecodecs.png_encode(pixels)
    kept, told = decode(data, name="x", bands=channels), probe(data, name="x", bands=channels)
    assert np.array_equal(kept, pixels) and (told.channels, told.dtype, told.alpha) == (channels, UINT16, False)
    with pytest.raises(UnreadableImage, match="x is not a whole PNG image"):
        decode(data[: len(data) // 2], name="x")


@pytest.mark.parametrize("channels", [2, 4])
def test_alpha_of_16_bits_is_composited_over_white(channels):
    pixels = np.random.default_rng(0).integers(0, 65536, (7, 5, channels), dtype=np.uint16)
    pixels[0, :2, -1] = 0, 65535
    data = imagecodecs.png_encode(pixels)
    found, alpha = checked(data), pixels[..., -1:] / 65535
    assert found.dtype == UINT16 and found.shape == (7, 5, channels - 1) and probe(data, name="x").alpha
    assert np.abs(found - (pixels[..., :-1] * alpha + 65535 * (1 - alpha))).max() <= 0.5
    assert (found[0, 0] == 65535).all() and np.array_equal(found[0, 1], pixels[0, 1, :-1])


def test_a_transparent_colour_of_16_bits_is_white():
    pixels = np.random.default_rng(0).integers(0, 65536, (7, 5, 3), dtype=np.uint16)
    found = checked(with_chunk(imagecodecs.png_encode(pixels), b"tRNS", pixels[2, 3].astype(">u2").tobytes()))
    assert (found[2, 3] == 65535).all()
    found[2, 3] = pixels[2, 3]
    assert np.array_equal(found, pixels)


def test_odd_colour_profiles_of_16_bits_are_not_printed(capfd):
    pixels = np.zeros((7, 5, 3), dtype=np.uint16)
    assert np.array_equal(checked(with_chunk(imagecodecs.png_encode(pixels), b"iCCP", b"odd\0\0")), pixels)
    assert not any(capfd.readouterr())


def with_chunk(data: bytes, kind: bytes, content: bytes) -> bytes:
    """A PNG with another chunk before its pixels."""
    at = data.index(b"IDAT") - 4
    return data[:at] + forge.chunk(kind, content) + data[at:]


def test_transparent_palette_entry_becomes_white():
    image = Image.new("P", (2, 1))
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.putpixel((1, 0), 1)
    assert checked(encoded(image, transparency=0)).tolist() == [[[255, 255, 255], [0, 0, 200]]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation_is_applied(orientation, file_format):
    exif = Image.Exif()
    exif[274] = orientation
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encoded(Image.fromarray(noise(16, 24)), file_format, exif=exif, **options)
    assert np.array_equal(checked(data), np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))


@pytest.mark.parametrize("compression", [None, "zlib", "lzw"])
@pytest.mark.parametrize(("dtype", "bands"), [(np.uint8, 1), (np.uint8, 3), (np.uint16, 1), (np.float32, 1)])
def test_omitted_tiles_of_a_tiff_are_zeros(compression: str | None, dtype: type, bands: int):
    tile = np.random.default_rng(0).integers(1, 200, (16, 16, bands)).astype(dtype)
    kind = "rgb" if bands == 3 else "minisblack"
    options = {"photometric": kind, "planarconfig": "contig"} if bands > 1 else {"photometric": kind}
    shape = (16, 32, 3) if bands == 3 else (16, 32)
    tiles = iter([tile if bands > 1 else tile[..., 0], None])
    data = tiff(tiles, shape=shape, dtype=dtype, tile=(16, 16), compression=compression, **options)
    assert np.array_equal(checked(data), np.concatenate([tile, np.zeros_like(tile)], axis=1))


def test_grey_of_four_bits_is_scaled_with_omitted_strips_too():
    tags = [
        (256, 4, [2]), (257, 4, [2]), (258, 3, [4]), (259, 3, [1]), (262, 3, [1]), (273, 4, [forge.HEADER + 12 * 9, 0]),
        (277, 3, [1]), (278, 4, [1]), (279, 4, [1, 0]),
    ]  # fmt: skip
    assert checked(forge.tiff(tags, b"\x1f")).tolist() == [[[17], [255]], [[0], [0]]]


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 7])
def test_white_as_zero_in_bands_of_few_bits_is_turned_round_within_them(bits: int):
    values, white = [0, 1, 2, 5], (1 << bits) - 1
    packed = int("".join(f"{value:0{bits}b}" for value in values).ljust(8 * bits, "0"), 2).to_bytes(bits)
    tags = [
        (256, 4, [2]), (257, 4, [1]), (258, 3, [bits] * 2), (259, 3, [1]), (262, 3, [0]),
        (273, 4, [forge.HEADER + 12 * 9]), (277, 3, [2]), (278, 4, [1]), (279, 4, [bits]),
    ]  # fmt: skip
    assert checked(forge.tiff(tags, packed)).flatten().tolist() == [white - value for value in values]


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_odd_numbers_of_few_bits_are_read_as_they_are(bits: int):
    packed = int("".join(f"{value:0{bits}b}" for value in (0, 1, 2, 5)).ljust(8 * bits, "0"), 2).to_bytes(bits)
    tags = [
        (256, 4, [4]), (257, 4, [1]), (258, 3, [bits]), (259, 3, [1]), (262, 3, [1]),
        (273, 4, [forge.HEADER + 12 * 9]), (277, 3, [1]), (278, 4, [1]), (279, 4, [bits]),
    ]  # fmt: skip
    data = forge.tiff(tags, packed)
    assert checked(data).flatten().tolist() == decode_mask(data, name="x").flatten().tolist() == [0, 1, 2, 5]


def test_alpha_of_twelve_bits_is_opaque_at_their_largest_value():
    grey, alpha = np.array([[100, 2000, 4095, 100]]), np.array([[4095, 4095, 4095, 0]])
    options = {"bitspersample": 12, "photometric": "minisblack", "planarconfig": "contig", "extrasamples": [2]}
    data = tiff(np.stack([grey, alpha], axis=2).astype(np.uint16), **options)
    assert checked(data)[..., 0].tolist() == [[100, 2000, 4095, 4095]]


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("compression", [None, "zlib", "lzw"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_big_tiffs_are_read_in_either_byte_order(byteorder: str, compression: str | None, dtype: type):
    pixels = noise(21, 35)[..., 0].astype(dtype)
    options = {"photometric": "minisblack", "bigtiff": True}
    found = checked(tiff(pixels, byteorder=byteorder, compression=compression, **options))
    assert found.dtype == dtype and np.array_equal(found[..., 0], pixels)


@pytest.mark.parametrize("compression", [None, "packbits", "zlib"])
@pytest.mark.parametrize("bands", [1, 3])
def test_premultiplied_alpha_is_composited_over_white(bands: int, compression: str | None):
    alpha = noise(9, 14)[..., :1]
    colour = (noise(9, 14, seed=1)[..., :bands] * (alpha / 255)).astype(np.uint8)
    kind = "rgb" if bands == 3 else "minisblack"
    options = {"photometric": kind, "planarconfig": "contig", "extrasamples": [1], "compression": compression}
    data = tiff(np.concatenate([colour, alpha], axis=2), **options)
    assert np.abs(checked(data) - (colour + 255.0 - alpha)).max() <= 1


@pytest.mark.parametrize("bits", [10, 12, 16])
def test_white_as_zero_is_turned_round_within_the_bits_that_a_file_has(bits: int):
    pixels = np.array([[0, 1, 500, (1 << bits) - 1]], dtype=np.uint16)
    data = tiff(pixels, bitspersample=bits, photometric="miniswhite")
    assert np.array_equal(checked(data)[..., 0], (1 << bits) - 1 - pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_behind_the_pixels_of_a_png_counts(orientation: int):
    exif = Image.Exif()
    exif[274] = orientation
    data, whole = png(), encoded(Image.fromarray(noise(12, 10)), exif=exif)
    behind = data[:-12] + forge.chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + data[-12:]
    assert np.array_equal(checked(behind), checked(whole))
    assert orientation_of(behind, name="x") == orientation


def test_orientation_of_sixteen_bit_colour_tiff():
    pixels = noise(6, 9).astype(np.uint16) * 256
    found = checked(tiff(pixels, photometric="rgb", extratags=[(274, 3, 1, 6, True)]))
    assert np.array_equal(found, np.rot90(pixels, -1))


@pytest.mark.parametrize("planar", ["contig", "separate"])
@pytest.mark.parametrize("compression", [None, "zlib", "lzw"])
def test_thirteen_bands_of_sixteen_bits(planar, compression):
    bands = np.random.default_rng(0).integers(0, 65536, (7, 11, 13), dtype=np.uint16)
    stored = bands if planar == "contig" else np.moveaxis(bands, 2, 0)
    predicted = compression is not None  # as GDAL's, differences from pixel to pixel
    written = {"planarconfig": planar, "compression": compression, "predictor": predicted}
    found = checked(tiff(stored, photometric="minisblack", **written))
    assert found.dtype == UINT16 and np.array_equal(found, bands)


def test_sixteen_bit_colour_tiff_keeps_its_low_bytes():
    pixels = np.random.default_rng(0).integers(0, 65536, (5, 6, 3), dtype=np.uint16)
    assert np.array_equal(checked(tiff(pixels, photometric="rgb")), pixels)


def test_four_bands_without_alpha_stay_four():
    pixels = noise(5, 6, 4)
    assert np.array_equal(checked(tiff(pixels, photometric="rgb", extrasamples=["unspecified"])), pixels)
    assert checked(tiff(pixels, photometric="rgb", extrasamples=["unassalpha"])).shape == (5, 6, 3)


@pytest.mark.parametrize("kind", ["u4", "i2", "i4", "f4", "f8"])
def test_wide_numbers_become_raw_floats(kind):
    pixels = np.array([[0, 3, 100], [70000 % 32000, 12, 9]]).astype(kind)
    found = checked(tiff(pixels))
    assert found.dtype == FLOAT32 and np.array_equal(found[..., 0], pixels.astype(np.float32))


def test_white_is_zero_is_inverted():
    pixels = np.array([[0, 1000, 65535]], dtype=np.uint16)
    assert checked(tiff(pixels, photometric="miniswhite"))[..., 0].tolist() == [[65535, 64535, 0]]


def gdal(names: list[str], **options: object) -> bytes:
    """A TIFF with bands named as GDAL does it."""
    item = '<Item name="DESCRIPTION" sample="{}" role="description">{}</Item>'
    items = "".join(item.format(*named) for named in enumerate(names))
    tags = [(42112, "s", 0, f"<GDALMetadata>{items}</GDALMetadata>", True), (42113, "s", 0, "-9999", True)]
    return tiff(
        np.ones((4, 4, 3), np.int16), photometric="minisblack", planarconfig="contig", extratags=tags, **options
    )


def test_bands_are_called_what_gdal_calls_them(caplog):
    told = probe(gdal(["B02", "near &amp; infrared", "B11"]), name="x")
    assert told.names == ("B02", "near & infrared", "B11") and told.nodata == "-9999"
    assert probe(gdal(["B02", "B03"]), name="x").names is None  # one has no name
    for last in ("B02", "a,b", "a\x1b[31m"):
        assert probe(gdal(["B02", "B03", last]), name="x").names is None
    plain = probe(tiff(np.ones((4, 4), np.uint16)), name="x")
    assert plain.names is None and plain.nodata is None


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((6, 7), (6, 7, 1)),
        ((20, 30, 4), (20, 30, 4)),
        ((4, 20, 30), (20, 30, 4)),
        ((8, 8, 13), (8, 8, 13)),  # more channels than pixels a side: the two equal axes are the image's
        ((13, 8, 8), (8, 8, 13)),
        ((5, 20, 5), (5, 20, 5)),
    ],
)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("u1", UINT8), ("<u2", UINT16), (">u2", UINT16), ("i2", FLOAT32), ("u4", FLOAT32), ("f8", FLOAT32)],
)
def test_arrays_of_numpy(shape, expected, order, kind, dtype):
    values = np.asarray(np.arange(np.prod(shape)).reshape(shape) % 250, dtype=kind, order=order)
    found = checked(array(values))
    channels_first = expected[:2] == shape[1:]
    assert found.dtype == dtype and found.shape == expected
    assert np.array_equal(
        found, (np.moveaxis(values, 0, 2) if channels_first else values).reshape(expected).astype(dtype)
    )


def array(values: np.ndarray, **options: object) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, values, **options)
    return buffer.getvalue()


def test_arrays_of_truth_are_black_and_white():
    assert checked(array(np.array([[True, False]])))[..., 0].tolist() == [[255, 0]]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (array(np.ones((4, 4), complex)), "complex128 values; expected real numbers"),
        (array(np.array([[{}]]), allow_pickle=True), "object values; expected real numbers"),
        (array(np.ones(9)), r"shape \[9\]; expected \[height, width\]"),
        (array(np.ones((2, 2, 2, 2))), "as a third axis; remove it"),
        (array(np.ones((0, 4))), r"shape \[0, 4\]"),
        (array(np.ones((9, 9)))[:-1], "647 of 648 bytes"),
        (array(np.ones((20000, 1), np.uint8)), "a side may have"),
        (b"\x93NUMPY\x03\0" + array(np.ones((4, 4)))[8:], "of version 3.0"),
        (b"\x93NUMPY\x01\0\x20\0" + b"(" * 32, "not a whole NPY"),
    ],
)
def test_arrays_that_are_no_images_are_refused(data, says):
    for read in (decode, probe) if "bytes" not in says else (decode,):
        with pytest.raises(UnreadableImage, match=says):
            read(data, name="x")


def test_headers_of_arrays_are_kept_and_told_apart():
    shapes = [(8, 8, 3), (8, 9, 3), (9, 8, 3), (8, 8, 1), (3, 8, 8), (8, 8)]
    kinds = ("u1", "<u2", ">u2", "<f4", ">f4")
    values = [(np.arange(np.prod(shape)) % 251).astype(kind).reshape(shape) for shape in shapes for kind in kinds]
    values += [np.asfortranarray(each) for each in values]
    files = [array(each, version=version) for each in values for version in ((1, 0), (2, 0))]
    npy._parsed.cache_clear()
    for data in (data for data in files for _ in range(2)):
        expected = np.load(io.BytesIO(data))
        expected = np.moveaxis(expected, 0, 2) if expected.shape == (3, 8, 8) else expected
        assert np.array_equal(checked(data), expected.reshape(*expected.shape[:2], -1))
    assert npy._parsed.cache_info().hits >= len(files)
    for _ in range(2):  # what is refused stays refused
        with pytest.raises(UnreadableImage, match="complex128 values"):
            decode(array(np.ones((4, 4), complex)), name="x")


def forged_jpeg(width: int, height: int) -> bytes:
    """A JPEG whose header claims another size; its entropy-coded data is long."""
    data = bytearray(encoded(Image.fromarray(noise(200, 200)), "JPEG", quality=95))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


def forged_png(width: int, height: int) -> bytes:
    data = bytearray(png())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def forged_webp(width: int, height: int) -> bytes:
    data = bytearray(encoded(Image.fromarray(noise(8, 8, 4)), "WEBP", lossless=True))
    assert data[12:16] == b"VP8L"
    packed = int.from_bytes(data[21:25], "little") & ~0xFFFFFFF
    data[21:25] = (packed | (width - 1) | (height - 1) << 14).to_bytes(4, "little")
    return bytes(data)


def forged_tile_tiff() -> bytes:
    data = tiff(noise(32, 32, 1).squeeze(), tile=(16, 16))
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        places = [file.pages.first.tags[code].valueoffset for code in (322, 323)]
    patched = bytearray(data)
    for place in places:
        patched[place : place + 2] = (65520).to_bytes(2, "little")
    return bytes(patched)


BOMBS = {
    "jpeg": forged_jpeg(30000, 30000),
    "jpeg within the sides": forged_jpeg(16000, 16000),
    "png": forged_png(30000, 30000),
    "webp": forged_webp(16000, 16000),
    "tile": forged_tile_tiff(),
}


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("read", [decode, probe])
def test_forged_sizes_are_refused_before_allocating(kind, read):
    decode(png(), name="warm-up")
    before = Image.MAX_IMAGE_PIXELS
    tracemalloc.start()
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UnreadableImage, match="bomb.*pixels.*at most"):
            read(BOMBS[kind], name="bomb")
    elapsed, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert before == Image.MAX_IMAGE_PIXELS
    assert elapsed < 0.5 and peak < 8 << 20


def test_limits_name_the_side_the_pixels_and_the_bytes(monkeypatch):
    with pytest.raises(UnreadableImage, match="60000 x 1 pixels; a side may have 16384"):
        decode(png(1, 60000), name="strip.png")
    with pytest.raises(UnreadableImage, match="67,108,864 pixels at most"):
        decode(forged_jpeg(16000, 16000), name="a.jpg")
    with pytest.raises(UnreadableImage, match="0 x 10|whole PNG"):
        decode(forged_png(0, 10), name="a.png")
    bands = tiff(np.zeros((20, 20, 5), np.float32), photometric="minisblack", planarconfig="contig")
    monkeypatch.setattr("mae.data.decode.limits.MAX_BYTES", 7999)
    with pytest.raises(UnreadableImage, match="a.tif is 20 x 20 pixels with 5 channels of float32.*expected"):
        decode(bands[:7999], name="a.tif")
    with pytest.raises(UnreadableImage, match="long.tif has 0 MiB"):
        decode(bands, name="long.tif")


@pytest.mark.parametrize("compression", ["deflate", "LZW"])
def test_strip_is_inflated_only_as_far_as_it_has_room(compression):
    """All 64 strips are the same bytes, each of which would grow to 40 MB."""
    lzw = compression == "LZW"
    strip = imagecodecs.lzw_encode(b"\7" * (40 << 20)) if lzw else forge.zeros(40 << 20, value=7)
    data = forge.strip_tiff(64, 64, strip, bits=8, compression=5 if lzw else 8)
    tracemalloc.start()
    pixels = checked(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (pixels == 7).all() and pixels.shape == (64, 64, 5) and peak < 12 << 20


def test_deflated_strip_that_ends_early_is_refused():
    whole = zlib.compress(bytes(range(20)))
    assert checked(forge.strip_tiff(2, 3, whole)).shape == (3, 2, 5)
    with pytest.raises(UnreadableImage, match="a.tif is not a whole TIFF image: a compressed strip ends early"):
        decode(forge.strip_tiff(2, 3, whole[:-2]), name="a.tif")
    with pytest.raises(UnreadableImage, match="a.tif.*incorrect data check"):
        decode(forge.strip_tiff(2, 3, whole[:-1] + b"!"), name="a.tif")


def test_lzw_strip_that_ends_early_or_is_damaged_is_refused():
    whole = imagecodecs.lzw_encode(bytes(range(20)))
    assert checked(forge.strip_tiff(2, 3, whole, compression=5)).shape == (3, 2, 5)
    for strip in (whole[:-2], whole[:4], whole[:5] + b"\xff" + whole[6:]):
        with pytest.raises(UnreadableImage, match="a.tif is not a whole TIFF image"):
            decode(forge.strip_tiff(2, 3, strip, compression=5), name="a.tif")


def test_packbits_of_what_pillow_cannot_read_is_refused_with_the_remedy():
    data = forge.strip_tiff(6, 1, bytes.fromhex("FE AA 02 80 00 2A FD AA"), bands=4, bits=16, compression=32773)
    with pytest.raises(UnreadableImage, match="a.tif is a 16-bit TIFF of 4 bands compressed with PACKBITS; .*convert"):
        decode(data, name="a.tif")


@pytest.mark.parametrize(("bands", "bits"), [(5, 16), (3, 8)])
def test_tiff_without_most_of_its_strips_is_refused(bands, bits):
    row = bytes(range(64)) * 10
    data = forge.strip_tiff(64, 64, row[: 64 * bands * bits // 8], bands=bands, bits=bits, compression=1, strips=9)
    for read in (decode, probe):
        with pytest.raises(
            UnreadableImage, match="a.tif lists the offsets of 9 strips and the sizes of 9; expected 64"
        ):
            read(data, name="a.tif")


def test_jpeg_of_many_scans_is_refused():
    data = encoded(Image.fromarray(noise(16, 16)), "JPEG", progressive=True)
    scans = data.count(b"\xff\xda")
    assert checked(forge.more_scans(data, 100 - scans)).shape == (16, 16, 3)
    with pytest.raises(UnreadableImage, match="a.jpg is a JPEG of 101 scans; expected 100 at most"):
        decode(forge.more_scans(data, 101 - scans), name="a.jpg")
    # Of a film behind a photograph, some bytes look like scans.
    assert checked(data + b"\xff\xda" * 200).shape == (16, 16, 3)


def test_bmp_of_long_runs_is_refused():
    assert checked(forge.bmp(20, 2, b"\x14\x07\0\0\x14\x09\0\1"))[..., 0].tolist() == [[9] * 20, [7] * 20]
    for data in (forge.bmp(8192, 8192, b"\xff\7" * 99), forge.bmp(9, 9, bytes(17 << 20))):
        with pytest.raises(UnreadableImage, match="a.bmp is a run-length encoded BMP of over 16"):
            decode(data, name="a.bmp")


def test_large_images_are_converted_in_bands_alike(monkeypatch):
    images = {
        "RGBA": Image.fromarray(noise(23, 9, 4)),
        "LA": Image.fromarray(noise(23, 9, 2)),
        "P": Image.fromarray(noise(23, 9)).quantize(7),
        "I;16": Image.fromarray(noise(23, 9, 1).squeeze().astype(np.uint16) * 250),
        "1": Image.fromarray(noise(23, 9, 1).squeeze()).convert("1"),
    }
    stored = {mode: encoded(image, **({"transparency": 2} if mode == "P" else {})) for mode, image in images.items()}
    whole = {mode: decode(data, name="x") for mode, data in stored.items()}
    monkeypatch.setattr("mae.data.decode.image._BAND_PIXELS", 9 * 5)
    for mode, data in stored.items():
        assert np.array_equal(checked(data), whole[mode]), mode


def test_lack_of_memory_is_told(monkeypatch):
    def lacking(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("mae.data.decode.image._converted", lacking)
    with pytest.raises(UnreadableImage, match="a.png needs more memory to decode than is available"):
        decode(png(), name="a.png")


@pytest.mark.parametrize("size", [(1, 1), (1, 100), (100, 1)])
def test_tiny_and_thin_images_are_allowed(size):
    assert checked(png(*size)).shape == (*size, 3)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF", "BMP"])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_truncated_files_are_refused(file_format, share):
    data = encoded(Image.fromarray(noise(64, 64)), file_format)
    with pytest.raises(UnreadableImage, match="cut"):
        decode(data[: int(len(data) * share)], name="cut")


@pytest.mark.parametrize("options", [{"compression": "zlib"}, {}])
def test_truncated_multi_band_tiff_is_refused(options):
    data = tiff(noise(64, 64, 5), photometric="minisblack", planarconfig="contig", **options)
    cut = bytearray(data)
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        start = file.pages.first.dataoffsets[0]
    del cut[start + (len(data) - start) // 2 :]
    with pytest.raises(UnreadableImage, match="cut.tif"):
        decode(bytes(cut), name="cut.tif")


def test_other_content_is_refused_by_name():
    gif = encoded(Image.fromarray(noise(4, 4)), "GIF")
    with pytest.raises(
        UnreadableImage, match=r"cat.jpg starts with b'GIF8.a.*expected a JPEG, PNG, WebP, TIFF, BMP or NPY"
    ):
        decode(gif, name="cat.jpg")
    with pytest.raises(UnreadableImage, match="note.png starts with b'hello"):
        decode(b"hello, world, this is text", name="note.png")
    with pytest.raises(UnreadableImage, match="nothing.png is empty"):
        decode(b"", name="nothing.png")


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_random_damage_never_raises_anything_else():
    rng = np.random.default_rng(0)
    originals = [png(), encoded(Image.fromarray(noise(20, 20)), "JPEG"), encoded(Image.fromarray(noise(9, 9)), "WEBP"),
                 tiff(noise(9, 9, 5), photometric="minisblack", planarconfig="contig", compression="zlib")]  # fmt: skip
    for data in originals:
        for _ in range(60):
            damaged = bytearray(data)
            for place in rng.integers(0, len(data), 3):
                damaged[place] = rng.integers(256)
            try:
                decode(bytes(damaged), name="x")
            except UnreadableImage:
                continue


def test_conform_replicates_grey_and_weighs_colour():
    grey = np.array([[[7], [200]]], dtype=np.uint8)
    assert conform(grey, channels=3, dtype=UINT8, name="x").tolist() == [[[7] * 3, [200] * 3]]
    colour = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]], dtype=np.uint8)
    assert conform(colour, channels=1, dtype=UINT8, name="x")[0, :, 0].tolist() == [76, 150, 29, 255]


def test_conform_scales_integers():
    values = np.array([[[0], [128], [255]]], dtype=np.uint8)
    wide = conform(values, channels=1, dtype=UINT16, name="x")
    assert wide[0, :, 0].tolist() == [0, 128 * 257, 65535]
    assert np.array_equal(conform(wide, channels=1, dtype=UINT8, name="x"), values)


def test_conform_says_which_option_to_set():
    bands = np.zeros((2, 2, 13), dtype=np.uint16)
    with pytest.raises(UnreadableImage, match="tile.tif has 13 channels; expected 3, those of the model"):
        conform(bands, channels=3, dtype=UINT16, name="tile.tif")
    with pytest.raises(UnreadableImage, match="tile.tif is read as uint16, the data set as float32"):
        conform(bands, channels=13, dtype=FLOAT32, name="tile.tif")
