"""What holds for every kind of every room: a new one is tried by all of this as soon as its room lists it."""

import json
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from annotated_types import Ge, Gt, Le, Lt
from pieces import batch_of
from torch.testing import assert_close

import mae
from mae.core.component import make, options_of, to_json
from mae.core.describe import describe
from mae.core.kinds import ROOMS, find, kinds
from mae.core.method import MethodConfig
from mae.core.types import Layout, MaskRequest
from mae.errors import UsageError
from mae.models.file import load_model
from mae.pretraining.checks.model import Subject, check_model
from mae.randomness import sample_keys

EVERY = [(room, kind) for room in ROOMS for kind in kinds(room)]
SIZES: dict[str, Any] = {
    "img_size": (16, 24), "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_ratio": 2.0,
}  # fmt: skip
DECODER = {"decoder_embed_dim": 16, "decoder_depth": 2, "decoder_num_heads": 2}
SMALL = {"target_cell": 2}
"""Options without which a kind does not fit images as small as these."""


def of(room: str) -> list[str]:
    return kinds(room)


def options_for(room: str, kind: str) -> dict[str, Any]:
    """Flat options of a small model with this kind in it, and what the kind asks of the others."""
    slot = ROOMS[room]
    chosen: dict[str, Any] = {kind: 0.1} if room == "terms" else {slot: kind}
    component = find(room, kind)()
    if getattr(component, "needs_mask_tokens", False):
        chosen["encoder_mask_tokens"] = True
    if getattr(component, "reads_classes", False):
        chosen["target"] = next(kind for kind in kinds("targets") if find("targets", kind).classes)
    if "target" in chosen and find("targets", chosen["target"]).classes:
        chosen["loss"] = next(kind for kind in kinds("losses") if find("losses", kind).reads_classes)
        component = find("targets", chosen["target"])()
    needs = getattr(component, "needs", frozenset())
    reads = component.reads if room == "masks" else frozenset()
    if "difficulty" in reads:
        chosen |= {next(kind for kind in kinds("terms") if find("terms", kind).predicts_loss): 1.0}
    if {"attention", "difficulty"} & reads:
        chosen["teacher"] = next(kind for kind in kinds("teachers") if find("teachers", kind)().gives_scores)
    for teacher in kinds("teachers") if needs else ():
        if needs <= find("teachers", teacher)().gives(find("encoders", "vit")()).keys():
            chosen["teacher"] = teacher
    flats = {option.flat for option in describe(room, kind).options}
    return SIZES | chosen | {name: value for name, value in SMALL.items() if name in flats}


def method_of(room: str, kind: str, **more: Any) -> MethodConfig:
    options = options_for(room, kind)
    decoder = {} if room == "decoders" and kind == "linear" else DECODER
    known = describe("decoders", options.get("decoder", "self")).options
    decoder = {name: value for name, value in decoder.items() if name in {option.flat for option in known}}
    return MethodConfig().override({**options, **decoder, **more})


def model_of(room: str, kind: str, **more: Any) -> mae.MaskedAutoencoder:
    from mae.models.build import build_model

    torch.manual_seed(0)
    return build_model(method_of(room, kind, **more))


def output_of(model: mae.MaskedAutoencoder, plan: Any = None) -> Any:
    """Of the images, as two views of each where a term compares views."""
    keys = sample_keys(0, 0, torch.arange(4))
    views = 2 if any(term.reads_views for term in model.terms) else 1
    return model(images(), plan=model.plan(images(), keys=keys) if plan is None else plan, keys=keys, views=views)


def images(count: int = 4, size: tuple[int, int] = (16, 24)) -> torch.Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("room", "kind"), EVERY)
def test_what_is_read_from_its_text_is_what_it_is(room: str, kind: str):
    cls, told = find(room, kind), describe(room, kind)
    hints = get_type_hints(cls, include_extras=True)
    assert cls.kind == kind == told.kind and cls.slot == ROOMS[room]
    assert [option.name for option in told.options] == [field.name for field in fields(cls)]
    for option, field in zip(told.options, fields(cls), strict=True):
        assert option.type == hints[option.name] and option.default == field.default is not MISSING
        assert option.help.endswith((".", ")")), f"{option.flat} needs a line of help"
    assert told.summary.endswith(".")


@pytest.mark.parametrize(("room", "kind"), EVERY)
def test_it_goes_to_json_and_back(room: str, kind: str):
    method = method_of(room, kind)
    assert MethodConfig.from_json(json.loads(json.dumps(method.to_json()))) == method
    component = find(room, kind)()
    assert to_json(component)["kind"] == kind and "package" not in to_json(component)
    assert make(type(component), options_of(component), what=kind) == component


