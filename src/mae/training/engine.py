"""The training loop."""

import json
import shlex
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mae.errors import MAEError
from mae.training import checkpoint
from mae.training.device import autocast, keep_freed_memory
from mae.training.distributed import World
from mae.training.finite import MOST_IN_A_ROW, BrokenSteps, FiniteSteps
from mae.training.log import Observer
from mae.training.meter import Meter
from mae.training.schedule import WarmupCosine
from mae.training.signals import StopSignals

SECONDS_BETWEEN_SAVES = 600.0
_KEPT_CHECKPOINTS = 2
_STEPS_WATCHED = 1000  # a run that went back must get so far before it may go back again

Batches = Callable[[int], Generator[Mapping[str, Any], None, None]]
"""From a step's number to the keyword arguments of the module's forward, `accumulate` of them a step, from there on."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How to train.

    Attributes:
        total_steps: optimizer steps of the whole run.
        batch_size: samples of a step, over all processes.
        accumulate: parts a step is computed in.
        schedule: the learning rate after so many samples.
        clip_grad: largest norm of the gradient; None: no clipping.
        precision: `fp32`, `bf16` or `fp16`.
        log_every: steps between rows of the log.
        save_every: steps between checkpoints; None: one every ten minutes.
        keep_every: steps between checkpoints that are kept for good; each of these steps is saved, whatever
            `save_every` says. None: only the two newest checkpoints are kept.
    """

    total_steps: int
    batch_size: int
    accumulate: int
    schedule: WarmupCosine
    clip_grad: float | None
    precision: str
    log_every: int
    save_every: int | None
    keep_every: int | None = None


@dataclass(frozen=True, kw_only=True)
class PeriodicTask:
    """Something done before the first step, every so many steps, and after the last, such as drawing pictures.

    Attributes:
        every: steps between two calls.
        run: is given the number of steps done; numbers it returns, by name, go to the observers as a row.
    """

    every: int
    run: Callable[[int], Mapping[str, float] | None]


