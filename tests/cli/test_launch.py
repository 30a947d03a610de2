"""What `--gpus` refuses and starts; that its processes train is in tests/pretraining/test_resume.py."""

import logging
import signal
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mae.cli import launch, main
from mae.errors import MAEError, UsageError


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        ("photos --gpus 2 --lr 1", "photos --lr 1"),
        ("--gpus=8 photos", "photos"),
        ("photos --lr 1 --gpus 3", "photos --lr 1"),
        ("photos --lr 1", "photos --lr 1"),
    ],
)
def test_the_processes_are_not_told_of_gpus(args: str, kept: str):
    assert launch.without_gpus(args.split()) == kept.split()


@pytest.mark.parametrize(
    ("gpus", "device", "there", "told"),
    [
        (0, "cpu", 0, "--gpus is 0; expected 1 or more"),
        (3, "cuda", 2, "--gpus is 3, and this machine has 2"),
        (2, "auto", 0, "PyTorch finds no GPU; give --device cpu"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, there: int, told: str
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with pytest.raises(UsageError, match=told):
        launch.check_number(gpus, device)
    launch.check_number(max(there, 1), "cpu" if there == 0 else device)


def test_under_torchrun_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "there")
    assert main("pretrain builtin:digits --gpus 2 --device cpu".split()) == 2
    assert "leave it out under torchrun" in capsys.readouterr().err


def failure(exitcode: int, timestamp: int) -> ProcessFailure:
    found = ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file="")
    found.timestamp = timestamp
    return found


def ended(monkeypatch: pytest.MonkeyPatch, ends: Exception | None) -> list[Any]:
    """Lets PyTorch's launcher end so; what it will have started."""
    started: list[Any] = []

    def elastic_launch(config: Any, program: str) -> Any:
        def start(*words: str) -> None:
            started.append((config.nproc_per_node, words))
            if ends is not None:
                raise ends

        return start

    monkeypatch.setattr(launch, "elastic_launch", elastic_launch)
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, "SIGTERM" if "SIGNALS" in name else "30")
    return started


def test_the_launcher_itself_says_nothing_of_a_mistake(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The process that found it has told it."""
    log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    caplog.set_level(logging.WARNING, logger=log.name)  # which is as it was afterwards
    ended(monkeypatch, ChildFailedError("", {0: failure(2, 1)}))
    assert launch.launch(2, device="cpu", command=["pretrain", "photos", "--gpus", "2"]) == 2
    assert not log.isEnabledFor(logging.ERROR)


def test_a_killed_process_is_named(monkeypatch: pytest.MonkeyPatch):
    """The last word was that of another process, which had been told to end because of it."""
    ended(monkeypatch, ChildFailedError("", {1: failure(-9, 1), 0: failure(75, 2)}))
    with pytest.raises(MAEError, match="rank 1 of 2 processes was killed by SIGKILL"):
        launch.launch(2, device="cpu", command=["pretrain", "photos", "--gpus", "2"])


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (None, 0),
        (ChildFailedError("", {0: failure(75, 1), 1: failure(1, 2)}), 75),
        (SignalException("", signal.SIGINT), 130),
        (SignalException("", signal.SIGTERM), 75),
    ],
)
def test_the_code_is_that_of_the_processes(monkeypatch: pytest.MonkeyPatch, ends: Exception | None, code: int):
    started = ended(monkeypatch, ends)
    assert launch.launch(2, device="cpu", command=["pretrain", "photos", "--gpus", "2"]) == code
    assert started == [(2, ("-P", "-m", "mae", "pretrain", "photos"))]  # nothing comes from the working folder


def test_a_signal_that_is_ignored_stays_so(monkeypatch: pytest.MonkeyPatch):
    """Under `nohup` the processes must outlive their terminal, and so must what started them."""
    handled: list[Any] = []
    monkeypatch.setattr(launch, "elastic_launch", lambda config, program: lambda *words: handled.append(config))
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_SIGNALS_TO_HANDLE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    wanted = {  # the tests themselves may run where a shell has the others ignored
        signal.SIGHUP: signal.SIG_IGN, signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL
    }  # fmt: skip
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        assert launch.launch(2, device="cpu", command=["pretrain", "photos"]) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert handled[0].signals_to_handle == "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"
