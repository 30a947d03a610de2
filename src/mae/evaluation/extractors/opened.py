"""A source that is opened once and used by many protocols."""

from functools import cached_property

from mae.data.dataset import sampled
from mae.data.dataset.images import ImageSet, load_images
from mae.data.dataset.units import check_units
from mae.data.sources.open import Source
from mae.evaluation.extractors.extractor import preprocessing_text
from mae.models.preprocess import Preprocessing, Reading

MAX_UNREADABLE = 0.01
"""Share of the files that may be unreadable where nobody says otherwise."""


class Opened:
    """A source whose images are read only when they are needed; kept in memory they are decoded once.

    Args:
        source: where the images are.
        max_unreadable: share of the files that may be unreadable.
        keep: whether to keep them in memory if they are few; not where each of many processes reads some.
    """

    def __init__(self, source: Source, *, max_unreadable: float = MAX_UNREADABLE, keep: bool = True) -> None:
        self.source = source
        self._max_unreadable = max_unreadable
        self._memory_limit = None if keep else 0
        self._images: dict[Reading, ImageSet] = {}
        self._compared: set[str] = set()

    @cached_property
    def version(self) -> str:
        """See `sampled.version`; computed once, since of a million names it takes seconds."""
        return sampled.version(self.source)

    def images(self, reading: Reading) -> ImageSet:
        """The images with these channels.

        Raises:
            UsageError: they have no channel of a name.
            MAEError: too many unreadable files.
        """
        if reading not in self._images:
            in_chans, channels, nodata, pixel_dtype = reading
            self._images[reading] = load_images(
                self.source,
                in_chans=in_chans,
                channels=channels,
                nodata=nodata,
                pixel_dtype=pixel_dtype,
                max_unreadable=self._max_unreadable,
                memory_limit=self._memory_limit,
            )
        return self._images[reading]

    def compared(self, wanted: Preprocessing) -> str | None:
        """What is unusual about the values for a model, the first time that this is asked; see `check_units`."""
        if (what := preprocessing_text(wanted)) in self._compared:
            return None
        images = self.images(wanted.reading)
        unusual = check_units(images, mean=wanted.mean, std=wanted.std, pixel_dtype=wanted.pixel_dtype)
        self._compared.add(what)
        return unusual
