"""Linear heads on frozen features, trained on images: the official linear probe (He et al. 2021, A.1)."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mae.evaluation.common.joined_features import CLS_AND_MEAN
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.extractors.batches import computed_batches, normalised_batches
from mae.models.classifier import ClassifierOutput
from mae.models.inference import undisturbed
from mae.training.distributed import World


class ProbeHeads(nn.Module):
    """One linear head behind a BatchNorm for each feature of a frozen extractor, trained side by side.

    The heads share nothing, so each trains as it would alone.

    Args:
        encode: normalised images to named features `[B, D]`; it is not trained.
        widths: D of each feature that gets a head.
        num_classes: classes to tell apart.
        world: the processes that train together; the norms then see the whole batch.
    """

    def __init__(
        self,
        *,
        encode: Callable[[Tensor], Mapping[str, Tensor]],
        widths: Mapping[str, int],
        num_classes: int,
        world: World,
    ) -> None:
        super().__init__()
        self._encode = encode
        self._world = world
        self.norms = nn.ModuleDict(
            {name: nn.BatchNorm1d(width, eps=1e-6, affine=False) for name, width in widths.items()}
        )
        self.heads = nn.ModuleDict({name: _head(width, num_classes) for name, width in widths.items()})

    def forward(self, images: Float[Tensor, "B C H W"], target: Int64[Tensor, " B"]) -> ClassifierOutput:
        """Logits and cross-entropy; the loss is the sum over the heads."""
        logits = self.logits(images)
        terms = {name: cross_entropy(scores.float(), target) for name, scores in logits.items()}
        loss = torch.stack(list(terms.values())).sum()
        return ClassifierOutput(loss=loss, terms=terms, logits=next(iter(logits.values())))

    def logits(self, images: Float[Tensor, "B C H W"]) -> dict[str, Float[Tensor, "B K"]]:
        """Scores of the classes by feature."""
        with torch.no_grad():
            features = dict(self._encode(images))
        if all(name in features for name in CLS_AND_MEAN):
            features["+".join(CLS_AND_MEAN)] = torch.cat([features[name] for name in CLS_AND_MEAN], dim=1)
        return {name: self.heads[name](self._normed(norm, features[name].float())) for name, norm in self.norms.items()}

    @torch.no_grad()
    def folded(self, feature: str) -> tuple[Float[Tensor, "K D"], Float[Tensor, " K"]]:
        """Weight and bias that give a head's logits of a feature as it is, the norm's statistics taken into them."""
        norm, head = self.norms[feature], self.heads[feature]
        assert isinstance(norm, nn.BatchNorm1d) and isinstance(head, nn.Linear)
        assert norm.running_mean is not None and norm.running_var is not None
        weight = head.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
        return weight.float(), (head.bias.double() - weight @ norm.running_mean.double()).float()

    def _normed(self, norm: nn.Module, features: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        if not self.training or self._world.size == 1:
            return norm(features)
        # Frozen features need no gradient, so every process can have all of them.
        return norm(self._world.whole_batch(features)).chunk(self._world.size)[self._world.rank]


def _head(width: int, num_classes: int) -> nn.Linear:
    head = nn.Linear(width, num_classes)
    nn.init.trunc_normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    return head


def make_probe(task: LabelledTask) -> tuple[ProbeHeads, dict[str, int]]:
    """Fresh heads for each feature of the task's extractor, drawn by the task's seed, and the width of each feature."""
    extractor = task.extractor
    sample = next(normalised_batches(task.images("test"), extractor.preprocessing, device=task.device))[:2]
    widths = {name: values.shape[1] for name, values in extractor.named(sample).items() if values.ndim == 2}
    if all(name in widths for name in CLS_AND_MEAN):
        widths["+".join(CLS_AND_MEAN)] = sum(widths[name] for name in CLS_AND_MEAN)
    torch.manual_seed(task.seed)
    probe = ProbeHeads(encode=extractor.named, widths=widths, num_classes=task.num_classes, world=task.world)
    return probe.to(task.device), widths


def rank_by_heads(task: LabelledTask, probe: ProbeHeads, *, top: int) -> dict[str, Int64[Tensor, "m top"]]:
    """The classes of each readable test image by falling score, by feature."""
    top = min(top, task.num_classes)
    batches = computed_batches(
        task.images("test"),
        task.extractor.preprocessing,
        lambda images, _: {
            name: scores.topk(top, dim=1).indices.cpu() for name, scores in probe.logits(images).items()
        },
        device=task.device,
        world=task.world,
    )
    with undisturbed(probe):
        ranked = list(batches)
    return {name: torch.cat([batch[name] for batch in ranked]) for name in ranked[0]}
