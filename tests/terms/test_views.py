"""What terms of views have in common: projectors, directions, order of views, precision, several processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import run_script
from terms.two_views import projections, some_directions
from torch import Tensor
from torch.testing import assert_close

import mae
from mae.core.kinds import find, kinds
from mae.core.types import Encoded, Layout, MaskPlan
from mae.errors import UsageError
from mae.randomness import sample_keys, view_keys
from mae.terms.views import Projector, ViewTerm, unit_directions

KINDS = [kind for kind in kinds("terms") if find("terms", kind).reads_views]
SIZES: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 3,
    "decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2,
}  # fmt: skip

LAYOUT = Layout(size=(8, 16), patch=(4, 4), channels=3)


def term_of(kind: str) -> ViewTerm:
    term = find("terms", kind)()
    assert isinstance(term, ViewTerm)
    return term


def value_of(kind: str, z: Tensor) -> Tensor:
    term: Any = term_of(kind)
    value: Tensor = term.of(z, some_directions()) if hasattr(term, "directions") else term.of(z)
    return value


def model_with(kind: str, **options: Any) -> mae.MaskedAutoencoder:
    torch.manual_seed(0)
    return mae.create_model("mae_vit_tiny_patch16", **SIZES, **{kind: 0.1}, **options)


def encoded(rows: int = 6) -> tuple[Encoded, MaskPlan]:
    tokens = torch.randn(rows, 5, 24, generator=torch.Generator().manual_seed(0))
    places = torch.arange(4).expand(rows, 4)
    plan = MaskPlan(visible=places, predicted=places + 4, hidden=(torch.arange(8) >= 4).expand(rows, 8))
    return Encoded(levels=[tokens], num_prefix=1, places=places), plan


@pytest.mark.parametrize("kind", KINDS)
def test_neither_views_nor_images_have_an_order(kind: str) -> None:
    z = projections()
    for other in (z.flip(1), z[torch.randperm(len(z))]):
        assert_close(value_of(kind, other), value_of(kind, z), rtol=1e-5, atol=1e-6)
    mixed = torch.cat([z[:, :1], z[:, 1:].roll(1, dims=0)], dim=1)  # views of others
    assert value_of(kind, mixed) > value_of(kind, z)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_it_reads_the_projection_of_the_token_it_is_told_to(kind: str, pool: str) -> None:
    model = model_with(kind, **{f"{kind}_pool": pool})
    images, keys = torch.randn(4, 3, 16, 16), view_keys(sample_keys(0, 0, torch.arange(2)), 2)
    output = model(images, plan=model.plan(images, keys=keys), keys=keys, views=2)
    token = output.latent[:, 0] if pool == "cls" else output.latent[:, 1:].mean(dim=1)
    head = model.term_heads[kind]
    z = head.fc2(head.act(head.norm(head.fc1(token)))).unflatten(0, (2, 2))
    term: Any = next(term for term in model.terms if term.kind == kind)
    given = [unit_directions(keys, dim=64, count=term.directions, kind=kind)] if hasattr(term, "directions") else []
    assert_close(output.terms[kind], term.of(z, *given), rtol=1e-5, atol=1e-6)


def test_features_that_are_nearly_alike_are_projected_apart() -> None:
    """Those of fresh encoders are; whatever they have in common must not be all that is projected."""
    (some, plan), projector = encoded(64), Projector(width=24, hidden=64, dim=8, pool="mean")
    alike = Encoded(levels=[5 + 0.05 * some.tokens], num_prefix=1, places=some.places)
    assert_close(
        projector(alike, plan, LAYOUT).std(dim=0), projector(some, plan, LAYOUT).std(dim=0), rtol=0.05, atol=0.0
    )


def test_the_projector_remembers_no_batch_and_no_mode() -> None:
    (some, plan), projector = encoded(), Projector(width=24, hidden=16, dim=8, pool="mean")
    first = projector(some, plan, LAYOUT)
    projector(Encoded(levels=[some.tokens + 3], num_prefix=1, places=some.places), plan, LAYOUT)
    assert torch.equal(projector.eval()(some, plan, LAYOUT), first) and not list(projector.buffers())


def test_directions_are_unit_vectors_of_the_first_key_and_evenly_spread() -> None:
    keys = sample_keys(0, 0, torch.arange(3))
    a = unit_directions(keys, dim=6, count=4000, kind="any")
    assert_close(a.norm(dim=0), torch.ones(4000), rtol=1e-5, atol=1e-6)
    assert_close(a @ a.T / 4000, torch.eye(6) / 6, rtol=0, atol=0.01)
    assert a.mean(dim=1).abs().max() < 0.02
    state = torch.get_rng_state()
    assert torch.equal(a, unit_directions(keys[:1], dim=6, count=4000, kind="any"))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(a, unit_directions(keys[1:], dim=6, count=4000, kind="any"))


def test_a_batch_without_keys_is_refused_where_directions_are_drawn() -> None:
    model, images = model_with("visreg"), torch.randn(4, 3, 16, 16)
    with pytest.raises(UsageError, match="visreg draws its directions from the keys of the batch; give forward one"):
        model(images, views=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_image_is_refused(kind: str) -> None:
    model, images = model_with(kind), torch.randn(2, 3, 16, 16)
    with pytest.raises(UsageError, match=f"{kind} compares the images of a batch, and this one holds 1; expected 2"):
        model(images, views=2, keys=torch.arange(2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_token_that_is_not_there_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match=f"{kind} is to read the class token, and the encoder has none"):
        model_with(kind, **{f"{kind}_pool": "cls"}, cls_token=False)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_judged_in_float32_and_finite(kind: str) -> None:
    model, images = model_with(kind), 5 * torch.randn(8, 3, 16, 16)
    keys = view_keys(sample_keys(0, 0, torch.arange(4)), 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(images, plan=model.plan(images, keys=keys), keys=keys, views=2)
    assert output.terms[kind].dtype == torch.float32
    output.loss.backward()
    gradients = [weight.grad for weight in model.parameters()]
    assert all(grad is not None and grad.isfinite().all() for grad in gradients)
    plain = model(images, plan=model.plan(images, keys=keys), keys=keys, views=2)
    assert_close(output.terms[kind], plain.terms[kind], rtol=0.05, atol=0.02)


def test_mask_tokens_are_no_part_of_what_is_projected() -> None:
    (some, plan), projector = encoded(), Projector(width=24, hidden=16, dim=8, pool="mean")
    with_masks = torch.cat([some.tokens, torch.randn(6, 4, 24)], dim=1)
    whole = Encoded(levels=[with_masks], num_prefix=1, places=None)
    assert_close(projector(whole, plan, LAYOUT), projector(some, plan, LAYOUT), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_several_processes_have_the_value_and_gradient_of_one(tmp_path: Path) -> None:
    run_script(Path(__file__).with_name("views_together.py"), tmp_path, seconds=200)
    one = json.loads((tmp_path / "1-0.json").read_text())
    for size, rank in [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]:
        found = json.loads((tmp_path / f"{size}-{rank}.json").read_text())
        assert found["terms"] == pytest.approx(one["terms"], rel=1e-5)
        assert_close(torch.tensor(found["gradient"]), torch.tensor(one["gradient"]), rtol=1e-4, atol=1e-6)
        if rank == 0:
            assert found["alone"] == pytest.approx(one["terms"], rel=1e-5)
