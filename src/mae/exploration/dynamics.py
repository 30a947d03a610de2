"""What a model was like over its training: each kept checkpoint, measured on the same images under the same masks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from mae.core.types import MaskRequest
from mae.data.dataset.images import ImageSet
from mae.evaluation.common.attention_stats import AttentionStats, measure_attention
from mae.evaluation.common.capabilities import attends, predicts_pixels
from mae.evaluation.common.layer_stats import Halves, LayerStats, halves_of, measure_layer
from mae.evaluation.common.spectrum import FrequencyError, measure_frequency_error
from mae.evaluation.common.weight_changes import relative_changes
from mae.evaluation.extractors.batches import normalised_batches
from mae.evaluation.extractors.extractor import Extractor, random_weights
from mae.masks.random import RandomMasking
from mae.models.file import load_with_report
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.randomness import FIXED_EPOCH, permutation, sample_keys
from mae.training.checkpoint import MODEL

_MOST_CHECKPOINTS = 6
_IMAGES = 500
_FEW_IMAGES = 64
"""For attention and reconstructions, which are means over many patches."""
_SHOWN = 6
_BATCH = 16
_WEIGHTS = 1 << 22
"""Attention weights of one head that are held at a time, of all images of a batch; there are some 16 heads."""

BEFORE = "random weights"


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A model at one moment.

    Attributes:
        name: what the moment is called.
        step: of the run; 0 for random weights; None for a model without a run.
        layers: of what leaves each block, the mean over patches; the last one after the final norm.
        attention: None where the encoder gives none.
        error: None for a model that predicts no pixels, or has no decoder.
        tokens: patch tokens of the images that are shown.
        changes: relative change of the weights since the checkpoint before, see `relative_changes`; None where there is
            none before.
    """

    name: str
    step: int | None
    layers: Sequence[LayerStats]
    attention: AttentionStats | None
    error: FrequencyError | None
    tokens: Float32[Tensor, "shown N D"]
    changes: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Dynamics:
    """A model over its training.

    Attributes:
        snapshots: random weights first, then checkpoints or the model alone, in order.
        num_images: that features are of.
        num_few: that attention and errors are of.
        shown: numbers of the images whose tokens are kept.
        majority: accuracy of always saying the commonest class; None without classes.
        left_out: kept checkpoints that were not looked at.
    """

    snapshots: Sequence[Snapshot]
    num_images: int
    num_few: int
    shown: Int64[Tensor, " shown"]
    majority: float | None
    left_out: int

    @property
    def trained(self) -> Sequence[Snapshot]:
        """Those after training began."""
        return self.snapshots[1:]


def measure_dynamics(
    extractor: Extractor,
    checkpoints: Mapping[int, Path],
    images: ImageSet,
    labels: Int64[Tensor, " n"],
    *,
    seed: int,
    device: torch.device,
) -> Dynamics:
    """Measure a model with random weights, and at each of at most six kept checkpoints, evenly chosen.

    Args:
        extractor: the model; where there are no checkpoints, it is measured itself.
        checkpoints: the kept checkpoints of its run by step, in ascending order.
        images: what to measure on, at most 500 of them, drawn.
        labels: the class of each readable image; negative: none.
        seed: decides what is drawn.
        device: where to compute.

    Raises:
        MAEError: an image or a checkpoint cannot be read, or a model gives values that are not finite.
    """
    assert extractor.model is not None
    rows = permutation(seed, FIXED_EPOCH, len(images.readable))[:_IMAGES]
    bench = _Bench(
        images=images,
        extractor=extractor,
        numbers=images.readable[rows],
        halves=halves_of(labels[rows], seed=seed),
        seed=seed,
        device=device,
    )
    chosen = _spread(list(checkpoints), _MOST_CHECKPOINTS)
    snapshots = [bench.measure(random_weights(extractor.model, seed=seed), BEFORE, 0, changes=None)]
    before: dict[str, Tensor] | None = None
    for name, step, model in _moments(extractor.model, {step: checkpoints[step] for step in chosen}, device):
        weights = {each: weight.detach().cpu() for each, weight in model.named_parameters()}
        changes = None if before is None else relative_changes(before, weights)
        snapshots.append(bench.measure(model, name, step, changes=changes))
        before = weights
    return Dynamics(
        snapshots=snapshots,
        num_images=len(bench.numbers),
        num_few=len(bench.few),
        shown=bench.shown,
        majority=None if bench.halves is None else bench.halves.majority,
        left_out=len(checkpoints) - len(chosen),
    )


