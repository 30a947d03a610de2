"""Draw the pictures of the guide for learners: `python docs/learn/draw.py RUN`, after `mae demo --out RUN`.

The photographs are two of scikit-image's that are free of rights: Chelsea the cat, and a cup of coffee. Every number in
a picture is computed here.
"""

from pathlib import Path
from sys import argv

import skimage.data
import torch
from torch import Tensor
from torch.nn.functional import interpolate

import mae
from mae.core.contracts import Batch
from mae.evaluation.common.patch_colours import fit_colours
from mae.modalities.images.pictures import score
from mae.models.build import build_model
from mae.models.file import load_model
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.reconstruction import interpolate_statistics, reconstruct
from mae.models.summary import summarise
from mae.records import read_json
from mae.report.figures.canvas import INK, new_figure, save_png
from mae.report.figures.curves import Line, draw_lines, quiet_frame
from mae.report.figures.sheet import Column, write_sheet
from mae.report.figures.tones import HIDDEN_COLOUR
from mae.targets.pixels import patch_statistics
from mae.training.checkpoint import MODEL, good_checkpoints

HERE = Path(__file__).parent
RATIOS = (0.25, 0.5, 0.75, 0.9)


def photos(side: int) -> Tensor:
    """Square crops of the two photographs, pixel values in [0, 1], `[2, 3, side, side]`."""
    crops = []
    for photo, (top, left, size) in (
        (skimage.data.chelsea(), (0, 75, 300)),
        (skimage.data.coffee(), (0, 100, 400)),
    ):
        whole = torch.from_numpy(photo).permute(2, 0, 1).float()[None] / 255
        crop = whole[:, :, top : top + size, left : left + size]
        crops.append(interpolate(crop, (side, side), mode="bicubic", antialias=True).clamp(0, 1))
    return torch.cat(crops)


def colours(images: Tensor) -> Tensor:
    """`[B, 3, H, W]` as pictures `[B, H, W, 3]` in [0, 1]."""
    return images.permute(0, 2, 3, 1).clamp(0, 1)


def masked(images: Tensor, hidden: Tensor) -> Tensor:
    """The pictures with hidden pixels (`[B, H, W]`) in the colour of no patch."""
    return torch.where(hidden.unsqueeze(-1), torch.tensor(HIDDEN_COLOUR), colours(images))


def keys(count: int) -> Tensor:
    """The same masks at each call."""
    return torch.arange(count) + 3


def draw_patches(model: MaskedAutoencoder) -> None:
    """An image, its patches, and the patches set apart in the order in which the encoder reads them."""
    images = photos(224)[:1]
    patch, rows = 16, 14
    lines = colours(images).clone()
    lines[:, ::patch] = lines[:, :, ::patch] = 1.0
    cells = colours(images)[0].reshape(rows, patch, rows, patch, 3).permute(0, 2, 1, 3, 4)
    apart = torch.ones(rows, rows, patch + 4, patch + 4, 3)
    apart[:, :, 2:-2, 2:-2] = cells
    side = rows * (patch + 4)
    spread = apart.permute(0, 2, 1, 3, 4).reshape(1, side, side, 3).permute(0, 3, 1, 2)
    spread = interpolate(spread, (224, 224), mode="area").permute(0, 2, 3, 1)
    write_sheet(
        [
            Column(name="image", caption="224 × 224 pixels, 3 channels", pictures=colours(images)),
            Column(name="patches", caption="a grid of 14 × 14, each of 16 × 16 pixels", pictures=lines),
            Column(name="tokens", caption="196 pieces of 768 numbers each", pictures=spread),
        ],
        title="An image becomes a list of patches",
        caption=["16 · 16 · 3 = 768 numbers a patch; a linear layer makes a token of each, and its place is added."],
        path=HERE / "patches.png",
    )


