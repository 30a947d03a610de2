"""The plain masked autoencoder against the improved one, each addition alone, or any recipes against each other."""

from dataclasses import dataclass
from typing import Any

from mae.config import PretrainConfig
from mae.errors import UsageError
from mae.experiments.plan import COMMON_RATIO, FEATURES, PICTURES, TRAINING, Bed, Study
from mae.experiments.results import Arm
from mae.recipes.default import default
from mae.recipes.improved import improved

ORIGINAL, IMPROVED = "original", "improved"


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Which arms are compared; the first is the reference.

    Raises:
        UsageError: fewer than two arms, or one twice.
    """

    arms: tuple[str, ...] = (ORIGINAL, IMPROVED)
    """original, improved, one of its parts (curriculum, laplacian, uniformity), or any recipe."""
    ablate: bool = False
    """Try each part of the improved run alone too."""

    def __post_init__(self) -> None:
        if len(self.names) < 2 or len(set(self.arms)) < len(self.arms):
            raise UsageError(f"--arms is {' '.join(self.arms)}; expected two different ones or more")

    @property
    def names(self) -> tuple[str, ...]:
        """Of all arms."""
        return tuple(dict.fromkeys((*self.arms, *(parts() if self.ablate else ()))))

    def study(self, bed: Bed) -> Study:
        """The plan.

        Raises:
            UsageError: no such arm, or an option that the arms differ in.
        """
        arms, configs = zip(*(_arm(name, bed) for name in self.names), strict=True)
        reference, *others = self.names
        return Study(
            name="compare",
            question=f"Is {' or '.join(others)} better than {reference}, all else being equal?",
            arms=arms,
            configs=configs,
            judgements=bed.judgements(),
            metrics=bed.metrics(*FEATURES, *PICTURES, *TRAINING),
            notes=(
                f"Pictures of all arms are judged with {COMMON_RATIO:.0%} of the patches hidden, the same ones.",
                "An arm that hides less at first sees more patches in those epochs: its training loss there is one of "
                "an easier task, and its steps cost more.",
            ),
        )


def parts() -> dict[str, dict[str, Any]]:
    """The parts of the recipe `improved`, each as options over the default run."""
    plain, whole = default().to_json(), improved().to_json()
    changed = {name: whole[name] for name in whole if whole[name] != plain[name] and name != "recipe"}
    masking = {name: value for name, value in changed.items() if name.startswith("mask_")}
    # What is left at its default stands in the recipe all the same.
    masking |= {name: whole[name] for name in ("mask_start", "mask_warmup")}
    rest = {name: {name: value} for name, value in changed.items() if name not in masking}
    return {"curriculum": masking, **rest}


def _arm(name: str, bed: Bed) -> tuple[Arm, PretrainConfig]:
    """An arm and its run: all parts of the improved recipe off, then its own on, as strong as they were asked for."""
    alone = parts()
    known = {ORIGINAL: (), IMPROVED: tuple(alone), **{part: (part,) for part in alone}}
    if name not in known:
        return Arm(name=name, what=f"recipe {name}", options={}), bed.find(name)
    wanted = bed.base.to_json()
    options = {
        key: wanted[key] if key in bed.given else value for part in known[name] for key, value in alone[part].items()
    }
    plain = default().to_json()
    off = {key: plain[key] for options in alone.values() for key in options}
    words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in options.items())
    arm = Arm(name=name, what=words or f"recipe {bed.base.recipe} without the additions", options=options)
    return arm, bed.base.override({**off, **options})
