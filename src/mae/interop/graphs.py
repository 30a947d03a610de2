"""A model as a graph that runs without this package: ONNX, and PyTorch's own exported programs."""

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from mae.masking.random import RandomMasking
from mae.models.classifier import ImageClassifier
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.types import MaskPlan

TRACED_BATCH = 2
"""A batch of 1 would be taken for a constant."""

_OPSET = 20
_LARGE = 1 << 30
"""Bytes of weights above which they go into a file beside the graph: a protobuf holds less than twice as many."""


class FeatureGraph(nn.Module):
    """What is known of whole images: every token, their summaries, and a classifier's logits.

    Args:
        model: taken, not copied.
    """

    def __init__(self, model: PretrainedEncoder) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, images: Float[Tensor, "B C H W"]) -> dict[str, Tensor]:
        """`tokens [B, L, D]` after the last norm, `mean [B, D]` of the patch tokens, `cls [B, D]`, `logits [B, K]`."""
        encoder = self.model.encoder
        tokens = encoder(images)
        found = {"tokens": tokens, "mean": tokens[:, encoder.num_prefix :].mean(dim=1)}
        if encoder.num_prefix:
            found["cls"] = tokens[:, 0]
        if isinstance(self.model, ImageClassifier):
            found["logits"] = self.model.head(self.model.fc_norm(found["mean"]))
        return found


class PredictionGraph(nn.Module):
    """What is predicted for every patch where the first ones of an order are seen.

    Args:
        model: taken, not copied.
    """

    def __init__(self, model: MaskedAutoencoder) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, images: Float[Tensor, "B C H W"], order: Int64[Tensor, "B N"]) -> dict[str, Tensor]:
        """`prediction [B, N, P]` in raster order."""
        model = self.model
        assert model.config is not None
        plan = plan_of_order(order, model.config.mask_ratio).predict_all()
        return {"prediction": model.decoder(model.maps(images, plan), plan, model.config.grid)}


def num_visible(mask_ratio: float, num_tokens: int) -> int:
    """How many tokens a ratio leaves visible, as in pre-training."""
    return RandomMasking(ratio=mask_ratio).num_visible((num_tokens,))


def plan_of_order(order: Int64[Tensor, "B N"], mask_ratio: float) -> MaskPlan:
    """The mask by which the first tokens of an order stay visible."""
    count = num_visible(mask_ratio, order.shape[1])
    visible = order[:, :count]
    hidden = torch.ones_like(order, dtype=torch.bool).scatter(1, visible, False)
    return MaskPlan(visible=visible, predicted=order[:, count:], hidden=hidden)


def write_onnx(graph: nn.Module, inputs: Mapping[str, Tensor], path: Path, facts: Mapping[str, str]) -> None:
    """A graph as an ONNX file for batches of any size, its weights beside it where they are many.

    Args:
        graph: in evaluation mode; its `forward` takes the inputs by name and returns tensors by name.
        inputs: an example, of two images.
        path: the file.
        facts: what the file says of itself, by name.
    """
    with torch.no_grad():
        names = list(graph(**inputs))
    size = sum(weight.numel() * weight.element_size() for weight in graph.parameters())
    with warnings.catch_warnings(action="ignore"):  # of names of axes that are given once for all inputs
        program = torch.onnx.export(
            graph,
            kwargs=dict(inputs),
            dynamo=True,
            opset_version=_OPSET,
            input_names=list(inputs),
            output_names=names,
            dynamic_shapes=_any_batch(inputs),
            verbose=False,
        )
        assert program is not None
        program.model.metadata_props.update(facts)
        program.save(str(path), external_data=size > _LARGE)
    import_module("onnx").checker.check_model(str(path))


def write_program(graph: nn.Module, inputs: Mapping[str, Tensor], path: Path) -> None:
    """A graph as a file of `torch.export.save` for batches of any size; see `write_onnx`."""
    program = torch.export.export(graph, (), dict(inputs), dynamic_shapes=_any_batch(inputs))
    write_by_memory(path, lambda held: torch.export.save(program, held))


def write_by_memory(path: Path, save: Callable[[BytesIO], object]) -> None:
    """What PyTorch saves, by way of memory: where a disk is full its own writing ends the process.

    Raises:
        OSError: it cannot be written.
    """
    held = BytesIO()
    save(held)
    path.write_bytes(held.getbuffer())


def _any_batch(inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    batch = torch.export.Dim("batch")
    return {name: {0: batch} for name in inputs}
