"""Compare the outputs of the library that weights come from with those of this package."""

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from math import inf, prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mae.core.method import MethodConfig
from mae.errors import MAEError
from mae.interop.imports.layer_scale import has_layer_scale
from mae.interop.imports.naming import RenamedTensors
from mae.interop.imports.reading import WEIGHTS, ExternalWeights
from mae.models.classifier import ImageClassifier
from mae.models.pretrained import PretrainedEncoder

TOLERANCE = 1e-7
"""Largest difference of two encoders in float64, relative to the largest value: both do the same arithmetic. Norms with
an epsilon of 1e-12 instead of 1e-6 differ ten times as much."""

TOLERANCE_FOLDED = 5e-7
"""Of weights that were multiplied by a LayerScale and rounded to float32 again."""

_LARGE, TOLERANCE_LARGE = 200_000_000, 2e-5
"""Models with more parameters are compared in float32, to save memory."""

_IMAGES = 2
_MAX_TOKENS, _MAX_VALUES = 4096, 1 << 24
"""Of an image: no file can make the comparison hang."""
_MAX_SHOWN = 200
_ARCHITECTURE = "architecture"
_OWN = ("num_heads", "qkv_bias", "act_layer")
"""Arguments of timm that shapes do not reveal."""
_OWN_HF = ("num_attention_heads", "hidden_act", "layer_norm_eps", "qkv_bias")
"""Likewise of transformers."""

Encode = Callable[[Float[Tensor, "B C H W"]], Float[Tensor, "B ..."]]
"""Images to the outputs of the last norm, or to a classifier's logits."""


def compare_with_library(
    external: ExternalWeights, renamed: RenamedTensors, model: PretrainedEncoder, *, is_sines: bool
) -> str:
    """Compare the encoder, or the whole classifier, with the library's own on random images.

    transformers loads its folders itself. timm builds the architecture that its `config.json` names, or else its
    plain vision transformer of these sizes, and loads the tensors under official names.

    Args:
        external: the imported file or folder.
        renamed: its tensors under official names.
        model: the model made of them.
        is_sines: whether the stored position embedding is the paper's, up to rounding: both sides then get ours.

    Returns:
        A note on the difference, or on why they were not compared.

    Raises:
        MAEError: the library cannot load it, or the two differ by more than rounding.
    """
    config = model.config
    assert config is not None
    library = renamed.scheme.library
    is_hf = library == "transformers"
    if find_spec(library) is None:
        return f"not compared with {library}, which is not installed"
    if config.layout.num_tokens > _MAX_TOKENS or prod(config.layout.size) * config.layout.channels > _MAX_VALUES:
        return f"not compared with {library}: its images are too large"
    if is_hf and not _is_folder(external):
        return f"not compared with {library}, which reads folders with a config.json"
    is_large = sum(weight.numel() for weight in model.parameters()) > _LARGE
    dtype, tolerance = (torch.float32, TOLERANCE_LARGE) if is_large else (torch.float64, TOLERANCE)
    if has_layer_scale(renamed.encoder):
        tolerance = max(tolerance, TOLERANCE_FOLDED)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(_IMAGES, config.layout.channels, *config.layout.size, generator=generator).to(dtype)
    table = model.encoder.pos_embed(config.layout.grid).detach() if is_sines else None
    try:
        with torch.random.fork_rng(devices=[]), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            theirs = (
                _of_transformers(external, config, dtype, table)
                if is_hf
                else _of_timm(external, renamed, config, dtype, table)
            )
        with torch.no_grad():
            expected = theirs(images)
    except Exception as error:  # of many kinds
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MAEError(f"{external.path} cannot be read by {library}: {first[:_MAX_SHOWN]}") from error
    with torch.no_grad():
        del theirs  # before ours takes memory in float64
        ours = deepcopy(model).to(dtype)
        outputs = ours(images) if isinstance(ours, ImageClassifier) else ours.encoder(images).tokens
    same_shape = outputs.shape == expected.shape
    difference = float((outputs - expected).abs().max() / expected.abs().max()) if same_shape else inf
    if not difference <= tolerance:  # nor may it be NaN
        raise MAEError(
            f"{external.path}: the imported model's outputs differ from those of {library} by {difference:.1e} of the "
            f"largest value; expected at most {tolerance:.0e}: biases, order of queries, keys and values, number of "
            "heads, position embedding, activation or the norms' epsilon differ"
        )
    plain = "" if is_hf or _ARCHITECTURE in external.config else "'s plain vision transformer"
    return f"same outputs as {library}{plain} (largest difference {difference:.0e})"


def _is_folder(external: ExternalWeights) -> bool:
    """Whether transformers can load this file with its configuration."""
    is_named = external.path.is_dir() or external.path.name == WEIGHTS[0]
    return is_named and external.config.get("model_type") in ("vit", "vit_mae", "dinov2")


