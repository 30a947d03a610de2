"""Steps that are replayed, on a CPU, where a stand-in for CUDA graphs runs what it was told to record."""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from toy import SETTINGS, Line, Recorder, batches, make_trainer, weights_after_each_step

from mae.pretraining.build import fresh_model
from mae.pretraining.build import make_trainer as make_run_trainer
from mae.pretraining.resolve import prepare_run
from mae.recipes import recipe_config
from mae.training import cuda_graphs
from mae.training.cuda_graphs import GraphedOptimizer, GraphedPass
from mae.training.distributed import World
from mae.training.engine import Trainer, can_replay
from mae.training.optimizer import make_optimizer

STEPS = 24
LONG: dict[str, Any] = {"total_steps": STEPS, "checkpoint_every": 4}


class StandIn:
    """Records as CUDA does: what was taken lies at the same addresses in each replay, and so does what was given.

    Attributes:
        recorded: how often something was recorded, by what it was: `pass` or `step`.
        replayed: the same of replays.
    """

    def __init__(self) -> None:
        self.recorded, self.replayed = {"pass": 0, "step": 0}, {"pass": 0, "step": 0}

    def record(self, run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        owner: Any = getattr(run, "__self__", None)
        kind = "step" if isinstance(owner, Optimizer) else "pass"
        self.recorded[kind] += 1
        return self._of_step(run, owner) if kind == "step" else self._of_pass(run)

    def _of_step(self, run: Callable[[], Any], optimizer: Any) -> tuple[Callable[[], None], None]:
        groups, found_inf = [dict(group) for group in optimizer.param_groups], optimizer.found_inf
        assert all(isinstance(group["lr"], Tensor) and group["capturable"] for group in groups)
        seen = [[p.grad for p in group["params"]] for group in groups]
        averages = _places(optimizer)

        def replay() -> None:
            self.replayed["step"] += 1
            assert _places(optimizer) == averages
            now = [dict(group) for group in optimizer.param_groups]
            for group, values, gradients in zip(optimizer.param_groups, groups, seen, strict=True):
                group.update(values)
                for parameter, gradient in zip(group["params"], gradients, strict=True):
                    parameter.grad = gradient
            optimizer.found_inf = found_inf
            run()
            for group, values in zip(optimizer.param_groups, now, strict=True):
                group.update(values)

        return replay, None

    def _of_pass(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        found = run()  # its values are no result: CUDA computes nothing while it records
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters]
        for value in (*found.values(), *gradients):
            value.fill_(torch.nan)

        def replay() -> None:
            self.replayed["pass"] += 1
            self.module.zero_grad(set_to_none=True)
            for name, value in run().items():
                found[name].copy_(value)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                gradient.copy_(parameter.grad)

        return replay, found

    def replaying(self, trainer: Trainer) -> Trainer:
        """The trainer as it is on a GPU."""
        self.module: nn.Module = trainer.module
        assert isinstance(trainer.optimizer, AdamW)
        trainer._replay_steps(trainer.optimizer)
        return trainer


def _places(optimizer: Optimizer) -> list[int]:
    return [value.data_ptr() for state in optimizer.state.values() for value in state.values()]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    found = StandIn()
    monkeypatch.setattr(cuda_graphs, "record", found.record)
    monkeypatch.setattr(cuda_graphs, "_aside", lambda device: nullcontext())
    monkeypatch.setattr(cuda_graphs, "_has_room", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "_GAIN", 0.0)
    yield found


@pytest.mark.parametrize("broken_at", [(), (4, 17), (16, 17, 18)], ids=["", "skipped", "rolled back"])
def test_replayed_steps_are_those_that_were_asked_for(tmp_path: Path, stand_in: StandIn, broken_at: tuple[int, ...]):
    """The rates of a schedule, steps that are skipped, averages of a checkpoint that was gone back to."""
    plain, plain_rows = make_trainer(tmp_path / "plain", broken_at=broken_at, **LONG), Recorder()
    trainer, rows = stand_in.replaying(make_trainer(tmp_path / "graph", broken_at=broken_at, **LONG)), Recorder()
    assert weights_after_each_step(trainer, rows) == weights_after_each_step(plain, plain_rows)
    assert [row.get("loss") for row in rows.rows] == [row.get("loss") for row in plain_rows.rows]
    assert [row.get("grad_norm") for row in rows.rows] == [row.get("grad_norm") for row in plain_rows.rows]
    assert ["warning" in row for row in rows.rows] == ["warning" in row for row in plain_rows.rows]
    assert stand_in.recorded == {"pass": 1, "step": 1}
    assert stand_in.replayed == {"pass": STEPS - 10, "step": STEPS - 12}  # once passes are kept


def test_a_cut_run_ends_like_one_that_was_not(tmp_path: Path, stand_in: StandIn):
    through = stand_in.replaying(make_trainer(tmp_path / "through", **LONG))
    through.run()
    make_trainer(tmp_path / "cut", **LONG).run()
    again = stand_in.replaying(make_trainer(tmp_path / "cut", **LONG))
    again.resume(tmp_path / "cut" / "step-00000020")
    again.run()
    assert all(torch.equal(*pair) for pair in zip(through.module.parameters(), again.module.parameters(), strict=True))


def test_a_run_of_a_model_is_the_same(tmp_path: Path, stand_in: StandIn):
    """With Muon, AdamW and two views; each step with images and masks of its own."""
    options = {"source": "builtin:digits", "model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2,
               "mlp_ratio": 0.5, "decoder_depth": 1, "batch_size": 8, "steps": STEPS, "warmup_epochs": 0.0,
               "device": "cpu", "workers": 0, "precision": "fp32"}  # fmt: skip

    def trained(name: str, replaying: Callable[[Trainer], Trainer]) -> Tensor:
        config = recipe_config("default").override({**options, "out": str(tmp_path / name)})
        prepared = prepare_run(config, None, torch.device("cpu"), World(), resume=False)
        trainer = replaying(make_run_trainer(prepared, fresh_model(prepared)))
        trainer.run()
        return torch.cat([weight.detach().flatten() for weight in trainer.module.parameters()])

    plain, replayed = trained("plain", lambda trainer: trainer), trained("replayed", stand_in.replaying)
    assert stand_in.replayed == {"pass": STEPS - 10, "step": STEPS - 12}
    # Up to rounding: a rate that is a tensor has 32 bits before it is multiplied.
    assert float((replayed - plain).norm() / plain.norm()) < 1e-4


def test_batches_of_other_shapes_are_computed_as_they_are(stand_in: StandIn):
    stand_in.module = module = Line()
    ran: list[int] = []

    def run(batch: Any) -> dict[str, Tensor]:
        ran.append(len(batch["x"]))
        loss = module(**batch).loss
        loss.backward()
        return {"loss": loss.detach()}

    passed = GraphedPass(module, torch.device("cpu"))
    whole = batches(0)

    def loss(rows: int) -> float:
        module.zero_grad(set_to_none=True)
        return float(passed(run, {name: value[:rows] for name, value in next(whole).items()})["loss"])

    for _ in range(8):
        loss(8)
        loss(4)
    assert stand_in.recorded["pass"] == 0
    for _ in range(12):
        loss(8)
    assert stand_in.recorded["pass"] == 1 and not passed.is_recorded  # still on trial
    for _ in range(4):
        loss(8)
    assert passed.is_recorded
    before = stand_in.replayed["pass"]
    loss(4)
    assert stand_in.replayed["pass"] == before and not passed.is_recorded and ran[-1] == 4


@pytest.mark.parametrize("told", ["pass", "step"])
def test_what_cannot_be_recorded_goes_on_as_it_is(
    tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: str
):
    record = stand_in.record

    def fails(run: Callable[[], Any], device: torch.device) -> Any:
        kind = "step" if isinstance(getattr(run, "__self__", None), Optimizer) else "pass"
        if kind != told:
            return record(run, device)
        if kind == "pass":
            run()  # gradients of half a recording stay behind
        raise RuntimeError("operation not permitted when stream is capturing\nand pages of it")

    monkeypatch.setattr(cuda_graphs, "record", fails)
    plain = make_trainer(tmp_path / "plain", **LONG)
    trainer = stand_in.replaying(make_trainer(tmp_path / "graph", **LONG))
    plain_rows, rows = Recorder(), Recorder()
    with caplog.at_level(logging.WARNING):
        assert weights_after_each_step(trainer, rows) == weights_after_each_step(plain, plain_rows)
    assert [row.get("grad_norm") for row in rows.rows] == [row.get("grad_norm") for row in plain_rows.rows]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and said[0].endswith("operation not permitted when stream is capturing"), said
    assert stand_in.replayed["step"] == 0 and stand_in.replayed["pass"] == (0 if told == "pass" else STEPS - 10)


def test_replays_that_gain_nothing_are_given_up(tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_graphs, "_GAIN", float("inf"))
    plain = make_trainer(tmp_path / "plain", **LONG)
    trainer = stand_in.replaying(make_trainer(tmp_path / "graph", **LONG))
    assert weights_after_each_step(trainer, Recorder()) == weights_after_each_step(plain, Recorder())
    assert stand_in.replayed == {"pass": 3, "step": 0} and stand_in.recorded == {"pass": 1, "step": 0}


def test_nothing_is_recorded_where_memory_is_short(tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_graphs, "_has_room", lambda device: False)
    trainer = stand_in.replaying(make_trainer(tmp_path, **LONG))
    trainer.run()
    assert stand_in.recorded == {"pass": 0, "step": 0}


def test_an_optimizer_whose_gradients_move_is_asked_as_usual(stand_in: StandIn):
    module, there = Line(), []
    optimizer = make_optimizer(module, weight_decay=0.0, betas=(0.9, 0.95))
    updates = GraphedOptimizer(optimizer, when=lambda: True)
    for _ in range(4):
        there.append([torch.ones_like(p) for p in module.parameters()])  # kept, so that no address comes again
        for parameter, gradient in zip(module.parameters(), there[-1], strict=True):
            parameter.grad = gradient
        updates.found_inf = torch.zeros(())
        updates.step()
    assert stand_in.recorded["step"] == 0
    for _ in range(2):
        updates.step()
    assert stand_in.recorded["step"] == 1 and stand_in.replayed["step"] == 2


@pytest.mark.parametrize(
    ("changes", "device", "processes", "expected"),
    [
        ({}, "cuda", 1, True),
        ({}, "cpu", 1, False),
        ({}, "cuda", 2, False),
        ({"accumulate": 2}, "cuda", 1, False),
        ({"cuda_graphs": False}, "cuda", 1, False),
    ],
)
def test_it_is_for_whole_batches_of_one_process_on_a_gpu(
    changes: dict[str, Any], device: str, processes: int, expected: bool
):
    settings = replace(SETTINGS, **{"cuda_graphs": True, **changes})
    assert can_replay(settings, torch.device(device), World(size=processes)) is expected


@pytest.mark.parametrize(("changes", "expected"), [({}, True), ({"cuda_graphs": False}, False),
                                                   ({"activation_checkpointing": True}, False)])  # fmt: skip
def test_a_run_asks_for_it_but_with_activation_checkpointing(tmp_path: Path, changes: dict[str, Any], expected: bool):
    options = {"source": "builtin:digits", "model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2}
    config = recipe_config("mae").override({**options, "device": "cpu", "out": str(tmp_path / "run"), **changes})
    prepared = prepare_run(config, None, torch.device("cpu"), World(), resume=False)
    trainer = make_run_trainer(prepared, fresh_model(prepared))
    assert trainer.settings.cuda_graphs is expected and trainer._updates is trainer.optimizer  # on a CPU


def test_the_reason_is_what_began_it():
    try:
        try:
            raise RuntimeError("reading a value\nand pages of it")
        finally:
            raise RuntimeError("operation failed due to a previous error")
    except RuntimeError as error:
        assert cuda_graphs._cause(error, None) == "reading a value"


def test_the_reason_is_none_that_was_handled_before_and_has_a_name():
    try:
        raise ModuleNotFoundError("No module named 'x'")
    except ModuleNotFoundError as handled:
        try:
            try:
                raise AssertionError
            finally:
                raise RuntimeError("operation failed due to a previous error")
        except RuntimeError as error:
            assert cuda_graphs._cause(error, handled) == "AssertionError"