def _moments(
    model: PretrainedEncoder, checkpoints: Mapping[int, Path], device: torch.device
) -> Iterator[tuple[str, int | None, PretrainedEncoder]]:
    if not checkpoints:
        yield "this model", None, model
    for step, path in checkpoints.items():
        yield f"step {step:,}", step, load_with_report(path / MODEL)[0].to(device)


def _spread(values: list[int], most: int) -> list[int]:
    """At most so many of the values, evenly chosen, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Bench:
    """What every snapshot is measured on."""

    images: ImageSet
    extractor: Extractor
    numbers: Int64[Tensor, " n"]
    halves: Halves | None
    seed: int
    device: torch.device

    @property
    def few(self) -> Int64[Tensor, " few"]:
        return self.numbers[:_FEW_IMAGES]

    @property
    def shown(self) -> Int64[Tensor, " shown"]:
        return self.numbers[:_SHOWN]

    @torch.no_grad()
    def measure(
        self, model: PretrainedEncoder, name: str, step: int | None, *, changes: Mapping[str, float] | None
    ) -> Snapshot:
        model.eval()
        features = self._features(model)
        return Snapshot(
            name=name,
            step=step,
            layers=[measure_layer(layer, self.halves, device=self.device) for layer in features],
            attention=self._attention(model),
            error=self._error(model),
            tokens=model.encode(self._crops(model, self.shown)).patches.float().cpu(),
            changes=changes,
        )

    def _features(self, model: PretrainedEncoder) -> list[Float[Tensor, "n D"]]:
        """The mean patch token that leaves each block, the last one after the final norm."""
        depth, parts = len(model.encoder.blocks), []
        for batch in self._batches(model, self.numbers):
            features = model.encode(batch, layers=range(depth - 1))
            means = [*(layer.float().mean(dim=1) for layer in features.layers), features.mean.float()]
            parts.append(torch.stack(means).cpu())
        return list(torch.cat(parts, dim=1))

    def _attention(self, model: PretrainedEncoder) -> AttentionStats | None:
        config, encoder = model.config, model.encoder
        if config is None or not attends(encoder):
            return None
        layout = config.layout
        size = min(_BATCH, max(1, _WEIGHTS // (layout.num_tokens + encoder.num_prefix) ** 2))
        return measure_attention(
            (encoder.attention(part) for batch in self._batches(model, self.few) for part in batch.split(size)),
            grid=(layout.grid[0], layout.grid[1]),
            patch=(layout.patch[0], layout.patch[1]),
            num_prefix=encoder.num_prefix,
        )

    def _error(self, model: PretrainedEncoder) -> FrequencyError | None:
        if not isinstance(model, MaskedAutoencoder) or not predicts_pixels(model):
            return None
        masking = RandomMasking(ratio=model.masking.ratio)
        keys = sample_keys(self.seed, FIXED_EPOCH, self.few).split(_BATCH)
        parts = self._batches(model, self.few)
        layout = model.tokenizer.layout
        plans = [masking.plan(MaskRequest(layout=layout, keys=each.to(self.device))) for each in keys]
        return measure_frequency_error(model, zip(parts, plans, strict=True))

    def _batches(self, model: PretrainedEncoder, numbers: Int64[Tensor, " n"]) -> Iterator[Tensor]:
        weights = next(model.parameters())
        wanted = self.extractor.preprocessing
        for batch in normalised_batches(self.images, wanted, device=self.device, numbers=numbers):
            yield from batch.to(weights).split(_BATCH)

    def _crops(self, model: PretrainedEncoder, numbers: Int64[Tensor, " n"]) -> Tensor:
        return torch.cat(list(self._batches(model, numbers)))
