"""What the files of a run tell of it while it goes, when it stands still and when it is over."""

import json
import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from test_reference_curves import DEMO, curve

from mae import records
from mae.errors import MAEError, UsageError
from mae.pretraining import resolve as resolve_config
from mae.pretraining.watch import status as watch
from mae.pretraining.watch.status import read_state
from mae.recipes import reference
from mae.report.html.watch import describe
from mae.training.lock import HOLDER
from mae.training.run_folder import RunFolder

WRITTEN = 1_000_000.0
BASELINES = {"zero": 0.99, "mean_of_visible": 0.8}


def row(step: int, seconds: float, loss: float = 0.5, **changes) -> dict:
    """A row of losses; 32 images a step."""
    return {
        "step": step,
        "samples": 32 * step,
        "lr": 1e-3,
        "loss": loss + 1.0,
        "terms": {"reconstruction": loss, "uniformity": 1.0},
        "grad_norm": 0.5,
        "images_per_second": 64.0,
        "data_wait": 0.125,
        "seconds": seconds,
        **changes,
    }


ROWS = [
    {"step": 0, "baselines": BASELINES},
    {"step": 0, "samples": 0, "evaluation": {"effective_rank": 2.0}},
    row(10, 25.0, 0.9),  # 20 s of looking, then half a second a step
    row(20, 30.0, 0.7),
    {"step": 20, "samples": 640, "warning": {"name": "loss_spike", "text": "it rose"}},
    row(30, 37.0, 0.6, grad_norm=None),
    {"step": 30, "samples": 960, "evaluation": {"effective_rank": 8.0, "held_out": 0.65}},
]
SUMMARY = {
    "steps": 130,
    "loss": 1.25,
    "terms": {"reconstruction": 0.25, "uniformity": 1.0},
    "baselines": {"zero": 0.5},
    "images_per_second": 100.0,
}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """The folder of a run of 130 steps that has done 30, written at a known time."""
    folder = RunFolder(tmp_path / "run")
    config = DEMO.override({"steps": 130, "out": folder.root})
    folder.begin(config.to_json(), {"images": 2048, "fingerprint": "f" * 16})
    write(folder, ROWS)
    return folder


def write(folder: RunFolder, rows: list[dict], tail: str = "") -> None:
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    for path in (folder.root, *folder.root.rglob("*")):
        os.utime(path, (WRITTEN, WRITTEN))


def test_a_live_run(run):
    for step in (0, 30, 9):
        Image.new("RGB", (4, 4)).save(run.panel(step))
    write(run, ROWS)
    state = read_state(run.root, now=WRITTEN + 5)
    assert (state.status, state.step, state.total_steps) == ("live", 30, 130)
    assert state.loss is not None and state.newest is not None
    assert (list(state.loss.x), list(state.loss.y)) == ([320, 640, 960], [0.9, 0.7, 0.6])
    assert (state.newest.loss, state.newest.lr, state.newest.grad_norm, state.newest.seconds) == (1.6, 1e-3, None, 37)
    assert state.newest.terms == {"reconstruction": 0.6, "uniformity": 1.0} and state.reconstruction == 0.6
    assert state.baselines == BASELINES
    assert [(look.step, look.numbers) for look in state.looks] == [
        (0, {"effective_rank": 2.0}), (30, {"effective_rank": 8.0, "held_out": 0.65})
    ]  # fmt: skip
    assert [(warned.step, warned.name, warned.text) for warned in state.warnings] == [(20, "loss_spike", "it rose")]
    assert state.panel == run.panel(30)
    assert dict(state.facts)["images"] == "2,048 of builtin:photos"


def test_the_model_is_told_by_its_sizes_which_options_may_have_changed(run):
    config = DEMO.override({"steps": 130, "out": run.root, "embed_dim": 48, "depth": 2})
    run.config.write_text(json.dumps(config.to_json()))
    assert dict(read_state(run.root, now=WRITTEN).facts)["model"] == f"{config.model}: 48 wide, 2 blocks"


