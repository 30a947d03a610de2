"""Two processes that train a detector do what one does; what `detect_together.py` did, once."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scripts import run_script

from mae.training.log import loss_rows, read_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detected")
    run_script(Path(__file__).with_name("detect_together.py"), folder, seconds=380)
    return folder


def images(found: Path, way: str, rank: int) -> list[list[int]]:
    """Keys of the samples of each micro-batch."""
    given: list[list[int]] = json.loads((found / way / f"{rank}.json").read_text())
    return given


def losses(found: Path, way: str) -> list[float]:
    (folder,) = (found / way / "out" / "evaluation" / "finetune_detection").glob("*/")
    return [row["loss"] for row in loss_rows(read_rows(folder / "metrics.jsonl"))]


@pytest.mark.parametrize("way", ["one", "in_parts", "two"])
def test_every_process_finishes(found: Path, way: str):
    logs = "\n".join(path.read_text() for path in (found / way).glob("*.log"))
    assert set(json.loads((found / way / "codes.json").read_text())) == {0}, logs


def test_both_processes_end_with_equal_weights(found: Path):
    first, second = (load_file(found / "two" / f"{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_images_are_shared_out_and_none_is_given_twice(found: Path):
    """Half of each step's images to either process, those that one process would be given."""
    alone, (first, second) = images(found, "one", 0), (images(found, "two", rank) for rank in range(2))
    assert len(first) == len(second) and all(len(keys) == 2 for keys in [*first, *second])
    shared = [sorted(a + b) for a, b in zip(first, second, strict=True)]
    assert shared[: len(alone)] == [sorted(keys) for keys in alone[: len(shared)]]
    epoch = [key for keys in shared[:3] for key in keys]  # of twelve images
    assert len(set(epoch)) == 12


def test_two_processes_step_as_one_does_in_two_parts(found: Path):
    """Each normalises its losses by its own images, and gradients are averaged: equal to rounding."""
    assert losses(found, "two") == pytest.approx(losses(found, "in_parts"), rel=1e-5)
    alone, together = (load_file(found / way / "0.safetensors") for way in ("in_parts", "two"))
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=1e-4, atol=1e-5)


def test_the_loss_is_nearly_that_of_one_process_with_the_whole_batch(found: Path):
    """Of other numbers of regions in the halves: within 5 %, before weights drift apart."""
    assert losses(found, "two")[0] == pytest.approx(losses(found, "one")[0], rel=0.05)
