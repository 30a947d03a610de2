"""What a library answers with an exported model, in a process of its own: `python -m mae.interop.answer`.

The library reads the folder by itself, as its users do.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mae.interop.forms import OFFICIAL_FILE, ONNX_FILE, PROGRAM_FILE
from mae.interop.graphs import FeatureGraph, num_visible, plan_of_order
from mae.interop.opening import open_model
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder

Inputs = Mapping[str, Tensor]
"""`images [B, C, H, W]`; for a decoder also `order [B, N]`, the tokens in the order in which they stay visible."""


def answers_of(model: PretrainedEncoder, inputs: Inputs) -> dict[str, Tensor]:
    """What is compared: `tokens` after the last norm and what `FeatureGraph` makes of them; with a decoder `prediction`
    of every patch, `loss`, and `gradient` of the loss by the patches' kernel."""
    images = inputs["images"]
    with torch.no_grad():
        found = FeatureGraph(model)(images)
    if not isinstance(model, MaskedAutoencoder):
        return found
    assert model.config is not None
    output = model(images, plan=plan_of_order(inputs["order"], model.config.mask_ratio).predict_all())
    weight = model.encoder.patch_embed.proj.weight
    (gradient,) = torch.autograd.grad(output.terms["reconstruction"], weight)
    return found | {"prediction": output.pred, "loss": output.terms["reconstruction"], "gradient": gradient}


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
    num_tokens = inputs["order"].shape[1]
    # It rounds down what is a hair below a whole number, 10 * (1 - 0.9) say; half a token more, and the count is ours.
    model.config.mask_ratio = 1 - (num_visible(model.config.mask_ratio, num_tokens) + 0.5) / num_tokens
    output = model(pixel_values=inputs["images"], noise=inputs["order"].argsort(dim=1).float())
    (gradient,) = torch.autograd.grad(output.loss, model.vit.embeddings.patch_embeddings.projection.weight)
    model.config.mask_ratio = 0.0
    with torch.no_grad():
        places = torch.arange(num_tokens).expand_as(inputs["order"]).float()
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


def of_onnx(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """onnxruntime's answers, to the whole batch and to each image alone: a batch is of any size."""
    session = import_module("onnxruntime").InferenceSession(str(folder / ONNX_FILE))
    names = [output.name for output in session.get_outputs()]
    asked = {given.name: inputs[given.name].numpy() for given in session.get_inputs()}

    def answered(part: slice) -> list[Any]:
        return session.run(names, {name: values[part] for name, values in asked.items()})

    together = answered(slice(None))
    alone = [answered(slice(number, number + 1)) for number in range(len(inputs["images"]))]
    found: dict[str, Tensor] = {}
    for number, name in enumerate(names):
        found[name] = torch.from_numpy(together[number])
        found[f"{name}, one by one"] = torch.from_numpy(np.concatenate([one[number] for one in alone]))
    return found


@torch.no_grad()
def of_program(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """What PyTorch's exported program answers, likewise."""
    program = torch.export.load(folder / PROGRAM_FILE).module()
    images = inputs["images"]
    alone = [program(images=image.unsqueeze(0)) for image in images]
    together = program(images=images)
    return together | {f"{name}, one by one": torch.cat([one[name] for one in alone]) for name in together}


ANSWERS: Mapping[str, Callable[[Path, Inputs], dict[str, Tensor]]] = {
    "timm": of_timm,
    "hf-vit": of_hf_vit,
    "hf-vitmae": of_hf_vitmae,
    "official": of_official,
    "onnx": of_onnx,
    "onnx-mae": of_onnx,
    "torch-export": of_program,
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
