"""Reference curves: what a file must hold, whose reference it is, and how it is made from runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reference_curve import reference_curve

from mae import records
from mae.config import RunConfig
from mae.core.method import MethodConfig
from mae.errors import UsageError
from mae.models.presets import model_config
from mae.recipes import recipe_config, reference
from mae.recipes.reference import MOST_POINTS, ReferenceCurve, kept_config, reference_for


def decided(config: RunConfig) -> RunConfig:
    """With its model in full, as a run keeps it."""
    assert config.model is not None and not isinstance(config.method, MethodConfig)
    return replace(config, method=model_config(config.model, **config.method))


DEMO = decided(recipe_config("demo"))


def curve(**changes) -> ReferenceCurve:
    values = {
        "config": kept_config(DEMO),
        "images": 2048,
        "fingerprint": "0123456789abcdef",
        "seeds": (0, 1),
        "samples": (100, 200, 300),
        "loss": (0.9, 0.6, 0.5),
        "std": (0.1, 0.02, 0.0),
        "mae_version": "0.1.0",
        "hardware": "two cores",
        "date": "2026-01-02",
    }
    return ReferenceCurve(**{**values, **changes})


@pytest.fixture
def stored(tmp_path, monkeypatch) -> ReferenceCurve:
    """A curve that is shipped, as far as the package knows."""
    monkeypatch.setattr(reference, "_CURVES", tmp_path)
    records.write_json(tmp_path / "demo.json", records.to_json(curve()))
    return curve()


def test_every_shipped_curve_is_the_reference_of_its_own_recipe():
    for path in sorted(reference._CURVES.glob("*.json")):
        shipped = ReferenceCurve.read(path)
        assert path.stem == shipped.config["recipe"]
        recipe = recipe_config(str(shipped.config["recipe"]))
        assert reference_for(decided(recipe).override({"seed": 17, "precision": "fp32"})) == shipped
        assert reference_for(RunConfig.of(**shipped.config)) == shipped


def test_fields_that_may_differ_are_fields():
    known = set(DEMO.flat())
    assert known >= reference._LENGTH_AND_RATE and known >= reference._NOT_KEPT


def test_a_file_gives_back_what_was_written_and_no_place_of_the_machine(stored, tmp_path):
    assert ReferenceCurve.read(tmp_path / "demo.json") == stored
    assert not {"out", "data_root", "seed"} & set(stored.config)


@pytest.mark.parametrize("same", [{}, {"seed": 7}, {"steps": 10}, {"lr": 0.5}, {"out": Path("/x"), "device": "cpu"}])
def test_the_reference_of_a_run_is_found(stored, same):
    assert reference_for(DEMO.override(same)) == stored


@pytest.mark.parametrize(
    "other",
    [
        {"recipe": "default"},
        {"model": "mae_vit_lesson_patch4"},
        {"source": "/home/me/photos"},
        {"mask_ratio": 0.5},
        {"norm_pix_loss": True},
        {"laplacian": 0.05},
        {"loss": "l1"},
        {"patch_size": [16, 16]},
        {"decoder_depth": 3},
    ],
)
def test_a_run_of_something_else_has_none(stored, other):
    assert reference_for(DEMO.override(other)) is None


def test_a_field_younger_than_the_file_has_its_default(stored, tmp_path):
    younger = ("focal_frequency", "repeated_aug", "encoder_mask_tokens")
    old = {name: value for name, value in stored.config.items() if name not in younger}
    records.write_json(tmp_path / "demo.json", records.to_json(curve(config=old)))
    assert reference_for(DEMO) is not None
    assert reference_for(DEMO.override({"focal_frequency": 1.0})) is None


def test_the_line_goes_as_far_as_the_run(stored):
    line = stored.line(299)
    assert line is not None and line.label == "reference: recipe demo, 2 seeds"
    assert (list(line.x), list(line.y)) == ([100, 200], [0.9, 0.6])
    assert line.band is not None
    np.testing.assert_allclose(line.band, [[0.8, 0.58], [1.0, 0.62]], rtol=1e-12)
    assert stored.line(300).x[-1] == 300 and stored.line(99) is None


def test_other_training_is_told_and_nothing_else(stored):
    assert stored.differences(DEMO.override({"seed": 3, "workers": 2})) == []
    told = stored.differences(DEMO.override({"steps": 100, "lr": 0.25}))
    assert told == ["steps 100 (reference 1500)", "lr 0.25 (reference 0.0015)"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"seeds": (0,)}, "two or more"),
        ({"seeds": (0, 1, 1)}, "each once"),
        ({"loss": (0.9, 0.6)}, "as many of each"),
        ({"samples": (), "loss": (), "std": ()}, "1 to 60"),
        ({"samples": (100, 100, 300)}, "do not rise"),
        ({"samples": (0, 100, 300)}, "do not rise"),
        ({"loss": (0.9, float("nan"), 0.5)}, "not finite"),
        ({"std": (0.1, -0.1, 0.0)}, "below 0"),
        ({"config": {**kept_config(DEMO), "source": "/home/me/photos"}}, "files of one's own"),
        ({"config": {**kept_config(DEMO), "recipe": "/home/me/config.json"}}, "one of the package"),
    ],
)
def test_a_contradictory_curve_is_refused(wrong, told):
    with pytest.raises(UsageError, match=told):
        curve(**wrong)


def run_folder(folder: Path, ends: list[int], loss, **options) -> Path:
    """A finished run: rows that end after so many samples, each the mean of a loss since the one before."""
    folder.mkdir(parents=True)
    config = DEMO.override({"out": folder, **options})
    records.write_json(folder / "config.json", config.to_json())
    records.write_json(folder / "data.json", {"images": 2048, "fingerprint": "0123456789abcdef"})
    records.write_json(folder / "summary.json", {"finished_at": f"2026-03-0{1 + config.optim.seed}T10:00:00+0000"})
    rows = [{"step": 0, "samples": 0, "evaluation": {"feature_std": 1.0}}]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        mean = float(np.mean([loss(place) for place in range(start, end)]))
        rows.append({"step": end, "samples": end, "loss": 9.0, "terms": {"reconstruction": mean, "other": 1.0}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_curve_is_the_mean_of_the_runs_wherever_their_rows_stand(tmp_path):
    every_ten, stopped = list(range(10, 601, 10)), [*range(10, 250, 10), 247, *range(250, 601, 10)]
    runs = [
        run_folder(tmp_path / "0", every_ten, lambda place: 1 - place / 1000, seed=0),
        run_folder(tmp_path / "1", stopped, lambda place: 2 - place / 1000, seed=1),
    ]
    found = reference_curve(runs, hardware="two cores")
    assert found.samples == tuple(every_ten) and found.seeds == (0, 1) and found.date == "2026-03-02"
    means = [1.5 - (end - 5.5) / 1000 for end in every_ten]  # of the whole numbers in each stretch
    np.testing.assert_allclose(found.loss, means, rtol=2e-4)  # rows of 247 and 250 blur 3 samples' slope
    np.testing.assert_allclose(found.std, [0.5**0.5] * 60, rtol=5e-4)
    assert found.config == kept_config(DEMO)


def test_many_rows_become_sixty_points_with_the_same_mean(tmp_path):
    runs = [
        run_folder(tmp_path / str(seed), list(range(7, 1401, 7)), lambda place: 1 / (1 + place), seed=seed)
        for seed in (0, 1)
    ]
    found = reference_curve(runs, hardware="two cores")
    assert len(found.samples) == MOST_POINTS and found.samples[-1] == 1400
    widths = np.diff([0, *found.samples])
    true = np.mean([1 / (1 + place) for place in range(1400)])
    assert np.average(found.loss, weights=widths) == pytest.approx(true, rel=1e-4)
    assert max(found.std) == 0


def test_runs_that_are_not_alike_are_refused(tmp_path):
    def falling(place: int) -> float:
        return 1.0

    first = run_folder(tmp_path / "a", [10, 20], falling, seed=0)
    with pytest.raises(UsageError, match="1 run.* expected two or more"):
        reference_curve([first], hardware="x")
    with pytest.raises(UsageError, match="differs from .* in lr; expected the seed alone"):
        reference_curve([first, run_folder(tmp_path / "b", [10, 20], falling, seed=1, lr=0.5)], hardware="x")
    with pytest.raises(UsageError, match="each once"):
        reference_curve([first, run_folder(tmp_path / "c", [10, 20], falling, seed=0)], hardware="x")
    other = run_folder(tmp_path / "d", [10, 20], falling, seed=1)
    records.write_json(other / "data.json", {"images": 2048, "fingerprint": "f" * 16})
    with pytest.raises(UsageError, match="in images"):
        reference_curve([first, other], hardware="x")
    (other / "summary.json").unlink()
    with pytest.raises(UsageError, match="no finished run"):
        reference_curve([first, other], hardware="x")
    short = run_folder(tmp_path / "e", [10], falling, seed=1)
    with pytest.raises(UsageError, match="rows end after 10 samples"):
        reference_curve([first, short], hardware="x")
