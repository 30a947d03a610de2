"""A codebook of patches that is learned on the images of a run, while the run goes on."""

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from mae.core.contracts import Batch
from mae.core.types import Layout
from mae.layers.precision import without_autocast
from mae.layers.together import gather_features, num_together
from mae.randomness import Stream, drawing_from, uniform

_SEED = 0
_FLAT = 1e-6
_ALIKE = 1e-4
"""Mean squared difference below which codes are alike; the patterns have std 1."""
_NO_DRAW = 2.0  # those that are made are below 1
_LARGE_PATCH = 8
"""Pixels a side of a patch that holds a pattern by itself."""
_ROWS = 1 << 14
"""Patches that are compared at a time, so that a large codebook does not take gigabytes."""


class Codebook(nn.Module):
    """Codes, how often each is used, and what the step that goes on has shown so far: a teacher's network.

    Of each patch the mean is subtracted, and it is divided by its std: a code is a pattern, whatever its brightness and
    contrast. Codes are the moving means of the patches that were nearest to them (van den Oord et al. 2017, appendix
    A.1), and one that hardly any patch is nearest to begins anew at a patch of the batch.

    Args:
        layout: of the samples.
        count: of codes.
        decay: share of a code's past that it keeps in a step.
        restart: a code begins anew where it is used less than this fraction of an even use.
        window: patches across of what a code describes, averaged to a patch's size; None: 3 where patches are small,
            since those hold little of a pattern by themselves, else 1.
    """

    codes: Tensor
    used: Tensor
    restarted: Tensor
    seen: Tensor
    sums: Tensor
    drawn: Tensor
    draws: Tensor

    def __init__(
        self, layout: Layout, *, count: int, decay: float = 0.99, restart: float = 0.01, window: int | None = None
    ) -> None:
        super().__init__()
        self.decay, self.restart = decay, restart
        self.window = window or (3 if max(layout.patch) < _LARGE_PATCH else 1)
        width = layout.token_values
        with drawing_from(_SEED):  # the same ones in every process and wherever a model's file is opened
            codes = torch.randn(count, width)
        self.register_buffer("codes", codes)
        self.register_buffer("used", torch.zeros(count))
        self.register_buffer("restarted", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(count))
        self.register_buffer("sums", torch.zeros(count, width))
        self.register_buffer("drawn", torch.zeros(count, width))
        self.register_buffer("draws", torch.full((count,), _NO_DRAW))

    @torch.no_grad()
    def forward(self, batch: Batch) -> dict[str, Float[Tensor, "B N 1"]]:
        """Numbers of the patches' codes, NaN of one without data; in training mode patches count for the next step.

        Those that codes may begin anew at are then drawn from the keys of the batch, without keys from PyTorch's global
        generator.
        """
        with without_autocast(batch.x.device):
            patches = _patterns(_surroundings(batch, self.window).to(self.codes))
            known = ~patches.isnan().any(dim=-1)
            nearest = self.nearest(patches.nan_to_num(nan=0.0))
            if self.training:
                self._count(batch, patches, nearest, known)
        return {"codes": nearest.float().masked_fill(~known, torch.nan).unsqueeze(-1)}

    def nearest(self, patches: Float[Tensor, "B N P"]) -> Int64[Tensor, "B N"]:
        """The number of the nearest code to each patch; of equally near ones the first."""
        half = self.codes.square().sum(dim=1) / 2
        rows = patches.flatten(0, 1).split(_ROWS)
        # Of both values and places `max` takes half as long on a CPU as `argmax`, which asks for less.
        return torch.cat([(part @ self.codes.T - half).max(dim=1).indices for part in rows]).view(patches.shape[:2])

    def _count(
        self,
        batch: Batch,
        patches: Float[Tensor, "B N P"],
        nearest: Int64[Tensor, "B N"],
        known: Bool[Tensor, "B N"],
    ) -> None:
        """Add the patches to those of this step, and draw some that codes may begin anew at."""
        has_data, flat, count = known.flatten(), patches.nan_to_num(nan=0.0).flatten(0, 1), len(self.codes)
        # Code by code in one order: `index_add_` adds in any on a GPU. Those without data come last, and count nowhere.
        numbers, order = nearest.flatten().masked_fill(~has_data, count).sort(stable=True)
        begins = torch.searchsorted(numbers, torch.arange(count + 1, device=numbers.device))
        self.seen += begins.diff()
        self.sums += functional.embedding_bag(order, flat, begins, mode="sum")[:-1]
        if batch.keys is None:
            draws = torch.rand(known.numel(), device=known.device)
        else:
            draws = uniform(batch.keys, known.shape[1], Stream.CODES).to(known.device).flatten()
        self._draw(draws.masked_fill(~has_data, _NO_DRAW), flat)

    def _draw(self, draws: Float[Tensor, " n"], patches: Float[Tensor, "n P"]) -> None:
        """Keep the patches of the smallest draws, of these and of those kept in this step so far, one a code."""
        count = len(self.codes)
        draws, order = torch.cat([self.draws, draws]).sort(stable=True)
        order = order[:count].unsqueeze(1)
        kept, new = self.drawn[order[:, 0].clamp(max=count - 1)], patches[(order[:, 0] - count).clamp(min=0)]
        self.drawn.copy_(torch.where(order < count, kept, new))
        self.draws.copy_(draws[:count])

    def after_step(self, student: nn.Module, progress: float) -> None:
        """Move the codes towards the patches of the step, those of all processes; start unused ones anew."""
        together = num_together()
        draws, drawn = gather_features(self.draws.unsqueeze(1)), gather_features(self.drawn)
        with torch.no_grad():
            if together > 1:
                dist.all_reduce(self.seen)
                dist.all_reduce(self.sums)
                self.draws.fill_(_NO_DRAW)
                self._draw(draws.flatten(), drawn)
            self._move()

    def _move(self) -> None:
        used = self.decay * self.used + (1 - self.decay) * self.seen
        sums = self.decay * self.used.unsqueeze(1) * self.codes + (1 - self.decay) * self.sums
        even = used.mean()
        rare = used < self.restart * even
        codes = torch.where(used.unsqueeze(1) > 0, sums / used.clamp(min=1e-12).unsqueeze(1), self.codes)
        numbers, drawn = torch.arange(len(codes), device=codes.device), (self.draws < _NO_DRAW).sum()
        self.drawn.copy_(self.drawn[numbers % torch.where(drawn > 0, drawn, len(codes))])  # again where they are few
        self.codes.copy_(torch.where(rare.unsqueeze(1), self.drawn, codes))
        self.used.copy_(torch.where(rare, even, used))  # as if it had been used evenly: it gets time to show itself
        self.restarted += rare.sum()
        self.seen.zero_()
        self.sums.zero_()
        self.draws.fill_(_NO_DRAW)

    def forget_step(self) -> None:
        """Drop what a skipped step has shown: it is this process's alone, and no checkpoint could hold that of all."""
        self.seen.zero_()
        self.sums.zero_()
        self.drawn.zero_()
        self.draws.fill_(_NO_DRAW)

    def numbers(self) -> dict[str, float]:
        """How many codes are used: the exponential of the entropy of their use; and how many began anew so far.

        Codes that are alike count as one: where all patches are alike many begin anew at the same one, and rounding
        decides in each step which of them is the nearest. Before the first step none is used.
        """
        share = self.used / self.used.sum().clamp(min=1e-12)
        share = torch.zeros_like(share).index_add_(0, self._first_alike(), share)
        entropy = -torch.special.xlogy(share, share).sum()
        return {"codes_used": float(entropy.exp() * share.any()), "codes_restarted": float(self.restarted)}

    def _first_alike(self) -> Int64[Tensor, " K"]:
        """For each code the number of the first one that is like it."""
        bound = (_ALIKE * self.codes.shape[1]) ** 0.5
        parts = self.codes.split(_ROWS // 16)
        return torch.cat([(torch.cdist(part, self.codes) < bound).byte().argmax(dim=1) for part in parts])


def _surroundings(batch: Batch, window: int) -> Float[Tensor, "B N P"]:
    """Of each patch what lies around it, so many patches across, averaged to as many values as it has.

    Images are continued by the values of their borders.
    """
    if window == 1:
        return batch.cut()
    rows, columns = batch.layout.patch
    above, left = rows * (window - 1) // 2, columns * (window - 1) // 2
    margins = (left, columns * (window - 1) - left, above, rows * (window - 1) - above)
    averaged = functional.avg_pool2d(functional.pad(batch.x.float(), margins, mode="replicate"), window, stride=1)
    return functional.unfold(averaged, (rows, columns), dilation=window, stride=(rows, columns)).mT


def _patterns(patches: Float[Tensor, "B N P"]) -> Float[Tensor, "B N P"]:
    std, mean = torch.std_mean(patches, dim=-1, keepdim=True, correction=0)
    return (patches - mean) / (std + _FLAT)
