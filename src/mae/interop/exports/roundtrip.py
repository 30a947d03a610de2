"""The outputs of a library for an exported model, in a fresh process: `python -m mae.interop.exports.roundtrip`.

The library loads the folder itself, as its users do.
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

from mae.interop.exports.formats import OFFICIAL_FILE, ONNX_FILE, PROGRAM_FILE
from mae.interop.exports.graphs import FeatureGraph, plan_of_order
from mae.interop.imports.open import open_model
from mae.models.detector import Detector
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder

Inputs = Mapping[str, Tensor]
"""`images [B, C, H, W]`; for a decoder also `order [B, N]`, of which the first `num_visible` tokens stay visible.

For a detector `image [C, H, W]` and `threshold []`, see `DetectionGraph`.
"""


def model_outputs(model: PretrainedEncoder, inputs: Inputs) -> dict[str, Tensor]:
    """This package's outputs: those of `FeatureGraph`; with a decoder also `prediction` of every patch, and where the
    model has one, `loss` and its `gradient` with respect to the patch embedding's kernel. Those of a detector are what
    `Detector.forward` finds."""
    if isinstance(model, Detector):
        return _found(model, inputs)
    images = inputs["images"]
    with torch.no_grad():
        outputs = FeatureGraph(model)(images)
    if not isinstance(model, MaskedAutoencoder):
        return outputs
    plan = plan_of_order(inputs["order"], int(inputs["num_visible"]))
    if not model.has_loss:
        return outputs | {"prediction": model.predict(images, plan)}
    output = model(images, plan=plan.predict_all())
    weight = model.encoder.patch_embed.proj.weight
    (gradient,) = torch.autograd.grad(output.terms["reconstruction"], weight)
    return outputs | {"prediction": output.pred, "loss": output.terms["reconstruction"], "gradient": gradient}


@torch.no_grad()
def _found(model: Detector, inputs: Inputs) -> dict[str, Tensor]:
    usual, model.roi_heads.score_thresh = model.roi_heads.score_thresh, float(inputs["threshold"])
    found = model([inputs["image"]])[0]
    model.roi_heads.score_thresh = usual
    masks = {"masks": found["masks"][:, 0]} if model.described.masks else {}
    return {"boxes": found["boxes"], "labels": found["labels"] - 1, "scores": found["scores"], **masks}


@torch.no_grad()
def timm_outputs(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """timm, loaded as its users do."""
    timm: Any = import_module("timm")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = inputs["images"]
    return {"tokens": model.forward_features(images)} | ({"logits": model(images)} if model.num_classes else {})


@torch.no_grad()
def hf_vit_outputs(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """ViT of transformers."""
    transformers: Any = import_module("transformers")
    model = transformers.ViTModel.from_pretrained(str(folder), add_pooling_layer=False).eval()
    return {"tokens": model(pixel_values=inputs["images"]).last_hidden_state}


def hf_vitmae_outputs(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """ViTMAE of transformers with the same patches masked; its tokens with none masked."""
    transformers: Any = import_module("transformers")
    model = transformers.ViTMAEForPreTraining.from_pretrained(str(folder)).eval()
    num_tokens = inputs["order"].shape[1]
    # It rounds down products just below a whole number, such as 10 * (1 - 0.9); half a token more gives our count.
    model.config.mask_ratio = 1 - (int(inputs["num_visible"]) + 0.5) / num_tokens
    output = model(pixel_values=inputs["images"], noise=inputs["order"].argsort(dim=1).float())
    (gradient,) = torch.autograd.grad(output.loss, model.vit.embeddings.patch_embeddings.projection.weight)
    model.config.mask_ratio = 0.0
    with torch.no_grad():
        places = torch.arange(num_tokens).expand_as(inputs["order"]).float()
        tokens = model.vit(pixel_values=inputs["images"], noise=places).last_hidden_state
    return {"tokens": tokens, "prediction": output.logits, "loss": output.loss, "gradient": gradient.flatten(1)}


def official_outputs(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """This package's import of official weights, which compares with timm: the official code no longer runs.

    Such a file does not state its loss, so that is not compared.
    """
    outputs = model_outputs(open_model(folder / OFFICIAL_FILE, photo_check=False)[0], inputs)
    return {name: output for name, output in outputs.items() if name not in ("loss", "gradient")}


def ours_outputs(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """This package."""
    return model_outputs(open_model(folder)[0], inputs)


def onnx_outputs(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """onnxruntime, on the whole batch and on each image alone, as a batch may have any size; or on a detector's."""
    session = import_module("onnxruntime").InferenceSession(str(folder / ONNX_FILE))
    names = [output.name for output in session.get_outputs()]
    feed = {given.name: inputs[given.name].numpy() for given in session.get_inputs()}

    def run(rows: slice) -> list[Any]:
        return session.run(names, {name: values[rows] for name, values in feed.items()})

    if "image" in feed:  # a detector takes one
        found = session.run(names, feed)
        return {name: torch.from_numpy(values) for name, values in zip(names, found, strict=True)}
    together = run(slice(None))
    alone = [run(slice(number, number + 1)) for number in range(len(inputs["images"]))]
    outputs: dict[str, Tensor] = {}
    for number, name in enumerate(names):
        outputs[name] = torch.from_numpy(together[number])
        outputs[f"{name}, one by one"] = torch.from_numpy(np.concatenate([one[number] for one in alone]))
    return outputs


@torch.no_grad()
def program_outputs(folder: Path, inputs: Inputs) -> dict[str, Tensor]:
    """PyTorch's exported program, likewise."""
    program = torch.export.load(folder / PROGRAM_FILE).module()
    images = inputs["images"]
    alone = [program(image.unsqueeze(0)) for image in images]
    together = program(images)
    return together | {f"{name}, one by one": torch.cat([one[name] for one in alone]) for name in together}


READERS: Mapping[str, Callable[[Path, Inputs], dict[str, Tensor]]] = {
    "timm": timm_outputs,
    "hf-vit": hf_vit_outputs,
    "hf-vitmae": hf_vitmae_outputs,
    "official": official_outputs,
    "onnx": onnx_outputs,
    "onnx-mae": onnx_outputs,
    "torch-export": program_outputs,
    "safetensors": ours_outputs,
}


def main(argv: list[str]) -> int:
    """Load a folder with a library, read inputs from one file and write the outputs to another."""
    format_name, folder, inputs_file, outputs_file = argv
    outputs = READERS[format_name](Path(folder), load_file(inputs_file))
    save_file({name: tensor.detach().contiguous() for name, tensor in outputs.items()}, outputs_file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
