"""What a masked autoencoder is made of, as plain values: checked, comparable, to and from JSON.

No PyTorch here: the command line reads it to print its help.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypedDict, get_args

from mae import records
from mae.errors import UsageError
from mae.records import PixelDtype

# Far above any model in use, so that no file's numbers make building a model hang.
_LARGEST, _SMALLEST = 3.4e38, 1.2e-38  # that float32 holds, of the statistics
_MAX_WIDTH, _MAX_DEPTH, _MAX_SIDE, _MAX_CHANNELS, _MAX_TABLE = 16384, 256, 16384, 1024, 1 << 28


Loss = Literal["mse", "l1", "smooth_l1"]
Decoder = Literal["self", "cross"]
UniformityForm = Literal["gaussian", "squared_cosine"]


class ModelOptions(TypedDict, total=False):
    """Every option of `ModelConfig`, for typed overrides of the named sizes."""

    img_size: int | tuple[int, int]
    patch_size: int | tuple[int, int]
    in_chans: int
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float
    norm_eps: float
    decoder: str
    decoder_embed_dim: int
    decoder_depth: int
    decoder_num_heads: int
    cls_token: bool
    pos_embed: str
    mask_ratio: float
    predict_share: float
    norm_pix_loss: bool
    low_pass: float | None
    loss: str
    laplacian: float
    laplacian_raw: bool
    uniformity: float
    uniformity_form: str
    focal_frequency: float
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    channels: tuple[str, ...] | None
    no_data: str | None
    pixel_dtype: PixelDtype | None


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """A size as (height, width); one number stands for both."""
    if not isinstance(value, Collection):  # a number of NumPy's is no int
        return value, value
    height, width = value
    return height, width


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A masked autoencoder in full; the defaults are those of the official ViT-Base.

    Attributes:
        img_size: height and width of the images in pixels; one number means a square.
        patch_size: height and width of a patch in pixels; one number means a square.
        in_chans: channels of the images.
        embed_dim: width of the encoder's tokens.
        depth: blocks of the encoder.
        num_heads: attention heads of the encoder.
        mlp_ratio: hidden width of the MLPs over the token width, encoder and decoder.
        norm_eps: added to the variance in every layer norm.
        decoder: `self` (every token looks at every other, as in the paper) or `cross` (hidden ones look at visible ones
            alone, see `CrossDecoder`).
        decoder_embed_dim: width of the decoder's tokens.
        decoder_depth: blocks of the decoder.
        decoder_num_heads: attention heads of the decoder.
        cls_token: whether a class token leads the encoder's sequence.
        pos_embed: `sincos2d` (fixed, any image size) or `learned` (trained, one image size).
        mask_ratio: share of patches hidden.
        predict_share: share of the hidden patches that are predicted in training.
        norm_pix_loss: whether the target standardises each patch.
        low_pass: highest frequency of the target as a share of what a side can hold, in (0, 1]; None: all of them.
        loss: distance of prediction and target: `mse`, `l1` or `smooth_l1`.
        laplacian: weight of the masked Laplacian term; 0: without it.
        laplacian_raw: whether that term reads predictions for visible patches instead of their true pixels.
        uniformity: weight of the uniformity term; 0: without it.
        uniformity_form: `gaussian` or `squared_cosine`.
        focal_frequency: weight of the focal frequency term; 0: without it.
        mean: per-channel mean of the images the model expects normalised, in the unit that `pixel_dtype` tells; None
            where it is not known.
        std: per-channel deviation, likewise.
        channels: names of the channels of those images, in order; None where they have none.
        no_data: the value that stands for no measurement in their files, a number or `nan`: such values are NaN in the
            images, enter the encoder as 0 and count in no loss. None: every value is one, and NaN stays what it is.
        pixel_dtype: type of the pixels in the files the model was trained on, which tells the unit of `mean` and `std`:
            of `uint8` the value / 255, of `uint16` the value / 65535, of `float32` the value itself. None where it is
            not known, as of weights from elsewhere: integers over the range of their type, floats themselves.

    Raises:
        UsageError: a value that no model can have.
    """

    img_size: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (16, 16)
    in_chans: int = 3
    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float = 4.0
    norm_eps: float = 1e-6
    decoder: str = "self"
    decoder_embed_dim: int = 512
    decoder_depth: int = 8
    decoder_num_heads: int = 16
    cls_token: bool = True
    pos_embed: str = "sincos2d"
    mask_ratio: float = 0.75
    predict_share: float = 1.0
    norm_pix_loss: bool = True
    low_pass: float | None = None
    loss: str = "mse"
    laplacian: float = 0.0
    laplacian_raw: bool = False
    uniformity: float = 0.0
    uniformity_form: str = "gaussian"
    focal_frequency: float = 0.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    channels: tuple[str, ...] | None = None
    no_data: str | None = None
    pixel_dtype: PixelDtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "img_size", pair(self.img_size))
        object.__setattr__(self, "patch_size", pair(self.patch_size))
        limits = {
            "embed_dim": _MAX_WIDTH, "decoder_embed_dim": _MAX_WIDTH, "num_heads": _MAX_WIDTH,
            "decoder_num_heads": _MAX_WIDTH, "depth": _MAX_DEPTH, "decoder_depth": _MAX_DEPTH,
            "in_chans": _MAX_CHANNELS, "mlp_ratio": 64, "norm_eps": 1,
        }  # fmt: skip
        for name, limit in limits.items():
            _check_range(name, getattr(self, name), limit)
        for name in ("img_size", "patch_size"):
            for side in getattr(self, name):
                _check_range(name, side, _MAX_SIDE)
        if not 0 < self.mask_ratio < 1:
            raise UsageError(
                f"mask_ratio is {self.mask_ratio}; expected a share between 0 and 1, both excluded (the paper: 0.75)"
            )
        if self.norm_pix_loss and self.patch_values < 2:
            raise UsageError(
                "norm_pix_loss standardises the values of a patch, and these patches hold one value; "
                "use norm_pix_loss=False or larger patches"
            )
        narrow, wide = sorted((self.embed_dim, self.decoder_embed_dim))
        if self.num_tokens * wide > _MAX_TABLE:  # the table of positions must fit in memory
            sizes = f"img_size {self.img_size} in patches of {self.patch_size}"
            raise UsageError(f"{sizes} makes {self.num_tokens} tokens; of width {wide} at most {_MAX_TABLE // wide}")
        if int(narrow * self.mlp_ratio) < 1:
            raise UsageError(f"mlp_ratio is {self.mlp_ratio}; with a width of {narrow} it leaves nothing of the MLPs")
        self._check_objective()
        for name in ("mean", "std"):
            self._check_statistics(name)
        self._check_channels()
        if self.no_data is not None:
            self._check_missing(self.no_data)

    def _check_objective(self) -> None:
        if self.pixel_dtype not in (None, *get_args(PixelDtype)):
            known_types = ", ".join(get_args(PixelDtype))
            raise UsageError(f"pixel_dtype is {self.pixel_dtype!r}; expected one of: {known_types}")
        choices = {"loss": Loss, "uniformity_form": UniformityForm, "decoder": Decoder}
        for name, kind in choices.items():
            if (value := getattr(self, name)) not in (known := get_args(kind)):
                raise UsageError(f"{name} is {value!r}; expected one of: {', '.join(known)}")
        for name in ("laplacian", "uniformity", "focal_frequency"):
            if not 0 <= (value := getattr(self, name)) < inf:
                raise UsageError(f"{name} is {value}; expected a weight of 0 or more (0: without that term)")
        for name in ("low_pass", "predict_share"):
            if (share := getattr(self, name)) is not None and not 0 < share <= 1:
                raise UsageError(f"{name} is {share}; expected a share above 0 and at most 1")
        for name in ("laplacian", "focal_frequency"):
            if self.predict_share < 1 and getattr(self, name):
                raise UsageError(
                    f"{name} looks at whole pictures, and with predict_share {self.predict_share} not all of one "
                    "is predicted; leave one of them out"
                )

    def _check_statistics(self, name: str) -> None:
        values = getattr(self, name)
        if values is None:
            return
        object.__setattr__(self, name, tuple(float(value) for value in values))
        if len(values) != self.in_chans or not all(abs(value) <= _LARGEST for value in values):  # nor may they be NaN
            raise UsageError(
                f"{name} is {records.shown(values)}; expected {self.in_chans} finite numbers, one a channel"
            )
        if name == "std" and min(values) < _SMALLEST:
            raise UsageError(f"std is {records.shown(values)}; expected numbers above 0, and at least {_SMALLEST}")

    def _check_channels(self) -> None:
        if self.channels is None:
            return
        object.__setattr__(self, "channels", tuple(self.channels))
        if len(set(self.channels)) != self.in_chans or len(self.channels) != self.in_chans or not all(self.channels):
            raise UsageError(f"channels are {list(self.channels)}; expected {self.in_chans} different names")

    def _check_missing(self, no_data: str) -> None:
        records.check_no_data(no_data, name="no_data")
        for name in ("laplacian", "focal_frequency", "low_pass"):
            if getattr(self, name):
                raise UsageError(f"{name} looks at whole pictures, and those have gaps where no data is; leave it out")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]

    @property
    def num_tokens(self) -> int:
        """Patches of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def patch_values(self) -> int:
        """Values of a patch: pixels times channels."""
        return self.patch_size[0] * self.patch_size[1] * self.in_chans

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, one key a field."""
        return records.to_json(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """The inverse of `to_json`; fields that are not there keep their default.

        Raises:
            UsageError: an unknown key (the nearest known is named), a value of the wrong kind or out of range.
        """
        return records.from_json(cls, values, what="model option")


def _check_range(name: str, value: int | float, limit: int | float) -> None:
    if not 0 < value <= limit:
        raise UsageError(f"{name} is {value}; expected more than 0 and at most {limit}")
