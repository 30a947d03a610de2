"""The Vision Transformer that sees only the visible patches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from mae.errors import UsageError
from mae.layers.patch_embed import PatchEmbed, patch_grid
from mae.layers.pos_embed import make_pos_embed
from mae.layers.transformer import LAYER_NORM_EPS, init_linears, make_blocks
from mae.types import Grid


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """What the encoder says of whole images.

    Attributes:
        cls: the class token; None for a model without one.
        mean: the mean of the patch tokens.
        patches: the patch tokens in raster order.
        grid: rows and columns of the patch tokens.
        layers: patch tokens as they leave the blocks that were asked for, in that order, before the last norm; maps
            `[B, D, rows, columns]` where those were asked for.
    """

    cls: Float[Tensor, "B D"] | None
    mean: Float[Tensor, "B D"]
    patches: Float[Tensor, "B N D"]
    grid: Grid
    layers: tuple[Float[Tensor, "B ..."], ...] = ()


class MAEEncoder(nn.Module):
    """Patches, positions, class token, blocks, norm (He et al. 2021, section 3, "MAE encoder").

    Args:
        img_size: height and width of the images in pixels; sine-cosine positions take others too.
        patch_size: height and width of a patch in pixels.
        in_chans: channels of the images.
        embed_dim: width of a token.
        depth: number of blocks.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLPs over `embed_dim`.
        cls_token: whether a class token leads the sequence.
        pos_embed: `sincos2d` or `learned`.
        drop_path: probability that a sample skips the last block's branches while training; it rises in a
            straight line from 0 in the first block.
    """

    def __init__(
        self,
        *,
        img_size: tuple[int, int],
        patch_size: tuple[int, int],
        in_chans: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        cls_token: bool = True,
        pos_embed: str = "sincos2d",
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.grid = patch_grid(*img_size, patch_size)
        self.embed_dim = embed_dim
        self.num_prefix = int(cls_token)
        self.patch_embed = PatchEmbed(patch_size=patch_size, in_chans=in_chans, embed_dim=embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if cls_token else None
        self.pos_embed = make_pos_embed(pos_embed, grid=self.grid, dim=embed_dim)
        self.blocks = make_blocks(
            dim=embed_dim, depth=depth, num_heads=num_heads, mlp_ratio=mlp_ratio, drop_path=drop_path
        )
        self.norm: nn.Module = nn.LayerNorm(embed_dim, eps=LAYER_NORM_EPS)
        self._init_weights()

    def _init_weights(self) -> None:
        init_linears(self.blocks)
        # The bias of the patch projection keeps PyTorch's default: the official model leaves it so.
        nn.init.xavier_uniform_(self.patch_embed.proj.weight)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=0.02)

    def forward(
        self, images: Float[Tensor, "B C H W"], visible: Int64[Tensor, "B V"] | None = None
    ) -> Float[Tensor, "B L D"]:
        """Encode the visible patches (None: every patch in raster order); the class token leads, if there is one.

        Raises:
            UsageError: images of a wrong shape, or of a size the positions cannot be made for.
        """
        return self.norm(self.blocks(self._embed(images, visible)))

    def maps(
        self, images: Float[Tensor, "B C H W"], visible: Int64[Tensor, "B V"] | None = None
    ) -> list[Float[Tensor, "B L D"]]:
        """The tokens that enter the first block and those that leave each; the last ones are what `forward` gives.

        Raises:
            UsageError: see `forward`.
        """
        found = [self._embed(images, visible)]
        for block in self.blocks:
            found.append(self.blocks.through(block, found[-1]))
        return [*found[:-1], self.norm(found[-1])]

    def _embed(self, images: Float[Tensor, "B C H W"], visible: Int64[Tensor, "B V"] | None) -> Float[Tensor, "B L D"]:
        positions = self.pos_embed(self.patch_embed.grid(images))  # [N, D]
        x = self.patch_embed(images, visible) + (positions if visible is None else positions[visible])
        if self.cls_token is not None:  # its position is zero
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype), x], dim=1)
        return x

    def encode(self, images: Float[Tensor, "B C H W"], *, layers: Sequence[int] = (), as_map: bool = False) -> Features:
        """Features of whole images: nothing is masked, and nothing is random but drop path, in training mode.

        Args:
            images: normalised images.
            layers: numbers of blocks whose patch tokens are wanted too, from 0; a negative one counts from the end.
            as_map: give those as maps.

        Raises:
            UsageError: images of a wrong shape, or of a size the positions cannot be made for; no such block.
        """
        numbers = [self._block(number) for number in layers]
        grid, x = self.patch_embed.grid(images), self._embed(images, None)
        left: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks):
            x = self.blocks.through(block, x)
            if number in numbers:
                left[number] = x[:, self.num_prefix :]
        tokens = self.norm(x)
        patches = tokens[:, self.num_prefix :]
        return Features(
            cls=tokens[:, 0] if self.num_prefix else None,
            mean=patches.mean(dim=1),
            patches=patches,
            grid=grid,
            layers=tuple(left[n].mT.unflatten(2, grid) if as_map else left[n] for n in numbers),
        )

    def _block(self, number: int) -> int:
        depth = len(self.blocks)
        if not -depth <= number < depth:
            raise UsageError(f"layer {number} is asked for; this encoder has blocks 0 to {depth - 1}")
        return number % depth
