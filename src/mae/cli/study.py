"""`mae study NAME SOURCE`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from mae.cli import INTERRUPTED
from mae.cli.run_options import RunFlags
from mae.config import Device
from mae.experiments.core.plan import StudyRequest
from mae.experiments.studies import STUDIED, STUDIES, find_study
from mae.options import shown

if TYPE_CHECKING:
    from rich.console import Console

    from mae.experiments.run import StudyOutcome

_FOLDER = shown("one under runs/ named after study and source", "DIR")


def run(args: list[str]) -> int:
    """Run a study and print where its report is."""
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    name, rest = args[0], args[1:]
    kind = find_study(name)
    if not kind.trains:
        return _compare_models(name, kind, rest)
    if {"-h", "--help"} & set(rest):
        return _help_of(name, kind)
    return _train(name, kind, rest)


def _help() -> str:
    lines = "".join(f"  {name:<14} {entry.summary}\n" for name, entry in STUDIES.items())
    return (
        "usage: mae study NAME SOURCE ...\n\nTrain in several ways, all else being equal, and report which is better.\n"
        "Resumes when you rerun the same command.\n\n"
        f"studies:\n{lines}\n'mae study NAME --help' shows the options of each.\n"
    )


def _help_of(name: str, kind: type[Any]) -> int:
    """Print the options that the study adds to those of `mae pretrain`."""

    def study(
        source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
        options: Annotated[kind, tyro.conf.arg(name="")],  # type: ignore[valid-type]
        request: Annotated[StudyRequest, tyro.conf.arg(name="")],
        out: Annotated[Path | None, _FOLDER] = None,
    ) -> None:
        """Show help.

        Args:
            source: images to train on, as for `mae pretrain`.
            options: of the study.
            request: of every study.
            out: the study's folder; a study that began there resumes.
        """

    summary = STUDIES[name].summary
    asked = summary if summary.endswith("?") else f"{summary}."
    about = f"{name}: {asked} Every option of 'mae pretrain' may be given too and holds for all runs."
    tyro.cli(study, args=["--help"], prog=f"mae study {name}", description=about)
    return 0


def _train(name: str, kind: type[Any], args: list[str]) -> int:
    from rich.console import Console

    from mae.experiments.run import run_study

    flags = RunFlags(args, recipe=STUDIED)

    def study(
        options: Annotated[kind, tyro.conf.arg(name="")],  # type: ignore[valid-type]
        request: Annotated[StudyRequest, tyro.conf.arg(name="")],
        run: Annotated[flags.type, tyro.conf.arg(name="")],  # type: ignore[name-defined]
    ) -> tuple[object, StudyRequest, object]:
        return options, request, run

    options, request, run = tyro.cli(study, args=args, prog=f"mae study {name}")
    console, config = Console(), flags.config(run)
    return _finish(run_study(options, request, config, given=frozenset(flags.given), console=console), console)


def _compare_models(name: str, kind: type[Any], args: list[str]) -> int:
    def study(
        options: Annotated[kind, tyro.conf.arg(name="")],  # type: ignore[valid-type]
        data: Annotated[str, tyro.conf.arg(metavar="LABELLED")],
        out: Annotated[Path | None, shown("one under runs/ named after the data", "DIR")] = None,
        data_root: Path = Path("data"),
        device: Device = "auto",
    ) -> dict[str, Any]:
        """Compare trained models.

        Args:
            options: of the study.
            data: labelled images for the evaluations.
            out: the study's folder; a study that began there resumes.
            data_root: where data sets known by name are kept.
            device: where to compute; auto: CUDA, else Apple's MPS, else the CPU.
        """
        return {"options": options, "data": data, "out": out, "data_root": data_root, "device": device}

    given = tyro.cli(study, args=args, prog=f"mae study {name}", description=f"{name}: {STUDIES[name].summary}.")

    from rich.console import Console

    from mae.experiments.run import compare_models

    console = Console()
    return _finish(compare_models(**given, console=console), console)


def _finish(outcome: "StudyOutcome", console: "Console") -> int:
    if outcome.report is not None:
        console.print(f"Report: {outcome.report}", soft_wrap=True, highlight=False, markup=False)
    if outcome.finished:
        return 0
    how = "Stopped and saved. Resumes when you rerun the same command."
    console.print(how, soft_wrap=True, highlight=False, markup=False)
    return INTERRUPTED
