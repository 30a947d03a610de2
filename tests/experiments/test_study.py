"""Studies from request to report: what is run, resumed, refused and written."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from jobs_here import run_jobs_here
from PIL import Image
from rich.console import Console
from tiny_study import TINY

import mae
from mae.cli import main
from mae.errors import UsageError
from mae.experiments.run import StudyOutcome, compare_models, study
from mae.experiments.studies.features import Features
from mae.recipes import recipe_config
from mae.training.run_folder import find_weights

pytestmark = pytest.mark.slow
RUNS = ["original-seed0", "improved-seed0", "original-seed1", "improved-seed1"]


def test_every_variant_runs_with_every_seed(compared: StudyOutcome):
    assert compared.finished and sorted(path.name for path in (compared.folder / "runs").iterdir()) == sorted(RUNS)
    assert [(run.variant, run.seed) for run in compared.result.runs] == [
        ("original", 0), ("improved", 0), ("original", 1), ("improved", 1)
    ]  # fmt: skip
    for run in compared.result.runs:
        measured = {
            "linear_probe",
            "finetune",
            "knn",
            "psnr",
            "psnr_true_statistics",
            "ssim",
            "laplacian",
            "loss",
            "epoch_seconds",
        }
        assert measured <= run.numbers.keys()


def test_variants_have_their_loss_terms(compared: StudyOutcome):
    terms = {
        run.variant: json.loads((run.folder / "summary.json").read_text())["terms"].keys()
        for run in compared.result.runs
    }
    assert terms == {
        "original": {"reconstruction"}, "improved": {"reconstruction", "laplacian", "uniformity"}
    }  # fmt: skip


def test_commands_shown_repeat_a_run(compared: StudyOutcome, tmp_path: Path):
    """The commands shown give the same weights again, and the same numbers."""
    run = compared.result.runs[1]
    train, knn, *_ = (shlex.split(command)[1:] for command in run.commands)
    again = str(tmp_path / "again")
    train[train.index("--out") + 1] = knn[2] = again
    assert main(train) == 0
    first, second = mae.load(run.folder).state_dict(), mae.load(again).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert main(knn) == 0
    found = json.loads((tmp_path / "again" / "evaluation" / "knn.json").read_text())
    assert found["result"]["this model"]["mean"]["20"]["top1"] == run.numbers["knn"]


def test_seeds_differ(compared: StudyOutcome):
    first, second = (mae.load(compared.folder / "runs" / name).state_dict() for name in RUNS[::2])
    assert not torch.equal(first["encoder.norm.weight"], second["encoder.norm.weight"])


def test_report(compared: StudyOutcome):
    assert compared.report == compared.folder / "report.html"
    page = compared.report.read_text()
    for expected in (
        "Is improved better than original",
        "baseline: knn, random weights",
        "--laplacian 0.05",
        "data:image",
    ):
        assert expected in page
    values = [run.numbers["finetune"] for run in compared.result.runs if run.variant == "improved"]
    assert f"{50 * sum(values):.1f} &#177; " in page  # two seeds, in percent
    assert "http" not in page.replace("http-equiv", "")
    record = json.loads((compared.folder / "result.json").read_text())
    assert len(record["runs"]) == 4


def test_finished_runs_are_not_repeated(compared: StudyOutcome, labelled: Path):
    def written() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in (compared.folder / "runs").rglob("*") if path.is_file()}

    before = written()
    again = study("compare", labelled, out=compared.folder, seeds=2, **TINY)
    assert written() == before and again.finished and again.result.runs == compared.result.runs


def test_a_finished_run_that_is_gone_is_told_before_others_are_trained(
    compared: StudyOutcome, labelled: Path, tmp_path: Path
):
    out = tmp_path / "study"
    (out / "jobs").mkdir(parents=True)
    for kept in ("study.json", "jobs/improved-seed0.json", "jobs/improved-seed0.result.json"):
        text = (compared.folder / kept).read_text()
        (out / kept).write_text(text.replace(str(compared.folder), str(out)))
    with pytest.raises(UsageError) as told:
        study("compare", labelled, out=out, seeds=2, **TINY)
    gone, result = out / "runs" / "improved-seed0", out / "jobs" / "improved-seed0.result.json"
    assert str(told.value) == (
        f"{gone / 'summary.json'} is not there, though the run finished; put {gone} back, or delete {result} to "
        "repeat the run"
    )
    assert not (out / "runs").exists()


def test_report_of_runs_whose_checkpoints_are_gone(compared: StudyOutcome, labelled: Path, tmp_path: Path):
    """People remove checkpoints for room; what was measured is kept."""
    out = tmp_path / "study"
    shutil.copytree(compared.folder, out)
    for spec in (out / "jobs").glob("*.json"):
        spec.write_text(spec.read_text().replace(str(compared.folder), str(out)))
    for name, gone in (("improved", "improved"), ("original", "original, improved")):
        shutil.rmtree(out / "runs" / f"{name}-seed0" / "checkpoints")
        (out / "report.html").unlink()
        (out / "pictures.png").unlink()
        again = study("compare", labelled, out=out, seeds=2, **TINY)
        assert [run.numbers for run in again.result.runs] == [run.numbers for run in compared.result.runs]
        page = (out / "report.html").read_text()
        assert f"Not drawn, since no intact checkpoint of seed 0 is left: {gone}." in page
        assert (out / "pictures.png").exists() == (gone == "improved")
        (out / "pictures.png").touch()


def test_other_options_in_the_folder_are_refused(compared: StudyOutcome, labelled: Path):
    with pytest.raises(UsageError, match=r"run original-seed0 differs: batch_size was 15, is now 20\."):
        study("compare", labelled, out=compared.folder, seeds=2, **{**TINY, "batch_size": 20})


def test_refused_study_writes_nothing(labelled: Path, tmp_path: Path):
    out = tmp_path / "study"
    for changes, says in (
        (
            {"mask_warmup": 5.0},
            r"variant improved: the warm-up \(--mask-warmup\) is 5 epochs, but the whole run has 1 epochs",
        ),
        ({"data": str(tmp_path)}, "holds no images"),
        ({"seeds": 0}, "one seed or more"),
        ({"sedes": 3}, "unknown option 'sedes'"),
    ):
        with pytest.raises(UsageError, match=says):
            study("compare", labelled, out=out, **{**TINY, **changes})
        assert not out.exists()
    unsettled = {name: value for name, value in TINY.items() if name != "batch_size"}
    with pytest.raises(UsageError, match=r"the variants differ in --batch-size \(original: 8, demo: 32\)"):
        study("compare", labelled, out=out, variants=["original", "demo"], **unsettled)
    assert not out.exists()
    for names, options, says in (
        (("x y.json", "x:y.json"), {}, "x y.json and .*x:y.json would both be called "),
        (("x y.json", "wide.json"), {"embed_dim": 96}, r"the variants differ in --embed-dim \("),
    ):
        files = [tmp_path / name for name in names]
        for file, changes in zip(files, ({}, options or {"mask_ratio": 0.5}), strict=True):
            file.write_text(json.dumps(recipe_config("mae").override(changes).to_json()))
        with pytest.raises(UsageError, match=says):
            study("compare", labelled, out=out, variants=[str(file) for file in files], **TINY)
        assert not out.exists()
    out.mkdir()
    (out / "letter.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds no study"):
        study("compare", labelled, out=out, **TINY)


def test_features_study_with_baselines(
    compared: StudyOutcome, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_jobs_here(monkeypatch)
    runs = [str(compared.folder / "runs" / name) for name in RUNS[:2]]
    missing = str(tmp_path / "missing")

    def beside(*models: str) -> StudyOutcome:
        return compare_models(
            Features(models=models), data=str(labelled), data_root=Path("data"), out=tmp_path / "features",
            device="cpu", console=Console(quiet=True),
        )  # fmt: skip

    with pytest.raises(UsageError, match="missing is not there"):
        beside(runs[0], missing)
    assert not (tmp_path / "features").exists()
    found = beside(runs[0])
    assert [run.variant for run in found.result.runs] == [runs[0], "random weights", "raw pixels"]
    assert ("feature of " + runs[0], "mean") in found.result.facts
    expected = compared.result.runs[0].numbers
    assert found.result.runs[0].numbers["knn"] == expected["knn"]
    assert found.result.runs[0].numbers["linear_probe"] == expected["linear_probe"]
    again = mae.study("features", labelled, models=[runs[1], runs[0]], out=tmp_path / "features", quiet=True)
    assert [run.variant for run in again.result.runs][:2] == [runs[1], runs[0]]
    assert again.result.runs[1].numbers == found.result.runs[0].numbers
    assert again.result.warnings == ()


def test_models_are_told_apart_by_their_weights(
    compared: StudyOutcome, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_jobs_here(monkeypatch)
    first, second = (find_weights(compared.folder / "runs" / name) for name in RUNS[:2])
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    shutil.copy(first, "m.safetensors")
    shutil.copy(second, "x-m.safetensors")
    shutil.copy(second, "x/m.safetensors")
    with pytest.raises(UsageError, match="x-m.safetensors and x/m.safetensors would both be called"):
        mae.study("features", labelled, models=["x-m.safetensors", "x/m.safetensors"], out="a", quiet=True)
    mae.study("features", labelled, models=["m.safetensors"], out="b", quiet=True)
    shutil.copy(second, "m.safetensors")
    with pytest.raises(UsageError, match="weights was .*, is now "):
        mae.study("features", labelled, models=["m.safetensors"], out="b", quiet=True)


def test_near_duplicates_are_reported(
    compared: StudyOutcome, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    run_jobs_here(monkeypatch)
    copied = tmp_path / "copied"
    shutil.copytree(labelled, copied)
    Image.open(copied / "train" / "flat" / "3.png").save(copied / "test" / "flat" / "again.jpg", quality=97)
    models = [str(compared.folder / "runs" / name) for name in RUNS[:2]]
    found = mae.study("features", copied, models=models, out=tmp_path / "features")
    (told,) = found.result.warnings
    assert told.startswith("1 of 19 test images have a near copy among the training images") and "again.jpg ~ " in told
    assert told in " ".join(capsys.readouterr().out.split())
    assert "1 of 19 test images have a near copy" in found.report.read_text()


def start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def wait_for_steps(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while not path.exists() or len(path.read_text().splitlines()) < 2:
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_stopped_study_resumes(
    labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "study"
    asked = (
        f"mae study mask_ratio {labelled} --ratios 0.75 0.5 --seeds 1 --model mae_vit_lesson_patch4 --img-size 8 "
        f"--patch-size 2 --batch-size 15 --steps 80 --workers 0 --device cpu --finetune-epochs 0 --mlp-ratio 0.5 "
        f"--decoder-depth 1 --precision fp32 --no-doctor --out {out}"
    ).split()
    process = start(*asked)
    run = out / "runs" / "ratio0.75-seed0"
    wait_for_steps(run / "metrics.jsonl", process)
    os.kill(process.pid, signal.SIGINT)
    said = process.communicate(timeout=120)[0].decode()
    assert (
        process.returncode == 130
        and "rerun the same command" in said
        and "waiting until running jobs are saved" in said
    )
    assert re.search(r"0 of 2 runs done; ratio0\.75-seed0: step \d+/80", said)
    assert list((run / "checkpoints").glob("step-*")) and not (out / "report.html").exists()
    capsys.readouterr()
    run_jobs_here(monkeypatch)
    assert main(asked[1:]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no verdict: one seed" in said and "All metrics" in said and "Report:" in said
    assert (out / "report.html").exists() and (out / "tradeoff.png").exists()
    found = json.loads((out / "result.json").read_text())
    first, second = (run["numbers"] for run in found["runs"])
    assert first["psnr"] == first["psnr_own"] and second["psnr"] != second["psnr_own"]  # the first hides 75 % itself
    baselines = {name for name, _ in found["facts"] if name.startswith("baseline: psnr")}
    assert {"baseline: psnr, mean_colour", "baseline: psnr, mean_colour_own"} <= baselines
    whole = mae.pretrain(
        labelled, model="mae_vit_lesson_patch4", img_size=8, patch_size=2, mlp_ratio=0.5, decoder_depth=1,
        batch_size=15, steps=80, workers=0, device="cpu", precision="fp32", out=tmp_path / "whole", quiet=True,
        recipe="mae",
    )  # fmt: skip
    first, second = mae.load(run).state_dict(), whole.load_model().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_orphaned_run_saves_and_ends(labelled: Path, tmp_path: Path):
    asked = (
        f"mae study mask_ratio {labelled} --ratios 0.75 0.5 --seeds 1 --model mae_vit_lesson_patch4 --img-size 8 "
        f"--patch-size 2 --batch-size 15 --epochs 5000 --workers 0 --device cpu --out {tmp_path / 'study'}"
    )
    process = start(*asked.split())
    run = tmp_path / "study" / "runs" / "ratio0.75-seed0"
    wait_for_steps(run / "metrics.jsonl", process)
    process.kill()
    process.wait()
    wait = time.monotonic() + 60
    while not list((run / "checkpoints").glob("step-*")) and time.monotonic() < wait:
        time.sleep(0.1)
    assert list((run / "checkpoints").glob("step-*"))
