"""Several processes that evaluate a model measure what one does; what `evaluate_together.py` did, once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scripts import run_script

from mae.training.log import loss_rows, read_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
UNTRAINED = [
    "knn",
    "linear_probe",
    "attentive_probe",
    "pooled_probe",
    "label_free",
    "reconstruction",
    "neighbours_patches",
]
TRAINED = ["linear_probe-official", "finetune"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    run_script(Path(__file__).with_name("evaluate_together.py"), folder, seconds=380)
    return folder


def codes(folder: Path) -> list[int]:
    found: list[int] = json.loads((folder / "codes.json").read_text())
    return found


def record(found: Path, processes: int, name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((found / str(processes) / "out" / "evaluation" / f"{name}.json").read_text())
    return read


@pytest.mark.parametrize("processes", [2, 3])
def test_every_process_finishes(found: Path, processes: int):
    logs = "\n".join(path.read_text() for path in (found / str(processes)).glob("*.log"))
    assert codes(found / str(processes)) == [0] * processes, logs


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("name", UNTRAINED)
def test_results_on_features_are_bit_identical(found: Path, processes: int, name: str):
    alone, together = (record(found, number, name) for number in (1, processes))
    assert json.dumps(together["result"]) == json.dumps(alone["result"])  # their order too: tables are made by it
    assert together["pictures"] == alone["pictures"]
    assert together["data"] == alone["data"] and alone["data"].get("test", 31) == 31  # one of which is broken


@pytest.mark.parametrize("processes", [2, 3])
def test_maps_of_classes_are_bit_identical(found: Path, processes: int):
    alone, together = (record(found, number, "segmentation_knn") for number in (1, processes))
    assert json.dumps(together["result"]) == json.dumps(alone["result"]) and together["verdict"] == alone["verdict"]
    assert together["pictures"] == alone["pictures"] == {"pictures": "segmentation_knn-pictures.png"}


def test_maps_of_a_trained_head_are_those_of_one_process(found: Path):
    place = "odd/evaluation/segmentation_linear.json"
    alone, together = (json.loads((found / number / place).read_text())["result"] for number in ("1", "2"))
    assert together["this model"]["mean_iou"] == pytest.approx(alone["this model"]["mean_iou"], abs=0.02)


@pytest.mark.parametrize("processes", [2, 3])
def test_features_are_bit_identical(found: Path, processes: int):
    stores = [found / str(number) / "out" / "features" for number in (1, processes)]
    names = [sorted(str(path.relative_to(store)) for path in store.glob("*/*")) for store in stores]
    assert names[0] == names[1] and sum(name.endswith(".npy") for name in names[0]) >= 10
    for name in names[0]:
        assert (stores[0] / name).read_bytes() == (stores[1] / name).read_bytes()
    files = [found / str(number) / "out" / "train.npz" for number in (1, processes)]
    with np.load(files[0]) as alone, np.load(files[1]) as together:
        assert all(np.array_equal(alone[name], together[name]) for name in alone)


@pytest.mark.parametrize("name", TRAINED)
def test_trained_results_match_to_rounding(found: Path, name: str):
    """CropDataset, mixed pairs, dropped paths and norms' statistics are of the whole batch, however it is divided."""
    alone, together = (record(found, number, name)["result"] for number in (1, 2))
    runs = [found / str(number) / "out" / "evaluation" / name.partition("-")[0] for number in (1, 2)]
    rows, weights = [], []
    for run in runs:
        (folder,) = run.iterdir()
        weights.append(load_file(max(folder.glob("checkpoints/step-*")) / "model.safetensors"))
        rows.append([row["loss"] for row in loss_rows(read_rows(folder / "metrics.jsonl"))])
    assert len(rows[0]) > 2 and rows[1] == pytest.approx(rows[0], rel=1e-5)
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-4, atol=1e-5)
    epochs = [[row["epoch"] for row in result["training"]["curve"]] for result in (alone, together)]
    assert epochs[0] == epochs[1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", "nowhere is not there; expected a run folder"),
        ("overlap", "45 test images are among the training images too"),
        ("many", "6 of 51 images cannot be used, more than the allowed fraction"),
    ],
)
def test_failure_ends_all_processes(found: Path, name: str, reason: str):
    logs = [(found / name / f"{rank}.log").read_text() for rank in range(2)]
    assert codes(found / name) == [1, 1]
    # Which of them ends first is chance: the other may find that it is alone before it has read the same.
    assert any(reason in log for log in logs), "\n".join(logs)
    assert all(reason in log or "lost another one" in log for log in logs), "\n".join(logs)
