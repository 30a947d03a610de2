import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import mae
from mae.errors import UsageError
from mae.losses.cross_entropy import CrossEntropy

SIZES = {"img_size": 16, "patch_size": 4}


@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_that_of_pytorch(weighted: bool):
    logits, classes = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    weight = torch.rand(3, 5) if weighted else None
    each = cross_entropy(logits.mT, classes, reduction="none")
    expected = each.mean() if weight is None else (each * weight).sum() / weight.sum()
    assert_close(CrossEntropy()(logits, classes.unsqueeze(-1).float(), weight), expected)


def test_nothing_is_asked_of_a_token_without_a_class():
    """The mean is over all tokens, so that parts of a batch add up to the whole."""
    logits, classes = torch.randn(2, 3, 4, requires_grad=True), torch.tensor([[0.0, torch.nan, 3.0], [torch.nan] * 3])
    loss = CrossEntropy()(logits, classes.unsqueeze(-1), None)
    assert_close(loss, cross_entropy(logits[0, [0, 2]], torch.tensor([0, 3]), reduction="sum") / 6)
    loss.backward()
    assert logits.grad is not None and torch.equal(logits.grad.ne(0).any(dim=-1), ~classes.isnan())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"loss": "cross_entropy"},
            "target pixels has no classes, and loss cross_entropy does not fit it; give another",
        ),
        (
            {"target": "codes", "teacher": "codebook"},
            "target codes has classes, and loss mse does not fit it; give --loss",
        ),
        (
            {"target": "codes", "loss": "cross_entropy"},
            "target codes needs a teacher that gives codes; give --teacher codebook",
        ),
        (
            {"target": "codes", "loss": "cross_entropy", "teacher": "ema"},
            "target codes needs a teacher that gives codes; give --teacher codebook",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, str], told: str):
    with pytest.raises(UsageError, match=told):
        mae.create_model("mae_vit_lesson_patch4", **SIZES, **options)
