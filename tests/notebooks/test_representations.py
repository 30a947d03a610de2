"""What results, models and masks look like as the last line of a cell."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import mae
from mae.core.types import MaskPlan
from mae.evaluation.common.record import Evaluation
from mae.experiments.core.metrics import Metric
from mae.experiments.core.results import RunResult, StudyResult, Variant
from mae.experiments.run import StudyOutcome
from mae.models.classifier import build_classifier
from mae.models.detector import DetectionHead, build_detector
from mae.models.segmenter import build_segmenter, linear_head

EVIL = "<b>&\x1b[2J"
SMALL = {"img_size": 32, "embed_dim": 32, "depth": 2, "decoder_embed_dim": 16, "decoder_depth": 1}
STATISTICS = {"mean": (0.5,) * 3, "std": (0.25,) * 3}


def told(shown: object) -> str:
    """The text of a representation, which is well-formed, holds no markup of others' texts, and is small."""
    html = shown._repr_html_()  # type: ignore[attr-defined]
    found = ElementTree.fromstring(f"<div>{html}</div>")
    assert found.find(".//b") is None and found.find(".//script") is None and "\x1b" not in html
    assert len(html) < 100_000
    return "\n".join(found.itertext())


def model_of(**options):
    torch.manual_seed(0)
    return mae.create_model("mae_vit_lesson_patch4", **SMALL, **STATISTICS, **options)


def test_a_model_tells_its_size_input_and_method():
    model = model_of(mask="block", target="hog", target_cell=4, uniformity=0.1)
    text = told(model)
    assert f"{model.num_parameters():,}, of which" in text and "2 blocks, width 32" in text
    assert "32x32 pixels, 3 channels; 8x8 patches of 4x4" in text
    assert "block (ratio 0.4" in text and "hog (" in text and "uniformity (" in text


def test_a_model_with_a_teacher_is_shown_without_making_its_network():
    model = model_of(target="features", teacher="ema")
    assert "ema (" in told(model)
    assert model._teacher is None


def test_an_encoder_without_a_configuration_is_shown_too():
    model = model_of()
    assert "2 blocks" in told(mae.PretrainedEncoder(encoder=model.encoder))
    parts = {name: getattr(model, name) for name in ("tokenizer", "encoder", "decoder", "masking", "target", "loss")}
    assert "2 blocks" in told(mae.MaskedAutoencoder(**parts))


def test_models_with_heads_name_their_classes():
    model = model_of()
    names = [f"{EVIL}{number}" for number in range(12)]
    options = {"drop_path": 0.0, "pretrained": None}
    classifier = build_classifier(model.config, num_classes=12, class_names=names, label_smoothing=0.0, **options)
    text = told(classifier)
    assert "12: <b>&\ufffd[2J0" in text and "J9, …" in text and "J10" not in text
    head = linear_head(2)
    segmenter = build_segmenter(model.config, head=head, num_classes=3, class_names=("a", "b", "c"), **options)
    assert "linear on blocks 1" in told(segmenter) and "3: a, b, c" in told(segmenter)
    described = DetectionHead(size=32, channels=16, masks=True)
    detector = build_detector(model.config, described, class_names=("cell",), **options)
    assert "Mask R-CNN on images of 32 pixels" in told(detector) and "1: cell" in told(detector)


def grids(plan: MaskPlan) -> list[ElementTree.Element]:
    return ElementTree.fromstring(f"<div>{plan._repr_html_()}</div>").findall(".//svg")


def cells(svg: ElementTree.Element) -> dict[str, int]:
    """How many cells have each colour."""
    count = {}
    for path in svg.findall("path"):
        if colour := path.get("fill"):
            count[colour] = sum(int(part.split("h")[1].split("v")[0]) for part in path.get("d", "").split("M")[1:])
    return count


def test_a_mask_is_drawn_on_its_grid():
    hidden = torch.tensor([[False, True, True, False, True, True]])
    plan = MaskPlan(visible=torch.tensor([[0, 3]]), predicted=torch.tensor([[1, 2, 4]]), hidden=hidden, grid=(2, 3))
    assert plan.roles() == [["visible", "predicted", "predicted", "visible", "predicted", "left out"]]
    (svg,) = grids(plan)
    assert svg.get("viewBox") == "0 0 3 2"
    assert {path.get("fill"): path.get("d") for path in svg.findall("path") if path.get("fill")} == {
        "#e7d9b0": "M0 0h1v1h-1zM0 1h1v1h-1z",
        "#2f5d8a": "M1 0h2v1h-2zM1 1h1v1h-1z",
        "#9aa0a6": "M2 1h1v1h-1z",
    }
    assert svg.get("aria-label") == "Mask of sample 1: 2 visible, 3 predicted, 1 left out"
    text = told(plan)
    assert "66.7% of the tokens" in text and "6 (2x3)" in text


