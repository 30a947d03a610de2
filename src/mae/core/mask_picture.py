"""A mask as a notebook shows it: the grid of each sample, and how many tokens are what."""

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from mae import fragments

if TYPE_CHECKING:
    from mae.core.types import MaskPlan

_MOST_SAMPLES = 8
ROLE_COLOURS: Mapping[str, str] = {"visible": "#e7d9b0", "predicted": "#2f5d8a", "left out": "#9aa0a6"}
"""Bright, dark, grey: told apart without colours too."""


def mask_html(plan: "MaskPlan") -> str:
    """The masks of the first samples side by side, and their numbers below; a grid of more axes slice under slice."""
    batch, num_tokens = plan.hidden.shape
    columns = num_tokens if plan.grid is None else plan.grid[-1]
    roles = plan.take(slice(0, _MOST_SAMPLES)).roles()
    counts = [Counter(sample) for sample in roles]
    pictures = "".join(
        fragments.cells(
            [sample[start : start + columns] for start in range(0, num_tokens, columns)],
            ROLE_COLOURS,
            label=f"Mask of sample {number}: " + ", ".join(f"{count[role]} {role}" for role in ROLE_COLOURS),
        )
        for number, (sample, count) in enumerate(zip(roles, counts, strict=True), 1)
    )
    hidden = plan.hidden.float().mean().item()
    key = " ".join(f'<span style="color:{colour}">■</span> {role}' for role, colour in ROLE_COLOURS.items())
    shape = "x".join(map(str, plan.grid)) if plan.grid is not None and prod(plan.grid) == num_tokens else "in one row"
    told = [
        ("samples", f"{batch:,}" + (f", the first {_MOST_SAMPLES} are drawn" if batch > _MOST_SAMPLES else "")),
        ("tokens of each", f"{num_tokens:,} ({shape})"),
        ("visible", f"{plan.visible.shape[1]:,}: the encoder sees them"),
        ("masked", f"{hidden:.1%} of the tokens: the loss counts them"),
        ("predicted", f"{plan.predicted.shape[1]:,}: the decoder predicts them"),
    ]
    return f"<div>{pictures}</div><div>{key}</div>{fragments.table('MaskPlan', told)}"
