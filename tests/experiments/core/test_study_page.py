"""The report of a study: order, tables, plots, and studies that are small, unfinished or broken."""

import json
from dataclasses import replace
from math import nan

import pytest
from fake_study import fake_study, write_losses
from PIL import Image

from mae.errors import MAEError
from mae.experiments.core import page
from mae.experiments.core.page import write_report
from mae.experiments.core.stats import caveat, differences, sentence
from mae.report.html.page import Section


@pytest.fixture
def sections(monkeypatch) -> dict[str, Section]:
    """The page's sections by title, in order; the file is written too."""
    found: dict[str, Section] = {}
    original = page.write_page

    def write(path, **parts):
        found.update({section.title: section for section in parts["sections"]})
        found["facts"] = dict(parts["facts"])
        original(path, **parts)

    monkeypatch.setattr(page, "write_page", write)
    return found


@pytest.fixture
def lines(monkeypatch):
    """The lines of each loss plot."""
    found: list = []
    original = page.draw_lines
    monkeypatch.setattr(page, "draw_lines", lambda drawn, **rest: (found.append(drawn), original(drawn, **rest)))
    return found


def cells(section: Section) -> list[tuple[str, ...]]:
    return [tuple(cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row) for row in section.rows]


def test_order_of_sections(tmp_path, sections):
    Image.new("RGB", (8, 8)).save(tmp_path / "same.png")
    study = fake_study(tmp_path, effects={"original": 0.0, "improved": 0.02})
    written = write_report(
        study, folder=tmp_path / "new", pictures=[Section(title="The same images", pictures=[tmp_path / "same.png"])]
    )
    assert written == tmp_path / "new" / "report.html" and "data:image/png" in written.read_text()
    assert [title for title in sections if title != "facts"] == [
        "Answer", "All metrics", "How to read this", "The same images", "Loss in training", "Time",
        "What each variant changes", "Set-up", "Every run", "Commands",
    ]  # fmt: skip
    assert sections["facts"]["question"] == "Does it help?" and sections["facts"]["runs"] == "6 of 6 runs done"
    found = differences(study)
    said = [
        sentence(metric, found[metric.name, "improved"], variant="improved", reference="original")
        for metric in study.metrics
        if metric.better
    ]
    assert sections["Answer"].text.split("\n• ") == ["improved against original", *said]
    assert sections["How to read this"].text.split("\n\n") == [caveat(study), "A note for readers."]
    assert cells(sections["Set-up"]) == [("data", "12 images"), ("versions", "torch 2")]


def test_table_of_all_metrics(tmp_path, sections):
    def change(variant, seed, numbers):
        numbers |= {"probe": 0.4 + 0.01 * seed + (0.02 + 0.001 * seed if variant == "b" else 0), "loss_50": 0.5}
        numbers["epoch"] = 70.0 - (20 + seed if variant == "b" else 0)
        numbers["psnr"] = 18.0

    study = fake_study(tmp_path, effects={"a": 0.0, "b": 0.1}, change=change)
    write_report(study, folder=tmp_path)
    table = sections["All metrics"]
    assert cells(table) == [
        ("linear probe, top-1, %\nhigher is better", "a", "41.0 ± 1.0", "3", "–", "–", "reference"),
        ("", "b", "43.1 ± 1.1", "3", "+2.1", "+1.9 to +2.3", "better"),
        ("loss at 50 %", "a", "0.500 ± 0.0", "3", "–", "–", "reference"),
        ("", "b", "0.500 ± 0.0", "3", "0.0", "0.0 to 0.0", "identical"),
        ("PSNR, dB\nhigher is better", "a", "18.00 ± 0.00", "3", "–", "–", "reference"),
        ("", "b", "18.00 ± 0.00", "3", "0.00", "0.00 to 0.00", "identical"),
        ("time per epoch, s\nlower is better", "a", "70.0 ± 0.0", "3", "–", "–", "reference"),
        ("", "b", "49.0 ± 1.0", "3", "-21", "-23 to -19", "better"),
    ]
    assert table.marks == {"better": "good", "worse": "bad"}
    assert cells(sections["Time"]) == [
        ("time per epoch, s", "a", "70.0 ± 0.0", "1.00 ± 0.00"), ("", "b", "49.0 ± 1.0", "0.70 ± 0.01"),
    ]  # fmt: skip
    assert cells(sections["Every run"])[3:5] == [
        ("b", "0", "42.0", "0.500", "18.00", "50.0"), ("b", "1", "43.1", "0.500", "18.00", "49.0"),
    ]  # fmt: skip


