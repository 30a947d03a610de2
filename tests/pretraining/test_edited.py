"""Checkpoints and records that were edited, with manifests made anew: refused in a line, and nothing is changed."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import mae
from mae.cli import main
from mae.errors import MAEError, UsageError
from mae.pretraining.watch.status import read_state as read_watched
from mae.training.checkpoint import check

pytestmark = pytest.mark.slow

Tensors = dict[str, Tensor]
WEIGHT = "encoder.blocks.0.attn.qkv.weight"


@pytest.fixture
def run(finished: Path) -> Path:
    """With checkpoints of its steps 4 and 6, the last one."""
    return finished


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000006"


def remake_manifest(folder: Path, **changes: Any) -> None:
    """As one who edits a checkpoint and knows how they are verified."""
    told = json.loads((folder / "manifest.json").read_text())
    for name in told["files"]:
        content = (folder / name).read_bytes()
        told["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({**told, **changes}))


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit_json(file: Path, change: dict[str, Any]) -> None:
    """Entries of a record, or of one of its groups, put in the place of others."""
    values = json.loads(file.read_text())
    for name, given in change.items():
        is_group = isinstance(given, dict) and name in ("method", "data", "optim", "machine")
        values[name] = {**values[name], **given} if is_group else given
    file.write_text(json.dumps(values))


def edit_tensors(file: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(file)
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    change(tensors)
    save_file(tensors, file, metadata=metadata)


def some(tensors: Tensors, kind: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(f"/{kind}"))


def put(tensors: Tensors, kind: str, change: Callable[[Tensor], Tensor], *, every: bool = False) -> None:
    for name in [name for name in tensors if name.endswith(f"/{kind}")] if every else [some(tensors, kind)]:
        tensors[name] = change(tensors[name]).contiguous()


def of_weight(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({WEIGHT: change(tensors[WEIGHT]).contiguous()})


def with_one(change: float) -> Callable[[Tensor], Tensor]:
    def changed(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = change
        return tensor

    return changed


STATES: dict[str, tuple[Any, str]] = {
    "step below 0": ({"step": -3}, "step is -3; expected 1 or more"),
    "step 0": ({"step": 0, "samples": 0}, "step is 0; expected 1 or more"),
    "step of another folder": ({"step": 5, "samples": 160}, "step is 5; expected 6, as in its folder's name"),
    "step as text": ({"step": "6"}, "entry step is '6'"),
    "step as float": ({"step": 6.0}, "entry step is 6.0"),
    "step as bool": ({"step": True}, "entry step is True"),
    "step as null": ({"step": None}, "entry step is None"),
    "step as list": ({"step": [6]}, "entry step is [6]"),
    "step beyond words": ({"step": 10**30}, "step"),
    "samples of another batch": ({"samples": 7}, "samples is 7; expected 192, batches of 32"),
    "samples below 0": ({"samples": -192}, "samples is -192"),
    "samples as text": ({"samples": "192"}, "entry samples is '192'"),
    "seconds below 0": ({"seconds": -1.0}, "seconds is -1.0; expected a finite number of 0 or more"),
    "seconds infinite": ({"seconds": float("inf")}, "seconds is inf"),
    "seconds nan": ({"seconds": float("nan")}, "seconds is nan"),
    "seconds as text": ({"seconds": "long"}, "entry seconds is 'long'"),
    "a scaler where none is": ({"scaler": {"scale": 65536.0}}, "scaler has the entries ['scale']; expected []"),
    "scaler as list": ({"scaler": []}, "entry scaler is []"),
    "scaler of text": ({"scaler": {"scale": "x"}}, "entry scaler"),
    "rolled back later": ({"rolled_back_at": 7}, "rolled_back_at is 7; expected null, or 1 to 6"),
    "rolled back as text": ({"rolled_back_at": "no"}, "entry rolled_back_at is 'no'"),
    "no identity": ({"identity": {}}, "was written with data nothing"),
    "identity as list": ({"identity": []}, "entry identity is []"),
    "identity of another seed": (("identity", {"seed": 5}), "was written with seed 5, this run has 0"),
    "identity of another rate": (("identity", {"lr": 5.0}), "was written with lr 5.0, this run has"),
    "identity with more": (
        ("identity", {"mine": 5}),
        "identity has the entries ['mine'], which this run does not have",
    ),
    "an entry more": ({"mine": 1}, "unknown entry 'mine'"),
    "no entries": (None, "entry step is missing"),
    "no object": ([], "holds list; expected a JSON object"),
    "no JSON": ("{", "cannot be read as JSON"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_no_run_writes(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, told = STATES[name]
    file = newest(run) / "state.json"
    state = json.loads(file.read_text())
    if isinstance(change, dict):
        state |= change
    elif isinstance(change, tuple):
        state[change[0]] |= change[1]
    file.write_text(json.dumps({} if change is None else state if isinstance(change, dict | tuple) else change))
    if change == "{":
        file.write_text("{")
    refused(run, capsys, told, "was written with" if "was written" in told else "state.json")


OPTIMIZERS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "empty": (lambda t: t.clear(), "does not fit this model: it lacks "),
    "an average missing": (lambda t: t.pop(some(t, "exp_avg")), "it lacks "),
    "a square missing": (lambda t: t.pop(some(t, "exp_avg_sq")), "it lacks "),
    "a counter missing": (lambda t: t.pop(some(t, "step")), "it lacks "),
    "all counters missing": (lambda t: [t.pop(name) for name in [*t] if name.endswith("/step")], " and "),
    "a parameter more": (lambda t: t.update({"mine/exp_avg": torch.zeros(3)}), "it holds mine/exp_avg, which"),
    "a kind more": (lambda t: t.update({f"{WEIGHT}/velocity": torch.zeros(3)}), "/velocity, which this training"),
    "half precision": (lambda t: put(t, "exp_avg", Tensor.half), "is F16 of shape"),
    "double precision": (lambda t: put(t, "exp_avg_sq", Tensor.double), "is F64 of shape"),
    "another shape": (lambda t: put(t, "exp_avg", lambda x: x[None]), "; expected F32 of "),
    "a counter with a shape": (lambda t: put(t, "step", lambda x: x[None]), "is F32 of shape (1,); expected F32 of ()"),
    "a whole counter": (lambda t: put(t, "step", Tensor.long), "is I64 of shape (); expected F32"),
    "nan": (lambda t: put(t, "exp_avg", with_one(float("nan"))), "holds values that are not finite (nan or inf)"),
    "inf": (lambda t: put(t, "exp_avg_sq", with_one(float("inf"))), "holds values that are not finite (nan or inf)"),
    "a square below 0": (lambda t: put(t, "exp_avg_sq", with_one(-1e-9)), "holds values below 0; expected means of"),
    "a counter apart": (lambda t: put(t, "step", lambda x: x - 1), "expected the same of all parameters"),
    "counters below 0": (lambda t: put(t, "step", lambda x: x - 7, every=True), "is -1; expected a whole number"),
    "counters beyond": (lambda t: put(t, "step", lambda x: x + 1, every=True), "is 7; expected a whole number from"),
    "counters between": (lambda t: put(t, "step", lambda x: x - 0.5, every=True), "is 5.5; expected a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_averages_that_no_optimizer_has(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, told = OPTIMIZERS[name]
    edit_tensors(newest(run) / "optimizer.safetensors", change)
    refused(run, capsys, told, "optimizer.safetensors")


WEIGHTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "empty": (lambda t: t.clear(), "does not fit this model: it lacks "),
    "one missing": (lambda t: t.pop(WEIGHT), f"it lacks {WEIGHT}"),
    "one more": (lambda t: t.update({"mine": torch.zeros(3)}), "it holds mine, which"),
    "int32": (of_weight(Tensor.int), "is I32 of shape"),
    "half precision": (of_weight(Tensor.half), "is F16 of shape"),
    "transposed": (of_weight(lambda x: x.T), "; expected F32 of "),
    "nan": (of_weight(with_one(float("nan"))), "holds values that are not finite"),
    "other values": (of_weight(lambda x: x + 1), "does not reproduce the probe"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_no_run_writes(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, told = WEIGHTS[name]
    edit_tensors(newest(run) / "model.safetensors", change)
    refused(run, capsys, told, "model.safetensors")


def refused(run: Path, capsys: pytest.CaptureFixture[str], told: str, file: str) -> None:
    """Going on ends with code 1 and one line that names the file, and leaves everything as it was."""
    remake_manifest(newest(run))
    assert not check(newest(run))
    before = everything(run)
    assert main(["pretrain", "--out", str(run), "--resume"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("mae: error: ") and error.count("\n") == 1 and "Traceback" not in error
    assert told in error and file in error and str(newest(run)) in error
    assert "was written with" in error or f"delete {newest(run)} to resume from an earlier checkpoint" in error
    assert everything(run) == before


@pytest.mark.parametrize("file", ["optimizer.safetensors", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"\xff" * 64, b"PK\x03\x04" + bytes(60)])
def test_files_that_are_no_safetensors(
    run: Path, file: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (newest(run) / file).write_bytes(content)
    refused(run, capsys, "cannot be read as a safetensors file", file)


def test_after_the_advice_was_taken_it_goes_on(run: Path) -> None:
    edit_tensors(newest(run) / "optimizer.safetensors", lambda tensors: tensors.clear())
    remake_manifest(newest(run))
    shutil.rmtree(newest(run))
    assert mae.pretrain(out=run, resume=True, quiet=True).finished


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another step": lambda told: told.update(step=5),
    "step as text": lambda told: told.update(step="6"),
    "no step": lambda told: told.pop("step"),
    "step below 0": lambda told: told.update(step=-6),
    "kept as a number": lambda told: told.update(kept=1),
    "a file more": lambda told: told["files"].update({"../../config.json": {"bytes": 1, "sha256": "0"}}),
    "a file fewer": lambda told: told["files"].pop("optimizer.safetensors"),
    "size as text": lambda told: told["files"]["state.json"].update(bytes="1"),
    "no digest": lambda told: told["files"]["state.json"].pop("sha256"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_no_run_writes_is_passed_over(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = newest(run) / "manifest.json"
    told = json.loads(file.read_text())
    MANIFESTS[name](told)
    file.write_text(json.dumps(told))
    assert check(newest(run)).startswith(f"{file}: ")
    assert main(["pretrain", "--out", str(run), "--resume"]) == 0
    assert "step-00000004 is used instead" in capsys.readouterr().out


def test_a_checkpoint_in_a_folder_of_another_step_is_none(run: Path) -> None:
    shutil.copytree(newest(run), other := run / "checkpoints" / "step-00000009")
    assert f"{other}/manifest.json: step is 6; expected 9, as in its folder's name" in check(other)
    remake_manifest(other, step=9)
    with pytest.raises(MAEError, match=r"state\.json: step is 6; expected 9, as in its folder's name"):
        mae.pretrain(out=run, resume=True, quiet=True)


def test_a_pipe_of_no_bytes_is_not_waited_for(run: Path) -> None:
    file = newest(run) / "state.json"
    file.write_text("")
    remake_manifest(newest(run))
    file.unlink()
    os.mkfifo(file)
    assert "is not the file that was written" in check(newest(run))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_files_changed_under_their_manifest(run: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = newest(run) / file
    content = bytearray(path.read_bytes())
    content[-2] ^= 1  # the lowest bits of a value, which no probe would tell
    path.write_bytes(content)
    if file == "model.safetensors":
        with pytest.raises(MAEError, match=r"model\.safetensors is not the file that was written"):
            mae.load(newest(run))
    else:
        mae.load(newest(run))  # the weights alone are asked for
    assert main(["pretrain", "--out", str(run), "--resume"]) == 0
    assert f"{file} is not the file that was written" in capsys.readouterr().out


DATA: dict[str, tuple[dict[str, Any], str]] = {
    "images as text": ({"images": "400"}, "entry images is '400'"),
    "no images": ({"images": 0}, "images is 0; expected 1 or more"),
    "no mean": ({"mean": None}, "mean is None; expected an entry as a run writes it"),
    "two means": ({"mean": [0.1, 0.2]}, "mean is (0.1, 0.2); expected 1 of them, one a channel"),
    "mean as text": ({"mean": ["a"]}, "entry mean is 'a'"),
    "mean nan": ({"mean": [float("nan")]}, "mean is (nan,); expected finite numbers"),
    "deviation 0": ({"std": [0.0]}, "std is (0.0,); expected finite numbers above 0"),
    "channels": ({"channels": 3, "mean": [0, 0, 0], "std": [1, 1, 1]}, "channels is 3; expected 1"),
    "fingerprint as a number": ({"fingerprint": 5}, "entry fingerprint is 5"),
    "unreadable as text": ({"unreadable": "all"}, "entry unreadable is 'all'"),
    "start as list": ({"start": []}, "entry start is []"),
    "start without a model": (
        {"start": {"loaded": "", "fresh": None, "licence": None}},
        "entry start.model is missing",
    ),
    "start of a wrong model": (
        {"start": {"model": {"encoder": {"kind": "vit", "depth": 0}}, "loaded": "", "fresh": None, "licence": None}},
        "start: depth is 0; expected greater than 0",
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_what_was_found_in_the_source_edited(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, told = DATA[name]
    record_refused(run, "data.json", change, told, capsys)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "rate as text": ({"optim": {"lr": "fast"}}, "option lr is 'fast'"),
    "rate below 0": ({"optim": {"lr": -1.0}}, "option lr is -1.0: input should be greater than 0"),
    "unknown": ({"optim": {"learning": 1}}, "unknown option 'learning'"),
    "group": ({"optimiser": {}}, "unknown group of options 'optimiser'; did you mean optim"),
    "group as text": ({"optim": "fast"}, "optim is 'fast'; expected an object"),
    "batch as float": ({"optim": {"batch_size": 32.5}}, "option batch_size is 32.5"),
    "device": ({"machine": {"device": "tpu"}}, "option device is 'tpu'"),
    "mask": ({"method": {"mask": {"kind": "random", "ratio": 2}}}, "mask_ratio is 2; expected less than 1"),
    "kind": ({"method": {"mask": {"kind": "blok"}}}, "unknown mask 'blok'; did you mean block"),
    "no model": ({"method": None}, "method is None; expected an object"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_run_was_told_edited(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, told = CONFIGS[name]
    record_refused(run, "config.json", change, told, capsys)


def record_refused(run: Path, name: str, change: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / name
    edit_json(file, change)
    before = everything(run)
    assert main(["pretrain", "--out", str(run), "--resume"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mae: error: ") and error.count("\n") == 1
    assert str(file) in error and told in error
    assert everything(run) == before


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("config.json", {"optim": {"weight_decay": 0.5}}, "was written with weight_decay 0.05, this run has 0.5"),
        ("config.json", {"data": {"crop_scale": [0.2, 1.0]}}, "was written with crop_scale [0.5, 1.0], this run has ["),
        ("config.json", {"method": {"mask": {"kind": "random", "ratio": 0.5}}}, "was written with mask_ratio 0.75, "),
        ("config.json", {"optim": {"optimizer": "adamw"}}, "was written with optimizer 'muon', this run has 'adamw'"),
        ("data.json", {"mean": [0.25]}, "was written with mean "),
        ("data.json", {"std": [0.25]}, "was written with std "),
    ],
)
def test_a_run_told_other_things_than_its_checkpoint(run: Path, file: str, change: dict[str, Any], told: str) -> None:
    path = run / file
    edit_json(path, change)
    before = everything(run)
    with pytest.raises(MAEError) as refusal:
        mae.pretrain(out=run, resume=True, quiet=True)
    assert told in str(refusal.value) and everything(run) == before


def test_weights_of_another_run_with_all_else_as_it_was(run: Path, pretrain: Callable[..., Any]) -> None:
    other = pretrain("other", mask_ratio=0.5).folder
    shutil.copy(newest(other) / "model.safetensors", newest(run) / "model.safetensors")
    remake_manifest(newest(run))
    with pytest.raises(MAEError, match="the model's mask_ratio is 0.5; this run has 0.75"):
        mae.pretrain(out=run, resume=True, quiet=True)


ROWS: dict[str, tuple[str, str]] = {
    "no JSON": ("nonsense\n", "no JSON"),
    "no object": ("[1]\n", "list; expected a JSON object"),
    "no step": ('{"samples": 1}\n', "step is missing"),
    "step as text": ('{"step": "1"}\n', "step is '1'"),
    "step below 0": ('{"step": -1}\n', "step is -1"),
    "a loss alone": ('{"step": 1, "loss": 1.0}\n', "is missing"),
    "loss as text": ('{"step": 1, "loss": "low"}\n', "is missing"),
    "evaluation as a number": ('{"step": 1, "evaluation": 3}\n', "evaluation is 3; expected numbers by name"),
    "evaluation of text": ('{"step": 1, "evaluation": {"rank": "x"}}\n', "expected numbers by name"),
    "warning as text": ('{"step": 1, "warning": "x"}\n', "warning is 'x'; expected a name and a text"),
    "bytes": ("\udcff\n", "no JSON"),
}


@pytest.mark.parametrize("name", ROWS)
def test_numbers_that_no_run_writes(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line, told = ROWS[name]
    file = run / "metrics.jsonl"
    first, rest = file.read_bytes().split(b"\n", 1)
    file.write_bytes(first + b"\n" + os.fsencode(line) + rest)
    before = everything(run)
    assert main(["pretrain", "--out", str(run), "--resume"]) == 1
    error = capsys.readouterr().err
    assert f"{file} holds what no run writes in line 2: " in error and told in error and error.count("\n") == 1
    assert everything(run) == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"steps": "6"}, "entry steps is '6'"),
        ({"steps": -1}, "steps is -1; expected 1 or more"),
        ({"loss": None}, "loss is None; expected an entry"),
        ({"terms": [1]}, "entry terms is [1]"),
        ({"images_per_second": 0}, "images_per_second is 0"),
    ],
)
def test_a_summary_that_no_run_writes(run: Path, change: dict[str, Any], told: str) -> None:
    file = run / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UsageError) as refusal:
        read_watched(run, now=0.0)
    assert str(refusal.value).startswith(f"{file}: ") and told in str(refusal.value)
