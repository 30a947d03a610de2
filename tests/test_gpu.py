"""What needs a CUDA device: the same run there, in each precision, resumed and compiled."""

import json
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from compiler import run_compiled

import mae
from mae.pretraining.build import fresh_model, make_trainer
from mae.pretraining.resolve import prepare_run
from mae.recipes import recipe_config
from mae.training import muon
from mae.training.distributed import World
from mae.training.log import loss_rows, read_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIONS = {
    "model": "mae_vit_lesson_patch4",
    "img_size": 8,
    "patch_size": 2,
    "batch_size": 64,
    "steps": 12,
    "quiet": True,
}


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in loss_rows(read_rows(folder / "metrics.jsonl"))]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 3e-2), ("fp16", 1e-2)])
def test_the_loss_is_that_of_the_cpu(precision: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # From its own first scale fp16 overflows once, and that step's gradient is missing from the optimizer's averages.
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**8))
    monkeypatch.setattr(muon, "computes_in_bf16", lambda device: False)  # the two need not agree on it
    mae.pretrain("builtin:digits", out=tmp_path / "cpu", device="cpu", **OPTIONS)
    mae.pretrain("builtin:digits", out=tmp_path / "cuda", device="cuda", precision=precision, **OPTIONS)
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=tolerance)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resume_goes_on_where_it_was(precision: str, tmp_path: Path):
    options = {**OPTIONS, "device": "cuda", "precision": precision, "checkpoint_every": 5}
    mae.pretrain("builtin:digits", out=tmp_path / "through", **options)
    mae.pretrain("builtin:digits", out=tmp_path / "cut", **options)
    newest = tmp_path / "cut" / "checkpoints" / "step-00000012" / "manifest.json"
    newest.unlink()
    mae.pretrain(out=tmp_path / "cut", resume=True, quiet=True)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "through"), rel=1e-3)


COMPILED = """
import json, sys
from pathlib import Path
import mae

folder = Path(sys.argv[1])
for way, compile in (("eager", "off"), ("compiled", "on")):
    mae.pretrain("builtin:digits", out=folder / way, device="cuda", compile=compile, **json.loads(sys.argv[2]))
config = json.loads((folder / "compiled" / "config.json").read_text())
assert config["machine"]["compile"] == "on", "the blocks could not be compiled"
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled(precision: str, tmp_path: Path):
    run_compiled(COMPILED, tmp_path, json.dumps({**OPTIONS, "precision": precision}), folder=Path(__file__).parent)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=3e-2)


def test_no_step_waits_for_the_device(tmp_path: Path):
    options = {**OPTIONS, "source": "builtin:digits", "device": "cuda", "workers": 0, "out": str(tmp_path / "run")}
    del options["quiet"]
    prepared = prepare_run(recipe_config("fast").override(options), None, torch.device("cuda"), World(), resume=False)
    trainer = make_trainer(prepared, fresh_model(prepared))
    with closing(trainer.batches(0)) as batches:
        there = iter(list(islice(batches, 4)))
    for _ in range(2):  # the first makes the averages, and libraries' own memory
        trainer._train_step(there)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer._train_step(there)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert trainer.step == 3
