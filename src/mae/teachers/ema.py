"""A mean of the student's own past weights as the teacher."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from math import cos, pi
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mae.core.component import Count, ShareOfAll
from mae.core.contracts import Batch, Encoder, Teacher
from mae.core.types import MaskPlan
from mae.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class EmaTeacher(Teacher):
    """An exponential moving average of the encoder, which sees whole samples (data2vec: Baevski et al. 2022, 3.3)."""

    kind: ClassVar[str] = "ema"
    gives_scores: ClassVar[bool] = True
    changes: ClassVar[bool] = True
    for_outputs: ClassVar[frozenset[str]] = frozenset({"layers"})

    momentum: ShareOfAll = 0.996
    """Share of its weights that it keeps in the first step; the rest comes from the student."""
    final_momentum: ShareOfAll = 1.0
    """The same at the end of the run; half a cosine leads there (BYOL: Grill et al. 2020, section 3.3)."""
    layers: Count | None = None
    """Blocks, counted from the last, whose outputs are averaged; the upper half if not given."""

    def gives(self, encoder: Encoder) -> Mapping[str, int]:
        """The `tokens`, as wide as the encoder.

        Raises:
            UsageError: more layers than the encoder has.
        """
        if self.layers is not None and self.layers > encoder.depth:
            raise UsageError(
                f"teacher_layers is {self.layers}, and the encoder has {encoder.depth} blocks; expected as many at most"
            )
        return {"tokens": encoder.embed_dim}

    def build(self, student: Any) -> "EmaNetwork":
        """The network, a copy of the student's encoder as it is now, and of what predicts its loss."""
        return EmaNetwork(student, momentum=(self.momentum, self.final_momentum), layers=self.layers)


class EmaNetwork(nn.Module):
    """The averaged encoder, and the averaged network of the term that predicts the loss, where there is one.

    Args:
        student: its encoder and that network are copied.
        momentum: in the first step, and at the end of the run.
        layers: see `EmaTeacher`.
    """

    forward_methods: ClassVar[tuple[str, ...]] = ("attention", "difficulty")

    def __init__(self, student: Any, *, momentum: tuple[float, float], layers: int | None) -> None:
        super().__init__()
        self.encoder: Any = copy.deepcopy(student.encoder).requires_grad_(False).eval()
        predictor = _predictor_of(student)
        self.predictor = None if predictor is None else copy.deepcopy(predictor).requires_grad_(False).eval()
        self.momentum = momentum
        self.layers = layers or (len(student.encoder.blocks) + 1) // 2

    @torch.no_grad()
    def forward(self, batch: Batch) -> dict[str, Float[Tensor, "B N D"]]:
        """The mean over layers of each token's features, every layer and the mean normalised to mean 0 and std 1."""
        encoded = self.encoder(batch.x, levels=True)
        levels = [level[:, encoded.num_prefix :].float() for level in encoded.levels[-self.layers :]]
        mean = torch.stack([layer_norm(level, level.shape[-1:]) for level in levels]).mean(dim=0)
        return {"tokens": layer_norm(mean, mean.shape[-1:])}

    @torch.no_grad()
    def attention(self, batch: Batch) -> Float[Tensor, "B N"]:
        """How much the class token attends to each token of the whole sample in the last block: a mean over heads."""
        return self.encoder.prefix_attention(batch.x)

    @torch.no_grad()
    def difficulty(self, batch: Batch) -> Float[Tensor, "B N"]:
        """How large a loss is expected of each token, of those that see the whole sample; its unit means nothing."""
        assert self.predictor is not None  # a mask that reads it without such a term is refused
        everything = torch.arange(batch.layout.num_tokens, device=batch.x.device).expand(len(batch.x), -1)
        plan = MaskPlan(visible=everything, predicted=everything, hidden=torch.zeros_like(everything, dtype=torch.bool))
        found: Tensor = self.predictor(self.encoder(batch.x), plan, batch.layout)
        return found.squeeze(-1)

    def momentum_at(self, progress: float) -> float:
        """The share of the weights that is kept, given the run's progress in (0, 1]."""
        first, last = self.momentum
        return last - (last - first) * (cos(pi * progress) + 1) / 2

    def after_step(self, student: Any, progress: float) -> None:
        """Move towards the student's weights."""
        average = get_ema_multi_avg_fn(self.momentum_at(progress))
        average(list(self.encoder.parameters()), list(student.encoder.parameters()), 0)
        if self.predictor is not None:
            average(list(self.predictor.parameters()), list(_predictor_of(student).parameters()), 0)


def _predictor_of(student: Any) -> Any:
    """The network of the student's term that predicts the loss; None: there is none."""
    heads = (student.term_heads[term.kind] for term in student.terms if term.predicts_loss)
    return next(heads, None)
