"""Runs that end in their midst and go on."""

import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import mae


def stop_in_step(patch: pytest.MonkeyPatch, number: int) -> None:
    """Let the `number`-th step of AdamW from now on, counted from 0, come along with the signal to stop."""
    step, steps = torch.optim.AdamW.step, count()

    def stopping(self: Any, *args: Any) -> Any:
        if next(steps) == number:
            signal.raise_signal(signal.SIGTERM)
        return step(self, *args)

    patch.setattr(torch.optim.AdamW, "step", stopping)


class Stop:
    """Ends a run in its midst, as Ctrl-C would."""

    def log(self, row: dict[str, Any]) -> None:
        if row["step"] == 3 and "loss" in row:
            raise KeyboardInterrupt

    def close(self) -> None:
        pass


def whole_and_resumed(
    folder: Path, pretrain: Callable[..., mae.PretrainResult], *, meanwhile: Callable[[], None] = lambda: None
) -> tuple[mae.PretrainResult, mae.PretrainResult]:
    """A run, and the same one stopped in its third step and resumed, with something happening in between."""
    whole = pretrain(folder / "whole")
    with pytest.raises(KeyboardInterrupt):
        pretrain(folder / "parts", callbacks=[Stop()])
    meanwhile()
    return whole, mae.pretrain(out=folder / "parts", resume=True, quiet=True)
