"""The training loop."""

import json
import shlex
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from mae.errors import MAEError
from mae.records import to_json
from mae.training import checkpoint
from mae.training.checkpoint import take_snapshot, teacher_of
from mae.training.cuda_graphs import GraphedOptimizer, GraphedPass
from mae.training.device import autocast, keep_freed_memory
from mae.training.distributed import World, told_by_main
from mae.training.log import Callback
from mae.training.meter import Meter
from mae.training.rehearsal import rehearsal
from mae.training.resilience.collective_status import StatusExchange
from mae.training.resilience.nonfinite import MAX_CONSECUTIVE, NonFiniteCounter, NonFiniteSteps, all_finite
from mae.training.resilience.signals import StopSignals
from mae.training.restoring import restore
from mae.training.saver import CheckpointSaver
from mae.training.settings import CheckpointSpec, PeriodicTask, TrainingSettings
from mae.training.sharding import autocast_if_sharded, exchanging_gradients, is_sharded, whole
from mae.training.state import TrainingState, check_run

_STEPS_BETWEEN_ROLLBACKS = 1000
_LEAST_SCALE = 2.0**-14
"""Of fp16's gradients, its smallest normal number: what overflows by then is not finite in any precision."""

Batches = Callable[[int], Generator[Mapping[str, Any], None, None]]
"""From a step's number to the keyword arguments of the module's forward from there on, one item per micro-batch."""


def can_replay(settings: TrainingSettings, device: torch.device, world: World) -> bool:
    """Whether steps may be replayed: what exchanges or adds up gradients is not recorded."""
    return settings.cuda_graphs and device.type == "cuda" and world.size == 1 and settings.accumulate == 1


