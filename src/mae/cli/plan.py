"""`mae plan SOURCE`."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import tyro

from mae.cli.pretrain import given_options, named_recipe
from mae.config import PretrainConfig
from mae.credentials import is_partial
from mae.errors import UsageError
from mae.options import shown
from mae.recipes import recipe_config

if TYPE_CHECKING:
    from rich.console import Console

    from mae.pretraining.plan import Plan
    from mae.pretraining.settle import Prepared


def run(args: list[str]) -> int:
    """Measure, then print the plan and the command that carries it out."""
    config, hours, as_json = parse(args)

    from rich.console import Console

    from mae.pretraining.plan import plan_pretraining

    prepared, plan = plan_pretraining(config, hours=hours, given=given_options(args))
    if as_json:
        sys.stdout.write(json.dumps(plan.to_json()) + "\n")
    else:
        show(Console(), prepared, plan)
    return 0


def parse(args: list[str]) -> tuple[PretrainConfig, float | None, bool]:
    """The configuration, the hours there are, and whether to print JSON.

    Raises:
        UsageError: both a time and a length are given.
    """
    given = given_options(args)
    default = recipe_config(named_recipe(args)).make_room(given)

    def plan(
        config: Annotated[PretrainConfig, tyro.conf.arg(name="")] = default,
        hours: Annotated[float | None, shown("as long as --epochs takes", "H")] = None,
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    ) -> tuple[PretrainConfig, float | None, bool]:
        """Tell what a run would take on this machine and whether it makes sense; some seconds, nothing is written.

        Args:
            config: the run, told as to 'mae pretrain'.
            hours: as many epochs as fit in this time, instead of --epochs.
            json: print one JSON object instead of a table.
        """
        return config, hours, json

    config, hours, as_json = tyro.cli(plan, args=args, prog="mae plan")
    length = sorted(f"--{name}" for name in given & {"epochs", "steps"})
    if hours is not None and length:
        raise UsageError(f"both --hours and {length[0]} are given; --hours chooses the epochs: give one of them")
    return config, hours, as_json


def show(console: "Console", prepared: "Prepared", plan: "Plan") -> None:
    """Print the plan as a table, and the command below it."""
    from mae.report.console import duration, show_table

    config, pace = plan.config, plan.pace
    sizes = " to ".join(dict.fromkeys("x".join(map(str, size)) for size in prepared.images.size_range()))
    fitted = f"; as many as fit in {duration(3600 * plan.hours)}" if plan.hours is not None else ""
    per_step = f"{plan.steps:,} steps of {config.batch_size}, {plan.steps_per_epoch:,} an epoch"
    rates = f"model {plan.model_rate:,.0f}, loader {plan.loader_rate:,.0f} with {plan.workers} process(es)"
    limits = {"data": "the loader limits", "compute": "the model limits"}[pace.limit]
    fits = f"at least {plan.images:,}, all there are," if plan.largest_part >= plan.images else f"{plan.largest_part:,}"
    rows = [
        ("images", f"{plan.images:,} of {sizes} pixels, {plan.held_out:,} of them held out; {prepared.note}"),
        ("model", f"{config.model}: {plan.parameters / 1e6:.2f} M parameters"),
        ("length", f"{plan.epochs:.4g} epochs = {per_step}{fitted}"),
        ("images/s", f"{pace.images_per_second:,.0f} together: {rates}"),
        ("limit", f"{limits}; {pace.data_wait:.0%} of the time goes to waiting for images"),
        ("time", f"{duration(plan.epoch_seconds)} an epoch, {duration(plan.run_seconds)} in all, on {plan.device}"),
        ("memory", f"{_gigabytes(plan.peak_bytes)} a step, of {_gigabytes(plan.available_bytes)} that are free"),
        ("batch", f"{config.batch_size} = {config.accumulate} part(s) x {plan.part_size}; {fits} would fit at once"),
        *(("advice" if number == 0 else "", text) for number, text in enumerate(plan.advice)),
    ]
    show_table(console, f"Plan for {config.source}", rows)
    console.print(f"\n{plan.command}", soft_wrap=True, highlight=False, markup=False)
    if is_partial(config.source):
        told = "The URL stands there without its user, password and query: give it whole."
        console.print(told, soft_wrap=True, highlight=False, markup=False)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
