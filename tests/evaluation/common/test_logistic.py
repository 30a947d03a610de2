"""The fit against scikit-learn's, and the choice of its penalty, which must never see what it is judged by later."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from mae.errors import MAEError, UsageError
from mae.evaluation.common import logistic
from mae.evaluation.common.hold_out import hold_out
from mae.evaluation.common.logistic import Logistic, choose_penalty, fit_logistic

CPU = torch.device("cpu")
fit = partial(fit_logistic, num_classes=4, device=CPU)


def classes(num: int, seed: int, dim: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Four overlapping, unequally large classes of correlated features with different scales and offsets."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.Generator().manual_seed(99)
    centres, mix = torch.randn(4, dim, generator=shared), torch.randn(dim, dim, generator=shared)
    labels = torch.multinomial(torch.tensor([0.4, 0.3, 0.2, 0.1]), num, replacement=True, generator=generator)
    features = (0.6 * centres[labels] + torch.randn(num, dim, generator=generator)) @ mix
    return features * torch.logspace(-3, 3, dim) + torch.logspace(2, -2, dim), labels


def objective(weight: np.ndarray, bias: np.ndarray, z: np.ndarray, labels: np.ndarray, penalty: float) -> float:
    logits = z @ weight.T + bias
    logits = logits - logits.max(1, keepdims=True)
    right = logits[range(len(z)), labels] - np.log(np.exp(logits).sum(1))
    return float(-right.mean() + penalty / 2 * (weight**2).sum())


@pytest.mark.parametrize("penalty", [1.0, 1e-2, 1e-4, 1e-6])
def test_logistic_matches_sklearn(penalty, monkeypatch):
    monkeypatch.setattr(logistic, "_CHUNK", 130)
    (features, labels), (test, _) = classes(600, 1), classes(200, 2)
    found = fit(features, labels, penalty=penalty)
    scaler = StandardScaler().fit(features.double())
    oracle = LogisticRegression(C=1 / (penalty * 600), tol=1e-8, max_iter=10000)
    z = scaler.transform(features.double())
    oracle.fit(z, labels)
    expected = oracle.predict_proba(scaler.transform(test.double()))
    assert np.abs(found.logits(test).softmax(1).numpy() - expected).max() < 1e-3
    own = ((features.double() - found.mean) / found.std).numpy()  # its mean is float32: the bias makes up for that
    ours = objective(found.weight.numpy(), found.bias.numpy(), own, labels.numpy(), penalty)
    assert ours == pytest.approx(objective(oracle.coef_, oracle.intercept_, z, labels.numpy(), penalty), rel=1e-5)
    assert found.converged and found.penalty == penalty


@pytest.mark.parametrize("penalty", [1.0, 1e-2])
def test_fewer_samples_than_features_have_the_same_minimum(penalty: float):
    (features, labels), (test, _) = classes(60, 1, dim=200), classes(50, 2, dim=200)
    found = fit(features, labels, penalty=penalty)
    scaler = StandardScaler().fit(features.double())
    z = scaler.transform(features.double())
    oracle = LogisticRegression(C=1 / (penalty * 60), tol=1e-10, max_iter=10000).fit(z, labels)
    expected = oracle.predict_proba(scaler.transform(test.double()))
    assert np.abs(found.logits(test).softmax(1).numpy() - expected).max() < 3e-3
    assert found.weight.numpy() == pytest.approx(oracle.coef_, abs=1e-3)
    assert found.converged


def test_axes_are_those_of_the_covariance_in_either_shape():
    for num, dim in ((30, 8), (8, 30)):
        features, _ = classes(num, 1, dim=dim)
        standard = logistic._Standard(features, CPU)
        axes, z = standard.axes, ((features - standard.mean) / standard.std).double()
        assert axes.shape == (dim, 8) and torch.allclose(axes.T @ axes, torch.eye(8).double(), atol=1e-6)
        assert torch.allclose((axes * standard.variances) @ axes.T, z.T @ z / num, atol=1e-5)


def test_the_usual_penalties_go_from_one_to_next_to_none():
    assert logistic.PENALTIES == pytest.approx([10.0**-k for k in range(9)], rel=1e-12)
    features, labels = classes(80, 1)
    assert choose_penalty(features, labels, num_classes=4, seed=0, device=CPU).penalties == logistic.PENALTIES


def test_features_standardised_again_give_the_same_fit(monkeypatch):
    monkeypatch.setattr(logistic, "_CHUNK", 70)
    features, labels = classes(300, 1)
    choose = partial(choose_penalty, features, labels, num_classes=4, seed=0, device=CPU)
    kept = choose()
    monkeypatch.setattr(logistic, "_KEPT_BYTES", 0)
    again = choose()
    assert kept.accuracies == again.accuracies and torch.equal(kept.best.weight, again.best.weight)
    assert torch.equal(kept.best.bias, again.best.bias)


def test_sums_of_many_samples_are_exact_in_float64(monkeypatch):
    """The loss of many chunks, of which a float32 sum would lose the last digits."""
    monkeypatch.setattr(logistic, "_CHUNK", 3)
    features, labels = classes(3000, 1)
    samples = logistic._Samples(
        features=features,
        labels=labels,
        rows=torch.arange(3000),
        num_classes=4,
        standard=logistic._Standard(features, CPU),
    )
    weight = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)).double()
    loss, to_weight, to_bias = samples._cross_entropy(weight, torch.zeros(4, dtype=torch.float64))
    z = torch.cat(samples._kept)
    terms = [(part @ weight.float().T).log_softmax(1).double() for part in z.split(3)]
    shares, right = torch.cat(terms).exp(), torch.nn.functional.one_hot(labels, 4)
    assert loss == pytest.approx(-float((torch.cat(terms) * right).sum()) / 3000, rel=2e-8)
    assert to_weight.dtype == to_bias.dtype == torch.float64 and to_bias.shape == (4,)
    assert torch.allclose(to_weight, (shares - right).T @ z.double() / 3000, rtol=0, atol=2e-8)
    assert torch.allclose(to_bias, (shares - right).mean(0), rtol=0, atol=2e-8)


def test_class_absent_from_training_is_never_predicted():
    features, labels = classes(300, 1)
    found = fit(features[labels < 3], labels[labels < 3], penalty=1e-2)
    assert found.logits(features).shape == (300, 4)
    assert (found.logits(features).argmax(1) < 3).all()


def test_constant_features_count_as_nothing(monkeypatch):
    monkeypatch.setattr(logistic, "_CHUNK", 11)  # many sums to round
    features, labels = classes(300, 1)
    padded = torch.cat([features, torch.full((300, 1), 0.1), torch.full((300, 1), 1e6 / 7)], dim=1)
    found, expected = fit(padded, labels, penalty=1e-3), fit(features, labels, penalty=1e-3)
    assert found.std[-2:].tolist() == [0, 0] and (expected.std > 0).all()
    padded[:, -2:] = 5  # even where they differ later
    assert torch.allclose(found.logits(padded).softmax(1), expected.logits(features).softmax(1), atol=1e-3)


def test_features_too_small_for_float32_count_as_nothing():
    """Units that weight decay has taken away give such values; one of them made all scores not finite."""
    features, labels = classes(300, 1)
    tiny = torch.cat([features, 1e-40 * features[:, :1], 1e-39 * features[:, -1:]], dim=1)
    found, expected = fit(tiny, labels, penalty=1e-3), fit(features, labels, penalty=1e-3)
    assert found.std[-2:].tolist() == [0, 0]
    assert torch.allclose(found.logits(tiny).softmax(1), expected.logits(features).softmax(1), atol=1e-3)
    assert all(part.isfinite().all() for part in found.folded())


def test_moments_are_those_of_the_rows_alone(monkeypatch):
    monkeypatch.setattr(logistic, "_CHUNK", 7)
    features, labels = classes(100, 1)
    features += 1e4 * features.std(0)
    found = fit(features, labels, penalty=1.0)
    assert torch.allclose(found.mean, features.double().mean(0).float(), rtol=1e-6)
    assert torch.allclose(found.std, features.double().std(0, correction=0).float(), rtol=1e-5)


def test_giving_up_is_reported(monkeypatch):
    monkeypatch.setattr(logistic, "_MAX_ITERATIONS", 3)
    features, labels = classes(600, 1)
    assert not fit(features, labels, penalty=1e-4).converged
    choice = choose_penalty(features, labels, num_classes=4, seed=0, device=CPU)
    assert not choice.best.converged and not all(choice.converged)


def test_features_in_a_file_and_in_half_precision(tmp_path):
    features, labels = classes(300, 1)
    features = features / features.abs().amax(0)
    np.save(tmp_path / "features.npy", features.half().numpy())
    mapped = torch.from_numpy(np.load(tmp_path / "features.npy", mmap_mode="c"))
    found, expected = fit(mapped, labels, penalty=1e-2), fit(features.half().float(), labels, penalty=1e-2)
    assert torch.equal(found.weight, expected.weight)
    assert torch.equal(found.logits(mapped), expected.logits(features.half().float()))
    assert found.logits(mapped[:0]).shape == (0, 4)


def test_the_penalty_is_chosen_on_held_out_samples(monkeypatch):
    # Few samples of many useless features: too weak a penalty learns them by heart.
    monkeypatch.setattr(logistic, "_ROUGH", logistic._FINE)  # as far as the fits that it is compared with
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (400,), generator=generator)
    features = torch.randn(400, 330, generator=generator)
    features[:, :5] += 0.8 * labels.unsqueeze(1)
    monkeypatch.setattr(logistic, "PENALTIES", (10.0, 0.1, 1e-3, 1e-5))
    choice = choose_penalty(features, labels, num_classes=2, seed=0, device=CPU)
    assert choice.penalties == (10.0, 0.1, 1e-3, 1e-5)
    fitted, held = hold_out(labels, seed=0)
    for penalty, accuracy, converged in zip(choice.penalties, choice.accuracies, choice.converged, strict=True):
        alone = fit_logistic(features[fitted], labels[fitted], num_classes=2, penalty=penalty, device=CPU)
        share = float((alone.logits(features[held]).argmax(1) == labels[held]).double().mean())
        assert accuracy == pytest.approx(share, abs=0.026) and converged  # a sample at the border may change sides
    best = choice.accuracies.index(max(choice.accuracies))
    assert choice.best.penalty == choice.penalties[best]
    assert choice.accuracies[best] > choice.accuracies[-1]
    assert choice.at_end == (best in (0, 3))
    refit = fit_logistic(features, labels, num_classes=2, penalty=choice.best.penalty, device=CPU)
    assert torch.allclose(refit.weight, choice.best.weight, atol=1e-3)


@pytest.mark.parametrize(("dim", "seed"), [(64, 0), (64, 1), (256, 0), (256, 1)])
def test_rough_fits_choose_as_fine_ones_do(dim, seed, monkeypatch):
    """Digits through a random layer, with noise: the best penalty lies inside the grid."""
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(seed)
    features = torch.tanh(images.float() / 64 @ torch.randn(64, dim, generator=generator))
    features += 0.3 * torch.randn(len(images), dim, generator=generator)
    calls: list[None] = []
    cross_entropy = logistic._Samples._cross_entropy

    def counted(*args):
        calls.append(None)
        return cross_entropy(*args)

    monkeypatch.setattr(logistic._Samples, "_cross_entropy", counted)
    choose = partial(choose_penalty, features, labels, num_classes=10, seed=seed, device=CPU)
    rough, needed = choose(), len(calls)
    monkeypatch.setattr(logistic, "_ROUGH", logistic._FINE)
    fine = choose()
    assert needed < 0.7 * (len(calls) - needed)
    assert rough.best.penalty == fine.best.penalty and not fine.at_end
    best = fine.accuracies.index(max(fine.accuracies))
    assert rough.accuracies[best] == pytest.approx(fine.accuracies[best], abs=0.01)
    assert fine.accuracies[best] > fine.accuracies[0] and fine.accuracies[best] > fine.accuracies[-1]
    found, expected = (choice.best.logits(features).softmax(1) for choice in (rough, fine))
    assert torch.allclose(found, expected, atol=5e-3)


def test_of_equal_penalties_the_strongest_is_best_and_the_end_is_told():
    labels = torch.arange(100) % 2
    features = labels.unsqueeze(1).float() + 0.01 * torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    choice = choose_penalty(features, labels, num_classes=2, seed=0, device=CPU)
    assert set(choice.accuracies) == {1.0} and choice.best.penalty == 1.0 and choice.at_end


def test_what_cannot_be_fitted_is_refused():
    features, labels = classes(60, 1)
    with pytest.raises(UsageError, match="expected 0 to 1"):
        fit_logistic(features, labels, num_classes=2, penalty=1.0, device=CPU)
    with pytest.raises(UsageError, match="no training samples"):
        fit(features[:0], labels[:0], penalty=1.0)
    with pytest.raises(UsageError, match="two samples"):
        choose_penalty(features[:4], torch.arange(4), num_classes=4, seed=0, device=CPU)
    with pytest.raises(MAEError, match="not finite"):
        fit(features * torch.nan, labels, penalty=1.0)


def test_the_classifier_is_what_its_numbers_say():
    by_hand = Logistic(
        weight=torch.tensor([[1.0, 2.0], [0.0, -1.0]]),
        bias=torch.tensor([0.5, 0.0]),
        mean=torch.tensor([1.0, 7.0]),
        std=torch.tensor([2.0, 0.0]),
        penalty=1.0,
        converged=True,
    )
    assert by_hand.logits(torch.tensor([[5.0, 9.0]])).tolist() == [[2.5, 0.0]]
