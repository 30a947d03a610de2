"""Counting the files of a source that cannot be read."""

from collections.abc import Iterable

from mae.errors import MAEError

_SHOWN = 5


class UnreadableFiles:
    """The files of a source that cannot be read, and how many are allowed.

    Attributes:
        messages: what is wrong with each, in the order they were met.
    """

    def __init__(self, *, name: str, total: int, max_unreadable: float) -> None:
        self.messages: dict[str, None] = {}
        self._name, self._total, self._share = name, total, max_unreadable

    def add(self, messages: Iterable[str]) -> None:
        """Adds files, each once."""
        self.messages.update(dict.fromkeys(messages))

    def check(self) -> None:
        """Raises `MAEError` if they are more than allowed."""
        if len(self.messages) <= self._share * self._total:
            return
        shown = "; ".join(list(self.messages)[:_SHOWN])
        more = f"; and {len(self.messages) - _SHOWN} more" if len(self.messages) > _SHOWN else ""
        found = f"{len(self.messages):,}"
        if len(self.messages) < self._total:  # the others may not have been tried
            found = f"at least {found}"
        raise MAEError(
            f"{self._name}: {found} of {self._total:,} images cannot be used, more than the allowed "
            f"fraction of {self._share:g}: {shown}{more}. Remove or repair a few bad files, or list the others in a "
            ".txt file and give that; 'mae pretrain' also does without them by a larger --max-unreadable. Where most "
            "are like this, ask for what they hold or give others"
        )
