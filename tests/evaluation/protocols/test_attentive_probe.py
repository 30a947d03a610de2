"""The attentive probe on a task: tokens whose mean holds nothing of the class, and what is told of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_task import by_function, hidden_signal, make_task, small_model, striped
from torch import Tensor

from mae.errors import UsageError
from mae.evaluation.common.metrics import top_k_accuracy
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.protocols.attentive_probe import AttentiveProbe
from mae.evaluation.protocols.linear_probe import LinearProbe

FAST: dict[str, Any] = {"epochs": 20, "batch_size": 64, "rates": (1e-6, 1e-2)}


def tokens_of(images: Tensor) -> Mapping[str, Tensor]:
    return {"patches": images[:, 0], "mean": images[:, 0].mean(dim=1)}


def token_bench(folder: Path, *, shuffled: bool = False) -> LabelledTask:
    """Images whose rows are the tokens: one of twelve, at a random place, knows the class; their mean does not."""
    parts = []
    for num, seed in ((900, 1), (400, 2)):
        tokens, labels = hidden_signal(num, seed)
        parts.append((np.ascontiguousarray(tokens.unsqueeze(-1).numpy()), labels))
    if shuffled:
        order = torch.randperm(900, generator=torch.Generator().manual_seed(3))
        parts[0] = parts[0][0], parts[0][1][order]
    function = by_function(tokens_of, img_size=(12, 16))
    return make_task(folder, function, train=parts[0], test=parts[1], num_classes=4)


def test_it_finds_what_the_mean_has_lost_and_nothing_in_shuffled_labels(tmp_path: Path):
    task = token_bench(tmp_path / "true")
    result = AttentiveProbe(**FAST).run(task)
    linear = LinearProbe(baselines=False).run(task).numbers["this model"]["mean"]["top1"]
    chance = 0.25 + 4 * (0.25 * 0.75 / 400) ** 0.5  # four standard errors
    assert result.numbers["this model"]["patches"]["top1"] > 0.85 and linear < chance
    guessed = AttentiveProbe(**FAST).run(token_bench(tmp_path / "shuffled", shuffled=True))
    assert guessed.numbers["this model"]["patches"]["top1"] < chance
    assert result.numbers["rate"] == 1e-2 and result.numbers["rate_at_end_of_grid"]
    assert result.note.startswith("Learning rate 0.01, chosen") and "end of those tried" in result.note
    held_out = result.numbers["held_out"]
    assert list(held_out) == ["1e-06", "0.01"] and held_out["0.01"] > held_out["1e-06"] + 0.2
    assert len(result.numbers["curve"]) == 40 and [row["epoch"] for row in result.curve] == list(range(1, 21))
    assert result.curve[-1] == {"epoch": 20, "held_out": held_out["0.01"]}
    assert result.ranking is not None and result.header[2] == "top-4"
    assert top_k_accuracy(result.ranking[:, :1], task.labels("test")) == result.numbers["this model"]["patches"]["top1"]
    assert result.rows == (("this model, patch tokens", result.rows[0][1], "100.0%"),)


def test_one_rate_is_at_no_end_and_a_model_gives_its_patch_tokens(tmp_path: Path):
    task = make_task(tmp_path, small_model(), train=striped(40, seed=1), test=striped(20, seed=2))
    result = AttentiveProbe(epochs=1, rates=(1e-3,)).run(task)  # a batch of 256 of 40 images
    assert result.note == "Learning rate 0.001, chosen on a tenth of the training part."
    assert task.patches("train").shape == (40, 16, 24)


def test_test_labels_never_reach_the_choice(tmp_path: Path):
    train, test = striped(60, seed=1), striped(40, seed=2)
    found = []
    for name, labels in (("true", test[1]), ("others", (test[1] + 1) % 3)):
        task = make_task(tmp_path / name, small_model(), train=train, test=(test[0], labels))
        found.append(AttentiveProbe(epochs=3, rates=(1e-3, 1e-2)).run(task))
    assert found[0].ranking is not None and found[1].ranking is not None
    assert torch.equal(found[0].ranking, found[1].ranking)
    assert found[0].numbers.pop("this model") != found[1].numbers.pop("this model")  # type: ignore[attr-defined]
    assert found[0].numbers == found[1].numbers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs is 0; expected 1 or more"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"rates": ()}, r"rates is \[\]; expected learning rates above 0"),
        ({"rates": (1e-3, float("nan"))}, r"rates is \[0.001, nan\]"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        AttentiveProbe(**options)
