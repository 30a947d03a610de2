"""The configuration as JSON, and what a forged file may try."""

import json
from typing import Any

import pytest

from mae.core.describe import describe
from mae.core.kinds import ROOMS, kinds
from mae.core.method import MethodConfig
from mae.errors import UsageError

UNUSUAL = MethodConfig().override(
    dict(img_size=(96, 64), patch_size=(8, 16), in_chans=2, embed_dim=64, depth=3, num_heads=2, mlp_ratio=2.5,
    decoder="cross", decoder_embed_dim=32, decoder_depth=1, decoder_num_heads=4, cls_token=False, pos_embed="learned",
    mask_ratio=0.6, norm_pix_loss=False, mean=(0.5, 0.25), std=(0.1, 1.0), laplacian=0.1, uniformity=0.2)
)  # fmt: skip


@pytest.mark.parametrize("config", [MethodConfig(), UNUSUAL])
def test_json_and_back(config: MethodConfig) -> None:
    text = json.dumps(config.to_json())
    assert MethodConfig.from_json(json.loads(text)) == config
    assert json.dumps(MethodConfig.from_json(json.loads(text)).to_json()) == text


def test_missing_options_keep_their_default_and_whole_numbers_pass_for_real_ones() -> None:
    config = MethodConfig.from_json(
        {
            "tokenizer": {"kind": "image", "img_size": [64, 64], "patch_size": 8},
            "encoder": {"kind": "vit", "mlp_ratio": 2},
        }
    )
    expected = MethodConfig().override({"img_size": 64, "patch_size": (8, 8), "encoder": config.encoder})
    assert config == expected and config.encoder.mlp_ratio == 2.0 and config.decoder.mlp_ratio == 4.0
    assert (config.layout.grid, config.layout.num_tokens, config.layout.token_values) == ((8, 8), 64, 192)


def described(flat: str, value: Any) -> dict[str, Any]:
    """A model's description in which the option of this flat name has this value."""
    room, kind, name = next(
        (room, kind, option.name)
        for room in ROOMS
        for kind in kinds(room)
        for option in describe(room, kind).options
        if option.flat == flat
    )
    component = {"kind": kind, name: value}
    return {"terms": [component]} if room == "terms" else {ROOMS[room]: component}


PAIRS, STATISTICS = ("img_size", "patch_size"), ("mean", "std")
NUMBERS = [name for name, value in MethodConfig().flat().items() if type(value) in (int, float)]
WEIGHTS = tuple(kinds("terms"))
_VICREG = ("vicreg_invariance", "vicreg_variance", "vicreg_covariance")
# No model is larger for these, so they need no upper bound; a patch factor is compared with the images.
UNBOUNDED = ("mask_ratio", "focal_frequency_alpha", "infonce_temperature", *_VICREG, *WEIGHTS)
FACTOR = "focal_frequency_patch_factor"
HOSTILE: list[tuple[str, Any]] = [
    *((name, value) for name in NUMBERS for value in ("12", None, [1], {}, True, float("nan"))),
    *((name, value) for name in NUMBERS if name not in (*UNBOUNDED, FACTOR) for value in (0, -1, 10**9, 10**400)),
    *((FACTOR, value) for value in (0, -1, 1.5)),
    *((name, value) for name in UNBOUNDED for value in (-1, 10**400, float("inf"))),
    *(("target_cutoff", value) for value in ("1", 0, -0.1, 1.1, float("nan"), True)),
    *(("uniformity_form", value) for value in (1, None, "", "__class__", ["gaussian"])),
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
        MethodConfig.from_json(described(name, value))


@pytest.mark.parametrize("value", [1, None, "", "__class__", ["mse"], {}, {"kind": 1}, {"kind": ["mse"]}], ids=str)
@pytest.mark.parametrize("slot", ["tokenizer", "mask", "loss", "terms"])
def test_hostile_components_are_refused_by_slot(slot: str, value: Any) -> None:
    with pytest.raises(UsageError, match=slot.removesuffix("s") if slot == "terms" else slot):
        MethodConfig.from_json({slot: [value] if slot == "terms" else value})


@pytest.mark.parametrize("terms", [1, "laplacian", {"kind": "laplacian"}], ids=str)
def test_terms_that_are_no_list_are_refused(terms: Any) -> None:
    with pytest.raises(UsageError, match="terms is .*; expected a list"):
        MethodConfig.from_json({"terms": terms})


def test_a_term_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="term laplacian is given twice"):
        MethodConfig.from_json({"terms": [{"kind": "laplacian"}, {"kind": "laplacian", "weight": 2}]})


def test_an_image_of_too_many_patches_is_refused() -> None:
    with pytest.raises(UsageError, match="makes 268435456 tokens"):
        MethodConfig().override({"img_size": 16384, "patch_size": 1})


def test_norm_pix_of_a_single_value_is_refused() -> None:
    with pytest.raises(UsageError, match="norm_pix_loss=False"):
        MethodConfig().override({"img_size": 8, "patch_size": 1, "in_chans": 1})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"encodre": {}}, "unknown part of a model's description 'encodre'; did you mean encoder"),
        ({"mask": {"kind": "random", "raito": 0.5}}, "unknown option of mask random 'raito'; did you mean ratio"),
        ({"mask": {"kind": "rnadom"}}, "unknown mask 'rnadom'; did you mean random"),
        ({"mask": {"kind": "mine", "package": "other"}}, "comes from the package 'other': install that"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        MethodConfig.from_json(values)


@pytest.mark.parametrize(("name", "nearest"), [("patchsize", "patch_size"), ("mask-ratio", "mask_ratio")])
def test_unknown_options_are_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"unknown option '{name}'; did you mean {nearest}"):
        MethodConfig().override({name: 1})
