"""Steps that are not finite: skipped, reported, rolled back from, and the end of the run."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Follower, Line, Output, Recorder, lars, make_trainer, weights_after_each_step

from mae.errors import MAEError
from mae.training import engine
from mae.training.checkpoint import find_checkpoint
from mae.training.resilience.nonfinite import NonFiniteCounter, all_finite
from mae.training.schedule import WarmupCosine
from mae.training.settings import PeriodicTask


def warnings(recorder: Recorder) -> list[tuple[int, str]]:
    return [(row["step"], row["warning"]["name"]) for row in recorder.rows if "warning" in row]


@pytest.mark.parametrize("optimizer", ["fused", "other"])
def test_nonfinite_step_is_skipped(tmp_path: Path, optimizer: str):
    recorder = Recorder()
    chosen = {"optimizer": lars} if optimizer == "other" else {}
    trainer = make_trainer(tmp_path, broken_at={5}, **chosen)
    seen = weights_after_each_step(trainer, recorder)
    assert seen[6] == seen[5] and all(seen[step] != seen[step + 1] for step in range(1, 12) if step != 5)
    assert trainer.step == 12 and torch.tensor(seen).isfinite().all()
    assert warnings(recorder) == [(6, "step skipped")]
    assert [row["step"] for row in recorder.rows if "loss" in row] == [*range(1, 6), *range(7, 13)]
    if optimizer == "fused":  # AdamW corrects its averages by the steps it took
        assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {11.0}


def test_means_exclude_skipped_steps(tmp_path: Path):
    each, rows = Recorder(), Recorder()
    make_trainer(tmp_path / "each", broken_at={5}).run(observers=[each])
    make_trainer(tmp_path / "rows", broken_at={5}, log_every=4).run(observers=[rows])
    losses = {row["step"]: row["loss"] for row in each.rows if "loss" in row}
    found = {row["step"]: row["loss"] for row in rows.rows if "loss" in row}
    assert found[8] == pytest.approx((losses[5] + losses[7] + losses[8]) / 3)


def test_two_consecutive_steps_cause_no_rollback(tmp_path: Path):
    recorder = Recorder()
    make_trainer(tmp_path, broken_at={5, 6, 8, 9}).run(observers=[recorder])
    assert [name for _, name in warnings(recorder)] == ["step skipped"] * 4


def test_three_consecutive_steps_roll_back(tmp_path: Path):
    recorder = Recorder()
    trainer = make_trainer(tmp_path, broken_at={5, 6, 7})
    seen = weights_after_each_step(trainer, recorder)
    assert seen[8] == seen[4] != seen[5]  # the checkpoint of step 4
    assert trainer.step == 12 and seen[12] != seen[8]
    assert warnings(recorder) == [(6, "step skipped"), (7, "step skipped"), (8, "step skipped"), (8, "rolled back")]
    text = next(row["warning"]["text"] for row in recorder.rows if row.get("warning", {}).get("name") == "rolled back")
    assert "step-00000004" in text and "after step 8" in text


def test_second_rollback_ends_the_run_with_a_capture(tmp_path: Path):
    captured: list[int] = []

    def capture(step: int) -> Path:
        captured.append(step)
        return tmp_path / "what happened"

    trainer = make_trainer(tmp_path / "run", broken_at={5, 6, 7, 9, 10, 11}, capture=capture)
    told = "3 consecutive steps up to step 12, after a rollback at step 8.*step-00000004.*mae replay"
    with pytest.raises(MAEError, match=told) as ended:
        trainer.run()
    assert captured == [11]
    typed = str(ended.value).partition("replay it with: ")[2]
    assert shlex.split(typed) == ["mae", "replay", str(tmp_path / "what happened")]


def test_resumed_run_remembers_its_rollback(tmp_path: Path):
    broken = {5, 6, 7, 13, 14, 15}
    make_trainer(tmp_path, broken_at=broken).run()
    again = make_trainer(tmp_path, broken_at=broken, total_steps=24)
    again.resume(tmp_path / "step-00000012")
    with pytest.raises(MAEError, match="after a rollback at step 8"):
        again.run()


def test_later_rollbacks_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "_STEPS_BETWEEN_ROLLBACKS", 4)
    recorder = Recorder()
    make_trainer(tmp_path, broken_at={5, 6, 7, 9, 10, 11}).run(observers=[recorder])
    assert [step for step, name in warnings(recorder) if name == "rolled back"] == [8, 12]


def test_no_checkpoint_to_roll_back_to(tmp_path: Path):
    with pytest.raises(MAEError, match=r"3 consecutive steps up to step 4.*no checkpoint was written yet"):
        make_trainer(tmp_path, broken_at={1, 2, 3}).run()
    assert find_checkpoint(tmp_path) is None


@pytest.mark.parametrize(("steps", "many"), [(1, "1 step up to step 1"), (2, "2 consecutive steps up to step 2")])
def test_a_run_without_a_finite_step_ends_with_the_reason(tmp_path: Path, steps: int, many: str):
    with pytest.raises(MAEError, match=rf"not finite \(nan or inf\) in {many};.*no checkpoint was written yet"):
        make_trainer(tmp_path, broken_at={0, 1}, total_steps=steps).run()
    assert find_checkpoint(tmp_path) is None
    make_trainer(tmp_path, broken_at={1}, total_steps=2).run()  # one of two was


def test_nonfinite_steps_are_not_saved(tmp_path: Path):
    make_trainer(tmp_path, broken_at={5, 6, 8}, checkpoint_every=1, total_steps=9).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000008", "step-00000009"]
    with pytest.raises(MAEError, match="step-00000005"):
        make_trainer(tmp_path / "broken", broken_at={5, 6, 7, 8, 9, 10}, checkpoint_every=1).run()
    assert sorted(path.name for path in (tmp_path / "broken").iterdir()) == ["step-00000004", "step-00000005"]


class Spoiled(Line):
    """Its loss is finite, and the gradient of one in `every` steps is not: a root has no slope at 0."""

    def __init__(self, *, every: int = 1) -> None:
        super().__init__()
        self.every, self.steps = every, 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        output, self.steps = super().forward(x, y), self.steps + 1
        if self.steps % self.every == 0:
            return Output(loss=output.loss + (self.linear.weight * 0).square().sum().sqrt(), terms=output.terms)
        return output


@pytest.mark.parametrize("checkpoint_every", [None, 4])
def test_fp16_ends_a_run_whose_gradient_is_never_finite(tmp_path: Path, checkpoint_every: int | None):
    options = {"module": Spoiled, "precision": "fp16", "checkpoint_every": checkpoint_every, "total_steps": 400}
    trainer, recorder = make_trainer(tmp_path, **options), Recorder()
    kept = "no checkpoint was written yet" if checkpoint_every is None else "the last good checkpoint is"
    with pytest.raises(MAEError, match=f"not finite .* in 3 consecutive steps .*{kept}"):
        trainer.run(observers=[recorder])
    assert trainer.step < 50 and "step skipped" in [name for _, name in warnings(recorder)]
    if checkpoint_every is not None:
        make_trainer(tmp_path, **options).resume(find_checkpoint(tmp_path))


@pytest.mark.parametrize("changes", [{}, {"optimizer": lars}])
def test_a_run_whose_steps_all_overflowed_is_not_called_finished(tmp_path: Path, changes: dict[str, Any]):
    """So few steps that the scale is still above its least."""
    options = {"module": Spoiled, "precision": "fp16", "total_steps": 12, **changes}
    trainer, reason = make_trainer(tmp_path, **options), r"not finite \(nan or inf\) in any step of the run, 12 in all"
    before = [each.detach().clone() for each in trainer.module.parameters()]
    with pytest.raises(MAEError, match=reason):
        trainer.run()
    assert all(map(torch.equal, before, trainer.module.parameters()))
    again = make_trainer(tmp_path, **options)
    again.resume(tmp_path / "step-00000012")
    with pytest.raises(MAEError, match=reason):
        again.run()


def test_fp16_goes_on_where_some_gradients_are_not_finite(tmp_path: Path):
    """Each halves the scale, which nothing raises again."""
    rate = WarmupCosine(peak=0.05, floor=0.01, warmup_samples=16, total_samples=3200)
    options = {"module": lambda: Spoiled(every=2), "precision": "fp16", "total_steps": 400, "schedule": rate}
    progress: list[float] = []
    trainer = make_trainer(tmp_path, **options, teacher=Follower(lambda module, done: progress.append(done)))
    seen = weights_after_each_step(trainer, Recorder())
    moved = [step / 400 for step in range(1, 401) if seen[step] != seen[step - 1]]
    assert progress == moved and moved[-190:] == [step / 400 for step in range(21, 401, 2)]
    make_trainer(tmp_path, **options, teacher=Follower()).resume(tmp_path / "step-00000400")


@pytest.mark.parametrize("where", ["weights", "averages"])
def test_nonfinite_checkpoint_is_not_written(tmp_path: Path, where: str):
    trainer = make_trainer(tmp_path)

    def spoil(step: int) -> None:
        if step == 8:
            averages = next(iter(trainer.optimizer.state.values()))["exp_avg"]
            tensor = trainer.module.linear.weight if where == "weights" else averages
            tensor.data[0, 0] = torch.inf

    with pytest.raises(MAEError, match=r"step-00000008 was not written: linear.weight.* not finite.*step-00000004"):
        trainer.run(tasks=[PeriodicTask(every=1, run=spoil)])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_counter(bad: float):
    steps = NonFiniteCounter(torch.device("cpu"))
    numbers = ((1.0, bad), (1e30,), (1.0,), (bad,), (bad,))
    whole = [all_finite(*map(torch.tensor, each)) for each in numbers]
    assert whole == [False, True, True, False, False]
    for step, finite in enumerate(whole, start=3):
        steps.count(step, finite)
    found = steps.read()
    assert (found.skipped, found.consecutive, found.last, found.now) == (3, 2, 7, 2)
    assert steps.read().skipped == 0
