"""Crops of JPEGs decoded at a reduced scale: drawn as always, and within a stated bound of the plain way's."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data.pictures import SHARED, Pictures, encoded, noise
from PIL import Image, ImageOps
from torch import Tensor

from mae.data.dataset.images import ImageSet, load_images
from mae.data.decode import image as decoding
from mae.data.decode.limits import UnreadableImage
from mae.data.loading.loader import RawBatch, TrainingLoader
from mae.data.packs.encodings import Kept
from mae.data.packs.writer import pack
from mae.data.sources.open import open_source
from mae.errors import UsageError
from mae.modalities.images.crop import Augmentation, random_crop_boxes, reduction
from mae.randomness import sample_keys

PHOTOS = SHARED / "photos"
PLAIN, REDUCED = Augmentation(), Augmentation(reduced_decoding=True)
SIZE = (24, 24)
MEAN, HIGH = 2.0, 12.0  # grey levels: of the mean, and of the 99th percentile; docs/guides/packs.md


def saved(folder: Path, number: int, *, size: tuple[int, int], mode: str = "RGB", orientation: int = 1) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    coarse = Image.fromarray(noise(6, 8, 3, number))
    pixels = coarse.resize(size, Image.Resampling.BICUBIC).convert(mode)
    (folder / f"{number:02d}.jpg").write_bytes(encoded(pixels, "JPEG", quality=92, exif=exif))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs in every orientation, of sides that divide by 8 and that do not, grey, CMYK, and too small to reduce."""
    root = tmp_path_factory.mktemp("reduced") / "photos"
    root.mkdir()
    for number in range(16):
        size = (403, 301) if number % 2 else (400, 304)
        saved(root, number, size=size, orientation=number // 2 + 1)
    saved(root, 16, size=(301, 403), mode="L")
    saved(root, 17, size=(400, 304), mode="CMYK")
    saved(root, 18, size=(40, 30))
    saved(root, 19, size=(61, 93))
    return root


def opened(folder: Path, **options) -> ImageSet:
    return load_images(open_source(str(folder), data_root=folder), in_chans=3, **{"memory_limit": 0, **options})


def batches(images: ImageSet, how: Augmentation, *, steps: int = 4, start: int = 0, **options) -> list[RawBatch]:
    settings = dict(batch_size=20, accumulate=1, img_size=SIZE, seed=3, workers=0, augmentation=how)
    loader = TrainingLoader(images=images, **{**settings, **options})
    with closing(loader.iterate(start)) as given:
        return [next(given) for _ in range(steps)]


def levels(one: Tensor, other: Tensor) -> Tensor:
    return (one.float() - other.float()).abs()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The reduction of each image that is decoded."""
    found: list[int] = []
    inner = decoding._decode

    def spy(*args, reduction: int = 1, **options):
        found.append(reduction)
        return inner(*args, reduction=reduction, **options)

    monkeypatch.setattr(decoding, "_decode", spy)
    return found


def test_draws_are_the_same_and_crops_are_near(folder: Path, decoded: list[int]):
    images = opened(folder)
    decoded.clear()
    pairs = zip(batches(images, PLAIN), batches(images, REDUCED), strict=True)
    for plain, reduced in pairs:
        assert torch.equal(plain.ids, reduced.ids) and torch.equal(plain.keys, reduced.keys)
        apart = levels(plain.images, reduced.images).mean(dim=(1, 2, 3))
        # Crops between whole pixels, and turned the right way: a pixel off would be 4 levels and more.
        assert apart.max() < 1.5, list(zip(plain.ids.tolist(), apart.tolist(), strict=True))
    assert {1, 2, 4, 8} == set(decoded)


def test_small_boxes_are_cropped_bit_for_bit_as_before(folder: Path):
    images = opened(folder)
    untouched = 0
    for plain, reduced in zip(batches(images, PLAIN), batches(images, REDUCED), strict=True):
        for number, key, one, other in zip(plain.ids, plain.keys, plain.images, reduced.images, strict=True):
            height, width = images.get(int(number)).shape[-2:]
            if int(number) == 17 or reduction(key.reshape(1), height, width, PLAIN, SIZE) == 1:
                assert torch.equal(one, other)
                untouched += 1
    assert untouched >= 8  # of the CMYK and of the smallest, in each batch


def test_reductions_never_leave_fewer_pixels_than_a_crop_has():
    keys = sample_keys(0, 0, torch.arange(300))
    seen = set()
    for key in keys:
        (box,), _ = random_crop_boxes(key.reshape(1), torch.tensor([900]), torch.tensor([1300]), PLAIN)
        times = reduction(key.reshape(1), 900, 1300, PLAIN, (50, 70))
        most = min(box[2].item() / 50, box[3].item() / 70)
        assert times <= max(most, 1) and (times == 8 or most < 2 * times)
        seen.add(times)
    assert seen == {4, 8}
    together = reduction(keys[:40], 900, 1300, PLAIN, (50, 70))
    assert together == min(reduction(key.reshape(1), 900, 1300, PLAIN, (50, 70)) for key in keys[:40])


@pytest.mark.parametrize(
    ("height", "width", "times"), [(47, 999, 1), (48, 48, 2), (96, 97, 4), (191, 193, 4), (192, 192, 8)]
)
def test_largest_box_decides_at_its_borders(height: int, width: int, times: int):
    whole = Augmentation(scale=(1.0, 1.0), ratio=(width / height, width / height))
    assert reduction(torch.tensor([7]), height, width, whole, SIZE) == times


def test_crops_depend_on_their_keys_alone(folder: Path):
    images = opened(folder)
    whole = torch.cat([batch.images for batch in batches(images, REDUCED)])
    assert torch.equal(whole, torch.cat([batch.images for batch in batches(images, REDUCED, workers=1)]))
    halves = [batches(images, REDUCED, world=2, rank=rank) for rank in (0, 1)]
    joined = [torch.cat([one.images, other.images]) for one, other in zip(*halves, strict=True)]
    assert torch.equal(whole, torch.cat(joined))
    assert torch.equal(whole[40:], torch.cat([each.images for each in batches(images, REDUCED, start=2, steps=2)]))


def test_views_share_the_largest_reduction_that_all_allow(folder: Path, decoded: list[int]):
    images = opened(folder)
    sizes = [images.get(number).shape[-2:] for number in range(len(images))]
    decoded.clear()
    plain = batches(images, PLAIN, views=4)
    assert decoded == [1] * 4 * 5
    decoded.clear()
    for one, other in zip(plain, batches(images, REDUCED, views=4), strict=True):
        assert torch.equal(one.ids, other.ids) and levels(one.images, other.images).mean() < 1
    assert len(decoded) == 4 * 5
    exact = 0
    for times, number, keys in zip(
        decoded,
        torch.cat([batch.ids for batch in plain])[::4].tolist(),
        torch.cat([batch.keys for batch in plain]).reshape(-1, 4),
        strict=True,
    ):
        each = [reduction(key.reshape(1), *sizes[number], PLAIN, SIZE) for key in keys]
        assert times <= min(each)
        exact += times == min(each) and len(set(each)) > 1
    assert exact > 5


def test_unreadable_files_are_replaced_alike(folder: Path, tmp_path: Path):
    for path in folder.iterdir():
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(data[: len(data) // 2] if path.name in ("03.jpg", "08.jpg") else data)
    images = opened(tmp_path, max_unreadable=0.5)
    for plain, reduced in zip(batches(images, PLAIN), batches(images, REDUCED), strict=True):
        assert torch.equal(plain.shown, reduced.shown) and len(plain.unreadable) >= 2
        assert [told.split("(")[0] for told in plain.unreadable] == [told.split("(")[0] for told in reduced.unreadable]


def test_packs_and_folders_give_the_same(folder: Path, tmp_path: Path):
    packed = opened(pack(folder, tmp_path / "kept", form=Kept()).folder)
    given = []
    for images in (opened(folder), packed):  # in another order
        pairs = [images.get_reduced(number, lambda height, width: 4) for number in range(len(images))]
        given.append(sorted((whole, image.numpy().tobytes()) for image, whole in pairs))
    assert given[0] == given[1]


def test_files_that_differ_from_their_packs_index_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    reader = opened(folder)._reader
    recorded = replace(reader.probe(0), height=303)
    monkeypatch.setattr(type(reader.source), "recorded", lambda source, index: recorded)
    with pytest.raises(UnreadableImage, match="400 x 304 x 3 of uint8, and 400 x 303 x 3 of uint8 in the index"):
        reader.load_reduced(0, lambda height, width: 4)


def test_images_in_memory_are_read_from_their_files_again(folder: Path):
    """What a crop looks like must not depend on how much memory there is."""
    kept = opened(folder, memory_limit=1 << 30)
    assert kept.in_memory
    for one, other in zip(batches(kept, REDUCED), batches(opened(folder), REDUCED), strict=True):
        assert torch.equal(one.images, other.images)


@pytest.mark.parametrize(("channels", "kind"), [(2, "u1"), (3, "u2"), (1, "f4")])
def test_other_images_are_refused(channels: int, kind: str):
    images = load_images(Pictures([noise(8, 8, channels).astype(kind)] * 20), in_chans=None)
    with pytest.raises(
        UsageError, match=f"{channels} channels and type {images.dtype}; --reduced-decoding is made for"
    ):
        batches(images, REDUCED)


def mosaic(files: list[Path], number: int) -> bytes:
    """A photograph of 4,032 x 3,024 pixels, as fine as its 64 parts."""
    whole = Image.new("RGB", (4032, 3024))
    for part in range(64):
        image = Image.open(files[(number + 7 * part) % len(files)]).convert("RGB")
        whole.paste(ImageOps.fit(image, (504, 378), Image.Resampling.BICUBIC), (part % 8 * 504, part // 8 * 378))
    return encoded(whole, "JPEG", quality=85)


@pytest.mark.slow
@pytest.mark.parametrize(("side", "large"), [(224, True), (96, False)])
def test_photographs_stay_within_the_stated_bound(side: int, large: bool, tmp_path: Path):
    if not PHOTOS.is_dir():
        pytest.skip(f"{PHOTOS} is not there")
    files = sorted(PHOTOS.iterdir())
    for number in range(8 if large else 100):
        data = mosaic(files, number) if large else files[number].read_bytes()
        (tmp_path / f"{number:03d}.jpg").write_bytes(data)
    images = opened(tmp_path)
    settings = dict(batch_size=len(images), img_size=(side, side), steps=1)
    (plain,), (reduced,) = (batches(images, how, **settings) for how in (PLAIN, REDUCED))
    apart = levels(plain.images, reduced.images)
    changed = apart[apart.amax(dim=(1, 2, 3)) > 0].flatten()
    assert 0.5 < changed.mean() < MEAN and np.quantile(changed.numpy(), 0.99) < HIGH
