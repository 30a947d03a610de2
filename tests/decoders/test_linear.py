"""SimMIM: mask tokens in the encoder, a linear decoder."""

import pytest
import torch
from torch.testing import assert_close

import mae
from mae.errors import UsageError

SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}


def simmim(**options: object) -> mae.MaskedAutoencoder:
    torch.manual_seed(0)
    return mae.create_model("mae_vit_lesson_patch4", **SIZES, decoder="linear", encoder_mask_tokens=True, **options)


def test_the_encoder_has_every_token_and_sees_no_masked_pixel() -> None:
    model, images = simmim(), torch.randn(2, 3, 16, 16)
    plan = model.plan(images, generator=torch.Generator().manual_seed(1))
    seen = model.encoder(images, plan)
    assert seen.tokens.shape == (2, 17, 24) and seen.places is None
    where = model.tokenizer.join(plan.hidden.unsqueeze(-1).expand(-1, -1, 48), model.config.layout)
    noisy = torch.where(where, torch.randn_like(images), images)
    assert torch.equal(model.encoder(noisy, plan).tokens, seen.tokens)


def test_the_prediction_is_the_linear_map_of_the_masked_tokens() -> None:
    model, images = simmim(), torch.randn(2, 3, 16, 16)
    plan = model.plan(images)
    tokens = model.encoder(images, plan).tokens[:, 1:]
    expected = torch.stack(
        [model.decoder.pred(row[places]) for row, places in zip(tokens, plan.predicted, strict=True)]
    )
    assert_close(model(images, plan=plan).prediction, expected)


def test_features_of_whole_images_have_no_mask_tokens() -> None:
    model, images = simmim(), torch.randn(2, 3, 16, 16)
    before = model.encode(images).mean
    torch.nn.init.normal_(model.encoder.mask_token)
    assert torch.equal(model.encode(images).mean, before)


@pytest.mark.parametrize("options", [{"decoder": "linear"}, {"encoder_mask_tokens": True}])
def test_it_wants_mask_tokens_and_the_others_do_not(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="mask tokens do not fit"):
        mae.create_model("mae_vit_lesson_patch4", **options)
