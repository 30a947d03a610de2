import hashlib
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scripts import run_script
from torch import nn
from torch.optim import AdamW, Optimizer
from toy import Follower, Line, Output, Recorder, adamw, lars, make_trainer, weights_after_each_step

from mae.errors import MAEError
from mae.training.checkpoint import find_checkpoint
from mae.training.engine import ask_before_steps
from mae.training.log import JsonLines, read_rows
from mae.training.resilience.collective_status import StepStatus
from mae.training.schedule import WarmupCosine
from mae.training.settings import PeriodicTask


def interrupt(step: int) -> None:
    """What Ctrl-C does, once training is under way."""
    if step:
        os.kill(os.getpid(), signal.SIGINT)


def scaled(module: nn.Module) -> Optimizer:
    named = list(module.named_parameters())
    return AdamW([{"params": named[:1], "lr_scale": 0.25}, {"params": named[1:]}], lr=0.0, fused=True)


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.module.parameters()])


def test_training_learns_and_reports_what_it_did(tmp_path: Path):
    recorder = Recorder()
    long = WarmupCosine(peak=0.05, floor=0.0, warmup_samples=16, total_samples=1600)
    trainer = make_trainer(tmp_path, total_steps=200, schedule=long)
    assert trainer.run(observers=[recorder])
    assert recorder.rows[-1]["loss"] < 0.05 * recorder.rows[0]["loss"]
    assert [row["step"] for row in recorder.rows] == list(range(1, 201))
    last = recorder.rows[-1]
    assert last["samples"] == 1600
    assert last["terms"] == {"square": last["loss"]}
    assert last["images_per_second"] > 0 and 0 <= last["data_wait"] <= 1


def test_rate_follows_the_schedule_of_samples(tmp_path: Path):
    recorder = Recorder()
    trainer = make_trainer(tmp_path)
    trainer.run(observers=[recorder])
    assert [row["lr"] for row in recorder.rows] == [trainer.settings.schedule(8 * step) for step in range(12)]
    assert recorder.rows[0]["lr"] == 0


def test_each_group_has_its_share_of_the_rate(tmp_path: Path):
    trainer, rates = make_trainer(tmp_path, optimizer=scaled), []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (rates.append([group["lr"] for group in trainer.optimizer.param_groups]), step())
    trainer.run()
    full = [trainer.settings.schedule(8 * step) for step in range(12)]
    assert rates == [[rate * 0.25, rate] for rate in full]


def test_a_row_holds_the_mean_of_the_steps_it_stands_for(tmp_path: Path):
    each, some = Recorder(), Recorder()
    make_trainer(tmp_path / "each").run(observers=[each])
    make_trainer(tmp_path / "some", log_every=5, checkpoint_every=None).run(observers=[some])
    assert [row["step"] for row in some.rows] == [1, 5, 10, 12]
    assert some.rows[0]["loss"] == each.rows[0]["loss"]
    assert some.rows[1]["loss"] == pytest.approx(sum(row["loss"] for row in each.rows[1:5]) / 4)


def test_accumulation_keeps_the_batch(tmp_path: Path):
    whole, parts = make_trainer(tmp_path / "whole"), make_trainer(tmp_path / "parts", accumulate=4)
    rows = Recorder(), Recorder()
    whole.run(observers=[rows[0]])
    parts.run(observers=[rows[1]])
    for name in ("loss", "grad_norm"):  # AdamW hides a gradient of the wrong size, its norm does not
        assert [row[name] for row in rows[1].rows] == pytest.approx([row[name] for row in rows[0].rows], rel=1e-4)
    torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [adamw, lars, scaled])
@pytest.mark.parametrize("stopped_at", [4, 8])
def test_resume_gives_the_same_weights_bit_for_bit(tmp_path: Path, stopped_at: int, optimizer):
    through = make_trainer(tmp_path / "through", optimizer=optimizer)
    through.run()
    first = make_trainer(tmp_path / "cut", optimizer=optimizer)
    first.run(tasks=[PeriodicTask(every=stopped_at + 1, run=interrupt)])
    newest = find_checkpoint(tmp_path / "cut")
    assert newest is not None and newest.name == f"step-{first.step:08d}" and first.step < 12
    second = make_trainer(tmp_path / "cut", optimizer=optimizer)
    with torch.no_grad():
        second.module.linear.weight.add_(1)  # what the checkpoint must overwrite
    second.resume(newest)
    assert second.run()
    assert torch.equal(weights(second), weights(through))


