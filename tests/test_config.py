import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from mae.config import GROUPS, RunConfig, as_flags, parse_size
from mae.core.describe import help_of
from mae.core.method import MethodConfig
from mae.errors import UsageError
from mae.recipes import list_recipes, recipe_config


@pytest.mark.parametrize(("text", "size"), [("96", (96, 96)), ("96x128", (96, 128)), ("4X8", (4, 8))])
def test_sizes(text: str, size: tuple[int, int]):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1x2x3", "a", "96x", "9.5"])
def test_no_sizes(text: str):
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_round_trips_and_names_itself(name: str):
    config = recipe_config(name)
    assert config.recipe == name
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_tells_its_command_and_cost(name: str):
    from mae.recipes import find_recipe

    documented = find_recipe(name).__doc__ or ""
    assert "Command: `mae" in documented and "Cost: " in documented


def test_the_official_recipe_to_the_letter():
    config = recipe_config("imagenet_base")
    optim, flat = config.optim, config.flat()
    assert (optim.batch_size, optim.base_lr, optim.weight_decay, optim.betas) == (4096, 1.5e-4, 0.05, (0.9, 0.95))
    assert (optim.epochs, optim.warmup_epochs, optim.min_lr, optim.clip_grad) == (800, 40, 0, None)
    assert (flat["mask_ratio"], flat["norm_pix_loss"], config.data.statistics) == (0.75, True, "imagenet")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 1.0, "steps": 1}, "both --epochs and --steps"),
        ({"lr": 1.0, "base_lr": 1.0}, "both --lr and --base-lr"),
        ({"steps": 0}, "--steps is 0; expected greater than 0"),
        ({"batch_size": -1}, "--batch-size is -1"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"warmup_epochs": -1.0}, "--warmup-epochs is -1"),
        ({"max_unreadable": 1.0}, "--max-unreadable is 1.0"),
        ({"monitor_every": 0.0}, "--monitor-every is 0.0; expected greater than 0"),
        ({"epochs": float("inf")}, "--epochs is inf; expected a finite number"),
        ({"seed": 1 << 63}, "--seed is 9223372036854775808"),
        ({"betas": (0.9, 1.0)}, "--betas is"),
        ({"mask_ratio": 1.0}, "mask_ratio is 1.0; expected less than 1"),
        ({"mask_ratio": "half"}, "mask_ratio is 'half'; expected a valid number"),
        ({"target": "pixel"}, "unknown target 'pixel'; did you mean pixels"),
        ({"crop_scale": (1.0, 0.5)}, "--crop-scale is .*; expected the smaller one first"),
    ],
)
def test_contradictions_are_refused(values: dict[str, object], message: str):
    with pytest.raises(UsageError, match=message):
        RunConfig.of(**values)  # type: ignore[arg-type]


def test_overriding_makes_room():
    config = RunConfig.of(epochs=800.0, base_lr=1.5e-4)
    assert config.override({"steps": 10, "lr": 1e-3}) == RunConfig.of(steps=10, lr=1e-3)
    assert config.override({"img_size": 96}).override({"patch_size": [4, 8]}).method == {
        "img_size": 96, "patch_size": (4, 8)
    }  # fmt: skip
    assert config.override({"out": Path("x")}).machine.out == Path("x")
    with pytest.raises(UsageError, match="both --epochs and --steps"):
        config.override({"steps": 10, "epochs": 2})
    with pytest.raises(UsageError, match="unknown option 'epoch'; did you mean epochs"):
        config.override({"epoch": 10})


def test_a_file_that_is_no_configuration(tmp_path: Path):
    path = tmp_path / "config.json"
    for text, told in {
        "{": "cannot be read as JSON",
        "[]": "expected a JSON object",
        '{"optim": {"seed": "x"}}': "option seed is 'x'",
        '{"optim": {"sed": 1}}': "unknown option 'sed'; did you mean seed",
        '{"optim": 1}': "optim is 1; expected an object",
        '{"optin": {}}': "unknown group of options 'optin'; did you mean optim",
        '{"method": {"mask_ratio": 2}}': "mask_ratio is 2; expected less than 1",
        '{"method": {"mask": {"kind": "randm"}}}': "unknown mask 'randm'; did you mean random",
    }.items():
        path.write_text(text)
        with pytest.raises(UsageError, match=f"config.json.*{told}"):
            recipe_config(str(path))
    with pytest.raises(UsageError, match="nowhere.json"):
        recipe_config("nowhere.json")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"a run's is in its config.json: give '.*config.json'"):
        recipe_config(str(tmp_path))
    with pytest.raises(UsageError, match="unknown recipe 'cifar'; nearest: cifar10"):
        recipe_config("cifar")


@pytest.mark.parametrize("group", GROUPS.values())
def test_every_option_has_help(group: type):
    helped = help_of(group)
    assert list(helped) == [field.name for field in fields(group)]
    assert all(text.endswith(".") for text in helped.values())


def test_a_run_whose_model_is_not_decided_has_none():
    with pytest.raises(UsageError, match="describes no whole model"):
        assert RunConfig.of(mask_ratio=0.5).resolved


def test_a_decided_model_comes_back_from_json_with_components_of_every_slot():
    method = MethodConfig().override({"decoder": "cross", "target": "low_pass", "target_cutoff": 0.5, "laplacian": 0.1})
    config = RunConfig.of(source="photos", steps=5).override({"mask_ratio": 0.5})
    config = replace(config, method=method)
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert config.flat()["target_cutoff"] == 0.5 and config.flat()["decoder"] == "cross"


@pytest.mark.parametrize(
    ("name", "value", "typed"),
    [
        ("clip_grad", None, ["--clip-grad", "None"]),
        ("doctor", False, ["--no-doctor"]),
        ("cls_token", False, ["--no-cls-token"]),
        ("img_size", [96, 128], ["--img-size", "96x128"]),
        ("betas", (0.9, 0.95), ["--betas", "0.9", "0.95"]),
        ("epochs", 20.0, ["--epochs", "20"]),
        ("another_commands", True, ["--another-commands"]),
    ],
)
def test_an_option_as_it_is_typed(name: str, value: object, typed: list[str]) -> None:
    assert as_flags(name, value) == typed
