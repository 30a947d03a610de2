import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy import Recorder, make_trainer

from mae.errors import MAEError
from mae.training import checkpoint
from mae.training.saver import BackgroundWriter
from mae.training.settings import PeriodicTask


def test_writer_runs_one_function_at_a_time():
    writer, go, done = BackgroundWriter("checkpoint"), threading.Event(), []
    writer.begin(lambda: (go.wait(10), done.append(1)))
    assert writer.busy and done == []
    go.set()
    writer.begin(lambda: done.append(2))
    writer.wait()
    assert not writer.busy and done == [1, 2]


def test_writer_raises_a_failure_once():
    writer = BackgroundWriter("checkpoint")

    def fail() -> None:
        raise MAEError("no space")

    writer.begin(fail)
    with pytest.raises(MAEError, match="no space"):
        writer.wait()
    assert not writer.failed
    writer.begin(fail)
    with pytest.raises(MAEError, match="no space"):
        writer.begin(lambda: None)


def test_hanging_writer():
    writer, go = BackgroundWriter("checkpoint", timeout=0.05), threading.Event()
    writer.begin(go.wait)
    with pytest.raises(MAEError, match=r"a checkpoint was not written within 0.05 s: the file system hangs"):
        writer.wait()
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "checkpoint")
    go.set()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Checkpoints are written once this is set."""
    free, stage = threading.Event(), checkpoint.stage

    def slow(*args, **options):
        assert free.wait(30)
        stage(*args, **options)

    monkeypatch.setattr(checkpoint, "stage", slow)
    return free


@pytest.mark.parametrize(("fails_at", "told"), [(None, "picture"), (5, "something else")])
def test_a_task_is_finished_once_however_a_run_ends(tmp_path: Path, fails_at: int | None, told: str):
    """What a task left to a thread is done when `run` returns; a run that fails tells its own error."""
    trainer, finished = make_trainer(tmp_path, total_steps=8), []

    def look(step: int) -> None:
        if step == fails_at:
            raise RuntimeError("something else")

    def finish() -> None:
        finished.append(trainer.step)
        raise MAEError("the picture could not be written")

    task = PeriodicTask(every=1, run=look, finish=finish)
    with pytest.raises((MAEError, RuntimeError), match=told):
        trainer.run(tasks=[task])
    assert finished == [fails_at or 8]
    assert checkpoint.find_checkpoint(tmp_path) == tmp_path / f"step-{4 if fails_at else 8:08}"


def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_what_was(tmp_path: Path, slow_disk: threading.Event):
    reference = make_trainer(tmp_path / "through", total_steps=4, checkpoint_every=4)
    slow_disk.set()
    reference.run()
    slow_disk.clear()
    trainer, there = make_trainer(tmp_path / "slow", total_steps=8, checkpoint_every=4), []

    def look(step: int) -> None:
        there.append(len(list((tmp_path / "slow").glob("step-*"))) if step else 0)
        if step == 7:
            slow_disk.set()

    trainer.run(tasks=[PeriodicTask(every=1, run=look)])
    assert there[:8] == [0] * 8  # nothing counts before it is on the disk, and nobody waited for it
    stored = load_file(tmp_path / "slow" / "step-00000004" / checkpoint.MODEL)
    assert all(torch.equal(stored[name], weight) for name, weight in reference.module.state_dict().items())


def test_checkpoint_is_committed_as_soon_as_it_is_written(tmp_path: Path, slow_disk: threading.Event):
    there: dict[int, bool] = {}
    trainer = make_trainer(tmp_path, total_steps=400, checkpoint_every=2)

    def look(step: int) -> None:
        there[step] = (tmp_path / "step-00000002").exists()
        if step == 2:
            trainer.settings.__dict__["checkpoint_every"] = None
            slow_disk.set()
        elif step > 2:
            trainer._saver._writer._finished.wait(30)

    trainer.run(tasks=[PeriodicTask(every=1, run=look)])
    assert not there[2] and there[4]


def test_failed_write_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_trainer(tmp_path).run()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    trainer = make_trainer(tmp_path, total_steps=400)
    trainer.resume(tmp_path / "step-00000012")
    monkeypatch.setattr(checkpoint, "_flush", full)
    with pytest.raises(
        MAEError, match=r"step-00000016: .*No space left.*free space there and resume .*step-00000012, is untouch"
    ):
        trainer.run(tasks=[PeriodicTask(every=1, run=lambda step: trainer._saver._writer._finished.wait(30) and None)])
    assert trainer.step <= 18
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000008", "step-00000012"]


@pytest.mark.parametrize("lost", [1, 100])
def test_short_write_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int):
    save = checkpoint.save_file

    def short(tensors, path: Path, **options) -> None:
        save(tensors, path, **options)
        if "step-00000008" in str(path) and path.name == checkpoint.OPTIMIZER:
            path.write_bytes(path.read_bytes()[:-lost])

    monkeypatch.setattr(checkpoint, "save_file", short)
    with pytest.raises(MAEError, match=r"could not write .*step-00000008.*step-00000004, is untouched"):
        make_trainer(tmp_path).run()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_failing_run_keeps_the_pending_checkpoint(tmp_path: Path, slow_disk: threading.Event):
    trainer = make_trainer(tmp_path)

    def fail(step: int) -> None:
        if step == 5:
            slow_disk.set()
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        trainer.run(observers=[Recorder()], tasks=[PeriodicTask(every=1, run=fail)])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
