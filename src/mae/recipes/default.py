"""What a run does that names no recipe."""

from mae.config import RunConfig


def default() -> RunConfig:
    """Any images, any machine: model, size, batch, rate and workers are chosen from the source and the device.

    The paper's method (recipe `mae`) with what made better features in the same time: Muon and larger crops. No colours
    are changed, so that it suits any kind of image.
    """
    return RunConfig.of(optimizer="muon", crop_scale=(0.5, 1.0))
