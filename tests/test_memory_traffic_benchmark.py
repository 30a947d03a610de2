"""The counts of benchmarks/memory_traffic.py against numbers made by hand."""

from collections.abc import Callable

import pytest
import torch
from memory_traffic import ByteCounter, count_step, rows_of
from tiny import images_for, tiny_model
from torch import Tensor

VALUES = torch.ones(4, 6)  # 96 bytes
ROWS = torch.tensor([0, 3, 3])  # 24 bytes
CASES: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "a sum": (lambda x: x + VALUES, 3 * 96),
    "a number": (lambda x: x * 2, 2 * 96),
    "what is expanded": (lambda x: x + VALUES[:1].expand(4, 6), 2 * 96 + 24),
    "in place": (lambda x: x.add_(VALUES), 3 * 96),
    "views": (lambda x: x.mT.unsqueeze(0)[:, 1:].unflatten(1, (5, 1)), 0),
    "empty": (lambda x: torch.empty_like(x), 0),
    "zeros": (lambda x: torch.zeros_like(x), 96),
    "overwritten": (lambda x: x.copy_(VALUES), 2 * 96),
    "filled": (lambda x: x.fill_(3.0), 96),
    "rows taken": (lambda x: x.index_select(0, ROWS), 2 * 3 * 24 + 24),
    "a copy in another order": (lambda x: x.mT.reshape(-1), 2 * 96),
    "a list": (lambda x: torch.cat([x, VALUES]), 4 * 96),
    "narrowed": (lambda x: x.bfloat16(), 96 + 48),
    "a product": (lambda x: x @ VALUES.mT, 2 * 96 + 64),
}


@pytest.mark.parametrize("case", CASES)
def test_an_operation_moves_what_was_counted_by_hand(case: str) -> None:
    run, expected = CASES[case]
    x = torch.ones(4, 6)
    with ByteCounter() as counter:
        run(x)
    assert counter.moved["other", "forward"] == expected
    assert counter.moved["other", "casts"] == (expected if case == "narrowed" else 0)


def test_parts_of_a_step_move_what_was_counted_by_hand() -> None:
    model = tiny_model(norm_pix_loss=False)
    images = images_for(model)
    moved, least = count_step(model, images, "fp32")
    assert model.config is not None
    tokens = model.config.layout.num_tokens
    predicted = model.plan(images).predicted.shape[1]
    rows = {row["part"]: row for row in rows_of(moved, least)}

    layer = model.decoder.blocks[0].mlp.fc1
    dim, hidden = layer.in_features, layer.out_features
    # All tokens leave the first block, and the predicted ones alone the second.
    counts = [tokens + model.encoder.num_prefix, predicted]
    assert len(model.decoder.blocks) == len(counts)
    narrow, wide = (len(images) * sum(counts) * width for width in (dim, hidden))
    weights, biases = 2 * dim * hidden, 2 * (dim + hidden)
    mlp = rows["decoder: MLP"]
    assert mlp["forward"] == 4 * (2 * narrow + 4 * wide + 2 * weights + biases)
    assert mlp["backward"] == 4 * (5 * narrow + 8 * wide + 4 * weights + biases)
    assert mlp["least_forward"] == 4 * (2 * narrow + 2 * wide + 2 * weights)
    assert mlp["least_backward"] == 4 * (4 * narrow + 5 * wide + 4 * weights)

    whole, part = (len(images) * count * dim for count in counts)
    norms = 3 * whole + 2 * part  # two in each block, the second one's first of all tokens, and that of the head
    statistics = norms // dim
    assert rows["decoder: norm"]["forward"] == 4 * (2 * norms + 2 * statistics + 2 * dim * 5)
    assert rows["decoder: residual"]["forward"] == 4 * 6 * narrow
    # The gradient of a part of the tokens is written as one of all, and added to that of the keys and values.
    assert rows["decoder: residual"]["backward"] == 4 * (6 * whole + 4 * (whole + part))

    values = len(images) * predicted * model.config.layout.token_values
    patches = len(images) * predicted
    # Copied, less the target, one norm a patch; of these square, quotient and both means.
    assert rows["loss"]["forward"] == 4 * (2 * values + 3 * values + values + patches + 7 * patches + 1)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert 0 <= rows["optimizer"]["forward"] - 4 * 7 * trained < 0.01 * 4 * 7 * trained  # steps counted too


def test_every_byte_has_its_part_and_none_is_less_than_the_least() -> None:
    model = tiny_model(decoder="cross")
    rows = rows_of(*count_step(model, images_for(model), "bf16"))
    parts = {row["part"]: row for row in rows}
    assert "other" not in parts
    for name in ("forward", "backward", "casts", "least_forward", "least_backward"):
        assert parts["whole step"][name] == sum(row[name] for row in rows[:-1])
    assert parts["whole step"]["forward"] > parts["whole step"]["least_forward"]
    assert parts["whole step"]["backward"] > parts["whole step"]["least_backward"] > 0
    assert parts["encoder: MLP"]["casts"] > 0
