"""What a study does: its question, its variants and the evaluations of each run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from mae.config import RunConfig, is_changeable
from mae.credentials import concealed
from mae.errors import UsageError
from mae.experiments.core.job import EvalSpec, Overlap
from mae.experiments.core.metrics import COMMON_MASK_RATIO, NUM_NEIGHBOURS, PSNR_TRUE_STATISTICS, Metric
from mae.experiments.core.results import Variant
from mae.options import shown

_FINETUNE_BATCH, _FINETUNE_EPOCHS = 128, 5.0

FROZEN_FEATURES = (
    EvalSpec(protocol="knn", options={"ks": [NUM_NEIGHBOURS]}),
    EvalSpec(protocol="linear_probe", options={}),
)
"""The evaluations that train no encoder."""


@dataclass(frozen=True, kw_only=True)
class StudyRequest:
    """The options of every study that trains.

    Raises:
        UsageError: no seed, or fine-tuning of a negative length.
    """

    data: Annotated[str | None, shown("the source itself", "LABELLED")] = None
    """Labelled images for the evaluations."""
    seeds: int = 3
    """Runs of each variant, with consecutive seeds from --seed on."""
    finetune_epochs: Annotated[float | None, shown("5; none in 'quality'", "EPOCHS")] = None
    """Epochs of fine-tuning for each run; 0: no fine-tuning."""
    overlap: Overlap = "error"
    """What to do with test images that are among the training images: error, or drop them from the test."""

    def __post_init__(self) -> None:
        if self.data is not None:
            object.__setattr__(self, "data", concealed(self.data))
        epochs = self.finetune_epochs or 0.0
        if self.seeds < 1 or epochs < 0:
            raise UsageError(
                f"--seeds is {self.seeds}, --finetune-epochs {epochs:g}; expected one seed or more, and "
                "0 epochs or more"
            )


@dataclass(frozen=True, kw_only=True)
class Study:
    """A plan: everything but what differs between the variants is the same for all.

    Attributes:
        name: of the study.
        question: that it answers.
        variants: what is tried; all others are compared with the first.
        configs: of each variant, without seed and folder; empty where nothing is trained.
        evaluations: of each run.
        metrics: that the report shows.
        notes: what a reader must know.
        axis: what a variant's `x` is; empty where they have none.
        varied: options that the variants may differ in although studies usually hold them fixed.
        checkpoints: how many checkpoints of each run are evaluated too; 0: none.
    """

    name: str
    question: str
    variants: tuple[Variant, ...]
    configs: tuple[RunConfig, ...]
    evaluations: tuple[EvalSpec, ...]
    metrics: tuple[Metric, ...]
    notes: tuple[str, ...] = ()
    axis: str = ""
    varied: tuple[str, ...] = ()
    checkpoints: int = 0


@dataclass(frozen=True, kw_only=True)
class StudySetup:
    """What a study that trains builds on: the run that all variants share, and its evaluations.

    Attributes:
        base: the run: its recipe with the options that were given.
        given: names of the options that were given; no variant may change them.
        find: from a recipe's name to its configuration, with the same options.
        finetune_epochs: of fine-tuning; 0: none; None: nobody said, and as many as is usual where runs are fine-tuned.
        labelled: number of labelled training images.
    """

    base: RunConfig
    given: frozenset[str]
    find: Callable[[str], RunConfig]
    finetune_epochs: float | None
    labelled: int

    def vary(self, variant: Variant) -> RunConfig:
        """The base with a variant's own options.

        Raises:
            UsageError: the study varies an option that was given.
        """
        for name in variant.options:
            if name in self.given and self.base.flat().get(name) != variant.options[name]:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} is what this study varies (variant {variant.name}); leave it out")
        return self.base.override(variant.options)

    def evaluations(self, *more: EvalSpec) -> tuple[EvalSpec, ...]:
        """k-NN, linear probe, reconstruction, `more`, and fine-tuning where it was asked for."""
        cheap = (
            *FROZEN_FEATURES,
            EvalSpec(protocol="reconstruction", options={"mask_ratio": COMMON_MASK_RATIO}),
            *more,
        )
        if self.finetune_epochs == 0:
            return cheap
        # The official recipe is made for 100 epochs: in a short one mixed images would be all that is ever learned.
        short: dict[str, Any] = {
            "epochs": _FINETUNE_EPOCHS if self.finetune_epochs is None else float(self.finetune_epochs),
            "batch_size": min(_FINETUNE_BATCH, self.labelled),
            "base_lr": 1e-3,
            "mixing": False,
            "precision": self.base.optim.precision,
        }
        return (*cheap, EvalSpec(protocol="finetune", options=short))

    def metrics(self, *metrics: Metric) -> tuple[Metric, ...]:
        """Those of the metrics that these evaluations measure."""
        absent = {"finetune"} if self.finetune_epochs == 0 else set()
        absent |= set() if self.base.flat().get("norm_pix_loss", False) else {PSNR_TRUE_STATISTICS.name}
        return tuple(metric for metric in metrics if metric.name not in absent)


def absolute_model(name: str) -> str:
    """The path or name of a model, so that one path written in two ways is the same."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def differing(configs: Mapping[str, RunConfig]) -> dict[str, dict[str, Any]]:
    """By option the value in each variant, for the options that differ; the machine's own options left out."""
    flat = {variant: config.flat() for variant, config in configs.items()}
    names = dict.fromkeys(name for options in flat.values() for name in options)
    values = {
        name: {variant: options.get(name) for variant, options in flat.items()}
        for name in names
        if not is_changeable(name) and name != "recipe"
    }
    return {name: by_variant for name, by_variant in values.items() if len(set(map(repr, by_variant.values()))) > 1}


def with_differences(plan: Study) -> Study:
    """The plan, each variant's `options` completed by every option that differs between variants.

    Raises:
        UsageError: two variants have the same name, or are the same run.
    """
    configs = {variant.name: config for variant, config in zip(plan.variants, plan.configs, strict=True)}
    if len(configs) < len(plan.variants):
        raise UsageError(
            f"two of the variants {', '.join(variant.name for variant in plan.variants)} have the same name"
        )
    for (one, first), (other, second) in combinations(configs.items(), 2):
        if not differing({one: first, other: second}):
            raise UsageError(f"the variants {one} and {other} are the same run; leave one of them out")
    options = differing(configs)
    variants = [
        replace(variant, options={name: by_variant[variant.name] for name, by_variant in options.items()})
        for variant in plan.variants
    ]
    return replace(plan, variants=tuple(variants))
