"""A run that predicts the features of an earlier run's encoder."""

from mae.config import RunConfig
from mae.recipes.mae import mae


def second_stage() -> RunConfig:
    """The recipe `mae` with fresh weights and a frozen earlier encoder as the teacher (dBOT: Liu et al. 2022).

    75 % of the patches are masked, and the layer-normalised features of the teacher's last block for the whole image
    are predicted with smooth L1. Model, image and patch size must be those of the first run, or --teacher-resample
    given; the result is a teacher for a third stage.

    Command: `mae pretrain SOURCE --recipe second_stage --teacher-source runs/first`. Cost: that of the recipe `mae`,
    and one pass of the teacher over whole images a step. Result: not measured yet.
    """
    return mae().override(
        dict(recipe="second_stage", target="features", teacher="frozen", loss="smooth_l1", mask_ratio=0.75)
    )
