"""Steps replayed as CUDA graphs: where kernels are short, a GPU waits for Python to ask for each of them."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from mae.training.device import synchronise
from mae.training.rehearsal import rehearsal

_log = logging.getLogger(__name__)

_ALIKE = 10
"""Batches of the same shapes in a row after which their pass is recorded: masks may have another length each time."""
_TIMED = 3
"""Passes whose fastest counts, as they are and replayed."""
_GAIN = 1.05
"""Times as fast from which replays are kept: they hold the memory of a pass for good."""
_SHARE = 1 / 3
"""Of the memory there is that the run may have taken so far: a pass that is recorded takes its own."""

Numbers = dict[str, Tensor]
Pass = Callable[[Mapping[str, Any]], Numbers]


class GraphedPass:
    """A pass forward and backward; after some batches of the same shapes a CUDA graph, where that is faster.

    The graph reads and writes the same addresses each time. Batches are copied to where it reads them, and the weights
    must be changed in place. A pass that cannot be recorded, as one that reads values on the host, goes on as it is,
    and a warning says why.

    Args:
        module: whose parameters get the gradients.
        device: a CUDA device.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # of what this process did before the run
        self._gave_up = False
        self._begin([])

    @property
    def is_recorded(self) -> bool:
        """Whether passes are replayed, and not on trial."""
        return self._replay is not None and self._calls >= _ALIKE + _TIMED

    def __call__(self, run: Pass, batch: Mapping[str, Any]) -> Numbers:
        """The numbers of a batch; good until the next call.

        Args:
            run: the pass, the same each time: from a batch to its numbers, with the gradients in the parameters'
                `.grad`, where there were none.
            batch: tensors and other values, also in mappings and dataclasses.
        """
        values = list(_leaves(batch))
        shapes = [(each.shape, each.dtype) if isinstance(each, Tensor) else each for each in values]
        if shapes != self._shapes:
            self._begin(shapes)
        self._calls += 1
        if self._gave_up or self._calls <= _ALIKE - _TIMED:
            return run(batch)
        if self._calls <= _ALIKE:
            return self._timed(lambda: run(batch), self._plain)
        if self._replay is None and not self._record(run, batch):
            return run(batch)
        assert self._replay is not None
        torch._foreach_copy_(self._inputs, [each for each in values if isinstance(each, Tensor)])
        if self._calls > _ALIKE + _TIMED:
            return self._replay()
        found = self._timed(self._replay, self._replayed)
        if self._calls == _ALIKE + _TIMED:
            gain = min(self._plain) / min(self._replayed)
            self._gave_up = gain < _GAIN
            _log.info("a pass as a CUDA graph is %.2f times as fast%s", gain, ": not kept" if self._gave_up else "")
            if self._gave_up:
                self._begin([])
        return found

    def _begin(self, shapes: list[Any]) -> None:
        """Count batches of these shapes."""
        self._shapes, self._calls = shapes, 0
        self._replay: Callable[[], Numbers] | None = None
        self._inputs: list[Tensor] = []
        self._plain: list[float] = []
        self._replayed: list[float] = []

    def _timed(self, run: Callable[[], Numbers], seconds: list[float]) -> Numbers:
        synchronise(self._device)
        began = perf_counter()
        found = run()
        synchronise(self._device)
        seconds.append(perf_counter() - began)
        return found

    def _record(self, run: Pass, batch: Mapping[str, Any]) -> bool:
        held = _copied(batch)
        self._gave_up = not _has_room(self._device)
        if self._gave_up:
            _log.info("steps are not replayed as CUDA graphs: they took more than %.0f %% of the memory", 100 * _SHARE)
            return False
        handled = sys.exception()
        try:
            with rehearsal(self._module, self._device), _aside(self._device):  # libraries ask for memory there
                run(held)
            graph, found = record(lambda: run(held), self._device)
        except RuntimeError as error:
            self._gave_up = True
            self._module.zero_grad(set_to_none=True)
            _log.warning("the steps of this run are not replayed as CUDA graphs: %s", _cause(error, handled))
            return False
        gradients = [(each, each.grad) for each in self._module.parameters()]

        def replay() -> Numbers:
            graph()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            return found

        self._inputs = [each for each in _leaves(held) if isinstance(each, Tensor)]
        self._replay = replay
        return True


