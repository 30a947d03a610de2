import json
from pathlib import Path

import pytest
import torch
from toy import make_trainer

from mae.errors import MAEError
from mae.training import checkpoint


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
        checkpoint.restore(written / "step-00000012", module=trainer.module, optimizer=trainer.optimizer)


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
        trainer._save()
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
        trainer._save()
    monkeypatch.undo()
    assert newest(written) == "step-00000012"
    assert (written / ".writing-step-00000013").exists()
    checkpoint.remove_leftovers(written)
    assert not (written / ".writing-step-00000013").exists()


def test_weights_of_another_module_are_refused(written: Path):
    other = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(MAEError, match="does not fit this model"):
        checkpoint.restore(written / "step-00000012", module=other, optimizer=optimizer)


def test_good_checkpoints_come_by_step_without_the_damaged(tmp_path: Path):
    make_trainer(tmp_path, keep_every=3).run()
    (tmp_path / "step-00000006" / "state.json").write_text("{}")
    assert list(checkpoint.good_checkpoints(tmp_path).items()) == [
        (step, tmp_path / f"step-{step:08d}") for step in (3, 9, 12)
    ]
    assert checkpoint.good_checkpoints(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("kept", ['{"kept": 1}', "[]", "no json"])
def test_only_a_manifest_that_says_so_keeps_a_checkpoint(tmp_path: Path, kept: str):
    make_trainer(tmp_path, keep_every=3).run()
    (tmp_path / "step-00000003" / "manifest.json").write_text(kept)
    checkpoint.prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000009", "step-00000012"]
