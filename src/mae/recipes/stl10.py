"""STL-10: 100,000 unlabelled images of 96 pixels."""

from mae.config import RunConfig


def stl10() -> RunConfig:
    """The compact model on STL-10's unlabelled images at 96 pixels in patches of 8, 100 epochs.

    Command: `mae pretrain stl10 --recipe stl10`. Cost: not measured. Result: not measured.
    """
    return RunConfig.of(
        source="stl10",
        recipe="stl10",
        model="mae_vit_compact_patch16",
        img_size=(96, 96),
        patch_size=(8, 8),
        epochs=100,
        batch_size=256,
        lr=1e-3,
        warmup_epochs=10,
    )
