"""Components of one's own that are handed over as objects."""

import json
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar, Optional

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import images_for, tiny_model

import mae
from mae.config import RunConfig
from mae.core.describe import describe
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


_WIDTH = 3


@dataclass(frozen=True, kw_only=True)
class Inherited(RandomMasking):
    """A random mask with options that only Python itself understands."""

    kind: ClassVar[str] = "inherited"

    width: int = _WIDTH
    """How wide."""
    depth: Optional[int] = None  # noqa: UP045 - as others write it
    """How deep."""


def test_options_of_a_class_are_its_own_and_those_that_it_inherits():
    config = tiny_model(mask=Inherited(ratio=0.6), mask_ratio=0.5, mask_depth=2).config
    assert config is not None and config.mask == Inherited(ratio=0.5, depth=2)
    found = {name: value for name, value in config.flat().items() if name.startswith("mask_")}
    assert found == {"mask_ratio": 0.5, "mask_predicted": 1.0, "mask_width": 3, "mask_depth": 2}
    helps = {option.flat: option.help for option in describe("masks", "inherited").options}
    assert helps["mask_width"] == "How wide." and helps["mask_ratio"] == "Fraction of the patches masked."
    with pytest.raises(UsageError, match="mask_depth is 'deep'"):
        tiny_model(mask=Inherited(), mask_depth="deep")


def test_a_class_that_is_written_anew_may_have_other_options():
    for name in ("first", "second"):
        fields = {"__annotations__": {name: float}, name: 0.5, "kind": "anew", "__module__": __name__}
        anew = dataclass(frozen=True, kw_only=True)(type("Anew", (PixelTarget,), fields))
        config = tiny_model(target=anew()).config
        assert config is not None and config.flat()[f"target_{name}"] == 0.5
        assert config.override({f"target_{name}": 0.25}).target == anew(**{name: 0.25})


def test_a_class_with_the_name_of_another_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Clash(RandomMasking):
        """Called as what it inherits from."""

    with pytest.raises(UsageError, match="random is another one of the masks; give Clash another kind"):
        tiny_model(mask=Clash())


def test_without_its_package_a_model_is_refused_with_its_name(tmp_path: Path):
    model = tiny_model()
    values = model.config.to_json()
    values["loss"] = {"kind": "theirs", "package": "their_package"}
    mae.save(model, path := tmp_path / "m.safetensors")
    weights, record = load_file(path), json.loads(safe_open(path, "pt").metadata()["mae"])
    save_file(weights, path, {"mae": json.dumps(record | {"config": values})})
    with pytest.raises(UsageError, match=r"m.safetensors: unknown loss 'theirs'; it comes from the package 'their_p"):
        mae.load(path)
    for as_options in (True, False):  # as mae watch reads it, and as a run does
        with pytest.raises(UsageError, match="it comes from the package 'their_package': install that"):
            RunConfig.from_json({"method": values}, as_options=as_options)


@pytest.mark.parametrize(
    ("value", "text", "says"),
    [
        ("away:Theirs", "", "cannot be imported: ModuleNotFoundError"),
        ("theirs:Theirs", "import nothing_of_this_name", "cannot be imported: ModuleNotFoundError"),
        ("theirs:Other", "", "cannot be imported: AttributeError"),
        (
            "theirs:Theirs",
            "class Theirs: kind = 'other'",
            "is of the kind 'other'; its package must give both the same",
        ),
        ("theirs:Theirs", "class Theirs: kind = 'rows'", "Theirs is no frozen dataclass"),
    ],
)
def test_an_installed_package_that_is_wrong_is_named(
    value: str, text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "theirs.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    entry = EntryPoint(name="rows", value=value, group="openmae.masks")
    monkeypatch.setattr("mae.core.kinds._installed", lambda room: {"rows": entry} if room == "masks" else {})
    with pytest.raises(UsageError, match=says):
        tiny_model(mask="rows")
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
