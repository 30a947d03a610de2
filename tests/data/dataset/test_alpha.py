"""Bands that files call alpha: composited unless as many channels are wanted, in every kind of source alike."""

import io
import tarfile
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pytest
import tifffile
from data.pictures import encoded, noise
from datasets import Dataset, Features
from PIL import Image

from mae.cli import main
from mae.data.dataset.images import load_images
from mae.data.decode.image import decode, probe
from mae.data.inspect.findings import data_findings
from mae.data.inspect.report import inspect_images
from mae.data.packs.encodings import Kept, Raw
from mae.data.packs.writer import pack
from mae.data.sources.open import open_source
from mae.errors import MAEError

BANDS = noise(9, 7, 4).astype(np.uint16) * 200
"""Noise, so that no band happens to be opaque."""


def tiff(pixels: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, pixels, **options)
    return buffer.getvalue()


def images() -> dict[str, tuple[bytes, np.ndarray]]:
    """Files with alpha, and all of their bands."""
    wide, eight = BANDS, (BANDS // 200).astype(np.uint8)
    grey = np.ascontiguousarray(eight[..., [0, 3]])
    palette = Image.fromarray(eight[..., 0] % 4, "P")
    palette.putpalette([0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110])
    levels = np.array([7, 80, 200, 255], np.uint8)
    shown = np.concatenate([np.arange(0, 120, 10, np.uint8).reshape(4, 3), levels[:, None]], axis=1)[eight[..., 0] % 4]
    found = {
        "RGBA PNG": (encoded(Image.fromarray(eight)), eight),
        "LA PNG": (encoded(Image.fromarray(grey, "LA")), grey),
        "palette PNG": (encoded(palette, transparency=bytes(levels)), shown),
        "WebP": (encoded(Image.fromarray(eight), "WEBP", lossless=True, exact=True), eight),
        "planes": (tiff(np.moveaxis(wide, 2, 0)), wide),
        "grey TIFF": (
            tiff(wide[..., :2], photometric="minisblack", planarconfig="contig", extrasamples=["unassalpha"]),
            wide[..., :2],
        ),
    }
    for name, pixels in (("8", eight), ("16", wide)):
        found[f"{name} bits as tifffile writes it"] = (tiff(pixels), pixels)
        for packing in ("zlib", None):
            options = {"photometric": "rgb", "extrasamples": ["assocalpha"], "compression": packing}
            found[f"{name} bits premultiplied, {packing}"] = (tiff(pixels, **options), pixels)
    return found


IMAGES = images()


@pytest.mark.parametrize("name", IMAGES)
def test_alpha_is_a_band_where_as_many_are_wanted_and_only_there(name):
    data, expected = IMAGES[name]
    bands = expected.shape[2]
    for wanted in (None, 1, 3, bands + 1):
        info = probe(data, name="a", bands=wanted)
        found = decode(data, name="a", bands=wanted)
        assert info.alpha == (wanted != bands) and found.shape == (9, 7, info.channels)
        if wanted != bands:
            assert info.channels == bands - 1 and np.array_equal(found, decode(data, name="a"))
    kept, info = decode(data, name="a", bands=bands), probe(data, name="a", bands=bands)
    assert kept.dtype == expected.dtype == info.dtype and np.array_equal(kept, expected) and not info.alpha


def test_a_last_band_with_a_name_is_no_alpha():
    def named(*names: str) -> bytes:
        items = "".join(
            f'<Item name="DESCRIPTION" sample="{at}" role="description">{name}</Item>' for at, name in enumerate(names)
        )
        return tiff(BANDS, extratags=[(42112, "s", 0, f"<GDALMetadata>{items}</GDALMetadata>", True)])

    found = probe(named("red", "green", "blue", "near infrared"), name="a")
    assert found.names == ("red", "green", "blue", "near infrared") and not found.alpha
    assert np.array_equal(decode(named("red", "green", "blue", "near infrared"), name="a"), BANDS)
    for others in (("red", "green", "blue", "alpha"), ("red", "green", "blue")):
        assert probe(named(*others), name="a").names == ("red", "green", "blue")
        assert decode(named(*others), name="a").shape == (9, 7, 3)


def written(folder: Path, *, names: str | None = None) -> Path:
    folder.mkdir()
    for number in range(3):
        tifffile.imwrite(folder / f"{number}.tif", BANDS + number)
    if names is not None:
        (folder / "channels.txt").write_text(names)
    return folder


def sources(folder: Path, root: Path) -> dict[str, str]:
    """The same images in every kind of source that reads files."""
    files = sorted(folder.iterdir())
    with zipfile.ZipFile(root / "z.zip", "w") as archive:
        for path in files:
            archive.write(path, path.name)
    with tarfile.open(root / "t.tar", "w") as archive:
        for path in files:
            archive.add(path, path.name)
    rows = [{"bytes": path.read_bytes(), "path": path.name} for path in files if path.suffix == ".tif"]
    Dataset.from_dict({"image": rows}, features=Features({"image": datasets.Image()})).save_to_disk(str(root / "rows"))
    pack(str(folder), root / "pack", form=Kept(), workers=1)
    (root / "list.txt").write_text("\n".join(str(path) for path in files if path.suffix == ".tif"))
    return {
        "folder": str(folder), "list": str(root / "list.txt"), "zip": str(root / "z.zip"), "tar": str(root / "t.tar"),
        "rows": f"hf:{root / 'rows'}", "pack": str(root / "pack"),
    }  # fmt: skip


@pytest.mark.parametrize("memory_limit", [None, 0])
def test_every_source_keeps_it_where_four_channels_are_wanted(tmp_path, memory_limit):
    for kind, source in sources(written(tmp_path / "plain"), tmp_path).items():
        for options in ({"in_chans": 4}, {"in_chans": None, "channels": ["r", "g", "b", "n"]}):
            opened = load_images(open_source(source, data_root=tmp_path), memory_limit=memory_limit, **options)
            found = np.sort(np.stack([opened.get(number).numpy() * 65535 for number in range(3)]), axis=0)
            expected = np.stack([np.moveaxis(BANDS, 2, 0) + number for number in range(3)])
            assert opened.channels == 4 and opened.left_out == (), kind
            assert np.allclose(found, expected, atol=0.01), kind
        usual = load_images(open_source(source, data_root=tmp_path), in_chans=None, memory_limit=memory_limit)
        assert usual.channels == 3, kind
        if kind != "pack":  # whose index does not tell; packing did
            (told,) = usual.left_out
            assert told == (
                "the last band of 3 of 3 sampled files is taken as alpha and composited over white; to keep it as "
                "a channel: --in-chans 4"
            ), kind
        with pytest.raises(MAEError, match=r"has 3 channels; expected 5"):
            load_images(open_source(source, data_root=tmp_path), in_chans=5)


def test_it_is_a_band_where_most_files_have_as_many_without_it(tmp_path):
    folder = written(tmp_path / "mixed")
    for number in range(3, 9):
        tifffile.imwrite(folder / f"{number}.tif", BANDS + number, photometric="minisblack", planarconfig="contig")
    opened = load_images(open_source(str(folder), data_root=tmp_path), in_chans=None)
    assert opened.channels == 4 and opened.left_out == ()
    for number in range(9):
        assert np.allclose(opened.get(number).numpy() * 65535, np.moveaxis(BANDS, 2, 0) + number, atol=0.01)


def test_names_for_all_bands_keep_it_in_packs_of_pixels_too(tmp_path, capsys):
    named = written(tmp_path / "named", names="r\ng\nb\nn\n")
    for number, form in enumerate((Kept(), Raw())):
        assert not pack(str(named), tmp_path / f"{number}", form=form, workers=1).unread
        opened = load_images(open_source(str(tmp_path / f"{number}"), data_root=tmp_path), in_chans=None)
        assert opened.channel_names == ("r", "g", "b", "n") and opened.channels == 4
        assert any(np.allclose(opened.get(at).numpy() * 65535, np.moveaxis(BANDS, 2, 0), atol=0.01) for at in range(3))
    assert main(["pack", str(written(tmp_path / "plain")), str(tmp_path / "plain-pack"), "--raw", "64"]) == 0
    assert "name all channels in a channels.txt" in capsys.readouterr().out


def test_the_doctor_says_what_counts_as_alpha(tmp_path):
    opened = load_images(open_source(str(written(tmp_path / "plain")), data_root=tmp_path), in_chans=None)
    mean, std = opened.statistics()
    findings = data_findings(inspect_images(opened, img_size=(6, 6), mean=mean, std=std, seed=0))
    (kinds,) = (finding for finding in findings if finding.name == "kinds")
    assert kinds.level == "note" and "the last band of 3 of 3 sampled files is taken as alpha" in kinds.value
    assert kinds.advice == "to keep it as a channel: --in-chans 4"
