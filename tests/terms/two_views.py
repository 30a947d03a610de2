"""Projections of views, and what lightly makes of them."""

from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import normalize

IMAGES, VIEWS, DIM, DIRECTIONS = 9, 3, 5, 40


def projections(images: int = IMAGES, views: int = VIEWS, dim: int = DIM, *, seed: int = 0) -> Tensor:
    """`[N, views, P]`, neither centred nor of std 1; views of an image are related."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(images, 1, dim, generator=generator)
    view = torch.randn(images, views, dim, generator=generator)
    scale = torch.linspace(0.3, 2.0, dim)
    return (image + 0.4 * view) * scale + 0.3


def some_directions(dim: int = DIM, count: int = DIRECTIONS, *, seed: int = 1) -> Tensor:
    """Unit vectors in columns."""
    return normalize(torch.randn(dim, count, generator=torch.Generator().manual_seed(seed)), dim=0)


def by_lightly(loss: torch.nn.Module, z: Tensor, directions: Tensor) -> Tensor:
    """A loss of lightly over global and local views; it is lent these directions, which it would draw itself.

    All views are global ones and local ones too: means over views are then those over all.
    """
    views = z.transpose(0, 1)
    with patch("torch.randn", lambda *size, **options: directions.clone()):
        value: Tensor = loss(global_proj=views, local_proj=views)
    return value


def gradient(value_of, z: Tensor) -> Tensor:
    z = z.clone().requires_grad_()
    value_of(z).backward()
    assert z.grad is not None
    return z.grad