@pytest.mark.parametrize("optimizer", [adamw, lars])
def test_resume_restores_the_averages_too(tmp_path: Path, optimizer):
    """Weights alone are not enough: the averages carry the past."""
    through = make_trainer(tmp_path / "a", optimizer=optimizer)
    cut = make_trainer(tmp_path / "b", checkpoint_every=4, optimizer=optimizer)
    through.run()
    cut.run()
    forgetful = make_trainer(tmp_path / "b", optimizer=optimizer)
    forgetful.resume(tmp_path / "b" / "step-00000008")
    for average in (value for values in forgetful.optimizer.state.values() for value in values.values()):
        average.zero_()
    forgetful.run()
    assert not torch.equal(weights(forgetful), weights(through))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_saves_then_stops(tmp_path: Path, number: signal.Signals):
    before = signal.getsignal(number)
    trainer = make_trainer(tmp_path, checkpoint_every=None)
    recorder = Recorder()
    task = PeriodicTask(every=3, run=lambda step: os.kill(os.getpid(), number) if step == 3 else None)
    assert not trainer.run(observers=[recorder], tasks=[task])
    assert trainer.step == 4  # the step in which the signal is noticed is finished
    assert recorder.rows[-1]["step"] == 4
    assert find_checkpoint(tmp_path) == tmp_path / "step-00000004"
    assert signal.getsignal(number) is before
    assert trainer.stopped_by == number