def test_differing_options_and_commands(tmp_path, sections):
    write_report(fake_study(tmp_path, effects={"a": 0.0, "b": 0.1}, seeds=[3]), folder=tmp_path)
    changes = sections["What each variant changes"]
    assert (changes.header, changes.rows) == (("option", "a", "b"), [("width", "6", "8")])
    assert changes.text == "a: a in words\n\nb: b in words"
    assert sections["Commands"].commands == [
        "# a, seed 3", "mae pretrain --out a-3 --seed 3", "mae evaluate a-3",
        "", "# b, seed 3", "mae pretrain --out b-3 --seed 3", "mae evaluate b-3",
    ]  # fmt: skip


def test_many_comparisons_are_answered_in_short(tmp_path, sections):
    effects = {"a": 0.0, "b": 0.02, "c": -0.02, "d": 0.03, "e": 0.0, "f": 0.0}
    write_report(fake_study(tmp_path, effects=effects), folder=tmp_path)
    parts = sections["Answer"].text.split("\n\n")
    assert [part.split("\n")[0] for part in parts] == [f"{variant} against a" for variant in "bcdef"]
    assert parts[0].split("\n")[1].startswith("• better: linear probe, top-1 (+2.0 points)")
    assert parts[1].split("\n")[1].startswith("• worse: linear probe, top-1 (-2.0 points)")
    assert all(part.count("PSNR") == part.count("time per epoch") == 1 for part in parts)


def test_unfinished_study(tmp_path, sections):
    left_out = [("b", 1), ("b", 2), ("a", 2)]
    study = fake_study(tmp_path, effects={"a": 0.0, "b": 0.02}, left_out=left_out)
    write_report(study, folder=tmp_path)
    assert sections["facts"]["runs"] == "3 of 6 runs done: the study is not finished"
    assert sections["Answer"].text.startswith("3 of 6 runs done")
    assert "no verdict: one seed" in sections["Answer"].text
    assert len(sections["Every run"].rows) == 3


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_smallest_studies(tmp_path, sections, seeds):
    effects = {"a": 0.0, "b": 0.02}
    nothing = fake_study(tmp_path, effects=effects, seeds=seeds, left_out=[(a, s) for a in effects for s in seeds])
    write_report(nothing, folder=tmp_path / "nothing")
    assert "Loss in training" not in sections and "Commands" not in sections
    assert not (tmp_path / "nothing" / "losses.png").exists()
    write_report(fake_study(tmp_path, effects=effects, seeds=seeds), folder=tmp_path / "seeds")
    assert ("no verdict: one seed" in sections["Answer"].text) == (len(seeds) == 1)
    write_report(fake_study(tmp_path, effects={"a": 0.0}, seeds=seeds), folder=tmp_path / "variant")
    assert sections["Answer"].text == "One variant: nothing is compared."


def test_missing_and_nonfinite_numbers(tmp_path, sections):
    def change(variant, seed, numbers):
        if variant == "b":
            del numbers["probe"]
        if (variant, seed) == ("a", 1):
            numbers["epoch"] = nan

    study = fake_study(tmp_path, effects={"a": 0.0, "b": 0.1}, change=change)
    write_report(study, folder=tmp_path)
    assert cells(sections["All metrics"])[1] == (
        "", "b", "–", "0", "–", "–", "no verdict: no seed in common",
    )  # fmt: skip
    assert "Not finite and left out: time per epoch of a, seed 1." in sections["How to read this"].text
    assert cells(sections["All metrics"])[6][3] == "2"
    assert cells(sections["Every run"])[3][2] == "–" and cells(sections["Every run"])[1][5] == "nan"
    kept = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert kept["runs"][1]["numbers"]["epoch"] is None


