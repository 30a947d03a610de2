"""One process at a time at a run: a second one is told who is at it, readers are not kept out, and a kill frees it."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mae
from mae.cli import main
from mae.errors import UsageError
from mae.training import lock

_HOLD = """
import sys, time
from pathlib import Path
from mae.training.lock import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


class Holder:
    """Another process that holds a folder."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", _HOLD, folder], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "held\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def held(finished: Path) -> Iterator[Holder]:
    """Another process is at the finished run."""
    holder = Holder(finished)
    yield holder
    holder.kill()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE", 0.2)


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_resume_is_told_who_is_at_it(finished: Path, held: Holder, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(finished)
    assert main(["pretrain", "--out", str(finished), "--resume"]) == 2
    told, who = capsys.readouterr().err, f"pid {held.process.pid} on {socket.gethostname()}"
    assert told.startswith(f"mae: error: {finished} is being written by another process ({who}, since 20")
    assert told.endswith("; wait until it has ended, or stop it\n") and told.count("\n") == 1
    assert everything(finished) == before


def test_a_killed_holder_holds_nothing(finished: Path, held: Holder) -> None:
    held.kill()
    assert (finished / lock.HOLDER).exists()  # it had no time to take its name away
    assert mae.pretrain(out=finished, resume=True, quiet=True).finished
    assert not (finished / lock.HOLDER).exists()


@pytest.mark.parametrize("left", ["nothing", "no JSON", '{"pid": 5}', "[]"])
def test_a_holder_that_says_nothing_keeps_others_out_too(finished: Path, held: Holder, left: str) -> None:
    if left == "nothing":
        (finished / lock.HOLDER).unlink()
    else:
        (finished / lock.HOLDER).write_text(left)
    with pytest.raises(UsageError, match="is being written by another process; wait"):
        mae.pretrain(out=finished, resume=True, quiet=True)


def test_readers_are_not_kept_out(finished: Path, held: Holder, tmp_path: Path) -> None:
    out = ["--device", "cpu", "--out", str(tmp_path / "out")]
    assert main(["watch", str(finished), "--once"]) == 0
    assert main(["evaluate", "label_free", str(finished), "--data", "builtin:digits", *out]) == 0
    assert mae.load(finished).config is not None
    assert main(["replay", str(finished)]) == 2  # it holds no captured step, which is what is said


def test_a_new_run_in_a_folder_that_another_one_is_beginning(tiny: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    holder = Holder(tmp_path / "run")
    try:
        with pytest.raises(UsageError, match="is being written by another process"):
            mae.pretrain("builtin:digits", out=tmp_path / "run", **tiny)
    finally:
        holder.kill()
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {lock.LOCK, lock.HOLDER}
    assert mae.pretrain("builtin:digits", out=tmp_path / "run", **tiny).finished  # what it left stands in no one's way


def test_a_folder_without_a_run_gets_no_lock(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(UsageError, match="holds no run"):
        mae.pretrain(out=tmp_path / "mine", resume=True, quiet=True)
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.skipif(os.name == "nt", reason="no fork")
def test_a_worker_that_outlives_its_run_holds_nothing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader processes are forked, and notice the end of their run a second late."""
    monkeypatch.setattr(lock, "_PATIENCE", 5.0)
    code = _HOLD.replace("    print", "    import os; os.fork() or (time.sleep(2), os._exit(0))\n    print")
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    process.kill()
    process.wait()
    process.stdout.close()
    with lock.only_writer(tmp_path):
        pass


@pytest.mark.slow
def test_of_two_that_begin_at_once_one_goes_on(tmp_path: Path) -> None:
    sizes = "--model mae_vit_lesson_patch4 --img-size 8 --patch-size 2 --batch-size 32 --steps 8 --device cpu"
    run = ["builtin:digits", "--out", str(tmp_path / "run"), "--no-doctor", *sizes.split()]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "mae", "pretrain", *run],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate()[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2]
    told = said[codes.index(2)]
    assert "is being written by another process" in told or "holds another run" in told  # where it came very late
    assert mae.load(tmp_path / "run").config is not None
