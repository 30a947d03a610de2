"""`mae list models|recipes`."""

import sys
from typing import Annotated, Literal

import tyro


def run(args: list[str]) -> int:
    """Print a line for each model or recipe."""
    what = tyro.cli(_list, args=args, prog="mae list")
    sys.stdout.writelines(f"{name:<34} {text}\n" for name, text in (_models() if what == "models" else _recipes()))
    return 0


def _list(what: Annotated[Literal["models", "recipes"], tyro.conf.Positional]) -> str:
    """List what can be named.

    Args:
        what: models or recipes.
    """
    return what


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "").splitlines()[0]


def _models() -> list[tuple[str, str]]:
    from mae.models.zoo import ALIASES, find_model, list_models

    rows = [(name, _first_line(find_model(name))) for name in list_models()]
    return rows + [(alias, f"short for {name}") for alias, name in ALIASES.items()]


def _recipes() -> list[tuple[str, str]]:
    from mae.recipes import find_recipe, list_recipes

    return [(name, _first_line(find_recipe(name))) for name in list_recipes()]
