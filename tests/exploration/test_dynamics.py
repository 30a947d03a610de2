"""A model over its training: checkpoints whose differences are known, and the sections that show them."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from exploration.planted import planted_images, planted_model
from rich.console import Console

from mae.data.sources.open import open_source
from mae.encoders.vit import MAEEncoder
from mae.evaluation.common.feature_stats import measure_spread
from mae.evaluation.common.task import UnlabelledTask
from mae.evaluation.extractors.open import open_extractor
from mae.exploration import dynamics
from mae.exploration.attention_pictures import attention_pictures
from mae.exploration.dynamics_sections import (
    attention_over_time,
    errors_by_wavelength,
    layers_over_time,
    patch_colours_over_time,
    weights_over_time,
)
from mae.exploration.explored import ExploreRun, labels_of
from mae.exploration.mask_advice import masks_against_data
from mae.exploration.thumbnails import crops_of
from mae.models.file import load_model, save
from mae.training.checkpoint import MODEL

CPU = torch.device("cpu")
Made = Callable[..., ExploreRun]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, and three moments of a model: between the first two the last block grew by a tenth, then nothing did."""
    place = tmp_path_factory.mktemp("dynamics")
    planted_images(place / "images")
    (place / "10").mkdir()
    planted_model(place / "10" / MODEL)
    model = load_model(place / "10" / MODEL)
    with torch.no_grad():
        for weight in model.encoder.blocks[1].parameters():
            weight.mul_(1.1)
    for step in ("20", "30"):
        (place / step).mkdir()
        save(model, place / step / MODEL)
    return place


@pytest.fixture
def explored(place: Path, tmp_path: Path) -> Made:
    def make(steps: tuple[int, ...] = (10, 20, 30), *, labelled: bool = True) -> ExploreRun:
        source = open_source(str(place / "images"), data_root=place)
        labels, names = labels_of(source, str(place / "images"), data_root=place) if labelled else (None, ())
        task = UnlabelledTask(
            extractor=open_extractor(str(place / "30" / MODEL), device=CPU),
            source=source,
            folder=tmp_path,
            device=CPU,
            seed=0,
            console=Console(quiet=True),
        )
        checkpoints: Mapping[int, Path] = {step: place / str(step) for step in steps}
        return ExploreRun(
            folder=None,
            checkpoints=checkpoints,
            task=task,
            labels=labels,
            class_names=names,
            projection="pca",
            pictures=tmp_path,
        )

    return make


def test_checkpoints_are_measured_in_order_and_only_what_changed_differs(explored: Made):
    found = explored().dynamics
    assert [each.step for each in found.snapshots] == [0, 10, 20, 30] and found.left_out == 0
    assert [each.name for each in found.trained] == ["step 10", "step 20", "step 30"]
    first, second, third = found.trained
    assert first.changes is None and second.changes is not None and third.changes is not None
    assert second.changes["encoder block 1"] == pytest.approx(0.1, rel=1e-5)
    assert {change for name, change in second.changes.items() if name != "encoder block 1"} == {0}
    assert set(third.changes.values()) == {0}
    assert first.layers[0].effective_rank == second.layers[0].effective_rank  # of the block before the one that grew
    assert first.layers[1].effective_rank != second.layers[1].effective_rank
    assert second.error == third.error != first.error
    assert torch.equal(second.tokens, third.tokens) and not torch.equal(first.tokens, second.tokens)
    assert second.attention is not None and third.attention is not None
    assert torch.equal(second.attention.distance, third.attention.distance)
    assert found.snapshots[0].error is None or found.snapshots[0].error != first.error


def test_layers_are_those_of_the_model(explored: Made, place: Path):
    run = explored()
    found, model = run.dynamics, load_model(place / "10" / MODEL)
    images = crops_of(run.images, run.task.extractor.preprocessing, run.numbers)
    with torch.no_grad():
        features = model.encode(images, layers=[0])
        shown = model.encode(crops_of(run.images, run.task.extractor.preprocessing, found.shown)).patches
    ranks = [layer.effective_rank for layer in found.trained[0].layers]
    expected = [measure_spread(each).effective_rank for each in (features.layers[0].mean(dim=1), features.mean)]
    assert ranks == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(found.trained[0].tokens, shown)


def test_classes_are_found_where_there_are_any(explored: Made):
    found = explored().dynamics
    assert found.majority is not None and found.majority < 0.7
    assert all(layer.knn is not None and layer.knn > 0.8 for each in found.snapshots for layer in each.layers)
    without = explored((), labelled=False).dynamics
    assert without.majority is None and without.snapshots[-1].layers[0].probe is None


def test_of_many_checkpoints_some_are_measured(explored: Made, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dynamics, "_MOST_CHECKPOINTS", 2)
    found = explored().dynamics
    assert [each.step for each in found.trained] == [10, 30] and found.left_out == 1
    assert found.trained[1].changes is not None
    assert found.trained[1].changes["encoder block 1"] == pytest.approx(0.1, rel=1e-5)


def test_sections_show_a_run(explored: Made, tmp_path: Path):
    run = explored()
    layers, attention = layers_over_time(run), attention_over_time(run)
    errors, weights, colours = errors_by_wavelength(run), weights_over_time(run), patch_colours_over_time(run)
    assert attention is not None and errors is not None and weights is not None
    assert [row[0] for row in layers.rows] == ["random weights", "step 10", "step 20", "step 30"]
    assert "block 0: 1" in layers.rows[-1][1] and "k-NN" in layers.text
    assert "commonest class" in layers.text and "2.83 nats" in attention.text  # the logarithm of 16 patches and a token
    assert [row[0] for row in errors.rows] == ["over 8 px", "4-8 px", "up to 4 px"]
    shares = [float(row[3].rstrip("%")) for row in errors.rows]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    for section in (layers, attention, errors, weights, colours):
        assert section.pictures and all(path.stat().st_size > 1000 for path in section.pictures)


def test_a_model_without_a_run_is_beside_random_weights_and_has_no_moves(explored: Made):
    run = explored(())
    assert [each.name for each in run.dynamics.snapshots] == ["random weights", "this model"]
    assert weights_over_time(run) is None
    errors = errors_by_wavelength(run)
    assert errors is not None and not errors.pictures and len(errors.rows) == 3
    assert [row[0] for row in layers_over_time(run).rows] == ["random weights", "this model"]
    assert layers_over_time(explored((), labelled=False)).header == ()


def test_an_encoder_that_gives_no_attention_has_no_such_sections(explored: Made, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(MAEEncoder, "attends", False)
    run = explored((10,))
    assert attention_over_time(run) is None and attention_pictures(run) is None


def test_attention_is_looked_at_image_by_image(explored: Made, monkeypatch: pytest.MonkeyPatch):
    """Of a ViT-L on a grid of 64 x 64 patches that of one image and block takes a gigabyte."""
    run, given = explored((10,)), list[int]()
    attention = MAEEncoder.attention
    monkeypatch.setattr(
        MAEEncoder, "attention", lambda of, images: (given.append(len(images)), attention(of, images))[1]
    )
    assert attention_pictures(run) is not None and given == [1] * 4


def test_masks_are_set_beside_the_data(explored: Made):
    section = masks_against_data(explored(()))
    assert section is not None and "Advice, from these numbers alone" in section.text
    assert [row[0] for row in section.rows] == ["25%", "50%", "60%", "75% (its own)", "90%"]
    assert all(float(cell) >= 0 for row in section.rows for cell in row[1:])
    # The planted images are of squares of 4 pixels in colours of their own.
    assert "falls to 1 / e at" in section.text and "a patch is 4 x 4 pixels" in section.text
