"""How far weights moved, with moves that are known."""

import pytest
import torch
from tiny import tiny_model

from mae.errors import UsageError
from mae.evaluation.common.weight_changes import group_of, relative_changes


def test_a_block_whose_weights_grew_by_a_tenth_moved_a_tenth_and_no_other_did():
    before = {name: weight.detach().clone() for name, weight in tiny_model().named_parameters()}
    after = {name: weight * 1.1 if name.startswith("encoder.blocks.1.") else weight for name, weight in before.items()}
    found = relative_changes(before, after)
    assert found.pop("encoder block 1") == pytest.approx(0.1, rel=1e-5)
    assert set(found) == {"encoder, rest", "encoder block 0", "decoder, rest", "decoder block 0", "decoder block 1"}
    assert set(found.values()) == {0}


def test_it_is_the_norm_of_the_change_over_that_of_the_weights():
    before = {"head.a": torch.tensor([3.0, 0.0]), "head.b": torch.tensor(4.0)}
    after = {"head.a": torch.tensor([3.0, 1.0]), "head.b": torch.tensor(6.0)}
    assert relative_changes(before, after) == {"head": pytest.approx(5**0.5 / 5)}
    zero = {"head.a": torch.zeros(2)}
    assert relative_changes(zero, zero)["head"] != relative_changes(zero, zero)["head"]  # not a number


def test_groups_and_other_models():
    assert group_of("decoder.blocks.11.mlp.fc1.weight") == "decoder block 11"
    assert group_of("encoder.patch_embed.proj.weight") == "encoder, rest"
    assert group_of("term_heads.difficulty.blocks.0.weight") == "term_heads"
    with pytest.raises(UsageError, match="two moments of one model"):
        relative_changes({"a": torch.zeros(2)}, {"a": torch.zeros(3)})
    with pytest.raises(UsageError, match="two moments of one model"):
        relative_changes({"a": torch.zeros(2)}, {"b": torch.zeros(2)})