def test_the_time_left_is_the_pace_of_the_rows_less_the_silence(run):
    # 12 s for the 20 steps between the first row and the last: 100 steps take 60 s, 5 s of them have gone by.
    assert read_state(run.root, now=WRITTEN + 5).seconds_left == pytest.approx(55)
    assert read_state(run.root, now=WRITTEN + 90).seconds_left == 0
    write(run, ROWS[:3])  # one row: 64 images a second, and what came before the first step left out
    assert read_state(run.root, now=WRITTEN).seconds_left == pytest.approx(120 * 32 / 64)
    write(run, ROWS[:2])
    assert read_state(run.root, now=WRITTEN).seconds_left is None


def test_the_pace_is_that_of_the_last_rows(run):
    slow = [row(step, 100.0 * step) for step in range(1, 11)]
    fast = [row(10 + step, 1000.0 + step) for step in range(1, 21)]
    write(run, [*slow, *fast])
    assert read_state(run.root, now=WRITTEN).seconds_left == pytest.approx(100)


def test_a_run_that_has_been_silent_for_long_is_stopped(run):
    # The longest pause, 25 s, was that before the first row: four times that is nothing unusual.
    assert read_state(run.root, now=WRITTEN + 99).status == "live"
    state = read_state(run.root, now=WRITTEN + 101)
    assert (state.status, state.seconds_left, state.written_at) == ("stopped", None, WRITTEN)
    write(run, [row(step, 1.0 * step) for step in range(1, 5)])
    assert read_state(run.root, now=WRITTEN + 59).status == "live"
    assert read_state(run.root, now=WRITTEN + 61).status == "stopped"
    write(run, [])
    assert read_state(run.root, now=WRITTEN + 599).status == "live"
    assert read_state(run.root, now=WRITTEN + 601).status == "stopped"


