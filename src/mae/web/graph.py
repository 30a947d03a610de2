"""A model as one graph of a picture and a mask of any number of patches, for a browser."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mae.core.contracts import Batch
from mae.encoders.vit import MAEEncoder
from mae.errors import UsageError
from mae.interop.exports.graphs import write_onnx
from mae.layers.mask_decoder import MAEDecoder
from mae.layers.transformer import Block
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.reconstruction import BANDWIDTH


class MaskedGraph(nn.Module):
    """Predicts the hidden patches of one picture, however many they are.

    Every token stays, and hidden ones are kept from being attended to by scores of minus infinity: what visible tokens
    become is the same as if hidden ones had been dropped.

    Args:
        model: in evaluation mode; used, not copied. See `check_drawable`.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: MaskedAutoencoder) -> None:
        super().__init__()
        check_drawable(model)
        self.model = model
        wanted: Any = model.tokenizer
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(wanted, name))[:, None, None], persistent=False)
        self.train(model.training)

    def forward(self, image: Float[Tensor, "1 C H W"], hidden: Bool[Tensor, "1 N"]) -> dict[str, Tensor]:
        """What the model says of the picture.

        Args:
            image: pixel values in [0, 1].
            hidden: True where a patch is hidden; without a class token one at least must be visible.

        Returns:
            `patches [1, N, P]`, the prediction as the model makes it; `picture [1, C, H, W]`, hidden patches predicted
            and visible ones true, pixel values as in the image, not clipped; `attention [1, N, N]`, how much each
            visible patch attends to each in the encoder's last block, a mean over heads, 0 for hidden ones. Of a
            model that predicts patches normalised by their own mean and std, `picture` takes these from visible
            patches nearby, and `informed [1, C, H, W]` is given the true ones.
        """
        model = self.model
        images = (image - self.mean) / self.std
        tokens, attention = self._encoded(images, hidden)
        predicted = self._decoded(tokens, hidden)
        target: Any = model.target
        layout, batch = model.tokenizer.layout_of(images), Batch(x=images, tokenizer=model.tokenizer)
        true, where = batch.cut(), hidden.unsqueeze(-1)
        found = {"patches": predicted, "attention": attention}
        drawn = {"picture": predicted}
        if getattr(target, "norm", False):
            weight = _nearness(layout.grid, hidden)
            own_mean, own_std = target.statistics(true, model.tokenizer)
            drawn = {
                "picture": predicted * (weight @ own_std) + weight @ own_mean,
                "informed": target.to_pixels(predicted, batch),
            }
        for name, values in drawn.items():
            pixels = model.tokenizer.join(torch.where(where, values, true), layout)
            found[name] = pixels * self.std + self.mean
        return found

    def _encoded(
        self, images: Float[Tensor, "1 C H W"], hidden: Bool[Tensor, "1 N"]
    ) -> tuple[Float[Tensor, "1 L D"], Float[Tensor, "1 N N"]]:
        """All tokens as the encoder leaves them, those of hidden patches without meaning, and its last attention."""
        encoder: Any = self.model.encoder
        lead = encoder.num_prefix
        unseen = torch.cat([torch.zeros_like(hidden[:, :1]).expand(-1, lead), hidden], dim=1)
        bias = torch.where(unseen, -torch.inf, 0.0)[:, None, None]  # [1, 1, 1, L], over heads and queries
        x = encoder.embed_whole(images)
        weights = None
        for block in encoder.blocks:
            x, weights = _through(block, x, bias)
        assert weights is not None
        shown = weights.mean(dim=1)[:, lead:, lead:]
        return encoder.norm(x), torch.where(hidden.unsqueeze(-1), 0.0, shown)

    def _decoded(self, tokens: Float[Tensor, "1 L D"], hidden: Bool[Tensor, "1 N"]) -> Float[Tensor, "1 N P"]:
        decoder: Any = self.model.decoder
        lead = self.model.encoder.num_prefix
        x = decoder.embed(tokens)
        filled = torch.where(hidden.unsqueeze(-1), decoder.mask_token, x[:, lead:])
        return self.model.by_reader(decoder.complete(x[:, :lead], filled, self.model.tokenizer.layout.grid))[0]


def check_drawable(model: MaskedAutoencoder) -> None:
    """Refuse a model whose masks cannot be drawn on in a browser.

    Raises:
        UsageError: that; the message says why.
    """
    wanted: Any = model.tokenizer
    if model.target.to_pixels is None:
        raise UsageError(
            f"the model predicts {model.target.kind}, not pixels; the page draws models that predict pixels"
        )
    if not isinstance(model.encoder, MAEEncoder) or model.encoder.mask_token is not None:
        raise UsageError("the model's encoder replaces hidden patches; the page draws models whose encoder drops them")
    if not isinstance(model.decoder, MAEDecoder):
        raise UsageError("the model's decoder is not that of the paper; the page draws models with --decoder self")
    if wanted.layout.channels not in (1, 3) or wanted.nodata is not None or wanted.pixel_dtype not in (None, "uint8"):
        raise UsageError(
            f"the model is of {wanted.layout.channels} channels of {wanted.pixel_dtype or 'uint8'}; browsers show "
            "8-bit pictures of 1 or 3: draw others with 'mae reconstruct --mask'"
        )
    if wanted.mean is None or wanted.std is None:
        raise UsageError("the model does not say how its images are normalised; give --mean and --std to mae import")


def write_graph(model: MaskedAutoencoder, path: Path) -> None:
    """Write the graph as an ONNX file.

    Raises:
        UsageError: see `check_drawable`; or a package that is needed is not installed.
    """
    graph = MaskedGraph(model.eval()).eval()
    layout = model.tokenizer.layout
    example = {
        "image": torch.rand(1, layout.channels, *layout.size),
        "hidden": torch.arange(layout.num_tokens).unsqueeze(0) % 4 != 0,
    }
    write_onnx(graph, example, path, {}, shapes=dict.fromkeys(example))


def _through(
    block: Block, x: Float[Tensor, "1 L D"], bias: Float[Tensor, "1 1 1 L"]
) -> tuple[Float[Tensor, "1 L D"], Float[Tensor, "1 heads L L"]]:
    """What leaves a block in which some keys are not attended to, and who attends to whom."""
    query, key, value = block.attn.split(block.norm1(x))
    weights = (query @ key.mT * query.shape[-1] ** -0.5 + bias).softmax(dim=-1)
    x = x + block.attn.join(weights @ value)
    return x + block.mlp(block.norm2(x)), weights


def _nearness(grid: tuple[int, ...], hidden: Bool[Tensor, "1 N"]) -> Float[Tensor, "1 N N"]:
    """The weights by which `interpolate_statistics` averages visible patches for each, for any number of them."""
    rows, columns = grid
    number = torch.arange(rows * columns)
    place = torch.stack([number // columns, number % columns], dim=-1).float()
    squares = (place.unsqueeze(0) - place.unsqueeze(1)).square().sum(dim=-1)  # [N, N]
    visible = (~hidden).float().sum(dim=1, keepdim=True).unsqueeze(-1)
    width = BANDWIDTH * (rows * columns / visible.clamp(min=1)).sqrt()
    nearness = -squares / width.square() / 2
    return nearness.masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(dim=-1)