class Trainer:
    """Trains a module whose forward returns an output with `.loss` and `.terms`.

    Args:
        module: the module, on its device.
        optimizer: over the module's parameters; before each step the rate of each group is set to the schedule's,
            times the group's `lr_scale` if it has one.
        batches: what the module's forward is given.
        settings: how to train.
        folder: where checkpoints go.
        identity: JSON values that say what run this is; a checkpoint with others is refused.
        metadata: makes the text for the header of a weights' file, asked before each is written.
        device: where the module is.
        world: the processes that train together.
        capture: writes down what is needed to see a step again that ended the run, and tells where; given the number
            of steps before it. None: nothing is written.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        settings: TrainingSettings,
        folder: Path,
        identity: Mapping[str, Any],
        metadata: Callable[[], dict[str, str]],
        device: torch.device,
        world: World,
        capture: Callable[[int], Path] | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.batches = batches
        self.settings = settings
        self.folder = folder
        self.identity = dict(identity)
        self.metadata = metadata
        self.device = device
        self.world = world
        self.capture = capture
        self.step = 0
        self.seconds = 0.0
        self._wrapped = world.wrap(module, device)
        # The scaler keeps fp16's small gradients from vanishing; in other precisions it does nothing.
        self._scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
        self._meter = Meter()
        self._finite = FiniteSteps(device, world)
        self._went_back_at: int | None = None
        self._saved_step = -1
        self._saved_at = time.monotonic()

    @property
    def samples(self) -> int:
        """Samples seen."""
        return self.step * self.settings.batch_size

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            MAEError: it is damaged, or of another run.
        """
        state = checkpoint.read_state(path)
        for name, value in self.identity.items():
            if state["identity"].get(name) != value:
                raise MAEError(
                    f"{path} was written with {name} {state['identity'].get(name)!r}, this run has {value!r}; "
                    "start a new run in another folder, or go on with what it was started with"
                )
        checkpoint.restore(path, module=self.module, optimizer=self.optimizer)
        self._scaler.load_state_dict(state["scaler"])
        self.step, self.seconds = state["step"], state["seconds"]
        self._went_back_at = state.get("went_back_at")
        self._saved_step = self.step

    def run(self, *, observers: Sequence[Observer] = (), tasks: Sequence[PeriodicTask] = ()) -> bool:
        """Train to the end, or until a signal asks to stop; either way the last step is saved.

        Args:
            observers: are told the numbers; the main process's alone.
            tasks: done by the main process between steps.

        Returns:
            Whether the run is finished.

        Raises:
            MAEError: the loss or the gradient is not finite in several steps in a row and there is nothing to go back
                to, or it went back lately; or a checkpoint could not be written.
        """
        if self.device.type == "cpu":
            keep_freed_memory()
        began = time.monotonic() - self.seconds
        with StopSignals() as signals, closing(self.batches(self.step)) as batches:
            if self.step == 0:
                self._run_tasks(tasks, observers)
            while self.step < self.settings.total_steps:
                self._train_step(batches)
                self.seconds = time.monotonic() - began
                stop, save = self.world.any(signals.asked, self._save_is_due())
                saving = save or stop or self.step == self.settings.total_steps
                reading = self.step % self.settings.log_every == 0 or saving
                whole = True
                if reading or self.device.type == "cpu":  # on a GPU asking costs a wait for the device
                    whole = self._heed_broken_steps(observers)
                if reading:
                    self._log(observers)  # before a save: a resumed run begins with an empty meter too
                self._run_tasks(tasks, observers)  # before a save: a resumed run does not come back to this step
                # Weights that make a step break may be broken in all but name, and would push a good checkpoint out.
                if stop or self.step == self.settings.total_steps or (save and whole):
                    self._save()
                if stop:
                    break
        return self.step == self.settings.total_steps

    def _train_step(self, batches: Iterator[Mapping[str, Any]]) -> None:
        rate = self.settings.schedule(self.samples)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        parts: list[dict[str, Tensor]] = []
        for part in range(self.settings.accumulate):
            waiting = time.perf_counter()
            batch = next(batches)
            self._meter.waited(time.perf_counter() - waiting)
            parts.append(self._backward(batch, sync=part == self.settings.accumulate - 1))
        self._scaler.unscale_(self.optimizer)
        norm = self._clip()
        means = {name: torch.stack([part[name] for part in parts]).mean() for name in parts[0]}
        # fp16 overflows now and then, and the scaler leaves those steps out: there only the loss tells.
        judged = (means["loss"],) if self._scaler.is_enabled() else (means["loss"], norm)
        finite = self._finite.judge(self.step, *judged)
        self._update(finite)
        self.optimizer.zero_grad(set_to_none=True)
        self._meter.step({**means, "grad_norm": norm}, finite)
        self.step += 1

    def _update(self, finite: Tensor) -> None:
        """Move the weights, but not by a step that is not finite."""
        if self._scaler.is_enabled():
            self._scaler.step(self.optimizer)
            self._scaler.update()
        elif getattr(self.optimizer, "_step_supports_amp_scaling", False):
            # The way by which the scaler tells a fused optimizer to stand still, without waiting for the device.
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif bool(finite):
            self.optimizer.step()

    def _backward(self, batch: Mapping[str, Any], *, sync: bool) -> dict[str, Tensor]:
        """Gradients of one part of a batch; processes exchange theirs with the last part only."""
        ddp = self._wrapped if isinstance(self._wrapped, DistributedDataParallel) else None
        with nullcontext() if sync or ddp is None else ddp.no_sync():
            with autocast(self.settings.precision, self.device):
                output = self._wrapped(**batch)
            self._scaler.scale(output.loss / self.settings.accumulate).backward()
        return {"loss": output.loss.detach(), **{f"terms/{name}": term.detach() for name, term in output.terms.items()}}

    def _clip(self) -> Tensor:
        """Clip the gradient if asked to; its norm before that."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        if self.settings.clip_grad is not None:
            return nn.utils.clip_grad_norm_(parameters, self.settings.clip_grad)
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def _heed_broken_steps(self, observers: Sequence[Observer]) -> bool:
        """Tell of steps that were left out; several in a row send the run back to its last good checkpoint.

        Returns:
            Whether the newest step was whole.

        Raises:
            MAEError: there is no checkpoint to go back to, or it went back not long ago.
        """
        broken = self._finite.read()
        if broken.left_out:
            what = "1 step was" if broken.left_out == 1 else f"{broken.left_out} steps were"
            text = f"{what} left out, the last is step {broken.last + 1}: loss or gradient not finite (nan or inf)"
            self._warn(observers, "step left out", text)
        if broken.in_a_row >= MOST_IN_A_ROW:
            self._go_back(observers, broken)
        return broken.now == 0

    def _go_back(self, observers: Sequence[Observer], broken: BrokenSteps) -> None:
        newest = checkpoint.find_checkpoint(self.folder)
        lately = self._went_back_at is not None and self.step - self._went_back_at < _STEPS_WATCHED
        if newest is None or lately:
            raise MAEError(self._why_it_ends(broken, newest))
        checkpoint.restore(newest, module=self.module, optimizer=self.optimizer)
        self._scaler.load_state_dict(checkpoint.read_state(newest)["scaler"])
        self._went_back_at = self.step
        self._finite.begin_afresh()
        text = (
            f"{broken.in_a_row} steps in a row were not finite: the weights are those of {newest.name} again, and the "
            f"run goes on with the images after step {self.step}"
        )
        self._warn(observers, "went back", text)

    def _why_it_ends(self, broken: BrokenSteps, newest: Path | None) -> str:
        again = "" if self._went_back_at is None else f", and it went back already at step {self._went_back_at}"
        kept = f"the last good checkpoint is {newest}" if newest else "no checkpoint had been written yet"
        captured = ""
        if self.capture is not None and self.world.is_main:
            where = self.capture(broken.last)
            captured = f"; the step is written down, see it again with: mae replay {shlex.quote(str(where))}"
        return (
            f"the loss or its gradient is not finite (nan or inf) in {broken.in_a_row} steps in a row up to step "
            f"{broken.last + 1}{again}; learning rate {self.settings.schedule(self.samples):.3g}; stopped, {kept}. "
            "Lower the rate (--lr), keep --clip-grad 1, or compute in --precision fp32; and see that the images hold "
            f"no nan{captured}"
        )

    def _warn(self, observers: Sequence[Observer], name: str, text: str) -> None:
        for observer in observers:
            observer.log({"step": self.step, "samples": self.samples, "warning": {"name": name, "text": text}})

    def _log(self, observers: Sequence[Observer]) -> None:
        means, names, speed = self._meter.read(self.settings.batch_size)
        values = dict(zip(names, self.world.mean(means).tolist(), strict=True))
        if not isfinite(values["loss"]):  # every step was left out, which was told
            return
        row = {
            "step": self.step,
            "samples": self.samples,
            "lr": self.settings.schedule(self.samples - self.settings.batch_size),
            "loss": values["loss"],
            "terms": {name.removeprefix("terms/"): v for name, v in values.items() if name.startswith("terms/")},
            # fp16 overflows in steps that the scaler skips; JSON has no word for that.
            "grad_norm": values["grad_norm"] if isfinite(values["grad_norm"]) else None,
            **speed,
            "seconds": self.seconds,
        }
        for observer in observers:
            observer.log(row)

    def _is_for_good(self) -> bool:
        return self.settings.keep_every is not None and self.step % self.settings.keep_every == 0

    def _save_is_due(self) -> bool:
        if self._is_for_good():
            return True
        if self.settings.save_every is not None:
            return self.step % self.settings.save_every == 0
        return time.monotonic() - self._saved_at > SECONDS_BETWEEN_SAVES

    def _save(self) -> None:
        began = time.monotonic()
        if self.world.is_main and self._saved_step != self.step:
            state = {
                "step": self.step,
                "samples": self.samples,
                "seconds": self.seconds,
                "scaler": self._scaler.state_dict(),
                "went_back_at": self._went_back_at,
                "identity": self.identity,
            }
            json.dumps(state)  # fails here, before anything is written, if a value is not plain
            checkpoint.write_checkpoint(
                self.folder,
                step=self.step,
                module=self.module,
                optimizer=self.optimizer,
                state=state,
                metadata=self.metadata(),
                kept=self._is_for_good(),
            )
            checkpoint.prune(self.folder, keep=_KEPT_CHECKPOINTS, step=self.step)
        self._saved_step, self._saved_at = self.step, time.monotonic()
        self._meter.left_out(self._saved_at - began)

    def _run_tasks(self, tasks: Sequence[PeriodicTask], observers: Sequence[Observer]) -> None:
        if not self.world.is_main:
            return
        began = time.monotonic()
        for task in tasks:
            if self.step % task.every == 0 or self.step == self.settings.total_steps:
                numbers = task.run(self.step)
                if numbers is None:
                    continue
                for observer in observers:
                    observer.log({"step": self.step, "samples": self.samples, "evaluation": dict(numbers)})
        self._meter.left_out(time.monotonic() - began)
