"""Features of a model and its comparators, and the report that sets them side by side."""

from collections.abc import Iterator

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from mae.errors import UsageError
from mae.evaluation.comparison import compare_knn
from mae.evaluation.features import extract, model_features, random_weights, raw_pixels
from mae.evaluation.knn import knn_accuracy
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.zoo import create_model

DIGITS = load_digits()
IMAGES = (torch.from_numpy(DIGITS.images).float()[:300, None] / 16 - 0.3) / 0.38
LABELS = torch.from_numpy(DIGITS.target)[:300]


@pytest.fixture
def model() -> MaskedAutoencoder:
    torch.manual_seed(5)
    return create_model(
        "mae_vit_lesson_patch4", img_size=8, patch_size=2, in_chans=1, embed_dim=32, depth=1, decoder_depth=1
    )


def train_batches() -> Iterator[Tensor]:
    torch.rand(3)  # as a loader does when it draws its seed
    return iter(IMAGES[:200].split(64))


def check_batches() -> Iterator[Tensor]:
    return iter(IMAGES[200:].split(64))


def test_features_come_in_order_as_float32_without_gradients(model):
    features = extract(model_features(model), train_batches())
    assert features.dtype == torch.float32 and not features.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(features, model.encode(IMAGES[:200]).mean, atol=1e-5, rtol=1e-4)
        cls = model.encode(IMAGES[:200]).cls
    torch.testing.assert_close(extract(model_features(model, "cls"), train_batches()), cls, atol=1e-5, rtol=1e-4)


def test_a_half_precision_model_takes_float32_batches(model):
    exact = extract(model_features(model), check_batches())
    features = extract(model_features(model.to(torch.bfloat16)), check_batches())
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, exact, atol=0.1, rtol=0.1)


def test_a_class_token_that_is_not_there_is_refused():
    model = create_model("mae_vit_lesson_patch4", img_size=8, in_chans=1, depth=1, decoder_depth=1, cls_token=False)
    with pytest.raises(UsageError, match="class token"):
        model_features(model, "cls")


def test_no_batch_is_said():
    with pytest.raises(UsageError, match="at least one batch"):
        extract(raw_pixels, [])


def test_raw_pixels_are_the_pixels_and_large_images_their_averages():
    assert torch.equal(raw_pixels(IMAGES), IMAGES.flatten(1))
    large = torch.randn(2, 3, 128, 32)
    torch.testing.assert_close(raw_pixels(large), large.unflatten(2, (64, 2)).mean(dim=3).flatten(1))


def test_random_weights_are_fresh_fixed_and_draw_from_no_global_generator(model):
    state = torch.get_rng_state()
    first = random_weights(model)
    torch.manual_seed(123)
    second = random_weights(model)
    torch.manual_seed(5)
    assert model.config == first.config
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.encoder.patch_embed.proj.weight, model.encoder.patch_embed.proj.weight)
    torch.set_rng_state(state)
    random_weights(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_random_weights_need_the_configuration(model):
    model.config = None
    with pytest.raises(UsageError, match="no configuration"):
        random_weights(model)


def test_the_report_is_each_part_by_itself(model):
    report = compare_knn(
        model, train_batches, LABELS[:200], check_batches, LABELS[200:], num_classes=10, k=7, pooling="cls"
    )

    def accuracy(train: Tensor, test: Tensor) -> float:
        return knn_accuracy(train, LABELS[:200], test, LABELS[200:], ks=[7], num_classes=10)[7]

    with torch.no_grad():
        cls = model.encode(IMAGES).cls
        fresh = random_weights(model).encode(IMAGES).cls
    assert report.accuracy == pytest.approx(accuracy(cls[:200], cls[200:]), abs=0.011)
    assert report.random_weights == pytest.approx(accuracy(fresh[:200], fresh[200:]), abs=0.011)
    assert report.raw_pixels == accuracy(IMAGES[:200].flatten(1), IMAGES[200:].flatten(1)) > 0.8
    assert report.accuracy != report.random_weights
    assert report.chance == 0.1
    commonest = max(range(10), key=LABELS[:200].tolist().count)
    assert report.majority == LABELS[200:].tolist().count(commonest) / 100
    assert (report.k, report.n_train, report.n_test) == (7, 200, 100)


def test_looking_changes_nothing_and_gives_the_same_again(model):
    model.train()
    model.decoder.eval()
    before = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    arguments = (train_batches, LABELS[:200], check_batches, LABELS[200:])
    report = compare_knn(model, *arguments, num_classes=10)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.encoder.blocks.parameters())
    assert compare_knn(model, *arguments, num_classes=10) == report
    assert compare_knn(model, *arguments, num_classes=10, k=9999).k == 200


def test_images_and_labels_that_do_not_match_are_refused(model):
    with pytest.raises(UsageError, match="200 training images came with 199 labels"):
        compare_knn(model, train_batches, LABELS[:199], check_batches, LABELS[200:], num_classes=10)
    with pytest.raises(UsageError, match="test labels lie between 0 and 10"):
        wrong = LABELS[200:].clone()
        wrong[3] = 10
        compare_knn(model, train_batches, LABELS[:200], check_batches, wrong, num_classes=10)
    with pytest.raises(UsageError, match="no test samples"):
        compare_knn(model, train_batches, LABELS[:200], check_batches, LABELS[:0], num_classes=10)
