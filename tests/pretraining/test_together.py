"""Several processes that train together: what `together.py` did, once, in forks of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scripts import run_script

import mae
from mae.training.checkpoint import check
from mae.training.log import loss_rows, read_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(960)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    run_script(Path(__file__).with_name("together.py"), folder, seconds=900)
    return folder


def codes(runs: Path, name: str) -> list[int]:
    found: list[int] = json.loads((runs / f"{name}.json").read_text())
    return found


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in loss_rows(read_rows(run / "metrics.jsonl"))]


def last_steps(run: Path) -> list[int]:
    """Of the checkpoints, each of which must be whole."""
    found = sorted((run / "checkpoints").iterdir())
    assert not any(check(path) for path in found)
    return [int(path.name.removeprefix("step-")) for path in found]


def words(runs: Path, name: str) -> list[str]:
    return [(runs / f"{name}-{rank}.log").read_text() for rank in range(2)]


@pytest.mark.parametrize("name", ["two", "divided", "compiled", "compiled-divided"])
def test_losses_are_those_of_one_process_to_rounding(runs: Path, name: str):
    assert not any(codes(runs, name))
    assert losses(runs / name) == pytest.approx(losses(runs / "alone"), rel=1e-6)


@pytest.mark.parametrize("name", ["two", "divided", "compiled", "compiled-divided"])
def test_the_checkpoint_is_that_of_one_process_to_rounding(runs: Path, name: str):
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(runs / run / "checkpoints" / "step-00000006" / file) for run in ("alone", name))
        assert {key: (value.shape, value.dtype) for key, value in one.items()} == {
            key: (value.shape, value.dtype) for key, value in other.items()
        }
        for key in one:
            torch.testing.assert_close(other[key], one[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["improved", "improved-compiled"])
def test_what_is_compared_over_a_batch_is_so_over_all_processes(runs: Path, name: str):
    rows = [loss_rows(read_rows(runs / run / "metrics.jsonl")) for run in ("improved-alone", name)]
    assert not any(codes(runs, name)) and {"laplacian", "uniformity"} < rows[0][0]["terms"].keys()
    for alone, together in zip(*rows, strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert together["terms"] == pytest.approx(alone["terms"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["views", "views-divided"])
def test_views_are_compared_over_all_processes(runs: Path, name: str):
    alone, together = (loss_rows(read_rows(runs / run / "metrics.jsonl")) for run in ("views-alone", name))
    assert codes(runs, name) == [0, 0] and {"visreg", "sigreg", "infonce", "vicreg"} < alone[0]["terms"].keys()
    for one, other in zip(alone, together, strict=True):
        # In one process too, weights that are another float32 in their last bit end 1e-4 apart after six such steps.
        rel = 1e-6 if one["step"] <= 3 else 1e-3
        assert other["terms"] == pytest.approx(one["terms"], rel=rel, abs=1e-6)
    weights = [load_file(runs / run / "checkpoints/step-00000006/model.safetensors") for run in ("views-alone", name)]
    assert any(key.startswith("term_heads.") for key in weights[0]) and weights[0].keys() == weights[1].keys()
    # AdamW moves a weight whose gradient is nothing but rounding by the whole rate, one way or the other.
    apart = torch.cat([(weights[1][key] - weights[0][key]).abs().flatten() for key in weights[0]])
    assert float(apart.max()) < 2e-3 and float((apart > 1e-4).float().mean()) < 1e-3


@pytest.mark.parametrize("name", ["codes", "codes-divided"])
def test_a_codebook_learns_of_the_images_of_all_processes(runs: Path, name: str):
    assert codes(runs, name) == [0, 0]
    assert losses(runs / name) == pytest.approx(losses(runs / "codes-alone"), rel=1e-5)
    for file, prefix in (("teacher.safetensors", ""), ("model.safetensors", "term_teachers.code_prediction.")):
        one, other = (
            {key: tensor for key, tensor in load_file(where / file).items() if key.startswith(prefix)}
            for where in (runs / run / "checkpoints" / "step-00000006" for run in ("codes-alone", name))
        )
        assert one.keys() == other.keys() and one[f"{prefix}used"].count_nonzero() > 1
        for key in one:
            torch.testing.assert_close(other[key], one[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["attention", "hard"])
def test_masks_follow_a_divided_teacher_as_a_whole_one(runs: Path, name: str):
    assert codes(runs, f"{name}-divided") == [0, 0]
    assert losses(runs / f"{name}-divided") == pytest.approx(losses(runs / f"{name}-alone"), rel=1e-5)


def test_masks_follow_a_divided_teacher_in_bf16(runs: Path):
    assert codes(runs, "attention-bf16") == [0] * 4  # gone on with undivided, too
    assert losses(runs / "attention-bf16") == pytest.approx(losses(runs / "attention-alone"), rel=0.05)


def test_features_of_a_divided_teacher_are_measured_at_the_end(runs: Path):
    assert codes(runs, "features-divided") == [0, 0]
    assert losses(runs / "features-divided") == pytest.approx(losses(runs / "features-alone"), rel=0.05)
    one, other = (
        json.loads((runs / name / "summary.json").read_text()) for name in ("features-alone", "features-divided")
    )
    assert other["baselines"] == pytest.approx(one["baselines"], rel=0.05)


def test_class_tokens_of_a_divided_model_learn_as_in_one_process(runs: Path):
    assert codes(runs, "tokens") == [0, 0]
    assert losses(runs / "tokens") == pytest.approx(losses(runs / "tokens-alone"), rel=1e-6)
    one, other = (mae.load(runs / name).encoder.cls_token for name in ("tokens-alone", "tokens"))
    assert one.shape == (1, 4, 256)
    torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)


def test_orthogonal_steps_of_a_divided_model_are_those_of_a_whole_one(runs: Path):
    assert codes(runs, "muon-divided") == [0, 0]
    assert losses(runs / "muon-divided") == pytest.approx(losses(runs / "muon-alone"), rel=1e-5)
    assert losses(runs / "muon-alone") != pytest.approx(losses(runs / "alone"), rel=1e-3)


def test_numbers_of_features_and_the_probe_are_of_the_whole_model(runs: Path):
    """The main process looks at a copy of a divided model: a stale one would tell those of step 0 for ever."""
    seen: list[list[dict[str, Any]]] = [
        [row["evaluation"] for row in read_rows(runs / name / "metrics.jsonl") if "evaluation" in row]
        for name in ("alone", "divided")
    ]
    assert len(seen[0]) == len(seen[1]) > 1 and seen[0][0] != seen[0][-1]
    for one, other in zip(*seen, strict=True):
        assert other == pytest.approx(one, rel=1e-2, abs=1e-3)
    mae.load(runs / "divided")  # refused if the answer in its header is not that of its weights


def test_divided_in_bf16_and_compiled_it_learns_as_in_fp32(runs: Path):
    assert codes(runs, "divided-bf16") == [0] * 4  # gone on with undivided, too
    assert losses(runs / "divided-bf16") == pytest.approx(losses(runs / "alone"), rel=0.02)
    stored = load_file(runs / "divided-bf16" / "checkpoints" / "step-00000006" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


@pytest.mark.parametrize(("name", "code"), [("asked", 75), ("ctrl-c", 130)])
def test_one_process_that_is_asked_stops_all_at_the_same_step(runs: Path, name: str, code: int):
    assert codes(runs, name) == [code, code]
    assert last_steps(runs / name) == [4, 6]
    first, second = words(runs, name)
    assert "Stopped and saved. Go on with: mae pretrain --resume --out" in first and second == ""


def test_ctrl_c_in_a_terminal_reaches_the_loading_processes_too(runs: Path):
    assert codes(runs, "terminal") == [130]
    said = (runs / "terminal-0.log").read_text()
    assert "Stopped and saved. Go on with: mae pretrain --resume --out" in said and "Traceback" not in said
    assert max(last_steps(runs / "terminal")) == 6


@pytest.mark.parametrize("case", ["1 process", "2 processes, FSDP2", "4 processes, DDP"])
def test_killed_runs_go_on_to_the_weights_of_one_that_was_not(runs: Path, case: str):
    """Some of the kills of benchmarks/kills.py; with three or more processes the order of additions matters."""
    found = json.loads((runs / "killed.json").read_text())[case]
    assert found["kills"] >= 1 + (case == "1 process") and found["wrong"] == []


def test_a_run_on_two_then_four_then_one_process_sees_the_same_images(runs: Path):
    found = json.loads((runs / "killed.json").read_text())
    assert found["codes"] == [[75] * 2, [75] * 4, [0]]
    assert found["ids_equal"] and found["largest_relative_loss_difference"] < 1e-6


def test_the_launcher_starts_a_run_anew_and_it_goes_on(runs: Path):
    assert len(losses(runs / "restarted")) == 16 and last_steps(runs / "restarted") == [14, 16]
    weights = [
        load_file(runs / name / "checkpoints" / "step-00000016" / "model.safetensors")
        for name in ("restarted", "through")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_lost_process_is_told_and_the_checkpoint_stays(runs: Path):
    assert codes(runs, "lost") == [1, -9]
    told = words(runs, "lost")[0].splitlines()[-1]
    assert told.startswith("mae: error: process 0 of 2 lost another one") and "--resume" in told
    assert "Traceback" not in words(runs, "lost")[0]
    assert set(last_steps(runs / "lost")) <= {2, 4}


def test_a_lost_data_worker_is_told_by_the_process_that_had_it(runs: Path):
    assert codes(runs, "worker") == [1, 1]
    main, had_it = words(runs, "worker")
    assert "mae: error: a data worker process died or hung" in had_it
    assert main.splitlines()[-1].startswith("mae: error: process 0 of 2 lost another one")
    assert "Traceback" not in main + had_it and last_steps(runs / "worker")


def test_a_compiler_that_fails_in_one_process_ends_no_run(runs: Path):
    """Divided, where a pass that fails in one process would leave the other waiting in its own."""
    assert codes(runs, "uncompiled") == [0, 0]
    assert "the blocks cannot be compiled in another process; they are not" in " ".join(
        words(runs, "uncompiled")[0].split()
    )
    assert json.loads((runs / "uncompiled" / "config.json").read_text())["machine"]["compile"] == "off"


def test_a_full_disk_ends_all_and_is_told_once(runs: Path):
    assert codes(runs, "full") == [1, 1]
    first, second = words(runs, "full")
    assert "mae: error: could not write" in first and "No space left" in first and second == ""
    assert last_steps(runs / "full") == [2]


def test_steps_broken_in_one_process_send_all_back(runs: Path):
    assert codes(runs, "broken") == [0, 0]
    told = [row["warning"] for row in read_rows(runs / "broken" / "metrics.jsonl") if "warning" in row]
    told = [warning for warning in told if warning["name"] not in ("no better than the mean", "feature collapse")]
    assert [warning["name"] for warning in told] == ["step skipped"] * 3 + ["rolled back"]
    assert "step-00000008" in told[-1]["text"]
    assert max(last_steps(runs / "broken")) == 16


def test_a_run_that_cannot_go_on_is_told_by_one_process(runs: Path):
    assert codes(runs, "hopeless") == [1, 1]
    first, second = words(runs, "hopeless")
    assert "in 3 consecutive steps up to step 12" in first and "no checkpoint was written yet" in first
    assert "mae replay" in first and second == ""


@pytest.mark.parametrize(("name", "told"), [("wrong", "--batch-size 15"), ("untold", "OPENMAE_TIMEOUT is 'soon'")])
def test_a_wrong_request_is_told_by_one_process(runs: Path, name: str, told: str):
    assert codes(runs, name) == [2, 2]
    first, second = words(runs, name)
    assert told in first and second == ""
