"""`mae doctor SOURCE`, `mae doctor RUN` or `mae doctor labels FOLDER`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import tyro

from mae.cli import doctor_labels
from mae.cli.early import check_images
from mae.cli.run_options import RunFlags
from mae.config import RunConfig
from mae.errors import UsageError


def run(args: list[str]) -> int:
    """Check, and print one line a check; the exit code is 1 where the run would be worthless."""
    if args[:1] == ["labels"]:
        return doctor_labels.run(args[1:])
    config, given, as_json = parse(args)

    is_run = (Path(config.source) / "config.json").is_file()
    if not is_run:
        check_images(config)

    from rich.console import Console

    from mae.report.terminal.console import side_console, stage

    told = side_console()
    with stage(told, "Loading PyTorch"):
        from mae.pretraining.checks.doctor import examine_run, examine_source
        from mae.report.terminal.diagnosis import show_diagnosis

    if is_run:
        if more := given - {"device", "source"}:
            raise UsageError(f"{config.source} is a run, checked as it was begun; leave out {', '.join(sorted(more))}")
        with stage(told, f"Checking the run in {config.source}"):
            found = examine_run(Path(config.source), device=config.machine.device)
    else:
        with stage(told, f"Reading the images of {config.source} and checking the run"):
            found = examine_source(config, given=given)
    if as_json:
        sys.stdout.write(json.dumps(found.to_json()) + "\n")
    else:
        show_diagnosis(Console(), found, everything=True)
    return 1 if found.fatal else 0


def parse(args: list[str]) -> tuple[RunConfig, set[str], bool]:
    """The configuration, the names of the options that were given, and whether to print JSON.

    Raises:
        UsageError: nothing to check is named.
    """
    flags = RunFlags(args)

    def doctor(
        run: Annotated[flags.type, tyro.conf.arg(name="")],  # type: ignore[name-defined]
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    ) -> tuple[object, bool]:
        """Check a run before it begins, or as it stands: images, model, masks, loss, rate, memory; nothing is written.

        For labels of images: mae doctor labels FOLDER.

        Args:
            run: the run, given as to 'mae pretrain'; or the folder of a run.
            json: print one JSON object instead of lines.
        """
        return run, json

    run, as_json = tyro.cli(doctor, args=args, prog="mae doctor")
    config = flags.config(run)
    if not config.source:
        raise UsageError("nothing to check is named; give images as to 'mae pretrain', or the folder of a run")
    return config, flags.given, as_json
