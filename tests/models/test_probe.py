"""A model's answer to its probe: what it is, what it must tell apart, and what it must not."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from learning import structured
from pieces import asked
from slow_mae import double_weights, slow_encode, slow_forward
from tiny import tiny_config, tiny_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mae.errors import UsageError
from mae.masks.random import RandomMasking
from mae.models.build import build_model
from mae.models.fingerprint import TOLERANCE, OutputFingerprint, output_fingerprint
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.randomness import Stream, sample_keys, uniform

NOISE = 1e-12  # what processors, threads and kernels make of float64 is far below
LEAST_FAULT = 3 * TOLERANCE


def made(model: MaskedAutoencoder) -> OutputFingerprint:
    probe = output_fingerprint(model)
    assert probe is not None
    return probe


def fresh_model() -> MaskedAutoencoder:
    torch.manual_seed(3)
    return build_model(tiny_config(img_size=(16, 24)))


def trained_model() -> MaskedAutoencoder:
    torch.manual_seed(4)
    model, generator = build_model(tiny_config(img_size=(24, 24))), torch.Generator().manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(30):
        images = structured(generator)
        model(images, plan=model.plan(images)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def models() -> dict[str, MaskedAutoencoder]:
    return {"fresh": fresh_model(), "random": tiny_model(), "trained": trained_model()}


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"pos_embed": "learned", "cls_token": False, "in_chans": 2}, NOISE),
        ({"pos_embed": "learned", "cls_tokens": 3}, NOISE),
        ({}, 1e-6),  # the slow model's sines and cosines are not rounded to float32
    ],
    ids=str,
)
def test_the_answer_is_that_of_the_slow_model(changes: dict[str, Any], tolerance: float) -> None:
    model = tiny_model(**changes)
    config = model.config
    assert config is not None
    text = json.dumps(config.to_json(), sort_keys=True).encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
    image_key, mask_key, features_key, prediction_key = (
        sample_keys(seed, -1, torch.tensor([number])) for number in range(4)
    )
    channels = config.layout.channels
    image = uniform(image_key, channels * 16 * 24, Stream.FORWARD).reshape(1, channels, 16, 24) * 2 - 1
    visible = RandomMasking(ratio=0.5).plan(asked((4, 6), mask_key)).visible[0].tolist()
    weights = double_weights(model)
    tokens = slow_encode(weights, config, image[0].double(), list(range(24)))[-24:]
    pred = slow_forward(weights, config, image, [visible], torch.ones(1, 24)).pred[0]
    order = uniform(mask_key, 24, Stream.MASK)[0].argsort(stable=True).tolist()
    expected = OutputFingerprint(
        image_sha256=hashlib.sha256(b"".join(bytes(row.numpy()) for row in image.flatten(0, 2))).hexdigest(),
        features=condensed(tokens.mean(dim=0), features_key),
        prediction=condensed(torch.stack([pred[n] for n in order[12:]]), prediction_key),
    )
    found = made(model)
    assert found.image_sha256 == expected.image_sha256
    assert expected.difference(found) < tolerance


def condensed(values: Tensor, key: Tensor) -> tuple[float, ...]:
    """One value after the other: its sign, and the stretch it belongs to; the first stretches are one longer."""
    sums = [0.0] * 16
    signs = uniform(key, values.numel(), Stream.FORWARD)[0].tolist()
    short, longer = divmod(values.numel(), 16)
    bounds = [number * short + min(number, longer) for number in range(1, 17)]
    for place, (value, sign) in enumerate(zip(values.flatten().tolist(), signs, strict=True)):
        sums[next(n for n, bound in enumerate(bounds) if place < bound)] += value if sign >= 0.5 else -value
    return tuple(sums)


def test_probing_leaves_no_trace() -> None:
    model = tiny_model().train()
    for block in (*model.encoder.blocks, *model.decoder.blocks):
        block.drop_path.rate = 0.5  # would show in training mode
    model.encoder.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    first = made(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(model) == first == made(model.eval()) == made(model.train())
    assert torch.equal(torch.random.get_rng_state(), drawn)
    model.encoder.blocks[0].eval()
    made(model)
    assert [module.training for module in model.modules()] == modes
    for name, weight in model.named_parameters():
        assert torch.equal(weight, weights[name]) and weight.dtype == torch.float32 and weight.grad is None, name


def test_what_is_no_fault_stays_below_the_noise(models: dict[str, MaskedAutoencoder]) -> None:
    for name, model in models.items():
        stored = made(model)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(threads + 1)
            assert stored.difference(made(model)) < NOISE, name
        finally:
            torch.set_num_threads(threads)
        with sdpa_kernel(SDPBackend.MATH):  # another order of the same sums
            other = made(model)
        assert 0 < stored.difference(other) < NOISE, name


def test_a_position_rounded_the_other_way_is_no_fault(models: dict[str, MaskedAutoencoder]) -> None:
    for name, model in models.items():
        stored = made(model)
        table = model.encoder.pos_embed.get_buffer("table")
        kept = table.clone()
        value = table[-1, 0]  # stands in every row of the grid
        table[table == value] = torch.nextafter(value, torch.tensor(0.0))
        difference = stored.difference(made(model))
        table.copy_(kept)
        assert NOISE < difference < TOLERANCE, name


def test_a_weight_moved_by_a_hundredth_shows_wherever_it_is(models: dict[str, MaskedAutoencoder]) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, model in models.items():
        stored = made(model)
        for part, weight in model.named_parameters():
            flat = weight.detach().view(-1)
            where = int(torch.randint(len(flat), (), generator=generator))
            if part.endswith("qkv.bias"):  # the keys' bias adds the same to every score, and softmax takes it out
                where %= len(flat) // 3
            kept = float(flat[where])
            flat[where] += 1e-2
            assert stored.difference(made(model)) > LEAST_FAULT, (name, part, where)
            flat[where] = kept
        assert stored == made(model)


def swap_queries_and_keys(blocks: Any) -> None:
    query, key, value = blocks[-1].attn.qkv.weight.detach().chunk(3)
    blocks[-1].attn.qkv.weight.data = torch.cat([key, query, value])


def zero_bias_of_queries(blocks: Any) -> None:
    bias = blocks[-1].attn.qkv.bias.detach()
    bias[: len(bias) // 3] = 0


def zero_bias_of_output(blocks: Any) -> None:
    blocks[-1].attn.proj.bias.detach().zero_()


def change_eps(blocks: Any) -> None:
    for block in blocks:
        block.norm1.eps = block.norm2.eps = 1e-12


def join_heads(blocks: Any) -> None:
    blocks[-1].attn.num_heads = 1


@pytest.mark.parametrize(
    "fault", [swap_queries_and_keys, zero_bias_of_queries, zero_bias_of_output, change_eps, join_heads]
)
@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize("kind", ["fresh", "trained"])
def test_a_faulty_block_shows(
    kind: str, part: str, fault: Callable[[Any], None], models: dict[str, MaskedAutoencoder]
) -> None:
    source = models[kind]
    assert source.config is not None
    model = build_model(source.config).eval()
    model.load_state_dict(source.state_dict())
    stored = made(model)
    assert stored == made(source)
    fault(getattr(model, part).blocks)
    if kind == "fresh" and fault in (zero_bias_of_queries, zero_bias_of_output):  # they are zero already
        assert stored == made(model)
    else:
        assert stored.difference(made(model)) > LEAST_FAULT


def test_another_configuration_is_another_image() -> None:
    changes: list[dict[str, Any]] = [{}, {"num_heads": 2}, {"mask_ratio": 0.5}, {"mean": (0.5, 0.5, 0.5)}]
    assert len({made(tiny_model(**change)).image_sha256 for change in changes}) == 4


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, (16, 24)),
        ({"img_size": (64, 24)}, (32, 24)),
        ({"img_size": 640, "pos_embed": "sincos2d"}, (32, 32)),
        ({"img_size": (64, 24), "pos_embed": "learned"}, (64, 24)),
    ],
    ids=str,
)
def test_the_image_has_at_most_8x8_patches_unless_positions_are_learned(
    changes: dict[str, Any], shape: tuple[int, int]
) -> None:
    model = tiny_model(**changes)
    shapes: list[Any] = []
    model.encoder.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape[2:]))
    made(model)
    assert shapes == [shape, shape]


def test_there_is_no_probe_where_none_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {"img_size": (128, 132), "pos_embed": "learned", "embed_dim": 6, "decoder_embed_dim": 4}
    assert output_fingerprint(tiny_model(**many)) is None  # 32 x 33 patches
    assert output_fingerprint(tiny_model(**(many | {"img_size": 128}))) is not None
    with torch.device("meta"):
        large = build_model(tiny_config(img_size=4096, patch_size=1024))
    assert output_fingerprint(large) is None  # decided before anything is computed
    model = tiny_model()
    nn.init.constant_(model.decoder.pred.bias, torch.inf)
    assert output_fingerprint(model) is None
    model = tiny_model()
    model.config = None
    with pytest.raises(ValueError, match="build_model"):
        output_fingerprint(model)


@pytest.mark.parametrize("values", [(), (0.0,) * 15, (0.0,) * 15 + (float("nan"),), (0.0,) * 15 + (float("inf"),)])
def test_numbers_that_are_no_answer_are_refused(values: tuple[float, ...]) -> None:
    for wrong in ({"features": values}, {"prediction": values}):
        with pytest.raises(UsageError, match="expected 16 finite numbers"):
            OutputFingerprint(**({"image_sha256": "", "features": (0.0,) * 16, "prediction": (0.0,) * 16} | wrong))


def test_differences_are_relative_to_each_part() -> None:
    ones, large = (1.0,) * 15, (100.0,) * 15
    stored = OutputFingerprint(image_sha256="", features=(*ones, 2.0), prediction=(*large, -200.0))
    assert (
        stored.difference(OutputFingerprint(image_sha256="", features=(*ones, 2.5), prediction=(*large, -200.0)))
        == 0.25
    )
    assert (
        stored.difference(OutputFingerprint(image_sha256="", features=(*ones, 2.0), prediction=(*large, -220.0))) == 0.1
    )
    nothing = OutputFingerprint(image_sha256="", features=(0.0,) * 16, prediction=(0.0,) * 16)
    assert nothing.difference(nothing) == 0 and nothing.difference(stored) == 200
