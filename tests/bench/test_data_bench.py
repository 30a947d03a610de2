"""The loading benchmark: the same crops by every way, and consistent figures."""

import io
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from mae.bench import data, end_to_end
from mae.bench.data import DataBench, run_data_bench
from mae.bench.end_to_end import EndToEnd, _by_turns, run_end_to_end_bench
from mae.cli import main
from mae.config import RunConfig
from mae.data.dataset.images import load_images
from mae.data.loading.worker import CropDataset
from mae.data.packs.writer import pack
from mae.data.sources.open import open_source
from mae.errors import UsageError
from mae.records import read_json


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("jpegs") / "photos"
    root.mkdir()
    rng = np.random.default_rng(0)
    for number in range(50):
        coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((64, 48), Image.Resampling.BICUBIC).save(root / f"{number}.jpg", quality=90)
    return root


def test_every_way_is_timed(jpegs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pack(jpegs, tmp_path / "packed")
    threads, out = torch.get_num_threads(), tmp_path / "data.json"
    asked = [str(jpegs), "--also", str(tmp_path / "packed"), "--side", "16", "--seconds", "0.1", "--workers", "1"]
    assert main(["bench", "data", *asked, "--out", str(out)]) == 0
    assert "grey levels from Pillow's" in capsys.readouterr().out.replace("\n", " ")
    found = read_json(out)
    assert [way["name"] for way in found["ways"]] == [
        "Pillow, uint8", "Pillow, float32 (official)", "ours", "ours, the loader",
        "ours, the loader, --repeated-aug 5", f"the loader, {tmp_path / 'packed'}",
        "1 thread(s)", "1 process(es), the loader",
    ]  # fmt: skip
    rates = {way["name"]: way["rate"]["median"] for way in found["ways"]}
    assert found["loader_overhead"] == pytest.approx(rates["ours"] / rates["ours, the loader"] - 1)
    assert all(rate > 0 for rate in rates.values()) and found["ways"][0]["beside"]["median"] == 1
    assert 0 <= found["grey_levels_apart"] < 0.6 and torch.get_num_threads() == threads


def test_crops_match_pillow(jpegs: Path):
    crops = data.Crops([path.read_bytes() for path in sorted(jpegs.glob("*.jpg"))], 16)
    assert crops.levels_apart() < 0.6
    crops.flips[0] = not crops.flips[0]
    assert torch.equal(crops.ours(0).flip(-1), data.Crops(crops.contents, 16).ours(0))
    ours = crops.ours
    crops.ours = lambda number: ours(number).roll(1, -1)  # type: ignore[method-assign]
    assert crops.levels_apart() > 1


def test_reduced_decoding_is_that_of_a_run(jpegs: Path):
    crops = data.Crops([path.read_bytes() for path in data.jpegs_in(jpegs)], 16, reduced_decoding=True)
    images = load_images(open_source(str(jpegs), data_root=jpegs), in_chans=3)
    made = CropDataset(images=images, numbers=images.readable, img_size=(16, 16), augmentation=crops.how)
    piece = made[list(range(50)), crops.keys.tolist()]
    assert piece.images is not None and torch.equal(piece.images, torch.stack([crops.ours(n) for n in range(50)]))
    assert 0.1 < crops.levels_apart() < 4


def test_official_way_is_normalised(jpegs: Path):
    crops = data.Crops([next(jpegs.glob("*.jpg")).read_bytes()], 16)
    image = Image.open(io.BytesIO(crops.contents[0]))
    assert image.size == (64, 48)
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    torch.testing.assert_close(crops.as_floats(0) * std + mean, crops.by_pillow(0) / 255, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"source": "nowhere"}, "nowhere holds 0 JPEGs; give a folder of 50"), ({"source": "x", "side": 0}, "--side is 0"),
     ({"source": "x", "workers": 0}, "--workers 0"), ({"source": "x", "seconds": -1.0}, "--seconds -1")],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any], says: str):
    with pytest.raises(UsageError, match=says):
        run_data_bench(DataBench(**options), Console(quiet=True))


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "end.json"
    tiny = ["--model", "mae_vit_lesson_patch4", "--img-size", "8", "--patch-size", "2", "--mlp-ratio", "0.5"]
    tiny += ["--recipe", "improved", "--mask-warmup", "2"]  # longer than what is measured
    asked = ["builtin:digits", *tiny, "--batch-size", "8", "--device", "cpu", "--workers", "0", "--seconds", "0.1"]
    assert main(["bench", "end-to-end", *asked, "--json", str(out)]) == 0
    assert "one batch in memory" in capsys.readouterr().out
    found = read_json(out)
    assert found["batch_size"] == 8 and found["images_per_second"]["real"]["median"] > 0
    assert found["share"]["lower"] <= found["share"]["median"] <= found["share"]["upper"]
    assert main(["bench", "end-to-end", *asked, "--out", str(tmp_path / "run")]) == 2
    assert "this run is discarded" in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert main(["bench", "end-to-end"]) == 2 and "no images are named" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--seconds is 0"):
        EndToEnd(seconds=0.0)


def test_full_queues_are_not_counted(monkeypatch: pytest.MonkeyPatch):
    """A loader that is slow once its queues are empty is as slow as that, though each turn begins with full ones."""
    make = end_to_end.make_trainer

    def slow(*args: Any) -> Any:
        trainer = make(*args)
        real = trainer.batches

        def batches(step: int) -> Generator[Mapping[str, Any], None, None]:
            for number, batch in enumerate(real(step)):
                if number % 8 >= 4:  # turns of the least length: twice 4 steps
                    time.sleep(0.1)
                yield batch

        trainer.batches = batches
        return trainer

    monkeypatch.setattr(end_to_end, "make_trainer", slow)
    config = RunConfig.of(
        source="builtin:digits", model="mae_vit_lesson_patch4", img_size=8, patch_size=2, mlp_ratio=0.5, batch_size=8,
        device="cpu", workers=0, warmup_epochs=0.0,
    )  # fmt: skip
    found = run_end_to_end_bench(EndToEnd(seconds=1e-3), config, Console(quiet=True))
    assert found["images_per_second"]["real"]["upper"] <= 8 / 0.1 < found["images_per_second"]["synthetic"]["median"]


def test_rates_of_second_halves_are_counted():
    """Whatever other steps are logged, such as the first of a run and those that are saved."""
    rates = {step: float(step) for step in (1, 4, 8, 12, 13, 16, 20, 24, 28, 32, 36, 40, 41, 44, 48)}
    assert end_to_end._counted(rates, 8) == ([24.0, 40.0], [32.0, 48.0])


def test_turns_alternate():
    closed: list[bool] = []

    def real(step: int) -> Any:
        try:
            number = 2 * step
            while True:
                yield {"images": number}
                number += 1
        finally:
            closed.append(True)

    turns = _by_turns(real, accumulate=2, steps=2)(3)
    given = [next(turns)["images"] for _ in range(12)]
    assert given == [6, 7, 8, 9, 9, 9, 9, 9, 10, 11, 12, 13]
    turns.close()
    assert closed == [True]
