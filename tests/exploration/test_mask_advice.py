"""What is advised follows from the numbers."""

from mae.evaluation.common.masked_guesses import MaskedGuesses
from mae.exploration.mask_advice import advise


def guesses(interpolation: float, model: float | None = 0.01) -> list[MaskedGuesses]:
    """Of a ratio that is not the model's everything is known; at its own the mean colour leaves 1."""
    other = MaskedGuesses(ratio=0.5, mean_colour=1.0, nearest_patch=1.0, interpolation=0.0, model=model)
    own = MaskedGuesses(ratio=0.75, mean_colour=1.0, nearest_patch=1.0, interpolation=interpolation, model=model)
    return [other, own]


def test_where_interpolation_knows_most_a_harder_mask_is_advised():
    text = advise(guesses(0.2), 0.75, length=10.0, side=4)
    assert "75%" in text and "explains 80%" in text and "larger patches or a higher ratio" in text
    text = advise(guesses(0.2), 0.75, length=3.0, side=4)
    assert "larger patches" not in text and "a higher ratio" in text
    assert "larger patches" not in advise(guesses(0.2), 0.75, length=None, side=4)


def test_where_it_knows_little_an_easier_one_is_advised():
    text = advise(guesses(0.95), 0.75, length=1.0, side=16)
    assert "explains 5%" in text and "smaller patches or a lower ratio" in text
    assert "smaller patches" not in advise(guesses(0.95), 0.75, length=20.0, side=16)
    assert "explains 0%" in advise(guesses(1.4), 0.75, length=1.0, side=16)


def test_between_them_nothing_is_advised_and_a_model_that_only_interpolates_is_told():
    assert "nothing here asks" in advise(guesses(0.7), 0.75, length=8.0, side=8)
    assert "more than smoothness" not in advise(guesses(0.7), 0.75, length=8.0, side=8)
    assert "more than smoothness" not in advise(guesses(0.7, model=None), 0.75, length=8.0, side=8)
    text = advise(guesses(0.7, model=0.8), 0.75, length=8.0, side=8)
    assert "0.8000, is not below interpolation's, 0.7000" in text
