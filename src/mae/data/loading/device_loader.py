"""Image sets small enough to be cached on the device, where the crops of a batch are made at once."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor

from mae.data.loading.loader import RawBatch, TrainingLoader
from mae.data.loading.sampler import RankOrder
from mae.errors import UsageError
from mae.modalities.images.crop import random_crop_boxes

_CUBIC = -0.5  # the bicubic kernel's free constant, as where crops are antialiased


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceLoader:
    """The batches of a `TrainingLoader`, from images cached on the device.

    The same images, crops and keys in the same order, except for rounding: uint8 pixels differ by at most 2 and by
    0.01 on average. There are no worker processes, and only numbers go to the device in a step.

    Attributes:
        loader: whose batches.
        device: where the images are.
    """

    loader: TrainingLoader
    device: torch.device

    def __post_init__(self) -> None:
        """Refuses images that do not fit one tensor, or cannot be cropped there.

        Raises:
            UsageError: a device of another kind than CUDA and CPUs; images that are not in memory, of several sizes or
                with missing values; or crops whose colours change, as by RandAugment.
        """
        if self.device.type == "mps":
            raise UsageError("--cache-on-device needs 64-bit floats, which MPS does not support: leave the option out")
        if obstacle := self._obstacle():
            raise UsageError(
                f"--cache-on-device needs images of one size that fit in memory, without missing values; those of "
                f"{self.loader.images.name} {obstacle}: leave the option out"
            )

    def _obstacle(self) -> str:
        """Why the images cannot be cached; empty: they can."""
        images = self.loader.images
        smallest, largest = images.size_range()
        if not images.in_memory:
            return "are too many to be kept decoded"
        if smallest != largest:
            return f"are {smallest[1]}x{smallest[0]} to {largest[1]}x{largest[0]} pixels"
        if images.nodata is not None:
            return "have missing values"
        if self.loader.augmentation.changes_colours:
            return "are to change colours (--color-jitter, --grayscale), which the loader does"
        return "are to be changed by RandAugment" if self.loader.augmentation.rand_augment else ""

    def order(self) -> RankOrder:
        """Which samples this process takes, step by step."""
        return self.loader.order()

    def iterate(self, start_step: int) -> Generator[RawBatch, None, None]:
        """Micro-batches from a step on, endlessly, on the device.

        Raises:
            UsageError: an image of another size than the first.
            MAEError: more unreadable files than allowed.
        """
        loader = self.loader
        pixels, broken = self._pixels()
        crops = loader.crops()
        for ids, keys in loader.order().from_step(start_step):
            shown, unreadable = crops.shown(ids, keys) if broken.intersection(ids) else (ids, [])
            loader.images.report_unreadable(unreadable)
            on_device = torch.tensor([ids, keys, shown]).to(self.device, non_blocking=True)
            yield RawBatch(
                images=self._cropped(pixels, on_device[2], on_device[1]),
                keys=on_device[1],
                ids=torch.tensor(ids),
                shown=torch.tensor(shown),
                unreadable=tuple(unreadable),
            )

    def _pixels(self) -> tuple[UInt8[Tensor, "N C h w"] | Float32[Tensor, "N C h w"], set[int]]:
        """All images, zeros for those that cannot be read, and the numbers of these."""
        images = self.loader.images
        readable = images.readable.tolist()
        first = images.get(readable[0])
        whole = torch.zeros(len(images), *first.shape, dtype=first.dtype)
        for number in readable:
            image = images.get(number)
            if image.shape != first.shape:
                raise UsageError(
                    f"--cache-on-device needs images of one size; {images.item_name(number)} has "
                    f"{tuple(image.shape)}, others "
                    f"{tuple(first.shape)} (channels, height, width): leave the option out"
                )
            whole[number] = image
        return whole.to(self.device), set(range(len(images))).difference(readable)

    def _cropped(
        self, pixels: UInt8[Tensor, "N C h w"] | Float32[Tensor, "N C h w"], shown: Int64[Tensor, " B"],
        keys: Int64[Tensor, " B"],
    ) -> UInt8[Tensor, "B C H W"] | Float32[Tensor, "B C H W"]:  # fmt: skip
        height, width = pixels.shape[-2:]
        sides = torch.full_like(keys, height), torch.full_like(keys, width)
        boxes, flips = random_crop_boxes(keys, *sides, self.loader.augmentation)
        return batched_crops(pixels[shown], boxes, flips, self.loader.img_size)


def batched_crops(
    images: UInt8[Tensor, "B C h w"] | Float32[Tensor, "B C h w"],
    boxes: Int64[Tensor, "B 4"],
    flips: Bool[Tensor, " B"],
    size: tuple[int, int],
) -> UInt8[Tensor, "B C H W"] | Float32[Tensor, "B C H W"]:
    """`resized_crop` of each image, all at once, on their device.

    uint8 agrees to 2, and to 0.01 on average; float32 to rounding.

    Args:
        images: pixels in any scale.
        boxes: top, left, height and width of each crop in pixels, inside the images.
        flips: which to mirror left and right.
        size: height and width of the results.
    """
    rows = resizing(boxes[:, 0], boxes[:, 2], images.shape[-2], size[0])
    columns = resizing(boxes[:, 1], boxes[:, 3], images.shape[-1], size[1])
    columns = torch.where(flips[:, None, None], columns.flip(1), columns)
    whole = images.dtype == torch.uint8
    # Rounded in between as well, as the library does: first along the rows, then along the columns.
    wide = _rounded(images.float() @ columns.mT.unsqueeze(1), whole)
    found = _rounded(rows.unsqueeze(1) @ wide, whole)
    return found.to(images.dtype)


def _rounded(pixels: Float32[Tensor, "..."], whole: bool) -> Float32[Tensor, "..."]:
    return (pixels + 0.5).floor().clamp(0, 255) if whole else pixels


def resizing(
    starts: Int64[Tensor, " B"], lengths: Int64[Tensor, " B"], total: int, length: int
) -> Float32[Tensor, "B length total"]:
    """Weights of each pixel of a row for each resized pixel: antialiased bicubic interpolation.

    Args:
        starts: the first pixel of each stretch.
        lengths: how many pixels it has.
        total: pixels of a row.
        length: pixels of the results.
    """
    starts, lengths = starts[:, None, None], lengths[:, None, None]
    scale = lengths.double() / length
    place = torch.arange(length, device=starts.device)[:, None] + 0.5
    pixel = torch.arange(total, device=starts.device)
    # A pixel that is made of several takes them from as much wider a kernel, which is what antialiasing means.
    distance = ((pixel + 0.5 - starts - place * scale) / scale.clamp_min(1)).abs()
    inside = (pixel >= starts) & (pixel < starts + lengths)
    weights = torch.where(inside, _bicubic(distance), 0)
    return (weights / weights.sum(dim=-1, keepdim=True)).float()


def _bicubic(x: Tensor) -> Tensor:
    """The cubic convolution kernel (Keys 1981), 2 pixels wide on either side."""
    near = (_CUBIC + 2) * x**3 - (_CUBIC + 3) * x**2 + 1
    far = _CUBIC * (x**3 - 5 * x**2 + 8 * x - 4)
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))
