"""`mae pretrain SOURCE`."""

import shlex
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

import tyro

from mae.cli import code_of_signal
from mae.config import PretrainConfig
from mae.credentials import is_partial
from mae.options import shown
from mae.recipes import recipe_config

if TYPE_CHECKING:
    from rich.console import Console

    from mae.pretraining.run import PretrainResult


def run(args: list[str]) -> int:
    """Parse, train, and tell how to go on if a signal stopped it."""
    config, given, resume, gpus = parse(args)
    if gpus is not None:
        from mae.cli.launch import launch

        return launch(gpus, device=config.device, command=["pretrain", *args])

    from rich.console import Console

    from mae.pretraining.run import run_pretraining

    console = Console()
    result = run_pretraining(config, given=given, resume=resume, console=console)
    return 0 if result.finished else stopped(console, result)


def stopped(console: "Console", result: "PretrainResult") -> int:
    """Tell how to go on with a run that a signal stopped; the exit code for that."""
    from mae.training.run_folder import RunFolder

    how = f"Stopped and saved. Go on with: mae pretrain --resume --out {shlex.quote(str(result.folder))}"
    source = PretrainConfig.read(RunFolder(result.folder).config).source
    if is_partial(source):
        how += f", and the whole URL of {source}, of which no run keeps user, password and query"
    if result.is_main:
        console.print(how, soft_wrap=True, highlight=False, markup=False)
    return code_of_signal(result.stopped_by)


def parse(args: list[str]) -> tuple[PretrainConfig, set[str], bool, int | None]:
    """The configuration, the names of the options that were given, whether to resume, and processes to start."""
    given = given_options(args)
    default = recipe_config(named_recipe(args)).make_room(given)

    def pretrain(
        config: Annotated[PretrainConfig, tyro.conf.arg(name="")] = default,
        resume: bool = False,
        gpus: Annotated[int | None, shown("one", "N")] = None,
    ) -> tuple[PretrainConfig, bool, int | None]:
        """Pre-train a masked autoencoder on images.

        Args:
            config: the run.
            resume: go on with the run in --out; with a source, begin it where there is none yet.
            gpus: train on so many GPUs of this machine, a process each; with --device cpu so many processes.
        """
        return config, resume, gpus

    config, resume, gpus = tyro.cli(pretrain, args=args, prog="mae pretrain")
    if config.source and config.source != default.source:
        given.add("source")
    return config, given, resume, gpus


def named_recipe(args: list[str]) -> str:
    """The recipe is read first: the defaults of everything else come from it."""
    for position, arg in enumerate(args):
        if arg == "--recipe" and position + 1 < len(args):
            return args[position + 1]
        if arg.startswith("--recipe="):
            return arg.removeprefix("--recipe=")
    return "default"


def given_options(args: list[str]) -> set[str]:
    """Names of the configuration's fields that stand on the command line."""
    names = {arg[2:].split("=")[0].replace("-", "_") for arg in args if arg.startswith("--")}
    known = {field.name for field in fields(PretrainConfig)}
    return {name for name in names | {name.removeprefix("no_") for name in names} if name in known}