def test_a_run_that_was_killed_on_this_machine_is_stopped_at_once(run):
    code = (
        "import sys, time; from pathlib import Path; from mae.training.lock import only_writer\n"
        "with only_writer(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, run.root], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert read_state(run.root, now=WRITTEN + 1).status == "live"
        holder.kill()
    assert read_state(run.root, now=WRITTEN + 1).status == "stopped"
    who = run.root / HOLDER
    who.write_text(json.dumps({**json.loads(who.read_text()), "host": "another"}))
    assert read_state(run.root, now=WRITTEN + 1).status == "live", "its locks may not be seen from here"


def test_a_new_checkpoint_or_picture_is_a_sign_of_life(run):
    for folder in (run.panels, run.checkpoints):
        write(run, ROWS)
        folder.mkdir(exist_ok=True)
        os.utime(folder, (WRITTEN + 1000, WRITTEN + 1000))
        assert read_state(run.root, now=WRITTEN + 1001).status == "live"


def test_a_finished_run_is_told_by_its_summary(run):
    records.write_json(run.summary, SUMMARY)
    write(run, ROWS)
    state = read_state(run.root, now=WRITTEN + 10_000)
    assert (state.status, state.seconds_left, state.baselines) == ("finished", None, {"zero": 0.5})
    assert state.newest is not None
    assert (state.newest.loss, state.reconstruction, state.newest.images_per_second) == (1.25, 0.25, 100.0)


def test_a_line_that_is_being_written_disturbs_nothing(run):
    whole = read_state(run.root, now=WRITTEN)
    for cut in range(1, 60, 7):
        write(run, ROWS, tail=json.dumps(row(40, 40.0))[:cut])
        assert read_state(run.root, now=WRITTEN) == whole


def test_baselines_are_optional_and_the_last_ones_count(run):
    write(run, ROWS[1:])
    assert read_state(run.root, now=WRITTEN).baselines == {}
    write(run, [ROWS[0], {"step": 0, "baselines": {"zero": 0.5}}])
    assert read_state(run.root, now=WRITTEN).baselines == {"zero": 0.5}


def test_only_warnings_so_far(run):
    write(run, [{"step": 7, "samples": 224, "warning": {"name": "step skipped", "text": "1 step was skipped"}}])
    state = read_state(run.root, now=WRITTEN)
    assert (state.step, state.newest, state.loss) == (7, None, None)


@pytest.mark.parametrize(
    "wrong",
    [{"loss": 1.0}, {**row(1, 1.0), "terms": 3}, {**row(1, 1.0), "loss": "x"}, {"step": 1, "warning": "w"}, 5],
)
def test_what_no_run_writes_is_said(run, wrong):
    write(run, [*ROWS, wrong])
    with pytest.raises(MAEError, match=r"metrics\.jsonl.* holds what no run writes"):
        read_state(run.root, now=WRITTEN)


def test_a_folder_without_a_run_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(UsageError, match="holds no run .* give the folder of a run"):
            read_state(folder, now=0.0)


def test_the_length_is_what_the_run_told_else_as_it_reckons(run):
    def total(rows: list[dict], **length) -> int:
        config = DEMO.override({"batch_size": 32, "out": run.root, **length})
        records.write_json(run.config, config.to_json())
        write(run, rows)
        return read_state(run.root, now=WRITTEN).total_steps

    assert total(ROWS, steps=7) == 7
    for epochs in (0.001, 2.0, 3.7):
        config = DEMO.override({"batch_size": 32, "epochs": epochs})
        assert total(ROWS, epochs=epochs) == resolve_config.total_steps(config, 2048)
    assert total([{"step": 0, "baselines": BASELINES, "total_steps": 777}, *ROWS], epochs=2.0) == 777
    records.write_json(run.summary, {**SUMMARY, "steps": 55})
    assert total(ROWS, epochs=2.0) == 55


def test_a_configuration_without_a_length_is_said(run):
    told = DEMO.to_json()
    records.write_json(run.config, {**told, "optim": {**told["optim"], "steps": None}})
    with pytest.raises(UsageError, match="names no length"):
        read_state(run.root, now=WRITTEN)


def test_files_are_called_as_the_run_calls_them():
    folder = RunFolder(Path("r"))
    names = (watch._CONFIG, watch._DATA, watch._METRICS, watch._SUMMARY, watch._PANELS, watch._CHECKPOINTS)
    own = (folder.config, folder.data, folder.metrics, folder.summary, folder.panels, folder.checkpoints)
    assert [Path("r") / name for name in names] == list(own)
    assert folder.panel(3).match("panels/step-*.png")


@pytest.mark.pictures
def test_a_real_run_is_read(pretrain):
    result = pretrain()
    state = read_state(result.folder, now=time.time())
    assert (state.status, state.step, state.total_steps) == ("finished", 6, 6)
    assert state.newest is not None and state.newest.loss == result.summary["loss"]
    assert state.baselines == result.summary["baselines"] and state.panel == result.folder / result.summary["panel"]


def test_the_reference_of_the_recipe_stands_beside_the_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "_CURVES", tmp_path)
    assert read_state(run.root, now=WRITTEN).reference is None
    stored = curve(samples=(100, 32 * 130, 48_000))
    records.write_json(tmp_path / "demo.json", records.to_json(stored))
    state = read_state(run.root, now=WRITTEN)
    assert state.reference is not None
    assert list(state.reference.x) == [100, 32 * 130]  # as far as this run will go
    assert "2 seeds" in state.reference_note and "two cores" in state.reference_note
    assert "steps 130 (reference 1500)" in state.reference_note


@pytest.fixture
def clock(run, monkeypatch):
    """Sleeping is instant, and after each sleep the next of these happens to the run."""
    events: list = []

    def sleep(seconds: float) -> None:
        assert 0 < seconds <= 2
        event = events.pop(0)
        if event is KeyboardInterrupt:
            raise KeyboardInterrupt
        event()

    monkeypatch.setattr(watch.time, "sleep", sleep)
    return events


