"""JPEGs by torchcodec: the same pixels, the same refusals, whether it is installed or not."""

import io
import random
import sys

import numpy as np
import pytest
from data.pictures import SHARED, noise
from PIL import Image

from mae.data.decode import image as decoding
from mae.data.decode import jpeg
from mae.data.decode.image import decode
from mae.data.decode.limits import UnreadableImage

pytest.importorskip("torchcodec", reason="torchcodec is not installed")
PHOTOS = SHARED / "photos"


def saved(number: int, *, mode: str = "RGB", orientation: int | None = None, **options: object) -> bytes:
    image = Image.fromarray(noise(12 + number, 16, 3, number)).resize((60 - number, 48)).convert(mode)
    if orientation is not None:
        exif = Image.Exif()
        exif[274] = orientation
        options["exif"] = exif
    stream = io.BytesIO()
    image.save(stream, "JPEG", **options)
    return stream.getvalue()


FILES = {
    "plain": saved(0),
    "grey": saved(1, mode="L"),
    "fine": saved(2, quality=100, subsampling=0),
    "coarse": saved(3, quality=20, subsampling=2),
    "progressive": saved(4, progressive=True),
    "progressive grey": saved(5, mode="L", progressive=True),
    "optimised": saved(6, optimize=True),
    "restarts": saved(7, restart_marker_rows=1),
    "four channels": saved(8, mode="CMYK"),
    "turned": saved(9, orientation=6),
    "mirrored": saved(10, orientation=2, mode="L"),
}
PLAIN, PROGRESSIVE = FILES["plain"], FILES["progressive"]
TURNING = saved(11, orientation=6)
TURNING = TURNING[TURNING.index(b"\xff\xe1") : TURNING.index(b"\xff\xdb")]  # its EXIF alone
ODD = {
    "turned behind the scans": PROGRESSIVE[:-2] + TURNING + PROGRESSIVE[-2:],
    "turned behind the scan": PLAIN[:-2] + TURNING + PLAIN[-2:],
    "marker without a length": PLAIN[:2] + b"\xff\x01" + PLAIN[2:],
    "short JFIF": PLAIN[:2] + b"\xff\xe0\x00\x06JFIF" + PLAIN[20:],
    "short Adobe": PLAIN[:2] + b"\xff\xee\x00\x07Adobe" + PLAIN[2:],
    "short profile": PLAIN[:2] + b"\xff\xe2\x00\x0eICC_PROFILE\0" + PLAIN[2:],
    "junk between segments": PLAIN[:20] + b"junk" + PLAIN[20:],
    "many segments": PLAIN[:20] + 400 * b"\xff\xfe\x00\x02" + PLAIN[20:],
    "two frames": PLAIN[:2] + PLAIN[PLAIN.index(b"\xff\xc0") : PLAIN.index(b"\xff\xc4")] + PLAIN[2:],
}
FAST = [name for name in FILES if name not in ("four channels", "turned", "mirrored")]


def both(data: bytes, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray | str]:
    """What is decoded with torchcodec and without, or why not."""
    found: list[np.ndarray | str] = []
    for fast in (True, False):
        with monkeypatch.context() as patch:
            if not fast:
                patch.setattr(jpeg, "_decoder", lambda: None)
            try:
                found.append(decode(data, name="an image"))
            except UnreadableImage as error:
                found.append(str(error))
    return found


def assert_same(data: bytes, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether it could be decoded at all."""
    fast, slow = both(data, monkeypatch)
    if isinstance(fast, str) or isinstance(slow, str):
        assert isinstance(fast, str) and fast == slow
        return False
    assert fast.shape == slow.shape and fast.dtype == slow.dtype and np.array_equal(fast, slow)
    return True


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_pillows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert assert_same(FILES[name], monkeypatch)
    assert (decoding._plain_jpeg(FILES[name], "x") is not None) is (name in FAST)


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_is_left_to_pillow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(ODD[name], monkeypatch)
    assert decoding._plain_jpeg(ODD[name], "x") is None or name == "turned behind the scan"


@pytest.mark.slow
def test_photographs_are_the_same() -> None:
    if not PHOTOS.is_dir():
        pytest.skip(f"{PHOTOS} is not there")
    with pytest.MonkeyPatch.context() as patch:
        for path in sorted(PHOTOS.iterdir())[:50]:
            assert assert_same(path.read_bytes(), patch)


@pytest.mark.slow
def test_what_is_damaged_is_decoded_or_refused_alike(capfd: pytest.CaptureFixture[str]) -> None:
    """libjpeg itself tells of damage on the error stream, which is of no use here."""
    source, files, decoded = random.Random(0), list(FILES.values()), 0
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(1500):
            data = bytearray(source.choice(files))
            for _ in range(source.choice([1, 1, 2, 5])):
                place = source.randrange(2, len(data))
                kind = source.random()
                if kind < 0.6:
                    data[place] = source.randrange(256)
                elif kind < 0.8:
                    data[place:place] = source.randbytes(source.randrange(1, 9))
                elif len(data) > 200:
                    data = data[: max(place, 100)] + (b"\xff\xd9" if source.random() < 0.5 else b"")
            decoded += assert_same(bytes(data), patch)
    assert 300 < decoded < 1400  # some are whole nevertheless, and some are not
    capfd.readouterr()


def test_a_size_over_the_limits_is_refused_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(FILES["plain"])
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = b"\xff\xff\xff\xff"
    monkeypatch.setattr(decoding, "decode_jpeg", lambda *args, **options: pytest.fail("it was decoded"))
    with pytest.raises(UnreadableImage, match="65,535 x 65,535|65535"):
        decode(bytes(data), name="an image")


def test_many_scans_are_left_to_the_one_who_counts_them() -> None:
    scans = FILES["progressive"].count(b"\xff\xda")
    assert scans > 5 and jpeg.plain_size(FILES["progressive"], most_scans=scans) == (56, 48, 3)
    assert jpeg.plain_size(FILES["progressive"], most_scans=scans - 1) is None


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"\xff\xd8\xff", FILES["plain"][:100], b"\xff\xd8" + bytes(400)])
def test_what_has_no_whole_header_is_not_plain(data: bytes) -> None:
    assert jpeg.plain_size(data, most_scans=100) is None


def test_without_it_pillow_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    jpeg._decoder.cache_clear()
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    try:
        assert not jpeg.has_fast_decoder()
        assert jpeg.decode_jpeg(FILES["plain"], channels=3) is None
    finally:
        monkeypatch.undo()
        jpeg._decoder.cache_clear()
    assert jpeg.has_fast_decoder()
