"""What was loaded of a model's file, in numbers and in one line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_NUM_NAMED = 3
MAX_SHOWN = 200
"""Characters of a text from a file that errors show."""


@dataclass(frozen=True, kw_only=True)
class PartReport:
    """What was loaded of the encoder or the decoder.

    Attributes:
        tensors: tensors that the file held.
        tensors_expected: tensors that the part has.
        parameters: values in the former.
        parameters_expected: values in the latter.
    """

    tensors: int
    tensors_expected: int
    parameters: int
    parameters_expected: int

    @property
    def in_tensors(self) -> str:
        """As `4/8`."""
        return f"{self.tensors}/{self.tensors_expected}"

    @property
    def in_parameters(self) -> str:
        """As `1.2M`, or `0.6M of 1.2M`."""
        whole = _short(self.parameters_expected)
        return whole if self.tensors == self.tensors_expected else f"{_short(self.parameters)} of {whole}"


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a file held, and what was made of it.

    Attributes:
        encoder: what was loaded of the encoder.
        decoder: what was loaded of the decoder.
        missing: tensors that the file did not hold; they are freshly initialised.
        ignored: tensors in the file that the model does not have.
        probe: largest difference between the probe in the file and the loaded model's, relative; None: not compared.
        channels: names of the channels; None: not known.
        origin: recipe, data_source, data_fingerprint, init_from, imported_from, versions and licence, as far as they
            are known.
        notes: what else a reader must know.
        classes: that the head tells apart; None without a head.
    """

    encoder: PartReport
    decoder: PartReport
    missing: tuple[str, ...]
    ignored: tuple[str, ...]
    probe: float | None
    channels: tuple[str, ...] | None
    origin: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    classes: int | None = None

    def line(self) -> str:
        """All of it in one line for a person."""
        parts = [
            f"loaded encoder {self.encoder.in_tensors} tensors ({self.encoder.in_parameters} parameters)",
            f"decoder {self.decoder.in_tensors} ({self.decoder.in_parameters})"
            if self.decoder.tensors_expected
            else "no decoder",
        ]
        parts += [] if self.classes is None else [f"head of {self.classes:,} classes"]
        parts += [f"not in the file and fresh: {first_names(self.missing)}"] if self.missing else []
        parts += [f"ignored: {first_names(self.ignored)}"] if self.ignored else []
        parts += self.notes
        if self.probe is None and self.notes:  # weights of others hold none, and their notes tell what was compared
            return ", ".join(parts)
        if self.probe is not None:
            parts.append(f"probe reproduced (largest difference {self.probe:.0e})")
        else:
            parts.append("probe not compared: " + ("tensors are missing" if self.missing else "the file holds none"))
        return ", ".join(parts)


def count_part(prefix: str, expected: Mapping[str, Tensor], found: set[str]) -> PartReport:
    """What was found of the tensors whose names begin so."""
    sizes = {name: tensor.numel() for name, tensor in expected.items() if name.startswith(prefix)}
    there = [size for name, size in sizes.items() if name in found]
    return PartReport(
        tensors=len(there),
        tensors_expected=len(sizes),
        parameters=sum(there),
        parameters_expected=sum(sizes.values()),
    )


def _short(number: int) -> str:
    return f"{number / 1e6:.1f}M" if number >= 1e5 else f"{number:,}"


def first_names(names: Sequence[str]) -> str:
    """The first names."""
    shown = [printable(name) for name in names[:_NUM_NAMED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def printable(text: str) -> str:
    """Text from a file, which may hold any: control characters are escaped, and what is long is cut."""
    return (text if text.isprintable() else repr(text))[:MAX_SHOWN]
