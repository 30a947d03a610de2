"""What a run's page says that it reached: by loss, and by features."""

import pytest

from mae.pretraining.watch.verdict import verdict

BASELINES = {"mean_colour": 1.0, "nearest_visible": 0.8}
HEALTHY = {"effective_rank": 30.0, "mean_cosine": 0.6}


def losses(*values: float) -> list[dict]:
    return [{"step": step, "terms": {"reconstruction": value}} for step, value in enumerate(values, start=1)]


def looks(*numbers: dict[str, float]) -> list[dict]:
    return [{"step": step, "evaluation": each} for step, each in enumerate(numbers)]


def test_the_loss_is_compared_with_the_best_trivial_predictor():
    told = verdict(losses(*[2.0] * 95, *[0.2, 0.4, 0.4, 0.4, 0.6]), [], BASELINES)
    assert told == "The reconstruction loss (0.4000) is 50% below the best trivial predictor (nearest visible, 0.8000)."


@pytest.mark.parametrize("last", [0.8, 0.9])
def test_a_loss_above_it_is_no_success(last: float):
    assert "has not learned to reconstruct yet" in verdict(losses(2.0, last), [], BASELINES)


def test_where_nothing_can_be_predicted_it_is_said():
    assert verdict(losses(0.1), [], {"mean_colour": 0.0}) == (
        "There was nothing to predict: the target is the same everywhere, as that of images of one colour."
    )


def test_features_are_compared_with_those_before_the_first_step():
    first, last = {"effective_rank": 4.0, "mean_cosine": 0.9, "knn": 0.5}, {**HEALTHY, "knn": 0.75}
    told = verdict([], looks(first, HEALTHY | {"knn": 0.6}, last), {})
    assert "have not collapsed" in told and "(effective rank 30, 4 before the first step)" in told
    assert told.endswith(" The k-NN accuracy is 75.0%, 50.0% before the first step.")


def test_collapse_is_said():
    told = verdict([], looks(HEALTHY, {"effective_rank": 4.238, "mean_cosine": 0.9905}), {})
    assert told == "The features hardly tell images apart."


def test_initial_weights_alone_say_nothing():
    assert verdict([], looks(HEALTHY), {}) == "" == verdict([], [], BASELINES)
