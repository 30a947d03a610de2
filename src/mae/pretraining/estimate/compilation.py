"""Whether a run compiles its blocks (`--compile`): a long one tries it before it begins, and each tells why not."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from time import perf_counter

import torch

from mae.data.remote.cache import user_cache
from mae.errors import UsageError
from mae.layers.compiled import compile_blocks, compiling, first_line, suppressed_errors
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.pretraining.estimate.profile import TrialStep, first_crops, lowest_and_mean_ratio
from mae.pretraining.resolve import RunContext
from mae.report.terminal.console import duration
from mae.training.device import keep_freed_memory, synchronise
from mae.training.distributed import World
from mae.training.rehearsal import rehearsal

WORTH_TRYING = {"cpu": 1200.0, "cuda": 300.0}
"""Seconds of training from which `auto` tries it: it takes up to a minute, and on a CPU saves some percent."""

_CROPS = 8
"""Real crops, which fill a part of a batch again and again: a model takes as long over them, and they are read soon."""
_TURNS, _SECONDS = (3, 60), 4.0
"""Of passes in turns: as many as take some seconds, for behind a compilation its processes still use the machine."""
_GAIN = 1.02
"""Times as fast from which it pays: less is lost in the noise of a few passes."""


@dataclass(frozen=True, kw_only=True)
class CompileTrial:
    """Passes forward and backward as they are and compiled, in turns.

    Attributes:
        seconds: of the fastest pass as it is.
        compiled: seconds of the fastest that is compiled; infinite where that failed.
        compilation: seconds that the compilation took.
        failed: where it failed, and why if that was here; empty where it did not.
    """

    seconds: float
    compiled: float = inf
    compilation: float = 0.0
    failed: str = ""

    @property
    def gain(self) -> float:
        """Times as fast."""
        return self.seconds / self.compiled

    def told(self) -> str:
        """What came of it, in a sentence."""
        if self.failed:
            return f"the blocks cannot be compiled {self.failed}"
        return f"compiled in {duration(self.compilation)}, the blocks' passes are {self.gain:.2f} times as fast"


def is_worth_trying(device: torch.device, seconds: float) -> bool:
    """Whether `auto` tries it where so many seconds of training are left."""
    return seconds >= WORTH_TRYING.get(device.type, inf)


def pays(trial: CompileTrial) -> bool:
    """Whether the compiled passes are faster by more than noise."""
    return trial.gain >= _GAIN


def try_compilation(
    model: MaskedAutoencoder, passed: Callable[[], float], world: World, *, dynamic: bool
) -> CompileTrial:
    """Compile the blocks, which they stay unless it fails, and time passes; used inside `compiling`.

    The fastest pass of each kind counts: whatever else the machine does only adds. A process in which the compiler
    fails still does the pass, as it is, so that none waits for it in an exchange.

    Args:
        model: whose blocks are compiled.
        passed: does a pass forward and backward in every process of a run, and returns the seconds it took.
        world: the run's processes.
        dynamic: see `compile_blocks`.
    """
    passed()  # the first one also takes memory from the system
    plain: list[float] = [passed()]
    least, most = _TURNS
    turns = min(max(least, ceil(_SECONDS / (2 * world.minimum(torch.tensor(plain[0])).item()))), most)
    compiled: list[float] = []
    compilation, error = _compiled_pass(model, passed, dynamic=dynamic)
    if not world.minimum(torch.tensor(float(not error))).item():
        compile_blocks(model, on=False)
        return CompileTrial(seconds=plain[0], failed=f"here ({error})" if error else "in another process")
    for _ in range(turns):
        compile_blocks(model, on=False)
        plain.append(passed())
        compile_blocks(model, dynamic=dynamic)
        compiled.append(passed())
    return CompileTrial(seconds=min(plain), compiled=min(compiled), compilation=compilation)


def _compiled_pass(model: MaskedAutoencoder, passed: Callable[[], float], *, dynamic: bool) -> tuple[float, str]:
    """Seconds of the first pass with compiled blocks, and what failed of it; empty: nothing."""
    compile_blocks(model, dynamic=dynamic)
    with suppressed_errors() as errors:
        try:
            seconds = passed()
        except Exception as error:  # compiled code that does not run: the run can do without it
            return 0.0, first_line(error)
    return seconds, next(iter(errors), "")


def settle_compilation(
    prepared: RunContext, model: MaskedAutoencoder, *, done: int, held: ExitStack
) -> tuple[RunContext, str]:
    """Compile the blocks where the run says so, or where with `auto` that pays; all processes decide alike.

    Args:
        prepared: the run, whose every process must call it.
        model: on its device; sharded where it is to be.
        done: optimizer steps that it has behind it.
        held: until it is closed, blocks that cannot be compiled for a new shape are computed as they are.

    Returns:
        The run, whose `compile` is `on` or `off` unless it is over, and what to tell of it: nothing where nothing was
        tried.

    Raises:
        MAEError: images that cannot be read.
    """
    asked, world = prepared.config.machine.compile, prepared.world
    passes = (prepared.total_steps - done) * prepared.config.machine.accumulate
    if not passes:  # it is over
        return prepared, ""
    if asked == "off":
        return _with_compile(prepared, "off"), ""
    with ExitStack() as stack, _rehearsed(prepared, model) as passed:
        if asked == "auto" and (why := _why_untried(prepared, passed, passes)):
            return _with_compile(prepared, "off"), f"the blocks are not compiled: {why}"
        stack.enter_context(compiling(compiled_code()))
        trial = try_compilation(model, passed, world, dynamic=prepared.mask_schedule.kind != "const")
        faster = world.minimum(torch.tensor(float(pays(trial)))).item() > 0
        if faster or (asked == "on" and not trial.failed):
            held.enter_context(stack.pop_all())
            return _with_compile(prepared, "on"), trial.told()
        compile_blocks(model, on=False)
        told = f"{trial.told()}, but not in another process" if pays(trial) else trial.told()
    return _with_compile(prepared, "off"), f"{told}; they are not"


def _why_untried(prepared: RunContext, passed: Callable[[], float], passes: int) -> str:
    """Why `auto` does not try it for so many passes; the fastest process decides. Empty: it does."""
    if (kind := prepared.device.type) not in WORTH_TRYING:
        return f"--compile auto does not try it on {kind}; --compile on does"
    # The first pass also readies the device: what it says is believed only where it says that the run is short.
    lefts = (prepared.world.minimum(torch.tensor(passes * passed())).item() for _ in range(2))
    tries = all(is_worth_trying(prepared.device, left) for left in lefts)
    return "" if tries else "the passes of this run take too short to win it back"


@contextmanager
def _rehearsed(prepared: RunContext, model: MaskedAutoencoder) -> Iterator[Callable[[], float]]:
    """A function that does a pass forward and backward over a part of a batch, and returns the seconds it took."""
    if prepared.device.type == "cpu":
        keep_freed_memory()  # as in a run
    crops, keys = first_crops(prepared, _CROPS)
    chosen = torch.arange(prepared.part_size) % len(crops)
    step, (lowest, _) = TrialStep(prepared, model, crops[chosen], keys[chosen]), lowest_and_mean_ratio(prepared)

    def passed() -> float:
        began = perf_counter()
        step.backward(lowest)
        synchronise(prepared.device)
        return perf_counter() - began

    with rehearsal(model, prepared.device):
        yield passed


def _with_compile(prepared: RunContext, value: str) -> RunContext:
    return replace(prepared, config=prepared.config.override({"compile": value}))


def compiled_code() -> Path | None:
    """The folder for what is compiled, beside the weights that were fetched; None where there can be none."""
    try:
        return user_cache().root / "compiled"
    except UsageError:
        return None
