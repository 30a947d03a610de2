"""What a study does: its question, its arms and how each run is judged."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from mae.config import MACHINE_FIELDS, PretrainConfig, as_flags
from mae.data.sources import KNOWN
from mae.errors import UsageError
from mae.experiments.job import NEIGHBOURS, Job, Judgement
from mae.experiments.results import Arm, Metric

LINEAR_PROBE = Metric(name="linear_probe", title="linear probe, top-1", better="higher", kind="share")
FINETUNE = Metric(name="finetune", title="fine-tuning, top-1", better="higher", kind="share")
KNN = Metric(name="knn", title="k-NN, top-1", better="higher", kind="share")
PSNR = Metric(name="psnr", title="PSNR of hidden pixels", better="higher", kind="decibel")
PSNR_TOLD = Metric(name="psnr_told", title="PSNR, told the true patch statistics", better="higher", kind="decibel")
SSIM = Metric(name="ssim", title="SSIM of hidden pixels", better="higher", kind="number")
LAPLACIAN = Metric(name="laplacian", title="high-frequency error of hidden pixels", better="lower", kind="number")
LOSS = Metric(name="loss", title="last reconstruction loss in training", better=None, kind="number")
EPOCH = Metric(name="epoch_seconds", title="time of an epoch", better=None, kind="seconds")
SECONDS = Metric(name="seconds", title="training time", better=None, kind="seconds")

_FINETUNE_BATCH = 128
COMMON_RATIO = 0.75
"""Of the patches, hidden from every arm where pictures are judged or shown."""

FEATURES, PICTURES, TRAINING = (LINEAR_PROBE, FINETUNE, KNN), (PSNR, PSNR_TOLD, SSIM, LAPLACIAN), (LOSS, EPOCH, SECONDS)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A plan: everything but what differs between the arms is locked.

    Attributes:
        name: of the study.
        question: that it answers.
        arms: what is tried; all but the first are compared with it.
        configs: of each arm, without seed and folder; empty where nothing is trained.
        judgements: of each run.
        metrics: that are shown.
        notes: what a reader must know.
        axis: what an arm's place is; empty where they have none.
        varied: options that its arms may differ in, though all else is to be equal.
        looks: how often each run is judged on its way; 0: only when it is trained.
    """

    name: str
    question: str
    arms: tuple[Arm, ...]
    configs: tuple[PretrainConfig, ...]
    judgements: tuple[Judgement, ...]
    metrics: tuple[Metric, ...]
    notes: tuple[str, ...] = ()
    axis: str = ""
    varied: tuple[str, ...] = ()
    looks: int = 0


@dataclass(frozen=True, kw_only=True)
class Bed:
    """What every trained study is told: the run that all arms share, and how it is judged.

    Attributes:
        base: the run, its recipe's options overridden by those that were given.
        given: names of the options that were given; no arm may change them.
        find: from a recipe's name to its configuration, overridden likewise.
        finetune_epochs: passes of fine-tuning; 0: none.
        labelled: number of labelled training images.
    """

    base: PretrainConfig
    given: frozenset[str]
    find: Callable[[str], PretrainConfig]
    finetune_epochs: float
    labelled: int

    def vary(self, arm: Arm) -> PretrainConfig:
        """The base with an arm's own options.

        Raises:
            UsageError: an option that was given is what the study varies.
        """
        for name in arm.options:
            if name in self.given and getattr(self.base, name) != arm.options[name]:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} is what this study varies (arm {arm.name}); leave it out")
        return self.base.override(arm.options)

    def judgements(self, *more: Judgement) -> tuple[Judgement, ...]:
        """k-NN, linear probe, pictures, what more a study wants, and fine-tuning where it was asked for."""
        cheap = (
            Judgement(protocol="knn", options={"ks": [NEIGHBOURS]}),
            Judgement(protocol="linear_probe", options={}),
            Judgement(protocol="reconstruction", options={"mask_ratio": COMMON_RATIO}),
            *more,
        )
        if not self.finetune_epochs:
            return cheap
        # The official recipe is made for 100 epochs: in a short one mixed images would be all that is ever learned.
        short: dict[str, Any] = {
            "epochs": float(self.finetune_epochs),
            "batch_size": min(_FINETUNE_BATCH, self.labelled),
            "base_lr": 1e-3,
            "mixing": False,
            "precision": self.base.precision,
        }
        return (*cheap, Judgement(protocol="finetune", options=short))

    def metrics(self, *metrics: Metric) -> tuple[Metric, ...]:
        """Those that these judgements measure."""
        told = self.base.norm_pix_loss
        left_out = ({"finetune"} if not self.finetune_epochs else set()) | (set() if told else {"psnr_told"})
        return tuple(metric for metric in metrics if metric.name not in left_out)


def differing(configs: Mapping[str, PretrainConfig]) -> dict[str, dict[str, Any]]:
    """By option the value in each arm, for the options that are not alike in all; a machine's own left out."""
    names = [field.name for field in fields(PretrainConfig) if field.name not in MACHINE_FIELDS | {"recipe"}]
    values = {name: {arm: getattr(config, name) for arm, config in configs.items()} for name in names}
    return {name: by_arm for name, by_arm in values.items() if len(set(map(repr, by_arm.values()))) > 1}


def commands(job: Job, base: PretrainConfig | None) -> tuple[str, ...]:
    """What a user would type to do the same as a job.

    Args:
        job: the run.
        base: the configuration of the recipe that the job's names; None where nothing is trained.
    """
    typed = []
    if job.config is not None and base is not None:
        config = PretrainConfig.from_json(job.config)
        changed = [
            flag
            for field in fields(PretrainConfig)
            if field.name not in ("source", "recipe", "out", "seed")
            and (value := getattr(config, field.name)) != getattr(base, field.name)
            for flag in as_flags(field.name, value)
        ]
        recipe = [] if config.recipe == "default" else ["--recipe", config.recipe]
        seed_and_folder = ["--seed", str(job.seed), "--out", str(job.folder)]
        typed.append(["mae", "pretrain", config.source, *recipe, *changed, *seed_and_folder])
    where = ["--data-root", str(job.data_root)] if job.data in KNOWN else []
    end = ["--seed", str(job.seed), *([] if job.device == "auto" else ["--device", job.device])]
    for judgement in job.judgements:
        flags = [flag for name, value in judgement.options.items() for flag in as_flags(name, value)]
        model = [str(job.folder)] if job.model is None else [job.model, "--out", str(job.folder)]
        typed.append(["mae", "evaluate", judgement.protocol, *model, "--data", job.data, *where, *flags, *end])
    return tuple(map(shlex.join, typed))
