"""Blocks that are compiled: what is decided, told and remembered, and that a run's results do not depend on it."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from compiler import run_compiled
from light import little_measuring
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import mae
from mae.config import RunConfig
from mae.layers import compiled as codes
from mae.layers.compiled import compile_blocks, compiling
from mae.layers.transformer import Blocks, apply_block
from mae.pretraining.estimate import compilation
from mae.pretraining.estimate.estimate import plan_pretraining
from mae.training.distributed import World

Run = Callable[..., mae.PretrainResult]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.Size, ...]]]:
    """Shapes of what was compiled, by a compiler that leaves everything as it is.

    Without the tests' checks of shapes, which it would trace too, and which that of torch 2.11 cannot trace.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    seen: list[tuple[torch.Size, ...]] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append(tuple(each.shape for each in inputs if isinstance(each, torch.Tensor) and each.ndim == 3))
        return graph.forward

    monkeypatch.setattr(
        codes, "_compiled", lambda dynamic: torch.compile(apply_block, dynamic=dynamic, backend=compiler)
    )
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


@pytest.mark.parametrize(("told", "kept"), [(None, False), ("/tmp/torchinductor_someone", False), ("/data/code", True)])
def test_what_is_compiled_is_kept_where_the_user_says(told: str | None, kept: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(codes, "gettempdir", lambda: "/tmp")
    monkeypatch.setenv(codes.CACHE, told or "")
    if told is None:
        monkeypatch.delenv(codes.CACHE)
    with compiling(Path("/own/compiled")):
        assert os.environ[codes.CACHE] == (told if kept else "/own/compiled")
    assert os.environ.get(codes.CACHE) == told


def test_each_run_of_a_process_has_room_for_its_codes(monkeypatch: pytest.MonkeyPatch):
    seen: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append(graph)
        return graph.forward

    monkeypatch.setattr(codes, "_MOST_CODES", 2)
    applied = torch.compile(apply_block, dynamic=False, backend=compiler)
    for width in range(2, 12):
        with compiling(None):
            applied(torch.nn.Linear(width, 3), torch.rand(2, width))
    assert len(seen) == 10


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Callable[..., Any]]]:
    """Blocks compiled by what fails for sequences longer than 4: forward, or for the backward pass alone."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)

    def leave(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return make_boxed_func(graph.forward)

    def fail(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if any(each.ndim == 3 and each.shape[1] > 4 for each in inputs if isinstance(each, torch.Tensor)):
            raise RuntimeError("no compiler found\nand pages of it")
        return make_boxed_func(graph.forward)

    def blocks(where: str) -> Callable[..., Any]:
        by = {"forward": aot_autograd(fw_compiler=fail), "backward": aot_autograd(fw_compiler=leave, bw_compiler=fail)}
        return torch.compile(apply_block, dynamic=False, backend=by[where])

    torch._dynamo.reset()
    yield blocks
    torch._dynamo.reset()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_later_shape_that_cannot_be_compiled_is_computed_as_it_is(
    failing: Callable[..., Callable[..., Any]], where: str, caplog: pytest.LogCaptureFixture
):
    applied, block = failing(where), torch.nn.Linear(3, 3)
    with compiling(None):
        for length in (4, 5, 4, 6):
            tokens = torch.rand(2, length, 3)
            gradients = []
            for apply in (applied, apply_block):
                block.zero_grad()
                apply(block, tokens).square().sum().backward()
                gradients.append(block.weight.grad)
            torch.testing.assert_close(*gradients)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    said = "a block cannot be compiled for a new shape, and is computed as it is (RuntimeError: no compiler found)"
    assert told == [said] * 2 and "Traceback" not in caplog.text


def decided(run: mae.PretrainResult) -> str:
    value: str = json.loads((run.folder / "config.json").read_text())["machine"]["compile"]
    return value


def long_enough(monkeypatch: pytest.MonkeyPatch, *, gain: float) -> None:
    """Have any run be worth trying, and compiled passes be so many times as fast."""
    monkeypatch.setitem(compilation.WORTH_TRYING, "cpu", 0.0)
    monkeypatch.setattr(compilation.CompileTrial, "gain", gain)


def test_a_short_run_is_not_compiled_and_says_why(
    pretrain: Run, counted: list[Any], capsys: pytest.CaptureFixture[str]
):
    run = pretrain(quiet=False)
    assert decided(run) == "off" and not counted
    assert "the blocks are not compiled: the passes of this run take too short to win it back" in " ".join(
        capsys.readouterr().out.split()
    )


def test_where_auto_never_tries_it_says_so(
    pretrain: Run, counted: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(compilation.WORTH_TRYING, "cpu")
    run = pretrain(quiet=False)
    assert decided(run) == "off" and not counted
    told = " ".join(capsys.readouterr().out.split())
    assert "the blocks are not compiled: --compile auto does not try it on cpu; --compile on does" in told


def test_a_long_run_is_compiled_where_that_pays(
    pretrain: Run, counted: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    plain = pretrain("plain", compile="off")
    long_enough(monkeypatch, gain=1.25)
    run = pretrain("auto", quiet=False)
    told = " ".join(capsys.readouterr().out.split())
    assert decided(run) == "on" and "1.25 times as fast" in told and "fp32, compiled" in told
    assert counted
    weights = [each.load_model().state_dict() for each in (plain, run)]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-6)


def test_a_long_run_is_left_as_it_is_where_that_does_not_pay(
    pretrain: Run, counted: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    plain = pretrain("plain", compile="off")
    long_enough(monkeypatch, gain=1.01)
    run = pretrain("auto", quiet=False)
    assert decided(run) == "off" and counted
    assert "1.01 times as fast; they are not" in " ".join(capsys.readouterr().out.split())
    weights = [each.load_model().state_dict() for each in (plain, run)]
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())  # the trial left no trace


def test_the_fastest_of_some_seconds_of_passes_decide(counted: list[Any]):
    """The first five compiled ones are slow, as behind a compilation on a GPU."""
    model = mae.create_model("mae_vit_lesson_patch4", img_size=8, patch_size=2)
    slow = [5.0] * 5
    taken = {True: 0, False: 0}

    def passed() -> float:
        is_compiled = model.encoder.blocks.apply_block is not apply_block
        taken[is_compiled] += 1
        return 0.1 if not is_compiled else slow.pop() if slow else 0.05

    trial = compilation.try_compilation(model, passed, World(), dynamic=False)
    assert taken == {True: 21, False: 22}  # 4 seconds' worth of each, what comes before and the compilation
    assert trial.gain == 2 and compilation.pays(trial)


def test_what_was_decided_is_remembered(pretrain: Run, counted: list[Any], monkeypatch: pytest.MonkeyPatch):
    run = pretrain()
    long_enough(monkeypatch, gain=1.25)
    (run.folder / "summary.json").unlink()
    for path in (run.folder / "checkpoints").glob("step-*6"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    mae.pretrain(out=run.folder, resume=True, quiet=True)
    assert not counted


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_compiler_that_fails_ends_no_run(
    pretrain: Run,
    failing: Callable[..., Callable[..., Any]],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(codes, "_compiled", lambda dynamic: failing(where))
    plain, run = pretrain("plain", compile="off"), pretrain("on", compile="on", quiet=False)
    assert decided(run) == "off"
    captured = capsys.readouterr()
    told = " ".join(captured.out.split())
    assert not captured.err
    assert (said := "the blocks cannot be compiled here (RuntimeError: no compiler found); they are not") in told
    pretrain("quiet", compile="on")
    assert said in caplog.text
    weights = [each.load_model().state_dict() for each in (plain, run)]
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())


def test_blocks_are_compiled_with_gradients_alone(counted: list[Any]):
    model = mae.create_model("mae_vit_lesson_patch4", img_size=8, patch_size=2)
    compile_blocks(model)
    images = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        model(images)
        model.encode(images)
    assert not counted
    model(images).loss.backward()
    assert counted
    compile_blocks(model, on=False)
    assert all(each.apply_block is apply_block for each in model.modules() if isinstance(each, Blocks))


def test_the_plan_of_a_long_run_tries_it(tiny: dict[str, Any], counted: list[Any], monkeypatch: pytest.MonkeyPatch):
    little_measuring(monkeypatch)
    options = {name: value for name, value in tiny.items() if name not in ("quiet", "steps")}
    config = RunConfig.of(source="builtin:digits", epochs=100.0, **options)
    plan = partial(plan_pretraining, config, hours=None, given={"epochs"})
    assert not any("blocks" in told for told in plan()[1].advice) and not counted
    long_enough(monkeypatch, gain=1.25)
    assert any("the blocks' passes are 1.25 times as fast" in told for told in plan()[1].advice) and counted


RESUMED = """
import os
import sys
from pathlib import Path
import torch
from light import light_runs
from torch._dynamo.utils import counters
import mae
from mae.layers.transformer import apply_block
from mae.layers import compiled as codes
from mae.training.log import Callback

