"""Low-rank products beside frozen weights, and the last blocks free."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge
from torch import nn

from mae.core.component import Count
from mae.core.contracts import Adapter, Encoder
from mae.errors import UsageError
from mae.layers.lora import add_lora, merge_lora


@dataclass(frozen=True, kw_only=True)
class LoraAdapter(Adapter):
    """LoRA beside the attention of all blocks but the last, which are trained whole (ExPLoRA: Khanna et al. 2024).

    Everything else of the encoder stays as it is, bit for bit: patch projection, positions, class token, norms, MLPs
    and biases of the other blocks, and the last norm. The decoder is trained as ever, and so is a mask token in the
    encoder, which features are made without.
    """

    kind: ClassVar[str] = "lora"

    rank: Count = 16
    """Rank of the products; their strength is 1."""
    blocks: Annotated[int, Ge(0)] = 1
    """Blocks, counted from the last, that are trained whole."""

    def check(self, encoder: Encoder) -> None:
        """Refuse more free blocks than leave one to adapt.

        Raises:
            UsageError: that.
        """
        if self.blocks >= encoder.depth:
            raise UsageError(
                f"adapter_blocks is {self.blocks}, and the encoder has {encoder.depth} blocks; expected fewer, for "
                "with all of them free there is nothing to adapt: leave --adapter out to train everything"
            )

    def apply(self, encoder: Any) -> None:
        """Freeze the encoder, add the products, free the last blocks; in place."""
        encoder.requires_grad_(False)
        adapted = len(encoder.blocks) - self.blocks
        add_lora(nn.ModuleList(encoder.blocks[:adapted]), rank=self.rank)
        for block in encoder.blocks[adapted:]:
            block.requires_grad_(True)
        if encoder.mask_token is not None:
            encoder.mask_token.requires_grad_(True)

    def merge(self, encoder: nn.Module) -> None:
        """Fold the products into their weights, which leaves a plain encoder, all of it free; in place."""
        merge_lora(encoder)
        encoder.requires_grad_(True)