def test_a_run_that_was_told_to_outlive_its_terminal_does(tmp_path: Path):
    """As `nohup` tells it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        trainer = make_trainer(tmp_path, checkpoint_every=None)
        assert trainer.run(tasks=[PeriodicTask(every=3, run=lambda step: signal.raise_signal(signal.SIGHUP))])
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_request_passed_on_twice_is_one(tmp_path: Path):
    """A scheduler tells every process, and the launcher tells its own ones again."""

    def twice(step: int) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)

    trainer = make_trainer(tmp_path, checkpoint_every=None)
    assert not trainer.run(tasks=[PeriodicTask(every=3, run=twice)])
    assert find_checkpoint(tmp_path) == tmp_path / "step-00000004"


def test_a_second_signal_acts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mae.training.resilience.signals._ONE_REQUEST_SECONDS", -1.0)
    trainer = make_trainer(tmp_path)

    def twice(step: int) -> None:
        if step == 3:
            # each is handled before the next is sent: two that wait together count as one
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    # A process started in the background is told to ignore Ctrl-C, and then so would the second one be.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.run(tasks=[PeriodicTask(every=3, run=twice)])
    finally:
        signal.signal(signal.SIGINT, before)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path):
    make_trainer(tmp_path, checkpoint_every=2).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000012"]


def names(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def test_every_so_many_steps_a_checkpoint_is_kept_for_good(tmp_path: Path):
    make_trainer(tmp_path, checkpoint_every=4, checkpoint_keep_every=3).run()
    assert names(tmp_path) == [3, 6, 9, 12]  # 4 and 8 have gone; each third step is saved though it is not a fourth


def test_a_step_is_kept_where_no_other_checkpoint_is_due(tmp_path: Path):
    make_trainer(tmp_path, checkpoint_every=None, checkpoint_keep_every=5).run()
    assert names(tmp_path) == [5, 10, 12]


def test_the_newest_two_are_kept_beside_those_for_good(tmp_path: Path):
    make_trainer(tmp_path, total_steps=11, checkpoint_every=1, checkpoint_keep_every=4).run()
    assert names(tmp_path) == [4, 8, 10, 11]


def test_a_run_that_goes_on_without_the_setting_deletes_none_of_them(tmp_path: Path):
    make_trainer(tmp_path, checkpoint_every=1, checkpoint_keep_every=3).run(
        tasks=[PeriodicTask(every=6, run=interrupt)]
    )
    trainer = make_trainer(tmp_path, checkpoint_every=1)
    trainer.resume(tmp_path / "step-00000007")
    trainer.run()
    assert names(tmp_path) == [3, 6, 11, 12]


@pytest.mark.parametrize("stopped_at", [3, 4])
def test_resume_is_exact_between_and_at_steps_kept_for_good(tmp_path: Path, stopped_at: int):
    through = make_trainer(tmp_path / "through", checkpoint_every=5)
    through.run()
    first = make_trainer(tmp_path / "cut", checkpoint_every=5, checkpoint_keep_every=2)
    first.run(tasks=[PeriodicTask(every=stopped_at, run=interrupt)])
    assert first.step < 12
    second = make_trainer(tmp_path / "cut", checkpoint_every=5, checkpoint_keep_every=2)
    second.resume(tmp_path / "cut" / "step-00000002")  # the one kept for good, not the newest
    assert second.run()
    assert torch.equal(weights(second), weights(through))
    assert names(tmp_path / "cut") == [2, 4, 6, 8, 10, 12]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path):
    make_trainer(tmp_path).run()
    with pytest.raises(MAEError, match="was written with name 'toy', this run has 'other'"):
        make_trainer(tmp_path, identity="other").resume(tmp_path / "step-00000012")


def test_tasks_run_first_between_and_last(tmp_path: Path):
    seen: list[int] = []
    make_trainer(tmp_path).run(tasks=[PeriodicTask(every=5, run=seen.append)])
    assert seen == [0, 5, 10, 12]


def test_clipping_bounds_the_step(tmp_path: Path):
    free, clipped = Recorder(), Recorder()
    make_trainer(tmp_path / "free", clip_grad=None).run(observers=[free])
    trainer = make_trainer(tmp_path / "clipped", clip_grad=1e-9)
    before = weights(trainer)
    trainer.run(observers=[clipped])
    assert clipped.rows[0]["grad_norm"] == free.rows[0]["grad_norm"] > 1
    assert not torch.equal(weights(trainer), before)  # AdamW's step does not shrink with the gradient, but moves


def test_speed_counts_the_wait_for_the_device_but_not_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever waits for the device first must not make the steps look faster than they were."""
    recorder = Recorder()
    trainer = make_trainer(tmp_path, checkpoint_every=None)
    read = trainer._nonfinite.read
    monkeypatch.setattr(trainer._nonfinite, "read", lambda: (time.sleep(0.02), read())[1])
    trainer.run(observers=[recorder], tasks=[PeriodicTask(every=1, run=lambda step: time.sleep(0.1))])
    rates = sorted(row["images_per_second"] for row in recorder.rows)
    assert 8 / 0.1 < rates[len(rates) // 2] < 8 / 0.02


@pytest.mark.parametrize("stopped_at", [7, 8])
def test_no_row_is_lost_or_changed_by_a_cut_between_rows(tmp_path: Path, stopped_at: int):
    """A checkpoint in the middle of a row's window ends that row; the next one begins where the resumed run does."""
    through, first, second = Recorder(), Recorder(), Recorder()
    make_trainer(tmp_path / "through", log_every=3, checkpoint_every=stopped_at).run(observers=[through])
    make_trainer(tmp_path / "cut", log_every=3, checkpoint_every=stopped_at).run(observers=[first])
    trainer = make_trainer(tmp_path / "cut", log_every=3, checkpoint_every=stopped_at)
    trainer.resume(tmp_path / "cut" / f"step-{stopped_at:08d}")
    trainer.run(observers=[second])
    rows = [row for row in first.rows if row["step"] <= stopped_at] + second.rows
    assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["loss"]) for row in through.rows]


