"""A run that predicts the features of a strong encoder at mask tokens inside its own."""

from mae.config import RunConfig
from mae.recipes.mae import mae


def eva() -> RunConfig:
    """Features of a frozen encoder at mask tokens in the encoder (EVA: Fang et al. 2022; MVP: Wei et al. 2022).

    Blocks of 40 % of the patches are masked, mask tokens stand in the encoder, and a linear head predicts the direction
    of the layer-normalised features of the teacher's last block for the whole image (1 minus the cosine). EVA's teacher
    is CLIP; what a run gains from a teacher that saw other images is that teacher's. Patch and image size must be those
    of the teacher, or --teacher-resample given.

    Command: `mae pretrain SOURCE --recipe eva --teacher-source timm:vit_base_patch16_clip_224.openai`. Cost: the
    encoder computes all patches instead of a quarter, and one pass of the teacher over whole images a step. Result: not
    measured yet.
    """
    return mae().override(
        dict(
            recipe="eva",
            mask="block",
            mask_ratio=0.4,
            encoder_mask_tokens=True,
            decoder="linear",
            target="features",
            teacher="frozen",
            loss="cosine",
        )
    )
