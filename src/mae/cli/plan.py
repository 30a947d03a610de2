"""`mae plan SOURCE`."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Optional

import tyro

from mae.cli.early import check_images
from mae.cli.run_options import RunFlags
from mae.config import RunConfig
from mae.credentials import is_partial
from mae.errors import UsageError
from mae.options import shown

if TYPE_CHECKING:
    from rich.console import Console

    from mae.pretraining.estimate.estimate import Plan
    from mae.pretraining.resolve import RunContext


def run(args: list[str]) -> int:
    """Measure, then print the plan and the command that carries it out."""
    if args[:1] == ["finetune"]:
        from mae.cli import plan_finetuning

        return plan_finetuning.run(args[1:])
    config, given, hours, as_json = parse(args)
    check_images(config)

    from rich.console import Console

    from mae.report.terminal.console import side_console, stage

    told = side_console()
    with stage(told, "Loading PyTorch"):
        from mae.pretraining.estimate.estimate import plan_pretraining

    with stage(told, f"Reading the images of {config.source} and measuring steps"):
        prepared, plan = plan_pretraining(config, hours=hours, given=given)
    if as_json:
        sys.stdout.write(json.dumps(plan.to_json()) + "\n")
    else:
        show(Console(), prepared, plan)
    return 0


def parse(args: list[str]) -> tuple[RunConfig, set[str], float | None, bool]:
    """The configuration, the names of the options that were given, the hours there are, and whether to print JSON.

    Raises:
        UsageError: both a time and a length are given.
    """
    flags = RunFlags(args)

    def plan(
        run: Annotated[flags.type, tyro.conf.arg(name="")],  # type: ignore[name-defined]
        hours: Annotated[Optional[float], shown("as long as --epochs takes", "H")] = None,  # noqa: UP045 - of `X | None` tyro imports a package
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    ) -> tuple[object, float | None, bool]:
        """Tell what a run would take on this machine and whether it makes sense; some seconds, nothing is written.

        'mae plan finetune' and the words of a fine-tuning tell what that would take.

        Args:
            run: the run, given as to 'mae pretrain'.
            hours: as many epochs as fit in this time, instead of --epochs.
            json: print one JSON object instead of a table.
        """
        return run, hours, json

    run, hours, as_json = tyro.cli(plan, args=args, prog="mae plan")
    length = sorted(f"--{name}" for name in flags.given & {"epochs", "steps"})
    if hours is not None and length:
        raise UsageError(f"both --hours and {length[0]} are given; --hours chooses the epochs: give one of them")
    return flags.config(run), flags.given, hours, as_json


def show(console: "Console", prepared: "RunContext", plan: "Plan") -> None:
    """Print the plan as a table, and the command below it."""
    from mae.report.terminal.console import duration, show_table

    config, pace = plan.config, plan.pace
    sizes = " to ".join(dict.fromkeys("x".join(map(str, size)) for size in prepared.images.size_range()))
    fitted = f"; as many as fit in {duration(3600 * plan.hours)}" if plan.hours is not None else ""
    size, patch = (_sides(config.flat()[name]) for name in ("img_size", "patch_size"))
    per_step = f"{plan.steps:,} steps of {config.optim.batch_size}, {plan.steps_per_epoch:,} an epoch"
    rates = f"model {plan.model_rate:,.0f}, loader {plan.loader_rate:,.0f} with {plan.workers} process(es)"
    limits = {"data": "the loader limits", "compute": "the model limits"}[pace.limit]
    fits = f"at least {plan.images:,}, all there are," if plan.largest_part >= plan.images else f"{plan.largest_part:,}"
    rows = [
        ("images", f"{plan.images:,} of {sizes} pixels, {plan.held_out:,} of them held out; {prepared.note}"),
        ("model", f"{config.model}: {plan.parameters / 1e6:.2f} M trained parameters"),
        ("crops", f"{size} pixels in patches of {patch}, {config.flat()['mask_ratio']:.0%} of them masked"),
        ("length", f"{plan.epochs:.4g} epochs = {per_step}{fitted}"),
        ("images/s", f"{pace.images_per_second:,.0f} together: {rates}"),
        ("limit", f"{limits}; {pace.data_wait:.0%} of the time goes to waiting for images"),
        ("time", f"{duration(plan.epoch_seconds)} an epoch, {duration(plan.run_seconds)} in all, on {plan.device}"),
        ("memory", f"{_gigabytes(plan.peak_bytes)} a step, of {_gigabytes(plan.available_bytes)} that are free"),
        (
            "batch",
            f"{config.optim.batch_size} = {config.machine.accumulate} micro-batch(es) x {plan.part_size}; "
            f"{fits} would fit at once",
        ),
        *(("advice" if number == 0 else "", text) for number, text in enumerate(plan.advice)),
    ]
    show_table(console, f"Plan for {config.source}", rows)
    console.print(f"\n{plan.command}", soft_wrap=True, highlight=False, markup=False)
    if is_partial(config.source):
        told = "The URL stands there without its user, password and query: give it whole."
        console.print(told, soft_wrap=True, highlight=False, markup=False)


def _sides(size: tuple[int, int]) -> str:
    return "x".join(map(str, size))


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
