"""The label-free protocol where images become unreadable between the two views."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from light import forget_images
from rich.console import Console
from tiny_task import CPU, by_function, striped

from mae.data.decode.limits import UnreadableImage
from mae.data.sources.memory import ArraySource, whole_array
from mae.evaluation.common import two_views as module
from mae.evaluation.common.feature_stats import alignment
from mae.evaluation.common.task import UnlabelledTask
from mae.evaluation.common.two_views import two_views
from mae.evaluation.protocols.label_free import LabelFree
from mae.randomness import permutation


class Decaying(ArraySource):
    """Images named in `broken` can no longer be read."""

    broken: ClassVar[set[int]] = set()

    def read(self, index: int) -> np.ndarray:
        if index in self.broken:
            raise UnreadableImage(f"{index} is broken for this test")
        return super().read(index)


def test_views_of_different_images_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An image that vanished is replaced by another in each view; how far these are apart says nothing."""
    forget_images(monkeypatch)
    monkeypatch.setattr(module, "_BATCH_SIZE", 8)
    pixels, _ = striped(40, seed=1)
    task = UnlabelledTask(
        extractor=by_function(lambda images: images.flatten(1), img_size=(16, 16)),
        source=Decaying(**vars(whole_array(pixels, name="decaying", note=""))),
        folder=tmp_path,
        device=CPU,
        seed=3,
        console=Console(quiet=True),
    )
    protocol = LabelFree(views=24)
    whole = two_views(task, task.extractor, count=24)
    before = protocol.run(task).numbers["this model"]["features"]
    assert before["alignment"] == alignment(whole[0]["features"], whole[1]["features"])
    numbers = permutation(3, 0, 40)[:24].sort().values
    monkeypatch.setattr(Decaying, "broken", set(numbers[[0, 5, 9, 23]].tolist()))
    kept = [n for n in range(24) if n not in (0, 5, 9, 23)]
    first, second = (view["features"] for view in two_views(task, task.extractor, count=24))
    assert torch.equal(first, whole[0]["features"][kept]) and torch.equal(second, whole[1]["features"][kept])
    after = protocol.run(task).numbers["this model"]["features"]
    assert after == {**before, "alignment": alignment(first, second)} != before
