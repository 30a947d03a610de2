"""Images as tokens: square or rectangular patches of all channels."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from mae import records
from mae.core.component import Alias, Channels, Measured, Size
from mae.core.contracts import Tokenizer
from mae.core.types import Layout
from mae.errors import UsageError
from mae.modalities.images.patches import PatchEmbed, check_images, patchify, unpatchify

_LARGEST, _SMALLEST = 3.4e38, 1.2e-38  # that float32 holds, of the statistics


@dataclass(frozen=True, kw_only=True)
class ImagePatches(Tokenizer):
    """Patches of an image, all channels of a patch in one token."""

    kind: ClassVar[str] = "image"

    img_size: Annotated[Size, Alias("img_size")] = (224, 224)
    """Height and width the images are cropped to."""
    patch_size: Annotated[Size, Alias("patch_size")] = (16, 16)
    """Height and width of a patch."""
    in_chans: Annotated[Channels, Alias("in_chans")] = 3
    """Channels."""
    mean: Annotated[tuple[float, ...] | None, Alias("mean"), Measured()] = None
    """Per-channel mean of the images, in the unit of their pixel type; none where it is not known."""
    std: Annotated[tuple[float, ...] | None, Alias("std"), Measured()] = None
    """Per-channel std, likewise."""
    channels: Annotated[tuple[str, ...] | None, Alias("channels")] = None
    """Names of the channels, in order."""
    nodata: Annotated[str | None, Alias("nodata")] = None
    """Value in files that stands for no measurement, a number or nan: left out of statistics and loss."""
    pixel_dtype: Annotated[Literal["uint8", "uint16", "float32"] | None, Alias("pixel_dtype"), Measured()] = None
    """Type of the pixels in files: of uint8 the unit is the value / 255, of uint16 / 65535, of float32 the value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("img_size", "patch_size"):
            if isinstance(side := getattr(self, name), int):
                object.__setattr__(self, name, (side, side))
        for name in ("mean", "std"):
            self._check_statistics(name)
        if self.channels is not None and not (
            len(set(self.channels)) == len(self.channels) == self.in_chans and all(self.channels)
        ):
            raise UsageError(f"channels are {list(self.channels)}; expected {self.in_chans} different names")
        if self.nodata is not None:
            records.check_no_data(self.nodata, name="nodata")

    def _check_statistics(self, name: str) -> None:
        values = getattr(self, name)
        if values is None:
            return
        if len(values) != self.in_chans or not all(abs(value) <= _LARGEST for value in values):  # nor may they be NaN
            raise UsageError(
                f"{name} is {records.shown(values)}; expected {self.in_chans} finite numbers, one a channel"
            )
        if name == "std" and min(values) < _SMALLEST:
            raise UsageError(f"std is {records.shown(values)}; expected numbers above 0, and at least {_SMALLEST}")

    @property
    def layout(self) -> Layout:
        """Of the images that the model is made for.

        Raises:
            UsageError: sides that are not multiples of the patch.
        """
        assert isinstance(self.img_size, tuple) and isinstance(self.patch_size, tuple)
        return Layout(size=self.img_size, patch=self.patch_size, channels=self.in_chans)

    def layout_of(self, x: Shaped[Tensor, "B C H W"]) -> Layout:
        """Of these images, which may have another size.

        Raises:
            UsageError: images of a wrong shape or type.
        """
        check_images(x, self.in_chans)
        return Layout(size=(x.shape[2], x.shape[3]), patch=self.layout.patch, channels=self.in_chans)

    def cut(self, x: Float[Tensor, "B C H W"], tokens: Int64[Tensor, "B M"] | None = None) -> Float[Tensor, "B M P"]:
        """Pixels of the given tokens (None: all), row by row with the channel last, as MAE predicts them."""
        return patchify(x, self._patch, tokens)

    def join(self, values: Shaped[Tensor, "B N P"], layout: Layout) -> Shaped[Tensor, "B C H W"]:
        """The images of a whole grid of patches; the inverse of `cut`, for any number of values a pixel."""
        return unpatchify(values, layout.grid, self._patch)

    def embed(self, dim: int) -> PatchEmbed:
        """A linear map from patches to tokens."""
        return PatchEmbed(
            patch_size=self._patch, in_chans=self.in_chans, embed_dim=dim, may_miss=self.nodata is not None
        )

    @property
    def _patch(self) -> tuple[int, int]:
        rows, columns = self.layout.patch
        return rows, columns
