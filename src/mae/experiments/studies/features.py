"""Trained models compared on the same images."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro

from mae.errors import UsageError
from mae.experiments.core.metrics import KNN, LINEAR_PROBE
from mae.experiments.core.plan import FROZEN_FEATURES, Study, absolute_model
from mae.experiments.core.results import Variant


@dataclass(frozen=True, kw_only=True)
class Features:
    """Which models are compared; the first is the reference.

    Raises:
        UsageError: no model, or one twice.
    """

    trains: ClassVar[bool] = False
    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL [MODEL ...]")]
    """Run folders, .safetensors files, timm:NAME or hf:NAME_OR_PATH, such as timm:vit_small_patch14_dinov2.lvd142m; the
    first is the reference."""

    def __post_init__(self) -> None:
        if not self.models:
            raise UsageError("no models are named; give run folders, .safetensors files, timm:NAME or hf:NAME_OR_PATH")
        if len(set(map(absolute_model, self.models))) < len(self.models):
            raise UsageError(f"the models are {' '.join(self.models)}; expected each one once")

    def study(self) -> Study:
        """The plan: k-NN and linear probe; the first model brings random weights and raw pixels as baselines."""
        return Study(
            name="features",
            question="Whose features tell these classes apart?",
            variants=tuple(Variant(name=model, what="frozen features", options={}) for model in self.models),
            configs=(),
            evaluations=FROZEN_FEATURES,
            metrics=(KNN, LINEAR_PROBE),
            notes=(
                "Each model gets the images in the size and with the statistics it was trained with. Models trained "
                "on other images, or with labels, had more to learn from.",
            ),
        )
