"""What a recipe reached when others ran it: the loss over the run, kept as a small file beside the recipes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from mae import records
from mae.config import RunConfig, is_changeable
from mae.core.method import SLOTS, defaults_of
from mae.errors import UsageError
from mae.recipes import list_recipes
from mae.report.figures.curves import Line

MOST_POINTS = 60

_CURVES = Path(__file__).parent / "curves"
_NOT_KEPT = {"seed", "max_unreadable", "mean", "std", "pixel_dtype"}
"""Options that say nothing of the curve, or, as folders do, of another machine."""
_LENGTH_AND_RATE = frozenset(
    {
        "precision",
        "epochs",
        "steps",
        "batch_size",
        "lr",
        "base_lr",
        "min_lr",
        "weight_decay",
        "betas",
        "warmup_epochs",
        "clip_grad",
        "held_out",
    }
)
"""How a run is trained; all other fields say what its loss is a loss of, and losses of other things tell nothing."""


@dataclass(frozen=True, kw_only=True)
class ReferenceCurve:
    """The reconstruction loss of a recipe over samples seen, mean and spread over seeds.

    Attributes:
        config: what the runs were told, without what belongs to seed and machine: recipe, model and source too.
        images: in the source.
        fingerprint: of the source.
        seeds: of the runs, two or more.
        samples: seen, rising; the last is the run's end. At most 60 points.
        loss: the reconstruction term at each point: mean over the samples since the point before, then over the seeds.
        std: sample std over the seeds, point by point.
        mae_version: that made the curve.
        hardware: the runs were made on.
        date: of the last run's end.

    Raises:
        UsageError: values that contradict each other.
    """

    config: dict[str, Any]
    images: int
    fingerprint: str
    seeds: tuple[int, ...]
    samples: tuple[int, ...]
    loss: tuple[float, ...]
    std: tuple[float, ...]
    mae_version: str
    hardware: str
    date: str

    def __post_init__(self) -> None:
        if len(set(self.seeds)) < 2 or len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"a reference of seeds {list(self.seeds)}; expected two or more, each once")
        points = (len(self.samples), len(self.loss), len(self.std))
        if len(set(points)) > 1 or not 1 <= points[0] <= MOST_POINTS:
            raise UsageError(f"a reference of {points} points; expected as many of each, 1 to {MOST_POINTS}")
        if any(before >= after for before, after in pairwise((0, *self.samples))):
            raise UsageError("samples of a reference that do not rise; expected each above the one before")
        if not all(map(isfinite, (*self.loss, *self.std))) or min(self.std) < 0:
            raise UsageError("a reference with losses that are not finite or a std below 0")
        self._check_origin()

    def _check_origin(self) -> None:
        recipe, source = (str(self.config.get(name)) for name in ("recipe", "source"))
        if recipe not in list_recipes():
            raise UsageError(
                f"a reference of recipe {recipe!r}; expected one of the package: {', '.join(list_recipes())}"
            )
        if Path(source).is_absolute():
            raise UsageError(
                f"a reference on {source}, files of one's own; expected a set that is known by name, such as "
                "builtin:photos: nobody else has these images"
            )

    @classmethod
    def read(cls, path: Path) -> "ReferenceCurve":
        """The curve in a file.

        Raises:
            UsageError: it cannot be read, or is no reference curve.
        """
        return records.from_json(cls, records.read_json(path), what="entry")

    @property
    def label(self) -> str:
        """What it is, in a few words."""
        return f"recipe {self.config['recipe']}, {len(self.seeds)} seeds"

    def line(self, until: float) -> Line | None:
        """The curve as far as a run of `until` samples goes, its band one std up and down.

        None where such a run ends before the first point.
        """
        count = sum(place <= until for place in self.samples)
        if not count:
            return None
        pairs = list(zip(self.loss, self.std, strict=True))[:count]
        band = [loss - spread for loss, spread in pairs], [loss + spread for loss, spread in pairs]
        return Line(label=f"reference: {self.label}", x=self.samples[:count], y=self.loss[:count], band=band)

    def differences(self, config: RunConfig) -> list[str]:
        """How a run was trained otherwise than the reference, such as `steps 100 (reference 1500)`."""
        run = kept_config(config)
        names = [name for name in run if name in _LENGTH_AND_RATE and run[name] != self.config.get(name)]
        return [f"{name} {run[name]} (reference {self.config.get(name)})" for name in names]


def reference_for(config: RunConfig) -> ReferenceCurve | None:
    """The reference of a run: same recipe, model, objective and source; None where there is none.

    Runs may differ in length, batch, rate and machine. A run on files of the user's has no reference: losses on other
    images tell nothing.

    Args:
        config: of a run, resolved.
    """
    kept = kept_config(config)
    for path in sorted(_CURVES.glob("*.json")):
        curve = ReferenceCurve.read(path)
        if _is_of_the_same(curve.config, kept):
            return curve
    return None


def kept_config(config: RunConfig) -> dict[str, Any]:
    """Of a run's configuration what a reference keeps: options by flat name, as JSON has them."""
    flat = {name: value for name, value in config.flat().items() if not is_changeable(name) and name not in _NOT_KEPT}
    return json.loads(records.json_text(flat))


def _is_of_the_same(stored: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    """Whether two runs had the same recipe, model, objective and source; options younger than the file are default."""
    defaults = RunConfig().flat()
    for slot in SLOTS:
        defaults |= defaults_of(slot, kept[slot]) if kept[slot] is not None else {}
    defaults = json.loads(records.json_text(defaults))
    names = {*stored, *kept} - _LENGTH_AND_RATE
    # Of a run whose model is not built yet, what its model decides is None.
    younger = {name: (None, defaults.get(name)) for name in names - stored.keys()}
    return all(kept.get(name) in younger.get(name, (stored.get(name),)) for name in names)
