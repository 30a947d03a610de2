"""Public weights of masked autoencoders: where each file lies, what it holds, its checksum and its terms.

They stand in `catalogue.toml`. No PyTorch here: the command line prints them at once.
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
"""The named model of each size: all of these weights have the paper's sizes, decoder and images of 224 pixels."""

PARAMETERS = {"base": (85_647_360, 26_008_320), "large": (303_099_904, 26_139_392), "huge": (630_435_840, 26_178_124)}
"""Trained ones of encoder and decoder."""

_HEADS = {"base": 769 * 1000, "large": 1025 * 1000, "huge": 1281 * 1000}

_FILE = Path(__file__).with_suffix(".toml")
_MOST_BYTES = 16  # a parameter: four for its weight, eight for what an optimiser keeps of it, and some
_DIGITS = {"SHA-256": 64, "MD5": 32}
_NUM_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class PublicWeights:
    """A file of weights that anybody can fetch.

    Attributes:
        name: what the user calls it, such as `official/base`.
        url: of the file.
        size: of the model, see `MODELS`.
        contents: what it holds.
        licence: the terms it comes under.
        licence_told: where they are told.
        num_bytes: of the file; None: nobody says.
        sha256: the first hexadecimal digits of its checksum, as many as are told, maybe none.
        md5: likewise.
        checksum_told: where; empty where none is.
        norm_pix_loss: whether its decoder predicts standardised patches; None: nobody says, or there is none.
        norm_eps: in its layer norms.
    """

    name: str
    url: str
    size: Literal["base", "large", "huge"]
    contents: Literal["encoder", "encoder and decoder", "classifier"]
    licence: str
    licence_told: str
    num_bytes: int | None = None
    sha256: str = ""
    md5: str = ""
    checksum_told: str = ""
    norm_pix_loss: bool | None = None
    norm_eps: float = 1e-6

    @property
    def parameters(self) -> int:
        """Trained ones; of a classifier those of its head on ImageNet's classes too."""
        encoder, decoder = PARAMETERS[self.size]
        return encoder + {"encoder": 0, "encoder and decoder": decoder, "classifier": _HEADS[self.size]}[self.contents]

    @property
    def most_bytes(self) -> int:
        """The file has no more."""
        return self.num_bytes or _MOST_BYTES * self.parameters

    @property
    def checksum(self) -> str:
        """What can be compared, in words."""
        told = {"SHA-256": self.sha256, "MD5": self.md5}
        parts = [
            f"{kind} {digits}" if len(digits) == _DIGITS[kind] else f"{kind} {digits}… ({len(digits)} digits are told)"
            for kind, digits in told.items()
            if digits
        ]
        return ", ".join(parts) or "none is published"


@cache
def public_weights() -> Mapping[str, PublicWeights]:
    """All of them by name, a publisher's together."""
    found = {}
    for publisher, table in tomllib.loads(_FILE.read_text(encoding="utf-8")).items():
        shared = {key: value for key, value in table.items() if not isinstance(value, dict)}
        for key, own in table.items():
            if isinstance(own, dict):
                name = f"{publisher}/{key}"
                values = {**shared, **own, "name": name, "size": key.partition("-")[0]}
                found[name] = records.from_json(PublicWeights, values, what=f"{name}:")
    return found


def find_public(name: str) -> PublicWeights | None:
    """The weights of a name; None where it is not meant as one of these.

    Raises:
        UsageError: this publisher has others.
    """
    known = public_weights()
    publisher, slash, _ = name.partition("/")
    if name in known or not (slash and publisher in {each.partition("/")[0] for each in known}):
        return known.get(name)
    near = ", ".join(get_close_matches(name, known, n=_NUM_SHOWN, cutoff=0.4))
    raise UsageError(
        f"{name} is not there, and no public weights are called so; nearest: {near} ('mae list weights' shows all)"
    )


def terms(licence: str) -> str:
    """A licence, with what its name says of commercial use."""
    forbids = re.search(r"\bnc\b|non-?commercial", licence, flags=re.IGNORECASE)
    return f"{licence}: not for commercial use" if forbids else licence
