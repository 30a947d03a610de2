"""Several class tokens: what they are, that they are alike, and what is made of them."""

from typing import Any

import pytest
import torch
from slow_mae import double_weights, slow_encode
from tiny import images_for, tiny_config, tiny_model
from torch.testing import assert_close

import mae
from mae.bench.peer import make_peer
from mae.cli import main
from mae.errors import UsageError
from mae.interop.adapt import resized, with_channels
from mae.models.build import build_model
from mae.models.classifier import LinearProbe
from mae.models.fingerprint import output_fingerprint
from mae.models.summary import summarise


def test_the_feature_is_the_mean_of_what_a_slow_loop_leaves() -> None:
    model = tiny_model(cls_tokens=4, pos_embed="learned")
    images, weights = images_for(model), double_weights(model)
    features = model.double().encode(images.double())
    assert model.config is not None and features.cls is not None
    for number, image in enumerate(images.double()):
        slow = slow_encode(weights, model.config, image, list(range(24)))
        assert slow.shape == (4 + 24, 24)
        assert_close(features.cls[number], sum(slow[:4]) / 4, rtol=0, atol=1e-12)
        assert_close(features.patches[number], slow[4:], rtol=0, atol=1e-12)


def test_of_one_token_the_feature_is_that_token() -> None:
    model = tiny_model()
    images = images_for(model)
    assert torch.equal(model.encode(images).cls, model.encoder(images).tokens[:, 0])
    assert tiny_model(cls_tokens=1).state_dict().keys() == model.state_dict().keys()
    assert model.encoder.cls_token.shape == (1, 1, 24)


@pytest.mark.parametrize("decoder", ["self", "cross"])
def test_their_order_says_nothing(decoder: str) -> None:
    """They have no position, neither here nor in the decoder: features, loss and probe stay."""
    model = tiny_model(cls_tokens=5, decoder=decoder).double()
    images, order = images_for(model).double(), torch.tensor([3, 0, 4, 2, 1])
    plan = model.plan(images, keys=torch.arange(3))
    head = LinearProbe(encoder=model.encoder, feature="cls", num_classes=3, config=model.config).double()

    def answers() -> dict[str, torch.Tensor]:
        features, probe = model.encode(images), output_fingerprint(head)
        assert probe is not None and probe.prediction is not None and features.cls is not None
        loss, answer = model(images, plan=plan).loss, torch.tensor(probe.prediction)
        return {"cls": features.cls, "patches": features.patches, "loss": loss, "probe": answer}

    before, tokens = answers(), model.encoder(images).tokens
    model.encoder.cls_token.data = model.encoder.cls_token.data[:, order]
    assert_close(answers(), before, rtol=1e-6, atol=1e-6)
    assert_close(model.encoder(images).tokens[:, :5], tokens[:, order], rtol=0, atol=1e-12)
    assert (tokens[:, :5] - tokens[:, order]).abs().max() > 0.1


@pytest.mark.parametrize(
    "options",
    [{}, {"decoder": "cross"}, {"mask": "block"}, {"mask": "grid"}, {"decoder": "linear", "encoder_mask_tokens": True}],
    ids=str,
)
def test_each_is_trained_apart(options: dict[str, Any]) -> None:
    sizes = {} if options.get("decoder") == "linear" else {"decoder_embed_dim": 16, "decoder_num_heads": 2}
    small = dict(img_size=32, patch_size=4, embed_dim=24, depth=2, num_heads=3)
    model = mae.create_model("mae_vit_lesson_patch4", **small, **sizes, **options, cls_tokens=4)
    images = images_for(model)
    model(images, plan=model.plan(images, keys=torch.arange(3))).loss.backward()
    slopes = model.encoder.cls_token.grad[0]
    assert slopes.norm(dim=1).min() > 0 and torch.pdist(slopes).min() > 0


def test_they_start_unlike_each_other() -> None:
    torch.manual_seed(0)
    tokens = build_model(tiny_config(embed_dim=768, num_heads=3, cls_tokens=8)).encoder.cls_token.detach()[0]
    assert tokens.shape == (8, 768)
    assert tokens.std(dim=1).tolist() == pytest.approx([0.02] * 8, rel=0.1)
    assert tokens.mean(dim=1).abs().max() < 0.003
    assert (torch.corrcoef(tokens) - torch.eye(8)).abs().max() < 0.15


def test_sizes_and_channels_leave_them_alone() -> None:
    model = tiny_model(cls_tokens=4, pos_embed="learned")
    for other, _ in (resized(model, (24, 24)), with_channels(model, 5, "mean")):
        assert torch.equal(other.encoder.cls_token, model.encoder.cls_token)
        images = images_for(other)  # type: ignore[arg-type]
        assert_close(other.encode(images).cls, other.encoder(images).tokens[:, :4].mean(dim=1))


def test_each_counts_as_its_values() -> None:
    one, four = summarise(tiny_config()), summarise(tiny_config(cls_tokens=4))
    assert four.encoder_params - one.encoder_params == 3 * 24 and four.decoder_params == one.decoder_params


def test_a_peer_with_one_token_is_none_of_theirs() -> None:
    with pytest.raises(ValueError, match="one class token"):
        make_peer(tiny_model(cls_tokens=2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cls_tokens": 0}, "cls_tokens is 0; expected greater than 0"),
        ({"cls_tokens": -1}, "cls_tokens is -1; expected greater than 0"),
        ({"cls_tokens": 2000}, "cls_tokens is 2000; expected less than or equal to 1024"),
        ({"cls_tokens": 4, "cls_token": False}, "cls_tokens is 4, and cls_token is False; leave one of the two out"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    options: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=says):
        tiny_config(**options)
    words = ["--no-cls-token"] if "cls_token" in options else []
    words += ["--cls-tokens", str(options["cls_tokens"])]
    assert main(["pretrain", "builtin:digits", *words, "--steps", "1"]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
