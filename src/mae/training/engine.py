"""The training loop."""

import json
import shlex
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mae.errors import MAEError
from mae.records import shown, to_json
from mae.training import checkpoint
from mae.training.agreement import Agreement, Word
from mae.training.checkpoint import Snapshot, take_snapshot, with_weights
from mae.training.device import autocast, keep_freed_memory
from mae.training.distributed import ToldByMain, World
from mae.training.finite import MOST_IN_A_ROW, BrokenSteps, FiniteSteps, all_finite
from mae.training.log import Observer
from mae.training.meter import Meter
from mae.training.restoring import restore
from mae.training.saver import BackgroundWriter
from mae.training.schedule import WarmupCosine
from mae.training.sharding import exchanging_gradients, is_sharded, whole
from mae.training.signals import StopSignals
from mae.training.state import STATE, TrainingState, check_scaler, refused

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
        everywhere: whether all processes do it together, or the main one while the others wait.
    """

    every: int
    run: Callable[[int], Mapping[str, float] | None]
    everywhere: bool = False


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
        metadata: makes the text for the header of a weights' file from a module with the weights in it, on the CPU;
            asked beside the training.
        device: where the module is.
        world: the processes that train together.
        capture: writes down what is needed to see a step again that ended the run, and tells where; given the number
            of steps before it. None: nothing is written.

    Attributes:
        step: optimizer steps done.
        seconds: how long they took, all parts of the run together.
        stopped_by: the signal that ended `run`, 0 for none.
        mirror: to be set where the module is divided among the processes, in the main one: a whole copy of it, whose
            weights are made those of the module before tasks and `capture`, which look at it.
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
        metadata: Callable[[nn.Module], dict[str, str]],
        device: torch.device,
        world: World,
        capture: Callable[[int], Path] | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.batches = batches
        self.settings = settings
        self.folder = folder
        self.identity = json.loads(json.dumps(dict(identity)))  # as it is read again; fails here if it is not plain
        self.metadata = metadata
        self.device = device
        self.world = world
        self.mirror: nn.Module | None = None
        self.capture = capture
        self.step = 0
        self.seconds = 0.0
        self.stopped_by = 0
        self._wrapped = world.wrap(module, device)
        # The scaler keeps fp16's small gradients from vanishing; in other precisions it does nothing.
        self._scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
        self._meter = Meter()
        self._finite = FiniteSteps(device)
        self._agreement = Agreement(device, world)
        self._signals = StopSignals()
        self._writer = BackgroundWriter()
        self._went_back_at: int | None = None
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._pending: int | None = None  # the step of the checkpoint that is being written

    @property
    def seen(self) -> nn.Module:
        """The module as tasks see it: whole, in the main process."""
        return self.module if self.mirror is None else self.mirror

    @property
    def samples(self) -> int:
        """Samples seen."""
        return self.step * self.settings.batch_size

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint, which only the main process needs to see.

        Raises:
            MAEError: it is damaged, or of another run.
        """
        state = TrainingState(**self.world.from_main(lambda: to_json(self._read_state(path))))
        restore(path, module=self.module, optimizer=self.optimizer, world=self.world)
        self._scaler.load_state_dict(state.scaler)
        self.step, self.seconds = state.step, state.seconds
        self._went_back_at = state.went_back_at
        self._saved_step = self.step

    def _read_state(self, path: Path) -> TrainingState:
        """The state in a checkpoint, which is one that this run can have written.

        Raises:
            MAEError: it is not.
        """
        state = checkpoint.read_state(path)
        for name, value in self.identity.items():
            if name not in state.identity or state.identity[name] != value:
                there = shown(state.identity[name]) if name in state.identity else "nothing"
                raise MAEError(
                    f"{path} was written with {name} {there}, this run has {shown(value)}; start a new run in another "
                    "folder, or go on with what it was started with"
                )
        samples = state.step * self.settings.batch_size
        wrong = check_scaler(state.scaler, self._scaler.state_dict())
        if unknown := sorted(state.identity.keys() - self.identity.keys()):
            wrong = f"identity has the entries {shown(unknown)}, which this run does not have"
        if state.samples != samples:
            wrong = f"samples is {state.samples}; expected {samples}, batches of {self.settings.batch_size}"
        if state.step > self.settings.total_steps:
            wrong = f"step is {state.step}; expected at most {self.settings.total_steps}, the steps of this run"
        if wrong:
            raise refused(path, f"{path / STATE}: {wrong}")
        return state

    def run(self, *, observers: Sequence[Observer] = (), tasks: Sequence[PeriodicTask] = ()) -> bool:
        """Train to the end, or until a signal asks one of the processes to stop; either way the last step is saved.

        Args:
            observers: are told the numbers; the main process's alone.
            tasks: done between steps. Every process is given as many, with the same times.

        Returns:
            Whether the run is finished; if not, `stopped_by` is the signal.

        Raises:
            MAEError: the loss or the gradient is not finite in several steps in a row and there is nothing to go back
                to, or it went back lately; or a checkpoint could not be written.
        """
        if self.device.type == "cpu":
            keep_freed_memory()
        self.stopped_by, self._signals = 0, StopSignals()
        with self._signals, closing(self.batches(self.step)) as batches:
            try:
                self._loop(batches, observers, tasks)
            except Exception:
                self._rescue()
                raise
        return self.step == self.settings.total_steps

    def _loop(
        self, batches: Iterator[Mapping[str, Any]], observers: Sequence[Observer], tasks: Sequence[PeriodicTask]
    ) -> None:
        began = time.monotonic() - self.seconds
        batches = self._rehearsed(batches)
        self._meter.begin()  # what was made ready since the meter was there is no training
        if self.step == 0:
            self._run_tasks(tasks, observers)
        while self.step < self.settings.total_steps and not self.stopped_by:
            self._train_step(batches)
            self.seconds = time.monotonic() - began
            heard = self._agreement.read()
            if self._pending is not None and (heard.failed or heard.saved >= self._pending):
                self._finish_save()
            self.stopped_by = heard.stop
            last = bool(self.stopped_by) or self.step == self.settings.total_steps
            save = heard.save_due or self._step_is_saved()
            reading = self.step % self.settings.log_every == 0 or save or last
            sound = True
            if reading or self.device.type == "cpu":  # on a GPU asking costs a wait for the device
                sound = self._heed_broken_steps(observers)
            if reading:
                self._log(observers)  # before a save: a resumed run begins with an empty meter too
            self._run_tasks(tasks, observers)  # before a save: a resumed run does not come back to this step
            # Weights that make a step break may be broken in all but name, and would push a good checkpoint out.
            if last or (save and sound):
                self._begin_save()
        self._finish_save()

    def _rehearsed(self, batches: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The batches, after a pass over the first one that moves nothing.

        DistributedDataParallel lays its gradients out anew after its first backward pass, and three or more processes
        then add them in another order. Without the pass a run that goes on would round its first step otherwise.
        """
        if not isinstance(self._wrapped, DistributedDataParallel):
            return batches
        first = next(batches)
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]  # as a norm's running mean
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self._backward(first, sync=True)
        for buffer, before in buffers:
            buffer.copy_(before)
        self.optimizer.zero_grad(set_to_none=True)
        return chain([first], batches)

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
        finite = self._judged(means["loss"], norm)
        self._update(finite)
        self.optimizer.zero_grad(set_to_none=True)
        self._meter.step({**means, "grad_norm": norm}, finite)
        self.step += 1

    def _judged(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether every process found the step finite; what else they have to say to each other goes with it."""
        # fp16 overflows now and then, and the scaler leaves those steps out: there only the loss tells.
        numbers = (loss,) if self._scaler.is_enabled() else (loss, norm)
        finite = self._agreement.exchange(all_finite(*numbers), self._word())
        self._finite.count(self.step, finite)
        return finite

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
        with exchanging_gradients(self._wrapped, sync):
            with autocast(self.settings.precision, self.device):
                output = self._wrapped(**batch)
            self._scaler.scale(output.loss / self.settings.accumulate).backward()
        return {"loss": output.loss.detach(), **{f"terms/{name}": term.detach() for name, term in output.terms.items()}}

    def _clip(self) -> Tensor:
        """Clip the gradient if asked to; its norm before that, over all processes' parts."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        if self.settings.clip_grad is not None:
            return whole(nn.utils.clip_grad_norm_(parameters, self.settings.clip_grad))
        return whole(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))

    def _word(self) -> Word:
        """What this process has to say to the others."""
        return Word(
            stop=self._signals.asked,
            save_due=self._time_is_up(),
            saved=-1 if self._writer.busy else self.step,
            failed=self._writer.failed,
        )

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
        self._finish_save()
        found = self.world.from_main(self._newest)
        newest = None if found is None else Path(found)
        lately = self._went_back_at is not None and self.step - self._went_back_at < _STEPS_WATCHED
        if newest is None or lately:
            why = self._why_it_ends(broken, newest)
            raise (MAEError if self.world.is_main else ToldByMain)(why)
        scaler = self.world.from_main(lambda: self._read_state(newest).scaler)
        restore(newest, module=self.module, optimizer=self.optimizer, world=self.world)
        self._scaler.load_state_dict(scaler)
        self._went_back_at = self.step
        self._finite.begin_afresh()
        text = (
            f"{broken.in_a_row} steps in a row were not finite: the weights are those of {newest.name} again, and the "
            f"run goes on with the images after step {self.step}"
        )
        self._warn(observers, "went back", text)

    def _newest(self) -> str | None:
        newest = checkpoint.find_checkpoint(self.folder)
        return None if newest is None else str(newest)

    def _why_it_ends(self, broken: BrokenSteps, newest: Path | None) -> str:
        again = "" if self._went_back_at is None else f", and it went back already at step {self._went_back_at}"
        kept = f"the last good checkpoint is {newest}" if newest else "no checkpoint had been written yet"
        captured = ""
        self._refresh_mirror()
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

    def _step_is_saved(self) -> bool:
        every = self.settings.save_every
        return self._is_for_good() or (every is not None and self.step % every == 0)

    def _time_is_up(self) -> bool:
        return self.settings.save_every is None and time.monotonic() - self._saved_at > SECONDS_BETWEEN_SAVES

    def _begin_save(self) -> None:
        """Copy what a checkpoint holds; the rest is done beside the training, of one checkpoint at a time."""
        self._finish_save()
        if self._saved_step == self.step:
            return
        began = time.monotonic()
        snapshot = take_snapshot(self.module, self.optimizer, keep=self.world.is_main)
        if self.world.is_main:
            state = TrainingState(
                step=self.step,
                samples=self.samples,
                seconds=self.seconds,
                scaler=self._scaler.state_dict(),
                went_back_at=self._went_back_at,
                identity=self.identity,
            )
            seen = with_weights(self.seen, snapshot.weights)
            self._writer.begin(partial(self._stage, snapshot, seen, state, self._is_for_good()))
        self._pending = self._saved_step = self.step
        self._saved_at = time.monotonic()
        self._meter.left_out(self._saved_at - began)

    def _stage(self, snapshot: Snapshot, seen: nn.Module, state: TrainingState, kept: bool) -> None:
        checkpoint.stage(self.folder, snapshot, state=state, metadata=self.metadata(seen), kept=kept)

    def _finish_save(self) -> None:
        """Commit the checkpoint under way, once it is written, and make room; every process does so at one step."""
        if self._pending is None:
            return
        began = time.monotonic()
        step, self._pending = self._pending, None
        self.world.from_main(partial(self._commit, step))
        self._meter.left_out(time.monotonic() - began)

    def _commit(self, step: int) -> None:
        self._writer.wait()
        checkpoint.commit(self.folder, step)
        checkpoint.prune(self.folder, keep=_KEPT_CHECKPOINTS, step=step)

    def _rescue(self) -> None:
        """The run ends by an error: a checkpoint under way is whole nevertheless, and worth having."""
        if self._pending is not None and self.world.is_main:
            with suppress(Exception):  # what ended the run is told, and this may be it
                self._commit(self._pending)

    def _refresh_mirror(self) -> None:
        if is_sharded(self.module):
            weights = checkpoint.whole_weights(self.module, keep=self.world.is_main)
            if self.mirror is not None:
                self.mirror.load_state_dict(weights)

    def _run_tasks(self, tasks: Sequence[PeriodicTask], observers: Sequence[Observer]) -> None:
        final = self.step == self.settings.total_steps
        due = [task for task in tasks if final or self.step % task.every == 0]
        if not due:
            return
        began = time.monotonic()
        self._refresh_mirror()
        for task in due:
            numbers = task.run(self.step) if self.world.is_main or task.everywhere else None
            if numbers is None:
                continue
            for observer in observers:
                observer.log({"step": self.step, "samples": self.samples, "evaluation": dict(numbers)})
        self._meter.left_out(time.monotonic() - began)
