"""The step benchmark: what it counts is counted right, and what it compares computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from mae.bench import step
from mae.bench.ceilings import Ceilings, measure_ceilings
from mae.bench.step import StepBench, run_step_bench
from mae.bench.timing import quartiles, ratios, time_interleaved
from mae.cli import main
from mae.errors import MAEError, UsageError
from mae.models.presets import model_config
from mae.models.summary import summarise
from mae.records import read_json

LESSON = "mae_vit_lesson_patch4"


@pytest.fixture
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known ones, and nothing large is multiplied."""
    found = Ceilings(matmul=1e12, copy=1e10, precision="fp32")
    monkeypatch.setattr(step, "measure_ceilings", lambda device, precision: found)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(step, "measure_ceilings", lambda *asked: pytest.fail("measured first"))
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    assert main(["bench", "step", "--models", LESSON, "--device", "cpu", "--out", str(kept)]) == 2
    assert f"{kept} exists and is not overwritten" in capsys.readouterr().err and kept.read_text() == "{}"
    assert main(["bench", "data", str(tmp_path), "--out", str(kept)]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert main(["bench", "end-to-end", "builtin:digits", "--json", str(kept / "figures.json")]) == 2
    assert f"{kept} is not a folder; give another name" in capsys.readouterr().err


@pytest.mark.usefixtures("small_ceilings")
def test_model_with_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "a new folder" / "step.json"
    asked = ["--models", LESSON, "--decoders", "self", "cross:0.5", "--batch-size", "2", "--seconds", "0.01", "--peer"]
    assert main(["bench", "step", *asked, "--device", "cpu", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "images/s" in shown and "ViTMAE" in shown and "GFLOP an image" in shown
    found = read_json(out)
    assert [each["way"] for each in found["results"]] == ["self", "cross:0.5", "ViTMAE"]
    ours, cross, peer = found["results"]
    cost = summarise(model_config(LESSON))
    for each, flops in ((ours, cost.step_flops), (peer, cost.step_flops)):
        # The rate is the median over turns, and so is the time: they may be of different turns where those are even.
        assert each["operations"] == pytest.approx(flops * each["rate"]["median"], rel=0.1)
        assert each["of_matmul"] == pytest.approx(each["operations"] / 1e12)
    assert peer["beside"] is None and peer["parts"] == {} and peer["of_copy"] is None
    assert ours["beside"]["lower"] <= ours["beside"]["median"] <= ours["beside"]["upper"]
    assert list(ours["parts"]) == ["mask", "encoder", "decoder", "target", "loss", "backward", "optimizer", "zeroing"]
    assert sum(ours["parts"].values()) == pytest.approx(1) and ours["of_copy"] > 0 and cross["of_copy"] > 0
    assert found["costs"][LESSON]["self"]["head_flops"] == cost.head_flops
    assert found["machine"]["torch"] == torch.__version__.split("+")[0] or found["machine"]["torch"]


def test_head_flops():
    config = model_config(LESSON)  # 64 patches, 48 of them hidden, of 4 x 4 x 3 values, from 128 wide
    assert summarise(config).head_flops == 2 * 48 * 128 * 48


@pytest.mark.usefixtures("small_ceilings")
def test_peer_with_another_loss_is_refused(monkeypatch: pytest.MonkeyPatch):
    from mae.bench import peer

    make = peer.make_peer

    def other(model: Any) -> Any:
        made = make(model)
        nn.init.zeros_(made.decoder.decoder_pred.weight)
        return made

    monkeypatch.setattr(peer, "make_peer", other)
    bench = StepBench(models=(LESSON,), peer=True, batch_size=2, seconds=0.01, device="cpu")
    with pytest.raises(MAEError, match="the losses differ, nothing was timed"):
        run_step_bench(bench, Console(quiet=True))


@pytest.mark.usefixtures("small_ceilings")
def test_muon():
    bench = StepBench(models=(LESSON,), optimizer="muon", batch_size=2, seconds=0.01, device="cpu")
    (result,) = run_step_bench(bench, Console(quiet=True))["results"]
    assert result["of_copy"] is None and result["parts"]["optimizer"] > 0
    json.dumps(result)


def test_ceilings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mae.bench.ceilings._BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr("mae.bench.ceilings._SIDE", {"cpu": 256})
    found = measure_ceilings(torch.device("cpu"), "bf16")
    assert found.matmul > 1e8 and found.copy > 1e7 and found.precision == "bf16"


def test_time_interleaved_and_ratios():
    said: list[str] = []

    def way(name: str, value: float) -> Any:
        return lambda: (said.append(name), value)[1]

    found = time_interleaved({"a": way("a", 1.0), "b": way("b", 4.0)}, seconds=0.0)
    assert found == {"a": [1.0] * 5, "b": [4.0] * 5}
    assert said == ["a", "b"] * 2 + ["a", "b", "b", "a"] * 2 + ["a", "b"]
    assert ratios([1, 2, 3, 4, 5], [2, 2, 2, 2, 2]).median == 1.5
    assert quartiles([1, 2, 3, 4, 5]).text(1) == "3.0 (2.0\N{EN DASH}4.0)"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"decoders": ("crossed",)}, "--decoders has 'crossed'"),
        ({"decoders": ("cross:2",)}, "--decoders has 'cross:2'"),
        ({"decoders": ("cross:x",)}, "--decoders has 'cross:x'"),
        ({"models": ()}, "nothing to time"),
        ({"seconds": 0.0}, "expected more than 0"),
        ({"batch_size": 0}, "expected more than 0"),
    ],
)
def test_wrong_step_options_are_refused(options: dict[str, Any], says: str):
    with pytest.raises(UsageError, match=says):
        StepBench(**options)


def test_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]):
    assert main(["bench"]) == 0 and "quality" in capsys.readouterr().out
    assert main(["bench", "stop"]) == 2
    assert "did you mean step?" in capsys.readouterr().err
    assert main(["bench", "quality", "--recipes", "demo"]) == 2
