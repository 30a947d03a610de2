"""`mae show MODEL`."""

from collections.abc import Mapping
from typing import Annotated, Any

import tyro

from mae.config import Size


def run(args: list[str]) -> int:
    """Print sizes, parameters and arithmetic of a named model, or of a run's."""
    return tyro.cli(show, args=args, prog="mae show")


def show(
    model: Annotated[str, tyro.conf.Positional],
    img_size: Size | None = None,
    patch_size: Size | None = None,
    in_chans: int | None = None,
) -> int:
    """Tell a model's sizes, parameters and arithmetic.

    Args:
        model: a name of 'mae list models', a run folder, a checkpoint or a .safetensors file.
        img_size: height and width of the images, for a named model.
        patch_size: height and width of a patch, for a named model.
        in_chans: channels of the images, for a named model.
    """
    from pathlib import Path

    from rich.console import Console

    from mae.errors import UsageError
    from mae.evaluation.extractors import show_loaded
    from mae.interop.opening import open_model
    from mae.models.masked_autoencoder import MaskedAutoencoder
    from mae.models.summary import summarise
    from mae.models.zoo import model_config
    from mae.report.console import show_table

    given = {"img_size": img_size, "patch_size": patch_size, "in_chans": in_chans}
    options = {name: value for name, value in given.items() if value is not None}
    console, has_decoder, origin = Console(), True, dict[str, Any]()
    if not Path(model).exists():
        config = model_config(model, **options)  # type: ignore[arg-type]
    elif options:
        raise UsageError(f"{model} is a trained model; its {', '.join(options)} cannot be chosen")
    else:
        loaded, report = open_model(Path(model))
        if report.notes:  # of weights that others wrote, and of what was guessed about them
            show_loaded(console, report.line())
        assert loaded.config is not None  # a loaded model has the configuration it was loaded by
        config, has_decoder, origin = loaded.config, isinstance(loaded, MaskedAutoencoder), dict(report.origin)
    summary = summarise(config)
    rows = [
        (name, str(value)) for name, value in config.to_json().items() if has_decoder or not name.startswith("decoder")
    ]
    show_table(
        console,
        model,
        [
            *rows,
            ("grid", "x".join(map(str, config.grid))),
            ("encoder", f"{summary.encoder_params:,} parameters, {summary.encoder_flops / 1e9:.3g} GFLOP an image"),
            *(_of_training(summary) if has_decoder else [("decoder", "none")]),
            ("encode", f"{summary.encode_flops / 1e9:.3g} GFLOP an image, nothing hidden"),
            *_of_origin(origin),
        ],
    )
    return 0


def _of_training(summary: Any) -> list[tuple[str, str]]:
    return [
        ("decoder", f"{summary.decoder_params:,} parameters, {summary.decoder_flops / 1e9:.3g} GFLOP an image"),
        ("training step", f"{summary.step_flops / 1e9:.3g} GFLOP an image, forward and backward"),
    ]


def _of_origin(origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    from mae.interop.catalogue import terms

    licence = origin.get("licence")
    rows = [("imported from", origin.get("imported_from")), ("licence", licence and terms(licence))]
    return [(name, str(value)) for name, value in rows if value]
