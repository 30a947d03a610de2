"""Components of one's own that are handed over as objects."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny import images_for, tiny_model

import mae
from mae.errors import UsageError
from mae.masks.random import RandomMasking
from mae.targets.pixels import PixelTarget


def written(factor: float) -> type[Any]:
    """The class of a notebook's cell, each time that the cell is run."""

    @dataclass(frozen=True, kw_only=True)
    class Scaled(PixelTarget):
        """Pixels times a number."""

        kind: ClassVar[str] = "scaled"

        def __call__(self, batch: Any, tokens: Any = None, taught: Any = None) -> Any:
            return factor * super().__call__(batch, tokens, taught)

    return Scaled


def test_a_class_that_is_written_anew_takes_the_place_of_the_one_before(tmp_path: Path):
    for factor in (1.0, 100.0):
        model = tiny_model(target=written(factor)())
        mae.save(model, path := tmp_path / "m.safetensors")
        images = images_for(model)
        plan = model.plan(images)
        assert torch.equal(mae.load(path)(images, plan=plan).loss, model(images, plan=plan).loss)


def test_a_class_with_the_name_of_another_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Clash(RandomMasking):
        """Called as what it inherits from."""

    with pytest.raises(UsageError, match="random is another one of the masks; give Clash another kind"):
        tiny_model(mask=Clash())