def draw_ratios(model: MaskedAutoencoder) -> None:
    """What each ratio leaves to see, and how far averages of neighbours get."""
    images = photos(224)
    patches = Batch(x=images, tokenizer=model.tokenizer).cut()
    layout = model.tokenizer.layout_of(images)
    per_channel = patches.unflatten(-1, (-1, 3)).mean(dim=-2)  # each patch's mean colour
    columns = []
    for ratio in RATIOS:
        plan = model.plan(images, keys=keys(2), ratio=ratio)
        hidden = model.tokenizer.join(plan.hidden.unsqueeze(-1).expand_as(patches), layout)[:, 0]
        means = [
            interpolate_statistics(channel, channel, plan, layout.grid)[0] for channel in per_channel.split(1, dim=-1)
        ]
        flat = torch.cat(means, dim=-1).unsqueeze(-2).expand(-1, -1, patches.shape[-1] // 3, -1).flatten(-2)
        filled = model.tokenizer.join(torch.where(plan.hidden.unsqueeze(-1), flat, patches), layout)
        r2 = [
            score(images[n : n + 1], filled[n : n + 1], hidden[n : n + 1], (1.0, 1.0, 1.0)).r2
            for n in range(len(images))
        ]
        both = torch.stack([masked(images, hidden), colours(filled)], dim=1).flatten(0, 1)
        notes = [line for value in r2 for line in ([" "], [f"R² {value:.2f}"])]
        columns.append(Column(name=f"{ratio:.0%} masked", caption="", pictures=both, notes=notes))
    write_sheet(
        columns,
        title="How much may be guessed without understanding?",
        caption=[
            "Below each masked image: hidden patches filled with the average colour of visible ones nearby.",
            "R² over hidden pixels: 1 is a perfect picture, 0 one no better than the mean colour of what is visible.",
        ],
        path=HERE / "ratios.png",
    )


def draw_cost() -> None:
    """Operations of a ViT-B's training step by ratio, with visible tokens alone and with mask tokens in the encoder."""
    shares = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9)
    name, light = "mae_vit_base_patch16", {"decoder_depth": 8, "decoder_embed_dim": 512}
    whole = summarise(mae.create_model(name)).encode_flops / 1e9
    encoder, decoder = [], []
    for share in shares:
        counted = summarise(mae.create_model(name, mask_ratio=share or 0.01, **light))
        encoder.append(counted.encoder_flops / 1e9)
        decoder.append(counted.decoder_flops / 1e9)
    draw_lines(
        [
            Line(label="encoder", x=[100 * share for share in shares], y=encoder),
            Line(label="decoder", x=[100 * share for share in shares], y=decoder),
        ],
        levels={"encoder on every token": whole},
        names=("patches masked, per cent", "GFLOP an image, forward"),
        show=lambda value: f"{value:.1f}",
        path=HERE / "cost.png",
        title="ViT-B at 224 pixels: the encoder sees visible patches only",
    )


def draw_target(model: MaskedAutoencoder) -> None:
    """The pixels, the per-patch normalised pixels that are predicted, and where the loss counts."""
    images = photos(224)
    patches = Batch(x=images, tokenizer=model.tokenizer).cut()
    layout = model.tokenizer.layout_of(images)
    mean, std = patch_statistics(patches)
    normalised = model.tokenizer.join((patches - mean) / std, layout)
    plan = model.plan(images, keys=keys(2))
    hidden = model.tokenizer.join(plan.hidden.unsqueeze(-1).expand_as(patches), layout)[:, 0]
    shown = normalised / 6 + 0.5  # three standard deviations each way
    write_sheet(
        [
            Column(name="image", caption="", pictures=colours(images)),
            Column(name="visible", caption="what the encoder is given", pictures=masked(images, hidden)),
            Column(name="target", caption="each patch minus its mean, over its std", pictures=colours(shown)),
            Column(name="counted", caption="where the loss is", pictures=masked(shown, ~hidden)),
        ],
        title="What is predicted, and where it counts",
        caption=["Per-patch normalised pixels, from −3 (dark) to 3 (bright): brightness is gone, structure stays."],
        path=HERE / "target.png",
    )


def as_input(model: MaskedAutoencoder) -> tuple[Tensor, Tensor, Tensor]:
    """The photographs normalised as the model wants them, `[2, 3, H, W]`, and the mean and std that were used."""
    wanted = model.config.tokenizer
    mean, std = (torch.tensor(values)[:, None, None] for values in (wanted.mean, wanted.std))
    return (photos(wanted.img_size[0]) - mean) / std, mean, std


def draw_progress(run: Path) -> None:
    """The same masked squares at five kept checkpoints of the run."""
    checkpoints = good_checkpoints(run / "checkpoints")
    kept = sorted(checkpoints)
    columns: list[Column] = []
    for step in (kept[round(at * (len(kept) - 1) / 4)] for at in range(5)):
        model = load_model(checkpoints[step] / MODEL)
        images, mean, std = as_input(model)
        views = reconstruct(model, images, model.plan(images, keys=keys(2)))
        if not columns:
            seen = masked(images * std + mean, views.hidden)
            columns.append(Column(name="masked", caption="75 %", pictures=seen, notes=[[" "]] * 2))
        r2 = [
            score(images[n : n + 1], views.pasted[n : n + 1], views.hidden[n : n + 1], (1.0, 1.0, 1.0)).r2
            for n in range(2)
        ]
        columns.append(
            Column(
                name=f"step {step:,}",
                caption="",
                pictures=colours(views.pasted * std + mean),
                notes=[[f"R² {value:.2f}"] for value in r2],
            )
        )
    columns.append(Column(name="image", caption="", pictures=colours(images * std + mean), notes=[[" "]] * 2))
    write_sheet(
        columns,
        title="A small model learns",
        caption=["Hidden patches as predicted, visible ones true. R² over hidden pixels, as above."],
        path=HERE / "progress.png",
    )


