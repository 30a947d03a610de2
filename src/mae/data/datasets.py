"""Any source of images as a plain data set of PyTorch; public as `mae.datasets`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset

from mae.credentials import concealed
from mae.data.dataset.images import ImageSet, load_images
from mae.data.sources.open import open_labelled, open_source
from mae.errors import UsageError

_SPLITS = ("train", "test")


class ImageDataset(Dataset[Any]):
    """Images by number, with their classes where a split of labelled ones was asked for; made by `open`.

    Attributes:
        images: where they are read from.
        targets: the class of each image, a position in `classes`; None without labels.
        classes: names of the classes; empty without labels.
        transform: called on each image `[C, h, w]`; None: images are given as they are.
    """

    def __init__(
        self,
        images: ImageSet,
        *,
        targets: list[int] | None,
        classes: tuple[str, ...],
        transform: Callable[[Tensor], Any] | None,
    ) -> None:
        self.images, self.targets, self.classes, self.transform = images, targets, classes, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> Any:
        """An image, and its class where there are labels.

        Raises:
            IndexError: no such number.
            UnreadableImage: a file that is no whole image.
        """
        if not -len(self) <= number < len(self):  # what ends a loop over a data set
            raise IndexError(f"image {number} of {len(self)}")
        image = self.images.get(number % len(self))
        shown = image if self.transform is None else self.transform(image)
        return shown if self.targets is None else (shown, self.targets[number])


def open(
    source: str | Path,
    *,
    split: Literal["train", "test"] | None = None,
    transform: Callable[[Tensor], Any] | None = None,
    in_chans: int | None = None,
    channels: Sequence[str] | None = None,
    data_root: str | Path = "data",
) -> ImageDataset:
    """Whatever `mae pretrain` and `mae evaluate` take, as a `torch.utils.data.Dataset`.

    Args:
        source: a folder, a list, a zip, tars, a pack or its URL, a Hugging Face set after `hf:`, or a known name such
            as `builtin:photos`.
        split: None: the images that `mae pretrain` would train on, without labels; `train` or `test`: labelled ones,
            split as `mae evaluate` splits them.
        transform: called on each image: a tensor `[C, h, w]` of its own size, uint8, or float32 (values of 16 bits are
            in [0, 1]). `mae.transforms(model)` is one.
        in_chans: channels of every image; None: what most of the files have.
        channels: which of them by name, in order; None: those that the transform names in an attribute `channels`, as a
            model's does, else all.
        data_root: where sets known by name are kept.

    Raises:
        UsageError: nothing of that name, no images or no classes there, an unknown split, no channel of that
            name.
        MAEError: too many images cannot be read.
    """
    spec, root = concealed(str(source)), Path(data_root)
    if split is not None and split not in _SPLITS:
        raise UsageError(f"the split is {split!r}; expected {', '.join(map(repr, _SPLITS))} or None")
    if split is None:
        opened, targets = open_source(spec, data_root=root), None
        classes: tuple[str, ...] = ()
    else:
        data = open_labelled(spec, data_root=root)
        part = data.train if split == "train" else data.test
        opened, targets, classes = part.source, part.labels.tolist(), data.class_names
    channels = getattr(transform, "channels", None) if channels is None else channels
    images = load_images(opened, in_chans=in_chans, channels=channels, memory_limit=0)
    return ImageDataset(images, targets=targets, classes=classes, transform=transform)
