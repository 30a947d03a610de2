"""`mae list models|recipes|weights`, and the kinds of each component: `mae list masks`."""

import shlex
import sys
from typing import Annotated, Literal

import tyro

from mae.core.describe import describe
from mae.core.kinds import ROOMS, kinds
from mae.errors import UsageError
from mae.options import shown


def run(args: list[str]) -> int:
    """Print a line for each model, recipe, file of public weights or kind of component, or what is known of a file."""
    what, name = tyro.cli(_list, args=args, prog="mae list")
    if name is not None and what != "weights":
        shows = {"models": f"mae show {name}", "recipes": f"mae pretrain --recipe {name} --help"}
        more = f"mae show {ROOMS[what]} {name}" if what in ROOMS else shows[what]
        raise UsageError(f"{name} is one name too many; 'mae list {what}' shows all ('{more}' tells more)")
    if what in ROOMS:
        rows, width = [(kind, describe(what, kind).summary) for kind in kinds(what)] or [("none", "")], 16
    elif what != "weights":
        rows, width = _models() if what == "models" else _recipes(), 34
    else:
        rows, width = (_weights(), 25) if name is None else (_known_of(name), 12)
    sys.stdout.writelines(f"{first:<{width}} {text}".rstrip() + "\n" for first, text in rows)
    return 0


def _list(
    what: Annotated[Literal[("models", "recipes", "weights", *ROOMS)], tyro.conf.Positional],  # type: ignore[valid-type]
    name: Annotated[str | None, tyro.conf.Positional, shown("all", "NAME")] = None,
) -> tuple[str, str | None]:
    """List what can be named.

    Args:
        what: models, recipes, public weights, which 'mae import' fetches by name, or the kinds of a model's components.
        name: of public weights, to tell their address, checksum and terms.
    """
    return what, name


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "\n").splitlines()[0]  # python -OO leaves none


def _models() -> list[tuple[str, str]]:
    from mae.models.presets import ALIASES, find_model, list_models

    rows = [(name, _first_line(find_model(name))) for name in list_models()]
    return rows + [(alias, f"short for {name}") for alias, name in ALIASES.items()]


def _recipes() -> list[tuple[str, str]]:
    from mae.recipes import find_recipe, list_recipes

    return [(name, _first_line(find_recipe(name))) for name in list_recipes()]


def _weights() -> list[tuple[str, str]]:
    from mae.interop.imports.catalogue import public_weights, terms

    return [
        (name, f"{weights.contents:<20}{weights.parameters / 1e6:>4.0f} M parameters  {terms(weights.licence)}")
        for name, weights in public_weights().items()
    ]


def _known_of(name: str) -> list[tuple[str, str]]:
    from mae.interop.imports.catalogue import MODELS, find_public, terms
    from mae.interop.imports.public import import_options

    weights = find_public(name)
    if weights is None:
        raise UsageError(f"no public weights are called {name}; 'mae list weights' shows all")
    out = f"--out vit-{weights.size}"
    return [
        ("contents", f"{weights.contents} of {MODELS[weights.size]}"),
        ("parameters", f"{weights.parameters:,}"),
        ("licence", f"{terms(weights.licence)}, by {weights.licence_source}"),
        ("address", weights.url),
        ("bytes", "unknown" if weights.num_bytes is None else f"{weights.num_bytes:,}"),
        (
            "checksum",
            f"{weights.checksum}, by {weights.checksum_source}" if weights.checksum_source else weights.checksum,
        ),
        ("import it", f"mae import {name} {out}"),
        ("as a file", shlex.join(["mae", "import", "FILE", *out.split(), *import_options(weights)])),
    ]
