import json
from pathlib import Path

import pytest
import torch
from toy import make_trainer

from mae.errors import MAEError, UsageError
from mae.training import checkpoint
from mae.training.distributed import World
from mae.training.restoring import restore


@pytest.fixture
def written(tmp_path: Path) -> Path:
    make_trainer(tmp_path).run()
    return tmp_path


def newest(folder: Path) -> str:
    found = checkpoint.find_checkpoint(folder)
    assert found is not None
    return found.name


def test_a_checkpoint_is_safetensors_and_json_only(written: Path):
    files = {path.name for path in (written / "step-00000012").iterdir()}
    assert files == {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    assert json.loads((written / "step-00000012" / "state.json").read_text())["step"] == 12


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_passed_over(written: Path, name: str, damage: str):
    path = written / "step-00000012" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[:-1])
    assert newest(written) == "step-00000008"
    with pytest.raises(MAEError, match="step-00000012"):
        trainer = make_trainer(written)
        restore(written / "step-00000012", module=trainer.module, optimizer=trainer.optimizer, world=World())


def test_a_checkpoint_without_manifest_is_not_one(written: Path):
    (written / "step-00000012" / "manifest.json").unlink()
    assert newest(written) == "step-00000008"


@pytest.mark.parametrize("name", ["step-00000099-backup", "xstep-00000099", "step-99", ".writing-step-00000099"])
def test_only_exact_names_count(written: Path, name: str):
    (written / "step-00000012").rename(written / name)
    assert newest(written) == "step-00000008"


