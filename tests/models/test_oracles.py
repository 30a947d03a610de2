"""Loss, prediction and every gradient against two other implementations with the same weights and mask.

One is transformers' ViTMAE, the other is written out in `slow_mae.py` for what the first cannot do.
"""

from typing import Any

import pytest
import torch
from slow_mae import double_weights, slow_encode, slow_forward
from tiny import images_for, tiny_model
from torch import Tensor
from torch.testing import assert_close

from mae.bench.peer import make_peer, peer_noise, peer_tensors
from mae.core.types import MaskPlan
from mae.models.masked_autoencoder import MaskedAutoencoder

PEER_CASES: dict[str, dict[str, Any]] = {
    "square": {"img_size": 16},
    "wide": {"img_size": (8, 32)},
    "tall": {"img_size": (28, 12)},
    "pixels": {"norm_pix_loss": False},
    "half": {"mask_ratio": 0.5},
    "one channel": {"in_chans": 1},
    "patch 8": {"img_size": (24, 40), "patch_size": 8},
    "eps of the norms": {"norm_eps": 1e-2},
}
SLOW_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rectangular patch": {"patch_size": (4, 8), "img_size": (16, 24)},
    "13 channels": {"in_chans": 13, "img_size": 8, "mask_ratio": 0.5},
    "no class token": {"cls_token": False},
    "four class tokens": {"cls_tokens": 4},
    "learned positions": {"pos_embed": "learned"},
    "pixels": {"norm_pix_loss": False},
    "all at once": {
        "patch_size": (2, 6),
        "img_size": (6, 24),
        "in_chans": 2,
        "cls_token": False,
        "pos_embed": "learned",
    },  # fmt: skip
}


def gradients(model: MaskedAutoencoder) -> dict[str, Tensor]:
    found = {name: weight.grad for name, weight in model.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def compare_with_slow(model: MaskedAutoencoder, images: Tensor, plan: MaskPlan, share: Tensor) -> None:
    """Run both on this plan; `share` is how much each token counts, `[B, N]`."""
    assert model.config is not None
    output = model(images, plan=plan)
    output.loss.backward()
    weights = double_weights(model)
    slow = slow_forward(weights, model.config, images, plan.visible.tolist(), share)
    slow.loss.backward()
    assert_close(output.loss.double(), slow.loss, rtol=1e-5, atol=1e-5)
    assert_close(output.latent.double(), slow.latent, rtol=1e-5, atol=1e-5)
    expected = slow.pred.gather(1, plan.predicted.unsqueeze(-1).expand(-1, -1, slow.pred.shape[-1]))
    assert_close(output.prediction.double(), expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(model).items():
        assert_close(gradient.double(), weights[name].grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", PEER_CASES)
def test_matches_transformers(case: str) -> None:
    model = tiny_model(**PEER_CASES[case])
    assert model.config is not None
    peer = make_peer(model)
    images = images_for(model)
    plan = model.plan(images, generator=torch.Generator().manual_seed(2))
    loss, pred, mask = model(images, plan=plan.predict_all())
    theirs = peer(images, noise=peer_noise(plan))
    assert torch.equal(mask, theirs.mask)
    assert_close(loss, theirs.loss, rtol=1e-5, atol=1e-5)
    assert_close(pred, theirs.logits, rtol=1e-5, atol=1e-5)
    loss.backward()
    theirs.loss.backward()
    others = dict(peer.named_parameters())
    ours = peer_tensors(gradients(model), model.config)
    assert {name for name, weight in others.items() if weight.requires_grad} == set(ours)
    for name, gradient in ours.items():
        assert_close(gradient, others[name].grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_the_peer_holds_positions_that_are_not_zero() -> None:
    """It leaves its tables at zero; a comparison in which positions do nothing would prove little."""
    peer = make_peer(tiny_model())
    for table in (peer.vit.embeddings.position_embeddings, peer.decoder.decoder_pos_embed):
        assert table[0, 0].abs().max() == 0 and table[0, 1:].abs().sum(dim=-1).min() > 1


@pytest.mark.parametrize("path", ["lean", "plain"])
@pytest.mark.parametrize("case", SLOW_CASES)
def test_matches_the_slow_implementation(case: str, path: str) -> None:
    model = tiny_model(**SLOW_CASES[case])
    images = images_for(model, batch=2)
    plan = model.plan(images, generator=torch.Generator().manual_seed(2))
    compare_with_slow(model, images, plan if path == "lean" else plan.predict_all(), plan.hidden.float())


def test_plan_of_few_weighted_predictions_matches_the_slow_implementation() -> None:
    model = tiny_model()
    images = images_for(model, batch=2)
    plan = model.plan(images, generator=torch.Generator().manual_seed(2))
    predicted, weight = plan.predicted[:, 3:8], torch.rand(2, 5) + 0.1
    share = torch.zeros(plan.hidden.shape).scatter_(1, predicted, weight)
    few = MaskPlan(visible=plan.visible, predicted=predicted, weight=weight, hidden=plan.hidden)
    compare_with_slow(model, images, few, share)


@pytest.mark.parametrize("shape", ["tokens", "grid", "pixels"])
def test_user_mask_in_each_shape_matches_the_slow_implementation(shape: str) -> None:
    model = tiny_model(patch_size=(4, 8))
    images = images_for(model, batch=2)
    hidden = torch.tensor([[1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1, 0]]).bool()
    grid = hidden.reshape(2, 4, 3)
    mask = {
        "tokens": hidden,
        "grid": grid,
        "pixels": grid.repeat_interleave(4, dim=1).repeat_interleave(8, dim=2),
    }[shape]
    output = model(images, mask=mask)
    visible = [[n for n in range(12) if not row[n]] for row in hidden.tolist()]
    slow = slow_forward(double_weights(model), tiny_model(patch_size=(4, 8)).config, images, visible, hidden.float())
    assert torch.equal(output.mask.bool(), hidden)
    assert_close(output.loss.double(), slow.loss, rtol=1e-5, atol=1e-5)
    assert_close(output.pred.double(), slow.pred, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", SLOW_CASES)
def test_encode_matches_the_slow_implementation(case: str) -> None:
    model = tiny_model(**SLOW_CASES[case])
    assert model.config is not None
    images = images_for(model, batch=2)
    features = model.encode(images)
    everything = list(range(model.config.layout.num_tokens))
    prefix = features.cls is not None and model.config.encoder.cls_tokens
    for image in range(2):
        slow = slow_encode(double_weights(model), model.config, images[image].double(), everything)
        assert_close(features.patches[image].double(), slow[prefix:], rtol=1e-5, atol=1e-5)
        assert_close(features.mean[image].double(), slow[prefix:].mean(dim=0), rtol=1e-5, atol=1e-5)
        if features.cls is not None:
            assert_close(features.cls[image].double(), slow[:prefix].mean(dim=0), rtol=1e-5, atol=1e-5)
