"""W&B and MLflow: what needs neither of them, and both of them without a network."""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import mae
from mae.cli import main
from mae.cli.early import check_run
from mae.config import RunConfig, is_changeable
from mae.errors import MAEError, UsageError
from mae.training.run_folder import RunFolder
from mae.training.trackers import installed
from mae.training.trackers import open as trackers
from mae.training.trackers.ids import TrackerIds, read_ids
from mae.training.trackers.rows import numbers_of

LOSS_ROW = {"step": 2, "samples": 16, "loss": 0.5, "grad_norm": None, "terms": {"reconstruction": 0.25}}
WARNING = {"step": 2, "samples": 16, "warning": {"name": "loss spike", "text": "the loss rose"}}
Run = Callable[..., mae.PretrainResult]
needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UsageError, match=r"--log-to is .*'tensorbord'.*expected 'tensorboard', 'wandb' or 'mlflow'"):
        RunConfig.of(log_to=("tensorbord",))
    assert main(["pretrain", "builtin:digits", "--log-to", "wandb", "tensorbord"]) == 2
    assert capsys.readouterr().err.startswith("mae: error: --log-to is ('wandb', 'tensorbord'); expected")


def test_tensorboard_is_the_default_and_a_resumed_run_may_change_it():
    assert RunConfig().machine.log_to == ("tensorboard",)
    assert is_changeable("log_to")
    begun = RunConfig.of(log_to=("wandb", "mlflow")).to_json()
    assert RunConfig.from_json(json.loads(json.dumps(begun))).machine.log_to == ("wandb", "mlflow")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_told_before_anything_is_begun(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(installed, "find_spec", lambda package: None)
    out, told = tmp_path / "run", f"--log-to {name} needs the package {name}, which is not installed: "
    assert main(["pretrain", "builtin:digits", "--out", str(out), "--log-to", "tensorboard", name]) == 2
    assert capsys.readouterr().err == f"mae: error: {told}pip install 'openmae[{name}]'\n"
    with pytest.raises(UsageError, match=rf"openmae\[{name}\]"):  # by the command before PyTorch is loaded
        check_run(RunConfig.of(source="builtin:digits", log_to=[name]), resume=False)
    with pytest.raises(UsageError, match=rf"openmae\[{name}\]"):
        mae.pretrain("builtin:digits", out=out, log_to=[name], steps=1, quiet=True)
    assert not out.exists()


def test_a_folder_without_code_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "left_by_wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed, "_EXTRAS", ("left_by_wandb", "json"))
    installed.check_trackers(["json", "tensorboard"])
    with pytest.raises(UsageError, match="left_by_wandb"):
        installed.check_trackers(["left_by_wandb"])


def test_ids_are_read_back_and_none_are_there_at_first(tmp_path: Path):
    path = tmp_path / "tracking.json"
    assert read_ids(path) == TrackerIds()
    path.write_text('{"wandb": "0b2bd7bb829a"}')
    assert read_ids(path) == TrackerIds(wandb="0b2bd7bb829a", mlflow=None)


@pytest.mark.parametrize("wrong", ["../../elsewhere", "", "a" * 65, "a\n", "a/b", 7, ["a"]])
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_ids_edited_by_hand_are_refused(name: str, wrong: object, tmp_path: Path):
    path = tmp_path / "tracking.json"
    path.write_text(json.dumps({name: wrong}))
    with pytest.raises(UsageError, match=rf"tracking\.json: .*{name}.*delete the file to begin new runs"):
        read_ids(path)


def test_numbers_of_a_row():
    assert numbers_of(LOSS_ROW) == {"samples": 16, "loss": 0.5, "terms/reconstruction": 0.25}


def test_a_tracker_that_cannot_begin_is_told_with_how_to_go_on(
    pretrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*args: object, **options: object) -> Any:
        raise OSError("no network.\nand more")

    monkeypatch.setattr(trackers, "_WITH_ID", {"wandb": refuse})
    monkeypatch.setattr(installed, "find_spec", lambda package: find_spec("json"))
    out = tmp_path / "run"
    with pytest.raises(MAEError) as failed:
        pretrain(log_to=["wandb"], steps=1)
    assert str(failed.value) == (
        f"--log-to wandb cannot begin a run: no network. Mend that and go on with mae pretrain --resume --out {out}, "
        "where --log-to without wandb leaves it out"
    )
    assert mae.pretrain(out=out, resume=True, log_to=[], quiet=True).finished
    assert not (out / "tensorboard").exists() and not (out / "tracking.json").exists()


def opened(folder: Path, name: str, *, start: int = 0) -> Any:
    """The tracker of that name of a run of three steps."""
    config = {"optim": {"epochs": 2, "lr": None}, "source": "photos"}
    (found,) = trackers.open_trackers([name], RunFolder(folder), config=config, start=(start, 8 * start), total_steps=3)
    return found


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty run folder, and neither package with a network or a home of its own."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    folder = tmp_path / "experiments" / "run"
    folder.mkdir(parents=True)
    return folder


def records_of(path: Path) -> list[Any]:
    """The records in a file of W&B's, a log in LevelDB's format: blocks of 32 KiB, in which records may be cut."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, found, begun, at = path.read_bytes(), [], b"", 7  # after the header
    while at + 7 <= len(content):
        if (left := -at % 32768) and left < 7:  # too little for a record's own header
            at += left
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        begun += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            found.append(Record.FromString(begun))
            begun = b""
    return found


def written_by_wandb(folder: Path) -> list[list[Any]]:
    """The records of each part of a run, oldest first."""
    paths = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    return [records_of(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)]


def of_kind(records: list[Any], kind: str) -> list[Any]:
    """The records of a kind."""
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def history(records: list[Any]) -> list[dict[str, Any]]:
    """The rows of a part, by name."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item}
        for row in of_kind(records, "history")
    ]


