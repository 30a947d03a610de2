"""Public weights of masked autoencoders: where each file is, what it holds, its checksum and its licence.

The data is in `catalogue.toml`. No PyTorch here: the command line prints the list at once.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

from mae import records
from mae.errors import UsageError

MODELS = {
    "base": "mae_vit_base_patch16_dec512d8b",
    "large": "mae_vit_large_patch16_dec512d8b",
    "huge": "mae_vit_huge_patch14_dec512d8b",
}
"""The model preset of each size: all of these weights have the paper's sizes, decoder and 224-pixel images."""

PARAMETERS = {"base": (85_647_360, 26_008_320), "large": (303_099_904, 26_139_392), "huge": (630_435_840, 26_178_124)}
"""Trained parameters of encoder and decoder."""

_HEADS = {"base": 769 * 1000, "large": 1025 * 1000, "huge": 1281 * 1000}

_FILE = Path(__file__).with_suffix(".toml")
_MAX_BYTES = 16  # per parameter: four for the weight, eight for an optimiser's state, and some to spare
_DIGITS = {"SHA-256": 64, "MD5": 32}
_NUM_NEAREST = 3


@dataclass(frozen=True, kw_only=True)
class PublicWeights:
    """A file of weights that anyone can download.

    Attributes:
        name: what the user calls it, such as `official/base`.
        url: of the file.
        size: of the model, see `MODELS`.
        contents: what it holds.
        licence: of the weights.
        licence_source: where it is published.
        num_bytes: of the file; None: unknown.
        sha256: the first hexadecimal digits of its checksum, as many as are published, maybe none.
        md5: likewise.
        checksum_source: where the checksum is published; empty if none is.
        norm_pix_loss: whether its decoder predicts per-patch normalised pixels; None: unknown, or no decoder.
        norm_eps: epsilon of its layer norms.
    """

    name: str
    url: str
    size: Literal["base", "large", "huge"]
    contents: Literal["encoder", "encoder and decoder", "classifier"]
    licence: str
    licence_source: str
    num_bytes: int | None = None
    sha256: str = ""
    md5: str = ""
    checksum_source: str = ""
    norm_pix_loss: bool | None = None
    norm_eps: float = 1e-6

    @property
    def parameters(self) -> int:
        """Trained parameters, including a classifier's head for the classes of ImageNet."""
        encoder, decoder = PARAMETERS[self.size]
        return encoder + {"encoder": 0, "encoder and decoder": decoder, "classifier": _HEADS[self.size]}[self.contents]

    @property
    def most_bytes(self) -> int:
        """Upper bound of the file's size."""
        return self.num_bytes or _MAX_BYTES * self.parameters

    @property
    def checksum(self) -> str:
        """The published checksums, in words."""
        published = {"SHA-256": self.sha256, "MD5": self.md5}
        parts = [
            f"{kind} {digits}"
            if len(digits) == _DIGITS[kind]
            else f"{kind} {digits}… (only {len(digits)} digits are published)"
            for kind, digits in published.items()
            if digits
        ]
        return ", ".join(parts) or "none published"


@cache
def public_weights() -> Mapping[str, PublicWeights]:
    """All of them by name, grouped by publisher."""
    weights = {}
    for publisher, table in tomllib.loads(_FILE.read_text(encoding="utf-8")).items():
        shared = {key: value for key, value in table.items() if not isinstance(value, dict)}
        for key, own in table.items():
            if isinstance(own, dict):
                name = f"{publisher}/{key}"
                values = {**shared, **own, "name": name, "size": key.partition("-")[0]}
                weights[name] = records.from_json(PublicWeights, values, what=f"{name}:")
    return weights


def find_public(name: str) -> PublicWeights | None:
    """The weights of this name; None for a name of another kind.

    Raises:
        UsageError: a known publisher, but no weights of that name.
    """
    known = public_weights()
    publisher, slash, _ = name.partition("/")
    if name in known or not (slash and publisher in {each.partition("/")[0] for each in known}):
        return known.get(name)
    near = ", ".join(get_close_matches(name, known, n=_NUM_NEAREST, cutoff=0.4))
    raise UsageError(
        f"{name} is neither a file nor the name of public weights; did you mean {near}? ('mae list weights' lists all)"
    )


def terms(licence: str) -> str:
    """A licence, with a note if its name forbids commercial use."""
    forbids = re.search(r"\bnc\b|non-?commercial", licence, flags=re.IGNORECASE)
    return f"{licence}: not for commercial use" if forbids else licence
