"""What the fine-tunings to maps of classes and to objects have in common: options, the plan, weights beside."""

from abc import abstractmethod
from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from mae.errors import UsageError
from mae.evaluation.common.share_of_labels import read_share, shown_share
from mae.evaluation.protocol import THIS_MODEL, EvaluationProtocol
from mae.options import shown

if TYPE_CHECKING:
    from mae.evaluation.common.supervised import PreparedTraining, SupervisedPlan, SupervisedTraining
    from mae.evaluation.common.task import DetectionTask, SegmentationTask
    from mae.evaluation.extractors.extractor import Extractor

SCRATCH = "scratch"
"""Weights that were never trained."""


def not_ours(name: str) -> str:
    """Why a model cannot be fine-tuned that is none of this package."""
    return (
        f"{name} cannot be fine-tuned as it is; that needs a model of this package: bring it in with 'mae import "
        f"{name} --out FILE.safetensors' and name the file"
    )


@dataclass(frozen=True, kw_only=True)
class DenseFinetuning(EvaluationProtocol):
    """A training of the whole encoder under a head, and the same training of other weights beside it.

    Attributes:
        usual_warmup: steps of the published recipe's warm-up.
        schedule: how the rate falls behind it, see `SupervisedPlan`.

    Raises:
        UsageError: values out of range, or a weight named twice.
    """

    own_page = True
    usual_warmup: ClassVar[int]
    schedule: ClassVar[Literal["linear", "steps"]]

    iterations: int = 1000
    """Optimizer steps; an hour on a laptop with a small model. Published recipes have over 150,000, for many GPUs."""
    batch_size: Annotated[int | None, shown("16, halved until it fits fewer images", "B")] = None
    """Images per step."""
    accumulate: int = 1
    """Micro-batches per step, to save memory."""
    lr: float = 1e-4
    """Peak learning rate, of the head."""
    warmup: Annotated[int | None, shown("1500, at most a tenth of the steps", "STEPS")] = None
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = 0.05
    """AdamW's weight decay, not on biases, norms, positions and class token."""
    layer_decay: float = 0.65
    """Ratio of the learning rate of each block to that of the one above it; from scratch it is 1."""
    drop_path: float = 0.1
    """Share of residual branches dropped in the last block."""
    labels_used: Annotated[str, tyro.conf.arg(name="labels", metavar="SHARE")] = "100%"
    """How much of the training images is used, such as 10%."""
    beside: tuple[str, ...] = (SCRATCH,)
    """Other weights that are trained alike: scratch, a run, a .safetensors file; by mae finetune also timm:NAME."""
    seeds: int = 1
    """Trainings of each, whose weights of the head, order and crops differ; from two on there are intervals."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """auto: bf16 on a GPU that has it, fp32 elsewhere."""
    pictures: int = 6
    """Test images that are drawn with the truth and what is predicted."""
    doctor: bool = True
    """Begin with the checks of 'mae doctor labels', and draw eight labelled images."""

    def __post_init__(self) -> None:
        read_share(self.labels_used)
        for name in ("iterations", "accumulate", "seeds", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} is {value}; expected 1 or more")
        for name in ("lr", "warmup", "weight_decay", "pictures"):
            if (value := getattr(self, name)) is not None and not 0 <= value < inf:
                raise UsageError(f"{name} is {value}; expected a finite number of 0 or more")
        if self.warmup is not None and self.warmup >= self.iterations:
            raise UsageError(f"warmup is {self.warmup} steps of {self.iterations} (iterations); expected fewer")
        if not 0 < self.layer_decay <= 1 or not 0 <= self.drop_path < 1:
            raise UsageError(
                f"layer_decay is {self.layer_decay} and drop_path {self.drop_path}; expected shares up to 1 and below 1"
            )
        if len(set(self.beside)) < len(self.beside) or THIS_MODEL in self.beside:
            raise UsageError(f"beside is {list(self.beside)}; expected different weights, such as scratch")

    @property
    def variant(self) -> str:
        """The share of the labels where it is not all of them."""
        share = read_share(self.labels_used)
        return "" if share == 1 else f"{100 * share:.6g}percent"

    def why_not(self, extractor: "Extractor") -> str | None:
        """See `EvaluationProtocol`."""
        from mae.training.device import why_no_precision

        if extractor.model is None or extractor.model.config is None:
            return not_ours(extractor.name)
        return why_no_precision(self.precision, next(extractor.model.parameters()).device)

    @abstractmethod
    def prepared(self, task: Any, *, scratch: bool = False) -> "PreparedTraining":
        """The training of a task's weights, or of fresh ones, with its seed.

        Raises:
            UsageError: labels or a batch that cannot be trained on.
            MAEError: labels for an image of another size.
        """

    def trained(self, task: Any, *, scratch: bool, file: str) -> "tuple[SupervisedTraining, Any]":
        """A training, and the model that was trained, which stands in this file of the training's folder."""
        from mae.evaluation.common.finetuning import save

        prepared = self.prepared(task, scratch=scratch)
        training = prepared.train()
        model: Any = prepared.module
        task.world.from_main(lambda: save(training.folder / file, model, task, from_scratch=scratch))
        return training, model

    def told(self, images: int, seconds: float) -> str:
        """How long, and on how much, the training went; for the note under the table."""
        from mae.data.sources.folder import count_of
        from mae.report.terminal.console import duration

        share = shown_share(read_share(self.labels_used))
        steps, found = count_of(self.iterations, "step"), count_of(images, "image")
        return f"{steps} on {found} ({share} of the labels), {duration(seconds)} of training."

    def plan(
        self, task: "SegmentationTask | DetectionTask", batch: int, *, steps_per_epoch: int, scratch: bool
    ) -> "SupervisedPlan":
        """How a training goes."""
        from mae.evaluation.common.supervised import SupervisedPlan
        from mae.training.device import choose_precision

        warmup = min(self.usual_warmup, self.iterations / 10) if self.warmup is None else self.warmup
        # How many seeds and what else is trained beside it decide nothing of this training.
        decides: dict[str, Any] = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("beside", "seeds", "pictures", "doctor", "iterations", "lr", "warmup")
        }
        return SupervisedPlan(
            name=self.name,
            epochs=self.iterations / steps_per_epoch,
            batch_size=batch,
            accumulate=self.accumulate,
            rate=self.lr,
            min_rate=0.0,
            warmup_epochs=warmup / steps_per_epoch,
            precision=choose_precision(self.precision, task.device),
            identity={**decides, "from_scratch": scratch},
            schedule=self.schedule,
            evaluations=4,
        )
