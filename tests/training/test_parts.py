import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from toy import make_trainer

from mae.errors import MAEError, UsageError
from mae.training.log import JsonLines, loss_rows, read_rows
from mae.training.optimizer import layered_groups, make_optimizer, parameter_groups
from mae.training.run_folder import RunFolder, find_weights, new_run_folder
from mae.training.schedule import WarmupCosine
from mae.training.trackers.tensorboard import TensorBoard


def test_schedule_against_the_formula():
    schedule = WarmupCosine(peak=2.0, floor=0.5, warmup_samples=100, total_samples=1100)
    assert schedule(0) == 0
    assert schedule(50) == 1.0
    assert schedule(100) == 2.0
    assert schedule(600) == pytest.approx(1.25)
    assert schedule(1100) == schedule(9999) == pytest.approx(0.5)


def test_schedule_without_warmup_starts_at_the_peak():
    assert WarmupCosine(peak=2.0, floor=0.0, warmup_samples=0, total_samples=10)(0) == 2.0


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def test_vectors_and_biases_are_not_decayed_but_tokens_are():
    decayed, plain = parameter_groups(Odd(), 0.05)
    assert [name for name, _ in decayed["params"]] == ["cls_token", "linear.weight"] and decayed["weight_decay"] == 0.05
    assert [name for name, _ in plain["params"]] == ["linear.bias", "norm.weight", "norm.bias"]
    assert plain["weight_decay"] == 0


def test_optimizer_moves_only_decayed_parameters_without_gradient():
    module = Odd()
    nn.init.ones_(module.linear.bias)
    optimizer = make_optimizer(module, weight_decay=0.5, betas=(0.9, 0.95))
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for p in module.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    torch.testing.assert_close(module.linear.weight.detach(), before["linear.weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(module.linear.bias, before["linear.bias"])
    assert torch.equal(module.frozen, before["frozen"])


def test_layers_learn_with_their_share_of_the_rate():
    module = nn.ModuleDict({f"block{k}": Odd() for k in range(4)})
    groups = layered_groups(
        module,
        layer_of=lambda name: int(name[5]),
        num_layers=3,
        decay=0.5,
        weight_decay=0.05,
        undecayed={f"block{k}.cls_token" for k in range(4)},
    )
    found = {name: (group["lr_scale"], group["weight_decay"]) for group in groups for name, _ in group["params"]}
    expected = {
        f"block{k}.{name}": (0.5 ** (3 - k), 0.05 if name == "linear.weight" else 0.0)
        for k in range(4)
        for name in ("cls_token", "linear.weight", "linear.bias", "norm.weight", "norm.bias")
    }
    assert found == expected and len(groups) == 8
    torch.optim.AdamW(groups)  # takes the groups as they are


def test_json_lines_drop_rows_a_resumed_run_will_write_again(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path, start_step=0)
    for step in (1, 2, 3):
        first.log({"step": step})
    first.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')  # a kill in mid-line
    second = JsonLines(path, start_step=2)
    second.log({"step": 3, "again": True})
    second.close()
    assert read_rows(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_rows_of_evaluations_are_kept_apart(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 0, "samples": 0, "evaluation": {"knn": 0.1}}, {"step": 1, "samples": 8, "loss": 0.5}]
    for start_step in (0, 0):  # the second run was cut before its first checkpoint: it evaluates anew
        lines = JsonLines(path, start_step=start_step)
        for row in rows:
            lines.log(row)
        lines.close()
    assert read_rows(path) == rows
    assert loss_rows(rows) == rows[1:]
    JsonLines(path, start_step=1).close()
    assert read_rows(path) == rows


def test_tensorboard_replaces_the_evaluation_before_the_first_step(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value in (0.25, 0.5):
        board = TensorBoard(tmp_path, start_samples=0)
        board.log({"step": 0, "samples": 0, "evaluation": {"knn": value}})
        board.close()
        time.sleep(1.1)  # the name of an event file counts seconds
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("evaluation/knn")] == [(0, 0.5)]
    assert set(events.Tags()["scalars"]) == {"evaluation/knn"}


def test_tensorboard_holds_the_numbers(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, start_samples=0)
    board.log({"step": 1, "samples": 8, "loss": 0.5, "terms": {"square": 0.25}})
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(8, 0.5)]
    assert [event.value for event in events.Scalars("terms/square")] == [0.25]
    assert set(events.Tags()["scalars"]) == {"loss", "terms/square"}


def test_a_run_folder_must_be_new(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    folder.begin({"a": 1}, {"b": 2})
    assert json.loads(folder.config.read_text()) == {"a": 1}
    assert json.loads(folder.data.read_text()) == {"b": 2}
    with pytest.raises(UsageError, match="holds another run.*--resume"):
        folder.begin({"a": 2}, {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious.txt").write_text("mine")
    with pytest.raises(UsageError, match="not an empty folder"):
        RunFolder(tmp_path / "other").begin({}, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="not an empty folder"):
        RunFolder(tmp_path / "file").begin({}, {})
    assert new_run_folder(tmp_path, "run").root == tmp_path / "run-2"


def test_weights_are_looked_for_where_they_may_be(tmp_path: Path):
    with pytest.raises(UsageError, match="is not there"):
        find_weights(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"^https://host/run is a remote address"):
        find_weights(Path("https://user:secret@host/run?key=secret"))
    with pytest.raises(UsageError, match="a folder without a model"):
        find_weights(tmp_path)
    RunFolder(tmp_path / "run").begin({}, {})
    with pytest.raises(UsageError, match="a run without a checkpoint yet"):
        find_weights(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / ".writing-step-00000004").mkdir(parents=True)
    with pytest.raises(UsageError, match="a run without a checkpoint yet"):
        find_weights(tmp_path / "run")


def test_weights_of_an_older_checkpoint_are_taken_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = tmp_path / "run\x1b[2J"
    make_trainer(run / "checkpoints").run()
    last = run / "checkpoints" / "step-00000012"
    assert find_weights(run) == last / "model.safetensors" and caplog.messages == []
    (last / "model.safetensors").write_bytes(b"cut")
    assert find_weights(run) == run / "checkpoints" / "step-00000008" / "model.safetensors"
    (told,) = caplog.messages
    assert "step-00000012/model.safetensors is not the file that was written" in told and told.isprintable()
    assert "step-00000008 is used instead" in told


def test_a_run_with_damaged_checkpoints_alone_is_damaged(tmp_path: Path):
    make_trainer(tmp_path / "checkpoints").run()
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(MAEError, match="is damaged: .*step-00000012/model.*step-00000008/model") as refused:
        find_weights(tmp_path)
    assert not isinstance(refused.value, UsageError)
