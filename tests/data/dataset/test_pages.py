"""TIFFs of several pages: the first is read, and that the others are not is told wherever images are opened."""

import numpy as np
import pytest
import tifffile

from mae.cli import main
from mae.data.dataset.images import load_images
from mae.data.inspect.findings import data_findings
from mae.data.inspect.report import inspect_images
from mae.data.sources.open import open_source

RNG = np.random.default_rng(0)


def opened(folder):
    return load_images(open_source(str(folder), data_root=folder), in_chans=None)


@pytest.mark.parametrize("shape", [(5, 9, 7), (9, 7, 2), (30, 8, 8)])
def test_pages_that_are_not_read_are_told(tmp_path, capsys, shape):
    folder = tmp_path / "stacks"
    folder.mkdir()
    for number in range(3):
        tifffile.imwrite(folder / f"{number}.tif", RNG.integers(0, 4000, shape).astype(np.uint16))
    images = opened(folder)
    (told,) = images.left_out
    assert told.startswith(
        "3 of 3 sampled files are TIFFs with several pages, of which only the first is read; put bands"
    )
    mean, std = images.statistics()
    findings = data_findings(inspect_images(images, img_size=(4, 4), mean=mean, std=std, seed=0))
    (kinds,) = (finding for finding in findings if finding.name == "kinds")
    assert kinds.level == "note" and "several pages" in kinds.value and "planarconfig" in kinds.advice
    assert main(["pack", str(folder), str(tmp_path / "pack"), "--raw", "4"]) == 0
    assert "TIFFs with several pages" in capsys.readouterr().out


def test_bands_in_one_page_and_smaller_versions_are_no_further_pages(tmp_path):
    bands = RNG.integers(0, 4000, (64, 64, 5)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "0.tif", bands, photometric="minisblack", planarconfig="contig")
    with tifffile.TiffWriter(tmp_path / "1.tif") as file:
        file.write(bands, photometric="minisblack", planarconfig="contig", subifds=1)
        file.write(bands[::2, ::2], photometric="minisblack", planarconfig="contig", subfiletype=1)
    with tifffile.TiffWriter(tmp_path / "2.tif") as file:
        for step in (1, 2, 4):
            file.write(
                bands[::step, ::step], photometric="minisblack", planarconfig="contig", subfiletype=int(step > 1)
            )
    images = opened(tmp_path)
    assert images.channels == 5 and images.left_out == ()


def test_a_damaged_second_page_is_none(tmp_path):
    path = tmp_path / "0.tif"
    tifffile.imwrite(path, RNG.integers(0, 4000, (5, 9, 7)).astype(np.uint16), contiguous=False)
    data = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as file:
        place = file.pages[1].offset
    data[place : place + 8] = b"\xff" * 8
    path.write_bytes(bytes(data))
    assert opened(tmp_path).get(0).shape == (1, 9, 7)
