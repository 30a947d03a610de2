"""Whether the package of a tracker is there; it is not imported, and neither is PyTorch."""

from collections.abc import Sequence
from importlib.util import find_spec

from mae.errors import UsageError

_EXTRAS = ("wandb", "mlflow")
"""Trackers with a package of the same name, which is an extra of ours of that name; TensorBoard comes with us."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed.

    Args:
        names: trackers, as `--log-to` has them.

    Raises:
        UsageError: the first whose package is missing.
    """
    for name in names:
        if name in _EXTRAS and not _is_installed(name):
            raise UsageError(
                f"--log-to {name} needs the package {name}, which is not installed: pip install 'openmae[{name}]'"
            )


def _is_installed(package: str) -> bool:
    found = find_spec(package)
    # A folder without code is found too, such as the wandb/ that W&B leaves where it was used.
    return found is not None and found.origin is not None
