"""CPU contention: what others take is told from what the run takes, and how threads wait is chosen by it."""

import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from mae import contention
from mae.contention import SPIN_COUNT, WAIT_POLICY, Contention, set_spin_count


def compute(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


def test_what_the_run_and_its_workers_take_is_their_own():
    before = contention._read_times()
    worker = multiprocessing.get_context("spawn").Process(target=compute, args=(0.3,))
    worker.start()
    compute(0.3)
    worker.join()
    after = contention._read_times()
    assert after.own - before.own >= 0.55  # the system's ticks round
    assert after.busy - before.busy >= 0.5


def test_a_process_of_others_shows():
    seen = Contention()
    # The run's own workers are its children; this one is adopted by the system.
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while time.process_time() < 1: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    time.sleep(1)
    assert seen.look() > 0.2  # however busy the machine is: others on it count as well


@pytest.mark.parametrize(("taken", "expected"), [(0.0, "5000"), (0.4, "5000"), (0.5, "0"), (3.0, "0")])
def test_threads_spin_less_where_others_take_cores(monkeypatch: pytest.MonkeyPatch, taken: float, expected: str):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(Contention, "look", lambda self: taken)
    for name in (SPIN_COUNT, WAIT_POLICY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(SPIN_COUNT, "")  # so that what is set is undone
    monkeypatch.delenv(SPIN_COUNT)
    set_spin_count()
    assert os.environ.get(SPIN_COUNT) == (expected if sys.platform == "linux" else None)


def shown_by(*args: str, **environment: str) -> str:
    """The environment that a command leaves, by name."""
    code = (
        "import os, sys; from mae.cli import main\n"
        "sys.stdout = open(os.devnull, 'w')\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        f"print(*(os.environ.get(name) for name in {(SPIN_COUNT, WAIT_POLICY)!r}), file=sys.__stdout__)"
    )
    plain = {name: value for name, value in os.environ.items() if name not in (SPIN_COUNT, WAIT_POLICY)}
    done = subprocess.run(
        [sys.executable, "-c", code, *args], env=plain | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is PyTorch's on Linux alone")
def test_commands_choose_before_pytorch_is_loaded_and_never_against_the_user():
    assert shown_by("plan", "missing") in ("5000 None", "0 None")
    assert shown_by("plan", "missing", **{SPIN_COUNT: "7"}) == "7 None"
    assert shown_by("plan", "missing", **{WAIT_POLICY: "active"}) == "None active"
    assert shown_by("pretrain", "--help") == shown_by("list", "recipes") == "None None"