@pytest.mark.parametrize("kind", ["random", "block", "grid", "noise", "regular", "inverse_block", "multi_block"])
def test_what_a_model_masks_is_on_its_grid_whatever_the_mask(kind):
    model = model_of(mask=kind)
    plan = model.plan(torch.zeros(10, 3, 32, 32))
    assert plan.grid == (8, 8) == plan.take([0]).grid == plan.predict_all().grid == plan.to(torch.device("cpu")).grid
    assert len(grids(plan)) == 8 and "10, the first 8 are drawn" in told(plan)
    assert cells(grids(plan)[0])["#e7d9b0"] == plan.visible.shape[1]
    assert model(torch.zeros(1, 3, 32, 32)).plan.grid == (8, 8)
    assert model.plan(torch.zeros(1, 3, 32, 32), mask=torch.eye(8)).grid == (8, 8)


def test_masks_without_a_grid_over_more_axes_and_of_many_tokens_are_shown():
    plan = model_of().plan(torch.zeros(1, 3, 32, 32))
    assert grids(replace(plan, grid=None))[0].get("viewBox") == "0 0 64 1"
    assert grids(replace(plan, grid=(4, 4, 4)))[0].get("viewBox") == "0 0 4 16"
    many = torch.arange(40_000).unsqueeze(0)
    large = MaskPlan(visible=many[:, :100], predicted=many[:, 100:], hidden=(many >= 100), grid=(200, 200))
    assert grids(large) == [] and "40,000" in told(large)


def test_an_evaluation_tells_numbers_baselines_and_verdict():
    record = Evaluation(
        protocol="knn", model=EVIL, weights=None, data={"source": EVIL, "classes": 10}, options={}, seed=0,
        result={"cls": {"top1": 0.5}, "many": {str(number): number for number in range(50)}}, chance=0.1, majority=0.2,
        verdict={"text": "Better than raw pixels."}, near_copies=None, pictures={}, classifier=None, seconds=1.5,
        hardware={}, versions={}, finished_at="",
    )  # fmt: skip
    text = told(record)
    assert (
        "cls / top1" in text
        and "0.5" in text
        and "11 numbers, in `result`" in text
        and "51 numbers" in text
        and "Better than raw pixels." in text
    )
    assert "<details><summary>" in record._repr_html_()
    assert "<details open>" in replace(record, result={"top1": 0.5})._repr_html_()
    assert "chance" in text and "chance" not in told(replace(record, chance=None, majority=None, verdict=None))


def test_predictions_show_the_first_images_and_their_best_classes():
    predictions = mae.Predictions(
        names=tuple(f"{EVIL}{number}.png" for number in range(30)), class_names=("cat", "dog"),
        probabilities=torch.tensor([[0.25, 0.75]]).expand(30, 2), unreadable={"x": "y"},
    )  # fmt: skip
    text = told(predictions)
    assert "Predictions of 30 images, the first 12, 1 unreadable" in text and "dog 75.0%" in text and "2." in text
    assert "J11.png" in text and "J12.png" not in text


def test_a_study_shows_its_answer_and_numbers():
    runs = tuple(
        RunResult(variant=name, seed=seed, folder=Path("r"), numbers={"knn": 0.5 + gain + seed / 100}, commands=())
        for name, gain in (("a", 0.0), (EVIL, 0.2)) for seed in range(3)
    )  # fmt: skip
    metric = Metric(name="knn", title="k-NN accuracy", kind="share", better="higher")
    variants = tuple(Variant(name=name, what="", options={}) for name in ("a", EVIL))
    result = StudyResult(
        name="ratio", question="Which?", reference="a", variants=variants, seeds=(0, 1, 2), metrics=(metric,),
        runs=runs, facts=(), notes=(),
    )  # fmt: skip
    outcome = StudyOutcome(folder=Path("s"), finished=True, report=Path("s/report.html"), result=result)
    text = told(outcome)
    assert "6 of 6 runs done" in text and "Which?" in text and "better" in text and "k-NN accuracy" in text
    empty = told(replace(outcome, report=None, result=replace(result, runs=())))
    assert "0 of 6 runs done" in empty and "none yet" in empty
