"""Bytes that a training step reads and writes, part by part, beside the least that its mathematics needs.

    python benchmarks/memory_traffic.py
    python benchmarks/memory_traffic.py --models mae_vit_base_patch16 --batch-size 64 --precision bf16 --out bytes.json

Every operation below autograd counts as reading each of its inputs once and writing each of its outputs once. Views and
empty tensors move nothing, what is expanded counts once, a gather reads what it takes, and what is changed in place is
read and written. Passes inside a kernel do not show, and neither does what caches save. An operation of the forward
pass belongs to the innermost module that runs. One of the backward pass belongs to the part during whose forward pass
its node of autograd was made, as the node's sequence number says; a sum of two gradients, which no node makes, belongs
to the residual connection that asks for it.

The least: each product reads its inputs and writes its outputs once, forward and backward, in the step's precision and
with float32 weights; attention is one product whose scores leave no cache; activations that the backward pass needs are
those that a product wrote anyway; norms, GELU, casts, masks, patches, target and loss are merged into the products
around them; AdamW reads weight, gradient and two averages and writes all but the gradient.
"""

from argparse import Namespace
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mae.bench.report import machine, script_parser, write_figures
from mae.core.contracts import Batch
from mae.layers.attention import Attention, CrossAttention
from mae.layers.layer_norm import LayerNorm
from mae.layers.transformer import Block, CrossBlock, Mlp
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.presets import create_model
from mae.report.terminal.tables import show_grid
from mae.training.device import DTYPES, autocast
from mae.training.optimizer import make_optimizer

_PIXEL = _WEIGHT = 4  # bytes of a value
_ADAMW = 7 * _WEIGHT
"""Of a weight: itself, its gradient and two averages read, all but the gradient written."""
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
_TAKES = {"index", "index_select", "gather", "embedding"}
_ONLY_WRITES = {"fill_", "zero_", "new_full", "new_zeros", "zeros_like", "ones_like", "full_like"}
_MODULES = {Attention: "attention", CrossAttention: "attention", Mlp: "MLP", LayerNorm: "norm"}
_BLOCKS = (Block, CrossBlock)

Moved = Counter[tuple[str, str]]
"""Bytes by part and by `forward`, `backward` or `casts`, which are among both."""


def parse_args() -> Namespace:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--models", nargs="+", default=["mae_vit_compact_patch16", "mae_vit_lesson_patch4"], metavar="NAME"
    )
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--batch-size", type=int, default=32)
    return parser.parse_args()


class ByteCounter(TorchDispatchMode):
    """Counts the bytes of every operation while it is entered, by the part that is current."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Moved = Counter()
        self.part, self.direction = "other", "forward"
        self._began: list[int] = []
        self._parts: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        size = _bytes_of(func, args, kwargs or {}, result)
        self.moved[self.part, self.direction] += size
        if func.overloadpacket.__name__ == "_to_copy":
            self.moved[self.part, "casts"] += size
        return result

    def enter(self, part: str) -> str:
        """Make a part current; nodes of autograd that are made from now on are its own. Returns the part before."""
        before, self.part = self.part, part
        self._began.append(torch.autograd._get_sequence_nr())
        self._parts.append(part)
        return before

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Operations inside belong to this part."""
        before = self.enter(part)
        yield
        self.enter(before)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass, each node under its part."""
        self.part, self.direction = "loss", "backward"
        waiting, seen = [loss.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            if node.name().endswith("AccumulateGrad"):
                continue
            part = self._parts[max(bisect_right(self._began, node._sequence_nr()) - 1, 0)]
            node.register_prehook(lambda _, part=part: setattr(self, "part", part))
            head, inner = part.partition(": ")[::2]
            if inner in _MODULES.values():  # what follows until the next node is a sum of gradients
                node.register_hook(lambda *_, part=f"{head}: residual": setattr(self, "part", part))
        loss.backward()
        self.part, self.direction = "other", "forward"


def _bytes_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Read and written by one operation."""
    name = func.overloadpacket.__name__
    if func.is_view or name in _FREE:
        return 0
    inputs = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    outputs = {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
    changed = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    outputs |= {id(leaf): leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)}
    if name in _TAKES:  # of what it takes from, as much as it gives
        inputs.pop(id(args[0]))
        return 2 * sum(map(_size, outputs.values())) + sum(map(_size, inputs.values()))
    if name in _ONLY_WRITES or name == "copy_":  # `copy_` reads its second argument
        inputs.pop(id(args[0]))
    if name == "_fused_adamw_":  # the gradients among what it may change are only unscaled in place
        for gradient in args[1]:
            outputs.pop(id(gradient))
    return sum(map(_size, inputs.values())) + sum(map(_size, outputs.values()))


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor, an expanded value once."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else min(length, 1)
    return count * tensor.element_size()


