"""The field's evaluation protocols: one a file, listed here and nowhere else."""

from mae.evaluation.protocol import EvaluationProtocol
from mae.evaluation.protocols.attentive_probe import AttentiveProbe
from mae.evaluation.protocols.finetune import Finetune
from mae.evaluation.protocols.finetune_detection import FinetuneDetection
from mae.evaluation.protocols.finetune_instances import FinetuneInstances
from mae.evaluation.protocols.finetune_segmentation import FinetuneSegmentation
from mae.evaluation.protocols.knn import Knn
from mae.evaluation.protocols.label_free import LabelFree
from mae.evaluation.protocols.labels import Labels
from mae.evaluation.protocols.linear_probe import LinearProbe
from mae.evaluation.protocols.neighbours_patches import NeighboursPatches
from mae.evaluation.protocols.pooled_probe import PooledProbe
from mae.evaluation.protocols.reconstruction import Reconstruction
from mae.evaluation.protocols.segmentation_knn import SegmentationKnn
from mae.evaluation.protocols.segmentation_linear import SegmentationLinear
from mae.records import check_known

PROTOCOLS: tuple[type[EvaluationProtocol], ...] = (
    LabelFree,
    Knn,
    LinearProbe,
    AttentiveProbe,
    PooledProbe,
    Finetune,
    Labels,
    Reconstruction,
    SegmentationKnn,
    SegmentationLinear,
    FinetuneSegmentation,
    NeighboursPatches,
    FinetuneDetection,
    FinetuneInstances,
)
"""In the order of help and of `mae evaluate all`."""


def find_protocol(name: str) -> type[EvaluationProtocol]:
    """The class of a protocol.

    Raises:
        UsageError: no such protocol; the nearest names are given.
    """
    by_name = {protocol.name: protocol for protocol in PROTOCOLS}
    check_known([name], list(by_name), what="protocol")
    return by_name[name]