class GraphedOptimizer:
    """Takes the steps of AdamW or Muon, as a CUDA graph where the gradients lie at the same addresses each time.

    What gradient scalers and the engine ask of an optimizer.

    Args:
        optimizer: fused, on a CUDA device; its averages stay the same tensors.
        when: whether steps are to be recorded by now.

    Attributes:
        found_inf: not 0 where a step is to be skipped; on the device, set before each step.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor

    def __init__(self, optimizer: AdamW, when: Callable[[], bool]) -> None:
        self._optimizer, self._when = optimizer, when
        device = optimizer.param_groups[0]["params"][0].device
        self._device, self._skip = device, torch.zeros((), device=device)
        self._rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self._gave_up = False
        self._places: list[int] = []
        self._replay: Callable[[], None] | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own."""
        return self._optimizer.param_groups

    def step(self) -> None:
        """Update every parameter that has a gradient, with the rates of the groups."""
        every = (parameter.grad for group in self.param_groups for parameter in group["params"])
        places = [0 if gradient is None else gradient.data_ptr() for gradient in every]
        if places != self._places:
            self._places, self._replay = places, None
        elif self._replay is None and not self._gave_up and self._when():
            self._record()
        if self._replay is None:
            self._optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
            self._optimizer.step()
            return
        for rate, group in zip(self._rates, self.param_groups, strict=True):
            rate.fill_(group["lr"])
        self._skip.copy_(self.found_inf)
        self._replay()

    def _record(self) -> None:
        before = [{"lr": group["lr"], "capturable": group["capturable"]} for group in self.param_groups]
        for rate, group in zip(self._rates, self.param_groups, strict=True):
            group.update(lr=rate, capturable=True)  # the rate is read on the device, as a graph must
        self._optimizer.found_inf = self._skip  # type: ignore[attr-defined]
        handled = sys.exception()
        try:
            self._replay, _ = record(self._optimizer.step, self._device)
        except RuntimeError as error:
            self._gave_up = True
            _log.warning("the optimizer's steps are not replayed as a CUDA graph: %s", _cause(error, handled))
        finally:
            for group, values in zip(self.param_groups, before, strict=True):
                group.update(values)


def record(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """What `run` asks of the device, to be asked for again at once, and what it gave, which a replay fills.

    Nothing is computed until then.

    Raises:
        RuntimeError: it reads values on the host, or memory is short.
    """
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.device(device),
        torch.cuda.stream(torch.cuda.current_stream(device)),  # where a failure leads back to; not so by torch 2.11
        torch.cuda.graph(graph, capture_error_mode="thread_local"),  # other threads go on saving and loading
    ):
        found = run()
    return graph.replay, found


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """In another stream than the usual one, as while recording."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)


def _has_room(device: torch.device) -> bool:
    free, _ = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_allocated(device) <= _SHARE * (free + torch.cuda.memory_reserved(device))


def _cause(error: BaseException, handled: BaseException | None) -> str:
    """The first line of what began it: ending a recording that failed fails too.

    Args:
        error: what came of it.
        handled: what was being handled before, which has nothing to do with it.
    """
    while error.__context__ is not None and error.__context__ is not handled:
        error = error.__context__
    return next(iter(str(error).splitlines()), type(error).__name__)


def _leaves(value: Any) -> Iterator[Any]:
    """What stands in mappings and dataclasses, in their order."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value


def _copied(value: Any) -> Any:
    """The same with copies of its tensors."""
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _copied(getattr(value, field.name)) for field in fields(value)})
    return value.clone() if isinstance(value, Tensor) else value
