"""The checker of shapes and types in signatures while testing."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from beartype import BeartypeConf, beartype

# As everywhere in Python, a whole number passes where a float is expected.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checker(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its signature checked, but for components: those check their options, and tests read how."""
    checked = _check(function)
    if function.__name__ != "__init__":
        return checked

    @wraps(checked)
    def unless_component(self: Any, *args: Any, **options: Any) -> Any:
        is_component = hasattr(self, "slot") and hasattr(self, "kind")
        return None if is_component else checked(self, *args, **options)

    return unless_component
