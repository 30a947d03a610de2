"""The same images through the library that weights come from, and through this package."""

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

from mae.errors import MAEError
from mae.interop.layouts import Named
from mae.interop.reading import WEIGHTS, Foreign
from mae.models.classifier import ImageClassifier
from mae.models.config import ModelConfig, pair
from mae.models.pretrained import PretrainedEncoder

TOLERANCE = 1e-7
"""Largest difference of two encoders in float64, relative to the largest value: both do the same arithmetic. An eps of
1e-12 instead of 1e-6 in the norms makes ten times as much."""

_LARGE, TOLERANCE_LARGE = 200_000_000, 2e-5
"""Models of so many parameters are compared in float32, to save memory."""

_IMAGES = 2
_MOST_TOKENS, _MOST_VALUES = 4096, 1 << 24
"""Of an image: no file's header can make a comparison hang."""
_MOST_SHOWN = 200
_ARCHITECTURE = "architecture"
_OWN = ("num_heads", "qkv_bias", "act_layer")
"""Arguments of timm's that shapes do not tell."""
_OWN_HF = ("num_attention_heads", "hidden_act", "layer_norm_eps", "qkv_bias")
"""Likewise of transformers'."""

Answer = Callable[[Float[Tensor, "B C H W"]], Float[Tensor, "B ..."]]
"""What leaves the last norm, or a classifier's logits."""


def prove_encoder(foreign: Foreign, named: Named, model: PretrainedEncoder, *, is_sines: bool) -> str:
    """Compare the encoder, or the whole classifier, with the library's own on random images, and say what came out.

    transformers reads its folders by itself. timm makes the architecture that its `config.json` names, or else its
    plain vision transformer of these sizes, and is given the tensors under official names.

    Args:
        foreign: what came in.
        named: the tensors as they came.
        model: what was made of them.
        is_sines: whether the stored positions are the paper's, up to rounding: both sides then get ours.

    Returns:
        How far the two are apart, or why they were not compared.

    Raises:
        MAEError: the library cannot read it, or the two do not give the same tokens.
    """
    config = model.config
    assert config is not None
    library = named.layout.library
    is_hf = library == "transformers"
    if find_spec(library) is None:
        return f"not compared with {library}, which is not installed"
    if config.num_tokens > _MOST_TOKENS or prod(config.img_size) * config.in_chans > _MOST_VALUES:
        return f"not compared with {library}: its images are too large"
    if is_hf and not _is_folder(foreign):
        return f"not compared with {library}, which reads folders with a config.json"
    is_large = sum(weight.numel() for weight in model.parameters()) > _LARGE
    kind, tolerance = (torch.float32, TOLERANCE_LARGE) if is_large else (torch.float64, TOLERANCE)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(_IMAGES, config.in_chans, *config.img_size, generator=generator).to(kind)
    table = model.encoder.pos_embed(config.grid).detach() if is_sines else None
    try:
        with torch.random.fork_rng(devices=[]), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            theirs = (
                _of_transformers(foreign, config, kind, table)
                if is_hf
                else _of_timm(foreign, named, config, kind, table)
            )
        with torch.no_grad():
            expected = theirs(images)
    except Exception as error:  # of many kinds
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MAEError(f"{foreign.path} cannot be read by {library}: {first[:_MOST_SHOWN]}") from error
    with torch.no_grad():
        del theirs  # before ours takes memory in float64
        ours = deepcopy(model).to(kind)
        found = ours.logits(images) if isinstance(ours, ImageClassifier) else ours.encoder(images)
    same_shape = found.shape == expected.shape
    difference = float((found - expected).abs().max() / expected.abs().max()) if same_shape else inf
    if not difference <= tolerance:  # nor may it be NaN
        raise MAEError(
            f"{foreign.path}: what came in does not answer as {library}'s model does (largest difference "
            f"{difference:.1e} of the largest value, rounding makes {tolerance:.0e} at most): biases, order of "
            "queries, keys and values, number of heads, positions, activation or the norms' eps differ"
        )
    plain = "" if is_hf or _ARCHITECTURE in foreign.config else "'s plain vision transformer"
    return f"answers as the model of {library}{plain} does (largest difference {difference:.0e})"