def _follow(model: MaskedAutoencoder, counter: ByteCounter, least: Moved, value: int) -> list[Any]:
    """Hooks that make a module's part current and add up the least; to be removed afterwards.

    Args:
        model: whose modules.
        counter: told which part runs.
        least: filled.
        value: bytes of an activation.
    """
    handles: list[Any] = []
    for stack in ("encoder", "decoder"):
        root = getattr(model, stack)
        heads = {getattr(root, "patch_embed", None): "patch embedding", getattr(root, "pred", None): "decoder: head"}
        for module in root.modules():
            kind = heads.get(module) or (f"{stack}: {_MODULES[type(module)]}" if type(module) in _MODULES else None)
            if kind is None and isinstance(module, _BLOCKS):
                kind = f"{stack}: residual"
            handles.append(module.register_forward_hook(_least_of(counter, least, value)))
            if kind is not None:
                outer: list[str] = []
                enter = lambda *_, kind=kind, outer=outer: outer.append(counter.enter(kind))  # noqa: E731
                leave = lambda *_, outer=outer: (counter.enter(outer.pop()), None)[1]  # noqa: E731
                handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    return handles


def _least_of(counter: ByteCounter, least: Moved, value: int) -> Any:
    """A hook that adds what a module needs at least to the part that is current."""

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        forward = backward = 0
        if isinstance(module, nn.Linear):
            weights = module.weight.numel() * _WEIGHT
            pixels = counter.part == "patch embedding"  # which are float32, and have no gradient
            read = inputs[0].numel() * (_PIXEL if pixels else value)
            forward = read + output.numel() * value + weights
            backward = forward if pixels else 2 * forward
        elif isinstance(module, Attention | CrossAttention):
            tokens = output.numel()  # of queries; and of keys and values:
            memory = inputs[1 if isinstance(module, CrossAttention) else 0].numel()
            forward = 2 * (tokens + memory) * value
            backward = 4 * (tokens + memory) * value  # the same and the output's gradient read, three written
        elif isinstance(module, Mlp):
            hidden = output.numel() // output.shape[-1] * module.fc1.out_features
            backward = hidden * value  # for GELU's derivative, where the second layer's gradient is written
        elif isinstance(module, _BLOCKS):
            forward = 2 * output.numel() * value  # the tokens, to which each branch adds
            # Their gradient, and they themselves for the norms' derivative.
            backward = 2 * (inputs[0].numel() + output.numel()) * value
        least[counter.part, "forward"] += forward
        least[counter.part, "backward"] += backward

    return add


def count_step(model: MaskedAutoencoder, images: Tensor, precision: str) -> tuple[Moved, Moved]:
    """Bytes moved by a step, the second of two, and the least."""
    optimizer = make_optimizer(model, weight_decay=0.05, betas=(0.9, 0.95))
    batch, layout = Batch(x=images, tokenizer=model.tokenizer), model.tokenizer.layout_of(images)
    value = DTYPES[precision].itemsize
    for _ in range(2):  # the optimizer has its averages from the first step on
        counter, least = ByteCounter(), Counter[tuple[str, str]]()
        handles = _follow(model, counter, least, value)
        with counter:
            with autocast(precision, images.device):
                with counter.within("mask"):
                    plan = model.plan(images)
                with counter.within("encoder: tokens"):
                    encoded = model.encoded(images, plan)
                with counter.within("decoder: tokens"):
                    prediction = model.decoder(encoded, plan, layout)
            with counter.within("target"):
                target = model.target(batch, plan.predicted)
            with counter.within("loss"):
                loss = model.loss(prediction, target, plan.weight)
            counter.backward(loss)
            with counter.within("optimizer"):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        for handle in handles:
            handle.remove()
    compared = target.numel() * _PIXEL + prediction.numel() * value
    least["loss", "forward"] = compared
    least["loss", "backward"] = compared + prediction.numel() * value
    least["optimizer", "forward"] = _ADAMW * sum(p.numel() for p in model.parameters() if p.requires_grad)
    return counter.moved, least


def rows_of(moved: Moved, least: Moved) -> list[dict[str, Any]]:
    """A row for each part, the whole last, in bytes."""
    parts = sorted({part for part, _ in moved})
    columns = [(kind, counts) for counts in (moved, least) for kind in ("forward", "backward")]
    rows = []
    for part in [*parts, "whole step"]:
        chosen = parts if part == "whole step" else [part]
        numbers = [sum(counts[each, kind] for each in chosen) for kind, counts in columns]
        if any(numbers):
            casts = sum(moved[each, "casts"] for each in chosen)
            names = ("forward", "backward", "least_forward", "least_backward")
            rows.append({"part": part, **dict(zip(names, numbers, strict=True)), "casts": casts})
    return rows


def main() -> None:
    args = parse_args()
    console, results = Console(width=140), []
    for name in args.models:
        for precision in args.precision:
            torch.manual_seed(0)
            model = create_model(name).train()
            assert model.config is not None
            images = torch.randn(args.batch_size, model.config.layout.channels, *model.config.layout.size)
            rows = rows_of(*count_step(model, images, precision))
            results.append({"model": name, "precision": precision, "batch_size": args.batch_size, "parts": rows})
            title = f"{name}, {precision}, batches of {args.batch_size}: MB read and written"
            header = ["part", "forward", "backward", "of these casts", "least forward", "least backward", "times least"]
            show_grid(console, title, header, [_line(row) for row in rows])
    write_figures(args.out, {"machine": machine(torch.device("cpu")), "results": results})


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    least = row["least_forward"] + row["least_backward"]
    names = ("forward", "backward", "casts", "least_forward", "least_backward")
    ratio = f"{(row['forward'] + row['backward']) / least:.1f}" if least else ""
    return (row["part"], *(f"{row[name] / 1e6:,.1f}" for name in names), ratio)


if __name__ == "__main__":
    main()