def test_a_failing_write_leaves_nothing_and_keeps_the_earlier_one(written: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = make_trainer(written)
    trainer.resume(written / "step-00000012")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_flush", full)
    with pytest.raises(MAEError, match=r"could not write .*step-00000013.*No space left.*step-00000012, is untouched"):
        trainer.step = 13
        trainer._begin_save()
        trainer._finish_save()
    assert sorted(path.name for path in written.iterdir()) == ["step-00000008", "step-00000012"]


def test_a_kill_between_writing_and_commit_leaves_the_earlier_one(written: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = make_trainer(written)
    trainer.resume(written / "step-00000012")

    class Killed(BaseException):
        pass

    def killed(*args: object) -> None:
        raise Killed

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(Killed):
        trainer.step = 13
        trainer._begin_save()
        trainer._finish_save()
    monkeypatch.undo()
    assert newest(written) == "step-00000012"
    assert (written / ".writing-step-00000013").exists()
    checkpoint.remove_leftovers(written)
    assert not (written / ".writing-step-00000013").exists()


def test_weights_of_another_module_are_refused(written: Path):
    other = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(MAEError, match="does not fit this model"):
        restore(written / "step-00000012", module=other, optimizer=optimizer, world=World())


def test_a_damaged_one_that_is_newer_is_told_of(written: Path):
    older, last = written / "step-00000008", written / "step-00000012"
    (written / ".writing-step-00000099").mkdir()
    assert checkpoint.usable_checkpoint(written) == (last, "")
    (last / "state.json").unlink()
    path, note = checkpoint.usable_checkpoint(written)
    assert path == older and ".writing-step" not in note and note.endswith(f"; the older {older} is used instead")
    assert note.startswith(f"{last} lacks state.json; the older ")
    (older / "state.json").write_text("{}")
    with pytest.raises(MAEError) as refused:
        checkpoint.usable_checkpoint(written)
    assert not isinstance(refused.value, UsageError)
    told = str(refused.value)
    assert told.startswith(f"every checkpoint in {written} is damaged: {last} lacks state.json; ")
    assert f"; {older / 'state.json'} is not the file that was written (size or checksum differs); restore" in told


def test_a_damaged_one_that_is_older_is_not(written: Path):
    (written / "step-00000008" / "manifest.json").unlink()
    assert checkpoint.usable_checkpoint(written) == (written / "step-00000012", "")


def test_where_nothing_was_committed_there_is_nothing_to_tell(tmp_path: Path):
    assert checkpoint.usable_checkpoint(tmp_path / "nowhere") == (None, "")
    (tmp_path / ".writing-step-00000004").mkdir()
    (tmp_path / "step-00000004").write_text("no folder")
    assert checkpoint.usable_checkpoint(tmp_path) == (None, "")


def test_of_many_damaged_ones_the_newest_are_named(tmp_path: Path):
    for step in range(1, 7):
        (tmp_path / f"step-{step:08d}").mkdir()
    with pytest.raises(
        MAEError, match="step-00000006 lacks manifest.*step-00000004 lacks .*; and 3 more; restore"
    ) as refused:
        checkpoint.usable_checkpoint(tmp_path)
    assert "step-00000003" not in str(refused.value)


@pytest.mark.parametrize("manifest", ["{}", "[]", "no json", '{"files": null}', '{"files": {"model.safetensors": 1}}'])
def test_a_manifest_that_is_none_is_named(written: Path, manifest: str):
    (written / "step-00000012" / "manifest.json").write_text(manifest)
    said = checkpoint.check(written / "step-00000012")
    assert said.startswith(str(written / "step-00000012" / "manifest.json"))


def test_damaged_ones_that_are_newer_push_no_good_one_out(tmp_path: Path):
    make_trainer(tmp_path, checkpoint_keep_every=3).run()
    for step in (9, 12):
        (tmp_path / f"step-{step:08d}" / checkpoint.MODEL).write_text("{}")
    trainer = make_trainer(tmp_path)
    trainer.resume(tmp_path / "step-00000006")
    trainer.step = 8
    trainer._begin_save()
    trainer._finish_save()
    assert list(checkpoint.good_checkpoints(tmp_path)) == [3, 6, 8]


def test_good_checkpoints_come_by_step_without_those_of_damaged_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    make_trainer(tmp_path, checkpoint_keep_every=3).run()
    (tmp_path / "step-00000006" / checkpoint.MODEL).write_text("{}")
    (tmp_path / "step-00000009" / checkpoint.OPTIMIZER).unlink()  # nobody who asks for them reads it
    assert list(checkpoint.good_checkpoints(tmp_path)) == [3, 9, 12]
    (told,) = caplog.messages
    assert told.startswith(str(tmp_path / "step-00000006" / checkpoint.MODEL)) and told.endswith("; it is skipped")
    assert list(checkpoint.good_checkpoints(tmp_path).items()) == [
        (step, tmp_path / f"step-{step:08d}") for step in (3, 9, 12)
    ]
    assert checkpoint.good_checkpoints(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("kept", ['{"kept": 1}', "[]", "no json"])
def test_only_a_manifest_that_says_so_keeps_a_checkpoint(tmp_path: Path, kept: str):
    make_trainer(tmp_path, checkpoint_keep_every=3).run()
    (tmp_path / "step-00000003" / "manifest.json").write_text(kept)
    checkpoint.prune(tmp_path, keep=1, step=12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000009", "step-00000012"]


def test_what_was_restored_does_not_hang_on_the_files(written: Path):
    """Files are mapped into memory as they are read: what stays of them would change with them, and keep their room."""
    trainer, path = make_trainer(written), written / "step-00000012"
    trainer.resume(path)
    before = [value.clone() for values in trainer.optimizer.state.values() for value in values.values()]
    for name in ("model.safetensors", "optimizer.safetensors"):
        with (path / name).open("r+b") as file:
            file.write(b"\xff" * (path / name).stat().st_size)
    after = [value for values in trainer.optimizer.state.values() for value in values.values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"scale": 0.0}, "scaler's scale is 0.0"),
        ({"scale": float("inf")}, "scaler's scale is inf"),
        ({"_growth_tracker": -1}, "scaler's _growth_tracker is -1"),
        ({"_growth_tracker": 0.5}, "scaler's _growth_tracker is 0.5"),
        ({"growth_interval": 1}, "scaler's growth_interval is 1"),
        ({"mine": 1}, "scaler has the entries"),
    ],
)
def test_a_scaler_that_fp16_has_not(tmp_path: Path, change: dict[str, float], told: str):
    make_trainer(tmp_path, precision="fp16").run()
    path = tmp_path / "step-00000012"
    make_trainer(tmp_path, precision="fp16").resume(path)
    state = json.loads((path / "state.json").read_text())
    assert state["scaler"]["scale"] > 0
    (path / "state.json").write_text(json.dumps({**state, "scaler": {**state["scaler"], **change}}))
    with pytest.raises(MAEError, match=told) as refused:
        make_trainer(tmp_path, precision="fp16").resume(path)
    assert f"delete {path} to resume from an earlier checkpoint" in str(refused.value)
