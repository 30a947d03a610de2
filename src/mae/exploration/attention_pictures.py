"""Pictures of attention: of the class token, head by head and rolled out, and between patches."""

from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mae.evaluation.common.attention_stats import rollout
from mae.evaluation.common.capabilities import attends
from mae.exploration.explored import ExploreRun
from mae.exploration.thumbnails import crops_of
from mae.randomness import FIXED_EPOCH, permutation
from mae.report.figures.attention import draw_attention
from mae.report.figures.tones import rgb_channels
from mae.report.html.page import Section

_IMAGES = 4
_MOST_HEADS = 8


def attention_pictures(run: ExploreRun) -> Section | None:
    """Where the class token and some patches look."""
    config = run.model.config
    if config is None or not attends(run.model.encoder):
        return None
    rows = permutation(run.seed, FIXED_EPOCH, len(run.numbers))[:_IMAGES]
    crops = crops_of(run.images, run.task.extractor.preprocessing, run.numbers[rows])
    grid, prefix = (config.layout.grid[0], config.layout.grid[1]), run.model.encoder.num_prefix
    asking = slice(0, prefix) if prefix else slice(None)  # without a class token: the mean over all patches
    of_blocks, by_head, whole = _attention(run, crops, asking)
    by_head, heads = by_head[:, :, prefix:].unflatten(2, grid), by_head.shape[1]
    of_class = {
        "all heads": by_head.mean(dim=1),
        **{f"head {head}": by_head[:, head] for head in range(min(heads, _MOST_HEADS))},
        "rolled out": whole[:, asking, prefix:].mean(dim=1).unflatten(1, grid),
    }
    names = [[run.names[row]] for row in rows.tolist()]
    paths = [run.pictures / "attention_of_class_token.png", run.pictures / "attention_between_patches.png"]
    who = "class token" if prefix else "mean patch"
    _draw(run, crops, of_class, notes=names, title=f"Attention of the {who} in the last block", path=paths[0])
    # Two patches of each image, a third and two thirds of the way down and across.
    thirds = [(grid[0] * part // 3) * grid[1] + grid[1] * part // 3 for part in (1, 2)]
    asked = torch.tensor(thirds).repeat(len(crops))  # [images * 2]
    image = torch.arange(len(crops)).repeat_interleave(len(thirds))
    shown = {
        f"block {number}": weights[image, asked + prefix, prefix:].unflatten(1, grid)
        for number, weights in of_blocks.items()
    }
    # Halved with the identity, most of what leaves a patch's place came from there.
    others = whole[image, asked + prefix, prefix:].scatter(1, asked.unsqueeze(1), 0.0)
    shown["rolled out, to others"] = others.unflatten(1, grid)
    notes = [names[number] for number in image.tolist()]
    _draw(run, crops[image], shown, notes=notes, title="Attention of single patches", path=paths[1], marked=asked)
    left_out = f" Of {heads} heads the first {_MOST_HEADS} are shown." if heads > _MOST_HEADS else ""
    return Section(
        title="What attention looks at",
        text="Each map is painted from 0 to its own largest value, so an even one looks as bright as a sharp one: its "
        "entropy tells which it is. Rolled out: the blocks' attention, mean over heads, halved with the identity for "
        f"the residual connection, and multiplied.{left_out} A map shows where information may come from, not what "
        "the model decides by.",
        pictures=paths,
    )


@torch.no_grad()
def _attention(
    run: ExploreRun, crops: Float[Tensor, "B C H W"], asking: slice
) -> tuple[dict[int, Float[Tensor, "B L L"]], Float[Tensor, "B heads L"], Float[Tensor, "B L L"]]:
    """Means over heads of the first, the middle and the last block, the tokens asking in the last, and the rollout.

    Image by image and block by block: all weights of a large model, or of a fine grid, would take gigabytes.
    """
    encoder, images = run.model.encoder, crops.to(next(run.model.parameters()))
    depth = len(encoder.blocks)
    kept: dict[int, list[Tensor]] = {number: [] for number in sorted({0, depth // 2, depth - 1})}
    by_head: list[Tensor] = []

    def looked_at(image: Float[Tensor, "1 C H W"]) -> Iterator[Tensor]:
        for number, weights in enumerate(encoder.attention(image)):
            if number in kept:
                kept[number].append(weights.mean(dim=1).cpu())
            if number == depth - 1:
                by_head.append(weights[:, :, asking].mean(dim=2).cpu())
            yield weights

    whole = torch.cat([rollout(looked_at(image)).cpu() for image in images.split(1)])
    return {number: torch.cat(parts) for number, parts in kept.items()}, torch.cat(by_head), whole


def _draw(
    run: ExploreRun,
    crops: Float[Tensor, "B C H W"],
    maps: dict[str, Float[Tensor, "B rows columns"]],
    *,
    notes: list[list[str]],
    title: str,
    path: Path,
    marked: Int64[Tensor, " B"] | None = None,
) -> None:
    wanted = run.task.extractor.preprocessing
    draw_attention(
        crops,
        maps,
        mean=wanted.mean,
        std=wanted.std,
        rgb=rgb_channels(run.images.channel_names),
        notes=notes,
        title=title,
        caption="Colours: how much a patch is attended to. The framed patch is the one that asks."
        if marked is not None
        else "Colours: how much each patch is attended to.",
        path=path,
        marked=marked,
    )
