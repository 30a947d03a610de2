"""The benchmark of the evaluators runs and judges both sides alike; what it measures is no test."""

import evaluation
from evaluation import measure_knn, measure_memory, measure_probe


def test_both_sides_are_equally_accurate():
    knn = measure_knn(400, 50, 16, 1)
    assert knn.our_accuracies == knn.peer_accuracies and len(knn.ours) == len(knn.peer) == 1
    probe = measure_probe(400, 50, 8, 1)
    assert abs(probe.our_accuracies[0] - probe.peer_accuracies[0]) < 0.1 and len(probe.ours) == len(probe.peer) == 1


def test_memory_is_measured_on_a_mapped_file(monkeypatch):
    """By a process each, of which one does."""
    monkeypatch.setattr(evaluation, "JOBS", ("knn",))
    found = measure_memory(2000, 8)
    assert [took["what"] for took in found] == ["knn"]
    assert all(took["peak"] >= took["before"] > 0 for took in found)
