"""Terms with a network of their own, and terms that compare views: where they count, where they go, what is refused."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_config
from torch import Tensor, nn
from torch.testing import assert_close

import mae
from mae.core.component import Weight
from mae.core.contracts import Batch, Step, Term
from mae.core.types import Encoded, Layout, MaskPlan
from mae.errors import UsageError
from mae.interop.exports.naming import official_tensors
from mae.models.build import build_model
from mae.models.file import load_model, load_with_report, model_metadata, save
from mae.models.summary import summarise
from mae.pretraining.init_weights import load_initial_weights, open_init_weights
from mae.training.optimizer import make_optimizer


class Head(nn.Module):
    """A linear layer on the mean visible token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)

    def forward(self, encoded: Encoded, plan: MaskPlan, layout: Layout) -> Tensor:
        return self.linear(encoded.mean_visible(plan))


@dataclass(frozen=True, kw_only=True)
class Headed(Term):
    """The mean square of what its head makes."""

    kind: ClassVar[str] = "headed"

    weight: Weight = 0.5
    """How much it counts."""

    def head(self, encoder: Any) -> Head:
        return Head(encoder.embed_dim)

    def __call__(self, step: Step) -> Tensor:
        assert step.projected is not None
        return step.projected.float().square().mean()


@dataclass(frozen=True, kw_only=True)
class Paired(Term):
    """How far views of an image lie apart."""

    kind: ClassVar[str] = "paired"
    reads_views: ClassVar[bool] = True

    weight: Weight = 0.5
    """How much it counts."""

    def __call__(self, step: Step) -> Tensor:
        return step.batch.paired(step.features).var(dim=1).mean()


@dataclass(frozen=True, kw_only=True)
class OfClassToken(Term):
    """Reads the class token."""

    kind: ClassVar[str] = "of_class_token"

    weight: Weight = 0.5
    """How much it counts."""

    @property
    def reads_cls(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class OfTeacher(Term):
    """Reads what a teacher says of tokens."""

    kind: ClassVar[str] = "of_teacher"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens"})

    weight: Weight = 0.5
    """How much it counts."""


def model_with(*terms: Term, **changes: Any) -> mae.MaskedAutoencoder:
    torch.manual_seed(0)
    return build_model(tiny_config(terms=terms, **changes))


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 16, 24, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("teacher", [{}, {"teacher": "codebook"}])
def test_a_term_that_reads_what_no_teacher_gives_is_refused(teacher: dict[str, str]):
    with pytest.raises(UsageError, match="term of_teacher needs a teacher that gives tokens; give --teacher ema"):
        model_with(OfTeacher(), **teacher)
    assert model_with(OfTeacher(), teacher="ema").teacher is not None


def test_the_term_reads_what_its_head_makes_of_the_visible_tokens():
    model, x = model_with(Headed(), Paired()), images()
    plan = model.plan(x, generator=torch.Generator().manual_seed(0))
    output = model(x, plan=plan, views=2)
    expected = model.term_heads["headed"].linear(output.latent[:, 1:].mean(dim=1)).square().mean()
    assert_close(output.terms["headed"], expected)
    one, other = output.latent[:, 1:].mean(dim=1).unflatten(0, (2, 2)).unbind(1)
    assert_close(output.terms["paired"], ((one - other).square() / 2).mean())
    assert_close(output.loss, sum(output.terms.values()) - 0.5 * (output.terms["headed"] + output.terms["paired"]))


def test_the_model_begins_as_it_does_without_the_term():
    plain, headed = model_with().state_dict(), model_with(Headed()).state_dict()
    assert headed.keys() - plain.keys() == {"term_heads.headed.linear.weight", "term_heads.headed.linear.bias"}
    assert all(torch.equal(plain[name], headed[name]) for name in plain)


def test_its_weights_are_trained_moved_copied_and_stored(tmp_path: Path):
    model = model_with(Headed())
    groups = make_optimizer(model, weight_decay=0.05, betas=(0.9, 0.95)).param_groups
    trained = {name for group in groups for name in group["param_names"]}
    assert {"term_heads.headed.linear.weight", "term_heads.headed.linear.bias"} <= trained
    moved = copy.deepcopy(model).double()
    assert moved.term_heads["headed"].linear.weight.dtype == torch.float64
    save(model, tmp_path / "m.safetensors")
    again, report = load_with_report(tmp_path / "m.safetensors")
    assert isinstance(again, mae.MaskedAutoencoder) and not report.missing and not report.ignored
    assert torch.equal(again.term_heads["headed"].linear.weight, model.term_heads["headed"].linear.weight)


def test_it_is_no_part_of_exports_nor_of_features():
    plain, headed = model_with(), model_with(Headed())
    theirs, ours = official_tensors(plain), official_tensors(headed)
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)
    with torch.no_grad():
        nn.init.constant_(headed.term_heads["headed"].linear.weight, torch.nan)
    assert torch.equal(plain.encode(images()).mean, headed.encode(images()).mean)


def test_a_run_that_begins_with_its_weights_has_a_head_of_its_own(tmp_path: Path):
    model, fresh = model_with(Headed()), model_with(Headed())
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    save(model, tmp_path / "m.safetensors")
    own = fresh.term_heads["headed"].linear.weight.clone()
    load_initial_weights(fresh, open_init_weights(str(tmp_path / "m.safetensors")))
    assert torch.equal(fresh.term_heads["headed"].linear.weight, own)
    assert torch.equal(fresh.encoder.norm.weight, model.encoder.norm.weight)


def test_terms_that_are_left_take_their_heads_along():
    model = model_with(Headed(), Paired())
    model.keep_terms([term for term in model.terms if term.reads_views])
    assert [term.kind for term in model.terms] == ["paired"] and not model.term_heads
    assert model(images(), views=2).terms.keys() == {"reconstruction", "paired"}


def test_the_summary_counts_it():
    plain, headed = summarise(tiny_config()), summarise(tiny_config(terms=[Headed()]))
    assert (headed.term_params, headed.params - plain.params) == (24 * 3 + 3, 24 * 3 + 3)
    assert headed.step_flops - plain.step_flops == 3 * 2 * 24 * 3
    assert plain.term_params == 0


def test_views_are_wanted_in_training_and_their_term_is_left_out_in_evaluation():
    model = model_with(Paired())
    with pytest.raises(UsageError, match=r"paired compares views of an image, and views is 1; .*--repeated-aug 2"):
        model(images())
    model.eval()
    assert model(images()).terms.keys() == {"reconstruction"}
    assert model(images(), views=2).terms.keys() == {"reconstruction", "paired"}


@pytest.mark.parametrize("views", [3, 0])
def test_rows_that_are_no_whole_images_are_refused(views: int):
    with pytest.raises(UsageError, match=f"views is {views}, and the batch has 4 rows; expected as many views of"):
        Batch(x=images(), tokenizer=model_with().tokenizer, views=views)


def test_a_class_token_is_wanted_where_one_is_read():
    assert model_with(OfClassToken()).terms == (OfClassToken(),)
    with pytest.raises(UsageError, match="of_class_token is to read the class token, and the encoder has none; leave"):
        model_with(OfClassToken(), cls_token=False)


def test_a_file_whose_head_lacks_is_refused(tmp_path: Path):
    model = model_with(Headed())
    model.term_heads = nn.ModuleDict()
    save_file(model.state_dict(), tmp_path / "m.safetensors", model_metadata(model))
    with pytest.raises(mae.MAEError, match="2 missing .*term_heads"):
        load_model(tmp_path / "m.safetensors")
