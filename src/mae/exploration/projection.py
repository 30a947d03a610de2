"""Places of images on a plane, by their features."""

from importlib import import_module
from importlib.util import find_spec
from typing import get_args

import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn.functional import normalize

from mae.errors import UsageError
from mae.evaluation.common.principal_axes import principal_axes
from mae.exploration.explored import Projection
from mae.records import check_known

_UMAP_NEIGHBOURS = 15  # umap-learn's own default


def check_projection(name: str) -> None:
    """Refuse a projection that cannot be made.

    Raises:
        UsageError: an unknown one, or one whose package is not installed.
    """
    check_known([name], get_args(Projection), what="map")
    if name == "umap" and find_spec("umap") is None:
        raise UsageError("--map umap needs umap-learn; install it with: pip install 'openmae[umap]', or use --map pca")


def project(features: Float[Tensor, "n D"], projection: Projection, *, seed: int) -> tuple[Float32[Tensor, "n 2"], str]:
    """Places on a plane, and a sentence on how to read them.

    Args:
        features: minus their mean.
        projection: `pca`, or `umap` (McInnes et al. 2018) by the cosine of the features.
        seed: decides how UMAP begins.
    """
    if projection == "umap":
        return _umap(features, seed), (
            "UMAP: images near each other are alike to the model; distances between groups, and the sizes of groups, "
            "mean little."
        )
    places, shares = _pca(features)
    return places, (
        f"Principal components: across {shares[0]:.0%} of the variance, up {shares[1]:.0%}; what differs in the other "
        f"{max(0.0, 1 - sum(shares)):.0%} is not seen, so images in the same place need not be alike."
    )


@torch.no_grad()
def _pca(features: Float[Tensor, "n D"]) -> tuple[Float32[Tensor, "n 2"], tuple[float, float]]:
    """The first two principal components, and their shares of the variance; the largest loading is positive."""
    centred = features.double()
    squares, axes = principal_axes(centred)
    largest = axes[:2].T
    largest = torch.nn.functional.pad(largest, (0, 2 - largest.shape[1]))  # of features of width 1
    deciding = largest.gather(0, largest.abs().argmax(dim=0, keepdim=True))
    shares = squares / squares.sum().clamp(min=torch.finfo(torch.float64).tiny)
    across, up = (*shares[:2].tolist(), 0.0)[:2]
    return (centred @ (largest * deciding.sign())).float(), (across, up)


def _umap(features: Float[Tensor, "n D"], seed: int) -> Float32[Tensor, "n 2"]:
    reducer = import_module("umap").UMAP(
        n_components=2,
        n_neighbors=min(_UMAP_NEIGHBOURS, len(features) - 1),
        metric="cosine",
        random_state=seed,
        n_jobs=1,  # more would not be the same each time
        init="pca",  # the spectral beginning fails on few images
    )
    return torch.from_numpy(reducer.fit_transform(normalize(features.float(), dim=1).numpy())).float()
