import json
from typing import Any

import pytest
from light import little_measuring

from mae.cli import COMMANDS, main
from mae.cli.plan import parse
from mae.errors import UsageError

TINY = (
    "plan builtin:digits --model mae_vit_lesson_patch4 --img-size 8 --patch-size 2 --steps 400 --batch-size 8 "
    "--device cpu --workers 0"
).split()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "plan", ("mae.cli.plan", "tell what a run would take"))
    little_measuring(monkeypatch)


@pytest.mark.digits
def test_the_plan_and_its_command_are_shown(capsys: pytest.CaptureFixture[str]):
    assert main(TINY) == 0
    shown = capsys.readouterr().out
    for part in (
        "1,438 of 8x8 pixels",
        "M trained parameters",  # with --adapter a part of the model's
        "400 steps of 8, 17",
        "images/s",
        "an epoch",
        "GB",
        "1 micro-batch(es) x 8",
        "advice",
    ):
        assert part in shown, part
    assert shown.splitlines()[-1].startswith("mae pretrain builtin:digits --model mae_vit_lesson_patch4")


@pytest.mark.digits
def test_json_is_one_object(capsys: pytest.CaptureFixture[str]):
    assert main([*TINY, "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (plan["images"], plan["steps"], plan["part_size"], plan["device"]) == (1438, 400, 8, "cpu")
    assert plan["peak_bytes"] > 0 and plan["pace"]["limit"] in ("data", "compute")


def test_hours_replace_the_length_of_a_recipe():
    config, given, hours, as_json = parse(["--recipe", "demo", "--hours", "2"])
    assert (config.optim.steps, given, hours, as_json) == (1500, {"recipe"}, 2.0, False)


@pytest.mark.parametrize("length", [["--epochs", "4"], ["--steps=4"]])
def test_hours_and_a_length_are_refused(length: list[str]):
    with pytest.raises(UsageError, match=f"both --hours and {length[0].split('=')[0]} are given"):
        parse(["builtin:digits", "--hours", "1", *length])


@pytest.mark.digits
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["builtin:digits", "--warmup-epochs", "100"], "the whole run has 100 epochs"),
        (["builtin:digits", "--batch-size", "1400"], "one step an epoch"),
        (["builtin:digits", "--epochs", "2"], "expected 300 or more"),
        (["builtin:digits", "--hours", "0"], "--hours is 0"),
        ([], "no images are named"),
    ],
)
def test_nonsense_ends_in_one_line(args: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *args, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mae: error: ") and says in error and "Traceback" not in error
