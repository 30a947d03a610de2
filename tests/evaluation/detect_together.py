"""Trainings of a detector by one process and by two, for test_detection_in_processes.py.

`python detect_together.py FOLDER` leaves a folder for each way: every process's weights, and the images it was given.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from drawn_objects import drawn_objects
from evaluate_together import together
from safetensors.torch import save_file
from tiny_task import small_model
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler

import mae
from mae.evaluation.common import annotated_images
from mae.evaluation.protocols.finetune_detection import DetectorTraining

OPTIONS: dict[str, Any] = {
    "iterations": 6, "batch_size": 4, "channels": 8, "size": 32, "lr": 1e-2, "warmup": 0, "drop_path": 0.0,
    "layer_decay": 1.0, "beside": (), "pictures": 0, "doctor": False, "device": "cpu", "quiet": True,
}  # fmt: skip
WAYS: dict[str, tuple[int, int]] = {"one": (1, 1), "in_parts": (1, 2), "two": (2, 1)}
"""Processes and micro-batches."""


def train(data: Path, place: Path, *, accumulate: int) -> None:
    """Trains, and leaves what this process has in the end and was given on the way."""
    rank, given = os.environ.get("RANK", "0"), []
    seeded, trained = annotated_images.seeded_forward, DetectorTraining.trained

    def noted(keys: torch.Tensor, world: Any) -> torch.Tensor:
        given.append(keys.tolist())
        return seeded(keys, world)

    def kept(self: Any, *args: Any, **options: Any) -> Any:
        training, detector = trained(self, *args, **options)
        save_file(detector.state_dict(), place / f"{rank}.safetensors")
        return training, detector

    annotated_images.seeded_forward, DetectorTraining.trained = noted, kept  # type: ignore[method-assign]
    model = small_model(depth=2, in_chans=3, mean=(0.3,) * 3, std=(0.2,) * 3)
    mae.evaluate("finetune_detection", model, data=data, out=place / "out", accumulate=accumulate, **OPTIONS)
    (place / f"{rank}.json").write_text(json.dumps(given))


def everything(folder: Path) -> None:
    # All regions are learnt from, so that none are drawn: what is drawn is another region in another process.
    BalancedPositiveNegativeSampler.__init__ = lambda self, *_: vars(self).update(  # type: ignore[method-assign]
        batch_size_per_image=1 << 20, positive_fraction=0.5
    )
    data = drawn_objects(folder / "data", train=12, test=2)
    for way, (processes, accumulate) in WAYS.items():
        place = folder / way
        together(processes, place, partial(train, data, place, accumulate=accumulate))


if __name__ == "__main__":
    torch.cpu._is_avx512_bf16_supported = lambda: False  # in float32, as every test computes
    torch.set_num_threads(1)
    everything(Path(sys.argv[1]))
