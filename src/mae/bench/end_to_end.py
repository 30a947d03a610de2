"""A run's own loop on real images beside the same loop on images that are there already."""

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from rich.console import Console

from mae.bench.turns import Spread, ratios, spread
from mae.config import PretrainConfig
from mae.errors import UsageError
from mae.evaluation.record import hardware, versions
from mae.options import shown
from mae.pretraining.measure import measure_steps
from mae.pretraining.parts import fresh_model, make_trainer
from mae.pretraining.settle import Prepared, prepare
from mae.records import write_json
from mae.report.tables import show_grid
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
    """To spend, about."""
    from_files: bool = False
    """Read every image anew, as of a set that is too large for the memory."""
    json: Annotated[Path | None, shown("nowhere", "FILE.json")] = None
    """Write all figures here."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"--seconds is {self.seconds:g}; expected more than 0")


def run_end_to_end_bench(bench: EndToEnd, config: PretrainConfig, console: Console) -> dict[str, Any]:
    """Train for a while, by turns on real images and on one batch again and again, and tell the rates of both.

    What is trained is thrown away. While one batch is used again, loading processes fill their queues, so that the
    first half of each turn on real images is not counted.

    Args:
        bench: how long.
        config: the run, as `mae pretrain` takes it; checks, looks at features and pictures are left out, and as
            many patches are hidden as at its end.
        console: where the table is shown.

    Raises:
        UsageError: the run cannot be carried out as asked.
        MAEError: images that cannot be read.
    """
    if not config.source:
        raise UsageError("no images are named; give a folder, a list file, a .zip or a name such as builtin:photos")
    if config.out is not None:
        raise UsageError(
            "--out is given, but this run is thrown away; leave it out, --json FILE.json keeps the figures"
        )
    device = choose_device(config.device)
    with TemporaryDirectory(prefix="mae-bench-") as aside:
        asked = replace(config, out=Path(aside) / "run")
        limit = 0 if bench.from_files else None
        prepared = prepare(asked, None, device, World(), resume=False, memory_limit=limit)
        (cost,) = measure_steps(prepared, part_sizes=(prepared.part_size,), seconds=0.1 * bench.seconds)
        a_step = cost.seconds * prepared.config.accumulate
        half = max(_LEAST_STEPS, ceil(bench.seconds / (4 * _TURNS) / a_step))
        real, synthetic = _rates(prepared, half)
    beside = ratios(real, synthetic)
    record = {
        "machine": {**hardware(device), **versions()},
        "config": config.to_json(),
        "batch_size": prepared.config.batch_size,
        "workers": prepared.config.workers,
        "images_per_second": {"real": asdict(spread(real)), "synthetic": asdict(spread(synthetic))},
        "share": asdict(beside),
    }
    rows = [
        (name, rate.text(1), share.text(2))
        for name, rate, share in (
            ("images there already", spread(synthetic), Spread(lower=1, median=1, upper=1)),
            (config.source, spread(real), beside),
        )
    ]
    show_grid(
        console,
        f"{prepared.config.model}, batches of {prepared.config.batch_size}",
        ["images", "images/s", "share"],
        rows,
    )
    if bench.json is not None:
        write_json(bench.json, record)
    return record


def _rates(prepared: Prepared, half: int) -> tuple[list[float], list[float]]:
    """Images a second in each turn: on real images, and on one batch."""
    steps = 4 * _TURNS * half
    assert prepared.config.batch_size is not None
    long = replace(
        prepared,
        config=replace(
            prepared.config, steps=steps, epochs=None, warmup_epochs=None, mask_schedule="const", save_every=steps,
            keep_every=None,
        ),
    )  # fmt: skip
    model = fresh_model(long)
    trainer = make_trainer(long, model)
    if long.config.compile:
        model.compile()
    trainer.settings = replace(trainer.settings, log_every=half)
    trainer.batches = _by_turns(trainer.batches, long.config.accumulate, 2 * half)
    watched = _Watch()
    trainer.run(observers=[watched])
    quarters = watched.rates  # of each turn two: real images in the first of every four, one batch in the last two
    return quarters[5::4], quarters[7::4]


def _by_turns(batches: Batches, accumulate: int, steps: int) -> Batches:
    """Real ones for some steps, then the last of them again for as many, and so on."""

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
    """Keeps the rates that a run logs."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def log(self, row: Mapping[str, Any]) -> None:
        if "images_per_second" in row:
            self.rates.append(row["images_per_second"])

    def close(self) -> None:
        pass
