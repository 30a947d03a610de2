"""Signs of a run that goes wrong, read from the rows of its log.

Each sign looks at the rows of the log, keeps what little it needs of them, and speaks when it sees something. They
change nothing, and cost nothing while the device computes: the rows have been read already.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from time import monotonic
from typing import Protocol, runtime_checkable

from mae.contention import NOTEWORTHY
from mae.meanings import looks_collapsed
from mae.training.log import Callback, LogRow

_SPARE_CORES = 0.25
"""What the system itself may take of cores that a run needs."""
_FEW_CODES = 1.5
"""As many as of two codes of which one has nearly 90 % of the patches."""


@runtime_checkable
class Sign(Protocol):
    """One way in which a run can go wrong.

    Attributes:
        name: a short name of it, by which a warning is known.
    """

    name: str

    def see(self, row: LogRow) -> str | None:
        """The warning after this row; None: no warning."""


class Health:
    """An observer that passes each row to every sign, and their warnings to the other observers.

    Args:
        signs: what to look for.
        observers: whom to tell, by a row with a `warning`.
    """

    def __init__(self, signs: Sequence[Sign], observers: Sequence[Callback]) -> None:
        self._signs, self._observers = signs, observers

    def remember(self, rows: Iterable[LogRow]) -> None:
        """Pass the earlier rows to the signs, so that a resumed run gets the warnings of one that never stopped."""
        for row in rows:
            for sign in self._signs:
                sign.see(row)

    def log(self, row: LogRow) -> None:
        """Pass a row to the signs."""
        for sign in self._signs:
            if (text := sign.see(row)) is not None:
                for observer in self._observers:
                    warning = {"name": sign.name, "text": text}
                    observer.log({"step": row["step"], "samples": row["samples"], "warning": warning})

    def close(self) -> None:
        """Nothing to close."""


class LossSpike:
    """The loss jumps far above what it was.

    Far: above the median of the last rows by half of it and by six of their usual spreads, which chance alone
    exceeds less than once in a hundred million rows.
    """

    name = "loss spike"
    _ROWS, _LEAST, _SPREADS, _SHARE = 20, 10, 6.0, 0.5

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=self._ROWS)
        self._quiet = 0

    def see(self, row: LogRow) -> str | None:
        """See `Sign`."""
        if "loss" not in row:
            return None
        loss, before = row["loss"], list(self._last)
        self._last.append(loss)
        self._quiet = max(0, self._quiet - 1)
        if len(before) < self._LEAST or self._quiet:
            return None
        usual = median(before)
        spread = 1.4826 * median(abs(value - usual) for value in before)  # of a normal distribution
        if loss <= usual + max(self._SPREADS * spread, self._SHARE * abs(usual)):
            return None
        self._quiet = self._ROWS  # one jump is told once
        return (
            f"the loss jumped to {loss:.4g} from about {usual:.4g}; if it does not come back within some hundred "
            "steps, lower the rate (--lr) or keep --clip-grad 1, and begin anew"
        )


class GradientGrowth:
    """The gradient norm has grown to many times its value at the end of the warm-up.

    Args:
        after: samples of the warm-up.
    """

    name = "gradient growth"
    _ROWS, _FACTOR = 5, 10.0

    def __init__(self, *, after: float) -> None:
        self._after = after
        self._last: deque[float] = deque(maxlen=self._ROWS)
        self._lowest: float | None = None

    def see(self, row: LogRow) -> str | None:
        """See `Sign`."""
        norm = row.get("grad_norm")
        if not norm or row["samples"] <= self._after:  # of 0, as where nothing was known, nothing is a multiple
            return None
        self._last.append(norm)
        if len(self._last) < self._ROWS:
            return None
        now = median(self._last)
        if self._lowest is None or now < self._lowest:
            self._lowest = now
        if now <= self._FACTOR * self._lowest:
            return None
        text = (
            f"the gradient's norm has grown to {now:.3g}, {now / self._lowest:.0f} times what it was "
            f"({self._lowest:.3g}): the run may be about to diverge; lower the rate (--lr)"
        )
        self._lowest = now  # told again only if it grows as much again
        return text


class DataWait:
    """The device waits for images.

    Args:
        explain: what limits the loading, in words; asked once, when there is something to explain.
    """

    name = "data wait"
    _STEPS, _SHARE = 200, 0.15

    def __init__(self, explain: Callable[[], str]) -> None:
        self._explain = explain
        self._told = False
        self._rows: list[tuple[int, float]] = []

    def see(self, row: LogRow) -> str | None:
        """See `Sign`."""
        if "loss" not in row or self._told:
            return None
        self._rows.append((row["step"], row["data_wait"]))
        if row["step"] - self._rows[0][0] < self._STEPS:
            return None
        spans = [(after - before, wait) for (before, _), (after, wait) in zip(self._rows, self._rows[1:], strict=False)]
        share = sum(steps * wait for steps, wait in spans) / sum(steps for steps, _ in spans)
        self._rows = self._rows[-1:]
        if share <= self._SHARE:
            return None
        self._told = True
        return f"{share:.0%} of the time is spent waiting for images: {self._explain()}"


class SharedCores:
    """Other processes use cores that the run computes on.

    Args:
        look: cores that others took on average since it was last called.
        threads: that the run computes with.
        cores: there are.
    """

    name = "shared cores"
    _SECONDS = 10.0

    def __init__(self, look: Callable[[], float], *, threads: int, cores: int) -> None:
        self._look, self._threads, self._cores = look, threads, cores
        self._since = monotonic()
        self._told = False

    def see(self, row: LogRow) -> str | None:
        """See `Sign`."""
        if self._told or (now := monotonic()) - self._since < self._SECONDS:
            return None
        self._since = now
        text = shared_cores(self._look(), threads=self._threads, cores=self._cores)
        self._told = bool(text)
        return text or None


def shared_cores(taken: float, *, threads: int, cores: int) -> str:
    """The warning where others use cores that a run needs; empty where there are enough for both."""
    if taken < NOTEWORTHY or taken + threads < cores + _SPARE_CORES:
        return ""
    return (
        f"other processes take {taken:.1f} of the {cores} cores: steps take longer than they would alone, by more than "
        "that share, for the threads of a step wait for each other; stop those processes, or let them run later"
    )


class NoBetterThanMean:
    """After the warm-up the model is no better than predicting the mean of what is visible.

    Args:
        baseline: the reconstruction term of that predictor.
        after: samples after which the model should have learned something; told again at twice as many.
        mean: what that mean is of the run's target, in words.
        advice: where to look for the reason.
    """

    name = "no better than the mean"
    _ROWS, _SHARE = 5, 0.95

    def __init__(self, *, baseline: float, after: float, mean: str, advice: str) -> None:
        self._baseline, self._after = baseline, after
        self._mean, self._advice = mean, advice
        self._last: deque[float] = deque(maxlen=self._ROWS)
        self._times = 0

    def see(self, row: LogRow) -> str | None:
        """See `Sign`."""
        if "loss" not in row or self._times == 2:
            return None
        self._last.append(row["terms"]["reconstruction"])
        if len(self._last) < self._ROWS or row["samples"] < self._after * 2**self._times:
            return None
        self._times += 1
        now = sum(self._last) / len(self._last)
        if now < self._SHARE * self._baseline:
            return None
        hardly = ", hardly more" if now < self._baseline else ""
        return (
            f"after {row['step']:,} steps the reconstruction loss is {now:.4f}, and predicting {self._mean} alone "
            f"gives {self._baseline:.4f}{hardly}: these may be too few steps yet, the rate may be far too small or too "
            f"large, the images may be constant or noise, or normalised wrongly; {self._advice}"
        )


class Divergence:
    """The loss stays far above that of predicting the mean, and above that of the initial weights.

    Args:
        baseline: the reconstruction term of predicting 0.
    """

    name = "diverging"
    _ROWS, _FACTOR, _OF_FIRST = 3, 3.0, 2.0  # where most patches are flat fresh weights are far above the baseline

    def __init__(self, *, baseline: float) -> None:
        self._baseline = baseline
        self._bound = 0.0
        self._rows = 0
        self._told = False

    def see(self, row: LogRow) -> str | None:
        """See `Sign`."""
        if "loss" not in row:
            return None
        now = row["terms"]["reconstruction"]
        self._bound = self._bound or max(self._FACTOR * self._baseline, self._OF_FIRST * now)
        self._rows = self._rows + 1 if now > self._bound else 0
        self._told = self._told and now > self._baseline  # again only after it was well
        if self._rows < self._ROWS or self._told:
            return None
        self._told = True
        return (
            f"the reconstruction loss is {now:.4g}, and predicting 0 everywhere gives {self._baseline:.4g}: the rate "
            "is far too high; begin anew with a lower --lr (1e-3 suits most models), and keep --clip-grad 1"
        )


class Overfitting:
    """The loss on held-out images rises while the training loss falls."""

    name = "overfitting"
    _LOOKS, _SHARE = 2, 0.01

    def __init__(self) -> None:
        self._best: tuple[float, float, int] | None = None  # held out, trained on, step
        self._worse = 0

    def see(self, row: LogRow) -> str | None:
        """See `Sign`."""
        numbers = row.get("evaluation", {})
        if "held_out" not in numbers:
            return None
        held_out, trained = numbers["held_out"], numbers["held_out_train"]
        if self._best is None or held_out < self._best[0]:
            self._best, self._worse = (held_out, trained, row["step"]), 0
            return None
        best, trained_then, step = self._best
        rises = held_out > (1 + self._SHARE) * best and trained < trained_then
        self._worse = self._worse + 1 if rises else 0
        if self._worse != self._LOOKS:
            return None
        return (
            f"overfitting since step {step:,}: the loss of held-out images rose from {best:.4f} to {held_out:.4f} "
            f"while that of trained ones fell from {trained_then:.4f} to {trained:.4f}; more images, a smaller model "
            "or fewer epochs help"
        )


class Collapse:
    """The effective rank of the features falls to less than half of what it was or to one, or they stay alike.

    Alike: see `mae.meanings.looks_collapsed`. That is told once, since a short run may well end like this.
    """

    name = "feature collapse"
    _SHARE, _ONE = 0.5, 1.1

    def __init__(self) -> None:
        self._most = 0.0
        self._was_one = False
        self._told_alike = False

    def see(self, row: LogRow) -> str | None:
        """See `Sign`."""
        rank = row.get("evaluation", {}).get("effective_rank")
        if rank is None or row["step"] == 0:  # fresh weights have a rank of their own, which says nothing
            return None
        most, was_one = self._most, self._was_one
        self._most, self._was_one = max(most, rank), rank < self._ONE
        if self._was_one and not was_one:
            self._most = rank
            return (
                f"the effective rank of the features is {rank:.2f}: all images look alike to the model; the rate may "
                "be far too high (lower --lr and begin anew), or the images show nearly the same"
            )
        if rank >= self._SHARE * most:
            return self._alike(row["evaluation"])
        self._most = rank  # told again only if it falls as much again
        return (
            f"the effective rank of the features fell to {rank:.1f} from {most:.1f}: they tell images apart less and "
            "less; lower the rate (--lr), or stop at an earlier checkpoint"
        )

    def _alike(self, numbers: Mapping[str, float]) -> str | None:
        if self._told_alike or not looks_collapsed(numbers):
            return None
        self._told_alike = True
        return (
            f"the features hardly tell images apart: mean cosine {numbers['mean_cosine']:.3f} (1: all alike), "
            f"effective rank {numbers['effective_rank']:.1f}; early in a run, or where the images show "
            "nearly the same, this may pass: train longer, and look at the rank again"
        )


class FewCodes:
    """Nearly all patches have one code of a codebook, so little is left to predict; told anew if it recovered."""

    name = "codebook collapse"

    def __init__(self) -> None:
        self._told = False

    def see(self, row: LogRow) -> str | None:
        """See `Sign`."""
        numbers = row.get("evaluation", {})
        used = min((value for name, value in numbers.items() if name.endswith("codes_used")), default=None)
        if used is None or row["step"] == 0:
            return None
        told, self._told = self._told, used < _FEW_CODES
        if told or not self._told:
            return None
        return (
            f"the codebook is used as if it had {used:.2f} codes: nearly all patches have the same one or none, and "
            "nothing is left to predict; look whether the images are empty, or whether most patches lack a value"
        )
