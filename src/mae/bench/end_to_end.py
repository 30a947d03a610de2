"""A run's own loop on real images against the same loop on one batch in memory."""

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from rich.console import Console

from mae.bench.report import check_figures, machine, write_figures
from mae.bench.timing import Quartiles, quartiles, ratios
from mae.config import RunConfig
from mae.errors import UsageError
from mae.layers.compiled import compile_blocks
from mae.options import shown
from mae.pretraining.build import fresh_model, make_trainer
from mae.pretraining.estimate.profile import measure_steps
from mae.pretraining.resolve import RunContext, prepare_run
from mae.report.terminal.tables import show_grid
from mae.training.device import choose_device
from mae.training.distributed import World
from mae.training.engine import Batches

_TURNS = 6
"""Of each kind; the first of each is not counted."""
_LEAST_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """How long to measure.

    Raises:
        UsageError: a time that is no positive number.
    """

    seconds: float = 120.0
    """About how long to measure."""
    from_files: bool = False
    """Read every image anew, as for a data set too large for memory."""
    json: Annotated[Path | None, shown("nowhere", "FILE.json")] = None
    """Write all figures here."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"--seconds is {self.seconds:g}; expected more than 0")


def run_end_to_end_bench(bench: EndToEnd, config: RunConfig, console: Console) -> dict[str, Any]:
    """Train for a while, alternating between real images and one repeated batch, and report the rates of both.

    The model is discarded. While one batch is repeated, loading processes fill their queues, so that the
    first half of each turn on real images is not counted.

    Args:
        bench: how long.
        config: the run, as `mae pretrain` takes it, without checks, online evaluation and pictures, at its final
            mask ratio.
        console: where the table is shown.

    Raises:
        UsageError: the run cannot be carried out as asked, or a file of figures that is there already.
        MAEError: images that cannot be read.
    """
    check_figures(bench.json)
    if not config.source:
        raise UsageError("no images are named; give a folder, a list file, a .zip or a name such as builtin:photos")
    if config.machine.out is not None:
        raise UsageError("--out is given, but this run is discarded; leave it out, --json FILE.json keeps the figures")
    device = choose_device(config.machine.device)
    with TemporaryDirectory(prefix="mae-bench-") as aside:
        asked = config.override({"out": Path(aside) / "run"})
        limit = 0 if bench.from_files else None
        prepared = prepare_run(asked, None, device, World(), resume=False, memory_limit=limit)
        (cost,) = measure_steps(prepared, part_sizes=(prepared.part_size,), seconds=0.1 * bench.seconds)
        a_step = cost.seconds * prepared.config.machine.accumulate
        half = max(_LEAST_STEPS, ceil(bench.seconds / (4 * _TURNS) / a_step))
        real, synthetic = _rates(prepared, half)
    beside = ratios(real, synthetic)
    record = {
        "machine": machine(device),
        "config": config.to_json(),
        "batch_size": prepared.config.optim.batch_size,
        "workers": prepared.config.machine.workers,
        "images_per_second": {"real": asdict(quartiles(real)), "synthetic": asdict(quartiles(synthetic))},
        "share": asdict(beside),
    }
    rows = [
        (name, rate.text(1), share.text(2))
        for name, rate, share in (
            ("one batch in memory", quartiles(synthetic), Quartiles(lower=1, median=1, upper=1)),
            (config.source, quartiles(real), beside),
        )
    ]
    show_grid(
        console,
        f"{prepared.config.model}, batches of {prepared.config.optim.batch_size}",
        ["images", "images/s", "share"],
        rows,
    )
    write_figures(bench.json, record)
    return record


def _rates(prepared: RunContext, half: int) -> tuple[list[float], list[float]]:
    """Images/s of each turn: on real images, and on one batch."""
    steps = 4 * _TURNS * half
    assert prepared.config.optim.batch_size is not None
    long = replace(
        prepared,
        config=prepared.config.override(
            {
                "steps": steps,
                "epochs": None,
                "warmup_epochs": None,
                "mask_schedule": "const",
                "checkpoint_every": steps,
                "checkpoint_keep_every": None,
            }
        ),
    )
    model = fresh_model(long)
    trainer = make_trainer(long, model)
    if long.config.machine.compile == "on":
        compile_blocks(model)
    trainer.settings = replace(trainer.settings, log_every=half)
    trainer.batches = _by_turns(trainer.batches, long.config.machine.accumulate, 2 * half)
    watched = _Watch()
    trainer.run(observers=[watched])
    return _counted(watched.rates, 2 * half)


def _counted(rates: Mapping[int, float], turn: int) -> tuple[list[float], list[float]]:
    """Rates of the second half of each turn but the first of its kind: on real images, and on one batch.

    Args:
        rates: by the step they were logged at: every half turn, and at others that are left out, such as the first.
        turn: steps of a turn; those on real images and on one batch alternate.
    """
    ends = [step for step in rates if step > 2 * turn and step % turn == 0]
    return [rates[step] for step in ends if step // turn % 2], [rates[step] for step in ends if not step // turn % 2]


def _by_turns(batches: Batches, accumulate: int, steps: int) -> Batches:
    """Real batches for some steps, then the last of them repeated for as many, and so on."""

    def turns(step: int) -> Generator[Mapping[str, Any], None, None]:
        with closing(batches(step)) as real:
            while True:
                last: Mapping[str, Any] = {}
                for _ in range(steps * accumulate):
                    last = next(real)
                    yield last
                for _ in range(steps * accumulate):
                    yield last

    return turns


class _Watch:
    """Keeps the rates that a run logs, by step."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}

    def log(self, row: Mapping[str, Any]) -> None:
        if "images_per_second" in row:
            self.rates[row["step"]] = row["images_per_second"]

    def close(self) -> None:
        pass
