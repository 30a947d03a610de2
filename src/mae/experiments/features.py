"""A trained model beside other extractors on the same images."""

from dataclasses import dataclass

from mae.errors import UsageError
from mae.experiments.job import NEIGHBOURS, Judgement
from mae.experiments.plan import KNN, LINEAR_PROBE, Study
from mae.experiments.results import Arm


@dataclass(frozen=True, kw_only=True)
class Features:
    """Which models are set beside each other; the first is the reference.

    Raises:
        UsageError: no model, or one twice.
    """

    models: tuple[str, ...]
    """Run folders, .safetensors files, timm:NAME or hf:NAME_OR_PATH, such as timm:vit_small_patch14_dinov2.lvd142m."""

    def __post_init__(self) -> None:
        if not self.models:
            raise UsageError("no models are named; give run folders, .safetensors files, timm:NAME or hf:NAME_OR_PATH")
        if len(set(self.models)) < len(self.models):
            raise UsageError(f"the models are {' '.join(self.models)}; expected each one once")

    def study(self) -> Study:
        """The plan: k-NN and the quick probe; random weights and raw pixels come with the first model."""
        return Study(
            name="features",
            question="Whose features tell these classes apart?",
            arms=tuple(Arm(name=model, what="frozen features", options={}) for model in self.models),
            configs=(),
            judgements=(
                Judgement(protocol="knn", options={"ks": [NEIGHBOURS]}),
                Judgement(protocol="linear_probe", options={}),
            ),
            metrics=(KNN, LINEAR_PROBE),
            notes=(
                "Each model sees the images in the size and with the statistics it was trained for. Models trained on "
                "other images, or with labels, knew more beforehand.",
            ),
        )
