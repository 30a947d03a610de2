"""The Vision Transformer that sees only the visible patches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from jaxtyping import Float
from torch import Tensor, nn

from mae.core.component import Alias, Depth, Epsilon, MlpRatio, Width, options_of
from mae.core.contracts import Encoder, Tokenizer
from mae.core.types import Encoded, Grid, MaskPlan, take_rows
from mae.errors import UsageError
from mae.layers.init import init_normal_
from mae.layers.layer_norm import LayerNorm
from mae.layers.pos_embed import make_pos_embed
from mae.layers.transformer import LAYER_NORM_EPS, init_linears, make_blocks


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """What the encoder says of whole images.

    Attributes:
        cls: the class token, of several their mean; None for a model without one.
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


@dataclass(frozen=True, kw_only=True)
class ViT(Encoder):
    """The Vision Transformer (Dosovitskiy et al. 2020), which sees only the visible patches."""

    kind: ClassVar[str] = "vit"

    embed_dim: Annotated[Width, Alias("embed_dim")] = 768
    """Width of the encoder's tokens."""
    depth: Annotated[Depth, Alias("depth")] = 12
    """Blocks of the encoder."""
    num_heads: Annotated[Width, Alias("num_heads")] = 12
    """Attention heads of the encoder."""
    mlp_ratio: Annotated[MlpRatio, Alias("mlp_ratio")] = 4.0
    """Hidden width of the MLPs over the token width."""
    norm_eps: Annotated[Epsilon, Alias("norm_eps")] = 1e-06
    """Added to the variance in every layer norm."""
    cls_token: Annotated[bool, Alias("cls_token")] = True
    """Whether class tokens lead the sequence."""
    cls_tokens: Annotated[int, Gt(0), Le(1024), Alias("cls_tokens")] = 1
    """How many, where there are any; their mean is the feature (Pixio)."""
    pos_embed: Annotated[Literal["sincos2d", "learned"], Alias("pos_embed")] = "sincos2d"
    """sincos2d: fixed positions, for any image size. learned: trained ones, for one size."""
    mask_tokens: bool = False
    """Put mask tokens where patches are masked, instead of dropping them (SimMIM, BEiT): every patch is encoded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if int(self.embed_dim * self.mlp_ratio) < 1:
            raise UsageError(
                f"mlp_ratio is {self.mlp_ratio}; with a width of {self.embed_dim} it leaves nothing of the MLPs"
            )

        if self.cls_tokens > 1 and not self.cls_token:
            raise UsageError(f"cls_tokens is {self.cls_tokens}, and cls_token is False; leave one of the two out")

    @property
    def num_prefix(self) -> int:
        """Class tokens that lead the sequence."""
        return self.cls_tokens if self.cls_token else 0

    def build(self, tokenizer: Tokenizer, **options: Any) -> "MAEEncoder":
        """The network, with fresh weights from PyTorch's global generator.

        Args:
            tokenizer: of the method.
            options: `drop_path`, `rank`, `world` and `activation_checkpointing` of `make_blocks`.

        Raises:
            UsageError: values that do not fit each other.
        """
        return MAEEncoder(
            patch_embed=tokenizer.embed(self.embed_dim),
            grid=tokenizer.layout.grid,
            **options_of(self),
            **options,
        )


class MAEEncoder(nn.Module):
    """Patches, positions, class tokens, blocks, norm (He et al. 2021, section 3, "MAE encoder").

    The paper has one class token; several, whose mean is the feature, are Pixio's (2025).

    Args:
        patch_embed: from images and the numbers of tokens to `[B, V, D]`, see `Tokenizer.embed`.
        grid: the token grid whose positions are kept ready; sine-cosine positions are made for others too.
        embed_dim: width of a token.
        depth: number of blocks.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLPs over `embed_dim`.
        norm_eps: added to the variance in every layer norm.
        cls_token: whether class tokens lead the sequence.
        cls_tokens: how many.
        pos_embed: `sincos2d` or `learned`.
        mask_tokens: whether masked patches are replaced by a learned token instead of dropped.
        options: `drop_path`, `rank`, `world` and `activation_checkpointing` of `make_blocks`.
    """

    attends: ClassVar[bool] = True

    def __init__(  # noqa: PLR0913 - the sizes of an architecture
        self,
        *,
        patch_embed: nn.Module,
        grid: Grid,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        norm_eps: float = LAYER_NORM_EPS,
        cls_token: bool = True,
        cls_tokens: int = 1,
        pos_embed: str = "sincos2d",
        mask_tokens: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.embed_dim = embed_dim
        self.num_prefix = cls_tokens if cls_token else 0
        self.patch_embed: Any = patch_embed
        self.cls_token = nn.Parameter(torch.zeros(1, cls_tokens, embed_dim)) if cls_token else None
        self.mask_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if mask_tokens else None
        self.pos_embed = make_pos_embed(pos_embed, grid=grid, dim=embed_dim)
        self.blocks = make_blocks(
            dim=embed_dim, depth=depth, num_heads=num_heads, mlp_ratio=mlp_ratio, eps=norm_eps, **options
        )
        self.norm: nn.Module = LayerNorm(embed_dim, eps=norm_eps)
        self._init_weights()

    def _init_weights(self) -> None:
        init_linears(self.blocks)
        # The bias of the patch projection keeps PyTorch's default: the official model leaves it so.
        nn.init.xavier_uniform_(self.patch_embed.proj.weight)
        if self.cls_token is not None:
            init_normal_(self.cls_token, std=0.02)
        if self.mask_token is not None:
            init_normal_(self.mask_token, std=0.02)

    def forward(
        self, images: Float[Tensor, "B C H W"], plan: MaskPlan | None = None, *, levels: bool = False
    ) -> Encoded:
        """Encode the visible patches (plan None: every patch in raster order); class tokens lead, if there are any.

        Args:
            images: normalised images.
            plan: their mask.
            levels: give the tokens that enter the first block and those that leave each too.

        Raises:
            UsageError: images of a wrong shape, or of a size the positions cannot be made for.
        """
        x = self._embed(images, plan)
        places = None if plan is None or self.mask_token is not None else plan.visible
        if not levels:
            return Encoded(levels=[self.norm(self.blocks(x))], num_prefix=self.num_prefix, places=places)
        found = [x]
        for block in self.blocks:
            found.append(self.blocks.through(block, found[-1]))
        return Encoded(levels=[*found[:-1], self.norm(found[-1])], num_prefix=self.num_prefix, places=places)

    def embed_whole(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B L D"]:
        """The tokens that enter the first block, of every patch in raster order; class tokens lead.

        Raises:
            UsageError: see `forward`.
        """
        return self._embed(images, None)

    def _embed(self, images: Float[Tensor, "B C H W"], plan: MaskPlan | None) -> Float[Tensor, "B L D"]:
        visible = None if plan is None or self.mask_token is not None else plan.visible
        positions = self.pos_embed(self.patch_embed.grid(images))  # [N, D]
        x = self.patch_embed(images, visible)
        if plan is not None and self.mask_token is not None:
            x = torch.where(plan.hidden.unsqueeze(-1), self.mask_token.to(x.dtype), x)
        x = x + (positions if visible is None else take_rows(positions, visible))
        if self.cls_token is not None:  # whose position is zero
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
        grid, x = self.patch_embed.grid(images), self.embed_whole(images)
        left: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks):
            x = self.blocks.through(block, x)
            if number in numbers:
                left[number] = x[:, self.num_prefix :]
        encoded = Encoded(levels=[self.norm(x)], num_prefix=self.num_prefix, places=None)
        patches = encoded.tokens[:, self.num_prefix :]
        return Features(
            cls=encoded.cls,
            mean=patches.mean(dim=1),
            patches=patches,
            grid=grid,
            layers=tuple(left[n].mT.unflatten(2, grid) if as_map else left[n] for n in numbers),
        )

    def prefix_attention(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N"]:
        """How much the class tokens attend to each patch of whole images in the last block, float32.

        A mean over heads and class tokens, of which there must be one; with what they attend to themselves a row adds
        up to 1.

        Raises:
            UsageError: see `encode`.
        """
        last: Any = self.blocks[-1]
        x = self.embed_whole(images)
        for block in self.blocks[:-1]:
            x = self.blocks.through(block, x)
        weights = last.attention_weights(x, queries=self.num_prefix)
        return weights[..., self.num_prefix :].mean(dim=(1, 2))

    def attention(self, images: Float[Tensor, "B C H W"]) -> Iterator[Float[Tensor, "B heads L L"]]:
        """How much each token of whole images attends to each other, block after block, float32; class tokens lead.

        A row adds up to 1. One block's weights are held at a time: of a ViT-B at 224 pixels 1.9 MB an image.

        Raises:
            UsageError: see `encode`.
        """
        block: Any
        x = self.embed_whole(images)
        for block in self.blocks:
            yield block.attention_weights(x, queries=x.shape[1])
            x = self.blocks.through(block, x)

    def _block(self, number: int) -> int:
        depth = len(self.blocks)
        if not -depth <= number < depth:
            raise UsageError(f"layer {number} is asked for; this encoder has blocks 0 to {depth - 1}")
        return number % depth
