"""A masked autoencoder written a second time: float64, one image, one patch and one head at a time.

It shares nothing with the package but the names of the weights and the fields of the configuration, so that a
mistake would have to be made twice. Slow on purpose.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mae.core.method import MethodConfig

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SlowOutput:
    """Loss, prediction of every token `[B, N, P]`, latent of the visible tokens in the order given."""

    loss: Tensor
    pred: Tensor
    latent: Tensor


def double_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """A trainable float64 copy of every parameter."""
    return {name: weight.detach().double().requires_grad_() for name, weight in model.named_parameters()}


def slow_forward(
    weights: Weights, config: MethodConfig, images: Tensor, visible: list[list[int]], share: Tensor
) -> SlowOutput:
    """The whole objective; `share` `[B, N]` says how much each token's error counts."""
    losses, preds, latents = [], [], []
    for image, seen, counts in zip(images.double(), visible, share.double(), strict=True):
        latent = slow_encode(weights, config, image, seen)
        pred = _decode(weights, config, latent, seen)
        errors = [(pred[n] - _target(config, image, n)).square().mean() for n in range(len(pred))]
        losses.append((torch.stack(errors) * counts).sum())
        preds.append(pred)
        latents.append(latent)
    loss = torch.stack(losses).sum() / share.double().sum()
    return SlowOutput(loss=loss, pred=torch.stack(preds), latent=torch.stack(latents))


def slow_encode(weights: Weights, config: MethodConfig, image: Tensor, seen: list[int]) -> Tensor:
    """Tokens of one image `[L, D]`, class tokens first if there are any."""
    tokens = [*weights["encoder.cls_token"][0]] if config.encoder.cls_token else []
    for n in seen:
        values = _patch(config, image, n).reshape(-1)
        embedded = weights["encoder.patch_embed.proj.weight"] @ values + weights["encoder.patch_embed.proj.bias"]
        tokens.append(embedded + _position(weights, config, "encoder", n, config.encoder.embed_dim))
    x = _blocks(weights, "encoder", torch.stack(tokens), depth=config.encoder.depth, num_heads=config.encoder.num_heads)
    return _norm(x, weights, "encoder.norm")


def _decode(weights: Weights, config: MethodConfig, latent: Tensor, seen: list[int]) -> Tensor:
    embedded = latent @ weights["decoder.embed.weight"].T + weights["decoder.embed.bias"]
    prefix = len(latent) - len(seen)
    sequence = [embedded[i] for i in range(prefix)]
    for n in range(config.layout.num_tokens):
        token = embedded[prefix + seen.index(n)] if n in seen else weights["decoder.mask_token"][0, 0]
        sequence.append(token + _position(weights, config, "decoder", n, config.decoder.embed_dim))
    depth, num_heads = config.decoder.depth, config.decoder.num_heads
    x = _blocks(weights, "decoder", torch.stack(sequence), depth=depth, num_heads=num_heads)
    x = _norm(x, weights, "decoder.norm")[prefix:]
    return x @ weights["decoder.pred.weight"].T + weights["decoder.pred.bias"]


def _patch(config: MethodConfig, image: Tensor, n: int) -> Tensor:
    """Pixels `[C, p, q]` of token n."""
    (p, q), columns = config.layout.patch, config.layout.size[1] // config.layout.patch[1]
    row, column = divmod(n, columns)
    return image[:, row * p : (row + 1) * p, column * q : (column + 1) * q]


def _target(config: MethodConfig, image: Tensor, n: int) -> Tensor:
    patch = _patch(config, image, n)
    channels, p, q = patch.shape
    values = torch.stack([patch[c, i, j] for i in range(p) for j in range(q) for c in range(channels)])
    if not config.target.norm:
        return values
    mean = values.sum() / len(values)
    variance = (values - mean).square().sum() / (len(values) - 1)
    return (values - mean) / (variance + 1e-6).sqrt()


def _position(weights: Weights, config: MethodConfig, part: str, n: int, dim: int) -> Tensor:
    if config.encoder.pos_embed == "learned":
        return weights[f"{part}.pos_embed.table"][n]
    row, column = divmod(n, config.layout.size[1] // config.layout.patch[1])
    quarter = dim // 4
    rates = [10000.0 ** (-i / quarter) for i in range(quarter)]
    values = [f(x * rate) for x in (column, row) for f in (math.sin, math.cos) for rate in rates]
    return torch.tensor(values, dtype=torch.float64)


def _norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    mean = x.mean(dim=-1, keepdim=True)
    variance = (x - mean).square().mean(dim=-1, keepdim=True)
    return (x - mean) / (variance + 1e-6).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _blocks(weights: Weights, part: str, x: Tensor, *, depth: int, num_heads: int) -> Tensor:
    for i in range(depth):
        name = f"{part}.blocks.{i}"
        x = x + _attention(_norm(x, weights, f"{name}.norm1"), weights, f"{name}.attn", num_heads)
        hidden = _linear(_norm(x, weights, f"{name}.norm2"), weights, f"{name}.mlp.fc1")
        x = x + _linear(hidden * (1 + torch.erf(hidden / 2**0.5)) / 2, weights, f"{name}.mlp.fc2")
    return x


def _linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _attention(x: Tensor, weights: Weights, name: str, num_heads: int) -> Tensor:
    dim = x.shape[-1]
    size = dim // num_heads
    query, key, value = (_linear(x, weights, f"{name}.qkv")[:, i * dim : (i + 1) * dim] for i in range(3))
    heads = []
    for h in range(num_heads):
        part = slice(h * size, (h + 1) * size)
        scores = query[:, part] @ key[:, part].T / math.sqrt(size)
        powers = (scores - scores.max(dim=-1, keepdim=True).values).exp()
        heads.append(powers / powers.sum(dim=-1, keepdim=True) @ value[:, part])
    return _linear(torch.cat(heads, dim=-1), weights, f"{name}.proj")