def ask_before_steps(optimizer: Optimizer, device: torch.device) -> None:
    """Keep a fused optimizer from taking steps that are not finite where its kernels would.

    Those of MPS ignored `found_inf` until PyTorch 2.13 (pull request 186360). Without this mark the scaler, as
    `Trainer` itself, asks whether the step is finite and leaves it out, for which it waits for the device.
    """
    if device.type == "mps":
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def _unchanged(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    return batch


class Trainer:
    """Trains a module whose forward returns an output with `.loss` and `.terms`.

    Args:
        module: the module, on its device. Its `teacher`, where it has one that is not None, is a module that no
            optimizer trains and that is none of its submodules: checkpoints hold it, and its `after_step(module,
            progress)` is called in every process after each optimizer step that changed the weights, with the run's
            progress in (0, 1]; not for steps that a resumed run has behind it, and not after a step that was skipped
            because it was not finite: then `forget_step()` is, where it has one. So are those of its `term_teachers`,
            a dictionary of submodules. With either the host waits for a GPU in every step, to know whether the step was
            skipped.
        optimizer: over the module's parameters; before each step the rate of each group is set to the schedule's,
            times the group's `lr_scale` if it has one.
        batches: what the module's forward is given, waiting for which counts as waiting for data.
        prepare: what the module adds to a batch before its forward, such as a mask by its teacher; None: nothing.
        settings: how to train.
        checkpoints: where checkpoints go, and what they hold beside the training's state.
        device: where the module is.
        world: the processes that train together.
        capture: saves what is needed to replay a step that ended the run, given the number of steps before it, and
            returns where. None: nothing is saved.
        mirror: where the module is sharded, in the main process: a whole copy of it. It gets the weights of the module
            and its teacher before tasks and `capture`, which read it.

    Attributes:
        step: optimizer steps done, skipped ones included.
        seconds: how long they took, all sessions of the run together.
        stopped_by: the signal that ended `run`, 0 for none.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
        settings: TrainingSettings,
        checkpoints: CheckpointSpec,
        device: torch.device,
        world: World,
        capture: Callable[[int], Path] | None = None,
        mirror: nn.Module | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.batches = batches
        self.prepare = prepare or _unchanged
        self.settings = settings
        self.folder = checkpoints.folder
        self.identity = json.loads(json.dumps(dict(checkpoints.identity)))  # as read again; fails here if not plain
        self.device = device
        self.world = world
        self.capture = capture
        self.mirror = mirror
        self.teacher = teacher_of(module)
        own = getattr(module, "term_teachers", {})
        self._learners: list[Any] = [*([] if self.teacher is None else [self.teacher]), *own.values()]
        self.step = 0
        self.seconds = 0.0
        self.stopped_by = 0
        self._wrapped = world.wrap(module, device)
        self._graphed: GraphedPass | None = None
        self._updates: Any = optimizer
        ask_before_steps(optimizer, device)
        # The scaler keeps fp16's small gradients from vanishing; in other precisions it does nothing.
        self._scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
        self._meter = Meter()
        self._nonfinite = NonFiniteCounter(device)
        self._exchange = StatusExchange(device, world)
        self._signals = StopSignals()
        self._saver = CheckpointSaver(checkpoints, settings=settings, world=world)
        self._rolled_back_at: int | None = None
        if can_replay(settings, device, world) and isinstance(optimizer, AdamW):
            self._replay_steps(optimizer)

    def _replay_steps(self, optimizer: AdamW) -> None:
        """Take the steps of this fused optimizer as CUDA graphs, where that is faster."""
        self._graphed = graphed = GraphedPass(self.module, self.device)
        self._updates = GraphedOptimizer(optimizer, when=lambda: graphed.is_recorded)

    @property
    def whole_module(self) -> nn.Module:
        """The module as tasks read it: whole, in the main process."""
        return self.module if self.mirror is None else self.mirror

    @property
    def samples(self) -> int:
        """Samples seen."""
        return self.step * self.settings.batch_size

    def resume(self, path: Path) -> None:
        """Resume from a checkpoint, which only the main process needs to see.

        Raises:
            MAEError: it is damaged, or of another run.
        """
        state = TrainingState(**self.world.from_main(lambda: to_json(self._read_state(path))))
        restore(path, module=self.module, optimizer=self.optimizer, world=self.world)
        self._scaler.load_state_dict(state.scaler)
        self.step, self.seconds = state.step, state.seconds
        self._rolled_back_at = state.rolled_back_at
        self._saver.saved_step = self.step

    def _read_state(self, path: Path) -> TrainingState:
        """The state in a checkpoint of this run."""
        state = checkpoint.read_state(path)
        check_run(
            path,
            state,
            identity=self.identity,
            batch_size=self.settings.batch_size,
            total_steps=self.settings.total_steps,
            scaler=self._scaler.state_dict(),
        )
        return state

    def run(self, *, observers: Sequence[Callback] = (), tasks: Sequence[PeriodicTask] = ()) -> bool:
        """Train to the end, or until a signal asks one of the processes to stop; either way the last step is saved.

        Args:
            observers: get the rows of the log; in the main process alone.
            tasks: done between steps. Every process is given as many, with the same intervals.

        Returns:
            Whether the run is finished; if not, `stopped_by` is the signal.

        Raises:
            MAEError: the loss or the gradient is not finite in several consecutive steps and there is no checkpoint to
                roll back to, or the run rolled back recently; no step changed the weights; or a checkpoint could not be
                written.
        """
        if self.device.type == "cpu":
            keep_freed_memory()
        self.stopped_by, self._signals = 0, StopSignals()
        with self._signals, closing(self.batches(self.step)) as batches:
            try:
                self._loop(batches, observers, tasks)
            except Exception:
                self._saver.rescue()
                for task in tasks:
                    with suppress(Exception):  # the run's own error is reported
                        task.finish()
                raise
            for task in tasks:
                task.finish()
        return self.step == self.settings.total_steps

    def _loop(
        self, batches: Iterator[Mapping[str, Any]], observers: Sequence[Callback], tasks: Sequence[PeriodicTask]
    ) -> None:
        began = time.monotonic() - self.seconds
        batches = self._warmed_up(batches)
        self._meter.begin()  # preparations since the meter was made are no training
        if self.step == 0:
            self._run_tasks(tasks, observers)
        while self.step < self.settings.total_steps and not self.stopped_by:
            self._train_step(batches)
            self.seconds = time.monotonic() - began
            status = self._exchange.read()
            if self._saver.is_written(status):
                self._finish_save()
            self.stopped_by = status.stop
            last = bool(self.stopped_by) or self.step == self.settings.total_steps
            save = self._saver.is_due(self.step, status)
            reading = self.step == 1 or self.step % self.settings.log_every == 0 or save or last
            finite = True
            if reading or self.device.type == "cpu":  # on a GPU reading waits for the device
                finite = self._check_nonfinite_steps(observers)
            if reading:
                self._log(observers)  # before a save: a resumed run begins with an empty meter too
            self._run_tasks(tasks, observers)  # before a save: a resumed run does not come back to this step
            # Weights whose step is not finite may be useless although finite, and would push a good checkpoint out.
            if last or (save and finite):
                self._begin_save()
        self._finish_save()
        if self.step == self.settings.total_steps:
            self._check_updated()

    def _check_updated(self) -> None:
        """Refuse to call a run finished none of whose steps changed the weights, as where fp16 overflowed in each.

        Raises:
            MAEError: that.
        """
        averages = (value for state in self.optimizer.state.values() for value in state.values())
        if any(bool(whole(value).any()) for value in averages):
            return
        why = (
            f"the loss or its gradient is not finite (nan or inf) in any step of the run, {self.step:,} in all: "
            f"its weights are those it began with. {self.settings.calmer}; and check that the images hold no nan"
        )
        raise told_by_main(MAEError(why), self.world)

    def _warmed_up(self, batches: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The batches, after a forward and backward pass over the first one that changes nothing.

        DistributedDataParallel lays its gradients out anew after its first backward pass, and three or more processes
        then add them in another order. Without this pass a resumed run would round its first step differently.
        """
        if not isinstance(self._wrapped, DistributedDataParallel):
            return batches
        first = next(batches)
        with rehearsal(self.module, self.device):
            self._backward(self._prepared(first))
        return chain([first], batches)

    def _prepared(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        with autocast_if_sharded(self.module, self.settings.precision, self.device):
            return self.prepare(batch)

    def _train_step(self, batches: Iterator[Mapping[str, Any]]) -> None:
        rate = self.settings.schedule(self.samples)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        outputs: list[dict[str, Tensor]] = []
        for number in range(self.settings.accumulate):
            waiting = time.perf_counter()
            batch = next(batches)
            self._meter.waited(time.perf_counter() - waiting)
            batch = self._prepared(batch)
            with exchanging_gradients(self._wrapped, number == self.settings.accumulate - 1):
                outputs.append(self._backward(batch) if self._graphed is None else self._graphed(self._backward, batch))
        self._scaler.unscale_(self._updates)
        norm = self._clip()
        means = {name: torch.stack([output[name] for output in outputs]).mean() for name in outputs[0]}
        finite = self._all_finite(means["loss"], norm)
        scale = self._scaler.get_scale() if self._learners else 1.0  # asking waits for the device
        self._update(finite)
        self.optimizer.zero_grad(set_to_none=True)
        self._meter.step({**means, "grad_norm": norm}, finite)
        self.step += 1
        if not self._learners:
            return
        taken = self._was_taken(finite, scale)
        for learner in self._learners:
            if taken:
                learner.after_step(self.module, self.step / self.settings.total_steps)
            elif hasattr(learner, "forget_step"):
                learner.forget_step()

    def _all_finite(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether every process found the step finite; their status travels with it."""
        status = self._saver.status(step=self.step, stop=self._signals.asked)
        finite = all_finite(loss, norm)
        if self._scaler.is_enabled():
            # fp16 overflows now and then, and the scaler skips those steps and scales less, as far as that helps.
            finite = finite | (all_finite(loss) & (self._scale() > _LEAST_SCALE))
        finite = self._exchange.exchange(finite, status)
        self._nonfinite.count(self.step, finite)
        return finite

    def _update(self, finite: Tensor) -> None:
        """Change the weights, but not by a step that is not finite."""
        if self._scaler.is_enabled():
            self._scaler.step(self._updates)
            self._scaler.update()
            self._scaler.update(self._scale().clamp(min=_LEAST_SCALE))  # it would go on to 0, where nothing is finite
        elif getattr(self._updates, "_step_supports_amp_scaling", False):
            # As the scaler makes a fused optimizer skip a step, without waiting for the device.
            self._updates.found_inf = (~finite).float()
            self._updates.step()
        elif bool(finite):
            self._updates.step()

    def _scale(self) -> Tensor:
        """What fp16's loss is multiplied by, on the device: to ask the scaler for the number would wait for that."""
        return self._scaler.scale(torch.ones((), device=self.device))

    def _was_taken(self, finite: Tensor, scale: float) -> bool:
        """Whether `_update` changed the weights; with fp16, a scale below that before it says that it did not."""
        return bool(finite) and (not self._scaler.is_enabled() or self._scaler.get_scale() >= scale)

    def _backward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Gradients of a micro-batch, added to those that are there."""
        with autocast(self.settings.precision, self.device):
            output = self._wrapped(**batch)
        self._scaler.scale(output.loss / self.settings.accumulate).backward()
        return {"loss": output.loss.detach(), **{f"terms/{name}": term.detach() for name, term in output.terms.items()}}

    def _clip(self) -> Tensor:
        """Clip the gradient if asked to; its norm before that, over all shards."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        if self.settings.clip_grad is not None:
            return whole(nn.utils.clip_grad_norm_(parameters, self.settings.clip_grad))
        return whole(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))

    def _check_nonfinite_steps(self, observers: Sequence[Callback]) -> bool:
        """Report skipped steps; several in a row, or all of a very short run, roll it back to its last good checkpoint.

        Returns:
            Whether the newest step was finite.

        Raises:
            MAEError: there is no checkpoint to roll back to, or the run rolled back recently.
        """
        steps = self._nonfinite.read()
        if steps.skipped:
            what = "1 step was" if steps.skipped == 1 else f"{steps.skipped} steps were"
            text = f"{what} skipped, the last is step {steps.last + 1}: loss or gradient not finite (nan or inf)"
            self._warn(observers, "step skipped", text)
        if steps.consecutive >= min(MAX_CONSECUTIVE, self.settings.total_steps):
            self._roll_back(observers, steps)
        return steps.now == 0

    def _roll_back(self, observers: Sequence[Callback], steps: NonFiniteSteps) -> None:
        self._finish_save()
        found = self.world.from_main(self._newest)
        newest = None if found is None else Path(found)
        recently = self._rolled_back_at is not None and self.step - self._rolled_back_at < _STEPS_BETWEEN_ROLLBACKS
        if newest is None or recently:
            why = self._why_it_ends(steps, newest)
            raise told_by_main(MAEError(why), self.world)
        scaler = self.world.from_main(lambda: self._read_state(newest).scaler)
        restore(newest, module=self.module, optimizer=self.optimizer, world=self.world)
        self._scaler.load_state_dict(scaler)
        self._rolled_back_at = self.step
        self._nonfinite.reset()
        text = (
            f"{steps.consecutive} consecutive steps were not finite: rolled back to the weights of {newest.name}; "
            f"training continues with the images after step {self.step}"
        )
        self._warn(observers, "rolled back", text)

    def _newest(self) -> str | None:
        newest = checkpoint.find_checkpoint(self.folder)
        return None if newest is None else str(newest)

    def _why_it_ends(self, steps: NonFiniteSteps, newest: Path | None) -> str:
        again = "" if self._rolled_back_at is None else f", after a rollback at step {self._rolled_back_at}"
        kept = f"the last good checkpoint is {newest}" if newest else "no checkpoint was written yet"
        captured = ""
        self._refresh_mirror()
        if self.capture is not None and self.world.is_main:
            where = self.capture(steps.last)
            captured = f"; the step is saved, replay it with: mae replay {shlex.quote(str(where))}"
        many = "1 step" if steps.consecutive == 1 else f"{steps.consecutive} consecutive steps"
        return (
            f"the loss or its gradient is not finite (nan or inf) in {many} up to step {steps.last + 1}{again}; "
            f"learning rate {self.settings.schedule(self.samples):.3g}; stopped, {kept}. "
            f"{self.settings.calmer}; and check that the images hold no nan{captured}"
        )

    def _warn(self, observers: Sequence[Callback], name: str, text: str) -> None:
        for observer in observers:
            observer.log({"step": self.step, "samples": self.samples, "warning": {"name": name, "text": text}})

    def _log(self, observers: Sequence[Callback]) -> None:
        means, names, speed = self._meter.read(self.settings.batch_size)
        values = dict(zip(names, self.world.mean(means).tolist(), strict=True))
        if not isfinite(values["loss"]):  # every step was skipped, which is reported
            return
        row = {
            "step": self.step,
            "samples": self.samples,
            "lr": self.settings.schedule(self.samples - self.settings.batch_size),
            "loss": values["loss"],
            "terms": {name.removeprefix("terms/"): v for name, v in values.items() if name.startswith("terms/")},
            # fp16 overflows in steps that the scaler skips, and JSON has no infinity.
            "grad_norm": values["grad_norm"] if isfinite(values["grad_norm"]) else None,
            **speed,
            "seconds": self.seconds,
        }
        for observer in observers:
            observer.log(row)

    def _begin_save(self) -> None:
        """Copy what a checkpoint holds; it is written beside the training."""
        self._finish_save()
        if self._saver.saved_step == self.step:
            return
        with self._meter.paused():
            snapshot = take_snapshot(self.module, self.optimizer, keep=self.world.is_main)
            state = {
                "step": self.step,
                "samples": self.samples,
                "seconds": self.seconds,
                "scaler": self._scaler.state_dict(),
                "rolled_back_at": self._rolled_back_at,
                "identity": self.identity,
            }
            self._saver.begin(snapshot, step=self.step, module=self.whole_module, state=state)

    def _finish_save(self) -> None:
        with self._meter.paused():
            self._saver.finish()

    def _refresh_mirror(self) -> None:
        if is_sharded(self.module):
            weights = checkpoint.whole_weights(self.module, keep=self.world.is_main)
            taught = checkpoint.whole_weights(self.teacher, keep=self.world.is_main) if self.teacher is not None else {}
            if self.mirror is not None:
                self.mirror.load_state_dict(weights)
            if (teacher := teacher_of(self.mirror)) is not None:
                teacher.load_state_dict(taught)

    def _run_tasks(self, tasks: Sequence[PeriodicTask], observers: Sequence[Callback]) -> None:
        final = self.step == self.settings.total_steps
        due = [task for task in tasks if final or self.step % task.every == 0]
        if not due:
            return
        with self._meter.paused():
            self._refresh_mirror()
            for task in due:
                numbers = task.run(self.step) if self.world.is_main or task.everywhere else None
                if numbers is None:
                    continue
                for observer in observers:
                    observer.log({"step": self.step, "samples": self.samples, "evaluation": dict(numbers)})
