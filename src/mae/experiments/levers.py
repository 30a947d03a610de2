"""Which changes of a run make a better encoder, or the same one sooner? Each is tried alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mae.config import PretrainConfig
from mae.errors import UsageError
from mae.experiments.plan import FEATURES, PSNR, TRAINING, Bed, Study
from mae.experiments.results import Arm
from mae.records import check_known

_PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Levers:
    """Which levers are tried, each alone, beside the run as it was asked for.

    Raises:
        UsageError: one twice, or an unknown one.
    """

    levers: tuple[str, ...] = ()
    """Names of levers; none: all of them."""

    def __post_init__(self) -> None:
        check_known(self.levers, list(LEVERS), what="lever")
        if len(set(self.levers)) < len(self.levers):
            raise UsageError(f"--levers is {' '.join(self.levers)}; expected different ones")

    def study(self, bed: Bed) -> Study:
        """The plan; levers change the run as it was asked for.

        Raises:
            UsageError: a lever multiplies what the run leaves open.
        """
        arms = [Arm(name=_PLAIN, what=f"recipe {bed.base.recipe} as it is", options={})]
        for name in self.levers or LEVERS:
            options = LEVERS[name](bed.base)
            words = ", ".join(
                f"{key.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in options.items()
            )
            arms.append(Arm(name=name, what=words, options=options))
        return Study(
            name="levers",
            question="Which change makes a better encoder, or the same one sooner?",
            arms=tuple(arms),
            configs=tuple(bed.base.override(arm.options) for arm in arms),
            judgements=bed.judgements(),
            metrics=bed.metrics(*FEATURES, PSNR, *TRAINING),
            notes=("All arms see as many crops; what a lever costs or saves in time stands beside what it does.",),
            varied=("batch_size", "epochs", "steps"),
        )


def _rate(times: float) -> Callable[[PretrainConfig], dict[str, Any]]:
    def options(base: PretrainConfig) -> dict[str, Any]:
        name = "lr" if base.lr is not None else "base_lr"
        rate = getattr(base, name)
        if rate is None:
            raise UsageError("this recipe names no learning rate to change; give --lr")
        return {name: times * rate}

    return options


def _batch(times: float) -> Callable[[PretrainConfig], dict[str, Any]]:
    def options(base: PretrainConfig) -> dict[str, Any]:
        if base.batch_size is None:
            raise UsageError("this recipe names no batch to change; give --batch-size")
        batch_size = max(1, round(times * base.batch_size))
        steps = {} if base.steps is None else {"steps": max(1, round(base.steps * base.batch_size / batch_size))}
        return {"batch_size": batch_size, **steps}

    return options


def _curriculum(base: PretrainConfig) -> dict[str, Any]:
    warmup = base.mask_warmup if base.epochs is None else min(base.mask_warmup, base.epochs / 2)
    return {"mask_schedule": "linear", "mask_warmup": warmup}


def _views(base: PretrainConfig) -> dict[str, Any]:
    """Two crops of half as many images: as many crops in all, and passes that are twice as long."""
    epochs = {"epochs": base.epochs, "warmup_epochs": base.warmup_epochs, "mask_warmup": base.mask_warmup}
    return {"views": 2, **{name: value / 2 for name, value in epochs.items() if value is not None}}


def _to(**options: Any) -> Callable[[PretrainConfig], dict[str, Any]]:
    return lambda base: options


LEVERS: dict[str, Callable[[PretrainConfig], dict[str, Any]]] = {
    "cross": _to(decoder="cross"),
    "cross-third": _to(decoder="cross", predict_share=1 / 3),
    "muon": _to(optimizer="muon"),
    "rate-up": _rate(2.5),
    "rate-down": _rate(0.4),
    "batch-half": _batch(0.5),
    "batch-double": _batch(2),
    "crops-larger": _to(crop_scale=(0.5, 1.0)),
    "mask-less": _to(mask_ratio=0.6),
    "mask-more": _to(mask_ratio=0.85),
    "curriculum": _curriculum,
    "decoder-shallow": _to(decoder_depth=1),
    "decoder-deep": _to(decoder_depth=4),
    "low-pass": _to(low_pass=0.5),
    "uniformity": _to(uniformity=0.01),
    "views": _views,
    "laplacian": _to(laplacian=0.05),
    "raw-pixels": _to(norm_pix_loss=False),
}
"""By name, what it changes in a run."""
