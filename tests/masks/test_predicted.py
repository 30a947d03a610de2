"""What decoders rely on: a mask strategy asks for masked tokens alone."""

import pytest
import torch

from mae.core.kinds import find, kinds
from mae.core.types import Layout, MaskRequest

LAYOUT = Layout(size=(48, 40), patch=(8, 8), channels=1)


@pytest.mark.parametrize("kind", kinds("masks"))
def test_only_masked_tokens_are_predicted(kind: str) -> None:
    mask, keys = find("masks", kind)(), torch.arange(40)
    scores = torch.rand(40, LAYOUT.num_tokens, generator=torch.Generator().manual_seed(0))
    plan = mask.plan(MaskRequest(layout=LAYOUT, keys=keys, scores=scores))
    assert bool(plan.hidden.gather(1, plan.predicted).all())
    assert not bool(plan.hidden.gather(1, plan.visible).any())
    assert plan.predicts_rest == mask.predicts_all and plan.take(slice(3)).predicts_rest == plan.predicts_rest
    counts = [plan.visible.shape[1] + plan.predicted.shape[1], LAYOUT.num_tokens]
    assert plan.predicts_rest == (counts[0] == counts[1])
    assert not plan.predict_all().predicts_rest
