"""Label efficiency: the parts of each share, what is trained on them, and the table, curve and page."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_task import evaluator, make_task, small_model, striped

from mae.errors import UsageError
from mae.evaluation.common import attentive_training
from mae.evaluation.common.label_shares import draw_shares
from mae.evaluation.common.share_of_labels import read_share
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.protocol import ProtocolResult
from mae.evaluation.protocols.finetune import Finetune
from mae.evaluation.protocols.labels import Labels

FAST: dict[str, Any] = {"steps": 4, "batch_size": 16}


@pytest.mark.parametrize("seed", [0, 7])
def test_parts_are_nested_and_hold_each_class_by_its_share(seed: int):
    labels = torch.from_numpy(np.random.default_rng(seed).choice(4, size=500, p=(0.6, 0.3, 0.098, 0.002)))
    fractions = [0.01, 0.1, 0.25, 1.0]
    parts = draw_shares(labels, fractions, seed=seed)
    for fraction, rows in zip(fractions, parts, strict=True):
        assert rows.tolist() == sorted(set(rows.tolist()))
        for number in labels.unique().tolist():
            have = int((labels == number).sum())
            wanted = max(1, int(fraction * have + 0.5))
            assert int((labels[rows] == number).sum()) == wanted
    for smaller, larger in zip(parts, parts[1:], strict=False):
        assert set(smaller.tolist()) <= set(larger.tolist())
    assert len(parts[-1]) == 500
    others = draw_shares(labels, fractions, seed=seed + 1)
    assert parts[1].tolist() != others[1].tolist()


@pytest.mark.parametrize(
    ("share", "value"), [("1%", 0.01), ("10 %", 0.1), ("0.5", 0.5), (1.0, 1.0), ("100%", 1.0), ("0.1%", 0.001)]
)
def test_shares_are_read(share: float | str, value: float):
    assert read_share(share) == pytest.approx(value)


@pytest.mark.parametrize("share", ["", "many", "0%", "-1%", "101%", "nan", "inf", "2"])
def test_what_is_no_share_is_refused(share: str):
    with pytest.raises(UsageError, match="is not a share of the labels; expected such as 1% or 0.01"):
        Labels(shares=(share,))


def test_a_percentage_without_its_sign_is_guessed_at():
    with pytest.raises(UsageError, match="did you mean 10%"):
        read_share("10")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": ()}, "expected one or more different ones"),
        ({"shares": ("10%", "0.1")}, "expected one or more different ones"),
        ({"steps": 0}, "steps is 0; expected 1 or more"),
        ({"base_lr": float("inf")}, "base_lr is inf"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        Labels(**options)


def task_of(folder: Path, *, shuffled: bool = False) -> LabelledTask:
    images, labels = striped(300, seed=0)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(5)) if shuffled else torch.arange(300)
    return make_task(folder, small_model(), train=(images, labels[order]), test=striped(150, seed=1))


@pytest.mark.slow
def test_more_labels_help_where_there_is_something_to_learn(tmp_path: Path):
    task = task_of(tmp_path / "true")
    numbers = Labels(shares=("10%", "100%"), steps=60).run(task).numbers
    few, all_ = numbers["10 %"], numbers["100 %"]
    assert 29 <= few["images"] <= 31 and all_["images"] == 300  # each class is rounded by itself
    assert all_["linear probe"]["top1"] > max(task.majority() + 0.15, few["linear probe"]["top1"])
    noise = Labels(shares=("100%",), steps=60).run(task_of(tmp_path / "noise", shuffled=True)).numbers["100 %"]
    spread = 4 * (0.25 / 150) ** 0.5
    assert all(noise[name]["top1"] < task.majority() + spread for name in ("linear probe", "fine-tuning"))


def test_a_part_has_its_own_rows_and_the_same_test_images(tmp_path: Path):
    task = task_of(tmp_path)
    rows = draw_shares(task.labels("train"), [0.1], seed=0)[0]
    part = task.with_training_rows(rows)
    assert torch.equal(part.labels("train"), task.labels("train")[rows])
    torch.testing.assert_close(part.features("train")["mean"], task.features("train")["mean"][rows], rtol=0, atol=1e-5)
    assert torch.equal(part.features("test")["mean"], task.features("test")["mean"])
    assert torch.equal(part.images("train").get(0), task.images("train").get(int(rows[0])))


def test_an_attentive_probe_has_no_fewer_steps_than_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    images, labels = striped(270, seed=0)  # two batches, but one without the tenth that is held out
    task = make_task(tmp_path, small_model(), train=(images, labels), test=striped(20, seed=1))
    result = ProtocolResult(numbers={}, header=(), rows=(), ranking=torch.zeros(20, 3, dtype=torch.int64))
    monkeypatch.setattr(Finetune, "run", lambda self, task: result)
    steps, step = Counter[float](), attentive_training._Runner.step

    def counted(runner: Any, *batch: torch.Tensor) -> None:
        steps[runner.rate] += 1
        step(runner, *batch)

    monkeypatch.setattr(attentive_training._Runner, "step", counted)
    Labels(shares=("100%",), steps=70).run(task)
    assert set(steps.values()) == {70}


def test_the_record_holds_every_way_at_every_share_and_a_page_shows_them(tmp_path: Path):
    for part, count, seed in (("train", 100, 0), ("test", 40, 1)):
        images, labels = striped(count, seed=seed)
        for number, (pixels, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            folder = tmp_path / "labelled" / part / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[..., 0]).save(folder / f"{number}.png")
    out = tmp_path / "out"
    record = evaluator(small_model(), tmp_path / "labelled", out).run(Labels(shares=("1%", "20%"), **FAST))
    result = record.result
    assert list(result) == ["1 %", "20 %"] and result["1 %"]["images"] == 3 and 18 <= result["20 %"]["images"] <= 22
    ways = {"linear probe", "attentive probe", "fine-tuning", "from scratch"}
    for share in result.values():
        assert ways >= set(share) - {"images"} >= {"fine-tuning", "from scratch"}
    for name in ways:
        of = result["20 %"][name]
        assert of["low"] <= of["top1"] <= of["high"] and of["top5"] == 1.0
    assert record.verdict is not None and "from scratch" in record.verdict["text"]
    written = json.loads((out / "evaluation" / "labels.json").read_text())
    assert written["result"] == json.loads(json.dumps(result))
    with Image.open(out / "evaluation" / record.pictures["curve"]) as curve:
        assert curve.format == "PNG"
    page = (out / "evaluation" / "labels.html").read_text()
    assert "20 %, linear probe" in page and str(record.verdict["text"])[:30] in page


def test_a_share_that_is_another_one_here_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="give shares further apart"):
        Labels(shares=("0.1%", "0.2%"), **FAST).run(task_of(tmp_path))