def test_json_matches_the_page(tmp_path):
    study = fake_study(tmp_path, effects={"a": 0.0, "b": 0.02})
    write_report(study, folder=tmp_path)
    kept = json.loads((tmp_path / "result.json").read_text())
    assert [run["numbers"] for run in kept["runs"]] == [dict(run.numbers) for run in study.runs]
    found = differences(study)["probe", "b"]
    [entry] = [entry for entry in kept["differences"] if (entry["metric"], entry["variant"]) == ("probe", "b")]
    assert (entry["mean"], entry["low"], entry["high"]) == (found.mean, found.low, found.high)
    assert (entry["pairs"], entry["verdict"]) == (3, "better") and "better by 2.0 points" in entry["sentence"]
    assert len(kept["means"]) == 8 and kept["means"][0]["count"] == 3 and kept["caveat"] == caveat(study)


def test_loss_curve_is_the_mean_reconstruction_term(tmp_path, lines):
    study = fake_study(tmp_path, effects={"a": 0.0, "b": 0.1})
    # Logged at other places, and no further than 300.
    write_losses(study.runs[1].folder, level=0.6, samples=(50, 100, 300))
    (study.runs[4].folder / "metrics.jsonl").unlink()
    write_report(study, folder=tmp_path)
    [[first, second]] = lines
    assert (first.label, second.label) == ("a", "b")
    assert first.x == [100, 200, 300] and second.x == [100, 200, 300, 400]
    # At 200 the second seed lies between its values at 100 and 300.
    values = [0.5 + 0.5, (0.6 + 1 + 0.6 + 1 / 3) / 2, 0.7 + 0.5]
    mean = sum(values) / 3
    std = (sum((value - mean) ** 2 for value in values) / 2) ** 0.5
    assert first.y[1] == pytest.approx(mean)
    assert (first.band[0][1], first.band[1][1]) == pytest.approx((mean - std, mean + std))
    assert second.y[0] == pytest.approx((1.5 + 1.7) / 2)


def test_tradeoff_plot(tmp_path, sections, monkeypatch):
    drawn: list = []
    original = page.draw_tradeoff
    monkeypatch.setattr(page, "draw_tradeoff", lambda panels, **rest: (drawn.append(panels), original(panels, **rest)))
    xs = {"a": 0.75, "b": 0.5, "c": 0.9}
    study = fake_study(tmp_path, effects={"a": 0.0, "b": 0.1, "c": 0.1}, xs=xs, left_out=[("b", 1)])
    write_report(study, folder=tmp_path)
    [[shares, decibels, seconds]] = drawn
    assert [line.label for panel in drawn[0] for line in panel.series] == [
        "linear probe, top-1", "PSNR", "time per epoch",
    ]  # fmt: skip
    points = shares.series[0].points
    assert list(points) == [0.75, 0.5, 0.9]
    assert points[0.5] == pytest.approx([100 * study.values("probe", "b")[seed] for seed in (0, 2)])
    assert (shares.show(44.46), decibels.show(18.123), seconds.show(70.04)) == ("44.5 %", "18.12 dB", "70.0 s")
    assert (shares.from_zero, seconds.from_zero) == (False, True)
    assert sections["Quality and speed over mask ratio"].pictures == [tmp_path / "tradeoff.png"]


def test_no_tradeoff_plot_without_x(tmp_path, sections):
    write_report(fake_study(tmp_path, effects={"a": 0.0, "b": 0.1}), folder=tmp_path)
    assert not (tmp_path / "tradeoff.png").exists() and not any("Quality" in title for title in sections)


def test_missing_picture_is_named(tmp_path):
    study = fake_study(tmp_path, effects={"a": 0.0, "b": 0.1})
    with pytest.raises(MAEError, match="gone.png"):
        write_report(study, folder=tmp_path / "out", pictures=[Section(title="s", pictures=[tmp_path / "gone.png"])])
    assert not (tmp_path / "out" / "report.html").exists()


def test_warnings_on_page_and_in_json(tmp_path, sections):
    study = replace(fake_study(tmp_path, effects={"original": 0.0, "improved": 0.02}), warnings=("Too good.",))
    write_report(study, folder=tmp_path / "new")
    assert sections["How to read this"].text.startswith("Too good.\n\n")
    assert json.loads((tmp_path / "new" / "result.json").read_text())["warnings"] == ["Too good."]
