"""`mae doctor SOURCE` or `mae doctor RUN`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import tyro

from mae.cli.pretrain import given_options, named_recipe
from mae.config import PretrainConfig
from mae.errors import UsageError
from mae.recipes import recipe_config


def run(args: list[str]) -> int:
    """Check, and print one line a check; the exit code is 1 where the run would be worthless."""
    config, as_json = parse(args)

    from rich.console import Console

    from mae.pretraining.doctor import examine_run, examine_source, show_diagnosis

    if (Path(config.source) / "config.json").is_file():
        if given := given_options(args) - {"device"}:
            raise UsageError(f"{config.source} is a run, checked as it was begun; leave out {', '.join(sorted(given))}")
        found = examine_run(Path(config.source), device=config.device)
    else:
        found = examine_source(config, given=given_options(args))
    if as_json:
        sys.stdout.write(json.dumps(found.to_json()) + "\n")
    else:
        show_diagnosis(Console(), found, everything=True)
    return 1 if found.fatal else 0


def parse(args: list[str]) -> tuple[PretrainConfig, bool]:
    """The configuration, and whether to print JSON.

    Raises:
        UsageError: nothing to check is named.
    """
    default = recipe_config(named_recipe(args)).make_room(given_options(args))

    def doctor(
        config: Annotated[PretrainConfig, tyro.conf.arg(name="")] = default,
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    ) -> tuple[PretrainConfig, bool]:
        """Check a run before it begins, or as it stands: images, model, masks, loss, rate, memory; nothing is written.

        Args:
            config: the run, told as to 'mae pretrain'; or the folder of a run.
            json: print one JSON object instead of lines.
        """
        return config, json

    config, as_json = tyro.cli(doctor, args=args, prog="mae doctor")
    if not config.source:
        raise UsageError("nothing to check is named; give images as to 'mae pretrain', or the folder of a run")
    return config, as_json
