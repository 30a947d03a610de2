"""The options of a study small enough for a test."""

from typing import Any

TINY: dict[str, Any] = {
    "model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2, "mlp_ratio": 0.5, "decoder_depth": 1,
    "batch_size": 15, "epochs": 1.0, "mask_warmup": 0.5, "workers": 0, "device": "cpu", "finetune_epochs": 1.0,
    "quiet": True, "doctor": False,
}  # fmt: skip
