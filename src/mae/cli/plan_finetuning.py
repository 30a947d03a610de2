"""`mae plan finetune KIND MODEL --data ...`."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import tyro

from mae.cli.evaluate import Request, check_request, opened_evaluator, summary
from mae.cli.finetune import brought_in, find_kind, kinds_help
from mae.errors import UsageError
from mae.evaluation.protocol import EvaluationProtocol

if TYPE_CHECKING:
    from rich.console import Console

    from mae.pretraining.estimate.finetuning import FinetuningPlan

_JSON = "--json"


def run(args: list[str]) -> int:
    """Measure, then print the plan and the command that carries it out."""
    if not args or args[0] in ("-h", "--help"):
        command = "mae plan finetune"
        sys.stdout.write(f"usage: {command} KIND MODEL --data LABELLED ...\n\n{kinds_help(command)}")
        return 0
    request, protocol, as_json = parse(args)
    check_request(request)

    from rich.console import Console

    from mae.report.terminal.console import side_console, stage

    told = side_console()
    with stage(told, "Loading PyTorch"):
        from mae.pretraining.estimate.finetuning import plan_finetuning

    # Nothing stays: neither models of other libraries nor notes on the contents of images.
    with TemporaryDirectory(prefix="mae-plan-") as aside:
        with stage(told, f"Reading {request.data} and measuring steps"):
            opened, with_files = brought_in(replace(request, out=Path(aside)), protocol, Path(aside))
            with opened_evaluator(opened, Console(quiet=True)) as evaluator:
                plan = plan_finetuning(evaluator, with_files)  # type: ignore[arg-type]
    if as_json:
        sys.stdout.write(json.dumps(plan.to_json()) + "\n")
    else:
        show(Console(), request, plan, [word for word in args if word != _JSON])
    return 0


def parse(args: list[str]) -> tuple[Request, EvaluationProtocol, bool]:
    """What is asked for, and whether to print JSON.

    Raises:
        UsageError: no such kind of fine-tuning, or several processes.
    """
    kind = find_kind(args[0])

    def plan(
        request: Annotated[Request, tyro.conf.arg(name="")],
        protocol: Annotated[kind, tyro.conf.arg(name="")],  # type: ignore[valid-type]
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    ) -> tuple[Request, EvaluationProtocol, bool]:
        """Plan.

        Args:
            request: the fine-tuning, given as to 'mae finetune'.
            protocol: its options.
            json: print one JSON object instead of a table.
        """
        return request, protocol, json

    request, protocol, as_json = tyro.cli(
        plan,
        args=args[1:],
        prog=f"mae plan finetune {args[0]}",
        description=f"Tell what this would take on this machine; nothing is written. {kind.name}: {summary(kind)}.",
    )
    if request.gpus is not None:
        raise UsageError("--gpus is given; a plan is measured in one process: leave it out")
    return request, protocol, as_json


def show(console: "Console", request: Request, plan: "FinetuningPlan", words: list[str]) -> None:
    """Print the plan as a table, and the command below it.

    Args:
        console: where.
        request: what was asked for.
        plan: what it takes.
        words: of the fine-tuning, behind `mae finetune`.
    """
    from mae.report.terminal.console import duration, show_table

    trainings = len(plan.weights) * plan.seeds
    by = f"{len(plan.weights)} weights ({', '.join(plan.weights)}) x {plan.seeds} seed(s)"
    evaluations = f"{plan.evaluations} evaluations of {plan.evaluation_seconds:,.2g} s"
    fits = f"at least {plan.images:,}, all there are," if plan.largest_part >= plan.images else f"{plan.largest_part:,}"
    accumulated = f"{plan.accumulate} micro-batch(es) x {plan.batch_size // plan.accumulate}"
    rows = [
        ("labels", f"{plan.data}; trained on {plan.images:,} images, tested on {plan.test_images:,}"),
        ("model", f"{plan.parameters / 1e6:.2f} M trained parameters with the head"),
        ("length", f"{plan.steps:,} steps of {plan.batch_size}, {plan.epochs:.3g} times over the images"),
        ("step", f"{plan.step_seconds:.2g} s on {plan.device}"),
        ("training", f"{duration(plan.training_seconds)}, {evaluations} included"),
        ("time", f"{duration(plan.seconds)} in all, for {trainings} training(s): {by}"),
        ("memory", f"{plan.peak_bytes / 1e9:.2f} GB a step, of {plan.available_bytes / 1e9:.2f} GB that are free"),
        ("batch", f"{plan.batch_size} = {accumulated}; {fits} would fit at once"),
        *(("advice" if number == 0 else "", text) for number, text in enumerate(plan.advice)),
    ]
    show_table(console, f"Plan for {request.model}", rows)
    console.print(f"\n{shlex.join(['mae', 'finetune', *words])}", soft_wrap=True, highlight=False, markup=False)
