"""An encoder that was trained, and what it was built from."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mae import fragments
from mae.core.component import options_of
from mae.encoders.vit import Features
from mae.errors import UsageError
from mae.models.given_images import Images, crop_image, given_images, statistics_of
from mae.models.preprocess import preprocessing_of

if TYPE_CHECKING:
    from mae.core.method import MethodConfig

_NAMED = 10  # classes


class PretrainedEncoder(nn.Module):
    """What is left of a masked autoencoder without its decoder: features, and no pictures.

    Args:
        encoder: sees whole images.
        config: what it was built from, whose decoder's sizes mean nothing here; None for an encoder put together by
            hand.
    """

    undecayed = frozenset({"encoder.cls_token", "encoder.pos_embed.table"})
    """Names of the parameters of two dimensions or more that weight decay leaves alone."""

    def __init__(self, *, encoder: nn.Module, config: "MethodConfig | None" = None) -> None:
        super().__init__()
        self.encoder: Any = encoder
        self.config = config

    def encode(self, images: Float[Tensor, "B C H W"], *, layers: Sequence[int] = (), as_map: bool = False) -> Features:
        """Features of whole images, never masked: `cls`, `mean` and `patches` in raster order, and those of `layers`.

        Args:
            images: normalised images.
            layers: numbers of blocks whose patch tokens are wanted too, from 0, such as `[3, 5, 7, 11]`.
            as_map: give those as maps `[B, D, rows, columns]`.

        Raises:
            UsageError: images of a wrong shape, or of a size the positions cannot be made for; no such block.
        """
        return self.encoder.encode(images, layers=layers, as_map=as_map)

    def preprocess(self, images: Images) -> Float[Tensor, "B C H W"]:
        """Images as `encode` and `forward` want them, made as evaluation makes them.

        Resized, cropped in the centre and normalised, in the type and on the device of the weights.

        Args:
            images: one or several: files, images of Pillow, arrays `[H, W, C]` or tensors `[C, H, W]` of pixel values
                as in the files.

        Raises:
            UsageError: other channels, types or shapes than the model's; a model without channel statistics.
            UnreadableImage: a file that is no whole image.
        """
        wanted = preprocessing_of(self.config)
        mean, std = statistics_of(wanted)
        crops = torch.stack([crop_image(image, wanted) for image in given_images(images, wanted)])
        return ((crops - mean) / std).to(next(self.parameters()))

    @property
    def num_layers(self) -> int:
        """The layer of the head, one above the last block's."""
        return len(self.encoder.blocks) + 1

    def layer_of(self, name: str) -> int:
        """The layer of a parameter for layer-wise decay of the rate.

        0 for patches, positions and class tokens, `k + 1` for block `k`, `num_layers` for the norm and the head.
        """
        if name.startswith("encoder.blocks."):
            return int(name.split(".")[2]) + 1
        return 0 if name.startswith("encoder.") and not name.startswith("encoder.norm.") else self.num_layers

    def num_parameters(self, *, only_trainable: bool = False) -> int:
        """How many values the weights have.

        Args:
            only_trainable: leave out those that no gradient changes.
        """
        return sum(weight.numel() for weight in self.parameters() if weight.requires_grad or not only_trainable)

    def _repr_html_(self) -> str:
        return fragments.table(type(self).__name__, self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        """What the model is, as pairs of name and value."""
        trained = self.num_parameters(only_trainable=True)
        facts = [
            ("parameters", f"{self.num_parameters():,}, of which {trained:,} are trained"),
            ("encoder", f"{len(self.encoder.blocks)} blocks, width {self.encoder.embed_dim}"),
        ]
        if self.config is None:
            return facts
        layout = self.config.layout
        channels = f"{layout.channels} channel{'' if layout.channels == 1 else 's'}"
        sizes = f"{_times(layout.size)} pixels, {channels}; {_times(layout.grid)} patches of {_times(layout.patch)}"
        return [*facts, ("input", sizes)]


def described_component(component: Any) -> str:
    """The kind of a component and its options, as one line."""
    options = ", ".join(f"{name} {value}" for name, value in options_of(component).items() if value is not None)
    return component.kind + (f" ({options})" if options else "")


def told_classes(count: int, names: Sequence[str]) -> str:
    """How many classes, and the first names of them."""
    more = ", …" if len(names) > _NAMED else ""
    return f"{count:,}" + (f": {', '.join(names[:_NAMED])}{more}" if names else "")


def _times(lengths: Sequence[int]) -> str:
    return "x".join(map(str, lengths))


class MapBackbone(nn.Module):
    """Maps of some blocks by name, as torchvision's detectors want a backbone.

    Every map has the grid of the patches: a pyramid is the detector's own affair.

    Args:
        model: whose encoder is taken, not copied.
        layers: numbers of blocks, from 0; the maps are called `0`, `1` and so on, in this order.

    Attributes:
        out_channels: channels of each map.

    Raises:
        UsageError: no blocks are named.
    """

    def __init__(self, model: PretrainedEncoder, *, layers: Sequence[int]) -> None:
        super().__init__()
        if not layers:
            raise UsageError("a backbone needs layers: numbers of blocks, such as [3, 5, 7, 11]")
        self.encoder = model.encoder
        self.layers = tuple(layers)
        self.out_channels = model.encoder.embed_dim

    def forward(self, images: Float[Tensor, "B C H W"]) -> OrderedDict[str, Float[Tensor, "B D h w"]]:
        """The maps of normalised images.

        Raises:
            UsageError: see `PretrainedEncoder.encode`.
        """
        maps = self.encoder.encode(images, layers=self.layers, as_map=True).layers
        return OrderedDict((str(number), found) for number, found in enumerate(maps))
