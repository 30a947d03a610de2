"""Class token and mean of the patch tokens side by side, as one feature."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mae.evaluation.extractors.feature_arrays import write_header

CLS_AND_MEAN = ("cls", "mean")
"""Features that are also evaluated side by side where a model has both."""

_CHUNK = 8192


@contextmanager
def with_joined(features: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[Mapping[str, tuple[Tensor, Tensor]]]:
    """Training and test features by name, with `cls+mean` where there are both, in a file until the context ends."""
    if not all(name in features for name in CLS_AND_MEAN):
        yield features
        return
    with TemporaryDirectory(prefix="mae-joined-", ignore_cleanup_errors=True) as aside:  # Windows keeps mapped files
        train, test = (
            _join([features[name][part] for name in CLS_AND_MEAN], Path(aside) / f"{part}.npy") for part in (0, 1)
        )
        yield {**features, "+".join(CLS_AND_MEAN): (train, test)}


def _join(parts: list[Float[Tensor, "n _"]], path: Path) -> Float[Tensor, "n D"]:
    """Features side by side in a file, so that a million of them need no memory."""
    width = sum(part.shape[1] for part in parts)
    with path.open("wb") as file:
        write_header(file, np.dtype(np.float32), (len(parts[0]), width))
        for rows in zip(*(part.split(_CHUNK) for part in parts), strict=True):
            file.write(torch.cat(rows, dim=1).numpy().data)
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
