"""The configuration as JSON, and what a forged file may try."""

import json
from typing import Any

import pytest

from mae.errors import UsageError
from mae.models.config import ModelConfig, ModelOptions, pair

UNUSUAL = ModelConfig(
    img_size=(96, 64), patch_size=(8, 16), in_chans=2, embed_dim=64, depth=3, num_heads=2, mlp_ratio=2.5,
    decoder_embed_dim=32, decoder_depth=1, decoder_num_heads=4, cls_token=False, pos_embed="learned", mask_ratio=0.6,
    norm_pix_loss=False, mean=(0.5, 0.25), std=(0.1, 1.0),
)  # fmt: skip


@pytest.mark.parametrize("config", [ModelConfig(), UNUSUAL])
def test_json_and_back(config: ModelConfig) -> None:
    text = json.dumps(config.to_json())
    assert ModelConfig.from_json(json.loads(text)) == config
    assert json.dumps(ModelConfig.from_json(json.loads(text)).to_json()) == text


def test_missing_fields_keep_their_default_and_whole_numbers_pass_for_real_ones() -> None:
    config = ModelConfig.from_json({"img_size": [64, 64], "patch_size": [8, 8], "mlp_ratio": 2})
    assert config == ModelConfig(img_size=(64, 64), patch_size=(8, 8), mlp_ratio=2.0)
    assert (config.grid, config.num_tokens, config.patch_values) == ((8, 8), 64, 192)
    assert pair(3) == (3, 3) and pair((3, 4)) == (3, 4)


def test_the_options_for_overrides_are_the_fields() -> None:
    assert set(ModelOptions.__annotations__) == set(ModelConfig.__dataclass_fields__)


PAIRS, STATISTICS = ("img_size", "patch_size"), ("mean", "std")
NUMBERS = [name for name, value in ModelConfig().to_json().items() if type(value) in (int, float)]
WEIGHTS = ("laplacian", "uniformity", "focal_frequency")
HOSTILE: list[tuple[str, Any]] = [
    *((name, value) for name in NUMBERS for value in ("12", None, [1], {}, True, float("nan"))),
    *((name, value) for name in NUMBERS if name not in ("mask_ratio", *WEIGHTS) for value in (0, -1, 10**9, 10**400)),
    *((name, value) for name in WEIGHTS for value in (-1, 10**400, float("inf"))),
    *(("low_pass", value) for value in ("1", 0, -0.1, 1.1, float("nan"), True)),
    *((name, value) for name in ("loss", "uniformity_form") for value in (1, None, "", "__class__", ["mse"])),
    *((name, value) for name in ("mlp_ratio",) for value in (float("inf"), -float("inf"))),
    *((name, 1.5) for name in ("depth", "embed_dim", "in_chans", "num_heads")),
    *((name, v) for name in PAIRS for v in ("224", [], [1], [1, 2, 3], [1, "2"], [1.5, 2.0], None, True)),
    *((name, v) for name in PAIRS for v in ([0, 16], [-16, 16], [10**9, 16], [True, True], {"0": 1})),
    *((name, v) for name in STATISTICS for v in ("abc", [1, 2], [1, 2, "3"], 3, [1, 2, float("nan")], [1, 2, True])),
    *((name, [10**400, 1, 1]) for name in STATISTICS),
    ("std", [1, 1, 0]),
    ("std", [1, 1, -1]),
    *((name, value) for name in ("cls_token", "norm_pix_loss", "laplacian_raw") for value in (1, 0, "true", None)),
    *(("pos_embed", value) for value in (1, None, ["sincos2d"])),
]


@pytest.mark.parametrize(("name", "value"), HOSTILE, ids=lambda v: str(v)[:20])
def test_hostile_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        ModelConfig.from_json({name: value})


def test_an_image_of_too_many_patches_is_refused() -> None:
    with pytest.raises(UsageError, match="makes 268435456 tokens"):
        ModelConfig.from_json({"img_size": [16384, 16384], "patch_size": [1, 1]})


def test_norm_pix_of_a_single_value_is_refused() -> None:
    with pytest.raises(UsageError, match="norm_pix_loss=False"):
        ModelConfig.from_json({"img_size": [8, 8], "patch_size": [1, 1], "in_chans": 1})


@pytest.mark.parametrize(
    ("key", "nearest"), [("patchsize", "patch_size"), ("mask-ratio", "mask_ratio"), ("xyz", "cls_token or")]
)
def test_unknown_keys_are_refused_with_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"unknown model option '{key}'.*{nearest}"):
        ModelConfig.from_json({key: 1})
