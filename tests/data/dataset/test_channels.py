"""Channels by name and values without data: chosen, marked and left out of statistics, never by guess."""

import io
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from data.pictures import Pictures, noise

from mae.data.dataset.channels import choose_channels
from mae.data.dataset.images import ImageSet, load_images
from mae.data.decode.image import decode
from mae.data.inspect.findings import data_findings
from mae.data.inspect.report import inspect_images
from mae.data.sources.open import open_source
from mae.errors import MAEError, UsageError
from mae.randomness import permutation

BANDS = ("B02", "B03", "B04", "B08")


def tiles(count: int = 3, dtype: str = "u2") -> list[np.ndarray]:
    return [np.random.default_rng(seed).integers(1, 200, (6, 7, 4)).astype(dtype) for seed in range(count)]


def written(folder: Path, arrays: list[np.ndarray], names: str | None = "\n".join(BANDS)) -> Path:
    folder.mkdir(parents=True)
    for number, values in enumerate(arrays):
        np.save(folder / f"{number}.npy", values)
    if names is not None:
        (folder / "channels.txt").write_text(names)
    return folder


def opened(folder: Path, **options) -> ImageSet:
    return load_images(open_source(str(folder), data_root=folder), **{"in_chans": None} | options)


@pytest.mark.parametrize("memory_limit", [None, 0])
def test_channels_are_taken_by_name_and_in_the_order_asked_for(tmp_path, memory_limit):
    arrays = tiles()
    folder = written(tmp_path / "tiles", arrays)
    images = opened(folder, channels=["B08", "B03"], memory_limit=memory_limit)
    assert images.channels == 2 and images.channel_names == ("B08", "B03")
    assert torch.equal(images.get(1), torch.from_numpy(arrays[1][..., [3, 1]] / np.float32(65535)).permute(2, 0, 1))
    whole = opened(folder)
    assert whole.channel_names == BANDS and whole.channels == 4
    assert len({images.fingerprint(), whole.fingerprint(), opened(folder, channels=["B03", "B08"]).fingerprint()}) == 3


def test_a_part_of_a_set_has_the_names_of_the_set(tmp_path, monkeypatch):
    train, other = (written(tmp_path / "set" / part, tiles(), names=None) for part in ("train", "photos"))
    (tmp_path / "set" / "channels.txt").write_text("\n".join(BANDS))
    monkeypatch.chdir(train)
    assert opened(train).channel_names == opened(Path(".")).channel_names == BANDS
    assert opened(other).channel_names is None  # not any folder's
    (train / "channels.txt").write_text("a\nb\nc\nd")
    assert opened(train).channel_names == ("a", "b", "c", "d")


def test_the_names_may_stand_in_an_archive(tmp_path):
    folder, packed = written(tmp_path / "tiles", tiles()), tmp_path / "tiles.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"scene/{path.name}")
    found, expected = (opened(path, channels=["B04"]) for path in (packed, folder))
    assert found.channel_names == ("B04",) and torch.equal(found.get(2), expected.get(2))


def test_a_channel_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has no channel 'B11'; its channels are B02, B03, B04, B08"):
        opened(written(tmp_path / "tiles", tiles()), channels=["B02", "B11"])


def test_where_nothing_names_them_the_user_does(tmp_path):
    folder = written(tmp_path / "tiles", tiles(), names=None)
    assert opened(folder).channel_names is None
    assert opened(folder, channels=["a", "b", "c", "d"]).channel_names == ("a", "b", "c", "d")
    with pytest.raises(MAEError, match="has 4 channels; expected 2"):
        opened(folder, channels=["a", "b"])
    assert opened(folder).is_integer and opened(folder, nodata="0").is_integer
    with pytest.raises(UsageError, match="--in-chans is 5, and --channels names 4"):
        opened(folder, in_chans=5, channels=["a", "b", "c", "d"])