def test_numbers_of_a_task_are_a_row_of_their_own(tmp_path: Path):
    recorder = Recorder()
    tasks = [
        PeriodicTask(every=5, run=lambda step: {"knn": step / 10}),
        PeriodicTask(every=5, run=lambda step: None),
    ]
    make_trainer(tmp_path).run(observers=[recorder], tasks=tasks)
    found = [row for row in recorder.rows if "evaluation" in row]
    assert found == [{"step": s, "samples": 8 * s, "evaluation": {"knn": s / 10}} for s in (0, 5, 10, 12)]
    assert [row["step"] for row in recorder.rows if "loss" in row] == list(range(1, 13))


@pytest.mark.parametrize("stopped_at", [4, 8])
def test_rows_of_evaluations_come_once_each_through_a_cut(tmp_path: Path, stopped_at: int):
    def train(name: str, *, resume: Path | None = None, cut: bool = False) -> None:
        trainer = make_trainer(tmp_path / name, log_every=3)
        if resume is not None:
            trainer.resume(resume)
        tasks = [PeriodicTask(every=4, run=lambda step: {"knn": step / 10})]
        if cut:
            tasks.append(PeriodicTask(every=stopped_at, run=interrupt))
        lines = JsonLines(tmp_path / f"{name}.jsonl", start_step=trainer.step)
        trainer.run(observers=[lines], tasks=tasks)
        lines.close()

    train("through")
    train("cut", cut=True)  # it notices one step after
    train("cut", resume=tmp_path / "cut" / f"step-{stopped_at:08d}")
    through, resumed = (
        [(row["step"], row.get("loss"), row.get("evaluation")) for row in read_rows(tmp_path / f"{name}.jsonl")]
        for name in ("through", "cut")
    )
    assert resumed == through


def test_speed_leaves_out_what_is_done_before_the_first_step(tmp_path: Path):
    recorder = Recorder()
    task = PeriodicTask(every=100, run=lambda step: time.sleep(0.5))
    trainer = make_trainer(tmp_path)
    time.sleep(0.5)
    trainer.run(observers=[recorder], tasks=[task])
    assert recorder.rows[0]["images_per_second"] > 8 / 0.4


@pytest.mark.parametrize("jump", [36_000.0, -36_000.0])
def test_a_clock_that_is_set_anew_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float):
    """Neither when it saves nor how long it took: both are told by a clock that does not jump."""
    told, at = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: told() + at[0])
    recorder, began = Recorder(), time.monotonic()

    def set_anew(step: int) -> None:
        at[0] = jump * (step >= 5)

    trainer = make_trainer(tmp_path, checkpoint_every=None)
    trainer.run(observers=[recorder], tasks=[PeriodicTask(every=1, run=set_anew)])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000012"]
    seconds = [row["seconds"] for row in recorder.rows]
    assert seconds == sorted(seconds) and 0 < seconds[-1] <= time.monotonic() - began
    assert all(row["images_per_second"] > 0 and 0 <= row["data_wait"] <= 1 for row in recorder.rows)
    assert make_trainer(tmp_path).resume(tmp_path / "step-00000012") is None


def test_ten_minutes_are_told_by_a_clock_that_does_not_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ticks = [0.0]
    monkeypatch.setattr("mae.training.saver.time.monotonic", lambda: ticks[0])

    def tick(step: int) -> None:
        ticks[0] += 150

    make_trainer(tmp_path, checkpoint_every=None).run(tasks=[PeriodicTask(every=1, run=tick)])
    # After more than 600 s, so after 5 steps, and then again; the last step is always saved.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000011", "step-00000012"]


