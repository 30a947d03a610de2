"""Which recipe makes a good encoder soonest? Recipes of any length, judged on their way."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mae.errors import UsageError
from mae.experiments.plan import KNN, LINEAR_PROBE, TRAINING, Bed, Study
from mae.experiments.results import Arm


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Which recipes run, and how often each run is looked at.

    Raises:
        UsageError: fewer than two recipes, one twice, or no look.
    """

    recipes: tuple[str, ...] = ("default", "fast")
    """Names of recipes, or config.json files of runs; the first is the reference."""
    looks: int = 6
    """How many times each run is judged, evenly over its steps."""

    def __post_init__(self) -> None:
        if len(self.recipes) < 2 or len(set(self.recipes)) < len(self.recipes):
            raise UsageError(f"--recipes is {' '.join(self.recipes)}; expected two different ones or more")
        if self.looks < 1:
            raise UsageError(f"--looks is {self.looks}; expected 1 or more")

    def study(self, bed: Bed) -> Study:
        """The plan.

        Raises:
            UsageError: no such recipe.
        """
        return Study(
            name="quality",
            question="Which recipe makes a good encoder soonest?",
            arms=tuple(
                Arm(name=name, what=f"recipe {recipe}", options={})
                for name, recipe in zip(_names(self.recipes), self.recipes, strict=True)
            ),
            configs=tuple(map(bed.find, self.recipes)),
            judgements=bed.judgements(),
            metrics=bed.metrics(LINEAR_PROBE, KNN, *TRAINING),
            notes=(
                "Recipes differ in length, batch and rate. Each run's rate falls to 0 at its own end, so that a look "
                "before the end shows less than a run of that length would reach.",
            ),
            varied=("epochs", "steps", "batch_size"),
            looks=self.looks,
        )


def _names(recipes: Sequence[str]) -> Sequence[str]:
    """What tables call them: a file by its own name, a run's by its folder's; all as they are where two are alike."""
    paths = [Path(recipe) for recipe in recipes]
    short = [path.parent.name if path.name == "config.json" else path.stem for path in paths]
    return short if len(set(short)) == len(short) else recipes
