"""What fine-tuning does to whole batches: random erasing, mixup and cutmix, on any device."""

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor
from torch.nn.functional import one_hot

from mae.modalities.images.crop import box_sides
from mae.randomness import Stream, drawing_from, normal, uniform

_ATTEMPTS = 10
_ERASED_SHARE = (0.02, 1 / 3)
_ERASED_RATIO = (0.3, 1 / 0.3)


def erase(
    images: Float32[Tensor, "B C H W"], keys: Int64[Tensor, " B"], *, probability: float = 0.25
) -> Float32[Tensor, "B C H W"]:
    """Puts standard normal noise in place of one rectangle of some images (Zhong et al. 2017, as timm does it).

    Ten times an area of 2 to 33 % and an aspect ratio of 0.3 to 3.3 are drawn, and the first rectangle smaller than
    the image is used; if there is none, the image is kept. What is done to an image depends on its key alone.

    Args:
        images: normalised.
        keys: the samples' keys; the rectangles are drawn on the CPU, so keys there spare a wait for the device.
        probability: share of the images that lose a rectangle.
    """
    inside = _rectangles(keys.cpu(), images.shape[-2], images.shape[-1], probability)
    changed = inside.any(dim=(1, 2)).nonzero().squeeze(1)
    inside, rows = inside[changed].to(images.device), changed.to(images.device)
    noise = normal(keys[changed].to(images.device), images[0].numel(), Stream.ERASE_NOISE).view(-1, *images.shape[1:])
    return images.index_copy(0, rows, torch.where(inside.unsqueeze(1), noise, images[rows]))


def _rectangles(
    keys: Int64[Tensor, " B"], height: int, width: int, probability: float
) -> Bool[Tensor, "B {height} {width}"]:
    """Which pixels of each image are erased."""
    numbers = uniform(keys, 2 * _ATTEMPTS + 3, Stream.ERASE).double()
    area_at, ratio_at, rest = torch.split(numbers, [_ATTEMPTS, _ATTEMPTS, 3], dim=1)
    areas = torch.full((len(keys), 1), height * width)
    tall, wide = box_sides(area_at, ratio_at, areas, scale=_ERASED_SHARE, ratio=_ERASED_RATIO)
    fits = (tall < height) & (wide < width)
    first = fits.long().argmax(dim=1, keepdim=True)
    tall, wide = tall.gather(1, first), wide.gather(1, first)
    top, left = ((rest[:, :1] * (height - tall + 1)).long(), (rest[:, 1:2] * (width - wide + 1)).long())
    row, column = torch.arange(height), torch.arange(width)
    rows, columns = (row >= top) & (row < top + tall), (column >= left) & (column < left + wide)
    erased = fits.any(dim=1) & (rest[:, 2] < probability)
    return erased[:, None, None] & rows.unsqueeze(2) & columns.unsqueeze(1)


def mix(
    images: Float32[Tensor, "B C H W"],
    labels: Int64[Tensor, " B"],
    *,
    num_classes: int,
    seed: int,
    mixup: float = 0.8,
    cutmix: float = 1.0,
    switch: float = 0.5,
    before: tuple[Float32[Tensor, "C H W"], Int64[Tensor, ""]] | None = None,
) -> tuple[Float32[Tensor, "B C H W"], Float[Tensor, "B {num_classes}"]]:
    """Mixes each image and its label with those of the one before it, all images of the batch by the same share.

    Either mixup (Zhang et al. 2018) or cutmix (Yun et al. 2019), for the whole batch. A batch of one is not changed.
    Labels are not smoothed: `cross_entropy(..., label_smoothing=0.1)` does that to soft targets as well.

    Args:
        images: normalised.
        labels: class numbers.
        num_classes: K.
        seed: what is drawn depends on it alone (and on the version of PyTorch), on every device.
        mixup: both parameters of the Beta distribution that mixup draws its share from, above 0.
        cutmix: the same for cutmix.
        switch: probability of cutmix; 0 always takes mixup, 1 always cutmix.
        before: the image and label before these, which are then a part of a batch; None: the last of these.

    Returns:
        The images and their soft targets, which sum to 1.
    """
    from torchvision.transforms.v2 import CutMix, MixUp  # slow to import, and only fine-tuning needs it

    if before is not None:
        images, labels = torch.cat([before[0][None], images]), torch.cat([before[1][None], labels])
    if len(images) == 1:
        return images, one_hot(labels, num_classes).float()
    with drawing_from(seed):
        cuts = torch.rand(()).item() < switch
        mixer = CutMix(alpha=cutmix, num_classes=num_classes) if cuts else MixUp(alpha=mixup, num_classes=num_classes)
        mixed, targets = mixer(images, labels)
    return (mixed, targets) if before is None else (mixed[1:], targets[1:])
