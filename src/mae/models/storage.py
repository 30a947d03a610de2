"""A model in one file: weights as safetensors, its configuration in the header; never a pickle."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mae.errors import MAEError, UsageError
from mae.models.config import ModelConfig
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.zoo import build_model

_KEY = "mae"
FORMAT = 1


def model_metadata(model: MaskedAutoencoder, *, licence: str | None = None) -> dict[str, str]:
    """What a model's file says of the model, as safetensors' header wants it: text.

    Args:
        model: a model made by `create_model` or `build_model`.
        licence: the terms its weights come under, where they have any.
    """
    if model.config is None:
        raise ValueError("this model was put together by hand and has no configuration to store; use build_model")
    return {_KEY: json.dumps({"format": FORMAT, "config": model.config.to_json(), "licence": licence})}


def load_model(path: Path) -> MaskedAutoencoder:
    """The model in a file written by a run, on the CPU, in evaluation mode.

    The file may come from anyone: its configuration is checked value by value, and its tensors must have
    exactly the names, shapes and types of that configuration's model before any of them is read.

    Raises:
        UsageError: the file holds an encoder without a decoder.
        MAEError: not such a file, damaged, or weights that do not fit its configuration or are not finite.
    """
    try:
        with safe_open(path, framework="pt") as file:
            config = _read_config(path, file.metadata() or {})
            with torch.device("meta"):
                expected = build_model(config).state_dict()
            _check_tensors(path, file, expected)
            weights = {name: file.get_tensor(name) for name in expected}
    except (OSError, SafetensorError) as error:
        raise MAEError(f"{path} cannot be read as a safetensors file: {error}") from error
    for name, tensor in weights.items():
        if not bool(tensor.isfinite().all()):
            raise MAEError(f"{path}: tensor {name} holds values that are not finite; the file is damaged")
    with torch.random.fork_rng(devices=[]):  # fresh weights are drawn and thrown away; the caller's numbers stay
        model = build_model(config)
    model.load_state_dict(weights)
    return model.eval()


def _read_config(path: Path, metadata: dict[str, str]) -> ModelConfig:
    try:
        record: Any = json.loads(metadata[_KEY])
        if record["format"] != FORMAT:
            raise MAEError(f"{path} is of format {record['format']!r}; this version of mae reads format {FORMAT}")
        return ModelConfig.from_json(record["config"])
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise MAEError(
            f"{path} says nothing valid of its model in its header ({error!r}); expected a file written by mae"
        ) from error


def _check_tensors(path: Path, file: Any, expected: dict[str, torch.Tensor]) -> None:
    found = set(file.keys())
    if found != expected.keys():
        missing, extra = sorted(expected.keys() - found), sorted(found - expected.keys())
        decoder = sorted(name for name in expected if name.startswith("decoder."))
        if missing == decoder:
            encoder = len(expected) - len(decoder)
            raise UsageError(
                f"{path} holds an encoder only ({encoder} of {encoder} encoder tensors, 0 of {len(decoder)} decoder "
                "tensors); a masked autoencoder needs both, and reconstruction its decoder: use a checkpoint that "
                "pre-training wrote"
            )
        raise MAEError(
            f"{path} does not hold the tensors of its own configuration: "
            f"{len(missing)} missing ({', '.join(missing[:3]) or 'none'}), "
            f"{len(extra)} extra ({', '.join(extra[:3]) or 'none'})"
        )
    for name, tensor in expected.items():
        there = file.get_slice(name)
        found_as, expected_as = (there.get_dtype(), list(there.get_shape())), ("F32", list(tensor.shape))
        if found_as != expected_as:
            raise MAEError(f"{path}: tensor {name} is {found_as}; expected {expected_as}")
