"""The plain masked autoencoder against the improved one, each addition alone, or any recipes against each other."""

from dataclasses import dataclass
from typing import Any, ClassVar

from mae.config import RunConfig
from mae.errors import UsageError
from mae.experiments.core.metrics import COMMON_MASK_RATIO, FEATURES, RECONSTRUCTION, TRAINING
from mae.experiments.core.plan import Study, StudySetup
from mae.experiments.core.results import Variant
from mae.recipes.improved import improved
from mae.recipes.mae import mae

ORIGINAL, IMPROVED = "original", "improved"


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Which variants are compared; the first is the reference.

    Raises:
        UsageError: fewer than two variants, or one twice.
    """

    trains: ClassVar[bool] = True
    variants: tuple[str, ...] = (ORIGINAL, IMPROVED)
    """original, improved, one of its parts (curriculum, laplacian, uniformity), or any recipe."""
    ablate: bool = False
    """Try each part of the improved run alone too."""

    def __post_init__(self) -> None:
        if len(self.names) < 2 or len(set(self.variants)) < len(self.variants):
            raise UsageError(f"--variants is {' '.join(self.variants)}; expected two different ones or more")

    @property
    def names(self) -> tuple[str, ...]:
        """Of all variants."""
        return tuple(dict.fromkeys((*self.variants, *(parts() if self.ablate else ()))))

    def study(self, setup: StudySetup) -> Study:
        """The plan.

        Raises:
            UsageError: no such variant, or an option that the variants differ in.
        """
        variants, configs = zip(*(_variant(name, setup) for name in self.names), strict=True)
        reference, *others = self.names
        return Study(
            name="compare",
            question=f"Is {' or '.join(others)} better than {reference}, all else being equal?",
            variants=variants,
            configs=configs,
            evaluations=setup.evaluations(),
            metrics=setup.metrics(*FEATURES, *RECONSTRUCTION, *TRAINING),
            notes=(
                f"All variants reconstruct with the same {COMMON_MASK_RATIO:.0%} of the patches masked.",
                "A variant that starts with a lower mask ratio sees more patches in those epochs: its training loss "
                "there is that of an easier task, and its steps cost more.",
            ),
        )


def parts() -> dict[str, dict[str, Any]]:
    """The parts of the recipe `improved`, each as options over the recipe `mae`."""
    plain, whole = mae().flat(), improved().flat()
    changed = {name: whole[name] for name in whole if whole[name] != plain[name] and name != "recipe"}
    masking = {name: value for name, value in changed.items() if name.startswith("mask_")}
    # The recipe names these too, although they are at their defaults.
    masking |= {name: whole[name] for name in ("mask_start", "mask_warmup")}
    rest = {name: {name: value} for name, value in changed.items() if name not in masking}
    return {"curriculum": masking, **rest}


def _variant(name: str, setup: StudySetup) -> tuple[Variant, RunConfig]:
    """A variant and its run: all parts of the improved recipe off, then its own on, at the strength given."""
    alone = parts()
    known = {ORIGINAL: (), IMPROVED: tuple(alone), **{part: (part,) for part in alone}}
    if name not in known:
        return Variant(name=name, what=f"recipe {name}", options={}), setup.find(name)
    wanted = setup.base.flat()
    options = {
        key: wanted[key] if key in setup.given else value for part in known[name] for key, value in alone[part].items()
    }
    plain = mae().flat()
    off = {key: plain[key] for options in alone.values() for key in options}
    words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in options.items())
    variant = Variant(name=name, what=words or f"recipe {setup.base.recipe} without the additions", options=options)
    return variant, setup.base.override({**off, **options})