@needs_wandb
def test_wandb_gets_the_numbers_and_a_resumed_run_continues(run_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["mae", "pretrain", "https://me:secret-word@host/pack"])
    first = opened(run_folder, "wandb")
    first.log(LOSS_ROW)
    first.log(WARNING)
    first.close()
    time.sleep(1.1)  # the name of W&B's folder counts seconds
    second = opened(run_folder, "wandb", start=2)
    second.log({"step": 3, "samples": 24, "loss": 0.25})
    second.log({"step": 3, "samples": 24, "evaluation": {"rank": 7.0}})
    second.close()
    parts = written_by_wandb(run_folder)
    shown = [[{name: row[name] for name in row if not name.startswith("_r") and name != "_timestamp"} for row in rows]
             for rows in map(history, parts)]  # fmt: skip
    assert shown == [
        [{"_step": 2, "samples": 16, "loss": 0.5, "terms/reconstruction": 0.25}],
        [{"_step": 3, "samples": 24, "loss": 0.25, "evaluation/rank": 7.0}],
    ]
    runs = [run for records in parts for run in of_kind(records, "run")]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {(first.run_id, "experiments", "run")}
    assert [end.exit_code for records in parts for end in of_kind(records, "exit")] == [255, 0]
    assert json.loads((run_folder / "tracking.json").read_text()) == {"wandb": first.run_id, "mlflow": None}
    everything = b"".join(path.read_bytes() for path in run_folder.rglob("*") if path.is_file())
    assert b"the loss rose" in everything and b"photos" in everything
    assert b"secret-word" not in everything


def mlflow_run(run_id: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient().get_run(run_id)


@needs_mlflow
def test_mlflow_gets_the_numbers_and_a_resumed_run_continues(run_folder: Path):
    from mlflow.tracking import MlflowClient

    first = opened(run_folder, "mlflow")
    assert mlflow_run(first.run_id).info.status == "RUNNING"
    first.log(LOSS_ROW)
    first.log(WARNING)
    first.close()
    stored = mlflow_run(first.run_id)
    assert stored.info.status == "KILLED" and stored.info.run_name == "run"
    assert MlflowClient().get_experiment(stored.info.experiment_id).name == "experiments"
    assert stored.data.params == {"optim.epochs": "2", "optim.lr": "None", "source": "photos"}
    assert stored.data.metrics == {"samples": 16, "loss": 0.5, "terms/reconstruction": 0.25}
    assert stored.data.tags["warning.loss spike"] == "the loss rose"
    second = opened(run_folder, "mlflow", start=2)
    assert second.run_id == first.run_id and mlflow_run(first.run_id).info.status == "RUNNING"
    second.log({"step": 3, "samples": 24, "loss": 0.25})
    second.close()
    points = MlflowClient().get_metric_history(first.run_id, "loss")
    assert [(point.step, point.value) for point in points] == [(2, 0.5), (3, 0.25)]
    assert mlflow_run(first.run_id).info.status == "FINISHED"


@needs_mlflow
def test_a_run_that_mlflow_does_not_know_is_not_begun_anew(run_folder: Path):
    (run_folder / "tracking.json").write_text(json.dumps({"mlflow": "0" * 32}))
    with pytest.raises(MAEError, match=r"cannot continue run 0+ of .*tracking\.json: Run with id=0+ not found"):
        opened(run_folder, "mlflow")


@needs_mlflow
def test_a_store_that_fails_ends_the_logging_alone(run_folder: Path, caplog: pytest.LogCaptureFixture):
    tracker = opened(run_folder, "mlflow")
    tracker._client.delete_run(tracker.run_id)
    with caplog.at_level(logging.WARNING, logger="mae"):
        for _ in range(2):
            tracker.log(LOSS_ROW)
        tracker.close()
    assert len([record for record in caplog.records if "MLflow takes no more numbers" in record.message]) == 1


@pytest.mark.slow
@needs_wandb
@needs_mlflow
def test_a_resumed_run_is_the_same_run_everywhere(pretrain: Run, run_folder: Path):
    out = run_folder.parent / "both"
    pretrain(str(out), steps=4, log_to=["wandb", "mlflow"])
    begun = read_ids(out / "tracking.json")
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    assert mae.pretrain(out=out, resume=True, quiet=True).finished
    assert read_ids(out / "tracking.json") == begun and begun.mlflow is not None
    assert [[row["_step"] for row in history(records)] for records in written_by_wandb(out)] == [
        [0, 1, 2, 3, 4],
        [3, 4],
    ]
    assert mlflow_run(begun.mlflow).info.status == "FINISHED"
    assert mlflow_run(begun.mlflow).data.params["optim.steps"] == "4"
    assert not (out / "tensorboard").exists()
