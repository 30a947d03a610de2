"""Pooling by one learned score: a slow loop, its start, its gradient, and what it must not depend on."""

import math

import torch
from torch.testing import assert_close

from mae.layers.score_pooling import ScorePooling

BATCH, TOKENS, DIM = 3, 49, 6


def made(*, zero: bool = False) -> tuple[ScorePooling, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pooling = ScorePooling(DIM).double()
    if not zero:
        with torch.no_grad():
            pooling.score.copy_(torch.randn(DIM, generator=generator))
    return pooling, 3 + 2 * torch.randn(BATCH, TOKENS, DIM, generator=generator, dtype=torch.float64)


def test_a_slow_loop_agrees():
    pooling, tokens = made()
    score = pooling.score.tolist()
    for image, pooled, weights in zip(tokens.tolist(), pooling(tokens), pooling.weights(tokens), strict=True):
        raw = [math.exp(sum(a * b for a, b in zip(token, score, strict=True))) for token in image]
        shares = [value / sum(raw) for value in raw]
        mixed = [sum(share * token[place] for share, token in zip(shares, image, strict=True)) for place in range(DIM)]
        assert_close(weights, torch.tensor(shares, dtype=torch.float64), rtol=1e-12, atol=1e-14)
        assert_close(pooled, torch.tensor(mixed, dtype=torch.float64), rtol=1e-12, atol=1e-13)


def test_it_starts_as_the_mean_and_has_one_number_a_feature():
    pooling, tokens = made(zero=True)
    assert torch.equal(ScorePooling(DIM).score, torch.zeros(DIM))
    assert sum(weight.numel() for weight in pooling.parameters()) == DIM
    assert_close(pooling(tokens), tokens.mean(dim=1), rtol=1e-14, atol=1e-14)
    assert torch.equal(pooling.weights(tokens), torch.full((BATCH, TOKENS), 1 / TOKENS, dtype=torch.float64))


def test_the_order_of_tokens_and_a_shift_of_all_scores_change_nothing():
    pooling, tokens = made()
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    assert_close(pooling(tokens[:, order]), pooling(tokens), rtol=1e-12, atol=1e-13)
    assert_close(pooling.weights(tokens[:, order]), pooling.weights(tokens)[:, order], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(pooling(tokens), tokens.mean(dim=1), atol=0.1)
    assert_close(pooling.weights(tokens + 7), pooling.weights(tokens), rtol=1e-10, atol=1e-14)


def test_gradients_are_those_of_finite_differences():
    pooling, tokens = made()

    def pooled(score: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(pooling, {"score": score}, (tokens,))

    few = tokens[:, :5].clone().requires_grad_()
    assert torch.autograd.gradcheck(pooled, (pooling.score.detach().clone().requires_grad_(), few))
