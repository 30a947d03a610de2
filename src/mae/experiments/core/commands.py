"""The commands that repeat a job."""

import shlex

from mae.config import RunConfig, as_flags
from mae.data.sources.open import KNOWN
from mae.experiments.core.job import Job


def commands(job: Job, base: RunConfig | None) -> tuple[str, ...]:
    """What a user would type to repeat a job.

    Args:
        job: the run.
        base: the configuration of the job's recipe; None where nothing is trained.
    """
    typed = []
    if job.config is not None and base is not None:
        config, plain = RunConfig.from_json(job.config), base.flat()
        changed = [
            flag
            for name, value in config.flat().items()
            if name not in ("source", "recipe", "out", "seed") and value != plain.get(name)
            for flag in as_flags(name, value)
        ]
        recipe = [] if config.recipe == "default" else ["--recipe", config.recipe]
        seed_and_folder = ["--seed", str(job.seed), "--out", str(job.folder)]
        typed.append(["mae", "pretrain", config.source, *recipe, *changed, *seed_and_folder])
    data_root = ["--data-root", str(job.data_root)] if job.data in KNOWN else []
    overlap = [] if job.overlap == "error" else ["--overlap", job.overlap]
    end = ["--seed", str(job.seed), *([] if job.device == "auto" else ["--device", job.device])]
    for spec in job.evaluations:
        flags = [flag for name, value in spec.options.items() for flag in as_flags(name, value)]
        model = [str(job.folder)] if job.model is None else [job.model, "--out", str(job.folder)]
        typed.append(["mae", "evaluate", spec.protocol, *model, "--data", job.data, *data_root, *overlap, *flags, *end])
    return tuple(map(shlex.join, typed))
