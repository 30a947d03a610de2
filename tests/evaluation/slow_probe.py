"""The official linear probe as plain loops, an oracle of the tests."""

import numpy as np


def slow_probe(
    weight: np.ndarray, batches: list[tuple[np.ndarray, np.ndarray]], rates: list[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Weights, biases, running mean and variance after a step a batch: batch norm, softmax, LARS, all in float64."""
    bias = np.zeros(len(weight))
    momenta = [np.zeros_like(weight), np.zeros_like(bias)]
    mean, variance = np.zeros(weight.shape[1]), np.ones(weight.shape[1])
    for (x, labels), rate in zip(batches, rates, strict=True):
        z = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-6)
        mean, variance = 0.9 * mean + 0.1 * x.mean(0), 0.9 * variance + 0.1 * x.var(0, ddof=1)
        logits = z @ weight.T + bias
        p = np.exp(logits - logits.max(1, keepdims=True))
        slope = (p / p.sum(1, keepdims=True) - np.eye(len(weight))[labels]) / len(x)
        to_weight = slope.T @ z
        to_weight *= 0.001 * np.linalg.norm(weight) / np.linalg.norm(to_weight)
        momenta = [0.9 * momenta[0] + to_weight, 0.9 * momenta[1] + slope.sum(0)]
        weight, bias = weight - rate * momenta[0], bias - rate * momenta[1]
    return weight, bias, mean, variance