def test_a_status_that_is_read_late_saves_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a GPU what is due is heard of a step later, when the processes have said so once more."""
    ticks, saved = [0.0], []
    monkeypatch.setattr("mae.training.saver.time.monotonic", lambda: ticks[0])
    trainer = make_trainer(tmp_path, checkpoint_every=None)
    exchange, begin, heard = trainer._exchange.exchange, trainer._saver.begin, [StepStatus()]
    monkeypatch.setattr(
        trainer._exchange, "exchange", lambda finite, status: (heard.append(status), exchange(finite, status))[1]
    )
    monkeypatch.setattr(trainer._exchange, "read", lambda: heard[-2])
    monkeypatch.setattr(
        trainer._saver, "begin", lambda *args, step, **named: (saved.append(step), begin(*args, step=step, **named))
    )

    def tick(step: int) -> None:
        ticks[0] += 150

    trainer.run(tasks=[PeriodicTask(every=1, run=tick)])
    assert saved == [6, 12]


def test_what_prepares_a_batch_is_no_wait_for_data(tmp_path: Path):
    """A teacher's pass that a mask follows is the model's own work."""
    recorder = Recorder()

    def prepare(batch):
        time.sleep(0.02)
        return batch

    trainer = make_trainer(tmp_path)
    trainer.prepare = prepare
    plain = make_trainer(tmp_path / "plain")
    plain.run()
    trainer.run(observers=[recorder])
    assert torch.equal(weights(trainer), weights(plain))
    assert all(row["data_wait"] < 0.5 for row in recorder.rows)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_no_fused_kernel_that_ignores_what_is_not_finite_takes_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
):
    """As MPS's do in PyTorch before 2.13."""
    fused = torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, found_inf=None, **named: fused(*args, **named))
    options = {"module": Overflowing, "clip_grad": None} if precision == "fp16" else {"broken_at": {11}}
    finite = []
    for device in ("mps", "cpu"):
        trainer = make_trainer(tmp_path / device, precision=precision, **options)
        ask_before_steps(trainer.optimizer, torch.device(device))
        with suppress(MAEError):  # it goes on to say that all is lost
            trainer.run()
        finite.append(bool(weights(trainer).isfinite().all()))
    assert finite == [True, False]


def told(progress: list[float]) -> Follower:
    """A teacher that writes down the progress it is told."""
    return Follower(lambda module, done: progress.append(done))


def test_after_step_is_called_with_the_progress_of_each_step(tmp_path: Path):
    progress: list[float] = []
    trainer = make_trainer(tmp_path, teacher=told(progress), accumulate=2)
    trainer.run()
    assert progress == [step / 12 for step in range(1, 13)]


@pytest.mark.parametrize("optimizer", [adamw, lars])
def test_after_step_sees_the_new_weights_and_no_skipped_step(tmp_path: Path, optimizer):
    seen: list[tuple[float, list[float]]] = []
    teacher = Follower(lambda module, progress: seen.append((progress, weights(trainer).tolist())))
    trainer = make_trainer(tmp_path, broken_at={5}, optimizer=optimizer, teacher=teacher)
    after = weights_after_each_step(trainer, Recorder())
    steps = [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]
    assert seen == [(step / 12, after[step]) for step in steps]


@pytest.mark.parametrize("changes", [{"broken_at": {5, 6}}, {"precision": "fp16", "clip_grad": None}])
def test_a_teacher_forgets_each_skipped_step_and_no_other(tmp_path: Path, changes: dict):
    told_of: list[str] = []
    teacher = Follower(lambda module, progress: told_of.append("taken"))
    teacher.forget_step = lambda: told_of.append("skipped")
    trainer = make_trainer(tmp_path, module=Overflowing if "precision" in changes else Line, teacher=teacher, **changes)
    after = weights_after_each_step(trainer, Recorder())
    moved = [after[step] != after[step - 1] for step in range(1, 13)]
    moved[0] |= told_of[0] == "taken"  # at a rate of 0
    assert told_of == ["taken" if each else "skipped" for each in moved] and told_of.count("skipped") >= 2


def test_after_step_is_not_called_again_after_rollback_or_resume(tmp_path: Path):
    progress: list[float] = []
    make_trainer(tmp_path, broken_at={5, 6, 7}, teacher=told(progress)).run()
    assert progress == [step / 12 for step in (1, 2, 3, 4, 5, 9, 10, 11, 12)]
    resumed: list[float] = []
    trainer = make_trainer(tmp_path, total_steps=16, teacher=told(resumed))
    trainer.resume(tmp_path / "step-00000012")
    trainer.run()
    assert resumed == [step / 16 for step in (13, 14, 15, 16)]


