"""An encoder that was trained, and what it was built from."""

from jaxtyping import Float
from torch import Tensor, nn

from mae.models.config import ModelConfig
from mae.models.encoder import Features, MAEEncoder


class PretrainedEncoder(nn.Module):
    """What is left of a masked autoencoder without its decoder: features, and no pictures.

    Args:
        encoder: sees whole images.
        config: what it was built from, whose decoder's sizes mean nothing here; None for an encoder put together by
            hand.
    """

    def __init__(self, *, encoder: MAEEncoder, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.config = config

    def encode(self, images: Float[Tensor, "B C H W"]) -> Features:
        """Features of whole images, never masked: `cls`, `mean` and `patches` in raster order.

        Raises:
            UsageError: images of a wrong shape, or of a size the positions cannot be made for.
        """
        return self.encoder.encode(images)