def _of_timm(
    external: ExternalWeights, renamed: RenamedTensors, config: MethodConfig, dtype: torch.dtype, table: Tensor | None
) -> Encode:
    """timm's model with the file's tensors; it needs all of them and takes no other."""
    tensors = dict(renamed.encoder)
    if table is not None:
        lead = tensors["pos_embed"].shape[1] - config.layout.num_tokens
        tensors["pos_embed"] = pad(table, (0, 0, lead, 0)).unsqueeze(0)
    classes = tensors.get("head.weight") if "fc_norm.weight" in tensors and "norm.weight" not in tensors else None
    arguments: dict[str, Any] = {
        "img_size": config.layout.size,
        "patch_size": config.layout.patch,
        "in_chans": config.layout.channels,
        "num_classes": 0 if classes is None else len(classes),
        "embed_dim": config.encoder.embed_dim,
        "depth": config.encoder.depth,
        "mlp_ratio": config.encoder.mlp_ratio,
        "class_token": config.encoder.cls_token,
        "no_embed_class": tensors["pos_embed"].shape[1] == config.layout.num_tokens,
        "global_pool": "token" if config.encoder.cls_token and classes is None else "avg",
        "fc_norm": classes is not None,
    }
    if has_layer_scale(tensors):
        arguments["init_values"] = 1.0  # to have one: the values are the file's
    if _ARCHITECTURE in external.config:  # it then sets heads, activation and biases itself
        own = {name: value for name, value in external.config.get("model_args", {}).items() if name in _OWN}
        model = import_module("timm").create_model(external.config[_ARCHITECTURE], **arguments | own)
    else:
        has_bias = "blocks.0.attn.qkv.bias" in tensors
        vit = import_module("timm.models.vision_transformer").VisionTransformer
        model = vit(**arguments, num_heads=config.encoder.num_heads, qkv_bias=has_bias)
    expected = model.state_dict().keys()
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name in expected})
    model = model.to(dtype).eval()
    return model.forward_features if classes is None else model


def _of_transformers(
    external: ExternalWeights, config: MethodConfig, dtype: torch.dtype, table: Tensor | None
) -> Encode:
    """transformers' model with the file's tensors; ViTMAE masks nothing and keeps the order of the patches.

    Only what shapes do not reveal is taken from `config.json`: other entries could ask for any memory, or for code.
    """
    transformers: Any = import_module("transformers")
    hidden = int(config.encoder.embed_dim * config.encoder.mlp_ratio)
    is_dinov2 = external.config["model_type"] == "dinov2"
    sizes: dict[str, Any] = {
        "hidden_size": config.encoder.embed_dim,
        "num_hidden_layers": config.encoder.depth,
        **({"mlp_ratio": hidden // config.encoder.embed_dim} if is_dinov2 else {"intermediate_size": hidden}),
        "image_size": config.layout.size,
        "patch_size": config.layout.patch,
        "num_channels": config.layout.channels,
    }
    stated = {name: external.config.get(name, size) for name, size in sizes.items()}
    stated["image_size"] = config.layout.size  # no tensor has it: it comes from there, or from the user
    if isinstance(patch := stated["patch_size"], int | list):
        stated["patch_size"] = (patch, patch) if isinstance(patch, int) else tuple(patch)
    if wrong := [name for name, size in sizes.items() if stated[name] != size]:
        raise ValueError(f"its config.json and its tensors disagree on {' and '.join(wrong)}")
    own = {name: external.config[name] for name in _OWN_HF if name in external.config}
    kind, log = external.config["model_type"], transformers.logging
    is_mae = kind == "vit_mae"
    prefix = {"vit_mae": "ViTMAE", "vit": "ViT", "dinov2": "Dinov2"}[kind]
    described = getattr(transformers, f"{prefix}Config")(**sizes, **own)
    verbosity = log.get_verbosity()
    log.set_verbosity_error()  # it would list the decoder's tensors, which its encoder does not have
    try:
        tensors = {"config": described, "state_dict": dict(external.tensors)}
        pooling = {"add_pooling_layer": False} if kind == "vit" else {}
        model = getattr(transformers, f"{prefix}Model").from_pretrained(None, **tensors, **pooling)
    finally:
        log.set_verbosity(verbosity)
    model = model.to(dtype).eval()
    if table is not None:
        positions = model.embeddings.position_embeddings
        positions.data = torch.cat([positions.data[:, :1], table.to(dtype).unsqueeze(0)], dim=1)
    order: dict[str, Tensor] = {}
    if is_mae:
        model.config.mask_ratio = 0.0
        order["noise"] = torch.linspace(0, 1, config.layout.num_tokens).expand(_IMAGES, -1)
    return lambda images: model(pixel_values=images, **order).last_hidden_state
