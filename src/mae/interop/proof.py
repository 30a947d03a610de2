"""The same images through the library that weights come from, and through this package."""

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mae.errors import MAEError
from mae.interop.layouts import Named
from mae.interop.reading import WEIGHTS, Foreign
from mae.models.config import ModelConfig
from mae.models.pretrained import PretrainedEncoder

TOLERANCE = 1e-7
"""Largest difference of two encoders in float64, relative to the largest value: both do the same arithmetic. An eps of
1e-12 instead of 1e-6 in the norms makes ten times as much."""

_LARGE, TOLERANCE_LARGE = 200_000_000, 2e-5
"""Models of so many parameters are compared in float32, to save memory."""

_IMAGES = 2

Tokens = Callable[[Float[Tensor, "B C H W"]], Float[Tensor, "B L D"]]
"""What leaves the last norm."""


def prove_encoder(foreign: Foreign, named: Named, model: PretrainedEncoder, *, slack: float) -> str:
    """Compare the encoder with the library's own on random images, and say what came out.

    transformers reads its folders by itself, and so does timm. Of other files timm's vision transformer is given the
    tensors under official names. Where the library is not installed it is said so.

    Args:
        foreign: what came in.
        named: the tensors as they came.
        model: what was made of them.
        slack: largest difference of stored positions and ours.

    Raises:
        MAEError: the two do not give the same tokens.
    """
    is_hf = named.layout.norm_eps is None
    library = "transformers" if is_hf else "timm"
    if find_spec(library) is None:
        return f"not compared with {library}, which is not installed"
    config = model.config
    assert config is not None
    is_large = sum(weight.numel() for weight in model.parameters()) > _LARGE
    kind = torch.float32 if is_large else torch.float64
    tolerance = max(TOLERANCE_LARGE if is_large else TOLERANCE, 10 * slack)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(_IMAGES, config.in_chans, *config.img_size, generator=generator).to(kind)
    with torch.random.fork_rng(devices=[]), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        if is_hf:
            theirs = _of_transformers(foreign.path, config, kind)
        elif "pretrained_cfg" in foreign.config and (foreign.path / WEIGHTS[0]).is_file():
            theirs = _of_timms_folder(foreign.path, kind)
        else:
            theirs = _of_timm(named, config, kind)
    with torch.no_grad():
        expected = theirs(images)
        del theirs  # before ours takes memory in float64
        found = deepcopy(model.encoder).to(kind)(images)
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= tolerance:  # nor may it be NaN
        raise MAEError(
            f"{foreign.path}: what came in does not answer as {library}'s model does (largest difference "
            f"{difference:.1e} of the largest value, rounding makes {tolerance:.0e} at most): biases, order of "
            "queries, keys and values, heads, positions or the norms' eps differ"
        )
    return f"answers as the model of {library} does (largest difference {difference:.0e})"


def _of_timms_folder(path: Path, kind: torch.dtype) -> Tokens:
    """The folder as timm reads it."""
    timm: Any = import_module("timm")
    model = timm.create_model(f"local-dir:{path}", pretrained=True, num_classes=0)
    return model.to(kind).eval().forward_features


def _of_timm(named: Named, config: ModelConfig, kind: torch.dtype) -> Tokens:
    """timm's vision transformer with the tensors as they came; it needs every one of them, and takes no other."""
    tensors = dict(named.encoder)
    table = tensors["pos_embed"]
    model = import_module("timm.models.vision_transformer").VisionTransformer(
        img_size=config.img_size,
        patch_size=config.patch_size,
        in_chans=config.in_chans,
        num_classes=0,
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_ratio,
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        class_token=config.cls_token,
        no_embed_class=table.shape[1] == config.num_tokens,
        global_pool="token" if config.cls_token else "avg",
        fc_norm=False,
    )
    own = model.state_dict().keys()
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name in own})
    return model.to(kind).eval().forward_features


def _of_transformers(path: Path, config: ModelConfig, kind: torch.dtype) -> Tokens:
    """The folder as transformers reads it; its ViTMAE is told to hide nothing and to keep the order of patches."""
    transformers: Any = import_module("transformers")
    folder, log = path if path.is_dir() else path.parent, transformers.logging
    verbosity = log.get_verbosity()
    log.set_verbosity_error()  # it would list the decoder's tensors, which its encoder does not have
    try:
        model = transformers.AutoModel.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    finally:
        log.set_verbosity(verbosity)
    order: dict[str, Tensor] = {}
    if model.config.model_type == "vit_mae":
        model.config.mask_ratio = 0.0
        order["noise"] = torch.linspace(0, 1, config.num_tokens).expand(_IMAGES, -1)
    model = model.to(kind).eval()
    return lambda images: model(pixel_values=images, **order).last_hidden_state
