"""What studies measure of each run, and how a number is printed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mae.report.figures.canvas import readable

Kind = Literal["share", "seconds", "number", "decibel"]

_UNITS: Mapping[Kind, str] = {"share": "%", "seconds": "s", "number": "", "decibel": "dB"}


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number that is measured of each run.

    Attributes:
        name: its key in `RunResult.numbers`.
        title: for readers, such as "linear probe, top-1".
        better: which direction is better; None where a variant is neither better nor worse for it.
        kind: how it is printed: a share of 0.445 as 44.5 %, its differences in points.
    """

    name: str
    title: str
    better: Literal["higher", "lower"] | None
    kind: Kind

    @property
    def unit(self) -> str:
        """Unit of its values; empty for a plain number."""
        return _UNITS[self.kind]

    @property
    def gap_unit(self) -> str:
        """Unit of differences between its values: points for shares."""
        return "points" if self.kind == "share" else self.unit

    def digits(self, value: float) -> str:
        """The value as printed, without its unit; shares are in [0, 1]."""
        match self.kind:
            case "share":
                return f"{100 * value:.1f}"
            case "decibel":
                return f"{value:.2f}"
            case _:  # a mean of 70 is 70.0, as its neighbours are 71.3 and 69.8
                return f"{value:#.3g}".removesuffix(".") if abs(value) < 999.5 else readable(value)

    def gap_digits(self, value: float, *, sign: bool = False) -> str:
        """A difference or a standard deviation as printed, without its unit.

        Args:
            value: in the units of the values.
            sign: print a plus before positive values.
        """
        short = self.kind in ("seconds", "number") and abs(value) < 99.5  # two digits are enough
        text = f"{value:#.2g}".removesuffix(".") if short else self.digits(value)
        if not any(digit in text for digit in "123456789"):
            text = text.removeprefix("-")  # no "-0.0"
        return f"+{text}" if sign and value > 0 else text


NUM_NEIGHBOURS = 20
"""Of k-NN; fixed beforehand, so that no variant is shown at its luckiest."""
COMMON_MASK_RATIO = 0.75
"""At which the reconstructions of all variants are evaluated and shown."""

LINEAR_PROBE = Metric(name="linear_probe", title="linear probe, top-1", better="higher", kind="share")
FINETUNE = Metric(name="finetune", title="fine-tuning, top-1", better="higher", kind="share")
KNN = Metric(name="knn", title="k-NN, top-1", better="higher", kind="share")
PSNR = Metric(name="psnr", title="PSNR of masked pixels", better="higher", kind="decibel")
PSNR_TRUE_STATISTICS = Metric(
    name="psnr_true_statistics",
    title="PSNR of masked pixels, true patch statistics given",
    better="higher",
    kind="decibel",
)
SSIM = Metric(name="ssim", title="SSIM of masked pixels", better="higher", kind="number")
LAPLACIAN = Metric(name="laplacian", title="high-frequency error of masked pixels", better="lower", kind="number")
LOSS = Metric(name="loss", title="final reconstruction loss of training", better=None, kind="number")
EPOCH = Metric(name="epoch_seconds", title="time per epoch", better=None, kind="seconds")
SECONDS = Metric(name="seconds", title="training time", better=None, kind="seconds")

FEATURES = (LINEAR_PROBE, FINETUNE, KNN)
RECONSTRUCTION = (PSNR, PSNR_TRUE_STATISTICS, SSIM, LAPLACIAN)
TRAINING = (LOSS, EPOCH, SECONDS)
