"""The command `mae watch`: its words, its exit codes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mae.cli import COMMANDS, main
from mae.core.method import MethodConfig
from mae.recipes import recipe_config
from mae.training.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has just begun."""
    monkeypatch.setitem(COMMANDS, "watch", ("mae.cli.watch", "show the state of a run, live or over"))
    run = RunFolder(tmp_path / "run")
    run.begin(
        replace(recipe_config("demo"), method=MethodConfig()).to_json(), {"images": 2048, "fingerprint": "f" * 16}
    )
    run.metrics.write_text(json.dumps({"step": 0, "baselines": {"zero": 0.75}}) + "\n")
    return run.root


def test_the_state_and_the_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.html"
    assert main(["watch", str(folder), "--page", str(page), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "live, step 0 of 1,500" in shown and "zero 0.7500" in shown and "page.html" in shown
    assert "run: live" in page.read_text() and "refresh" not in page.read_text()
    assert main(["watch", str(folder)]) == 0  # once: what is captured is no terminal


def test_wrong_words_are_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["watch", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["watch", str(folder), "--page", str(folder / "config.json")]) == 2
    assert "--page" in capsys.readouterr().err
    begun = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**begun, "method": {"mask_ratio": 0.5}}))
    assert main(["watch", str(folder)]) == 2
    assert "config.json describes no whole model under 'method'" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps(begun))
    (folder / "metrics.jsonl").write_text("5\n")
    assert main(["watch", str(folder)]) == 1
    assert "holds what no run writes" in capsys.readouterr().err


def test_help_names_what_can_be_said(folder: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["watch", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("--page", "--every", "--once"))
