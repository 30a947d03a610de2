"""Checkpoints evaluated: what each had cost, and how soon one recipe is as good as another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs_here import run_jobs_here
from tiny_study import TINY

from mae.errors import MAEError, UsageError
from mae.experiments.core.checkpoint_eval import checkpoint_interval, costs_up_to, evaluate_checkpoints
from mae.experiments.core.job import read_job
from mae.experiments.core.metrics import KNN, LINEAR_PROBE
from mae.experiments.core.results import CheckpointMetrics, RunResult, StudyResult, Variant
from mae.experiments.core.trajectories import cost_to_reach, sections, trajectory
from mae.experiments.run import StudyOutcome, study
from mae.experiments.studies.quality import Quality, _names
from mae.models.summary import summarise
from mae.pretraining.run import load
from mae.records import read_json
from mae.training.log import loss_rows, read_rows
from mae.training.run_folder import RunFolder

pytestmark = pytest.mark.slow
LENGTHS: dict[str, Any] = {**TINY, "epochs": 2.0, "mask_warmup": 1.0, "finetune_epochs": 0.0}


@pytest.fixture(scope="module")
def evaluated(labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> StudyOutcome:
    with pytest.MonkeyPatch.context() as patch:
        run_jobs_here(patch)
        out = tmp_path_factory.mktemp("quality") / "study"
        return study("quality", labelled, out=out, recipes=["mae", "improved"], checkpoints=3, seeds=1, **LENGTHS)


def test_checkpoints_of_each_run_are_evaluated(evaluated: StudyOutcome):
    for run in evaluated.result.runs:
        total = read_json(RunFolder(run.folder).summary)["steps"]
        assert [each.step for each in run.checkpoints] == [3, 6, 8] and total == 8
        last = run.checkpoints[-1]
        assert last.numbers == {name: run.numbers[name] for name in ("knn", "linear_probe")}  # the same model, again
        assert not list(run.folder.glob("features-*"))  # features of checkpoints are not kept


def test_costs_of_checkpoints(evaluated: StudyOutcome):
    plain, improved = evaluated.result.runs
    config = load(plain.folder).config
    assert config is not None
    an_image = summarise(config).step_flops
    rows = loss_rows(read_rows(plain.folder / "metrics.jsonl"))
    for each in plain.checkpoints:
        assert each.samples == each.step * 15 and each.operations == each.samples * an_image
        assert each.seconds == pytest.approx(
            sum(15 / row["images_per_second"] for row in rows if row["step"] <= each.step)
        )
    # The curriculum hides less at first, which costs more; after its end a step costs what it does without.
    assert improved.checkpoints[0].operations > plain.checkpoints[0].operations
    first, second, third = (each.operations for each in improved.checkpoints)
    assert third - second == pytest.approx(2 * 15 * an_image, rel=0.02) and first > second - first


def test_report_shows_the_trajectories(evaluated: StudyOutcome):
    assert evaluated.report is not None
    page = evaluated.report.read_text()
    assert "Over training: linear probe, top-1" in page and "Over training: k-NN, top-1" in page
    for name in ("linear_probe-time", "linear_probe-arithmetic", "knn-time", "knn-arithmetic"):
        assert (evaluated.folder / f"{name}.png").stat().st_size > 1000
    found = read_json(evaluated.folder / "result.json")
    assert [each["step"] for each in found["runs"][0]["checkpoints"]] == [3, 6, 8]


def test_evaluated_checkpoints_are_not_evaluated_again(evaluated: StudyOutcome):
    run = evaluated.result.runs[0]
    asked: list[str] = []

    def evaluate(checkpoint: str) -> dict[str, float]:
        asked.append(Path(checkpoint).name)
        return {"knn": 0.5}

    kept: list[int] = []
    done = [{"step": 3}, {"step": 6}]
    found = evaluate_checkpoints(
        RunFolder(run.folder), every=3, done=done, evaluate=evaluate, keep=lambda all: kept.append(len(all))
    )
    assert asked == ["step-00000008"] and kept == [3] and found[:2] == done
    with pytest.raises(MAEError, match="lacks the checkpoint of step 2"):
        evaluate_checkpoints(RunFolder(run.folder), every=2, done=(), evaluate=evaluate, keep=lambda all: None)


def test_checkpoint_interval(evaluated: StudyOutcome):
    job = read_job(evaluated.folder / "jobs" / "mae-seed0.json")
    assert job.checkpoints == 3 and checkpoint_interval(job.total_steps, 3) == 3 and checkpoint_interval(2, 3) == 1


def test_cost_to_reach_a_goal():
    assert cost_to_reach(0.5, [10, 20, 30], [0.3, 0.4, 0.6]) == 25
    assert cost_to_reach(0.2, [10, 20], [0.3, 0.4]) == 10  # nothing is known before the first checkpoint
    assert cost_to_reach(0.5, [10, 20, 30], [0.3, 0.5, 0.45]) == 20
    assert cost_to_reach(0.7, [10, 20], [0.3, 0.4]) is None


def result_of(values: dict[str, list[list[float]]]) -> StudyResult:
    """By variant a list of accuracies per seed; checkpoints are a minute and a petaflop apart."""
    runs = [
        RunResult(
            variant=variant, seed=seed, folder=Path("nowhere"), numbers={}, commands=(),
            checkpoints=tuple(
                CheckpointMetrics(step=n, samples=n, seconds=60.0 * n, operations=1e15 * n,
                     numbers={"knn": value, "linear_probe": value})
                for n, value in enumerate(each, 1)
            ),
        )
        for variant, seeds in values.items()
        for seed, each in enumerate(seeds)
    ]  # fmt: skip
    variants = tuple(Variant(name=name, what="", options={}) for name in values)
    return StudyResult(
        name="quality", question="?", reference=variants[0].name, variants=variants, seeds=(0, 1), 
        metrics=(LINEAR_PROBE, KNN),
        runs=tuple(runs), facts=(), notes=(),
    )  # fmt: skip


def test_speed_ups(tmp_path: Path):
    result = result_of({
        "slow": [[0.1, 0.2, 0.3], [0.1, 0.2, 0.5]], "quick": [[0.3, 0.5, 0.6], [0.3, 0.5, 0.6]],
        "dull": [[0.1, 0.1, 0.1], [0.1, 0.1, 0.3]],
    })  # fmt: skip
    found = trajectory("slow", result.runs_of("slow"), "knn")
    assert found is not None and found.mean == pytest.approx([0.1, 0.2, 0.4])
    assert found.std[-1] == pytest.approx(0.1414, abs=1e-4) and found.seconds == [60, 120, 180]
    probe, knn = sections(result, tmp_path)
    assert "quick reaches 40.0 %, which slow has after 3 min 00 s, in 1 min 30 s: 50% of the time" in probe.text
    assert "dull does not reach 40.0 %" in probe.text and "it ends at 20.0" in probe.text
    assert probe.rows[2] == ("", "3.0", "3", "40.0 ± 14.1", "2")
    assert knn.title == "Over training: k-NN, top-1" and len(knn.pictures) == 2


def test_no_sections_without_checkpoints(tmp_path: Path):
    result = result_of({"slow": [[0.1]], "quick": [[0.3]]})
    bare = replace(result, runs=tuple(replace(run, checkpoints=()) for run in result.runs))
    assert sections(bare, tmp_path) == []


def test_short_names_of_files(tmp_path: Path):
    run = tmp_path / "long" / "config.json"
    assert _names(["default", "mine/other.json", str(run)]) == ["default", "other", "long"]
    assert _names(["a/mine.json", "b/mine.json"]) == ["a/mine.json", "b/mine.json"]


def test_wrong_options_are_refused():
    for options, says in (
        ({"recipes": ("default",)}, "expected two different"),
        ({"checkpoints": 0}, "expected 1 or more"),
    ):
        with pytest.raises(UsageError, match=says):
            Quality(**options)  # type: ignore[arg-type]


def test_costs_stop_at_the_step(evaluated: StudyOutcome):
    folder = RunFolder(evaluated.result.runs[0].folder)
    costs = costs_up_to(folder, [3, 8])
    assert costs[3]["seconds"] < costs[8]["seconds"]


def test_other_checkpoints_are_another_study(labelled: Path, evaluated: StudyOutcome, monkeypatch: pytest.MonkeyPatch):
    run_jobs_here(monkeypatch)
    with pytest.raises(UsageError, match="differs: checkpoints was 3, is now 2"):
        study(
            "quality",
            labelled,
            out=evaluated.folder,
            recipes=["mae", "improved"],
            checkpoints=2,
            seeds=1,
            **LENGTHS,
        )
