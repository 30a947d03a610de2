"""What a library answers with an exported model, in a process of its own: `python -m mae.interop.answer`.

The library reads the folder by itself, as its users do.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mae.interop.forms import OFFICIAL_FILE
from mae.interop.opening import open_model
from mae.models.classifier import ImageClassifier
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.types import MaskPlan

Inputs = Mapping[str, Tensor]
"""`images [B, C, H, W]`; for a decoder also `order [B, N]`, the tokens in the order in which they stay visible."""


def answers_of(model: PretrainedEncoder, inputs: Inputs) -> dict[str, Tensor]:
    """What is compared: `tokens` after the last norm; a classifier's `logits`; with a decoder `prediction` of every
    patch, `loss`, and `gradient` of the loss by the patches' kernel."""
    images = inputs["images"]
    with torch.no_grad():
        found = {"tokens": model.encoder(images)}
        if isinstance(model, ImageClassifier):
            return found | {"logits": model.logits(images)}
    if not isinstance(model, MaskedAutoencoder):
        return found
    output = model(images, plan=_plan(model, inputs["order"]).predict_all())
    weight = model.encoder.patch_embed.proj.weight
    (gradient,) = torch.autograd.grad(output.terms["reconstruction"], weight)
    return found | {"prediction": output.pred, "loss": output.terms["reconstruction"], "gradient": gradient}


def _plan(model: MaskedAutoencoder, order: Tensor) -> MaskPlan:
    """The mask by which the first tokens of an order stay visible, as many as the model has."""
    config = model.config
    assert config is not None
    count = num_visible(config.mask_ratio, order.shape[1])
    hidden = torch.ones(order.shape, dtype=torch.bool).scatter_(1, order[:, :count], False)
    return MaskPlan(visible=order[:, :count], predicted=order[:, count:], hidden=hidden)


def num_visible(mask_ratio: float, num_tokens: int) -> int:
    """As transformers counts them."""
    return int(num_tokens * (1 - mask_ratio))


@torch.no_grad()
def of_timm(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """timm's model, made as its users make it."""
    timm: Any = import_module("timm")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = inputs["images"]
    return {"tokens": model.forward_features(images)} | ({"logits": model(images)} if model.num_classes else {})


@torch.no_grad()
def of_hf_vit(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """transformers' ViT."""
    transformers: Any = import_module("transformers")
    model = transformers.ViTModel.from_pretrained(str(folder), add_pooling_layer=False).eval()
    return {"tokens": model(pixel_values=inputs["images"]).last_hidden_state}


def of_hf_vitmae(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """transformers' ViTMAE with the same patches hidden; its tokens with none."""
    transformers: Any = import_module("transformers")
    model = transformers.ViTMAEForPreTraining.from_pretrained(str(folder)).eval()
    output = model(pixel_values=inputs["images"], noise=inputs["order"].argsort(dim=1).float())
    (gradient,) = torch.autograd.grad(output.loss, model.vit.embeddings.patch_embeddings.projection.weight)
    model.config.mask_ratio = 0.0
    with torch.no_grad():
        places = torch.arange(inputs["order"].shape[1]).expand_as(inputs["order"]).float()
        tokens = model.vit(pixel_values=inputs["images"], noise=places).last_hidden_state
    return {"tokens": tokens, "prediction": output.logits, "loss": output.loss, "gradient": gradient.flatten(1)}


def of_official(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """This package's own reading of official weights, compared with timm on the way: the official code runs no more.

    Such a file says nothing of a loss, so none is compared.
    """
    found = answers_of(open_model(folder / OFFICIAL_FILE, see_photographs=False)[0], inputs)
    return {name: answer for name, answer in found.items() if name not in ("loss", "gradient")}


def of_ours(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """This package's own reading."""
    return answers_of(open_model(folder)[0], inputs)


ANSWERS: Mapping[str, Callable[[Path, Inputs], dict[str, Tensor]]] = {
    "timm": of_timm,
    "hf-vit": of_hf_vit,
    "hf-vitmae": of_hf_vitmae,
    "official": of_official,
    "safetensors": of_ours,
}


def main(argv: list[str]) -> int:
    """Read a folder by a library, answer the inputs of one file and write the answers to another."""
    target, folder, asked, answered = argv
    answers = ANSWERS[target](Path(folder), load_file(asked))
    save_file({name: tensor.detach().contiguous() for name, tensor in answers.items()}, answered)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
