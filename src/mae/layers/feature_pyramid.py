"""Maps of several sizes made of one (ViTDet's simple feature pyramid: Li et al. 2022, section 3)."""

from collections import OrderedDict

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from mae.layers.transformer import LAYER_NORM_EPS

POOLED = "pool"
"""The coarsest map's name, as in torchvision."""


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of a map.

    Args:
        channels: of the map.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=LAYER_NORM_EPS)

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Each place by itself."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class SimpleFeaturePyramid(nn.Module):
    """Maps of 4, 2, 1 and 1/2 times the grid of a plain backbone's last map, and of half of that.

    Args:
        dim: channels of the backbone's map, a multiple of 4.
        channels: of each map that is made.
    """

    def __init__(self, *, dim: int, channels: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            [
                nn.Sequential(
                    nn.ConvTranspose2d(dim, dim // 2, 2, stride=2),
                    ChannelNorm(dim // 2),
                    nn.GELU(),
                    nn.ConvTranspose2d(dim // 2, dim // 4, 2, stride=2),
                ),
                nn.ConvTranspose2d(dim, dim // 2, 2, stride=2),
                nn.Identity(),
                nn.MaxPool2d(2),
            ]
        )
        widths = (dim // 4, dim // 2, dim, dim)
        self.lateral = nn.ModuleList(_convolution(width, channels, kernel=1) for width in widths)
        self.output = nn.ModuleList(_convolution(channels, channels, kernel=3) for _ in widths)

    def forward(self, x: Float[Tensor, "B D H W"]) -> OrderedDict[str, Float[Tensor, "B C h w"]]:
        """The maps by the names that torchvision's detectors look for: `0` to `3`, finest first, and `pool`."""
        maps = OrderedDict[str, Tensor]()
        for number, (scale, lateral, output) in enumerate(zip(self.scales, self.lateral, self.output, strict=True)):
            maps[str(number)] = output(lateral(scale(x)))
        maps[POOLED] = max_pool2d(maps["3"], 1, stride=2)
        return maps


def _convolution(inputs: int, outputs: int, *, kernel: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False), ChannelNorm(outputs))
