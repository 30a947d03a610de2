"""Runs of several processes, for test_together.py: libraries are imported once, and every process is a fork of that.

`python together.py FOLDER` leaves one folder a scenario, with what each process ended with in `codes.json`.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import kills  # of benchmarks
import torch
from kills import BATCH, Case
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import mae
from mae.cli import main
from mae.config import as_flags
from mae.layers import compiled
from mae.layers.transformer import apply_block
from mae.training import checkpoint, muon
from mae.training.engine import Trainer
from mae.training.state import TrainingState

OPTIONS: dict[str, Any] = {**kills.OPTIONS, "steps": 16}
FSDP = {"shard": True}
IMPROVED = {"recipe": "improved", "mask_warmup": 0.15, "accumulate": 2}
"""The images of a batch are compared with each other, and how much of them is hidden changes."""
VIEWS = {"visreg": 0.1, "sigreg": 0.1, "infonce": 0.1, "vicreg": 0.01, "repeated_aug": 2, "accumulate": 2}
"""Views of an image are compared, by terms with networks of their own."""
CODES = {
    "target": "codes", "teacher": "codebook", "loss": "cross_entropy", "code_prediction": 0.2,
    "teacher_codes": 8, "teacher_restart": 0.0, "code_prediction_codes": 8,
}  # fmt: skip
"""Codebooks learn of the images of all; without new beginnings, where rounding decides which codes are rare."""
ATTENTION = {"mask": "attention", "teacher": "ema", "teacher_momentum": 0.5}
FEATURES = {"target": "features", "teacher": "ema", "teacher_momentum": 0.5, "precision": "bf16"}
"""What trivial predictors reach is measured at the end once more, when the teacher is divided."""
HARD = {"mask": "hard", "teacher": "ema", "teacher_momentum": 0.5, "difficulty": 1.0, "mask_first": 0.5}
"""Masks follow a divided teacher, which is asked by other methods than `forward`."""
SCENARIOS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "two": (2, {}),
    "divided": (2, {**FSDP, "accumulate": 2, "activation_checkpointing": True}),
    "divided-bf16": (2, {**FSDP, "precision": "bf16", "compile": "on"}),
    "compiled": (2, {"compile": "on"}),
    "compiled-divided": (2, {**FSDP, "accumulate": 2, "activation_checkpointing": True, "compile": "on"}),
    "tokens-alone": (1, {"cls_tokens": 4}),
    "tokens": (2, {**FSDP, "cls_tokens": 4}),
    "improved-alone": (1, IMPROVED),
    "improved": (2, IMPROVED),
    "improved-compiled": (2, {**IMPROVED, "compile": "on"}),
    "views-alone": (1, VIEWS),
    "views": (2, VIEWS),
    "views-divided": (2, {**FSDP, **VIEWS}),
    "attention-alone": (1, ATTENTION),
    "attention-divided": (2, {**FSDP, **ATTENTION}),
    "attention-bf16": (2, {**FSDP, **ATTENTION, "precision": "bf16", "compile": "on"}),
    "features-alone": (1, FEATURES),
    "features-divided": (2, {**FSDP, **FEATURES}),
    "hard-alone": (1, HARD),
    "hard-divided": (2, {**FSDP, **HARD}),
    "codes-alone": (1, CODES),
    "codes": (2, {**CODES, "accumulate": 2}),
    "codes-divided": (2, {**FSDP, **CODES, "accumulate": 2}),
    "muon-alone": (1, {"optimizer": "muon"}),
    "muon-divided": (2, {**FSDP, "optimizer": "muon"}),
}
"""The number of processes, and what is asked for."""


def through(folder: Path) -> None:
    """Runs that nothing happens to; what is compiled is so without the C++ compiler, which takes minutes."""
    compiled._compiled = lambda dynamic: torch.compile(apply_block, dynamic=dynamic, backend="aot_eager")  # type: ignore[assignment]
    muon.computes_in_bf16 = lambda device: False  # what rounds in bf16 is compared loosely alone
    muon._gains_by_batches = lambda device: True  # as on a GPU
    for name, (processes, changes) in SCENARIOS.items():
        kills.OPTIONS = {**OPTIONS, "steps": 6, **changes}
        codes = kills.launch(folder / name, Case(processes, sharded=bool(changes.get("shard"))))
        if "compile" in changes:  # names and places of weights are those of a run that is not compiled
            codes += kills.launch(folder / name, Case(processes))
        (folder / f"{name}.json").write_text(json.dumps(codes))


def said(
    folder: Path, name: str, happens: Callable[[], None], *, options: Sequence[str] = (), alone: bool = False
) -> None:
    """The command itself in two processes, with something happening to one; exit codes and what was said."""
    words = [word for key, value in OPTIONS.items() if key != "source" for word in as_flags(key, value)]
    command = ["pretrain", OPTIONS["source"], *words, "--out", str(folder / name), *options]

    def run(rank: int, port: int) -> None:
        log = os.open(folder / f"{name}-{rank}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.setsid()  # a terminal tells all of a group
        if not alone:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": name,
            }  # fmt: skip
        kills.light()
        happens()
        os._exit(main(command))

    port = kills.free_port()
    processes = [kills._fork.Process(target=run, args=(rank, port)) for rank in range(1 if alone else 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    (folder / f"{name}.json").write_text(json.dumps([process.exitcode for process in processes]))


def at_step(step: int, rank: int, what: Callable[[], Any]) -> None:
    """Have something happen in the middle of a step of one process."""
    clip = Trainer._clip

    def clipped(trainer: Trainer) -> torch.Tensor:
        if trainer.step == step and trainer.world.rank == rank:
            what()
        return clip(trainer)

    Trainer._clip = clipped  # type: ignore[method-assign]


def lost_worker() -> None:
    """What loads this process's images dies."""
    for child in multiprocessing.active_children():
        child.kill()


