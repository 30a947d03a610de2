"""Runs judged on their way: what each look had cost, and how soon one recipe is as good as another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs_here import run_jobs_here
from tiny_study import TINY

from mae.errors import MAEError, UsageError
from mae.experiments.course import cost_to_reach, course_of, sections
from mae.experiments.job import read_job
from mae.experiments.looks import Look, costs_until, look_through, steps_between
from mae.experiments.plan import KNN, LINEAR_PROBE
from mae.experiments.quality import Quality, _names
from mae.experiments.results import Arm, RunResult, StudyResult
from mae.experiments.run import StudyOutcome, study
from mae.models.summary import summarise
from mae.pretraining.run import load
from mae.records import read_json
from mae.training.log import loss_rows, read_rows
from mae.training.run_folder import RunFolder

pytestmark = pytest.mark.slow
LENGTHS: dict[str, Any] = {**TINY, "epochs": 2.0, "mask_warmup": 1.0, "finetune_epochs": 0.0}


@pytest.fixture(scope="module")
def judged(labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> StudyOutcome:
    with pytest.MonkeyPatch.context() as patch:
        run_jobs_here(patch)
        out = tmp_path_factory.mktemp("quality") / "study"
        return study("quality", labelled, out=out, recipes=["default", "improved"], looks=3, seeds=1, **LENGTHS)


def test_each_run_is_judged_at_as_many_places_and_at_its_end(judged: StudyOutcome):
    for run in judged.result.runs:
        total = read_json(RunFolder(run.folder).summary)["steps"]
        assert [look.step for look in run.looks] == [3, 6, 8] and total == 8
        last = run.looks[-1]
        assert last.numbers == {name: run.numbers[name] for name in ("knn", "linear_probe")}  # the same model, again
        assert not list(run.folder.glob("looks-*"))  # features of what is looked at once are not kept


def test_costs_of_a_look_are_those_of_the_steps_before_it(judged: StudyOutcome):
    plain, improved = judged.result.runs
    config = load(plain.folder).config
    assert config is not None
    an_image = summarise(config).step_flops
    rows = loss_rows(read_rows(plain.folder / "metrics.jsonl"))
    for look in plain.looks:
        assert look.samples == look.step * 15 and look.operations == look.samples * an_image
        assert look.seconds == pytest.approx(
            sum(15 / row["images_per_second"] for row in rows if row["step"] <= look.step)
        )
    # The curriculum hides less at first, which costs more; after its end a step costs what it does without.
    assert improved.looks[0].operations > plain.looks[0].operations
    first, second, third = (look.operations for look in improved.looks)
    assert third - second == pytest.approx(2 * 15 * an_image, rel=0.02) and first > second - first


def test_the_report_shows_the_way(judged: StudyOutcome):
    assert judged.report is not None
    page = judged.report.read_text()
    assert "On the way: linear probe, top-1" in page and "On the way: k-NN, top-1" in page
    for name in ("linear_probe-time", "linear_probe-arithmetic", "knn-time", "knn-arithmetic"):
        assert (judged.folder / f"{name}.png").stat().st_size > 1000
    found = read_json(judged.folder / "result.json")
    assert [look["step"] for look in found["runs"][0]["looks"]] == [3, 6, 8]


def test_looks_that_were_taken_are_not_taken_again(judged: StudyOutcome):
    run = judged.result.runs[0]
    asked: list[str] = []

    def judge(checkpoint: str) -> dict[str, float]:
        asked.append(Path(checkpoint).name)
        return {"knn": 0.5}

    kept: list[int] = []
    done = [{"step": 3}, {"step": 6}]
    found = look_through(RunFolder(run.folder), every=3, done=done, judge=judge, keep=lambda all: kept.append(len(all)))
    assert asked == ["step-00000008"] and kept == [3] and found[:2] == done
    with pytest.raises(MAEError, match="lacks step 2"):
        look_through(RunFolder(run.folder), every=2, done=(), judge=judge, keep=lambda all: None)


def test_jobs_hold_their_looks(judged: StudyOutcome):
    job = read_job(judged.folder / "jobs" / "default-seed0.json")
    assert job.looks == 3 and steps_between(job.total_steps, 3) == 3 and steps_between(2, 3) == 1


def test_cost_to_reach_a_goal():
    assert cost_to_reach(0.5, [10, 20, 30], [0.3, 0.4, 0.6]) == 25
    assert cost_to_reach(0.2, [10, 20], [0.3, 0.4]) == 10  # before the first look nothing is known
    assert cost_to_reach(0.5, [10, 20, 30], [0.3, 0.5, 0.45]) == 20
    assert cost_to_reach(0.7, [10, 20], [0.3, 0.4]) is None


def result_of(values: dict[str, list[list[float]]]) -> StudyResult:
    """Of arms by name, a list of accuracies a seed; each look is a minute and a petaflop."""
    runs = [
        RunResult(
            arm=arm, seed=seed, folder=Path("nowhere"), numbers={}, commands=(),
            looks=tuple(
                Look(step=n, samples=n, seconds=60.0 * n, operations=1e15 * n,
                     numbers={"knn": value, "linear_probe": value})
                for n, value in enumerate(each, 1)
            ),
        )
        for arm, seeds in values.items()
        for seed, each in enumerate(seeds)
    ]  # fmt: skip
    arms = tuple(Arm(name=name, what="", options={}) for name in values)
    return StudyResult(
        name="quality", question="?", reference=arms[0].name, arms=arms, seeds=(0, 1), metrics=(LINEAR_PROBE, KNN),
        runs=tuple(runs), facts=(), notes=(),
    )  # fmt: skip


def test_how_soon_is_told_in_words(tmp_path: Path):
    result = result_of({
        "slow": [[0.1, 0.2, 0.3], [0.1, 0.2, 0.5]], "quick": [[0.3, 0.5, 0.6], [0.3, 0.5, 0.6]],
        "dull": [[0.1, 0.1, 0.1], [0.1, 0.1, 0.3]],
    })  # fmt: skip
    course = course_of("slow", result.runs_of("slow"), "knn")
    assert course is not None and course.mean == pytest.approx([0.1, 0.2, 0.4])
    assert course.deviation[-1] == pytest.approx(0.1414, abs=1e-4) and course.seconds == [60, 120, 180]
    probe, knn = sections(result, tmp_path)
    assert "quick reaches 40.0 %, which slow has after 3 min 00 s, in 1 min 30 s: 50% of the time" in probe.text
    assert "dull does not reach 40.0 %" in probe.text and "it ends at 20.0" in probe.text
    assert probe.rows[2] == ("", "3.0", "3", "40.0 ± 14.1", "2")
    assert knn.title == "On the way: k-NN, top-1" and len(knn.pictures) == 2


def test_runs_that_were_not_looked_at_show_nothing(tmp_path: Path):
    result = result_of({"slow": [[0.1]], "quick": [[0.3]]})
    bare = replace(result, runs=tuple(replace(run, looks=()) for run in result.runs))
    assert sections(bare, tmp_path) == []


def test_files_are_told_by_their_own_names(tmp_path: Path):
    run = tmp_path / "long" / "config.json"
    assert _names(["default", "mine/other.json", str(run)]) == ["default", "other", "long"]
    assert _names(["a/mine.json", "b/mine.json"]) == ["a/mine.json", "b/mine.json"]


def test_what_cannot_be_is_refused():
    for options, says in (({"recipes": ("default",)}, "expected two different"), ({"looks": 0}, "expected 1 or more")):
        with pytest.raises(UsageError, match=says):
            Quality(**options)  # type: ignore[arg-type]


def test_costs_are_read_up_to_a_step_alone(judged: StudyOutcome):
    folder = RunFolder(judged.result.runs[0].folder)
    costs = costs_until(folder, [3, 8])
    assert costs[3]["seconds"] < costs[8]["seconds"]


def test_a_study_with_other_looks_is_another_study(
    labelled: Path, judged: StudyOutcome, monkeypatch: pytest.MonkeyPatch
):
    run_jobs_here(monkeypatch)
    with pytest.raises(UsageError, match="differs: looks was 3, is now 2"):
        study("quality", labelled, out=judged.folder, recipes=["default", "improved"], looks=2, seeds=1, **LENGTHS)
