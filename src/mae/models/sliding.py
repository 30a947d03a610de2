"""A map of classes for an image of any size, by a model that sees one size: windows that overlap, averaged."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from mae.errors import MAEError
from mae.modalities.images.crop import resize
from mae.models.given_images import scaled, statistics_of
from mae.models.preprocess import Preprocessing

Logits = Callable[[Float[Tensor, "B C H W"]], Float[Tensor, "B K H W"]]
"""Normalised images of the model's size to unnormalised log-probabilities of the classes of their pixels."""

_MOST_LENGTHY = 64
"""Long side over short side of an image up to which its windows, and their probabilities, fit in memory."""
_WINDOWS = 16
"""Windows that the model is given at a time."""
_VALUES = 1 << 24
"""Probabilities that are resized at a time."""


def map_of_classes(
    image: UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"],
    wanted: Preprocessing,
    logits: Logits,
    *,
    device: torch.device,
) -> UInt8[Tensor, "h w"]:
    """The class of each pixel of an image, on the CPU.

    The image is resized until it just covers the model's size, whatever its shape; windows of that size, two thirds of
    it apart, are told the classes of, and their probabilities averaged (as DINOv3 evaluates: 512 and 341 pixels).

    Args:
        image: see `ImageSet.get`.
        wanted: the model's size and statistics.
        logits: of normalised windows on the device.
        device: where it computes.

    Raises:
        MAEError: an image too lengthy.
    """
    height, width = image.shape[1:]
    if max(height, width) > _MOST_LENGTHY * min(height, width):
        raise MAEError(
            f"an image of {height} x {width} pixels; expected one at most {_MOST_LENGTHY} times as long as wide: cut it"
        )
    mean, std = statistics_of(wanted)
    whole = (scaled(resize(image, covering((height, width), wanted.img_size), interpolation="bilinear")) - mean) / std
    return likeliest(sliding_probabilities(whole.to(device), wanted.img_size, logits), (height, width)).cpu()


def covering(size: tuple[int, int], window: tuple[int, int], *, scale: float = 1.0) -> tuple[int, int]:
    """An image's height and width when it is resized to just cover a window, or to `scale` times that."""
    factor = scale * max(window[0] / size[0], window[1] / size[1])
    height, width = (max(1, round(factor * side)) for side in size)
    return height, width


def starts(length: int, window: int) -> list[int]:
    """Where windows begin that cover a length of at least one of them, two thirds of a window apart; the last ends with
    it."""
    stride = max(1, 2 * window // 3)
    return [min(start, length - window) for start in range(0, max(length - window + stride, 1), stride)]


def sliding_probabilities(
    image: Float[Tensor, "C H W"], window: tuple[int, int], logits: Logits
) -> Float32[Tensor, "K H W"]:
    """The probability of each class at each pixel, averaged over all windows that hold it."""
    height, width = window
    corners = [(top, left) for top in starts(image.shape[1], height) for left in starts(image.shape[2], width)]
    total: Tensor | None = None
    counts = image.new_zeros(image.shape[1:], dtype=torch.float32)
    for first in range(0, len(corners), _WINDOWS):
        some = corners[first : first + _WINDOWS]
        cut = torch.stack([image[:, top : top + height, left : left + width] for top, left in some])
        probabilities = logits(cut).float().softmax(dim=1)
        if total is None:
            total = probabilities.new_zeros(probabilities.shape[1], *image.shape[1:])
        for (top, left), found in zip(some, probabilities, strict=True):
            total[:, top : top + height, left : left + width] += found
            counts[top : top + height, left : left + width] += 1
    assert total is not None
    return total / counts


def likeliest(probabilities: Float[Tensor, "K h w"], size: tuple[int, int]) -> UInt8[Tensor, "H W"]:
    """The class of the largest probability at each pixel of another size, the lowest of equal ones.

    Some classes are resized at a time: all of them, of a large image, would not fit in memory.
    """
    best = probabilities.new_full(size, -1.0)
    classes = torch.zeros(size, dtype=torch.uint8, device=probabilities.device)
    several = max(1, _VALUES // (size[0] * size[1]))
    for first in range(0, len(probabilities), several):
        some = probabilities[first : first + several].unsqueeze(0)
        values, places = interpolate(some, size, mode="bilinear", align_corners=False)[0].max(dim=0)
        better = values > best
        best = torch.where(better, values, best)
        classes = torch.where(better, (places + first).to(torch.uint8), classes)
    return classes
