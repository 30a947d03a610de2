"""One linear layer as the decoder: the encoder itself has seen mask tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from mae.core.contracts import Decoder
from mae.core.types import Encoded, Layout, MaskPlan, take_tokens
from mae.layers.transformer import init_linears


@dataclass(frozen=True, kw_only=True)
class Linear(Decoder):
    """A linear head on the encoder's mask tokens (SimMIM, Xie et al. 2021, section 3.3); with --encoder-mask-tokens."""

    kind: ClassVar[str] = "linear"
    needs_mask_tokens: ClassVar[bool] = True

    def build(
        self, *, encoder: Any, layout: Layout, num_outputs: int, activation_checkpointing: bool = False
    ) -> "LinearDecoder":
        """The network, with fresh weights from PyTorch's global generator; it has no blocks. See `Decoder.build`."""
        return LinearDecoder(encoder_dim=encoder.embed_dim, num_outputs=num_outputs)


class LinearDecoder(nn.Module):
    """The same linear map for every predicted token.

    Args:
        encoder_dim: width of the encoder's tokens.
        num_outputs: values predicted for a token.
    """

    def __init__(self, *, encoder_dim: int, num_outputs: int) -> None:
        super().__init__()
        self.pred = nn.Linear(encoder_dim, num_outputs)
        init_linears(self)

    def forward(self, encoded: Encoded, plan: MaskPlan, layout: Layout) -> Float[Tensor, "B M P"]:
        """Predict the tokens in `plan.predicted` from the encoder's last level, which has every token of the grid."""
        tokens = encoded.tokens[:, encoded.num_prefix :]
        return self.pred(take_tokens(tokens, plan.predicted))
