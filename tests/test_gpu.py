"""What needs a CUDA device: the same run there, in each precision, resumed and compiled."""

import json
import shutil
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import run_compiled
from torch import Tensor

import mae
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.pretraining.build import fresh_model, make_trainer
from mae.pretraining.resolve import prepare_run
from mae.recipes import recipe_config
from mae.training import cuda_graphs, muon
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


class Recordings:
    """Counts what is recorded and replayed as CUDA graphs, which for runs of any speed is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replayed: list[int] = []
        record = cuda_graphs.record

        def counted(run: Any, device: torch.device) -> Any:
            graph, found = record(run, device)
            number = len(self.replayed)
            self.replayed.append(0)

            def replay() -> None:
                self.replayed[number] += 1
                graph()

            return replay, found

        monkeypatch.setattr(cuda_graphs, "record", counted)
        monkeypatch.setattr(cuda_graphs, "_GAIN", 0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recipe", ["default", "mae"])
def test_replayed_steps_are_those_that_were_asked_for(
    recipe: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**8))
    options = {**OPTIONS, "recipe": recipe, "steps": 30, "device": "cuda", "precision": precision, "compile": "off"}
    mae.pretrain("builtin:digits", out=tmp_path / "plain", cuda_graphs=False, **options)
    recordings = Recordings(monkeypatch)
    mae.pretrain("builtin:digits", out=tmp_path / "graphs", **options)
    assert recordings.replayed == [20, 18]
    assert losses(tmp_path / "graphs") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)


def test_a_replayed_run_that_was_cut_ends_like_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recordings = Recordings(monkeypatch)
    options = {**OPTIONS, "steps": 45, "device": "cuda", "checkpoint_every": 15}
    mae.pretrain("builtin:digits", out=tmp_path / "through", **options)
    mae.pretrain("builtin:digits", out=tmp_path / "cut", **options)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000045")
    mae.pretrain(out=tmp_path / "cut", resume=True, quiet=True)
    assert recordings.replayed == [35, 33, 35, 33, 5, 3]
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "through"), rel=1e-3)


PARTS: dict[str, dict[str, Any]] = {
    **{mask: {"mask": mask} for mask in ("block", "inverse_block", "grid", "regular", "noise", "multi_block")},
    "predicted": {"decoder": "cross", "mask_predicted": 0.5},
    "linear": {"decoder": "linear", "encoder_mask_tokens": True},
    "hog": {"target": "hog", "target_cell": 2},
    "low_pass": {"target": "low_pass", "loss": "smooth_l1"},
    "random_projection": {"target": "random_projection"},
    "codes": {"target": "codes", "teacher": "codebook", "loss": "cross_entropy"},
    "code_prediction": {"code_prediction": 0.2},
    "ema": {"target": "features", "teacher": "ema"},
    "hard": {"mask": "hard", "teacher": "ema", "difficulty": 1.0},
    "attention": {"mask": "attention", "teacher": "ema", "cls_token": True},
    "terms": {"laplacian": 0.1, "focal_frequency": 0.1, "uniformity": 0.1},
    **{term: {term: 0.1, "repeated_aug": 2} for term in ("sigreg", "visreg", "infonce", "vicreg")},
}


@pytest.mark.parametrize("changes", PARTS.values(), ids=PARTS.keys())
def test_every_part_can_be_replayed(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    options = {
        **OPTIONS,
        "recipe": "mae",
        "steps": 20,
        "device": "cuda",
        "precision": "fp32",
        "compile": "off",
        **changes,
    }
    mae.pretrain("builtin:digits", out=tmp_path / "plain", cuda_graphs=False, **options)
    recordings = Recordings(monkeypatch)
    mae.pretrain("builtin:digits", out=tmp_path / "graphs", **options)
    assert recordings.replayed == [10, 8], caplog.text
    # Replayed steps round differently, and rounding decides which code a patch between two is nearest to.
    tolerance = 3e-2 if "codes" in changes.values() else 1e-3
    assert losses(tmp_path / "graphs") == pytest.approx(losses(tmp_path / "plain"), rel=tolerance)


def test_a_step_that_cannot_be_recorded_goes_on_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    forward = MaskedAutoencoder.forward

    def reading(self: MaskedAutoencoder, images: Tensor, **options: Any) -> Any:
        output = forward(self, images, **options)
        assert float(output.loss) > 0
        return output

    monkeypatch.setattr(MaskedAutoencoder, "forward", reading)
    options = {**OPTIONS, "steps": 20, "device": "cuda", "compile": "off"}
    mae.pretrain("builtin:digits", out=tmp_path / "plain", cuda_graphs=False, **options)
    assert mae.pretrain("builtin:digits", out=tmp_path / "graphs", **options).finished
    assert "are not replayed as CUDA graphs" in caplog.text and "previous error" not in caplog.text
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert losses(tmp_path / "graphs") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)


@pytest.mark.parametrize("graphs", [False, True])
def test_no_step_waits_for_the_device(graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recordings = Recordings(monkeypatch)
    options = {**OPTIONS, "source": "builtin:digits", "device": "cuda", "workers": 0, "out": str(tmp_path / "run")}
    options |= {"steps": 20, "cuda_graphs": graphs}
    del options["quiet"]
    prepared = prepare_run(recipe_config("fast").override(options), None, torch.device("cuda"), World(), resume=False)
    trainer = make_trainer(prepared, fresh_model(prepared))
    with closing(trainer.batches(0)) as batches:
        there = iter(list(islice(batches, 16)))
    for _ in range(15):  # the first makes the averages, and libraries' own memory
        trainer._train_step(there)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer._train_step(there)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert trainer.step == 16 and recordings.replayed == ([6, 4] if graphs else [])
