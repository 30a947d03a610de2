"""Which changes of a run make a better encoder, or the same one sooner? Each is tried alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import tyro

from mae.config import RunConfig
from mae.errors import UsageError
from mae.experiments.core.metrics import FEATURES, PSNR, TRAINING
from mae.experiments.core.plan import Study, StudySetup
from mae.experiments.core.results import Variant
from mae.records import check_known

_PLAIN = "plain"


def _rate(times: float) -> Callable[[RunConfig], dict[str, Any]]:
    def options(base: RunConfig) -> dict[str, Any]:
        name = "lr" if base.optim.lr is not None else "base_lr"
        rate = getattr(base.optim, name)
        if rate is None:
            raise UsageError("this recipe sets no learning rate to scale; give --lr")
        return {name: times * rate}

    return options


def _batch(times: float) -> Callable[[RunConfig], dict[str, Any]]:
    def options(base: RunConfig) -> dict[str, Any]:
        if base.optim.batch_size is None:
            raise UsageError("this recipe sets no batch size to scale; give --batch-size")
        batch_size = max(1, round(times * base.optim.batch_size))
        steps = (
            {}
            if base.optim.steps is None
            else {"steps": max(1, round(base.optim.steps * base.optim.batch_size / batch_size))}
        )
        return {"batch_size": batch_size, **steps}

    return options


def _curriculum(base: RunConfig) -> dict[str, Any]:
    warmup = base.optim.mask_warmup if base.optim.epochs is None else min(base.optim.mask_warmup, base.optim.epochs / 2)
    return {"mask_schedule": "linear", "mask_warmup": warmup}


def _repeated_aug(base: RunConfig) -> dict[str, Any]:
    """Two crops of each image and half as many epochs: the same number of crops."""
    epochs = {
        "epochs": base.optim.epochs,
        "warmup_epochs": base.optim.warmup_epochs,
        "mask_warmup": base.optim.mask_warmup,
    }
    return {"repeated_aug": 2, **{name: value / 2 for name, value in epochs.items() if value is not None}}


def _to(**options: Any) -> Callable[[RunConfig], dict[str, Any]]:
    return lambda base: options


ABLATIONS: dict[str, Callable[[RunConfig], dict[str, Any]]] = {
    "cross": _to(decoder="cross"),
    "cross-third": _to(decoder="cross", mask_predicted=1 / 3),
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
    "low-pass": _to(target="low_pass", target_cutoff=0.5),
    "uniformity": _to(uniformity=0.01),
    "repeated-aug": _repeated_aug,
    "laplacian": _to(laplacian=0.05),
    "raw-pixels": _to(norm_pix_loss=False),
    "codes": _to(target="codes", teacher="codebook", loss="cross_entropy"),
    "hard": _to(mask="hard", teacher="ema", difficulty=1.0),
}
"""By name, the options that each changes in a run."""

_NAMES = tyro.conf.arg(
    help=f"Changes to try, see docs/results/ablations.md: {', '.join(ABLATIONS)}.",
    help_behavior_hint="(default: all of them)",
    metavar="NAME [NAME ...]",
)


@dataclass(frozen=True, kw_only=True)
class Ablate:
    """Which changes are tried, each alone, against the run as given.

    Raises:
        UsageError: one twice, or an unknown one.
    """

    trains: ClassVar[bool] = True
    ablations: Annotated[tuple[str, ...], _NAMES] = ()
    """Names in `ABLATIONS`; none: all of them."""

    def __post_init__(self) -> None:
        check_known(self.ablations, list(ABLATIONS), what="ablation")
        if len(set(self.ablations)) < len(self.ablations):
            raise UsageError(f"--ablations is {' '.join(self.ablations)}; expected different ones")

    def study(self, setup: StudySetup) -> Study:
        """The plan; each variant changes the run as given.

        Raises:
            UsageError: an ablation scales an option that the run leaves open.
        """
        variants = [Variant(name=_PLAIN, what=f"recipe {setup.base.recipe} as it is", options={})]
        for name in self.ablations or ABLATIONS:
            options = ABLATIONS[name](setup.base)
            words = ", ".join(
                f"{key.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in options.items()
            )
            variants.append(Variant(name=name, what=words, options=options))
        return Study(
            name="ablate",
            question="Which change makes a better encoder, or the same one sooner?",
            variants=tuple(variants),
            configs=tuple(setup.base.override(variant.options) for variant in variants),
            evaluations=setup.evaluations(),
            metrics=setup.metrics(*FEATURES, PSNR, *TRAINING),
            notes=(
                "All variants see the same number of crops; the time that a change costs or saves is shown beside "
                "its effect.",
            ),
            varied=("batch_size", "epochs", "steps"),
        )