def test_an_image_of_other_channels_than_are_named_is_refused(tmp_path):
    arrays = [*tiles(), noise(6, 7, 3).astype("u2")]
    folder = written(tmp_path / "tiles", arrays)
    for options in ({}, {"channels": ["B02"]}):
        with pytest.raises(MAEError, match="3.npy has 3 channels, and channels.txt names 4; expected as many"):
            opened(folder, **options)
    wrong = written(tmp_path / "wrong", tiles(), names="B02\nB03\nB04\n")
    with pytest.raises(MAEError, match="0.npy has 4 channels, and channels.txt names 3"):  # never renamed in silence
        opened(wrong, channels=["B04", "B03", "B02"])
    one = written(tmp_path / "one", [noise(6, 7, 1)[..., 0], *tiles(dtype="u1")])
    with pytest.raises(MAEError, match="0.npy has 1 channels"):  # and never repeated over bands
        opened(one)


def test_a_version_changes_with_the_names(tmp_path):
    folder, packed = written(tmp_path / "tiles", tiles()), tmp_path / "tiles.zip"

    def versions() -> tuple[str, str]:
        with zipfile.ZipFile(packed, "w") as archive:
            for path in sorted(folder.glob("*.npy")):
                archive.write(path, path.name)
            archive.writestr("channels.txt", (folder / "channels.txt").read_text())
        first, second = (open_source(str(path), data_root=folder).version() for path in (folder, packed))
        return first, second

    before = versions()
    (folder / "channels.txt").write_text("\n".join(BANDS[::-1]))
    assert all(old != new for old, new in zip(before, versions(), strict=True))


def test_only_the_top_of_an_archive_names_its_channels(tmp_path):
    folder, packed = written(tmp_path / "tiles", tiles()), tmp_path / "tiles.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("a/0.npy", "a/channels.txt", "b/1.npy"):
            archive.write(folder / name.split("/")[1], name)
    assert opened(packed).channel_names is None


class Tagged(Pictures):
    """Pictures whose files name their channels."""

    def __init__(self, arrays: list[np.ndarray], names: list[tuple[str, ...] | None]) -> None:
        super().__init__(arrays)
        self.names = names

    def recorded(self, index: int):
        names = self.names[index]
        return replace(
            super().recorded(index), names=names, own_names=names is not None, nodata="-9999" if names else None
        )


def test_files_that_name_their_channels_differently_are_refused():
    same = load_images(Tagged(tiles(2), [BANDS, BANDS]), in_chans=None, channels=["B04"])
    assert same.channel_names == ("B04",)
    with pytest.raises(UsageError, match=r"B02, B03, B04, B08 in some files and B08, B04, B03, B02 in others"):
        load_images(Tagged(tiles(2), [BANDS, BANDS[::-1]]), in_chans=None)
    with pytest.raises(UsageError, match=r"B02, B03, B04, B08 in some files and without names in others"):
        load_images(Tagged(tiles(2), [BANDS, None]), in_chans=None)


def test_a_file_beyond_those_looked_at_first_must_name_its_channels_alike(monkeypatch):
    monkeypatch.setattr("mae.data.dataset.survey._SURVEYED", 2)
    names = [BANDS] * 8
    looked_at = set(permutation(0, 0, 8)[:2].tolist())
    other = next(number for number in range(8) if number not in looked_at)
    names[other] = BANDS[::-1]
    with pytest.raises(
        MAEError, match=f"picture-{other} has the channels B08, B04, B03, B02; the others have B02, B03"
    ):
        load_images(Tagged(tiles(8), names), in_chans=None, channels=["B04"])


def test_one_named_band_among_photographs_says_nothing_of_these():
    pictures = Tagged([*[noise(6, 7)] * 5, noise(6, 7, 1)], [None] * 5 + [("elevation",)])
    images = load_images(pictures, in_chans=None)
    assert images.channels == 3 and images.channel_names is None


