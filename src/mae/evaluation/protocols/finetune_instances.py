"""Fine-tuning to instance segmentation: the encoder under Mask R-CNN (ViTDet: Li et al. 2022)."""

from dataclasses import dataclass

from mae.evaluation.protocols.finetune_detection import DetectorTraining


@dataclass(frozen=True, kw_only=True)
class FinetuneInstances(DetectorTraining):
    """Mask R-CNN on the encoder; see `DetectorTraining`."""

    name = "finetune_instances"
    title = "Fine-tuning to instances"
    summary = "train the encoder under a detector that finds objects and their pixels, beside other weights"
    masks = True
