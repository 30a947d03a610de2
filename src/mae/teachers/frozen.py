"""Any encoder that is not trained as the teacher."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate, layer_norm

from mae.core.component import Count, Measured, Metavar, Width
from mae.core.contracts import Batch, Encoder, Teacher, Tokenizer
from mae.core.types import Layout, SourceNetwork
from mae.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class FrozenTeacher(Teacher):
    """An encoder that is never trained and sees whole images (dBOT: Liu et al. 2022; SALT: Li et al. 2025).

    Its tokens are layer-normalised without scale and offset. It gets images by its own mean and std. It is in no
    checkpoint and no model's file: a run that goes on opens the source again and refuses one that has changed.
    """

    kind: ClassVar[str] = "frozen"
    opens: ClassVar[bool] = True

    source: Annotated[str, Metavar("MODEL")] = ""
    """The encoder: a run, a checkpoint, a file, or timm:NAME or hf:NAME, read as 'mae evaluate' reads it."""
    layers: Count = 1
    """Blocks whose outputs are averaged."""
    last_layer: Count | None = None
    """Number of the last of these blocks, from 1; that of the encoder's last block if not given."""
    resample: bool = False
    """Resize images to the encoder's size and its features to the run's patch grid, bilinearly, where they differ."""
    width: Annotated[Width | None, Measured()] = None
    """Values of its tokens."""
    size: Annotated[tuple[int, int] | None, Measured()] = None
    """Height and width of its images."""
    grid: Annotated[tuple[int, int] | None, Measured()] = None
    """Rows and columns of its tokens."""
    fingerprint: Annotated[str | None, Measured()] = None
    """Changes with its weights and its preprocessing."""

    def gives(self, encoder: Encoder) -> Mapping[str, int]:
        """The `tokens`: as wide as was measured; until the source is opened, as wide as the student's."""
        return {"tokens": self.width or encoder.embed_dim} if self.source else {}

    def measured(self, network: SourceNetwork) -> "FrozenTeacher":
        """The same with what is measured of its network.

        Raises:
            UsageError: blocks that it does not have, or whose outputs have different shapes.
        """
        blank = torch.zeros(1, network.channels, *network.size)
        shapes = dict.fromkeys(found.shape[1:] for found in network.maps(blank, self._blocks(network)))
        if len(shapes) > 1:
            told = " and ".join("x".join(map(str, shape)) for shape in shapes)
            raise UsageError(
                f"teacher_layers is {self.layers}, and these blocks of {network.name} give {told} values; expected "
                "blocks of one shape: average fewer of them"
            )
        ((width, rows, columns),) = shapes
        height, across = network.size
        return replace(self, width=width, size=(height, across), grid=(rows, columns), fingerprint=network.fingerprint)

    def build_from(self, network: SourceNetwork, tokenizer: Tokenizer) -> "FrozenNetwork":
        """The network, with the images of the student made into its own.

        Raises:
            UsageError: it is not the one that was measured, sees other channels, or has another size or grid and
                `resample` is off.
        """
        if self.measured(network) != self:
            raise UsageError(f"{network.name} is not the network that this teacher was measured of; measure it anew")
        self._check_fit(network, tokenizer)
        return FrozenNetwork(network, tokenizer, blocks=self._blocks(network), resample=self.resample)

    def _blocks(self, network: SourceNetwork) -> range:
        last = self.last_layer or network.depth
        if last > network.depth:
            raise UsageError(f"teacher_last_layer is {last}, and {network.name} has {network.depth} block(s)")
        if self.layers > last:
            raise UsageError(
                f"teacher_layers is {self.layers}, and up to its last layer {network.name} has {last} block(s); "
                "expected as many at most"
            )
        return range(last - self.layers, last)

    def _check_fit(self, network: SourceNetwork, tokenizer: Tokenizer) -> None:
        layout, names = tokenizer.layout, tokenizer.channels
        if network.channels != layout.channels:
            raise UsageError(
                f"teacher_source {network.name} sees {network.channels} channel(s), and the run's images have "
                f"{layout.channels}; give a teacher of the same channels, or --in-chans {network.channels}"
            )
        if None not in (network.channel_names, names) and network.channel_names != names:
            raise UsageError(
                f"teacher_source {network.name} sees channels {','.join(network.channel_names or ())}, and the run's "
                f"images have {','.join(names)}; give --channels in the teacher's order"
            )
        if not self.resample and (self.size, self.grid) != (layout.size, layout.grid):
            raise UsageError(
                f"teacher_source {network.name} has {_sides(self.grid)} tokens of {_sides(self.size)} pixels, and the "
                f"run {_sides(layout.grid)} of {_sides(layout.size)}; give the same --img-size and --patch-size, or "
                "--teacher-resample to resize images and features"
            )


class FrozenNetwork(nn.Module):
    """The encoder, its input made of the student's, its output made into targets; it has no weights to store.

    Args:
        network: the encoder.
        tokenizer: of the student.
        blocks: numbers of the blocks whose outputs are averaged.
        resample: see `FrozenTeacher`.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, network: SourceNetwork, tokenizer: Tokenizer, *, blocks: Sequence[int], resample: bool) -> None:
        super().__init__()
        self.network, self.blocks, self.resample = network, blocks, resample
        if tokenizer.mean is None or tokenizer.std is None:
            raise UsageError("the student's images have no mean and std, so the teacher's cannot be made of them")
        mean, std, own_mean, own_std = (
            torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1)
            for values in (tokenizer.mean, tokenizer.std, network.mean, network.std)
        )
        self.register_buffer("scale", (std / own_std).float(), persistent=False)
        self.register_buffer("shift", ((mean - own_mean) / own_std).float(), persistent=False)

    @torch.no_grad()
    def forward(self, batch: Batch) -> dict[str, Float[Tensor, "B N D"]]:
        """The layer-normalised tokens; of several blocks the mean of theirs, normalised once more.

        Raises:
            UsageError: images of another size than the network's, where they are not resampled.
        """
        images = batch.x.float() * self.scale + self.shift
        if images.shape[2:] != self.network.size:
            if not self.resample:
                raise UsageError(
                    f"the teacher {self.network.name} sees images of {_sides(self.network.size)} pixels, and these "
                    f"have {_sides(images.shape[2:])}; resize them, or train with teacher_resample"
                )
            images = _resized(images, self.network.size)
        maps = self.network.maps(images, self.blocks)
        levels = [_normalised(self._on_grid(found.to(images), batch.layout)) for found in maps]
        return {"tokens": levels[0] if len(levels) == 1 else _normalised(torch.stack(levels).mean(dim=0))}

    def _on_grid(self, found: Float[Tensor, "B D h w"], layout: Layout) -> Float[Tensor, "B N D"]:
        return (found if found.shape[2:] == layout.grid else _resized(found, layout.grid)).flatten(2).mT

    def after_step(self, student: nn.Module, progress: float) -> None:
        """Nothing: it does not learn."""


def _normalised(tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
    return layer_norm(tokens, tokens.shape[-1:])


def _resized(maps: Float[Tensor, "B C h w"], size: Sequence[int]) -> Float[Tensor, "B C rows columns"]:
    return interpolate(maps, size=tuple(size), mode="bilinear", antialias=True)


def _sides(size: Sequence[int] | None) -> str:
    return "x".join(map(str, size or ()))