@pytest.mark.parametrize(
    "text", ["", "a\na\n", "a,b\n", "a\x1b[31m\n", "x" * 101, "\n".join(map(str, range(2000))), "y" * (1 << 17)]
)
def test_a_file_that_names_no_channels_is_refused(tmp_path, text):
    with pytest.raises(UsageError, match="channels.txt does not name channels; expected one name a line"):
        opened(written(tmp_path / "tiles", tiles(), names=text))


def test_names_of_channels_are_matched_one_by_one():
    assert choose_channels(None, None, name="x") == (None, None)
    assert choose_channels(BANDS, BANDS, name="x") == (BANDS, None)
    assert choose_channels(BANDS, BANDS[::-1], name="x") == (BANDS[::-1], (3, 2, 1, 0))


@pytest.mark.parametrize(("dtype", "top"), [("u1", 255), ("u2", 65535), ("f4", 1), ("f8", 1), ("i2", 1)])
@pytest.mark.parametrize("memory_limit", [None, 0])
def test_values_that_stand_for_no_data_become_nan(tmp_path, dtype, top, memory_limit):
    arrays = tiles(dtype=dtype)
    arrays[0][:2, :3, 1] = 7
    folder = written(tmp_path / "tiles", arrays)
    images = opened(folder, nodata="7", memory_limit=memory_limit)
    expected = np.where(arrays[0] == 7, np.nan, arrays[0].astype(np.float32) / np.float32(top)).astype(np.float32)
    assert images.nodata == "7" and images.dtype == np.float32
    assert torch.equal(images.get(0).isnan(), torch.from_numpy(np.isnan(expected)).permute(2, 0, 1))
    assert np.array_equal(images.get(0).permute(1, 2, 0).numpy(), expected, equal_nan=True)
    assert images.fingerprint() != opened(folder).fingerprint()


def test_nan_is_refused_unless_it_means_no_data(tmp_path):
    arrays = tiles(dtype="f4")
    arrays[2][0, 0, 0] = np.nan
    folder = written(tmp_path / "tiles", arrays)
    with pytest.raises(MAEError, match=r"2.npy holds NaN or infinite values; .*--nodata nan"):
        opened(folder)
    assert opened(folder, nodata="nan").get(2).isnan().sum() == 1
    arrays[1][0, 0, 0] = np.inf
    np.save(folder / "1.npy", arrays[1])
    with pytest.raises(MAEError, match="1.npy holds infinite values"):
        opened(folder, nodata="nan")