def refreshed(page: Path) -> bool:
    return 'http-equiv="refresh"' in page.read_text()


def test_the_page_is_written_until_the_run_is_finished(run, clock, tmp_path):
    page, text, live = tmp_path / "out" / "p.html", StringIO(), []
    clock += [
        lambda: live.append(refreshed(page)),
        lambda: records.write_json(run.summary, SUMMARY),
    ]
    write(run, ROWS)
    watch.watch(run.root, page=page, every=1, once=False, console=Console(file=text, width=200))
    assert live == [True] and not clock
    assert not refreshed(page) and "run: finished" in page.read_text()
    assert text.getvalue().count("finished, 130 steps") == 1 and f"Page in {page}" in text.getvalue()


def test_a_page_of_something_else_is_not_replaced(run, tmp_path):
    page = tmp_path / "p.html"
    page.write_text("precious")
    write(run, ROWS)
    with pytest.raises(UsageError, match="p.html, a file that is there already and no page of mae"):
        watch.watch(run.root, page=page, every=1, once=True, console=Console(file=StringIO()))
    assert page.read_text() == "precious"
    page.unlink()
    for _ in range(2):  # its own it writes anew
        watch.watch(run.root, page=page, every=1, once=True, console=Console(file=StringIO()))


def test_ctrl_c_ends_the_watching_and_the_pages_refreshing(run, clock, tmp_path):
    page = tmp_path / "p.html"
    clock += [lambda: None, KeyboardInterrupt]
    watch.watch(run.root, page=page, every=5, once=False, console=Console(file=StringIO(), width=200))
    assert not refreshed(page) and not clock


def test_in_a_terminal_the_view_is_shown_anew(run, clock):
    text = StringIO()
    clock += [lambda: write(run, [*ROWS, row(40, 40.0)]), KeyboardInterrupt]
    console = Console(file=text, width=200, force_terminal=True, color_system=None)
    watch.watch(run.root, page=None, every=10, once=False, console=console)
    assert "step 30 of 130" in text.getvalue() and "step 40 of 130" in text.getvalue()


def test_a_clock_that_was_set_anew_does_not_mislead(run, clock, monkeypatch):
    """While it is watched a run is live as long as its files change, whatever the time of day says."""
    hours, ticks, now = 36_000.0, [0.0], [WRITTEN + 5]
    monkeypatch.setattr(watch.time, "monotonic", lambda: ticks[0])
    monkeypatch.setattr(watch.time, "time", lambda: now[0])
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(watch, "terminal_view", lambda state: seen.append((state.status, state.step)) or "")

    def later(*, jump: float, seconds: float, step: int = 0) -> None:
        now[0] += jump
        ticks[0] += seconds
        if step:
            write(run, [*ROWS, row(step, 40.0)])

    clock += [
        lambda: later(jump=hours, seconds=2, step=40),
        lambda: later(jump=-3 * hours, seconds=2),
        lambda: later(jump=hours, seconds=2, step=50),
        lambda: later(jump=0, seconds=101),
        KeyboardInterrupt,
    ]
    console = Console(file=StringIO(), width=200, force_terminal=True)
    watch.watch(run.root, page=None, every=10, once=False, console=console)
    assert seen == [("live", 30), ("live", 40), ("live", 40), ("live", 50), ("stopped", 50)]
    state = read_state(run.root, now=WRITTEN + hours, silent=3.0)
    assert (state.status, state.written_at) == ("live", WRITTEN + hours - 3)
    assert read_state(run.root, now=WRITTEN, silent=101.0).status == "stopped"


def test_times_that_are_still_to_come_tell_nothing_while_others_do(run):
    os.utime(run.config, (WRITTEN + 36_000, WRITTEN + 36_000))  # begun before the clock was set back
    assert read_state(run.root, now=WRITTEN + 5).status == "live"
    assert read_state(run.root, now=WRITTEN + 200).status == "stopped"
    write(run, ROWS)
    assert read_state(run.root, now=WRITTEN - 36_000).status == "live"  # all of them: it cannot be known


