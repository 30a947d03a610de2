"""torchvision's detectors with ViTDet's heads (Li et al. 2022), without a backbone."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from mae.core.method import MethodConfig
from mae.errors import UsageError
from mae.layers.feature_pyramid import ChannelNorm
from mae.models.preprocess import preprocessing_of

if TYPE_CHECKING:
    from mae.models.detector import DetectionHead

_LEVELS = ("0", "1", "2", "3")
_FINEST, _CANONICAL, _COARSEST = 2, 4, 5  # levels by the binary logarithm of their stride, where patches are 16 pixels
_ASPECTS = (0.5, 1.0, 2.0)
_CONVOLUTIONS = 4
_PROPOSALS = 4  # in training, for each region that the heads learn from: 2000 for 512 in torchvision


def smallest_anchor(size: int, patch: int) -> int:
    """Side of the smallest anchors: 32 pixels for patches of 16, as published, or less where images are small."""
    return max(2, min(2 * patch, size // 16))


def regions(size: int) -> int:
    """Regions of an image that the heads learn from in a step: 512 as published, or less where images are small."""
    return min(512, max(64, size))


class _Anchors(AnchorGenerator):
    """Anchors at the places of the maps.

    torchvision takes whole pixels for the distance of two places, fewer than there are where a quarter of a patch is no
    whole number: on the finest map of patches of 14 pixels the last anchors would lie a seventh of the image off.

    Args:
        strides: pixels from a place of a map to the next, the finest map first.
        options: see `AnchorGenerator`.
    """

    def __init__(self, *, strides: list[float], **options: Any) -> None:
        super().__init__(**options)
        self.strides = strides

    def grid_anchors(self, grid_sizes: Any, strides: list[list[Tensor]]) -> list[Tensor]:
        """The anchors of each map; the strides are those that torchvision rounded."""
        exact = [
            [torch.full((), stride, device=each[0].device)] * 2
            for stride, each in zip(self.strides, strides, strict=True)
        ]
        return super().grid_anchors(grid_sizes, exact)

    def set_cell_anchors(self, dtype: torch.dtype, device: torch.device) -> None:
        """Anchors are float32 whatever the type of the maps; see `_RPNHead`."""
        super().set_cell_anchors(torch.float32, device)


class _RPNHead(RPNHead):
    """Gives float32: boxes are reckoned in the type of their offsets.

    bfloat16 would round edges beyond 512 pixels to multiples of 4, and no CPU suppresses overlaps in half precision.
    """

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Scores and offsets of the anchors of each map."""
        logits, offsets = super().forward(x)
        return [each.float() for each in logits], [each.float() for each in offsets]


class _BoxPredictor(FastRCNNPredictor):
    """Gives float32; see `_RPNHead`."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the classes, and offsets for each of them."""
        logits, offsets = super().forward(x)
        return logits.float(), offsets.float()


class _RoIAlign(MultiScaleRoIAlign):
    """Reads maps at boxes in float32, as nothing reads bfloat16, and gives what it read in the type of the maps."""

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        """What lies in each box."""
        maps = {name: each.float() for name, each in x.items()}
        read: Tensor = super().forward(maps, [each.float() for each in boxes], image_shapes)
        return read.to(next(iter(x.values())).dtype)


class _Nothing(nn.Module):
    """torchvision asks a backbone for its channels; our own is called before."""

    def __init__(self, out_channels: int) -> None:
        super().__init__()
        self.out_channels = out_channels


def torchvision_detector(head: "DetectionHead", config: MethodConfig, *, num_classes: int) -> FasterRCNN:
    """torchvision's transform, proposals and heads, with fresh weights.

    Args:
        head: what stands on the encoder.
        config: of the encoder, which says how images are normalised.
        num_classes: of objects, and one for none.

    Raises:
        UsageError: a size that does not divide into patches, patches that are not square, no channel statistics, or
            holes in images.
    """
    wanted, patch = preprocessing_of(config), config.layout.patch[0]
    if config.tokenizer.nodata is not None:
        raise UsageError("the model's images have holes without data, which detectors do not know; use another model")
    if reason := head.why_not(config.layout.patch):
        raise UsageError(reason)
    channels, anchor = head.channels, smallest_anchor(head.size, patch)
    anchors = _Anchors(
        strides=_strides(patch, len(_LEVELS) + 1),
        sizes=tuple((anchor << level,) for level in range(len(_LEVELS) + 1)),
        aspect_ratios=(_ASPECTS,) * 5,
    )
    fc = 4 * channels
    options: dict[str, Any] = {
        "min_size": head.size,
        "max_size": head.size,
        "size_divisible": head.size,
        "image_mean": list(wanted.mean),
        "image_std": list(wanted.std),
        "_skip_resize": True,
        "rpn_anchor_generator": anchors,
        "rpn_head": _RPNHead(channels, len(_ASPECTS), conv_depth=2),
        "rpn_pre_nms_top_n_train": _PROPOSALS * regions(head.size),
        "rpn_post_nms_top_n_train": _PROPOSALS * regions(head.size),
        "box_batch_size_per_image": regions(head.size),
        "box_roi_pool": _pooling(7, patch=patch, anchor=anchor),
        "box_head": FastRCNNConvFCHead((channels, 7, 7), [channels] * _CONVOLUTIONS, [fc], norm_layer=ChannelNorm),
        "box_predictor": _BoxPredictor(fc, num_classes),
    }
    if not head.masks:
        return FasterRCNN(_Nothing(channels), **options)
    return MaskRCNN(
        _Nothing(channels),
        mask_roi_pool=_pooling(14, patch=patch, anchor=anchor),
        mask_head=MaskRCNNHeads(channels, [channels] * _CONVOLUTIONS, 1, norm_layer=ChannelNorm),
        mask_predictor=MaskRCNNPredictor(channels, channels, num_classes),
        **options,
    )


def _strides(patch: int, levels: int) -> list[float]:
    """Pixels from a place of a map to the next, of so many maps, the finest first."""
    return [patch * 2.0 ** (level - 2) for level in range(levels)]


def _pooling(output: int, *, patch: int, anchor: int) -> MultiScaleRoIAlign:
    """RoI pooling whose scales are told.

    torchvision would guess them, once and for all from the first batch: as powers of two, of the images before they
    are filled up, which after a strong scale jitter is far off. An object that the smallest anchor fits is looked up on
    the finest level, as one of 32 pixels is where patches are 16.
    """
    pooling = _RoIAlign(list(_LEVELS), output_size=output, sampling_ratio=2)
    pooling.scales = [1 / stride for stride in _strides(patch, len(_LEVELS))]
    pooling.map_levels = LevelMapper(_FINEST, _COARSEST, canonical_scale=7 * anchor, canonical_level=_CANONICAL)
    return pooling
