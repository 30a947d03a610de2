"""How good a model's pictures of masked pixels are, beside pictures that take no learning."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from mae.errors import UsageError
from mae.evaluation.common.capabilities import predicts_pixels
from mae.evaluation.protocol import THIS_MODEL, EvaluationProtocol, ProtocolResult
from mae.options import shown

if TYPE_CHECKING:
    from torch import Tensor

    from mae.data.dataset.images import ImageSet
    from mae.evaluation.common.picture_quality import PictureQuality
    from mae.evaluation.common.task import UnlabelledTask
    from mae.evaluation.extractors.extractor import Extractor

_NAMES = {
    "model": THIS_MODEL,
    "with_true_statistics": "this model, given the true statistics",
    "mean_colour": "mean colour of the visible pixels",
    "nearest_patch": "copy of the nearest visible patch",
}


@dataclass(frozen=True, kw_only=True)
class Reconstruction(EvaluationProtocol):
    """Error, PSNR, SSIM and Laplacian error of the masked pixels, under masks that the seed fixes.

    Raises:
        UsageError: no image to evaluate on, or a ratio out of range.
    """

    name = "reconstruction"
    title = "Reconstruction of masked pixels"
    summary = "how good the pictures of masked pixels are"
    labels = "none"
    cheap = True

    count: int = 1000
    """Images to evaluate on, drawn from the held-out ones."""
    mask_ratio: Annotated[float | None, shown("the model's own", "SHARE")] = None
    """Share of patches masked."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"count is {self.count}; expected 1 or more images to evaluate on")
        if self.mask_ratio is not None and not 0 < self.mask_ratio < 1:
            raise UsageError(f"mask_ratio is {self.mask_ratio}; expected a share between 0 and 1, both excluded")

    def why_not(self, extractor: "Extractor") -> str | None:
        """See `EvaluationProtocol`."""
        model = extractor.autoencoder
        if model is None:
            return f"{extractor.name} has no decoder; reconstruction needs a masked autoencoder of this package"
        if not predicts_pixels(model):
            return f"{extractor.name} predicts {model.target.kind}; reconstruction needs a target of pixels"
        return None

    def run(self, task: "UnlabelledTask") -> ProtocolResult:
        """Evaluate; see `EvaluationProtocol`."""
        from mae.evaluation.common.picture_quality import PictureSums
        from mae.evaluation.extractors.batches import computed_batches
        from mae.randomness import FIXED_EPOCH, permutation, sample_keys

        model, wanted, images = task.extractor.autoencoder, task.extractor.preprocessing, task.images()
        assert model is not None
        order = permutation(task.seed, FIXED_EPOCH, len(images.readable))
        numbers = images.readable[order[: self.count].sort().values]
        data_range = 1.0 if images.pixel_dtype == "uint8" else _value_range(images, numbers.tolist())
        sums = PictureSums(model=model, mean=wanted.mean, std=wanted.std, data_range=data_range)

        def of_batch(batch: "Tensor", part: "Tensor") -> "Mapping[str, Tensor]":
            keys = sample_keys(task.seed, FIXED_EPOCH, part).to(task.device)
            plan = model.plan(batch, keys=keys, ratio=self.mask_ratio)
            return sums.of_batch(batch, plan)

        batches = computed_batches(images, wanted, of_batch, device=task.device, world=task.world, numbers=numbers)
        return _result(sums.quality(batches), len(numbers))


def _result(by_picture: "Mapping[str, PictureQuality]", count: int) -> ProtocolResult:
    note = (
        f"Masked pixels of {count:,} images, values as in the files (integers scaled to [0, 1]). "
        "Lower error, higher PSNR and SSIM are better."
    )
    if "with_true_statistics" in by_picture:
        note += (
            " This model predicts per-patch normalised pixels; its picture estimates the brightness and contrast of "
            "patches from visible ones. The second row is given the true ones, so it knows part of the answer."
        )
    return ProtocolResult(
        numbers={"images": count, **{name: asdict(quality) for name, quality in by_picture.items()}},
        header=("picture", "MSE", "PSNR in dB", "SSIM", "Laplacian error"),
        rows=tuple((_NAMES[name], *_cells(quality)) for name, quality in by_picture.items()),
        note=note,
    )


def _cells(quality: "PictureQuality") -> tuple[str, ...]:
    psnr = "" if quality.psnr is None else f"{quality.psnr:.2f}"
    ssim = "" if quality.ssim is None else f"{quality.ssim:.3f}"
    return f"{quality.mse:.5f}", psnr, ssim, f"{quality.laplacian:.4f}"


def _value_range(images: "ImageSet", numbers: Sequence[int]) -> float:
    """Distance of the lowest and the highest value of some images, in the scale of `data_range`.

    Floating-point data have no other range, and of 16 bits sensors fill a part alone: by all 65,536 values any picture
    of 12-bit images has 24 dB more.
    """
    known = ((values := images.get(number))[~values.isnan()] for number in numbers)
    ends = [part.aminmax() for part in known if len(part)]
    return float(max(end.max for end in ends) - min(end.min for end in ends)) if ends else 0.0
