"""`mae bench NAME`."""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import tyro

from mae.cli.run_options import RunFlags
from mae.records import check_known

_BENCHES = {
    "step": "a training step on synthetic images, against the machine's limits and a peer",
    "data": "from JPEGs to training crops, against Pillow as commonly used",
    "end-to-end": "a run's loop on real images, against the same loop on one batch in memory",
    "quality": "recipes compared: how good an encoder after how much time ('mae study quality')",
}


def run(args: list[str]) -> int:
    """Measure and show."""
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    name, rest = args[0], args[1:]
    check_known([name], list(_BENCHES), what="benchmark")
    return {"step": _step, "data": _data, "end-to-end": _end_to_end, "quality": _quality}[name](rest)


def _step(args: list[str]) -> int:
    from rich.console import Console

    from mae.bench.step import StepBench, run_step_bench

    run_step_bench(_parsed(StepBench, "step", args), Console())
    return 0


def _data(args: list[str]) -> int:
    from rich.console import Console

    from mae.bench.data import DataBench, run_data_bench

    run_data_bench(_parsed(DataBench, "data", args), Console())
    return 0


def _end_to_end(args: list[str]) -> int:
    from rich.console import Console

    from mae.bench.end_to_end import EndToEnd, run_end_to_end_bench

    flags = RunFlags(args)

    def options(
        bench: Annotated[EndToEnd, tyro.conf.arg(name="")],
        run: Annotated[flags.type, tyro.conf.arg(name="")],  # type: ignore[name-defined]
    ) -> tuple[EndToEnd, object]:
        return bench, run

    bench, run = _parsed(options, "end-to-end", args)
    run_end_to_end_bench(bench, flags.config(run), Console())
    return 0


def _quality(args: list[str]) -> int:
    from mae.cli import study

    return study.run(["quality", *args])


def _parsed(kind: Callable[..., Any], name: str, args: list[str]) -> Any:
    return tyro.cli(kind, args=args, prog=f"mae bench {name}", description=_BENCHES[name])


def _help() -> str:
    lines = "".join(f"  {name:<11} {what}\n" for name, what in _BENCHES.items())
    return (
        "usage: mae bench NAME ...\n\nMeasure speed on this machine; run nothing else meanwhile.\n\n"
        f"benchmarks:\n{lines}\n'mae bench NAME --help' shows the options of each.\n"
    )
