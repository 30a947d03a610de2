"""How options are shown in a command's help."""

from typing import Any

import tyro


def shown(hint: str, metavar: str) -> Any:
    """The mark of an option that is None until a value is chosen when the work begins.

    Args:
        hint: which value that will be.
        metavar: what a given value is called.
    """
    return tyro.conf.arg(help_behavior_hint=f"(default: {hint})", metavar=metavar)
