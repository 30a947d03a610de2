"""Heads that tell the class of each place of an image from maps of patch tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, interpolate, relu

from mae.layers.init import init_normal_
from mae.layers.shared import SharedBatchNorm2d, SharedDropout2d

_POOLED = (1, 2, 3, 6)
"""Rows and columns to which the pyramid pools the coarsest map."""
_DROPOUT = 0.1
_LEVELS = 4


class LinearMapHead(nn.Module):
    """Dropout of whole channels, batch normalisation, a linear layer of each place (DINOv3's linear segmentation).

    Args:
        dim: channels of the maps, side by side.
        num_classes: classes to tell apart.
    """

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.dropout = SharedDropout2d(_DROPOUT)
        self.norm = SharedBatchNorm2d(dim)
        self.classes = _to_classes(dim, num_classes)

    def forward(self, maps: Sequence[Float[Tensor, "B D h w"]]) -> Float[Tensor, "B K h w"]:
        """Logits at each place of maps of one size."""
        return self.classes(self.norm(self.dropout(torch.cat(tuple(maps), dim=1))))


class UPerNetHead(nn.Module):
    """UPerNet (Xiao et al. 2018) on four maps of a plain transformer, as MAE is fine-tuned with it.

    The maps of four blocks, all of one size, are made into a pyramid whose places lie 1/4, 1/2, 1 and 2 patches apart;
    the coarsest is pooled at four scales; a top-down path adds the coarser to the finer; all are put side by side.
    Without the auxiliary head of the published recipe.

    Args:
        dim: channels of each map.
        channels: of the pyramid.
        num_classes: classes to tell apart.
    """

    def __init__(self, dim: int, channels: int, num_classes: int) -> None:
        super().__init__()
        self.scale = nn.ModuleList(
            [
                nn.Sequential(_doubled(dim), SharedBatchNorm2d(dim), nn.GELU(), _doubled(dim)),
                _doubled(dim),
                nn.Identity(),
                nn.MaxPool2d(2, ceil_mode=True),  # so that a single row or column stays one
            ]
        )
        self.pool = nn.ModuleList([_Conv(dim, channels, 1) for _ in _POOLED])
        self.coarsest = _Conv(dim + len(_POOLED) * channels, channels, 3)
        self.lateral = nn.ModuleList([_Conv(dim, channels, 1) for _ in range(_LEVELS - 1)])
        self.smooth = nn.ModuleList([_Conv(channels, channels, 3) for _ in range(_LEVELS - 1)])
        self.fuse = _Conv(_LEVELS * channels, channels, 3)
        self.dropout = SharedDropout2d(_DROPOUT)
        self.classes = _to_classes(channels, num_classes)

    def pyramid(self, maps: Sequence[Float[Tensor, "B D h w"]]) -> list[Float[Tensor, "B D _h _w"]]:
        """The four maps at four sizes, the finest first."""
        return [scale(found) for scale, found in zip(self.scale, maps, strict=True)]

    def forward(self, maps: Sequence[Float[Tensor, "B D h w"]]) -> Float[Tensor, "B K _h _w"]:
        """Logits at each place of the finest level, four times as fine as the maps."""
        *finer, coarse = self.pyramid(maps)
        shrunk = [conv(adaptive_avg_pool2d(coarse, side)) for conv, side in zip(self.pool, _POOLED, strict=True)]
        pooled = [resized(found, coarse) for found in shrunk]
        levels = [self.coarsest(torch.cat([coarse, *pooled], dim=1))]
        for lateral, found in zip(reversed(self.lateral), reversed(finer), strict=True):
            levels.insert(0, lateral(found) + resized(levels[0], found))
        smooth = [conv(level) for conv, level in zip(self.smooth, levels, strict=False)]
        together = [resized(level, levels[0]) for level in (*smooth, levels[-1])]
        return self.classes(self.dropout(self.fuse(torch.cat(together, dim=1))))


class _Conv(nn.Module):
    """A convolution that keeps the size, batch normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.norm = SharedBatchNorm2d(outputs)

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B _C h w"]:
        return relu(self.norm(self.conv(x)))


def _to_classes(dim: int, num_classes: int) -> nn.Conv2d:
    """A linear layer of each place, drawn as mmsegmentation's heads and DINOv3's are."""
    layer = nn.Conv2d(dim, num_classes, 1)
    init_normal_(layer.weight, std=0.01)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _doubled(dim: int) -> nn.Module:
    """Twice as many rows and columns."""
    return nn.ConvTranspose2d(dim, dim, 2, stride=2)


def resized(maps: Float[Tensor, "B C h w"], like: Float[Tensor, "B _C H W"]) -> Float[Tensor, "B C H W"]:
    """Maps of the size of others, by bilinear interpolation."""
    return interpolate(maps, like.shape[-2:], mode="bilinear", align_corners=False)
