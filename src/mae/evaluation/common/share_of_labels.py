"""How much of the labels is used, as people write it. No PyTorch here: options are checked with it."""

from mae.errors import UsageError


def read_share(share: float | str) -> float:
    """A share in (0, 1] from `1%`, `0.01` or a number.

    Raises:
        UsageError: it is none.
    """
    text = str(share).strip()
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        hint = f"; did you mean {text}%?" if 1 < value <= 100 and not text.endswith("%") else ""
        raise UsageError(f"share {text!r} is not a share of the labels; expected such as 1% or 0.01, up to 100%{hint}")
    return value


def shown_share(fraction: float) -> str:
    """A share as tables show it, such as 1 %."""
    return f"{100 * fraction:.6g} %"
