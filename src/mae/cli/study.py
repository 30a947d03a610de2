"""`mae study NAME SOURCE`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from mae.cli import INTERRUPTED
from mae.cli.pretrain import given_options, named_recipe
from mae.config import Device, PretrainConfig
from mae.options import shown
from mae.recipes import recipe_config
from mae.records import check_known

if TYPE_CHECKING:
    from rich.console import Console

    from mae.experiments.run import StudyOutcome

# What stands here is shown without loading PyTorch; each study's own help loads its file.
_STUDIES = {
    "compare": "the plain run against the improved one, each part of it alone, or any recipes",
    "mask_ratio": "how much of an image should be hidden?",
    "decoder": "attention among all patches, or to visible ones alone?",
    "decoder_depth": "how deep should the decoder be?",
    "levers": "which changes of a run make a better encoder, each alone",
    "quality": "which recipe makes a good encoder soonest?",
    "target": "predict pixels, or patches standardised one by one?",
    "features": "models that are trained already beside each other, by k-NN and probe",
}


def run(args: list[str]) -> int:
    """Carry a study out and say where its report is."""
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    name, rest = args[0], args[1:]
    check_known([name], list(_STUDIES), what="study")
    if name == "features":
        return tyro.cli(_features, args=rest, prog="mae study features")
    return _training(name, rest)


@dataclass(frozen=True, kw_only=True)
class _Shared(PretrainConfig):
    """What all runs of a study are told."""

    out: Annotated[Path | None, shown("one under runs/ named after study and source", "DIR")] = None
    """The study's folder; a study that was begun there goes on."""


def _help() -> str:
    lines = "".join(f"  {name:<14} {what}\n" for name, what in _STUDIES.items())
    return (
        "usage: mae study NAME SOURCE ...\n\nTrain in several ways, all else being equal, and tell which is better.\n"
        "Asked for again in the same words, a study goes on where it was.\n\n"
        f"studies:\n{lines}\n'mae study NAME --help' tells more of each.\n"
    )


def _training(name: str, args: list[str]) -> int:
    from rich.console import Console

    from mae.experiments.run import Request, find_study, run_study

    kind, given = find_study(name), given_options(args)
    default = _Shared(**vars(recipe_config(named_recipe(args)).make_room(given)))

    def study(
        options: Annotated[kind, tyro.conf.arg(name="")],  # type: ignore[valid-type]
        request: Annotated[Request, tyro.conf.arg(name="")],
        config: Annotated[_Shared, tyro.conf.arg(name="")] = default,
    ) -> tuple[object, Request, PretrainConfig]:
        return options, request, PretrainConfig(**vars(config))

    options, request, config = tyro.cli(
        study,
        args=args,
        prog=f"mae study {name}",
        description=f"{name}: {_STUDIES[name]}. Options of the runs hold for every arm.",
    )
    console = Console()
    return _end(run_study(options, request, config, given=frozenset(given), console=console), console)


def _features(
    models: Annotated[tuple[str, ...], tyro.conf.Positional],
    data: str,
    out: Annotated[Path | None, shown("one under runs/ named after the data", "DIR")] = None,
    data_root: Path = Path("data"),
    device: Device = "auto",
) -> int:
    """Set trained models beside each other, random weights and raw pixels with them.

    Args:
        models: run folders, .safetensors files, timm:NAME or hf:NAME_OR_PATH; the first is the reference.
        data: labelled images to judge on.
        out: the study's folder.
        data_root: where sets known by name are kept.
        device: where to compute; auto: CUDA, else Apple's MPS, else the CPU.
    """
    from rich.console import Console

    from mae.experiments.features import Features
    from mae.experiments.run import run_features

    console, chosen = Console(), Features(models=models)
    return _end(run_features(chosen, data=data, data_root=data_root, out=out, device=device, console=console), console)


def _end(outcome: "StudyOutcome", console: "Console") -> int:
    if outcome.report is not None:
        console.print(f"Look at {outcome.report}", soft_wrap=True, highlight=False, markup=False)
    if outcome.finished:
        return 0
    how = "Stopped and saved. Ask for the study again in the same words to go on."
    console.print(how, soft_wrap=True, highlight=False, markup=False)
    return INTERRUPTED
