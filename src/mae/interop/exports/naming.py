"""Our tensors under other libraries' names: the inverse of `imports.naming` and `imports.convert`."""

import re
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn.functional import pad

from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder

_HF_BLOCK = (
    (r"\.attn\.proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
)
_HF_ENCODER = (
    (r"^pos_embed$", "embeddings.position_embeddings"),
    (r"^cls_token$", "embeddings.cls_token"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embeddings.projection."),
    (r"^blocks\.", "encoder.layer."),
    (r"^norm\.", "layernorm."),
    *_HF_BLOCK,
)
_HF_DECODER = ((r"^decoder_blocks\.", "decoder_encoder.layer."), *_HF_BLOCK)
_QKV = ("query", "key", "value")


def official_tensors(model: PretrainedEncoder) -> dict[str, Tensor]:
    """The tensors of a model under the official names, including positions; those of an encoder alone are timm's.

    Args:
        model: has a configuration, and the paper's decoder or none.
    """
    config = model.config
    assert config is not None
    tensors = {}
    for name, tensor in model.state_dict().items():
        part, _, rest = name.partition(".")
        if part in ("term_heads", "term_teachers"):  # of use in pre-training alone
            continue
        if part not in ("encoder", "decoder"):  # a classifier's norm and head
            tensors[name] = tensor
            continue
        if rest == "patch_embed.proj.weight":
            tensor = tensor.reshape(-1, config.layout.channels, *config.layout.patch)
        if name == "encoder.mask_token" or rest == "pos_embed.table":  # whole images have nothing masked
            continue
        if part == "decoder" and rest.startswith("pred."):  # behind the target's rows are those for terms
            tensor = tensor[: config.outputs["target"]]
        if name == "encoder.cls_token" and tensor.shape[1] > 1:  # timm calls all but the first registers
            tensor, tensors["reg_token"] = tensor[:, :1], tensor[:, 1:]
        tensors[rest if part == "encoder" or rest == "mask_token" else f"decoder_{rest}"] = tensor
    lead = (0, 0, config.encoder.num_prefix, 0)  # a row for each class token
    tensors["pos_embed"] = pad(model.encoder.pos_embed(config.layout.grid).detach(), lead).unsqueeze(0)
    if isinstance(model, MaskedAutoencoder):
        tensors["decoder_pos_embed"] = pad(model.decoder.pos_embed(config.layout.grid).detach(), lead).unsqueeze(0)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def hf_tensors(official: Mapping[str, Tensor], *, prefix: str) -> dict[str, Tensor]:
    """Rename official tensors as `save_pretrained` of transformers does, with separate queries, keys and values.

    Args:
        official: see `official_tensors`.
        prefix: of the encoder's names; the decoder's have `decoder.`
    """
    tensors = {}
    for name, tensor in official.items():
        of_decoder = name == "mask_token" or name.startswith("decoder_")
        new = _renamed(name, _HF_DECODER if of_decoder else _HF_ENCODER)
        new = f"decoder.{new}" if of_decoder else f"{prefix}{new}"
        if ".attn.qkv." not in new:
            tensors[new] = tensor
            continue
        for part, value in zip(_QKV, tensor.chunk(3), strict=True):
            tensors[new.replace(".attn.qkv.", f".attention.attention.{part}.")] = value.contiguous()
    return tensors


def _renamed(name: str, renames: Sequence[tuple[str, str]]) -> str:
    for pattern, instead in renames:
        name = re.sub(pattern, instead, name)
    return name
