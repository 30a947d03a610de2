"""Multi-block masking: several blocks are predicted from a large block around them."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

from jaxtyping import Float
from torch import Tensor

from mae.core.component import Count, Metavar, Positive, Share, ShareOfAll, flat_name
from mae.core.types import Layout, MaskPlan, MaskRequest
from mae.errors import UsageError
from mae.masks.planar import PlanarMask, places, plan_of
from mae.randomness import Stream, uniform


@dataclass(frozen=True, kw_only=True)
class MultiBlockMasking(PlanarMask):
    """Blocks of patches are predicted from a large block without them (I-JEPA: Assran et al. 2023; V-JEPA 2).

    Target blocks have each a random area, aspect ratio and place inside the grid; they may overlap. The context block
    has the shape of the grid. Areas, aspects and places are uniform.

    All samples have as many visible patches, N less `ratio`, and as many predicted ones: what so many blocks of
    medium size cover on average on this grid, but no more than are masked. What a sample's blocks cover beyond that is
    taken off their edges, and what they lack is added around them: patches at random, one layer after another.
    Visible are random patches of the context block that are not predicted and, only where it has too few, random ones
    outside of it. What is neither visible nor predicted is masked and does not count in the loss.

    The centre is predicted more often than the borders, and those more often than the corners: on a grid of 14 x 14
    in 87, 27 and 6 % of the samples. What is rarely predicted is visible the more often.
    """

    kind: ClassVar[str] = "multi_block"
    predicts_all: ClassVar[bool] = False

    ratio: Share = 0.7
    """Fraction of the patches masked, predicted or not."""
    blocks: Count = 4
    """Target blocks of a sample."""
    scale: Annotated[tuple[Share, Share], Metavar("MIN MAX")] = (0.15, 0.2)
    """Smallest and largest area of a target block, as a fraction of the grid."""
    aspect: Annotated[tuple[Positive, Positive], Metavar("MIN MAX")] = (0.75, 1.5)
    """Smallest and largest height over width of a target block."""
    context: Annotated[tuple[ShareOfAll, ShareOfAll], Metavar("MIN MAX")] = (0.85, 1.0)
    """Smallest and largest area of the context block, as a fraction of the grid."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scale", "aspect", "context"):
            low, high = getattr(self, name)
            if low > high:
                flat = flat_name(self.slot, self.kind, name, None)
                raise UsageError(f"{flat} is {low} to {high}; expected the smaller one first")

    def num_predicted(self, layout: Layout, ratio: float | None = None) -> int:
        """How many tokens of each sample are predicted, between 1 and those that are masked."""
        area, aspect = sum(self.scale) / 2 * layout.num_tokens, sum(self.aspect) / 2
        rows, columns = layout.grid
        height = min(max(round((area * aspect) ** 0.5), 1), rows)
        width = min(max(round(area / height), 1), columns)
        covered = _mean_cover(rows, columns, height, width, self.blocks)
        return min(max(round(covered), 1), layout.num_tokens - self.num_visible(layout, ratio))

    def plan(self, request: MaskRequest) -> MaskPlan:
        """The mask of each sample; see `Mask.plan`."""
        layout, num_tokens = request.layout, request.layout.num_tokens
        num_visible, num_predicted = (count(layout, request.ratio) for count in (self.num_visible, self.num_predicted))
        draws = uniform(request.keys, 4 * self.blocks + 3 + 2 * num_tokens, Stream.MASK)
        blocks, context, chance, other = draws.split([4 * self.blocks, 3, num_tokens, num_tokens], dim=1)
        inward = self._targets(blocks.unflatten(1, (-1, 4)), layout)
        # Halved, so that no sum is rounded up to the next layer.
        predicted = (inward + chance / 2).argsort(dim=1, descending=True, stable=True)[:, :num_predicted]
        last = (self._context(context, layout) < 0).float().scatter_(1, predicted, 2)
        visible = (last + other / 2).argsort(dim=1, stable=True)[:, :num_visible]
        return plan_of(visible, predicted, num_tokens)

    def _targets(self, draws: Float[Tensor, "B blocks 4"], layout: Layout) -> Float[Tensor, "B N"]:
        """Layers from each token to the edge of the block it is deepest in; negative outside of all."""
        area, aspect, down, across = draws.unsqueeze(-1).unbind(2)  # [B, blocks, 1] each
        area, aspect = _between(area, self.scale) * layout.num_tokens, _between(aspect, self.aspect)
        height = (area * aspect).sqrt().round().clamp(1, layout.grid[0])
        width = (area / height).round().clamp(1, layout.grid[1])
        return _inward(height, width, down, across, layout).amax(dim=1)

    def _context(self, draws: Float[Tensor, "B 3"], layout: Layout) -> Float[Tensor, "B N"]:
        """Layers from each token to the edge of the context block; negative outside of it."""
        area, down, across = draws.unsqueeze(-1).unbind(1)  # [B, 1] each
        side = _between(area, self.context).sqrt()
        height, width = ((side * length).round().clamp(1, length) for length in layout.grid)
        return _inward(height, width, down, across, layout)


def _between(chance: Tensor, limits: tuple[float, float]) -> Tensor:
    return limits[0] + (limits[1] - limits[0]) * chance


def _inward(height: Tensor, width: Tensor, down: Tensor, across: Tensor, layout: Layout) -> Tensor:
    """Layers from each token to the edge of a block, 0 for those at its edge, negative outside: `[..., N]`.

    Args:
        height, width: of the block, `[..., 1]`.
        down, across: its place among the possible ones, in `[0, 1)`.
        layout: of the samples.
    """
    rows, columns = layout.grid
    top, left = (down * (rows - height + 1)).floor(), (across * (columns - width + 1)).floor()
    row, column = places(layout, height.device)
    above, beside = row - top, column - left
    return above.minimum(height - 1 - above).minimum(beside).minimum(width - 1 - beside)


@lru_cache
def _mean_cover(rows: int, columns: int, height: int, width: int, blocks: int) -> float:
    """Tokens that lie in at least one of some blocks of one size, each at a random place: the mean."""
    down, across = _chances(rows, height), _chances(columns, width)
    return sum(1 - (1 - one * other) ** blocks for one in down for other in across)


def _chances(length: int, side: int) -> list[float]:
    """For each place on a line the chance to lie in a piece of it at a random place."""
    starts = length - side + 1
    return [(min(place, length - side) - max(place - side + 1, 0) + 1) / starts for place in range(length)]
