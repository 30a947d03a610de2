"""One small run for all, trained as in a notebook."""

from dataclasses import dataclass, field
from typing import Any

import IPython
import IPython.display
import pytest
from light import light_runs

import mae


@dataclass
class Cell:
    """The outputs of a cell: each has the versions that were shown in its place."""

    outputs: list[list[str]] = field(default_factory=list)

    def display(self, shown: Any, *, display_id: bool) -> "Output":
        assert display_id
        self.outputs.append([shown.data])
        return Output(self.outputs[-1])


@dataclass
class Output:
    versions: list[str]

    def update(self, shown: Any) -> None:
        self.versions.append(shown.data)


class Shell:
    """What a kernel has in the place of a terminal's shell."""

    kernel = object()


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    shown = Cell()
    monkeypatch.setattr(IPython, "get_ipython", Shell)
    monkeypatch.setattr(IPython.display, "display", shown.display)
    return shown


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[mae.PretrainResult, Cell]:
    """A run, and what its cell showed."""
    shown = Cell()
    with light_runs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(IPython, "get_ipython", Shell)
        patch.setattr(IPython.display, "display", shown.display)
        run = mae.pretrain(
            "builtin:digits",
            model="mae_vit_lesson_patch4",
            img_size=8,
            patch_size=2,
            batch_size=32,
            steps=6,
            workers=0,
            device="cpu",
            monitor="builtin:digits",
            out=tmp_path_factory.mktemp("run") / "r & <b>",
        )
    return run, shown  # behind the patches, which would hold for the tests of other folders too
