"""`mae show`: what stands ready of named models is what would be counted; run this file to write it anew."""

import json
import re
from pathlib import Path

import pytest

import mae.models
from mae.cli import main
from mae.cli.show import rows_of, show, stored_rows
from mae.config import RunConfig
from mae.core.kinds import ROOMS
from mae.models.presets import ALIASES, list_models, model_config
from mae.terms import KINDS


def test_every_named_model_is_stored():
    assert list(stored_rows()) == list_models()


@pytest.mark.parametrize("name", list_models())
def test_stored_rows_are_what_is_counted(name: str):
    assert stored_rows()[name] == rows_of(model_config(name)), "run this file to write named_models.json anew"


def test_an_option_is_counted_and_an_alias_is_its_model(capsys: pytest.CaptureFixture[str]):
    alias, name = next(iter(ALIASES.items()))
    shown = []
    for words in ([alias], [name], [alias, "--img-size", "96"], [alias, "--img-size", "224"]):
        assert main(["show", *words]) == 0
        shown.append(capsys.readouterr().out.split("\n", 1)[1])
    assert shown[0] == shown[1] == shown[3] != shown[2]


def test_public_weights_are_no_model_to_show(capsys: pytest.CaptureFixture[str]):
    assert main(["show", "official/base"]) == 2
    assert "'mae list weights official/base'" in capsys.readouterr().err


def test_a_beginning_of_names_is_near_them(capsys: pytest.CaptureFixture[str]):
    assert main(["show", "mae_vit_b"]) == 2
    assert "nearest: mae_vit_base_patch16" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_terms_weight_has_the_default_of_a_run(kind: str, capsys: pytest.CaptureFixture[str]):
    assert main(["show", "term", kind]) == 0
    flag = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("--")).split()
    default = RunConfig().flat()[kind]
    assert flag[:5] == [f"--{kind.replace('_', '-')}", "0", "<=", "WEIGHT", str(default)]


def test_help_names_every_part_that_is_shown():
    assert show.__doc__ is not None
    assert set(ROOMS.values()) <= set(re.findall(r"\w+", show.__doc__))


if __name__ == "__main__":
    rows = {name: dict(rows_of(model_config(name))) for name in list_models()}
    Path(mae.models.__file__).with_name("named_models.json").write_text(json.dumps(rows, indent=1) + "\n")