@pytest.mark.parametrize(("terminal", "once"), [(False, False), (False, True), (True, True)])
def test_once_or_without_a_terminal_the_state_is_shown_once(run, clock, terminal, once):
    text = StringIO()  # the clock has no event: to sleep would fail
    console = Console(file=text, width=200, force_terminal=terminal, color_system=None)
    watch.watch(run.root, page=None, every=10, once=once, console=console)
    assert text.getvalue().count("step 30 of 130") == 1


def test_nothing_in_the_run_changes(run, tmp_path):
    before = {path: (path.stat().st_mtime, path.is_dir() or path.read_bytes()) for path in run.root.rglob("*")}
    console = Console(file=StringIO(), width=200)
    watch.watch(run.root, page=tmp_path / "p.html", every=10, once=True, console=console)
    after = {path: (path.stat().st_mtime, path.is_dir() or path.read_bytes()) for path in run.root.rglob("*")}
    assert after == before


def test_a_wrong_page_or_pace_is_refused(run, tmp_path):
    for page, every, told in ((run.config, 10, "--page is .*config.json; expected .*html"), (None, 0, "--every is 0")):
        with pytest.raises(UsageError, match=told):
            watch.watch(run.root, page=page, every=every, once=True, console=Console(file=StringIO()))
    assert json.loads(run.config.read_text())["recipe"] == "demo"


def test_watching_does_not_load_torch(run, tmp_path):
    code = (
        "import sys\n"
        "from mae.cli.watch import run\n"
        f"run([{str(run.root)!r}, '--once', '--page', {str(tmp_path / 'p.html')!r}])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


TRAINING = {
    "name": "finetune",
    "note": "12 images",
    "total_steps": 30,
    "batch_size": 32,
    "rate": 1e-3,
    "precision": "fp32",
    "seed": 0,
    "epochs": 3.0,
}


def test_a_training_with_labels(tmp_path):
    folder = tmp_path / "1234abcd"
    folder.mkdir()
    (folder / "training.json").write_text(json.dumps(TRAINING))
    losses = [row(step, 5.0 * step, 0.9 - step / 100, terms={"cross_entropy": 0.9 - step / 100}) for step in (10, 20)]
    rows = [*losses, {"step": 20, "samples": 640, "evaluation": {"accuracy": 0.5}}]

    def state(rows, after):
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        for path in folder.iterdir():
            os.utime(path, (WRITTEN, WRITTEN))
        return read_state(folder, now=WRITTEN + after)

    live = state(rows, 10)
    assert live.status == "live" and live.step == 20 and live.total_steps == 30 and live.seconds_left == 40
    assert live.loss.y == [0.8, 0.7] and live.loss_name == "cross entropy"
    assert [look.numbers for look in live.looks] == [{"accuracy": 0.5}]
    stopped = state(rows, 1000)
    assert stopped.status == "stopped" and "resume with: the same command" in dict(describe(stopped))["state"]
    # All steps are done, and the last evaluation is not.
    last = row(30, 150.0, 0.6, terms={"cross_entropy": 0.6})
    assert state([*rows, last], 10).status == "live"
    over = state([*rows, last, {"step": 30, "samples": 960, "evaluation": {"accuracy": 0.75}}], 1000)
    assert over.status == "finished"
    watch.watch(folder, page=tmp_path / "a.html", every=1, once=True, console=Console(file=StringIO()))
    text = (tmp_path / "a.html").read_text()
    assert "12 images" in text and "mae pretrain" not in text and "accuracy" in text
    (folder / "training.json").write_text(json.dumps({**TRAINING, "total_steps": 0}))
    with pytest.raises(UsageError, match=r"training.json: total_steps is 0; expected 1 or more"):
        read_state(folder, now=WRITTEN)
