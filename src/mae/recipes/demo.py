"""The run that shows a newcomer what a masked autoencoder does."""

from mae.config import PretrainConfig


def demo() -> PretrainConfig:
    """A small model on the photographs that come with installed libraries.

    Command: `mae demo`. Cost: to be measured.
    """
    return PretrainConfig(
        source="builtin:photos",
        recipe="demo",
        model="mae_vit_ultrasmall_patch16",
        img_size=(64, 64),
        patch_size=(8, 8),
        norm_pix_loss=False,
        steps=1500,
        batch_size=32,
        lr=1.5e-3,
    )