class Overflowing(Line):
    """Gradients too large for the first scales of an fp16 scaler."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        output = super().forward(x, y)
        loss = output.loss.float() * 16
        return Output(loss=loss, terms={})


def test_after_step_is_not_called_for_steps_that_the_scaler_skips(tmp_path: Path):
    progress: list[float] = []
    trainer = make_trainer(tmp_path, module=Overflowing, precision="fp16", clip_grad=None, teacher=told(progress))
    after = weights_after_each_step(trainer, Recorder())
    moved = [step / 12 for step in range(1, 13) if after[step] != after[step - 1]]
    assert progress == moved and 0 < len(moved) < 11


def test_a_teacher_is_resumed_bit_for_bit(tmp_path: Path):
    whole = make_trainer(tmp_path / "whole", teacher=Follower())
    whole.run()
    cut = make_trainer(tmp_path / "cut", teacher=Follower())
    cut.run(tasks=[PeriodicTask(every=5, run=interrupt)])
    assert cut.step == 6
    again = make_trainer(tmp_path / "cut", teacher=Follower())
    again.resume(tmp_path / "cut" / "step-00000006")
    assert torch.equal(again.teacher.mean, cut.teacher.mean) and cut.teacher.mean.abs().max() > 0
    again.run()
    assert torch.equal(again.teacher.mean, whole.teacher.mean)
    assert torch.equal(weights(again), weights(whole))


def test_a_teacher_is_rolled_back_with_its_student(tmp_path: Path):
    means: dict[int, torch.Tensor] = {}
    trainer = make_trainer(tmp_path, broken_at={5, 6, 7}, teacher=Follower())

    def keep(step: int) -> None:
        means[step] = trainer.teacher.mean.clone()

    trainer.run(tasks=[PeriodicTask(every=1, run=keep)])
    assert not torch.equal(means[4], means[5])
    assert torch.equal(means[8], means[4])  # the checkpoint of step 4, and no step since


def test_a_teacher_stands_beside_the_model_in_checkpoints_alone(tmp_path: Path):
    make_trainer(tmp_path, teacher=Follower()).run()
    folder = tmp_path / "step-00000012"
    assert load_file(folder / "teacher.safetensors").keys() == {"mean"}
    assert load_file(folder / "model.safetensors").keys() == {"linear.weight", "linear.bias"}
    make_trainer(tmp_path / "without").run()
    assert not (tmp_path / "without" / "step-00000012" / "teacher.safetensors").exists()


@pytest.mark.parametrize("damage", ["gone", "other", "nan"])
def test_a_damaged_teacher_is_refused(tmp_path: Path, damage: str):
    make_trainer(tmp_path, teacher=Follower()).run()
    file = tmp_path / "step-00000012" / "teacher.safetensors"
    if damage == "gone":
        file.unlink()
    else:
        mean = torch.zeros(1, 5) if damage == "other" else torch.full((1, 4), torch.nan)
        save_file({"mean": mean}, file)
        manifest = json.loads((file.parent / "manifest.json").read_text())
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": digest}
        (file.parent / "manifest.json").write_text(json.dumps(manifest))
    trainer = make_trainer(tmp_path, teacher=Follower())
    before = weights(trainer)
    with pytest.raises(MAEError, match="teacher.safetensors"):
        trainer.resume(file.parent)
    assert torch.equal(weights(trainer), before)


def test_after_step_is_called_alike_in_several_processes(tmp_path: Path):
    """A step that is not finite in one process is skipped in both."""
    run_script(Path(__file__).with_name("hook_together.py"), tmp_path, seconds=120)
    for name in ("ddp", "fsdp"):
        first, second = (json.loads((tmp_path / name / f"{rank}.json").read_text()) for rank in range(2))
        *steps, resumed = first
        assert first == second and [progress for progress, _, _ in steps] == [
            step / 12 for step in range(1, 13) if step != 6
        ]
        assert len({tuple(weight) for _, _, weight in steps}) == 11
        mean = torch.zeros(4)
        for _, averaged, weight in steps:
            mean.lerp_(torch.tensor(weight), 0.25)
            assert averaged == pytest.approx(mean.tolist(), rel=1e-6)
        assert resumed[1] == steps[-1][1]
