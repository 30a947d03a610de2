"""SimCLR, DINO, LeJEPA and VISReg as modules that the package's own loop trains; `peers.py` puts them beside ours.

Losses and projectors are those of lightly (MIT), which only benchmarks and tests import. All four read the class token
(the mean of the patch tokens where an encoder has none), as DINO's paper does, MoCo v3 for contrast on a ViT, and the
authors' code of LeJEPA, whose set-up VISReg gets too. The optimiser is AdamW with the papers' weight decay. Deviations:

- two whole crops an image and no small ones, as far as a paper has more;
- DINO has 4,096 outputs instead of 65,536, whose update would take longer than the step of a small encoder, no
  stochastic depth, and a last layer that is fixed for an epoch, but at most for a tenth of the run;
- colours are distorted at SimCLR's strength for CIFAR-10, without blur (Chen et al. 2020, B.9); DINO's solarisation is
  left out too.
"""

import copy
import warnings
from collections.abc import Generator, Mapping
from math import cos, pi
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from lightly.loss import DINOLoss, NTXentLoss, VISRegLoss
from lightly.loss.lejepa_loss import SIGReg, lejepa_invariance_loss
from lightly.models.modules.heads import DINOProjectionHead, LeJEPAProjectionHead, SimCLRProjectionHead
from torch import Tensor, nn
from torch.nn.utils import parametrizations, remove_weight_norm
from torch.optim import Optimizer

from mae.data.loading.loader import normalise
from mae.errors import UsageError
from mae.pretraining.build import Loader
from mae.pretraining.resolve import RunContext

HIDDEN = 2048
GREY = (0.2989, 0.587, 0.114)
"""Shares of red, green and blue in torchvision's grey."""


class Output(NamedTuple):
    """What the training loop reads."""

    loss: Tensor
    terms: Mapping[str, Tensor]


class Progress(NamedTuple):
    """Where a run is before a step."""

    step: int
    total_steps: int
    steps_per_epoch: int


