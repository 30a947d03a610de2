"""Which recipe makes a good encoder soonest? Recipes of any length, evaluated at checkpoints on the way."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mae.errors import UsageError
from mae.experiments.core.metrics import KNN, LINEAR_PROBE, TRAINING
from mae.experiments.core.plan import FROZEN_FEATURES, Study, StudySetup
from mae.experiments.core.results import Variant


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Which recipes run, and how many checkpoints of each run are evaluated.

    Raises:
        UsageError: fewer than two recipes, one twice, or no checkpoint.
    """

    trains: ClassVar[bool] = True
    recipes: tuple[str, ...] = ("mae", "default")
    """Names of recipes, or config.json files of runs; the first is the reference."""
    checkpoints: int = 6
    """How many checkpoints of each run are evaluated, evenly spaced."""

    def __post_init__(self) -> None:
        if len(self.recipes) < 2 or len(set(self.recipes)) < len(self.recipes):
            raise UsageError(f"--recipes is {' '.join(self.recipes)}; expected two different ones or more")
        if self.checkpoints < 1:
            raise UsageError(f"--checkpoints is {self.checkpoints}; expected 1 or more")

    def study(self, setup: StudySetup) -> Study:
        """The plan.

        Raises:
            UsageError: no such recipe, or epochs of fine-tuning, which this study has none of.
        """
        if setup.finetune_epochs:
            raise UsageError(
                f"--finetune-epochs is {setup.finetune_epochs:g}, and the study quality fine-tunes nothing: it "
                "evaluates frozen features of checkpoints; leave it out"
            )
        return Study(
            name="quality",
            question="Which recipe makes a good encoder soonest?",
            variants=tuple(
                Variant(name=name, what=f"recipe {recipe}", options={})
                for name, recipe in zip(_names(self.recipes), self.recipes, strict=True)
            ),
            configs=tuple(map(setup.find, self.recipes)),
            evaluations=FROZEN_FEATURES,  # as of the checkpoints on the way
            metrics=(LINEAR_PROBE, KNN, *TRAINING),
            notes=(
                "Recipes differ in length, batch size and learning rate. Each run's rate falls to 0 at its own end, so "
                "that a checkpoint before the end shows less than a run of that length would reach. Arithmetic is that "
                "of matrix products, a teacher's among them unless it is another model (--teacher frozen).",
            ),
            varied=("epochs", "steps", "batch_size"),
            checkpoints=self.checkpoints,
        )


def _names(recipes: Sequence[str]) -> Sequence[str]:
    """Short names for tables: a file's own name, a run's folder; unchanged where two would be equal."""
    paths = [Path(recipe) for recipe in recipes]
    short = [path.parent.name if path.name == "config.json" else path.stem for path in paths]
    return short if len(set(short)) == len(short) else recipes
