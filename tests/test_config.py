import json
from dataclasses import fields
from pathlib import Path

import pytest

from mae.config import PretrainConfig, as_flags, parse_size
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
    assert PretrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_tells_its_command_and_cost(name: str):
    from mae.recipes import find_recipe

    documented = find_recipe(name).__doc__ or ""
    assert name == "default" or ("Command: `mae" in documented and "Cost: " in documented)


def test_the_official_recipe_to_the_letter():
    config = recipe_config("imagenet_base")
    assert (config.batch_size, config.base_lr, config.weight_decay, config.betas) == (4096, 1.5e-4, 0.05, (0.9, 0.95))
    assert (config.epochs, config.warmup_epochs, config.min_lr, config.clip_grad) == (800, 40, 0, None)
    assert (config.mask_ratio, config.norm_pix_loss, config.statistics) == (0.75, True, "imagenet")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 1.0, "steps": 1}, "both --epochs and --steps"),
        ({"lr": 1.0, "base_lr": 1.0}, "both --lr and --base-lr"),
        ({"steps": 0}, "--steps is 0; expected a finite number above 0"),
        ({"batch_size": -1}, "--batch-size is -1"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"warmup_epochs": -1.0}, "--warmup-epochs is -1"),
        ({"max_unreadable": 1.0}, "--max-unreadable is 1.0"),
        ({"monitor_every": 0.0}, "--monitor-every is 0.0; expected a finite number above 0"),
        ({"epochs": float("inf")}, "--epochs is inf; expected a finite number"),
        ({"seed": 1 << 63}, "--seed is 9223372036854775808"),
        ({"betas": (0.9, 1.0)}, "--betas is"),
        ({"mask_ratio": 1.0}, "mask.ratio is 1.0; expected a share between 0 and 1"),
        ({"mask_ratio": 0.0}, "mask.ratio is 0.0"),
    ],
)
def test_contradictions_are_refused(values: dict[str, object], message: str):
    with pytest.raises(UsageError, match=message):
        PretrainConfig(**values)  # type: ignore[arg-type]


def test_overriding_makes_room():
    config = PretrainConfig(epochs=800.0, base_lr=1.5e-4)
    assert config.override({"steps": 10, "lr": 1e-3}) == PretrainConfig(steps=10, lr=1e-3)
    assert config.override({"img_size": 96, "patch_size": (4, 8)}).img_size == (96, 96)
    assert config.override({"out": Path("x")}).out == Path("x")
    with pytest.raises(UsageError, match="both --epochs and --steps"):
        config.override({"steps": 10, "epochs": 2})
    with pytest.raises(UsageError, match="unknown option 'epoch'; did you mean epochs"):
        config.override({"epoch": 10})


def test_a_file_that_is_no_configuration(tmp_path: Path):
    path = tmp_path / "config.json"
    for text in ("{", "[]", '{"seed": "x"}', '{"sed": 1}'):
        path.write_text(text)
        with pytest.raises(UsageError, match="config.json|seed"):
            recipe_config(str(path))
    with pytest.raises(UsageError, match="nowhere.json"):
        recipe_config("nowhere.json")
    with pytest.raises(UsageError, match="unknown recipe 'cifar'; nearest: cifar10"):
        recipe_config("cifar")


def test_every_option_has_help():
    source = Path(__import__("mae.config", fromlist=["x"]).__file__).read_text()
    for field in fields(PretrainConfig):
        after = source.split(f"    {field.name}: ", 1)[1].split("\n", 1)[1]
        assert after.lstrip().startswith('"""'), field.name


@pytest.mark.parametrize(
    ("name", "value", "typed"),
    [
        ("clip_grad", None, ["--clip-grad", "None"]),
        ("compile", False, ["--no-compile"]),
        ("cls_token", False, ["--cls-token", "False"]),
        ("img_size", [96, 128], ["--img-size", "96x128"]),
        ("betas", (0.9, 0.95), ["--betas", "0.9", "0.95"]),
        ("epochs", 20.0, ["--epochs", "20"]),
        ("another_commands", True, ["--another-commands"]),
    ],
)
def test_an_option_as_it_is_typed(name: str, value: object, typed: list[str]) -> None:
    assert as_flags(name, value) == typed
