"""Lower precision and the compiler must not change what is computed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import run_compiled
from tiny import images_for, tiny_config, tiny_model
from torch.testing import assert_close

from mae.models.build import build_model


def test_bfloat16_autocast_keeps_the_loss_in_float32_and_near() -> None:
    torch.manual_seed(0)
    model = build_model(tiny_config(img_size=(32, 32), embed_dim=48, decoder_embed_dim=32))
    images = images_for(model, batch=8)
    plan = model.plan(images)
    exact = model(images, plan=plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(images, plan=plan)
    assert rough.prediction.dtype == torch.bfloat16  # else autocast did nothing and this proves nothing
    assert rough.loss.dtype == torch.float32 and all(term.dtype == torch.float32 for term in rough.terms.values())
    assert float(rough.loss.detach()) == pytest.approx(float(exact.loss.detach()), rel=2e-3)
    true = torch.autograd.grad(exact.loss, [weight for weight in model.parameters() if weight.requires_grad])
    rough.loss.backward()
    for (name, weight), expected in zip(model.named_parameters(), true, strict=True):
        assert weight.grad is not None and weight.grad.dtype == torch.float32 and weight.grad.isfinite().all(), name
        assert (weight.grad - expected).norm() < 0.02 * expected.norm() + 1e-6, name


def test_a_model_cast_to_float64_follows() -> None:
    model = tiny_model()
    images = images_for(model)
    plan = model.plan(images)
    single = model(images, plan=plan).prediction
    double = model.double()(images.double(), plan=plan).prediction
    assert double.dtype == torch.float64
    assert_close(single.double(), double, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("term", ["sigreg", "visreg", "infonce", "vicreg"])
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_terms_of_views_follow_too(kind: torch.dtype, term: str) -> None:
    model = tiny_model(**{term: 0.1}).to(kind)
    images = images_for(model, batch=4).to(kind)
    output = model(images, plan=model.plan(images), views=2, keys=torch.arange(4))
    assert output.terms[term].isfinite()
    output.loss.backward()


COMPILED = """
import torch
from tiny import images_for, tiny_model
from torch.testing import assert_close

plain, other = (tiny_model(depth=1, decoder_depth=1, **OPTIONS) for _ in range(2))
images = images_for(plain)
plan = plain.plan(images)
expected = plain(images, plan=plan).loss
got = torch.compile(other, fullgraph=True, backend="aot_eager")(images, plan=plan).loss
assert_close(got, expected, rtol=1e-5, atol=1e-5)
expected.backward()
got.backward()
for mine, theirs in zip(plain.parameters(), other.parameters(), strict=True):
    assert_close(theirs.grad, mine.grad, rtol=1e-4, atol=1e-5)
with torch._dynamo.config.patch(error_on_recompile=True):  # other masks and images are no reason for another graph
    for seed in range(3):
        masks = plain.plan(images, generator=torch.Generator().manual_seed(seed))
        torch.compile(other, fullgraph=True, backend="aot_eager")(images + seed, plan=masks).loss.backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"decoder": "cross", "mask_predicted": 0.5}], ids=str)
def test_the_compiled_model_is_one_graph_for_all_masks_of_the_same_loss_and_gradients(options: dict[str, Any]) -> None:
    run_compiled(f"OPTIONS = {options}\n{COMPILED}", folder=Path(__file__).parent)