def _is_folder(foreign: Foreign) -> bool:
    """Whether transformers reads this very file, with its configuration."""
    is_named = foreign.path.is_dir() or foreign.path.name == WEIGHTS[0]
    return is_named and foreign.config.get("model_type") in ("vit", "vit_mae")


def _of_timm(foreign: Foreign, named: Named, config: ModelConfig, kind: torch.dtype, table: Tensor | None) -> Answer:
    """timm's model with the tensors as they came; it needs every one of them, and takes no other."""
    tensors = dict(named.encoder)
    if table is not None:
        lead = tensors["pos_embed"].shape[1] - config.num_tokens
        tensors["pos_embed"] = pad(table, (0, 0, lead, 0)).unsqueeze(0)
    classes = tensors.get("head.weight") if "fc_norm.weight" in tensors and "norm.weight" not in tensors else None
    arguments: dict[str, Any] = {
        "img_size": config.img_size,
        "patch_size": config.patch_size,
        "in_chans": config.in_chans,
        "num_classes": 0 if classes is None else len(classes),
        "embed_dim": config.embed_dim,
        "depth": config.depth,
        "mlp_ratio": config.mlp_ratio,
        "class_token": config.cls_token,
        "no_embed_class": tensors["pos_embed"].shape[1] == config.num_tokens,
        "global_pool": "token" if config.cls_token and classes is None else "avg",
        "fc_norm": classes is not None,
    }
    if _ARCHITECTURE in foreign.config:  # heads, activation and biases are then its own affair
        own = {name: value for name, value in foreign.config.get("model_args", {}).items() if name in _OWN}
        model = import_module("timm").create_model(foreign.config[_ARCHITECTURE], **arguments | own)
    else:
        has_bias = "blocks.0.attn.qkv.bias" in tensors
        vit = import_module("timm.models.vision_transformer").VisionTransformer
        model = vit(**arguments, num_heads=config.num_heads, qkv_bias=has_bias)
    expected = model.state_dict().keys()
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name in expected})
    model = model.to(kind).eval()
    return model.forward_features if classes is None else model


def _of_transformers(foreign: Foreign, config: ModelConfig, kind: torch.dtype, table: Tensor | None) -> Answer:
    """transformers' model with the tensors as they came; its ViTMAE is told to hide nothing and to keep the order.

    Of `config.json` only what shapes do not tell is handed over: other entries could ask for any memory, or for code.
    """
    transformers: Any = import_module("transformers")
    sizes = {
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.depth,
        "intermediate_size": int(config.embed_dim * config.mlp_ratio),
        "image_size": config.img_size,
        "patch_size": config.patch_size,
        "num_channels": config.in_chans,
    }
    told = {name: foreign.config.get(name, size) for name, size in sizes.items()}
    told["image_size"] = config.img_size  # no tensor tells it: it comes from there, or the user knows better
    if isinstance(patch := told["patch_size"], int | list):
        told["patch_size"] = pair(patch) if isinstance(patch, int) else tuple(patch)
    if wrong := [name for name, size in sizes.items() if told[name] != size]:
        raise ValueError(f"its config.json has another {' and '.join(wrong)} than its tensors")
    own = {name: foreign.config[name] for name in _OWN_HF if name in foreign.config}
    is_mae, log = foreign.config["model_type"] == "vit_mae", transformers.logging
    described = (transformers.ViTMAEConfig if is_mae else transformers.ViTConfig)(**sizes, **own)
    verbosity = log.get_verbosity()
    log.set_verbosity_error()  # it would list the decoder's tensors, which its encoder does not have
    try:
        tensors = {"config": described, "state_dict": dict(foreign.tensors)}
        if is_mae:
            model = transformers.ViTMAEModel.from_pretrained(None, **tensors)
        else:
            model = transformers.ViTModel.from_pretrained(None, **tensors, add_pooling_layer=False)
    finally:
        log.set_verbosity(verbosity)
    model = model.to(kind).eval()
    if table is not None:
        positions = model.embeddings.position_embeddings
        positions.data = torch.cat([positions.data[:, :1], table.to(kind).unsqueeze(0)], dim=1)
    order: dict[str, Tensor] = {}
    if is_mae:
        model.config.mask_ratio = 0.0
        order["noise"] = torch.linspace(0, 1, config.num_tokens).expand(_IMAGES, -1)
    return lambda images: model(pixel_values=images, **order).last_hidden_state