OPTIONS = dict(model="mae_vit_lesson_patch4", img_size=8, patch_size=2, mlp_ratio=0.5, batch_size=32, steps=6,
    workers=0, checkpoint_every=2, device="cpu", quiet=True, held_out=0.0, doctor=False, precision="fp32")

class Killed(Callback):
    def log(self, row):
        if row["step"] == 5:
            raise KeyboardInterrupt

folder = Path(sys.argv[1])
os.environ["OPENMAE_CACHE"] = str(folder / "cache")
with light_runs():
    mae.pretrain("builtin:digits", out=folder / "plain", compile="off", **OPTIONS)
    through = mae.pretrain("builtin:digits", out=folder / "through", compile="on", **OPTIONS)
    # The encoder's blocks, the decoder's, and its last, which computes the predicted tokens alone: no other block
    # brings one, and no evaluation.
    assert counters["stats"]["unique_graphs"] == 3, counters
    assert any((folder / "cache" / "compiled").iterdir())
    try:
        mae.pretrain("builtin:digits", out=folder / "cut", compile="on", callbacks=[Killed()], **OPTIONS)
    except KeyboardInterrupt:
        pass
    assert mae.pretrain(out=folder / "cut", resume=True, quiet=True).finished
    codes._compiled = lambda dynamic: torch.compile(apply_block, dynamic=dynamic, backend="eager")
    torch._dynamo.reset()
    lengths = dict(compile="on", mask_schedule="linear", mask_start=0.5, mask_warmup=0.05)
    counters.clear()
    mae.pretrain("builtin:digits", out=folder / "lengths", **lengths, **OPTIONS)
    assert counters["stats"]["unique_graphs"] == 3, counters  # each for all lengths

    def broken(graph, inputs):  # from the fourth on, as where a schedule comes to another length
        compiled.append(graph)
        if len(compiled) > 3:
            raise RuntimeError("no compiler found")
        return graph.forward

    compiled = []
    codes._compiled = lambda dynamic: torch.compile(apply_block, dynamic=False, backend=broken)
    torch._dynamo.reset()
    assert mae.pretrain("builtin:digits", out=folder / "later", **lengths, **OPTIONS).finished and len(compiled) > 3
    assert '"compile": "on"' in (folder / "later" / "config.json").read_text()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_run_that_was_cut_ends_where_one_ends_that_was_not(tmp_path: Path):
    run_compiled(RESUMED, tmp_path, folder=Path(__file__).parents[1])
    plain, through, cut = (mae.load(tmp_path / name).state_dict() for name in ("plain", "through", "cut"))
    assert all(torch.equal(cut[name], value) for name, value in through.items())
    for name, value in plain.items():
        torch.testing.assert_close(through[name], value, rtol=1e-3, atol=1e-4)
