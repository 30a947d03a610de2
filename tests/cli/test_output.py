"""What becomes of a command whose standard streams are closed, full or gone; each is a process of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mae.cli import main
from mae.cli.ending import cleaned_up
from mae.errors import Stopped

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")

_TALKS = """
import sys
from mae.cli.output import tolerant_output
with tolerant_output(needed=False):
    for number in range(3):
        print("x" * 20_000)
    sys.stderr.write("done\\n")
"""


def ended(shell: str, **variables: str) -> tuple[int, str]:
    """Exit code of `$MAE ...` or `$TALKS` in a shell's words, and what it told on standard error.

    Standard output is a pipe that nobody reads; what the shell redirects is not.
    """
    mae = f"{sys.executable} -m mae"
    environment = {**os.environ, "MAE": mae, "PYTHON": sys.executable, "TALKS": _TALKS, **variables}
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        found = subprocess.run(
            ["bash", "-c", shell], stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, timeout=100
        )
    return found.returncode, found.stderr


@pytest.mark.parametrize("words", ["list weights", "--help", "pretrain --help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_answer_whose_reader_is_gone_ends_quietly(words: str, unbuffered: str):
    assert ended(f"$MAE {words}", PYTHONUNBUFFERED=unbuffered) == (141, "")


@needs_full
@pytest.mark.parametrize("words", ["list weights", "--version", "pretrain --help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_answer_that_cannot_be_written_is_an_error(words: str, unbuffered: str):
    code, told = ended(f"$MAE {words} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (code, told) == (1, "mae: error: standard output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("list weights >&-", 0),
        ("--help >&- <&- 2>&-", 0),
        ("pretrain --help >&-", 0),
        ("bogus 2>&-", 2),
        ("list bogus >&-", 2),
        ("list bogus >&- 2>&-", 2),
    ],
)
def test_closed_streams_change_no_exit_code(words: str, code: int):
    found, told = ended(f"$MAE {words}")
    assert found == code and "Traceback" not in told


@needs_full
def test_an_error_that_cannot_be_told_keeps_its_code():
    assert ended("$MAE bogus 2> /dev/full") == (2, "")
    assert ended("$MAE bogus 2>&1") == (2, "")


@needs_full
def test_work_goes_on_without_its_reader():
    assert ended('$PYTHON -c "$TALKS"') == (0, "done\n")
    code, told = ended('$PYTHON -c "$TALKS" > /dev/full')
    assert code == 0
    assert told == (
        "mae: warning: standard output cannot be written: No space left on device; going on without it\ndone\n"
    )


def test_no_file_is_given_the_number_of_a_closed_stream():
    script = """
from mae.cli.output import tolerant_output
with tolerant_output(needed=False), open("/dev/null") as file:
    assert file.fileno() > 2
    print("nowhere")
"""
    for closed in (">&-", "<&-", ">&- <&-", ">&- <&- 2>&-"):
        assert ended(f'$PYTHON -c "$SCRIPT" {closed}', SCRIPT=script) == (0, "")


@pytest.mark.slow
def test_a_run_goes_on_without_its_reader(tmp_path: Path):
    """Whoever looks at its header alone must not end it."""
    words = "builtin:digits --model mae_vit_lesson_patch4 --img-size 8 --patch-size 2 --steps 2 --no-doctor"
    code, told = ended(f"$MAE pretrain {words} --out {tmp_path / 'run'}", OMP_NUM_THREADS="1")
    assert code == 0 and "error" not in told
    assert (tmp_path / "run" / "summary.json").is_file()


def test_streams_are_put_back():
    before = sys.stdout, sys.stderr, sys.stdin
    assert main(["--version"]) == 0
    assert (sys.stdout, sys.stderr, sys.stdin) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_every_command_ends_in_order(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("mae.cli.listing.run", lambda args: signal.raise_signal(number))
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert main(["list", "models"]) == 75
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err == f"mae: error: told to end by {number.name}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_is_half_written_is_cleaned_up_when_the_terminal_is_gone(number: signal.Signals):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(Stopped, match=f"told to end by {number.name}") as ended_by, cleaned_up():
            signal.raise_signal(number)
        assert ended_by.value.by == number and signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)  # as nohup has it
        with cleaned_up():
            signal.raise_signal(number)
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
