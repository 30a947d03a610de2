"""The learned pooling on a task: what only some tokens hold, its baselines, and the classifier that is left of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_task import by_function, hidden_signal, make_task, small_model, striped
from torch import Tensor
from torch.testing import assert_close

from mae.errors import UsageError
from mae.evaluation.common.attentive_training import train_attentive
from mae.evaluation.common.metrics import top_k_accuracy
from mae.evaluation.common.pooled_head import PooledHead
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.protocols.pooled_probe import PooledProbe
from mae.models.classifier import PooledProbe as Stored

FAST: dict[str, Any] = {"epochs": 20, "batch_size": 64, "rates": (1e-2,)}
CHANCE = 0.25 + 4 * (0.25 * 0.75 / 400) ** 0.5  # four standard errors


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


def test_it_finds_the_one_token_that_knows_and_nothing_in_shuffled_labels(tmp_path: Path):
    task = token_bench(tmp_path / "true")
    result = PooledProbe(**FAST).run(task)
    found = result.numbers["this model"]
    assert found["learned"]["top1"] > 0.85 and found["mean"]["top1"] < CHANCE
    over = result.numbers["over_mean"]
    assert over["share"] == pytest.approx(found["learned"]["top1"] - found["mean"]["top1"]) and over["low"] > 0.4
    assert "The learned pooling is better than the mean under the same head by" in result.note
    assert result.ranking is not None and result.ranked_by == "learned" and result.classifier is None
    assert top_k_accuracy(result.ranking[:, :1], task.labels("test")) == found["learned"]["top1"]
    assert [row[0] for row in result.rows] == ["this model, learned", "this model, mean"] and not result.baselines
    guessed = PooledProbe(**FAST).run(token_bench(tmp_path / "shuffled", shuffled=True))
    assert all(of["top1"] < CHANCE for of in guessed.numbers["this model"].values())
    assert "not shown to differ from the mean" in guessed.note


def test_the_mean_stays_the_mean_and_the_learned_weights_find_the_token():
    (tokens, labels), (test, test_labels) = hidden_signal(900, 1), hidden_signal(400, 2)
    options: dict[str, Any] = {"num_classes": 4, "epochs": 20, "batch_size": 64, "rates": (1e-2,), "seed": 0}
    probes = []
    for learned in (True, False):
        probes.append(
            train_attentive(
                tokens,
                labels,
                test,
                make=lambda learned=learned, **sizes: PooledHead(**sizes, learned=learned),
                device=torch.device("cpu"),
                **options,
            ).probe
        )
    assert torch.equal(probes[1].pooling.score, torch.zeros(16)) and probes[0].pooling.score.abs().max() > 0.5
    stored = Stored(encoder=small_model().encoder, num_classes=4)
    stored.pooling, stored.head = type(stored.pooling)(16), torch.nn.Linear(16, 4)
    folded = probes[0].folded()
    stored.load_state_dict({**stored.state_dict(), **folded})
    with torch.no_grad():
        assert_close(stored.head(stored.pooling(test)), probes[0](test), rtol=1e-4, atol=1e-4)
        weights = stored.pooling.weights(test)
    marked = (test[:, :, 4] + test[range(400), :, test_labels]).argmax(dim=1)  # where mark and class were added
    assert (weights.argmax(dim=1) == marked).float().mean() > 0.6  # by chance 1 / 12
    assert weights[range(400), marked].mean() > 3 / 12


def test_a_model_stands_beside_random_weights_and_leaves_a_classifier(tmp_path: Path):
    task = make_task(tmp_path, small_model(), train=striped(60, seed=1), test=striped(40, seed=2))
    result = PooledProbe(epochs=3, batch_size=20).run(task)
    assert list(result.numbers) == ["this model", "random weights", "over_mean", "curve"]
    assert [row[0] for row in result.rows] == ["this model, learned", "this model, mean", "random weights, learned"]
    assert list(result.baselines) == ["random weights"] and len(result.baselines["random weights"]) == 40
    assert isinstance(result.classifier, Stored) and len(result.curve) == 3
    two = PooledProbe(epochs=1, rates=(1e-3, 1e-2), baselines=False).run(task)
    assert "may lie beyond: this model, learned; this model, mean." in two.note
    alone = PooledProbe(epochs=3, batch_size=20, baselines=False).run(task)
    assert not alone.baselines and torch.equal(alone.ranking, result.ranking)  # type: ignore[arg-type]
    with torch.no_grad():
        features = result.classifier.encode(torch.randn(2, 1, 16, 16))
        weights = result.classifier.pooling.weights(features.patches)
        pooled = result.classifier.pooling(features.patches)
    assert_close(pooled, (weights.unsqueeze(2) * features.patches).sum(dim=1), rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match="epochs is 0; expected 1 or more"):
        PooledProbe(epochs=0)


def test_it_cannot_pool_what_has_no_patch_tokens(tmp_path: Path):
    function = by_function(lambda images: images.flatten(1), img_size=(16, 16))
    task = make_task(tmp_path, function, train=striped(30, seed=1), test=striped(20, seed=2))
    with pytest.raises(UsageError, match="function gives no patch tokens, only features; this protocol needs them"):
        PooledProbe().run(task)
