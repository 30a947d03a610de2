"""Colours of patch tokens against scikit-learn, and on tokens whose directions are known."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from mae.evaluation.common.patch_colours import fit_colours


def some_tokens(count: int = 300, width: int = 20, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator) @ torch.randn(width, width, generator=generator) + 5


@pytest.mark.parametrize(("count", "width"), [(300, 20), (40, 300)])
def test_components_signs_and_shares_are_those_of_scikit_learn(count: int, width: int, monkeypatch: pytest.MonkeyPatch):
    """Of fewer tokens than they are wide no matrix of their width squared is made: that of 200 bands takes hours."""
    tokens, eigh = some_tokens(count, width), torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: eigh(matrix) if len(matrix) <= count else 1 / 0)
    oracle = PCA(n_components=3, svd_solver="full").fit(tokens.double().numpy())
    found = fit_colours(tokens)
    # Its sign too makes the largest loading positive.
    np.testing.assert_allclose(found.components.numpy(), oracle.components_, atol=1e-9)
    np.testing.assert_allclose(found.explained, oracle.explained_variance_ratio_, rtol=1e-9)
    scores = oracle.transform(tokens.double().numpy())
    low, high = np.quantile(scores, (0.01, 0.99), axis=0)
    colours = found.paint(tokens)
    np.testing.assert_allclose(colours.numpy(), ((scores - low) / (high - low)).clip(0, 1), atol=1e-6)
    assert colours.min() == 0 and colours.max() == 1 and colours.dtype == torch.float32


def test_planted_directions_become_red_green_and_blue():
    """Along three axes tokens vary 9, 4 and 1 times as much as along none of the others."""
    steps = torch.linspace(-1, 1, 101)
    tokens = torch.zeros(3, 101, 6)
    for colour, (axis, size) in enumerate(((4, 9.0), (0, 4.0), (2, 1.0))):
        tokens[colour, :, axis] = size * steps
    found = fit_colours(tokens.flatten(0, 1))
    assert found.components.argmax(dim=1).tolist() == [4, 0, 2]
    colours = found.paint(tokens)
    assert colours.shape == (3, 101, 3)
    for colour in range(3):
        assert (colours[colour, :, colour].diff() >= 0).all() and colours[colour, [0, -1], colour].tolist() == [0, 1]
        others = [other for other in range(3) if other != colour]
        torch.testing.assert_close(colours[colour][:, others], torch.full((101, 2), 0.5), atol=1e-6, rtol=0)
    assert sum(found.explained) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(5))
def test_signs_do_not_depend_on_the_order_of_tokens_or_on_copies(seed: int):
    tokens = some_tokens(count=60, seed=seed)
    shuffled = tokens[torch.randperm(60, generator=torch.Generator().manual_seed(seed))]
    components = fit_colours(tokens).components
    for others in (shuffled, tokens.repeat(3, 1), tokens.repeat_interleave(2, dim=0)):
        torch.testing.assert_close(fit_colours(others).components, components, atol=1e-9, rtol=0)


@pytest.mark.parametrize("rounding", [1.0, 1 + 1e-9, 1 - 1e-9])
def test_of_equally_large_loadings_the_first_is_positive(rounding: float):
    steps = torch.randn(50, 1, generator=torch.Generator().manual_seed(0)).double()
    for sign in (1, -1):
        tokens = sign * steps * torch.tensor([[0.0, -1.0, rounding, 1.0]], dtype=torch.float64)
        assert fit_colours(tokens).components[0].sign().tolist()[1:] == [1.0, -1.0, -1.0]


@pytest.mark.parametrize("width", [1, 2, 5])
def test_what_does_not_vary_is_grey(width: int):
    flat = fit_colours(torch.full((40, width), 2.5).half())
    assert (flat.paint(torch.full((40, width), 2.5)) == 0.5).all() and sum(flat.explained) == 0
    tokens = torch.zeros(40, width)
    tokens[:, 0] = torch.arange(40)
    line = fit_colours(tokens)
    colours = line.paint(tokens)
    assert (colours[:, 1:] == 0.5).all() and colours[-1, 0] == 1 and line.explained[0] == pytest.approx(1)


def test_other_tokens_are_painted_in_the_same_basis():
    tokens = some_tokens()
    basis = fit_colours(tokens)
    assert torch.equal(basis.paint(tokens[7:9]), basis.paint(tokens)[7:9])