def draw_features(run: Path) -> None:
    """Patch tokens as colours, of random weights and of the trained model."""
    model = load_model(good_checkpoints(run / "checkpoints").popitem()[1] / MODEL)
    images, mean, std = as_input(model)
    layout = model.tokenizer.layout_of(images)
    torch.manual_seed(0)
    columns = [Column(name="image", caption="", pictures=colours(images * std + mean))]
    for name, network in (("random weights", build_model(model.config)), ("after the demo", model)):
        with torch.no_grad():
            tokens = network.eval().encode(images).patches
        painted = [fit_colours(each).paint(each) for each in tokens]
        cells = torch.stack(painted).unflatten(1, layout.grid)
        pictures = cells.repeat_interleave(layout.patch[0], dim=1).repeat_interleave(layout.patch[1], dim=2)
        columns.append(Column(name=name, caption="patch tokens", pictures=pictures))
    write_sheet(
        columns,
        title="What a patch token tells",
        caption=["The first three principal components of an image's patch tokens as red, green and blue."],
        path=HERE / "features.png",
    )


def draw_evaluation(run: Path) -> None:
    """The demo's k-NN accuracy beside what needs no training."""
    result = read_json(run / "evaluation" / "knn.json")
    found = result["result"]
    scores = {
        "chance": result["chance"],
        "raw pixels": found["raw pixels"]["pixels"]["20"]["top1"],
        "random weights": found["random weights"]["mean"]["20"]["top1"],
        "after the demo": found["this model"]["mean"]["20"]["top1"],
    }
    figure = new_figure(760, 260)
    axes = figure.add_axes((0.2, 0.16, 0.72, 0.64))
    axes.barh(list(scores), [100 * score for score in scores.values()], color=["#b8b8b8"] * 3 + ["#b5367a"], height=0.6)
    for place, value in enumerate(scores.values()):
        axes.text(100 * value + 1, place, f"{value:.1%}", va="center", color=INK)
    axes.set(xlim=(0, 100))
    quiet_frame(axes)
    figure.text(
        0.03, 0.88, "k-NN: which photograph is a new square cut from?", fontsize=14, fontweight="bold", color=INK
    )
    save_png(figure, HERE / "evaluation.png")


def draw_limits(run: Path) -> None:
    """A photograph, its patches in another order, and noise, under one mask."""
    model = load_model(good_checkpoints(run / "checkpoints").popitem()[1] / MODEL)
    images, mean, std = as_input(model)
    patches = Batch(x=images[1:], tokenizer=model.tokenizer).cut()
    layout = model.tokenizer.layout_of(images)
    chance = torch.Generator().manual_seed(0)
    shuffled = model.tokenizer.join(patches[:, torch.randperm(layout.num_tokens, generator=chance)], layout)
    noise = (torch.rand(images[:1].shape, generator=chance) - mean) / std
    rows = torch.cat([images[1:], shuffled, noise])
    views = reconstruct(model, rows, model.plan(rows, keys=keys(1).expand(3)))
    r2 = [
        score(rows[n : n + 1], views.pasted[n : n + 1], views.hidden[n : n + 1], (1.0, 1.0, 1.0)).r2 for n in range(3)
    ]
    true = colours(rows * std + mean)
    write_sheet(
        [
            Column(
                name="image",
                caption="",
                pictures=true,
                notes=[["a photograph"], ["its patches in another order"], ["noise"]],
            ),
            Column(name="masked", caption="", pictures=masked(rows * std + mean, views.hidden), notes=[[" "]] * 3),
            Column(
                name="reconstruction",
                caption="",
                pictures=colours(views.pasted * std + mean),
                notes=[[f"R² {value:.2f}"] for value in r2],
            ),
        ],
        title="Where there is nothing to learn",
        caption=["A patch can be predicted only where the others tell of it."],
        path=HERE / "limits.png",
    )


if __name__ == "__main__":
    run = Path(argv[1])
    untrained = mae.create_model("mae_vit_lesson_patch4", img_size=224, patch_size=16)
    draw_patches(untrained)
    draw_ratios(untrained)
    draw_cost()
    draw_target(untrained)
    draw_progress(run)
    draw_features(run)
    draw_evaluation(run)
    draw_limits(run)
