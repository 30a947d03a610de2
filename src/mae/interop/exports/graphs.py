"""A model as a graph that runs without this package: ONNX, and programs of `torch.export`."""

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from mae.core.types import MaskPlan
from mae.encoders.vit import Features
from mae.models.classifier import Classifier
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.models.segmenter import Segmenter

TRACED_BATCH = 2
"""A batch size of 1 would be traced as a constant."""

_OPSET = 20
_LARGE = 1 << 30
"""Bytes of weights above which they go into a separate file: a protobuf holds less than twice as many."""


class FeatureGraph(nn.Module):
    """The features of whole images: all tokens, their summaries, and the logits of a head.

    Args:
        model: used, not copied.
    """

    def __init__(self, model: PretrainedEncoder) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, images: Float[Tensor, "B C H W"]) -> dict[str, Tensor]:
        """`tokens [B, L, D]` after the last norm, `mean [B, D]` of the patch tokens, `cls [B, D]`, `logits [B, K]`.

        A segmenter's `logits` are `[B, K, H, W]`, those of the pixels of images of its size.
        Also `learned [B, D]` where the classifier pools the patch tokens by what it learned.
        """
        encoder = self.model.encoder
        encoded = encoder(images)
        patches = encoded.tokens[:, encoded.num_prefix :]
        outputs = {"tokens": encoded.tokens, "mean": patches.mean(dim=1)}
        if encoded.cls is not None:
            outputs["cls"] = encoded.cls
        if isinstance(self.model, Classifier):
            features = Features(cls=encoded.cls, mean=outputs["mean"], patches=patches, grid=encoder.grid)
            outputs["logits"] = self.model.classify(features)
            if self.model.pooling is not None:
                outputs["learned"] = self.model.pooling(patches)
        if isinstance(self.model, Segmenter):
            outputs["logits"] = self.model(images)
        return outputs


class PredictionGraph(nn.Module):
    """The prediction for every patch, given which patches stay visible.

    Args:
        model: used, not copied.
    """

    def __init__(self, model: MaskedAutoencoder) -> None:
        super().__init__()
        self.model = model
        self.num_visible = num_visible(model)
        self.train(model.training)

    def forward(self, images: Float[Tensor, "B C H W"], order: Int64[Tensor, "B N"]) -> dict[str, Tensor]:
        """`prediction [B, N, P]` in raster order."""
        model = self.model
        assert model.config is not None
        plan = plan_of_order(order, self.num_visible).predict_all()
        return {"prediction": model.decoded(model.encoded(images, plan), plan, model.config.layout)[0]}


def num_visible(model: MaskedAutoencoder) -> int:
    """How many tokens the model's own mask leaves visible, as in pre-training."""
    assert model.config is not None
    return model.masking.num_visible(model.config.layout)


def plan_of_order(order: Int64[Tensor, "B N"], count: int) -> MaskPlan:
    """The plan in which the first `count` tokens of each order are visible and all others predicted."""
    visible = order[:, :count]
    hidden = torch.ones_like(order, dtype=torch.bool).scatter(1, visible, False)
    return MaskPlan(visible=visible, predicted=order[:, count:], hidden=hidden)


def write_onnx(
    graph: nn.Module,
    inputs: Mapping[str, Tensor],
    path: Path,
    facts: Mapping[str, str],
    *,
    shapes: Mapping[str, Any] | None = None,
) -> None:
    """Write a graph as an ONNX file; large weights go into a file beside it.

    Args:
        graph: in evaluation mode; its `forward` takes the inputs by name and returns tensors by name.
        inputs: an example, of two images.
        path: the file.
        facts: the file's metadata, by name.
        shapes: the axes of each input that may have other sizes, as `torch.export` takes them; None: the batch.
    """
    with torch.no_grad():
        names = list(graph(**inputs))
    size = sum(weight.numel() * weight.element_size() for weight in graph.parameters())
    with warnings.catch_warnings(action="ignore"):  # about axis names shared by all inputs
        program = torch.onnx.export(
            graph,
            kwargs=dict(inputs),
            dynamo=True,
            opset_version=_OPSET,
            input_names=list(inputs),
            output_names=names,
            dynamic_shapes=_any_batch(inputs) if shapes is None else dict(shapes),
            verbose=False,
        )
        assert program is not None
        program.model.metadata_props.update(facts)
        program.save(str(path), external_data=size > _LARGE)
    import_module("onnx").checker.check_model(str(path))


def write_program(graph: nn.Module, inputs: Mapping[str, Tensor], path: Path) -> None:
    """Write a graph as a file of `torch.export.save` for any batch size, called by position; see `write_onnx`."""
    program = torch.export.export(graph, tuple(inputs.values()), dynamic_shapes=_any_batch(inputs))
    write_by_memory(path, lambda held: torch.export.save(program, held))


def write_by_memory(path: Path, save: Callable[[BytesIO], object]) -> None:
    """Write what PyTorch saves, by way of memory: its own writer ends the process if the disk is full.

    Raises:
        OSError: it cannot be written.
    """
    held = BytesIO()
    save(held)
    path.write_bytes(held.getbuffer())


def _any_batch(inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    batch = torch.export.Dim("batch")
    return {name: {0: batch} for name in inputs}
