"""Cutting an image into patches, putting it together again, and embedding the patches."""

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn

from mae.core.types import Grid, Layout
from mae.errors import UsageError


def patch_grid(height: int, width: int, patch_size: tuple[int, int]) -> Grid:
    """The grid `(rows, columns)` of patches over an image.

    Raises:
        UsageError: a side is not a positive multiple of the patch; the nearest sizes are named.
    """
    return Layout(size=(height, width), patch=patch_size, channels=1).grid


def check_images(images: Shaped[Tensor, "B ..."], in_chans: int) -> None:
    """Refuse what are no images for a model.

    Raises:
        UsageError: another number of axes or channels, or another type than floating point.
    """
    if not isinstance(images, Tensor):
        raise UsageError(
            f"the images are of type {type(images).__name__}; expected a tensor [batch, channels, height, width] of "
            f"normalised floating point with {in_chans} channels, which model.preprocess makes of files and arrays"
        )
    if images.ndim != 4 or images.shape[1] != in_chans:
        raise UsageError(
            f"images of shape {tuple(images.shape)}; expected [batch, channels, height, width] with {in_chans} channels"
        )
    if not images.is_floating_point():
        raise UsageError(
            f"images of type {images.dtype}; expected normalised floating point: (pixels / 255 - mean) / std"
        )


def select_patches(
    images: Shaped[Tensor, "B C H W"], patch_size: tuple[int, int], tokens: Int64[Tensor, "B M"] | None
) -> Shaped[Tensor, "B M C p q"]:
    """Patches of the given tokens (None: every token in raster order), copying no other pixel."""
    batch, channels, height, width = images.shape
    rows, columns = grid = patch_grid(height, width, patch_size)
    p, q = patch_size
    if tokens is None:
        patches = images.reshape(batch, channels, rows, p, columns, q).permute(0, 2, 4, 1, 3, 5)
        return patches.reshape(batch, rows * columns, channels, p, q)
    lines = _lines(tokens, grid, p, planes=channels)
    return images.reshape(-1, q).index_select(0, lines.flatten()).view(*lines.shape, q)


def patchify(
    images: Shaped[Tensor, "B C H W"], patch_size: tuple[int, int], tokens: Int64[Tensor, "B M"] | None = None
) -> Shaped[Tensor, "B M P"]:
    """Pixels of the given tokens (None: all), flattened row by row with the channel last, as MAE predicts them.

    Raises:
        UsageError: the image's sides are not multiples of the patch.
    """
    if tokens is None:
        return select_patches(images, patch_size, None).permute(0, 1, 3, 4, 2).flatten(2)
    grid = patch_grid(images.shape[2], images.shape[3], patch_size)
    p, q = patch_size
    lines = _lines(tokens, grid, p, planes=1)
    pixels = images.permute(0, 2, 3, 1).reshape(-1, q * images.shape[1])
    return pixels.index_select(0, lines.flatten()).view(*tokens.shape, p * pixels.shape[1])


def _lines(tokens: Int64[Tensor, "B M"], grid: Grid, p: int, *, planes: int) -> Int64[Tensor, "B M planes p"]:
    """Numbers of the lines of pixels that make up patches, among those of all images in memory.

    A line is a row of a patch, so whole lines are copied: an index of pixels or of patches copies value by value, which
    takes several times as long on a CPU.
    """
    rows, columns = grid
    plane = torch.arange(tokens.shape[0] * planes, device=tokens.device).view(-1, 1, planes, 1)
    row, column = (numbers[:, :, None, None] for numbers in (tokens // columns, tokens % columns))
    line = torch.arange(p, device=tokens.device)
    return ((plane * rows + row) * p + line) * columns + column


def unpatchify(patches: Shaped[Tensor, "B N P"], grid: Grid, patch_size: tuple[int, int]) -> Shaped[Tensor, "B C H W"]:
    """The image of a full grid of patches; the inverse of `patchify`.

    Raises:
        UsageError: the patches do not fill the grid.
    """
    batch, num_tokens, values = patches.shape
    rows, columns = grid
    p, q = patch_size
    if num_tokens != rows * columns or values % (p * q) != 0:
        shape = tuple(patches.shape)
        raise UsageError(f"patches of shape {shape} do not fill a {rows}x{columns} grid of {p}x{q} patches")
    pixels = patches.reshape(batch, rows, columns, p, q, values // (p * q))
    return pixels.permute(0, 5, 1, 3, 2, 4).reshape(batch, values // (p * q), rows * p, columns * q)


class PatchEmbed(nn.Module):
    """A linear map from the pixels of a patch to a token, `(B, C, H, W) -> (B, V, D)`.

    The same mathematics as a convolution whose stride is its kernel, but only the patches asked for are
    touched: masked patches cost nothing.

    Args:
        patch_size: height and width of a patch in pixels.
        in_chans: channels of the image.
        embed_dim: width of a token.
        may_miss: whether pixels may be NaN for want of data; they then count as 0, the mean of normalised images.
    """

    def __init__(self, *, patch_size: tuple[int, int], in_chans: int, embed_dim: int, may_miss: bool = False) -> None:
        super().__init__()
        self.may_miss = may_miss
        self.patch_size = patch_size
        self.in_chans = in_chans
        self.proj = nn.Linear(in_chans * patch_size[0] * patch_size[1], embed_dim)

    def grid(self, images: Shaped[Tensor, "B C H W"]) -> Grid:
        """The token grid of these images.

        Raises:
            UsageError: wrong number of channels, or sides that are not multiples of the patch.
        """
        check_images(images, self.in_chans)
        return patch_grid(images.shape[2], images.shape[3], self.patch_size)

    def forward(
        self, images: Float[Tensor, "B C H W"], tokens: Int64[Tensor, "B V"] | None = None
    ) -> Float[Tensor, "B V D"]:
        """Embed the patches of the given tokens (None: every token in raster order).

        Raises:
            UsageError: images of another floating point type than the weights, where autocast does not convert them.
        """
        weights = self.proj.weight.dtype
        converted = images.dtype == weights or (
            images.dtype != torch.float64 and torch.is_autocast_enabled(images.device.type)
        )
        if not converted:
            raise UsageError(
                f"images of type {images.dtype}; the model's weights are of type {weights}: give images.to({weights})"
            )
        patches = select_patches(images, self.patch_size, tokens).flatten(2)
        if self.may_miss:  # else NaN stays what it is: a fault that shows
            patches = torch.where(patches.isnan(), 0, patches)
        return self.proj(patches)
