"""TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from mae.training.log import LogRow


class TensorBoard:
    """Writes each number of a row as a scalar over samples seen.

    Args:
        folder: where the event files go.
        start_samples: samples seen before this part of the run.
    """

    def __init__(self, folder: Path, *, start_samples: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only a run needs it

        self._writer = SummaryWriter(str(folder), purge_step=start_samples + 1 if start_samples else 0)

    def log(self, row: LogRow) -> None:
        """Write each number of a row, and a warning as text."""
        if "warning" in row:
            self._writer.add_text("warning", row["warning"]["text"], row["samples"])
            return
        for name, value in row.items():
            if isinstance(value, Mapping):
                for part, number in value.items():
                    self._writer.add_scalar(f"{name}/{part}", number, row["samples"])
            elif name not in ("step", "samples") and value is not None:
                self._writer.add_scalar(name, value, row["samples"])

    def close(self) -> None:
        """Flush."""
        self._writer.close()
