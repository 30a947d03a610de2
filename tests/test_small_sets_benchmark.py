"""The comparison on a few hundred images: the sets are what they are called, and the sums are right."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_images
import small_sets
from PIL import Image

from mae.evaluation.protocol import THIS_MODEL
from mae.models.presets import create_model
from mae.pretraining.run import PretrainResult
from mae.records import write_json


def pixels(folder: Path) -> dict[str, np.ndarray]:
    return {str(file.relative_to(folder)): np.array(Image.open(file)) for file in sorted(folder.rglob("*.png"))}


@pytest.mark.parametrize(("make", "classes"), [(small_images.textures, 8), (small_images.solids, 6)])
def test_drawn_sets_are_the_same_each_time(make: Any, classes: int, tmp_path: Path) -> None:
    make(tmp_path / "one", each=2)
    make(tmp_path / "other", each=2)
    one, other = pixels(tmp_path / "one"), pixels(tmp_path / "other")
    assert len(one) == 2 * 2 * classes and all(image.shape == (64, 64, 3) for image in one.values())
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)
    assert len({image.tobytes() for image in one.values()}) == len(one)


def test_cells_are_cut_by_their_boxes_from_other_photographs_for_the_test(tmp_path: Path) -> None:
    for folder in ("Annotations", "JPEGImages"):
        (tmp_path / folder).mkdir()
    for photograph in range(4):  # each of one grey, which tells where a cell comes from; cells lie at the edge too
        Image.new("RGB", (90, 80), (50 * photograph + 20,) * 3).save(tmp_path / "JPEGImages" / f"{photograph}.jpg")
        cells = "".join(
            f"<object><name>{name}</name><bndbox><xmin>{x}</xmin><ymin>0</ymin><xmax>{x + 20}</xmax><ymax>10</ymax>"
            "</bndbox></object>"
            for x, name in zip((0, 30, 70), small_images.CELLS, strict=True)
        )
        empty = (
            "<object><name>RBC</name><bndbox><xmin>5</xmin><ymin>0</ymin><xmax>5</xmax><ymax>0</ymax></bndbox></object>"
        )
        (tmp_path / "Annotations" / f"{photograph}.xml").write_text(f"<annotation>{cells}{empty}</annotation>")
    small_images.blood_cells(tmp_path, tmp_path / "cells", each=2)
    found = pixels(tmp_path / "cells")
    assert len(found) == 2 * 3 * 2
    for name, cell in found.items():
        assert cell.shape == (64, 64, 3)
        assert round((int(cell.mean()) - 20) / 50) % 2 == (0 if name.startswith("train") else 1)


def test_features_that_tell_classes_are_scored_so_and_weights_differ_by_seed(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for part in ("train", "test"):
        for label, level in enumerate((40, 200)):
            folder = tmp_path / "data" / part / str(label)
            folder.mkdir(parents=True)
            for number in range(12):
                values = draws.normal(level, 5, (8, 8, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(values).save(folder / f"{number}.png")
    model = create_model(
        "mae_vit_lesson_patch4", img_size=8, patch_size=2, embed_dim=32, depth=1, mean=(0.5,) * 3, std=(0.25,) * 3
    )
    found = [small_sets.scores_of(model, tmp_path / "data", seed, tmp_path / str(seed)) for seed in (0, 1)]
    assert found[0][THIS_MODEL] == found[1][THIS_MODEL] and found[0][small_sets.PIXELS] == found[1][small_sets.PIXELS]
    assert set(found[0][small_sets.PIXELS]) == {f"{what}, {few}" for what in ("k-NN", "probe") for few in (1, 5, "all")}
    assert found[0][small_sets.PIXELS]["probe, all"] == 1


def scored(seed: int, ours: float, random: float) -> dict[str, Any]:
    scores = {
        THIS_MODEL: {"k-NN, 1": ours},
        small_sets.RANDOM: {"k-NN, 1": random},
        small_sets.PIXELS: {"k-NN, 1": 0.3},
    }
    return {"set": "cells", "words": "fast", "seed": seed, "scores": scores}


def test_the_table_pairs_seeds_and_takes_the_better_baseline() -> None:
    """By hand: differences 0.02, 0.01, 0.05 have mean 0.0267 and std 0.0208; half of the interval is 0.0517."""
    results = [scored(0, 0.52, 0.5), scored(1, 0.61, 0.6), scored(2, 0.75, 0.7)]
    assert list(small_sets.rows(results))[3:] == [
        "| cells | above the better baseline | +2.7 (-2.5 to +7.8) |",
        "| cells | random weights | 60.0 ± 24.8 |",
        "| cells | raw pixels | 30.0 |",
    ]
    assert small_sets._gain([scored(0, 0.25, 0.1)], "k-NN, 1") == "-5.0"


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    write_json(tmp_path / "measured.json", {"fast, cells": {"images_per_second": 32.0, "batch_size": 64}})
    args = Namespace(out=tmp_path, minutes=2.0, measuring=1.0)
    assert small_sets.measured_steps("fast", tmp_path / "cells" / "train", args) == 60


def test_a_stopped_run_has_no_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "measured.json", {"mae, cells": {"images_per_second": 32.0, "batch_size": 64}})
    stopped = PretrainResult(folder=tmp_path, finished=False, summary={}, stopped_by=15)
    monkeypatch.setattr(small_sets, "run_pretraining", lambda *args, **options: stopped)
    with pytest.raises(SystemExit) as found:
        small_sets.trained("mae", tmp_path / "cells", 0, Namespace(out=tmp_path, minutes=2.0))
    assert found.value.code == 128 + 15 and not list(tmp_path.rglob("scores.json"))
