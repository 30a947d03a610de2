"""What a model can do, asked of the model instead of its class."""

from typing import Any


def attends(encoder: Any) -> bool:
    """Whether a network tells what its blocks attend to, see `mae.core.contracts.Encoder.build`."""
    return getattr(encoder, "attends", False)


def predicts_pixels(model: Any) -> bool:
    """Whether predictions of a `MaskedAutoencoder`, or of one made from a `MethodConfig`, can be drawn and measured."""
    return model.target.to_pixels is not None