def full_disk() -> None:
    """The main process cannot write its second checkpoint."""
    stage = checkpoint.stage

    def fail(folder: Path, *args: Any, state: TrainingState, **options: Any) -> None:
        if state.step > 2:
            raise mae.MAEError(f"could not write {folder}: No space left on device; free space there")
        stage(folder, *args, state=state, **options)

    checkpoint.stage = fail  # type: ignore[assignment]


def broken_step() -> None:
    """The loss of one process is not finite in three steps."""
    backward = Trainer._backward

    def spoil(trainer: Trainer, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
        numbers = backward(trainer, *args, **options)
        if trainer.world.rank == 1 and trainer.step in (9, 10, 11):
            numbers["loss"] = numbers["loss"] * torch.nan
        return numbers

    Trainer._backward = spoil  # type: ignore[method-assign]


def no_compiler() -> None:
    """One process of the two cannot compile the backward pass of another kind of blocks than the first."""

    def broken(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(graph)
        if len(found) > 1:
            raise RuntimeError("no compiler found")
        return make_boxed_func(graph.forward)

    found: list[torch.fx.GraphModule] = []
    half = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=broken)
    backend = half if os.environ["RANK"] == "1" else "aot_eager"
    compiled._compiled = lambda dynamic: torch.compile(apply_block, dynamic=dynamic, backend=backend)  # type: ignore[assignment]


def restarted(folder: Path) -> None:
    """PyTorch's launcher starts both processes anew after one of them dies."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="again",
        max_restarts=1, monitor_interval=0.1, start_method="fork",
    )  # fmt: skip
    kills.OPTIONS = {**OPTIONS, "out": folder / "restarted"}
    elastic_launch(config, _dies_once)()


def _dies_once() -> None:
    kills.light()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        at_step(11, 1, kills.die)
    mae.pretrain(quiet=True, **kills.OPTIONS)


def killed(folder: Path) -> None:
    """A few of the kills of benchmarks/kills.py, and a run whose number of processes changes."""
    kills.OPTIONS = {**OPTIONS, "steps": kills.STEPS}
    (folder / "kills").mkdir()
    found = kills.changing_world(folder / "kills")
    for case in (Case(1), Case(2, sharded=True), Case(4)):
        place = folder / "kills" / case.name
        place.mkdir()
        again = 2 if case.processes == 1 else 1
        found[case.name] = kills.run_matrix(place, kills=again, seed=1, cases=(case,), in_a_row=again)
    (folder / "killed.json").write_text(json.dumps(found))


def everything(folder: Path) -> None:
    killed(folder)
    through(folder)
    kills.OPTIONS = OPTIONS
    said(folder, "asked", partial(at_step, 5, 1, partial(signal.raise_signal, signal.SIGUSR1)))
    kills.launch(folder / "through", Case(2))
    restarted(folder)
    kills.OPTIONS = OPTIONS
    terminal = partial(at_step, 5, 0, partial(os.killpg, 0, signal.SIGINT))
    said(folder, "terminal", terminal, options=["--workers", "1"], alone=True)
    said(folder, "ctrl-c", partial(at_step, 5, 0, partial(signal.raise_signal, signal.SIGINT)))
    said(folder, "lost", partial(at_step, 5, 1, kills.die))
    said(folder, "worker", partial(at_step, 5, 1, lost_worker), options=["--workers", "1"])
    said(folder, "full", full_disk)
    said(folder, "broken", broken_step, options=["--checkpoint-every", "4"])
    said(folder, "hopeless", broken_step, options=["--checkpoint-every", "100"])
    said(folder, "uncompiled", no_compiler, options=["--compile", "on", "--shard"])
    said(folder, "wrong", lambda: None, options=["--batch-size", "15"])
    said(folder, "untold", lambda: os.environ.update(OPENMAE_TIMEOUT="soon"))


if __name__ == "__main__":
    assert BATCH % 4 == 0
    everything(Path(sys.argv[1]))