@pytest.mark.parametrize(("room", "kind"), EVERY)
def test_unknown_options_are_refused_with_the_nearest(room: str, kind: str):
    values = method_of(room, kind).to_json()
    part = values["terms"][0] if room == "terms" else values[ROOMS[room]]
    for name in [name for name in part if name != "kind"][:1]:
        part[f"{name}s_"] = part.pop(name)
        with pytest.raises(
            UsageError, match=rf"unknown option of {ROOMS[room]} {kind} '{name}s_'; did you mean {name}"
        ):
            MethodConfig.from_json(values)


def out_of_range(hint: Any) -> list[Any]:
    """Values just outside of the bounds of an annotation, and values that are no numbers."""
    found: list[Any] = []
    for mark in getattr(hint, "__metadata__", ()):
        match mark:
            case Gt(gt=bound):
                found.append(bound)
            case Ge(ge=bound):
                found.append(bound - 1)
            case Lt(lt=bound):
                found.append(bound)
            case Le(le=bound):
                found.append(bound + 1)
    kind = hint.__args__[0] if hasattr(hint, "__metadata__") and hasattr(hint, "__args__") else hint
    kind = getattr(hint, "__origin__", kind) if hasattr(hint, "__metadata__") else kind
    if kind is float:
        found += [float("nan"), float("inf")]
    return found


@pytest.mark.parametrize(("room", "kind"), EVERY)
def test_values_out_of_range_are_refused_by_their_flag(room: str, kind: str):
    for option in describe(room, kind).options:
        for value in out_of_range(option.type):
            with pytest.raises(UsageError, match=rf"^{option.flat} is .*; expected "):
                find(room, kind)(**{option.name: value})


