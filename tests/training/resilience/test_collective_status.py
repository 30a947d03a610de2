"""The status exchange of processes; the other process is simulated here, those of tests/pretraining are real."""

import signal

import pytest
import torch

from mae.training.distributed import World
from mae.training.resilience.collective_status import StatusExchange, StepStatus

CPU = torch.device("cpu")
FINITE = torch.tensor(True)


class Pair(World):
    """A world whose other process sends the same values each time."""

    said: list[float]

    def minimum(self, values: torch.Tensor) -> torch.Tensor:
        return torch.minimum(values, torch.tensor(self.said, dtype=values.dtype))


def pair(*said: float) -> Pair:
    world = Pair(size=2)
    object.__setattr__(world, "said", list(said))
    return world


def agreed(status: StepStatus, *said: float) -> StepStatus:
    exchange = StatusExchange(CPU, pair(*said))
    exchange.exchange(FINITE, status)
    return exchange.read()


def test_single_process():
    exchange = StatusExchange(CPU, World())
    status = StepStatus(stop=signal.SIGUSR1, save_due=True, saved=7, failed=True)
    assert exchange.exchange(~FINITE, status) == torch.tensor(False)
    assert exchange.read() == status


@pytest.mark.parametrize(("mine", "other"), [(True, 1.0), (True, 0.0), (False, 1.0)])
def test_finite_in_every_process(mine: bool, other: float):
    exchange = StatusExchange(CPU, pair(other, 0, 0, 0, 0))
    assert bool(exchange.exchange(torch.tensor(mine), StepStatus())) is (mine and other == 1.0)


def test_combined_status():
    assert agreed(StepStatus(saved=9), 1, 4, -2, -1, -1) == StepStatus(
        stop=signal.SIGTERM, save_due=True, saved=4, failed=True
    )
    assert agreed(StepStatus(saved=3, save_due=True), 1, 4, 0, 0, 0) == StepStatus(save_due=True, saved=3)
    assert agreed(StepStatus(failed=True), 1, -1, 0, 0, 0) == StepStatus(saved=-1, failed=True)


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
def test_stronger_signal_wins(mine: int, other: float, together: int):
    assert agreed(StepStatus(stop=mine), 1, 0, other, 0, 0).stop == together


def test_late_result_is_of_the_step_before():
    exchange = StatusExchange(CPU, pair(1, 99, 0, 0, 0), late=True)
    read = []
    for step in range(4):
        exchange.exchange(FINITE, StepStatus(saved=step, save_due=step == 1))
        read.append((exchange.read().saved, exchange.read().save_due))
    assert read == [(0, False), (0, False), (1, True), (2, False)]


def test_steps_are_exact():
    """As float32 they would be rounded after 16 million."""
    assert agreed(StepStatus(saved=2**31 + 1), 1, 2**40, 0, 0, 0).saved == 2**31 + 1
