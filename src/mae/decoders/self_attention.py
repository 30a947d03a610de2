"""The light transformer of the paper: mask tokens and encoded ones look at each other."""

from dataclasses import dataclass
from typing import Any, ClassVar

from mae.core.component import options_of
from mae.core.types import Layout
from mae.decoders.transformer import TransformerDecoder
from mae.layers.mask_decoder import MAEDecoder


@dataclass(frozen=True, kw_only=True)
class SelfAttention(TransformerDecoder):
    """Every token sees every other (He et al. 2021, section 3, "MAE decoder")."""

    kind: ClassVar[str] = "self"

    def build(
        self, *, encoder: Any, layout: Layout, num_outputs: int, activation_checkpointing: bool = False
    ) -> "MAEDecoder":
        """The network, with fresh weights from PyTorch's global generator; see `Decoder.build`."""
        return MAEDecoder(
            encoder_dim=encoder.embed_dim,
            grid=layout.grid,
            num_outputs=num_outputs,
            activation_checkpointing=activation_checkpointing,
            **options_of(self),
        )