class JointEmbedding(nn.Module):
    """An encoder under a projector; the loss compares two views of each image.

    Attributes:
        crop_scale: area of a crop as a share of the image's.
        weight_decay: of matrices.
        clip_grad: largest norm of the gradient.
        teacher: see `mae.training.engine.Trainer`.
    """

    crop_scale: ClassVar[tuple[float, float]] = (0.08, 1.0)
    weight_decay: ClassVar[float] = 0.05
    clip_grad: ClassVar[float | None] = None
    teacher: nn.Module | None = None

    def __init__(self, encoder: Any, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    @property
    def evaluated(self) -> nn.Module:
        """The encoder that is kept."""
        return self.encoder

    def forward(self, images: Tensor) -> Output:
        """The loss of normalised images `[2B, C, H, W]`, the two views of an image one after the other."""
        projected = self.head(pooled(self.encoder, images)).float()
        with torch.autocast(images.device.type, enabled=False):
            return Output(self.compare(images, projected.unflatten(0, (-1, 2)).transpose(0, 1)), {})

    def compare(self, images: Tensor, views: Tensor) -> Tensor:
        """The loss of the images and their projections `[2, B, D]`."""
        raise NotImplementedError

    def begin_step(self, progress: Progress, optimizer: Optimizer) -> None:
        """What is scheduled beside the learning rate."""


class SimCLR(JointEmbedding):
    """Chen et al. 2020: NT-Xent at a temperature of 0.5, the best on CIFAR-10 (B.9); weight decay of MoCo v3."""

    weight_decay = 0.1

    def __init__(self, encoder: Any) -> None:
        super().__init__(encoder, SimCLRProjectionHead(encoder.embed_dim, HIDDEN, 128))
        self.loss = NTXentLoss(temperature=0.5)

    def compare(self, images: Tensor, views: Tensor) -> Tensor:
        return self.loss(*views)


class LeJEPA(JointEmbedding):
    """Balestriero and LeCun 2025: SIGReg against collapse, and views near their mean; the authors' weight of 0.05."""

    weight: ClassVar[float] = 0.05

    def __init__(self, encoder: Any) -> None:
        super().__init__(encoder, LeJEPAProjectionHead(encoder.embed_dim, HIDDEN, 64))
        self.sigreg = SIGReg()

    def compare(self, images: Tensor, views: Tensor) -> Tensor:
        invariance = lejepa_invariance_loss(all_proj=views, global_proj=views)
        return self.weight * self.sigreg(views) + (1 - self.weight) * invariance


class VISReg(JointEmbedding):
    """Wu et al. 2026: centre, scale and shape regularised apart; the weight of 0.6 that they advise for small sets."""

    def __init__(self, encoder: Any) -> None:
        super().__init__(encoder, LeJEPAProjectionHead(encoder.embed_dim, HIDDEN, 64))
        self.loss = VISRegLoss(lambda_param=0.6)

    def compare(self, images: Tensor, views: Tensor) -> Tensor:
        return self.loss(local_proj=views[:0], global_proj=views)


class DINO(JointEmbedding):
    """Caron et al. 2021 with two global crops: a centred and sharpened average of the student teaches it.

    The teacher is kept, as in the paper; the crops are those that the authors' code advises without small ones.
    """

    crop_scale = (0.14, 1.0)
    weight_decay = 0.04
    clip_grad = 3.0
    last_weight_decay: ClassVar[float] = 0.4
    outputs: ClassVar[int] = 4096

    def __init__(self, encoder: Any) -> None:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            head = DINOProjectionHead(encoder.embed_dim, HIDDEN, 256, self.outputs)
        # PyTorch's older weight norm, which the head has, cannot be copied.
        remove_weight_norm(head.last_layer)
        parametrizations.weight_norm(head.last_layer)
        lengths = head.last_layer.parametrizations.weight.original0
        lengths.data.fill_(1)
        lengths.requires_grad_(False)
        super().__init__(encoder, head)
        self.loss = DINOLoss(output_dim=self.outputs)
        self.__dict__["teacher"] = Average(encoder, head)  # none of the submodules: no optimizer trains it

    def _apply(self, fn: Any, recurse: bool = True) -> "DINO":
        if self.teacher is not None:  # copies for checkpoints come without
            self.teacher._apply(fn, recurse)
        return super()._apply(fn, recurse)

    @property
    def evaluated(self) -> nn.Module:
        return self.teacher.encoder

    def compare(self, images: Tensor, views: Tensor) -> Tensor:
        taught = self.teacher(images).float().unflatten(0, (-1, 2)).transpose(0, 1)
        return self.loss(list(taught), list(views))

    def begin_step(self, progress: Progress, optimizer: Optimizer) -> None:
        frozen = min(progress.steps_per_epoch, 0.1 * progress.total_steps)
        self.head.last_layer.parametrizations.weight.original1.requires_grad_(progress.step >= frozen)
        decay = _cosine(self.weight_decay, self.last_weight_decay, progress.step / progress.total_steps)
        for group in optimizer.param_groups:
            if group["weight_decay"]:
                group["weight_decay"] = decay


class Average(nn.Module):
    """The moving average of an encoder and its projector; the momentum rises from 0.996 to 1 by a cosine."""

    first_momentum: ClassVar[float] = 0.996

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = copy.deepcopy(encoder), copy.deepcopy(head)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.head(pooled(self.encoder, images))

    @torch.no_grad()
    def after_step(self, student: DINO, progress: float) -> None:
        momentum = _cosine(self.first_momentum, 1.0, progress)
        for own, other in ((self.encoder, student.encoder), (self.head, student.head)):
            torch._foreach_lerp_(list(own.parameters()), list(other.parameters()), 1 - momentum)


PEERS: Mapping[str, type[JointEmbedding]] = {"simclr": SimCLR, "dino": DINO, "lejepa": LeJEPA, "visreg": VISReg}


def _cosine(first: float, last: float, progress: float) -> float:
    return last + (first - last) * 0.5 * (1 + cos(pi * progress))


def pooled(encoder: Any, images: Tensor) -> Tensor:
    """The class token `[B, D]` of whole images; the mean of the patch tokens of an encoder without one."""
    features = encoder.encode(images)
    return features.mean if features.cls is None else features.cls


def two_views(
    prepared: RunContext, loader: Loader, peer: JointEmbedding, optimizer: Optimizer, step: int
) -> Generator[Mapping[str, Any], None, None]:
    """Two normalised, distorted crops of each image, from a step on.

    Raises:
        UsageError: images whose values have no known range.
    """
    if prepared.images.dtype != np.uint8:
        raise UsageError(f"{prepared.images.name} has images of {prepared.images.dtype}; the peers distort uint8 ones")
    generator = torch.Generator().manual_seed(prepared.config.optim.seed)
    mean, std = prepared.statistics()
    for number, raw in enumerate(loader.iterate(step), step):
        peer.begin_step(Progress(number, prepared.total_steps, prepared.steps_per_epoch), optimizer)
        pixels = raw.images.to(prepared.device, non_blocking=True).float() / 255
        yield {"images": normalise(distort(pixels, generator), mean, std)}


def distort(images: Tensor, generator: torch.Generator, *, strength: float = 0.5) -> Tensor:
    """SimCLR's distortion of colours (Chen et al. 2020, appendix A), drawn for each image by itself.

    Only the order of the four changes is one for the batch. Images of other than three channels have neither hue nor
    saturation.

    Args:
        images: `[B, C, H, W]` in [0, 1].
        generator: of the CPU.
        strength: 0.5 is the paper's on CIFAR-10, 1 that on ImageNet.
    """
    draws = torch.rand(len(images), 6, generator=generator)
    order = torch.randperm(4, generator=generator).tolist()
    draws = draws.to(images.device, non_blocking=True)[..., None, None, None]  # [B, 6, 1, 1, 1]
    coloured = images.shape[1] == len(GREY)
    changed = images
    for number in order:
        amount = 2 * draws[:, number] - 1
        if number == 0:
            changed = (changed * (1 + 0.8 * strength * amount)).clamp(0, 1)
        elif number == 1:
            changed = blend(changed, _grey(changed).mean(dim=(1, 2, 3), keepdim=True), 1 + 0.8 * strength * amount)
        elif number == 2 and coloured:
            changed = blend(changed, _grey(changed), 1 + 0.8 * strength * amount)
        elif number == 3 and coloured:
            changed = turn_hue(changed, 0.2 * strength * amount)
    changed = torch.where(draws[:, 4] < 0.8, changed, images)
    return torch.where(draws[:, 5] < 0.2, _grey(changed).expand_as(changed), changed) if coloured else changed


def blend(images: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """`share` of the images and the rest of the others, limited to [0, 1]: contrast and saturation."""
    return (share * images + (1 - share) * others).clamp(0, 1)


def turn_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Colours `[B, 3, H, W]` turned around the circle of hues, by `turns` `[B, 1, 1, 1]`; see any text on HSV."""
    red, green, blue = images.split(1, dim=1)
    value, low = images.amax(dim=1, keepdim=True), images.amin(dim=1, keepdim=True)
    chroma = value - low
    safe = chroma.where(chroma > 0, 1)
    sixths = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    places = torch.tensor([5.0, 3.0, 1.0], device=images.device)[:, None, None]
    around = (places + sixths + 6 * turns) % 6
    return value - chroma * torch.minimum(around, 4 - around).clamp(0, 1)


def _grey(images: Tensor) -> Tensor:
    """`[B, 1, H, W]`."""
    if images.shape[1] != len(GREY):
        return images.mean(dim=1, keepdim=True)
    shares = torch.tensor(GREY, device=images.device)
    return (images * shares[:, None, None]).sum(dim=1, keepdim=True)
