"""Accuracy, confusions and the commonest class against scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.dummy import DummyClassifier
from sklearn.metrics import confusion_matrix as oracle_confusions
from sklearn.metrics import top_k_accuracy_score

from mae.errors import UsageError
from mae.evaluation.common.metrics import confusion_matrix, majority_share, top_k_accuracy


def test_scikit_learn_agrees_on_the_first_k():
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.rand(200, 7, generator=generator), torch.randint(7, (200,), generator=generator)
    for k in (1, 3, 5):
        found = top_k_accuracy(scores.topk(k).indices, labels)
        assert found == pytest.approx(top_k_accuracy_score(labels, scores, k=k, labels=range(7)), abs=1e-12)


def test_scikit_learn_agrees_on_confusions():
    generator = torch.Generator().manual_seed(1)
    predicted, labels = (torch.randint(high, (90,), generator=generator) for high in (4, 3))  # class 4 is never met
    found = confusion_matrix(predicted, labels, 5).to_dense()
    assert np.array_equal(found, oracle_confusions(labels, predicted, labels=range(5)))


def test_the_commonest_class_is_that_of_training():
    train, test = torch.tensor([2, 1, 2, 1, 0]), torch.tensor([1, 2, 2, 0])
    oracle = DummyClassifier(strategy="most_frequent").fit(np.zeros((5, 1)), train)
    assert majority_share(train, test, 3) == oracle.score(np.zeros((4, 1)), test) == 0.25


def test_no_test_samples_is_refused():
    none = torch.zeros(0, dtype=torch.long)
    with pytest.raises(UsageError, match="no test samples"):
        top_k_accuracy(none.reshape(0, 5), none)
    with pytest.raises(UsageError, match="no test samples"):
        majority_share(torch.tensor([0]), none, 1)
