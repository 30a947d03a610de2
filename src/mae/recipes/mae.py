"""The method of the paper (He et al. 2021), on any images."""

from mae.config import RunConfig


def mae() -> RunConfig:
    """The paper's method with what suits one machine: AdamW, crops of a fifth of the image or more, no further terms.

    The rate suits batches of 64 to 256; the paper's 1.5e-4 for each 256 of the batch is meant for batches of 4096 and
    hundreds of epochs (recipe `imagenet_base`). Model, image size, batch and workers are chosen from the source and the
    device. Studies begin with this recipe.

    Command: `mae pretrain SOURCE --recipe mae`. Cost: three quarters of the default run's with the lesson model.
    Result: see the plain runs in docs/results/ablations.md.
    """
    return RunConfig.of(recipe="mae", lr=1e-3)
