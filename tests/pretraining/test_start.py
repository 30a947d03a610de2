"""A run that begins with weights: they are all taken, they say what the user does not, and it needs them but once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import official, saved
from torch import Tensor

import mae
from mae.cli import main
from mae.config import RunConfig
from mae.core.method import MethodConfig
from mae.errors import UsageError
from mae.interop.adapt import resized
from mae.masks.inverse_block import InverseBlockMasking
from mae.masks.random import RandomMasking
from mae.models.build import build_model
from mae.models.detector import DetectionHead, build_detector
from mae.models.file import load_with_report, model_metadata, save_model
from mae.models.presets import create_model, model_config
from mae.models.pretrained import PretrainedEncoder
from mae.pretraining.build import fresh_model
from mae.pretraining.checks.doctor import examine_source
from mae.pretraining.estimate.estimate import command_of, plan_pretraining
from mae.pretraining.resolve import RunContext, prepare_run
from mae.recipes import recipe_config
from mae.training.distributed import World
from mae.training.run_folder import find_weights

Run = Callable[..., mae.PretrainResult]
CPU = torch.device("cpu")
DIGITS = MethodConfig().override({
    "img_size": (8, 8), "patch_size": (2, 2), "in_chans": 1, "embed_dim": 24, "depth": 2, "num_heads": 3,
    "mlp_ratio": 2.0, "decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2, "norm_eps": 1e-5,
    "target": "low_pass", "target_cutoff": 0.5, "norm_pix_loss": False, "mean": (0.25,), "std": (0.5,),
})  # fmt: skip
"""No named model is like this one."""


def stored(path: Path, config: MethodConfig = DIGITS, *, alone: bool = False, licence: str | None = None) -> Path:
    torch.manual_seed(7)
    model: Any = build_model(config)
    for tensor in model.state_dict().values():
        tensor.normal_(std=0.1)
    if alone:
        model = PretrainedEncoder(encoder=model.encoder, config=config)
    save_model(model, path, model_metadata(model, licence=licence))
    return path


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return stored(tmp_path / "weights.safetensors", licence="CC-BY-NC-4.0")


def prepared(path: Path, *, given: set[str] | None = None, **options: Any) -> RunContext:
    config = RunConfig.of(source="builtin:digits", init_from=str(path), steps=2, **options)
    given = {"init_from", "source", "steps", *options} if given is None else given
    return prepare_run(config, None, CPU, World(), resume=False, given=given)


def same(path: Path, run: RunContext, *, but: str = "nothing") -> bool:
    """Whether the run begins with the weights of a file, but for tensors whose names begin so, which differ."""
    source, model = mae.load(path).state_dict(), fresh_model(run).state_dict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.config.optim.seed)
        fresh = build_model(run.method).state_dict()
    as_source = {name for name in source.keys() & model.keys() if torch.equal(source[name], model[name])}
    as_fresh = {name for name in model if torch.equal(fresh[name], model[name])}
    expected = {name for name in model if name.startswith(but)}
    fixed = {name for name in model if name.endswith("pos_embed.table")} & as_source & as_fresh
    return as_source - fixed == model.keys() - expected - fixed and as_fresh - fixed == expected - fixed


def test_weights_say_sizes_target_and_statistics(weights: Path):
    run = prepared(weights)
    assert run.method == DIGITS.override({"pixel_dtype": "uint8"}) and same(weights, run)
    assert run.config.data.statistics == "model" and run.statistics()[0].tolist() == [0.25]
    assert run.config.model == "vit_24x2_patch2"


def test_images_on_a_scale_that_the_weights_hardly_know_are_told(weights: Path, tmp_path: Path):
    assert "the model expects" not in prepared(weights).note
    wide = stored(tmp_path / "wide.safetensors", DIGITS.override({"std": (5.0,)}))
    assert "the model expects 0.25 and 5" in prepared(wide).note
    assert "the model expects" not in prepared(wide, statistics="data").note


def test_how_the_weights_were_masked_does_not_matter_for_smaller_images(tmp_path: Path):
    masked = DIGITS.override({"img_size": (16, 16), "mask": "grid", "mask_cell": 4, "pos_embed": "learned"})
    path = stored(tmp_path / "weights.safetensors", masked)
    run = prepared(path, img_size=(8, 8))  # where a cell of the mask would be the whole grid
    assert run.method.layout.grid == (4, 4) and run.method.mask.kind == "random"
    source, own = mae.load(path).state_dict(), fresh_model(run).state_dict()
    other = {name for name in own if name not in source or not torch.equal(own[name], source[name])}
    assert other == {"encoder.pos_embed.table", "decoder.pos_embed.table"}
    table = fresh_model(run).encoder.pos_embed.table
    expected, _ = resized(mae.load(stored(tmp_path / "b.safetensors", masked.override({"mask": "random"}))), (8, 8))
    torch.testing.assert_close(table, expected.encoder.pos_embed.table)


def test_weights_of_very_few_patches_are_masked_as_the_user_says(tmp_path: Path):
    path = stored(tmp_path / "weights.safetensors", DIGITS.override({"img_size": (2, 6), "mask_ratio": 0.5}))
    assert prepared(path, mask_ratio=0.6).method.mask == RandomMasking(ratio=0.6)
    assert prepared(path, img_size=(8, 8)).method.mask == RandomMasking()  # nothing of it is the weights' own
    block = prepared(path, img_size=(8, 8), mask="inverse_block", mask_roll=False).method.mask
    assert block == InverseBlockMasking(roll=False)
    with pytest.raises(UsageError, match=r"mask_ratio 0\.75 on a grid of 1x3 = 3 patches leaves 0 visible"):
        prepared(path)  # as of fresh weights
    few = {"decoder": "cross", "cls_token": False, "img_size": (2, 8), "mask_ratio": 0.5}
    path = stored(tmp_path / "cross.safetensors", DIGITS.override(few))
    assert prepared(path, mask_ratio=0.5).method.decoder.kind == "cross"


def test_a_linear_decoder_goes_on_as_one(tmp_path: Path):
    linear = model_config("mae_vit_lesson_patch4", in_chans=1, depth=1, decoder="linear", encoder_mask_tokens=True)
    for depth in (1, 4):  # with the sizes of a named model too
        config = linear.override({"depth": depth, "mean": (0.25,), "std": (0.5,)})
        path = stored(tmp_path / f"{depth}.safetensors", config)
        run = prepared(path, img_size=(32, 32))
        assert run.method.decoder.kind == "linear" and same(path, run)


@pytest.mark.parametrize(
    ("options", "fresh"),
    [
        ({"norm_pix_loss": True}, "decoder.pred."),
        ({"target": "low_pass", "target_cutoff": 1.0}, "decoder.pred."),
        ({"decoder_depth": 2}, "decoder."),
        ({"decoder": "cross"}, "decoder."),
        ({"mask_ratio": 0.5, "loss": "l1", "uniformity": 0.1, "patch_size": (2, 2)}, "nothing"),
    ],
    ids=["target", "frequencies", "depth", "decoder", "objective"],
)
def test_what_the_user_says_counts(options: dict[str, Any], fresh: str, weights: Path):
    run = prepared(weights, **options)
    flat = run.method.flat()
    assert {name: flat[name] for name in options} == options
    assert same(weights, run, but=fresh)
    said = {"decoder.": "a fresh decoder", "decoder.pred.": "a fresh last layer of the decoder"}.get(fresh)
    assert run.found["start"]["fresh"] == said


def test_of_a_recipe_the_weights_take_no_word(weights: Path):
    asked = RunConfig.of(source="builtin:digits", init_from=str(weights), model="mae_vit_small", norm_pix_loss=True)
    run = prepare_run(asked, None, CPU, World(), resume=False, given={"source", "init_from"})
    assert run.method == DIGITS.override({"pixel_dtype": "uint8"})


FEATURES = {"target": "features", "teacher": "ema"}
CODES = {"target": "codes", "teacher": "codebook", "loss": "cross_entropy"}
TOKENS = {"decoder": "linear", "encoder_mask_tokens": True}


def without_cutoff(**options: Any) -> MethodConfig:
    return DIGITS.override({"target": "pixels", "norm_pix_loss": True}).override(options)


@pytest.mark.parametrize("trained", [FEATURES, CODES], ids=["features", "codes"])
def test_weights_that_learned_of_a_teacher_begin_a_run(trained: dict[str, Any], tmp_path: Path):
    path = stored(tmp_path / "w.safetensors", without_cutoff(**trained))
    run = prepared(path)
    assert run.method == without_cutoff(pixel_dtype="uint8") and same(path, run, but="decoder.pred.")
    again = prepared(path, **trained)
    assert again.method.target.kind == trained["target"] and again.method.teacher.kind == trained["teacher"]
    model, source = fresh_model(again).state_dict(), mae.load(path).state_dict()
    assert torch.equal(model["decoder.pred.weight"], source["decoder.pred.weight"])
    alone = stored(tmp_path / "e.safetensors", without_cutoff(**trained, **TOKENS), alone=True)
    assert same(alone, prepared(alone), but="decoder.") and not prepared(alone).method.encoder.mask_tokens


def test_outputs_of_another_width_get_a_fresh_last_layer(tmp_path: Path):
    path = stored(tmp_path / "w.safetensors", without_cutoff(**FEATURES))
    wide = stored(tmp_path / "wide.safetensors", without_cutoff(embed_dim=48))
    run = prepared(path, target="features", teacher="frozen", teacher_source=str(wide))
    assert fresh_model(run).state_dict()["decoder.pred.weight"].shape == (48, 16)
    assert run.found["start"]["fresh"] == "a fresh last layer of the decoder"


def test_mask_tokens_come_and_go(tmp_path: Path):
    without, having = without_cutoff(), without_cutoff(**TOKENS)
    plain, tokens = stored(tmp_path / "w.safetensors", without), stored(tmp_path / "t.safetensors", having)
    assert same(tokens, prepared(tokens)) and prepared(tokens).method.encoder.mask_tokens
    model = fresh_model(prepared(plain, **TOKENS))
    assert model.encoder.mask_token is not None and model.encoder.mask_token.std() > 0
    gone = prepared(tokens, decoder="self", encoder_mask_tokens=False)
    assert fresh_model(gone).encoder.mask_token is None and same(tokens, gone, but="decoder.")
    with pytest.raises(UsageError, match="an encoder with mask tokens do not fit; give --no-encoder-mask-tokens"):
        prepared(tokens, decoder="self")


@pytest.mark.parametrize(
    ("recipe", "decoder", "loss"), [("second_stage", "self", "smooth_l1"), ("eva", "linear", "cosine")]
)
def test_a_recipe_about_another_target_or_decoder_keeps_it(recipe: str, decoder: str, loss: str, tmp_path: Path):
    path = stored(tmp_path / "w.safetensors", without_cutoff())
    asked = {"source": "builtin:digits", "init_from": str(path), "teacher_source": str(path), "steps": 2}
    run = prepare_run(
        recipe_config(recipe).override(asked), None, CPU, World(), resume=False, given={*asked, "recipe"}
    )  # fmt: skip
    method = run.method
    assert (method.target.kind, method.decoder.kind, method.loss.kind) == ("features", decoder, loss)
    assert method.encoder.mask_tokens is (recipe == "eva")
    model, source = fresh_model(run).state_dict(), mae.load(path).state_dict()
    assert all(torch.equal(model[name], source[name]) for name in source if name.startswith("encoder."))


def test_an_encoder_alone_gets_the_decoder_of_its_size(tmp_path: Path):
    usual = create_model("mae_vit_lesson_patch4").config
    assert usual is not None
    path = stored(tmp_path / "e.safetensors", usual.override({"in_chans": 1}), alone=True)
    run = prepared(path, img_size=(8, 8))
    assert same(path, run, but="decoder.")
    assert run.method.decoder == usual.decoder and usual.decoder.embed_dim == 128
    assert run.config.data.statistics == "data" and run.method.target.norm  # it knew neither
    assert prepared(path, img_size=(8, 8), norm_pix_loss=False).method.target.norm is False


def test_a_detector_tells_what_it_lacks_and_loses_and_is_not_adapted(tmp_path: Path):
    config = DIGITS.override({"depth": 4})
    detector = build_detector(config, DetectionHead(size=8, channels=8), class_names=("seven",), pretrained=None)
    save_model(detector, path := tmp_path / "d.safetensors", model_metadata(detector))
    found = prepared(path).found["start"]
    assert found["loaded"].endswith(", relative positions left out")
    assert found["fresh"] == "a fresh decoder and a fresh last norm of the encoder and a fresh class token"
    with pytest.raises(UsageError, match="have no norm and no cls_token, which would stay untrained; leave"):
        prepared(path, adapter="lora")


def test_learned_positions_are_made_for_another_size(tmp_path: Path):
    path = stored(tmp_path / "w.safetensors", DIGITS.override({"pos_embed": "learned", "target": "pixels"}))
    assert same(path, prepared(path))
    larger = fresh_model(prepared(path, img_size=(12, 16)))
    small, large = mae.load(path).encoder.pos_embed.table, larger.encoder.pos_embed.table
    assert isinstance(small, Tensor) and isinstance(large, Tensor) and large.shape == (48, 24)
    middle = torch.nn.functional.interpolate(
        small.T.reshape(1, 24, 4, 4), size=(6, 8), mode="bicubic", antialias=True
    ).flatten(2)
    torch.testing.assert_close(large, middle[0].T)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "mae_vit_small"}, "--init-from says by itself what model it is; leave it out"),
        (
            {"patch_size": (4, 4)},
            r"--patch-size is \(4, 4\), the weights of --init-from are for \(2, 2\); leave it out",
        ),
        ({"in_chans": 3}, "are for 1; 'mae import --in-chans 3 --stem mean' makes such weights"),
        ({"cls_token": False}, "--cls-token is False"),
        ({"cls_tokens": 4}, "--cls-tokens is 4, the weights of --init-from are for 1"),
        ({"pos_embed": "learned"}, "are for sincos2d"),
        ({"mlp_ratio": 4.0}, "are for 2.0"),
        ({"img_size": (9, 8)}, "not a multiple of the patch size"),
    ],
    ids=["model", "patch", "channels", "token", "tokens", "positions", "MLPs", "size"],
)
def test_what_contradicts_them_is_refused(options: dict[str, Any], says: str, weights: Path):
    with pytest.raises(UsageError, match=says):
        fresh_model(prepared(weights, **options))


def test_statistics_that_nobody_knows_are_refused(tmp_path: Path):
    path = stored(tmp_path / "w.safetensors", DIGITS.override({"mean": None, "std": None}))
    with pytest.raises(UsageError, match="know none; use --statistics data"):
        prepared(path, statistics="model")
    with pytest.raises(UsageError, match="which means those of --init-from"):
        prepare_run(
            RunConfig.of(source="builtin:digits", statistics="model"), None, CPU, World(), resume=False
        )  # fmt: skip


def test_a_run_goes_on_without_them_and_carries_their_licence(weights: Path, pretrain: Run, tiny: dict[str, Any]):
    own = {name: None for name in ("model", "img_size", "patch_size", "mlp_ratio")}
    options = {name: value for name, value in tiny.items() if name not in own}
    out = weights.parent
    whole = mae.pretrain("builtin:digits", init_from=weights, out=out / "whole", **options)
    assert RunConfig.read(whole.folder / "config.json").init_from == str(weights)
    cut = out / "cut"
    shutil.copytree(whole.folder, cut)
    shutil.rmtree(cut / "checkpoints" / "step-00000006")
    weights.rename(out / "elsewhere.safetensors")
    mae.pretrain(out=cut, resume=True, quiet=True)
    first, second = (mae.load(folder).state_dict() for folder in (whole.folder, cut))
    assert all(torch.equal(first[name], second[name]) for name in first)
    origin = load_with_report(find_weights(cut))[1].origin
    assert (origin["licence"], origin["init_from"]) == ("CC-BY-NC-4.0", "weights.safetensors")
    (out / "elsewhere.safetensors").rename(weights)
    again = mae.pretrain(recipe=str(cut / "config.json"), out=out / "again", quiet=True)
    assert all(torch.equal(first[name], tensor) for name, tensor in again.load_model().state_dict().items())


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_with_them_again(
    weights: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    options = {
        name: value for name, value in tiny.items() if name not in ("model", "img_size", "patch_size", "mlp_ratio")
    }
    out = weights.parent / "run"
    monkeypatch.chdir(weights.parent)
    asked = {"init_from": weights.name, "out": out, **options}
    whole = mae.pretrain("builtin:digits", **asked)
    expected = whole.load_model().state_dict()
    shutil.rmtree(out / "checkpoints")
    for name in ("metrics.jsonl", "ended.json"):
        (out / name).unlink()
    mae.pretrain(out=out, resume=True, quiet=True)
    found = mae.load(out).state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    mae.pretrain("builtin:digits", resume=True, **asked)  # the same words name the same weights
    with pytest.raises(UsageError, match="init_from was"):
        mae.pretrain("builtin:digits", resume=True, **{**asked, "init_from": "others.safetensors"})


@pytest.mark.parametrize("with_digest", [True, False])
def test_other_weights_than_it_was_begun_with_are_refused(weights: Path, tiny: dict[str, Any], with_digest: bool):
    own = ("model", "img_size", "patch_size", "mlp_ratio")
    options = {name: value for name, value in tiny.items() if name not in own}
    out = weights.parent / "run"
    mae.pretrain("builtin:digits", init_from=weights, out=out, **options)
    shutil.rmtree(out / "checkpoints")
    for name in ("metrics.jsonl", "ended.json"):
        (out / name).unlink()
    if not with_digest:  # as earlier versions wrote it
        facts = json.loads((out / "data.json").read_text())
        del facts["start"]["digest"]
        (out / "data.json").write_text(json.dumps(facts))
    old = weights.read_bytes()
    message = r"--init-from .*weights.safetensors holds other weights than when the run was begun; put the old ones ba"
    stored(weights, DIGITS.override({"depth": 3}))
    with pytest.raises(UsageError, match=message):
        mae.pretrain(out=out, resume=True, quiet=True)
    model = mae.load(stored(weights))
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)
    save_model(model, weights, model_metadata(model, licence=None))
    if with_digest:
        with pytest.raises(UsageError, match=message):
            mae.pretrain(out=out, resume=True, quiet=True)
    assert not (out / "metrics.jsonl").exists()
    weights.write_bytes(old)
    assert mae.pretrain(out=out, resume=True, quiet=True).finished


def test_weights_of_others_begin_a_run(tmp_path: Path):
    model = create_model("mae_vit_lesson_patch4", img_size=8, patch_size=2, in_chans=1, mean=(0.3,), std=(0.4,))
    path = saved(tmp_path / "theirs.pth", official(PretrainedEncoder(encoder=model.encoder, config=model.config)))
    began = fresh_model(prepared(path)).encoder.state_dict()
    assert all(torch.equal(tensor, began[name]) for name, tensor in model.encoder.state_dict().items())


@pytest.mark.slow
def test_the_command_line_checks_and_plans_with_them(weights: Path, capsys: pytest.CaptureFixture[str]):
    options = {"source": "builtin:digits", "init_from": str(weights), "batch_size": 16, "epochs": 20.0}
    asked = recipe_config("default").override(options)
    run, plan = plan_pretraining(asked, hours=None, given=options)
    command = f"mae pretrain builtin:digits --init-from {weights} --epochs 20 --batch-size 16"
    assert run.method == DIGITS.override({"pixel_dtype": "uint8"}) and plan.command.startswith(command)
    assert "--norm" not in plan.command and "--patch" not in plan.command
    options["norm_pix_loss"] = True
    told = prepare_run(asked.override(options), None, CPU, World(), resume=False, given=options)
    written = command_of(told.config, told.images, CPU, World(), told.start)
    assert written == command.replace(" --epochs", " --norm-pix-loss --epochs")
    learned = examine_source(asked, given={"init_from"})
    assert not learned.fatal
    assert main(["study", "--help"]) == 0 and "init-from" not in capsys.readouterr().out


def test_what_they_are_is_told(weights: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    size = ["--steps", "1", "--batch-size", "16", "--device", "cpu", "--no-doctor", "--held-out", "0"]
    out = weights.parent / "run"
    assert main(["pretrain", "builtin:digits", "--init-from", str(weights), "--out", str(out), *size]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "loaded encoder 29/29 tensors" in told and "licence: CC-BY-NC-4.0" in told
    assert json.loads((out / "data.json").read_text())["start"]["licence"] == "CC-BY-NC-4.0"
    assert main(["pretrain", "builtin:digits", "--init-from", str(weights / "no"), *size]) == 2
    assert "no is not there" in " ".join(capsys.readouterr().err.split())
