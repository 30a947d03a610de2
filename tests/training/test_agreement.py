"""What processes tell each other once a step; the other ones are played here, those of tests/pretraining are real."""

import signal

import pytest
import torch

from mae.training.agreement import Agreement, Word
from mae.training.distributed import World

CPU = torch.device("cpu")
FINITE = torch.tensor(True)


class Pair(World):
    """A world whose other process says the same thing each time."""

    said: list[float]

    def minimum(self, values: torch.Tensor) -> torch.Tensor:
        return torch.minimum(values, torch.tensor(self.said, dtype=values.dtype))


def pair(*said: float) -> Pair:
    world = Pair(size=2)
    object.__setattr__(world, "said", list(said))
    return world


def agreed(word: Word, *said: float) -> Word:
    agreement = Agreement(CPU, pair(*said))
    agreement.exchange(FINITE, word)
    return agreement.read()


def test_alone_a_process_hears_itself():
    agreement = Agreement(CPU, World())
    word = Word(stop=signal.SIGUSR1, save_due=True, saved=7, failed=True)
    assert agreement.exchange(~FINITE, word) == torch.tensor(False)
    assert agreement.read() == word


@pytest.mark.parametrize(("mine", "other"), [(True, 1.0), (True, 0.0), (False, 1.0)])
def test_a_step_is_finite_only_if_every_process_finds_it_so(mine: bool, other: float):
    agreement = Agreement(CPU, pair(other, 0, 0, 0, 0))
    assert bool(agreement.exchange(torch.tensor(mine), Word())) is (mine and other == 1.0)


def test_one_process_suffices_to_stop_save_or_fail_and_the_last_to_be_saved_counts():
    assert agreed(Word(saved=9), 1, 4, -2, -1, -1) == Word(stop=signal.SIGTERM, save_due=True, saved=4, failed=True)
    assert agreed(Word(saved=3, save_due=True), 1, 4, 0, 0, 0) == Word(save_due=True, saved=3)
    assert agreed(Word(failed=True), 1, -1, 0, 0, 0) == Word(saved=-1, failed=True)


@pytest.mark.parametrize(
    ("mine", "other", "together"),
    [
        (signal.SIGINT, 0, signal.SIGINT),
        (signal.SIGUSR1, 0, signal.SIGTERM),
        (signal.SIGTERM, -1, signal.SIGTERM),
        (signal.SIGINT, -2, signal.SIGTERM),
        (0, -1, signal.SIGINT),
    ],
)
def test_the_stronger_wish_to_stop_wins(mine: int, other: float, together: int):
    assert agreed(Word(stop=mine), 1, 0, other, 0, 0).stop == together


def test_a_late_answer_is_that_of_the_step_before():
    agreement = Agreement(CPU, pair(1, 99, 0, 0, 0), late=True)
    heard = []
    for step in range(4):
        agreement.exchange(FINITE, Word(saved=step, save_due=step == 1))
        heard.append((agreement.read().saved, agreement.read().save_due))
    assert heard == [(0, False), (0, False), (1, True), (2, False)]


def test_steps_are_told_exactly():
    """As float32 they would be rounded after 16 million."""
    assert agreed(Word(saved=2**31 + 1), 1, 2**40, 0, 0, 0).saved == 2**31 + 1
