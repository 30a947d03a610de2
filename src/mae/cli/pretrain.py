"""`mae pretrain SOURCE`."""

import os
from typing import TYPE_CHECKING, Annotated, Optional

import tyro

from mae.cli import code_of_signal
from mae.cli.early import check_run
from mae.cli.run_options import RunFlags
from mae.config import RunConfig
from mae.credentials import is_partial
from mae.options import shown

if TYPE_CHECKING:
    from rich.console import Console

    from mae.pretraining.run import PretrainResult


def run(args: list[str]) -> int:
    """Parse, train, and tell how to go on if a signal stopped it."""
    config, given, resume, gpus = parse(args)
    check_run(config, resume=resume)
    if gpus is not None:
        from mae.cli.launch import launch

        return launch(gpus, device=config.machine.device, command=["pretrain", *args])

    from rich.console import Console

    from mae.report.terminal.console import stage

    console = Console()
    with stage(Console(quiet=os.environ.get("RANK", "0") != "0"), "Loading PyTorch"):
        from mae.pretraining.run import run_pretraining

    result = run_pretraining(config, given=given, resume=resume, console=console)
    return 0 if result.finished else stopped(console, result)


def stopped(console: "Console", result: "PretrainResult") -> int:
    """Tell how to go on with a run that a signal stopped; the exit code for that."""
    from mae.training.run_folder import RunFolder

    folder = RunFolder(result.folder)
    how = f"Stopped and saved. Go on with: {folder.resume_command}"
    source = RunConfig.read(folder.config).source
    if is_partial(source):
        how += f", and the whole URL of {source}, of which no run keeps user, password and query"
    if result.is_main:
        console.print(how, soft_wrap=True, highlight=False, markup=False)
    return code_of_signal(result.stopped_by)


def parse(args: list[str]) -> tuple[RunConfig, set[str], bool, int | None]:
    """The configuration, the names of the options that were given, whether to resume, and processes to start."""
    flags = RunFlags(args)

    def pretrain(
        run: Annotated[flags.type, tyro.conf.arg(name="")],  # type: ignore[name-defined]
        resume: bool = False,
        gpus: Annotated[Optional[int], shown("one", "N")] = None,  # noqa: UP045 - of `X | None` tyro imports a package
    ) -> tuple[object, bool, int | None]:
        """Pre-train a masked autoencoder on images.

        Args:
            run: the run.
            resume: resume the run in --out; with a source, begin it where there is none yet.
            gpus: train on so many GPUs of this machine, a process each; with --device cpu so many processes.
        """
        return run, resume, gpus

    run, resume, gpus = tyro.cli(pretrain, args=args, prog="mae pretrain")
    return flags.config(run), flags.given, resume, gpus