def test_names_that_are_none_in_a_zip_are_told_as_such(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("channels.txt", "a\na\n")
    with pytest.raises(UsageError, match=r"^\S*x.zip/channels.txt does not name channels"):
        open_source(str(tmp_path / "x.zip"), data_root=tmp_path)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("memory_limit", [None, 0])
def test_no_data_beyond_float32_is_marked_without_a_warning(tmp_path, memory_limit):
    lowest = float(np.finfo(np.float64).min)  # what GDAL's tools mark in rasters of float64
    values = np.random.default_rng(0).normal(size=(6, 7))
    values[:2] = lowest
    tifffile.imwrite(tmp_path / "0.tif", values, extratags=[(42113, 2, 0, f"{lowest!r}", True)])
    image = opened(tmp_path, nodata=f"{lowest!r}", memory_limit=memory_limit).get(0)[0]
    assert image.isnan()[:2].all() and image.isfinite()[2:].all()


def test_a_value_that_no_file_can_hold_marks_nothing(tmp_path):
    folder = written(tmp_path / "tiles", tiles(dtype="u1"))
    for value in ("-9999", "300", "1.5", "nan"):
        assert not opened(folder, nodata=value).get(0).isnan().any()


def test_whole_numbers_and_raw_floats_do_not_mix_without_data_either(tmp_path):
    folder = written(tmp_path / "tiles", [*tiles(), *tiles(1, dtype="f4")])
    np.save(folder / "9.npy", tiles(1, dtype="f4")[0])
    with pytest.raises(
        MAEError, match=r"2 of 5 images .*3.npy is read as float32, the data set as integers: use files of one kind"
    ):
        opened(folder, nodata="0")


@pytest.mark.parametrize("nodata", [None, "0"])
@pytest.mark.parametrize(("most", "other"), [("u1", "f4"), ("f4", "u1")])
def test_of_integers_and_floats_the_fewer_are_at_fault(tmp_path, most, other, nodata):
    folder = written(tmp_path / "tiles", tiles(5, dtype=most))
    np.save(folder / "9.npy", tiles(1, dtype=other)[0])
    with pytest.raises(MAEError, match="1 of 6 images cannot be used.*9.npy is read as .* use files of one kind"):
        opened(folder, nodata=nodata)


@pytest.mark.parametrize("dtype", ["u2", "f4"])
def test_statistics_leave_out_what_is_no_data(tmp_path, dtype):
    arrays = tiles(5, dtype=dtype)
    for seed, values in enumerate(arrays):
        values[np.random.default_rng(seed).random(values.shape[:2]) < 0.4] = 0
    arrays[4][:] = 0  # one without any data
    top = 65535 if dtype == "u2" else 1
    pixels = np.concatenate([values.reshape(-1, 4) for values in arrays]).astype(np.float64) / top
    known = pixels[pixels.any(axis=1)]
    mean, std = opened(written(tmp_path / "tiles", arrays), nodata="0").statistics()
    assert mean == pytest.approx(known.mean(axis=0).tolist(), rel=1e-5)
    assert std == pytest.approx(known.std(axis=0).tolist(), rel=1e-5)


def finding(images: ImageSet) -> tuple[str, str]:
    mean, std = images.statistics()
    report = inspect_images(images, img_size=(6, 6), mean=mean, std=std, seed=0)
    found = {each.name: each for each in data_findings(report)}
    assert found["channel statistics"].level == "ok", found["channel statistics"]
    return found["nodata"].level, found["nodata"].value + found["nodata"].advice


def test_what_is_no_data_is_told_before_a_run(tmp_path):
    arrays = tiles(30, dtype="f4")
    folder = written(tmp_path / "tiles", arrays)
    assert finding(opened(folder)) == ("ok", "no file marks values as such, and none stands apart")
    level, told = finding(opened(folder, nodata="-9999"))
    assert level == "warn" and told.startswith("0.0% of the values are -9999") and "never occurs" in told
    for values in arrays:
        values[:3] = -9999
    level, told = finding(opened(written(tmp_path / "gaps", arrays), nodata="-9999"))
    assert level == "ok" and told == "50.0% of the values are -9999, and left out of statistics and loss"
    marked = load_images(Tagged(tiles(30, dtype="f4"), [BANDS] * 30), in_chans=None)
    level, told = finding(marked)
    assert level == "warn" and "files mark -9999 as nodata" in told and "--nodata -9999" in told


def test_a_tiff_with_missing_blocks_has_no_data_there(tmp_path):
    buffer = io.BytesIO()
    values = np.full((32, 16, 2), 5, np.int16)
    with tifffile.TiffWriter(buffer) as writer:
        writer.write(
            values, tile=(16, 16), photometric="minisblack", planarconfig="contig", compression="zlib",
            extratags=[(42113, "s", 0, "-9999", True)],
        )  # fmt: skip
    with tifffile.TiffFile(io.BytesIO(buffer.getvalue())) as file:
        counts = file.pages.first.tags["TileByteCounts"]
        first = counts.valuebytecount // 2
    data = bytearray(buffer.getvalue())
    data[counts.valueoffset : counts.valueoffset + first] = bytes(first)  # of two tiles
    found = decode(bytes(data), name="x")
    assert (found[:16] == -9999).all() and (found[16:] == 5).all()
