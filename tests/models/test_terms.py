"""The further terms of the loss, as a model puts them together."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from compiler import run_compiled
from learning import BATCH, structured
from pieces import batch_of
from tiny import images_for, tiny_config, tiny_model
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close

from mae.core.contracts import Target
from mae.core.method import MethodConfig
from mae.core.types import Layout, MAEOutput
from mae.errors import UsageError
from mae.modalities.images.patches import patchify, unpatchify
from mae.models.build import build_model
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.terms.laplacian import LaplacianError
from mae.terms.uniformity import Uniformity

ALL: dict[str, Any] = {"laplacian": 0.05, "uniformity": 0.01, "focal_frequency": 0.3}


def run(seed: int = 3, **options: Any) -> tuple[MaskedAutoencoder, Tensor, MAEOutput]:
    """A model, its images, and the output of the path that training takes."""
    model = tiny_model(**options)
    images = images_for(model)
    plan = model.plan(images, generator=torch.Generator().manual_seed(seed))
    return model, images, model(images, plan=plan)


def test_without_weights_nothing_is_added_bit_for_bit():
    plain, _, first = run()
    off, _, second = run(laplacian=0.0, uniformity=0.0, focal_frequency=0.0)
    assert second.terms.keys() == {"reconstruction"}
    assert torch.equal(first.loss, second.loss) and torch.equal(first.loss, first.terms["reconstruction"])
    first.loss.backward()
    second.loss.backward()
    for mine, other in zip(plain.parameters(), off.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_the_loss_is_the_weighted_sum_and_terms_are_told_unweighted():
    _, _, plain = run()
    _, _, output = run(**ALL)
    assert list(output.terms) == ["reconstruction", "laplacian", "focal_frequency", "uniformity"]
    assert torch.equal(output.terms["reconstruction"], plain.loss)
    expected = sum(ALL.get(name, 1.0) * value for name, value in output.terms.items())
    assert_close(output.loss, expected)
    _, _, doubled = run(**{name: 2 * weight for name, weight in ALL.items()})
    assert all(torch.equal(doubled.terms[name], output.terms[name]) for name in output.terms)
    assert_close(doubled.loss - plain.loss, 2 * (output.loss - plain.loss))


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("norm_pix", [True, False])
def test_the_laplacian_judges_the_picture_put_together_or_as_it_is(norm_pix: bool, raw: bool):
    """Against both Laplacians taken one by one, of the picture in pixels and of the image."""
    model, images, output = run(norm_pix_loss=norm_pix, laplacian=1.0, laplacian_raw=raw)
    patches, hidden = patchify(images, (4, 4)), output.plan.hidden.unsqueeze(-1)
    drawn = output.pred
    if norm_pix:
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
        drawn = drawn * (variance + 1e-6).sqrt() + mean
    picture = unpatchify(drawn if raw else torch.where(hidden, drawn, patches), (4, 6), (4, 4))

    def laplacian(x: Tensor) -> Tensor:
        x = pad(x, (1, 1, 1, 1), mode="replicate")
        return x[..., :-2, 1:-1] + x[..., 2:, 1:-1] + x[..., 1:-1, :-2] + x[..., 1:-1, 2:] - 4 * x[..., 1:-1, 1:-1]

    where = unpatchify(hidden.expand(-1, -1, 48), (4, 6), (4, 4))
    expected = (laplacian(picture) - laplacian(images)).abs()[where].mean()
    assert_close(output.terms["laplacian"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"laplacian": 1.0}, {"laplacian": 1.0, "laplacian_raw": True}, ALL], ids=str)
def test_training_and_looking_come_to_the_same(options: dict[str, Any]):
    """Whether visible patches are predicted too changes no term."""
    model, images, trained = run(**options)
    shown = model(images, generator=torch.Generator().manual_seed(3))
    for name, value in trained.terms.items():
        assert_close(value, shown.terms[name], rtol=1e-5, atol=1e-6)


def gradient_of_prediction(**options: Any) -> tuple[Tensor, Tensor]:
    model = tiny_model(**options)
    output = model(images_for(model))
    output.prediction.retain_grad()
    output.loss.backward()
    assert output.prediction.grad is not None
    return output.prediction.grad, output.plan.hidden


@pytest.mark.parametrize("options", [{"laplacian": 1.0}, {"focal_frequency": 1.0}, ALL], ids=str)
def test_only_hidden_patches_are_trained(options: dict[str, Any]):
    gradient, hidden = gradient_of_prediction(**options)
    assert gradient[~hidden].abs().max() == 0 and gradient[hidden].abs().amax(dim=-1).min() > 0


def test_the_raw_laplacian_trains_visible_patches_beside_hidden_ones_too():
    gradient, hidden = gradient_of_prediction(laplacian=1.0, laplacian_raw=True)
    assert gradient[~hidden].abs().max() > 0


def test_uniformity_looks_at_the_mean_visible_token():
    model, images, output = run(uniformity=0.5)
    tokens = torch.nn.functional.normalize(output.latent[:, 1:].mean(dim=1), dim=-1)
    pairs = [torch.exp(-2 * (tokens[i] - tokens[j]).square().sum()) for i in range(3) for j in range(3) if i != j]
    assert_close(output.terms["uniformity"], torch.stack(pairs).mean().log(), rtol=1e-4, atol=1e-5)
    squared = run(uniformity=0.5, uniformity_form="squared_cosine")[2].terms["uniformity"]
    assert_close(squared, (tokens @ tokens.T).square().mean(), rtol=1e-5, atol=1e-6)


def test_terms_are_computed_in_float32_under_autocast():
    model, images, _ = run(**ALL)
    plan = model.plan(images, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(images, plan=plan)
    assert {value.dtype for value in (output.loss, *output.terms.values())} == {torch.float32}


@pytest.mark.parametrize("loss", ["l1", "smooth_l1"])
def test_other_distances_are_those_of_the_library(loss: str):
    model, images, output = run(loss=loss)
    target = model.target(batch_of(images), output.plan.predicted)
    known = {"l1": torch.nn.functional.l1_loss, "smooth_l1": torch.nn.functional.smooth_l1_loss}[loss]
    assert_close(output.loss, known(output.prediction, target))


@dataclass(frozen=True, kw_only=True)
class Ids(Target):
    """A target that has no pixels."""

    kind: ClassVar[str] = "ids"

    def width(self, layout: Layout, gives: Mapping[str, int] | None = None) -> int:
        return 1


def test_a_term_that_compares_pixels_wants_a_target_that_has_them():
    assert MethodConfig(target=Ids(), terms=(Uniformity(),)).target == Ids()
    with pytest.raises(UsageError, match="laplacian compares pixels, and the target ids has none"):
        MethodConfig(target=Ids(), terms=(LaplacianError(),))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss": "l3"}, "unknown loss 'l3'; did you mean l1"),
        ({"laplacian": -1.0}, "laplacian is -1.0; expected greater than or equal to 0"),
        ({"uniformity": float("nan")}, "uniformity is nan"),
        ({"focal_frequency": float("inf")}, "focal_frequency is inf"),
        ({"uniformity_form": "round"}, "uniformity_form is 'round'"),
        ({"target": "low_pass", "target_cutoff": 0.0}, "target_cutoff is 0.0; expected greater than 0"),
    ],
)
def test_an_objective_that_cannot_be_is_refused(options: dict[str, Any], says: str):
    with pytest.raises(UsageError, match=says):
        tiny_config(**options)


def features_after(steps: int, **options: Any) -> Tensor:
    """Mean tokens of fresh images after some training on structured ones."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = build_model(tiny_config(img_size=24, mask_ratio=0.5, **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        images = structured(generator)
        optimizer.zero_grad()
        model(images, plan=model.plan(images)).loss.backward()
        optimizer.step()
    with torch.no_grad():
        return torch.nn.functional.normalize(model.encode(structured(generator)).mean, dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gaussian", "squared_cosine"])
def test_uniformity_spreads_features_of_images_never_seen(form: str):
    def mean_cosine(features: Tensor) -> float:
        return float(((features @ features.T).sum() - BATCH) / (BATCH * (BATCH - 1)))

    plain, spread = features_after(60), features_after(60, uniformity=0.1, uniformity_form=form)
    assert mean_cosine(spread) < mean_cosine(plain) - 0.1


@pytest.mark.slow
def test_a_compiled_model_meets_few_lengths(tmp_path: Path):
    """A new length each step would be a new graph each step, until the compiler gives up on the model."""
    run_compiled(
        """
import torch
from torch._dynamo.testing import CompileCounter
import mae
from mae.masks.schedule import RatioSchedule

model = mae.create_model("mae_vit_lesson_patch4", embed_dim=32, depth=1, decoder_embed_dim=32, decoder_depth=1,
                         laplacian=0.05, uniformity=0.01)
counter = CompileCounter()
compiled = torch.compile(model, backend=counter)
images, keys = torch.randn(4, 3, 32, 32), torch.arange(4)
schedule, lengths = RatioSchedule(kind="linear"), []
for step in range(48):
    plan = model.plan(images, keys=keys, ratio=schedule.ratio(step, steps_per_epoch=8))
    lengths.append(plan.visible.shape[1])
    output = compiled(images, plan=plan)
    output.loss.backward()
    torch.testing.assert_close(output.loss, model(images, plan=plan).loss)
assert len(set(lengths)) == 9, lengths
assert counter.frame_count <= 3, counter.frame_count
""",
        folder=tmp_path,
    )
