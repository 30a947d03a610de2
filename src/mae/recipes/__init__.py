"""Named runs as functions: each returns the configuration, its docstring tells command, cost and result."""

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from mae.config import RunConfig
from mae.errors import UsageError

_WHERE = {
    "default": "default",
    "mae": "mae",
    "improved": "improved",
    "fast": "fast",
    "second_stage": "second_stage",
    "eva": "eva",
    "demo": "demo",
    "cifar10": "cifar10",
    "stl10": "stl10",
    "imagenet_base": "imagenet",
    "imagenet_large": "imagenet",
    "imagenet_huge": "imagenet",
}


def list_recipes() -> list[str]:
    """The names of all recipes."""
    return list(_WHERE)


def find_recipe(name: str) -> Callable[[], RunConfig]:
    """The function of a recipe.

    Raises:
        UsageError: no such recipe; the nearest names are given.
    """
    if name not in _WHERE:
        if (run := Path(name, "config.json")).is_file():
            raise UsageError(f"unknown recipe {name!r}; a run's is in its config.json: give {str(run)!r}")
        near = get_close_matches(name, _WHERE, n=3, cutoff=0.4) or list_recipes()
        raise UsageError(f"unknown recipe {name!r}; nearest: {', '.join(near)} ('mae list recipes' shows all)")
    return getattr(import_module(f"mae.recipes.{_WHERE[name]}"), name)


def recipe_config(name: str) -> RunConfig:
    """The configuration a recipe or a run's `config.json` stands for.

    Raises:
        UsageError: no such recipe, or a file that is no configuration.
    """
    if not isinstance(name, str):
        raise UsageError(f"the recipe is {name!r}; expected a name of 'mae list recipes' or the path of a config.json")
    if name.endswith(".json"):
        return RunConfig.read(Path(name)).override({"out": None})  # the same run again needs a folder of its own
    return find_recipe(name)()
