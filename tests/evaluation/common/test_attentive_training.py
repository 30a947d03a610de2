"""The attentive probe: PyTorch's own attention on the same weights, and a signal that only attention finds."""

from functools import partial

import numpy as np
import pytest
import torch
from tiny_task import NUM_CLASSES, hidden_signal
from torch import nn

from mae.errors import MAEError, UsageError
from mae.evaluation.common.attentive_training import train_attentive
from mae.evaluation.common.logistic import fit_logistic
from mae.evaluation.common.metrics import top_k_accuracy
from mae.layers.attention_pooling import AttentionPooling

CPU = torch.device("cpu")

train = partial(
    train_attentive,
    make=AttentionPooling,
    num_classes=NUM_CLASSES,
    epochs=20,
    batch_size=64,
    seed=0,
    rates=(1e-2,),
    device=CPU,
)


@pytest.mark.parametrize(("num_heads", "training"), [(1, True), (4, True), (4, False)])
def test_pytorch_attention_agrees(num_heads, training):
    torch.manual_seed(0)
    probe = AttentionPooling(dim=16, num_heads=num_heads, num_classes=3).train(training)
    nn.init.normal_(probe.query)
    oracle = nn.MultiheadAttention(16, num_heads, bias=False, batch_first=True)
    norm = nn.BatchNorm1d(16, affine=False, eps=1e-6).train(training)
    with torch.no_grad():
        oracle.in_proj_weight.copy_(torch.cat([torch.eye(16), probe.key.weight, probe.value.weight]))
        oracle.out_proj.weight.copy_(torch.eye(16))
    tokens = 3 + 5 * torch.randn(5, 7, 16)
    normed = norm(tokens.transpose(1, 2)).transpose(1, 2)
    pooled, _ = oracle(probe.query.expand(5, 1, 16), normed, normed)
    expected = probe.head(pooled.squeeze(1))
    logits = probe(tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(probe.norm.running_var, norm.running_var)
    weights = [probe.query, probe.head.weight]
    found, wanted = (torch.autograd.grad(x.square().sum(), weights, retain_graph=True) for x in (logits, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def linear_on_the_mean(tokens, labels, test) -> torch.Tensor:
    fit = fit_logistic(tokens.mean(1), labels, num_classes=NUM_CLASSES, penalty=1e-2, device=CPU)
    return fit.logits(test.mean(1)).argsort(dim=1, descending=True)


def test_attention_finds_what_the_mean_has_lost():
    (tokens, labels), (test, test_labels) = hidden_signal(900, 1), hidden_signal(400, 2)
    result = train(tokens, labels, test)
    assert result.ranking.shape == (400, 4)
    assert top_k_accuracy(result.ranking[:, :1], test_labels) > 0.85
    assert max(result.accuracies) > 0.85
    chance = 0.25 + 4 * (0.25 * 0.75 / 400) ** 0.5  # four standard errors
    assert top_k_accuracy(linear_on_the_mean(tokens, labels, test)[:, :1], test_labels) < chance
    shuffled = labels[torch.randperm(900, generator=torch.Generator().manual_seed(3))]
    assert top_k_accuracy(train(tokens, shuffled, test).ranking[:, :1], test_labels) < chance
    assert top_k_accuracy(linear_on_the_mean(tokens, shuffled, test)[:, :1], test_labels) < chance


def test_the_best_rate_is_chosen_on_training_samples_and_the_course_is_told():
    (tokens, labels), (test, _) = hidden_signal(900, 1), hidden_signal(20, 2)
    told = []
    result = train(tokens, labels, test, rates=(1e-6, 1e-2), epochs=12, progress=lambda *steps: told.append(steps))
    assert result.best_rate == 1e-2 and result.accuracies[1] > result.accuracies[0] + 0.2
    assert result.at_end
    steps = 12 * 13  # 808 samples are fitted, at most 64 a batch
    assert told == [(step, steps) for step in range(1, steps + 1)]
    assert result.probe.norm.num_batches_tracked == steps and not result.probe.training  # judging leaves no trace
    assert [(point["epoch"], point["rate"]) for point in result.curve[:3]] == [(1, 1e-6), (1, 1e-2), (2, 1e-6)]
    assert len(result.curve) == 24 and result.curve[-1]["held_out_accuracy"] == result.accuracies[1]
    assert result.curve[-1]["loss"] < 0.5 * result.curve[1]["loss"]
    assert result.curve[0]["loss"] == pytest.approx(np.log(NUM_CLASSES), rel=0.2)
    alone = train(tokens, labels, test, rates=(1e-2,), epochs=12)  # probes side by side do not touch each other
    assert torch.equal(alone.ranking, result.ranking) and alone.accuracies == result.accuracies[1:]


def test_the_seed_decides_and_the_callers_generator_is_left_alone():
    (tokens, labels), (test, _) = hidden_signal(200, 1), hidden_signal(30, 2)
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    first = train(tokens, labels, test, epochs=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(12)
    again = train(tokens, labels, test, epochs=2)
    assert torch.equal(first.ranking, again.ranking) and first.curve == again.curve
    assert train(tokens, labels, test, epochs=2, seed=1).curve != first.curve


def test_tokens_in_a_file_and_in_half_precision(tmp_path):
    (tokens, labels), (test, _) = hidden_signal(200, 1), hidden_signal(30, 2)
    np.save(tmp_path / "tokens.npy", tokens.half().numpy())
    mapped = torch.from_numpy(np.load(tmp_path / "tokens.npy", mmap_mode="c"))
    found, expected = (train(given, labels, test.half(), epochs=2) for given in (mapped, tokens.half().float()))
    assert found.curve == expected.curve and torch.equal(found.ranking, expected.ranking)


def test_what_cannot_be_trained_is_refused():
    (tokens, labels), (test, _) = hidden_signal(60, 1), hidden_signal(5, 2)
    with pytest.raises(UsageError, match="does not divide"):
        AttentionPooling(dim=16, num_heads=3, num_classes=2)
    with pytest.raises(UsageError, match="rates"):
        train(tokens, labels, test, rates=())
    with pytest.raises(UsageError, match="epochs"):
        train(tokens, labels, test, epochs=0)
    with pytest.raises(UsageError, match="expected 0 to 2"):
        train(tokens, labels, test, num_classes=3)
    with pytest.raises(UsageError, match="no training samples"):
        train(tokens[:0], labels[:0], test)
    with pytest.raises(MAEError, match="not finite"):
        train(tokens * torch.nan, labels, test, epochs=1)
