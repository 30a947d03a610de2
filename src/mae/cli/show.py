"""`mae show MODEL`, and the options of a component: `mae show mask block`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from annotated_types import Ge, Gt, Le, Lt

from mae.cli.run_options import metavar_of
from mae.config import Size, as_flag, as_flags
from mae.core.describe import Option, describe
from mae.core.kinds import ROOMS, room_of
from mae.errors import UsageError
from mae.options import shown

if TYPE_CHECKING:
    from mae.core.method import MethodConfig


def run(args: list[str]) -> int:
    """Print sizes, parameters and arithmetic of a model, or what a kind of component is and its options."""
    return tyro.cli(show, args=args, prog="mae show")


def show(
    model: Annotated[str, tyro.conf.Positional],
    kind: Annotated[str | None, tyro.conf.Positional, shown("none: a model is shown", "KIND")] = None,
    img_size: Annotated[Size | None, shown("the model's", "SIDE|HxW")] = None,
    patch_size: Annotated[Size | None, shown("the model's", "SIDE|HxW")] = None,
    in_chans: Annotated[int | None, shown("the model's", "N")] = None,
) -> int:
    """Tell a model's sizes, parameters and arithmetic, or the options of a component, as in 'mae show mask random'.

    Args:
        model: a name of 'mae list models', a run folder, a checkpoint or a .safetensors file; or, before a kind, mask,
            target, loss, term, decoder, encoder, teacher, adapter or tokenizer.
        kind: of the component, a name of 'mae list masks', 'mae list targets' and so on.
        img_size: height and width of the images, for a named model.
        patch_size: height and width of a patch, for a named model.
        in_chans: channels of the images, for a named model.
    """
    given = {"img_size": img_size, "patch_size": patch_size, "in_chans": in_chans}
    options = {name: value for name, value in given.items() if value is not None}
    if kind is None and model not in ROOMS.values():
        return _show_model(model, options)
    if model not in ROOMS.values():
        raise UsageError(f"unknown component {model!r}; expected one of {', '.join(ROOMS.values())} before a kind")
    if kind is None:
        raise UsageError(f"no kind of {model} is named; give one of 'mae list {room_of(model)}'")
    if options:
        raise UsageError(f"{as_flag(next(iter(options)))} is for a model, and a {model} is shown; leave it out")
    return _show_component(model, kind)


def _show_component(slot: str, kind: str) -> int:
    """What the dataclass of a kind says; without PyTorch."""
    found = describe(room_of(slot), kind)

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("option", "values", "default"):
        table.add_column(title, no_wrap=True)
    table.add_column()
    for option in found.options:
        if not option.is_measured:
            table.add_row(as_flag(option.flat), values_of(option), _default(option), option.help)
    console = Console(markup=False, highlight=False)
    console.print(f"{slot} {kind}: {found.summary}", soft_wrap=True)
    console.print(table if table.row_count else "It has no options.")
    return 0


def values_of(option: Option) -> str:
    """Which values an option takes, such as `0 < FRACTION < 1` or `{a,b}`."""
    text = metavar_of(option.type) or "VALUE"
    for mark in getattr(option.type, "__metadata__", ()):
        match mark:
            case Gt(gt=bound):
                text = f"{bound} < {text}"
            case Ge(ge=bound):
                text = f"{bound} <= {text}"
            case Lt(lt=bound):
                text = f"{text} < {bound}"
            case Le(le=bound):
                text = f"{text} <= {bound}"
    return text


def _default(option: Option) -> str:
    if option.name == "weight":  # a run has no term that nobody asked for; the dataclass's own holds in Python
        return "0.0"
    if option.default is MISSING:
        return "needed"
    if option.default is None or isinstance(option.default, bool):
        return str(option.default)
    return " ".join(as_flags(option.flat, option.default)[1:])


def _show_model(model: str, options: Mapping[str, Any]) -> int:
    from rich.console import Console

    from mae.interop.imports.catalogue import find_public
    from mae.models.presets import ALIASES, find_model
    from mae.report.terminal.console import show_table
    from mae.training.run_folder import check_local

    if Path(model).exists():
        return _show_trained(model, options)
    check_local(Path(model))
    if model not in ALIASES and find_public(model) is not None:
        raise UsageError(f"{model} are public weights; 'mae list weights {model}' tells of them, 'mae import' fetches")
    find_model(model)
    if options:
        from mae.models.presets import model_config

        rows = rows_of(model_config(model, **options))
    else:
        rows = stored_rows()[ALIASES.get(model, model)]
    show_table(Console(), model, rows)
    return 0


def stored_rows() -> dict[str, list[tuple[str, str]]]:
    """What `rows_of` says of each named model, computed once for all: counting takes PyTorch and seconds."""
    stored = json.loads(files("mae.models").joinpath("named_models.json").read_text(encoding="utf-8"))
    return {name: [(row, value) for row, value in rows.items()] for name, rows in stored.items()}


def _show_trained(model: str, options: Mapping[str, Any]) -> int:
    from rich.console import Console

    from mae.evaluation.extractors.extractor import show_loaded
    from mae.interop.imports.open import open_model
    from mae.models.masked_autoencoder import MaskedAutoencoder
    from mae.report.terminal.console import show_table

    console = Console()
    if options:
        raise UsageError(f"{model} is a trained model; its {', '.join(options)} cannot be chosen")
    loaded, report = open_model(Path(model))
    if report.notes:  # of weights that others wrote, and of what was guessed about them
        show_loaded(console, report.line())
    assert loaded.config is not None  # a loaded model has the configuration it was loaded by
    rows = rows_of(loaded.config, has_decoder=isinstance(loaded, MaskedAutoencoder))
    show_table(console, model, [*rows, *_of_origin(report.origin)])
    return 0


def rows_of(config: "MethodConfig", *, has_decoder: bool = True) -> list[tuple[str, str]]:
    """What is shown of a model: its components with their options, parameters and arithmetic."""
    from mae.models.summary import summarise

    summary = summarise(config)
    return [
        *_of_method(config, without=() if has_decoder else ("decoder",)),
        ("grid", "x".join(map(str, config.layout.grid))),
        ("encoder weights", f"{summary.encoder_params:,} parameters, {summary.encoder_flops / 1e9:.3g} GFLOP an image"),
        *(_of_training(summary) if has_decoder else [("decoder", "none")]),
        ("encode", f"{summary.encode_flops / 1e9:.3g} GFLOP an image, nothing hidden"),
    ]


def _of_method(config: "MethodConfig", *, without: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The kind of each component and its options; a name that several have in common once."""
    flat = config.flat()
    rows = {}
    for slot, component in config.components():
        if slot not in without:
            rows[slot if slot != "term" else component.kind] = component.kind
            rows |= {option.flat: str(flat[option.flat]) for option in describe(room_of(slot), component.kind).options}
    yield from rows.items()


def _of_training(summary: Any) -> list[tuple[str, str]]:
    return [
        ("decoder weights", f"{summary.decoder_params:,} parameters, {summary.decoder_flops / 1e9:.3g} GFLOP an image"),
        *([("weights of terms", f"{summary.term_params:,} parameters")] if summary.term_params else []),
        ("training step", f"{summary.step_flops / 1e9:.3g} GFLOP an image, forward and backward"),
    ]


def _of_origin(origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    from mae.interop.imports.catalogue import terms

    licence = origin.get("licence")
    rows = [("imported from", origin.get("imported_from")), ("licence", licence and terms(licence))]
    return [(name, str(value)) for name, value in rows if value]