def test_values_of_another_type_are_refused_by_their_flag():
    """In a process of its own, since the tests' own type checks come first here."""
    code = """
from mae.core.describe import describe
from mae.core.kinds import ROOMS, find, kinds
from mae.errors import UsageError
for room in ROOMS:
    for kind in kinds(room):
        for option in describe(room, kind).options:
            try:
                find(room, kind)(**{option.name: {}})
            except UsageError as error:
                assert str(error).startswith(f"{option.flat} is {{}}; expected "), error
            else:
                raise AssertionError(f"{kind} takes {option.name}={{}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", of("masks"))
@pytest.mark.parametrize("size", [(16, 24), (4, 64), (48, 8)])
def test_a_mask_is_a_plan_of_its_key_alone(kind: str, size: tuple[int, int]):
    masking, layout = find("masks", kind)(), Layout(size=size, patch=(4, 4), channels=3)
    keys, x = sample_keys(0, 0, torch.arange(40)), torch.randn(40, 3, *size)
    scores = torch.rand(40, layout.num_tokens)
    plan = masking.plan(MaskRequest(layout=layout, keys=keys, x=x, scores=scores))
    visible = masking.num_visible(layout)
    assert plan.visible.shape == (40, visible) and 0 < visible < layout.num_tokens
    for row in range(40):
        seen, hidden = set(plan.visible[row].tolist()), set(plan.hidden[row].nonzero().flatten().tolist())
        assert not seen & hidden and len(seen) + len(hidden) == layout.num_tokens
        assert (
            set(plan.predicted[row].tolist()) <= hidden and len(plan.predicted[row].unique()) == plan.predicted.shape[1]
        )
    rows = torch.tensor([31, 2, 7])
    alone = masking.plan(MaskRequest(layout=layout, keys=keys[rows], x=x[rows], scores=scores[rows]))
    some = plan.take(rows)
    assert torch.equal(alone.visible, some.visible) and torch.equal(alone.hidden, some.hidden)
    assert len(plan.hidden.unique(dim=0)) > 1


@pytest.mark.parametrize("kind", of("masks"))
def test_a_ratio_is_that_of_the_mask(kind: str):
    masking, layout = find("masks", kind)(), Layout(size=(64, 64), patch=(4, 4), channels=1)
    keys = sample_keys(0, 0, torch.arange(8))
    for ratio in (0.3, 0.75):
        x, scores = torch.randn(8, 1, 64, 64), torch.rand(8, layout.num_tokens)
        plan = masking.plan(MaskRequest(layout=layout, keys=keys, ratio=ratio, x=x, scores=scores))
        assert abs(float(plan.hidden.float().mean()) - ratio) <= 1 / layout.num_tokens


@pytest.mark.parametrize("kind", [kind for kind in of("targets") if not find("targets", kind).needs])
def test_a_target_has_its_width_for_any_tokens(kind: str):
    flats = {option.flat: option.name for option in describe("targets", kind).options}
    target = find("targets", kind)(**{flats[name]: value for name, value in SMALL.items() if name in flats})
    batch = batch_of(images(), 4)
    whole, tokens = target(batch), torch.tensor([[5, 0, 23]] * 4)
    assert whole.shape == (4, 24, target.width(batch.layout)) and whole.dtype == torch.float32
    assert whole.isfinite().all() and torch.equal(whole, target(batch))
    expected = whole.gather(1, tokens.unsqueeze(-1).expand(-1, -1, whole.shape[-1]))
    assert_close(target(batch, tokens), expected, rtol=0, atol=1e-6)
    if target.to_pixels is not None and not target.reads_whole:
        assert_close(target.to_pixels(whole, batch), batch.cut(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in of("losses") if not find("losses", kind).reads_classes])
def test_a_loss_is_a_distance(kind: str):
    loss, target = find("losses", kind)(), torch.randn(3, 5, 7)
    assert loss(target, target, None) == 0
    wrong = target.clone()
    wrong[:, 2] += 1.0
    weight = torch.ones(3, 5)
    weight[:, 2] = 0
    assert loss(wrong, target, None) > 0 and loss(wrong, target, weight) == 0
    assert loss(wrong.bfloat16(), target, None).dtype == torch.float32


@pytest.mark.parametrize(("room", "kind"), EVERY)
def test_a_model_with_it_trains_every_weight_and_says_what_it_added(room: str, kind: str):
    model = model_of(room, kind)
    output = output_of(model)
    output.loss.backward()
    assert [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None] == []
    assert output.terms.keys() == {"reconstruction", *(term.kind for term in model.terms)}
    assert room != "terms" or kind in output.terms
    assert output.pred.shape[:2] == (4, 24) and output.loss.isfinite()


@pytest.mark.parametrize("kind", [kind for kind in of("terms") if kinds("terms")])
def test_a_term_counts_by_its_weight(kind: str):
    plan = model_of("terms", kind).plan(images(), keys=sample_keys(0, 0, torch.arange(4)))
    without, with_it, twice = (output_of(model_of("terms", kind, **{kind: weight}), plan) for weight in (0.0, 0.1, 0.2))
    assert kind not in without.terms
    if method_of("terms", kind).outputs.keys() == {"target"}:  # else the decoder's last layer is another without
        assert_close(twice.loss - without.loss, 2 * (with_it.loss - without.loss), rtol=1e-3, atol=1e-5)
    for output, weight in ((with_it, 0.1), (twice, 0.2)):
        assert_close(output.loss, output.terms["reconstruction"] + weight * output.terms[kind])
    assert_close(twice.terms, with_it.terms)


@pytest.mark.parametrize(("room", "kind"), EVERY)
def test_a_model_with_it_comes_back_from_its_file(room: str, kind: str, tmp_path: Path):
    model = model_of(room, kind)
    mae.save(model, tmp_path / "m.safetensors")
    again = load_model(tmp_path / "m.safetensors", merged=False)
    assert again.config == model.config
    assert torch.equal(output_of(again).loss, output_of(model).loss)
    assert torch.equal(again.encode(images()).mean, model.encode(images()).mean)


@pytest.mark.doctor
@pytest.mark.parametrize(("room", "kind"), EVERY)
def test_the_doctor_finds_a_model_with_it_sound(room: str, kind: str):
    model = model_of(room, kind)
    views = 2 if any(term.reads_views for term in model.terms) else 1
    subject = Subject(
        model=model, images=images(2 * views), numbers=torch.arange(64), seed=0, mask_ratio=model.masking.ratio,
        betas=(0.9, 0.95), weight_decay=0.05, views=views,
    )  # fmt: skip
    stops = {finding.name: finding.value for finding in check_model(subject) if finding.level == "stop"}
    assert stops == {}


@pytest.mark.doctor
@pytest.mark.parametrize(("room", "kind"), EVERY)
def test_it_works_beside_several_class_tokens(room: str, kind: str, tmp_path: Path):
    model = model_of(room, kind, cls_tokens=3)
    output = output_of(model)
    output.loss.backward()
    tokens = model.encoder.cls_token
    assert tokens.shape == (1, 3, 24) and output.pred.shape[:2] == (4, 24)
    if tokens.requires_grad:
        assert tokens.grad.abs().amax(dim=-1).min() > 0
    assert_close(model.encode(images()).cls, model.encoder(images()).tokens[:, :3].mean(dim=1), rtol=0, atol=1e-6)
    mae.save(model, tmp_path / "m.safetensors")
    assert torch.equal(load_model(tmp_path / "m.safetensors", merged=False).encoder.cls_token, tokens)
