"""What a run does that names no recipe."""

from mae.config import RunConfig


def default() -> RunConfig:
    """Any images, any machine: model, size, batch and workers are chosen from the source and the device.

    The rate suits the batches of one machine, 64 to 256; the paper's 1.5e-4 for each 256 of the batch is meant for
    batches of 4096 and hundreds of epochs (recipe `imagenet_base`).
    """
    return RunConfig.of(lr=1e-3)
