"""Looking at images before a run: each fault is told when it is there, and only then."""

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from data.pictures import SHARED, Pictures, encoded
from PIL import Image

from mae.data.dataset.images import load_images
from mae.data.inspect.findings import data_findings
from mae.data.inspect.report import AT_LEAST, DataReport, Kind, inspect_images
from mae.data.loading.loader import IMAGENET_MEAN, IMAGENET_STD, TrainingLoader, normalise
from mae.data.sources.open import open_source
from mae.data.sources.source import Source
from mae.errors import MAEError, UsageError

COUNT = 40


def scene(seed: int, height: int = 48, width: int = 52, channels: int = 3) -> np.ndarray:
    """A picture with shapes, not only noise, `[H, W, C]` uint8."""
    coarse = np.random.default_rng(seed).integers(0, 256, (12, 12, channels), dtype=np.uint8)
    planes = [
        Image.fromarray(coarse[..., c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(channels)
    ]
    return np.stack([np.array(plane) // 2 + 60 for plane in planes], axis=2)


def scenes(count: int = COUNT, **size: int) -> list[np.ndarray]:
    return [scene(seed, **size) for seed in range(count)]


def wide(image: np.ndarray) -> np.ndarray:
    return image.astype(np.uint16) * 257


def raw(image: np.ndarray) -> np.ndarray:
    return image.astype(np.float32) * 3 - 1000


def inspected(source: Source, *, memory: int | None = None, in_chans: int | None = None, **options) -> DataReport:
    """What is found by the data's own statistics."""
    images = load_images(source, in_chans=in_chans, max_unreadable=1.0, memory_limit=memory)
    if "mean" not in options:
        options["mean"], options["std"] = images.statistics()
    return inspect_images(images, **{"img_size": (32, 32), "seed": 3, "seconds": 60.0} | options)


def loud(report: DataReport) -> dict[str, str]:
    """Names and levels of the findings that are not ok."""
    return {finding.name: finding.level for finding in data_findings(report) if finding.level != "ok"}


@pytest.fixture
def folder(tmp_path: Path):
    """Writes arrays as PNG files below a folder, and opens it."""

    def write(arrays: list[np.ndarray], **others: bytes) -> Source:
        for number, array in enumerate(arrays):
            (tmp_path / f"{number:03}.png").write_bytes(encoded(Image.fromarray(array.squeeze())))
        for name, data in others.items():
            (tmp_path / name.replace("_", ".")).write_bytes(data)
        return open_source(str(tmp_path), data_root=tmp_path)

    return write


@pytest.mark.parametrize("make", [np.copy, wide, raw])
def test_sound_images_are_quiet(make):
    report = inspected(Pictures([make(image) for image in scenes()]))
    assert loud(report) == {}
    assert (report.total, report.looked_at, report.unreadable, report.messages) == (COUNT, COUNT, 0, ())
    assert (report.dtype, report.kinds[0].channels, report.kinds[0].images) == (report.kinds[0].dtype, 3, COUNT)
    assert report.constant == report.nearly_constant == report.not_finite == 0
    assert all(abs(c.mean) < 0.1 and abs(c.std - 1) < 0.15 and c.varies for c in report.channels)


def test_memory_and_files_give_the_same(folder):
    source = folder(scenes(), x_png=b"text")
    assert inspected(source, memory=0) == inspected(source) != inspected(source, seed=4)


@pytest.mark.parametrize("make", [np.copy, wide])
def test_values_at_the_types_ends_are_counted(make):
    arrays = [make(image) for image in scenes(height=40, width=50)]
    for array in arrays:
        array[:5, :, 0], array[:, 30:, 2] = 0, np.iinfo(array.dtype).max
    report = inspected(Pictures(arrays))
    assert [c.low for c in report.channels] == pytest.approx([0.125, 0, 0])
    assert [c.high for c in report.channels] == pytest.approx([0, 0, 0.4])
    assert loud(report) == {"saturation": "warn"}
    found = next(finding for finding in data_findings(report) if finding.name == "saturation")
    assert "0.0%" in found.value and "40.0%" in found.value and "channel 2" in found.value


@pytest.mark.parametrize("make", [np.copy, wide])
def test_files_that_are_nearly_all_white_stop(folder, make):
    arrays = [make(image) for image in scenes(channels=1)]
    for number, array in enumerate(arrays):
        kept = array[number : number + 6, number : number + 6].copy()
        array[:] = np.iinfo(array.dtype).max
        array[number : number + 6, number : number + 6] = kept
    report = inspected(folder(arrays))
    assert report.dtype == str(arrays[0].dtype) and report.channels[0].high > 0.98
    assert loud(report)["saturation"] == "stop"


def test_drawings_of_two_values_do_not_stop(folder):
    """As handwriting in black and white, most of which is paper."""
    arrays = [np.full((40, 48, 1), 255, np.uint8) for _ in range(24)]
    for number, array in enumerate(arrays):
        array[number : number + 4, 4:44] = 0
        array[4:36, number : number + 2] = 0
    assert loud(inspected(folder(arrays)))["saturation"] == "warn"


def test_raw_float_values_have_no_ends():
    arrays = [(image > 120).astype(np.float32) for image in scenes()]
    report = inspected(Pictures(arrays))
    assert all(c.low == c.high == 0 and c.largest is None for c in report.channels) and loud(report) == {}


def test_twelve_bits_in_sixteen_are_noted(folder):
    report = inspected(folder([wide(image) >> 4 for image in scenes(channels=1)]))
    assert report.dtype == "uint16" and report.channels[0].largest < 1 / 16
    assert loud(report) == {"range": "note"}


def test_twelve_bits_of_which_the_high_byte_was_kept_are_told():
    report = inspected(Pictures([image >> 4 for image in scenes()]))
    assert report.channels[0].largest == pytest.approx(11 / 255) and loud(report) == {"range": "warn"}


@pytest.mark.parametrize("make", [np.copy, wide, raw])
def test_channel_statistics_are_those_of_the_training_loader(make):
    images = load_images(Pictures([make(image) for image in scenes(24)]), in_chans=None)
    mean, std = (0.4, 0.5, 0.3), (0.2, 0.3, 0.25)
    report = inspect_images(images, img_size=(32, 24), mean=mean, std=std, seed=7)
    loader = TrainingLoader(images=images, batch_size=24, accumulate=1, img_size=(32, 24), seed=7, workers=0)
    shown = normalise(next(loader.iterate(0)).images, torch.tensor(mean), torch.tensor(std)).double()
    values, means = shown.transpose(0, 1).flatten(1), shown.mean(dim=(2, 3))
    spreads = ((shown - values.mean(dim=1)[:, None, None]) ** 2).mean(dim=(2, 3))
    deviation = values.std(dim=1, correction=0)
    wanted = {
        "mean": values.mean(dim=1),
        "std": deviation,
        "mean_error": means.std(dim=0) / 24**0.5,
        "std_error": spreads.std(dim=0) / 24**0.5 / (2 * deviation),
    }
    for name, numbers in wanted.items():
        assert [getattr(c, name) for c in report.channels] == pytest.approx(numbers.tolist(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("mean", "std"), [((0.0,) * 3, (0.2,) * 3), ((0.45,) * 3, (1.0,) * 3)])
def test_wrong_statistics_stop(mean, std):
    assert loud(inspected(Pictures(scenes()), mean=mean, std=std)) == {"channel statistics": "stop"}


@pytest.mark.parametrize("what", ["fine grain", "sizes"])
def test_own_statistics_never_stop_a_run(what):
    """Crops of fine grain are smoother than the whole images, and small images count like large ones."""
    rng = np.random.default_rng(0)
    if what == "fine grain":
        arrays = [rng.integers(0, 255, (240, 240, 3), dtype=np.uint8) for _ in range(16)]
    else:
        arrays = [rng.integers(0, 60, (40, 40, 3), dtype=np.uint8) for _ in range(60)]
        arrays += [rng.integers(0, 255, (400, 400, 3), dtype=np.uint8) for _ in range(4)]
    report = inspected(Pictures(arrays))
    assert abs(report.channels[0].mean) > 0.3 or report.channels[0].std < 0.7
    assert (report.channels[0].whole_mean, report.channels[0].whole_std) == pytest.approx((0, 1), abs=1e-6)
    assert loud(report)["channel statistics"] == "note"


def test_one_image_tells_nothing_of_the_statistics():
    report = inspected(Pictures(scenes(1)), mean=(0.3,) * 3, std=(0.2,) * 3)
    assert loud(report) == {} and report.channels[0].mean_error == np.inf


def test_a_channel_without_content_is_told_alone():
    arrays = scenes(channels=5)
    for array in arrays:
        array[..., 3] = 17
    report = inspected(Pictures(arrays))
    assert [c.varies for c in report.channels] == [True, True, True, False, True]
    assert loud(report) == {"empty channels": "warn"}


def test_images_without_content_are_told():
    colour = np.full((48, 52, 3), (200, 30, 90), np.uint8)
    dark = [scene(60) // 90 + level for level in (40, 50)]
    report = inspected(Pictures([*scenes(), colour, *dark]))
    # Dark frames show nothing, so that it does not count that both show it.
    assert (report.constant, report.nearly_constant, report.near_duplicates.pairs) == (1, 2, 0)
    assert loud(report) == {"constant images": "warn"}


def test_the_same_pixels_under_other_names_are_told(folder):
    source = folder(scenes(), copy_bmp=encoded(Image.fromarray(scene(5)), "BMP"))
    report = inspected(source)
    assert (report.duplicates.pairs, report.duplicates.extra, report.near_duplicates.pairs) == (1, 1, 0)
    assert [sorted(Path(name).name for name in group) for group in report.duplicates.groups] == [
        ["005.png", "copy.bmp"]
    ]
    assert loud(report) == {"duplicates": "note"}


def test_pictures_saved_anew_or_resized_are_told(folder):
    again = encoded(Image.fromarray(scene(4)), "JPEG", quality=60)
    small = encoded(Image.fromarray(scene(9)).resize((47, 43), Image.Resampling.BICUBIC), "JPEG", quality=90)
    report = inspected(folder(scenes(), again_jpg=again, small_jpg=small))
    names = sorted(sorted(Path(name).name for name in group) for group in report.near_duplicates.groups)
    assert names == [["004.png", "again.jpg"], ["009.png", "small.jpg"]]
    assert (report.duplicates.pairs, report.near_duplicates.pairs, report.near_duplicates.extra) == (0, 2, 2)
    assert loud(report) == {"near duplicates": "note"}


def test_values_that_are_not_finite_are_told_and_spoil_nothing_else():
    arrays = [raw(image) for image in scenes()]
    clean = inspected(Pictures(arrays))
    arrays += [raw(scene(50)), raw(scene(51))]
    arrays[-1][3, 4, 1], arrays[-2][0, 0, 0] = np.nan, -np.inf
    statistics = {"mean": (-600.0,) * 3, "std": (70.0,) * 3}
    report = inspected(Pictures(arrays), **statistics)
    assert (report.not_finite, report.unreadable) == (2, 2)
    assert loud(report)["finite values"] == "warn" and np.isfinite([c.mean for c in report.channels]).all()
    assert [c.varies for c in report.channels] == [c.varies for c in clean.channels]
    with pytest.raises(MAEError, match="none of 2 images can be read"):
        inspected(Pictures(arrays[-2:]), **statistics)


@pytest.mark.parametrize("nodata", [None, "0"])
def test_the_range_is_that_of_the_files_whether_values_are_missing_or_not(nodata):
    arrays = [image.astype(np.uint16) * 10 for image in scenes()]
    images = load_images(Pictures(arrays), in_chans=None, nodata=nodata)
    mean, std = images.statistics()
    report = inspect_images(images, mean=mean, std=std, img_size=(32, 32), seed=3, seconds=60.0)
    assert report.pixel_dtype == "uint16" and loud(report)["range"] == "note"


@pytest.mark.parametrize("fill", [-9999.0, 3e4])
def test_a_value_far_from_all_others_is_told(fill):
    arrays = [raw(image) for image in scenes()]
    assert inspected(Pictures(arrays)).apart is None
    arrays[0][0, 0, 0] = fill  # one hot pixel
    assert inspected(Pictures(arrays)).apart is None
    for image in arrays[:8]:
        image[:10, :20] = fill
    report = inspected(Pictures(arrays))
    assert report.apart == (fill, pytest.approx((8 * 200 + 1 / 3) / (40 * 48 * 52), rel=0.01))
    assert loud(report)["nodata"] == "warn"
    whole = inspected(Pictures([np.full((48, 52, 3), fill, np.float32), *arrays[8:]]))  # one image of nothing else
    assert whole.apart == (fill, pytest.approx(1 / 33, rel=0.01))


def test_values_near_the_limits_of_their_type_stop_and_print_no_warning(recwarn):
    arrays = [raw(image) for image in scenes()]
    for image in arrays[::2]:
        image[:10] = -3.4e38
    report = inspected(Pictures(arrays))
    assert loud(report)["channel statistics"] == "stop" and report.apart is not None
    assert not [each for each in recwarn if issubclass(each.category, RuntimeWarning)]


def test_files_refused_for_values_that_are_not_finite_are_told(folder):
    image = raw(scene(99, channels=1))[..., 0]
    image[2, 3] = np.nan
    tiffs = {f"{n}_tif": encoded(Image.fromarray(raw(scene(n, channels=1))[..., 0]), "TIFF") for n in range(COUNT)}
    report = inspected(folder([], **tiffs, broken_tif=encoded(Image.fromarray(image), "TIFF")))
    assert (report.not_finite, report.unreadable) == (1, 1)
    assert loud(report) == {"finite values": "warn", "unreadable images": "note"}


@pytest.mark.parametrize("memory", [None, 0])
def test_truncated_files_are_noted(folder, memory):
    whole = encoded(Image.fromarray(scene(99)))
    report = inspected(folder(scenes(), x_png=whole[: len(whole) // 2], y_png=b""), memory=memory)
    assert report.unreadable == 2 and report.looked_at == COUNT + 2 and report.sizes.smallest == (48, 52)
    assert any("y.png is empty" in message for message in report.messages)
    assert loud(report) == {"unreadable images": "note"}


@pytest.mark.parametrize(("small", "level"), [(4, None), (10, "note"), (60, "warn")])
def test_images_smaller_than_a_crop_are_told(small, level):
    arrays = scenes() + [scene(100 + n, 40 + n % 5, 28) for n in range(small)]
    report = inspected(Pictures(arrays))
    assert report.sizes.smaller == small / len(arrays)
    assert (report.sizes.smallest, report.sizes.largest) == ((40, 28), (48, 52))
    assert report.sizes.median == ((48, 52) if small < COUNT else (44, 28))
    assert loud(report).get("sizes") == level


def test_long_images_are_noted():
    report = inspected(Pictures(scenes(30) + [scene(100 + n, 40, 160) for n in range(10)]))
    assert report.sizes.elongated == 0.25 and loud(report) == {"shapes": "note"}
    assert inspected(Pictures(scenes(30) + [scene(100 + n, 40, 120) for n in range(10)])).sizes.elongated == 0


def test_mixed_channels_and_types_are_noted(folder):
    grey = scenes(10, channels=1)
    report = inspected(folder([*grey, *(scene(50 + n) for n in range(30))]))
    assert report.kinds == (Kind(dtype="uint8", channels=3, images=30), Kind(dtype="uint8", channels=1, images=10))
    assert loud(report) == {"kinds": "note"}
    few = inspected(Pictures([*grey[:3], *(scene(50 + n) for n in range(37))]))
    assert few.kinds[1].images == 3 and loud(few) == {}
    assert loud(inspected(Pictures([wide(grey[0]), *scenes(channels=1)[1:]]))) == {"kinds": "note"}


def test_the_limit_and_the_time_are_kept():
    assert inspected(Pictures(scenes()), limit=20).looked_at == 20
    report = inspected(Pictures(scenes()), seconds=0.0)
    assert (report.looked_at, report.total) == (AT_LEAST, COUNT)
    assert f"{AT_LEAST} of {COUNT} looked at" in data_findings(report)[0].value


def test_images_are_not_kept(monkeypatch):
    monkeypatch.setattr("mae.data.inspect.report.num_threads", lambda: 2)
    images = load_images(Pictures(scenes(80)), in_chans=None, memory_limit=0)
    seen, alive, get = [], [], images.get

    def watched(number: int) -> torch.Tensor:
        image = get(number)
        seen.append(weakref.ref(image))
        alive.append(sum(ref() is not None for ref in seen))
        return image

    monkeypatch.setattr(images, "get", watched)
    inspect_images(images, img_size=(32, 32), mean=(0.5,) * 3, std=(0.2,) * 3, seed=0)
    assert len(seen) >= 80 and max(alive) <= 8


def test_each_image_has_one_thread_and_threads_are_left_as_they_were(monkeypatch):
    before, inside = torch.get_num_threads(), set()
    images = load_images(Pictures(scenes()), in_chans=None)
    get = images.get
    monkeypatch.setattr(images, "get", lambda number: (inside.add(torch.get_num_threads()), get(number))[1])
    try:
        torch.set_num_threads(3)
        inspect_images(images, img_size=(32, 32), mean=(0.5,) * 3, std=(0.2,) * 3, seed=0)
        assert inside == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_what_cannot_be_inspected_is_refused(monkeypatch):
    images = load_images(Pictures(scenes(4)), in_chans=None, memory_limit=0)
    with pytest.raises(UsageError, match="pictures has 3 channels, and there are 1 means and 3 stds"):
        inspect_images(images, img_size=(32, 32), mean=(0.5,), std=(0.2,) * 3, seed=0)
    images._source.broken = frozenset(range(4))
    with pytest.raises(MAEError, match="none of 4 inspected images can be read; .*: picture-"):
        inspect_images(images, img_size=(32, 32), mean=(0.5,) * 3, std=(0.2,) * 3, seed=0)


@pytest.mark.skipif(not (SHARED / "photos").exists(), reason="needs shared/data/photos")
@pytest.mark.parametrize("options", [{}, {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "limit": 100}])
def test_real_photographs_are_quiet(options):
    source = open_source(str(SHARED / "photos"), data_root=SHARED)
    report = inspected(source, memory=0, img_size=(224, 224), **options)
    assert report.looked_at == options.get("limit", 200) and loud(report) == {}
