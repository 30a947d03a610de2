"""What the arms of a study share and where they differ."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mae
from mae.cli.pretrain import parse
from mae.config import PretrainConfig
from mae.errors import UsageError
from mae.evaluation.record import Evaluation
from mae.experiments.compare import Compare, parts
from mae.experiments.decoder import Decoder
from mae.experiments.decoder_depth import DecoderDepth
from mae.experiments.job import Job, Judgement, feature_read, read_numbers, read_yardsticks
from mae.experiments.levers import LEVERS, Levers
from mae.experiments.mask_ratio import MaskRatio
from mae.experiments.plan import Bed, Study, commands, differing
from mae.experiments.run import _locked, _told_apart
from mae.experiments.target import Target
from mae.models.zoo import build_model
from mae.pretraining.settle import settle, total_steps
from mae.recipes import recipe_config
from mae.recipes.improved import improved


def bed(recipe: str = "default", **given: Any) -> Bed:
    def find(name: str) -> PretrainConfig:
        return recipe_config(name).override({**given, "source": "builtin:digits"})

    return Bed(base=find(recipe), given=frozenset(given), find=find, finetune_epochs=2.0, labelled=5000)


def configs(study: Study) -> dict[str, PretrainConfig]:
    return {arm.name: config for arm, config in zip(study.arms, study.configs, strict=True)}


def test_the_parts_are_the_whole():
    assert list(parts()) == ["curriculum", "laplacian", "uniformity"]
    together = {name: value for options in parts().values() for name, value in options.items()}
    whole = improved().to_json()
    assert together == {
        "mask_schedule": "linear", "mask_start": 0.5, "mask_warmup": 5.0, "laplacian": 0.05, "uniformity": 0.01
    }  # fmt: skip
    assert all(whole[name] == value for name, value in together.items())


def test_original_and_improved_differ_in_the_three_additions_alone():
    study = Compare().study(bed())
    assert differing(configs(study)).keys() == {"mask_schedule", "laplacian", "uniformity"}
    assert replace(configs(study)["improved"], recipe="improved") == replace(improved(), source="builtin:digits")


def test_an_ablation_turns_on_one_part_at_a_time():
    found = configs(Compare(ablate=True).study(bed()))
    assert list(found) == ["original", "improved", "curriculum", "laplacian", "uniformity"]
    for name in ("curriculum", "laplacian", "uniformity"):
        pair = {"original": found["original"], name: found[name]}
        assert differing(pair).keys() == {"mask_schedule" if name == "curriculum" else name}


def test_the_original_is_plain_whatever_the_recipe():
    found = configs(Compare().study(bed("improved")))
    assert found["original"].laplacian == 0 and found["original"].mask_schedule == "const"
    assert found["improved"].laplacian == 0.05


def test_a_given_strength_holds_where_the_part_is_on():
    found = configs(Compare(ablate=True).study(bed(laplacian=0.2, mask_warmup=1.0)))
    assert [config.laplacian for config in found.values()] == [0, 0.2, 0, 0.2, 0]
    assert found["curriculum"].mask_warmup == 1.0


def test_any_recipe_is_an_arm():
    found = configs(Compare(arms=("default", "cifar10")).study(bed(batch_size=64)))
    assert {config.batch_size for config in found.values()} == {64}
    assert differing(found)["lr"] == {"default": 1e-3, "cifar10": 2e-3}


def test_arms_that_are_the_same_run_are_refused():
    for options, given, says in (
        (Compare(arms=("original", "default", "improved")), {}, "arms original and default are the same run"),
        (Compare(ablate=True), {"laplacian": 0.0}, "arms original and laplacian are the same run"),
        (MaskRatio(ratios=(0.75, 0.7500001)), {}, "have the same name"),
    ):
        with pytest.raises(UsageError, match=says):
            _told_apart(options.study(bed(**given)))


def test_each_lever_changes_the_run_that_was_asked_for():
    study = Levers().study(bed("cifar10", batch_size=64, epochs=4.0, warmup_epochs=1.0))
    found = configs(study)
    assert list(found) == ["plain", *LEVERS] and found["plain"] == bed("cifar10", batch_size=64, epochs=4.0,
                                                                     warmup_epochs=1.0).base  # fmt: skip
    assert differing({name: found[name] for name in ("plain", "cross-third")}) == {
        "decoder": {"plain": "self", "cross-third": "cross"}, "predict_share": {"plain": 1.0, "cross-third": 1 / 3}
    }  # fmt: skip
    assert found["batch-half"].batch_size == 32 and found["rate-up"].lr == 5e-3 and found["muon"].optimizer == "muon"
    assert found["curriculum"].mask_warmup == 2.0  # half of the run, which is shorter than the default's
    views = found["views"]
    assert (views.views, views.epochs, views.warmup_epochs) == (2, 2.0, 0.5)
    assert total_steps(views, 50_000) == pytest.approx(total_steps(found["plain"], 50_000), rel=1e-3)
    for name in LEVERS:
        assert differing({"plain": found["plain"], name: found[name]}), f"{name} changes nothing"
    _told_apart(study)
    assert list(configs(Levers(levers=("muon",)).study(bed()))) == ["plain", "muon"]


def test_batches_of_another_size_are_as_many_images_in_all():
    found = configs(Levers().study(bed(batch_size=64, steps=1000, warmup_epochs=0.0)))
    assert (found["batch-half"].steps, found["batch-double"].steps) == (2000, 500)


def test_what_arms_are_shown_is_told_as_it_is():
    assert "the same images in the same order and crops" in _locked(["mask_ratio", "optimizer"])
    told = _locked(["optimizer", "crop_scale", "batch_size"])
    assert "differs with batch size, crop scale" in told and "same images" not in told


def test_a_lever_that_multiplies_nothing_is_refused():
    for name, says in (("batch-half", "give --batch-size"), ("rate-up", "give --lr")):
        with pytest.raises(UsageError, match=says):
            Levers(levers=(name,)).study(bed(lr=None))


@pytest.mark.parametrize(
    ("options", "option", "values"),
    [
        (MaskRatio(ratios=(0.25, 0.9)), "mask_ratio", [0.25, 0.9]),
        (DecoderDepth(depths=(1, 3)), "decoder_depth", [1, 3]),
        (Target(), "norm_pix_loss", [True, False]),
    ],
)
def test_what_a_study_varies_cannot_be_given(options: Any, option: str, values: list[Any]):
    study = options.study(bed())
    assert list(differing(configs(study))) == [option]
    assert [getattr(config, option) for config in study.configs] == values
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} is what this study varies"):
        options.study(bed(**{option: values[1]}))


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (Compare, {"arms": ("original",)}, "expected two different ones"),
        (Compare, {"arms": ("original", "original")}, "expected two different ones"),
        (MaskRatio, {"ratios": (0.5,)}, "expected two different ones"),
        (MaskRatio, {"ratios": (0.5, 1.0)}, "between 0 and 1"),
        (DecoderDepth, {"depths": (1, 0)}, "each 1 or more"),
        (Levers, {"levers": ("mun",)}, "did you mean muon"),
        (Levers, {"levers": ("muon", "muon")}, "expected different ones"),
        (Decoder, {"shares": ()}, "expected different ones"),
        (Decoder, {"shares": (0.5, 0.5)}, "expected different ones"),
        (Decoder, {"shares": (0.5, 0.500001)}, "expected different ones"),
        (Decoder, {"shares": (0.0,)}, "each above 0"),
    ],
)
def test_arms_that_cannot_be_are_refused(kind: Any, options: dict[str, Any], says: str):
    with pytest.raises(UsageError, match=says):
        kind(**options)


def test_decoders_differ_in_kind_and_share():
    study = Decoder(shares=(1.0, 0.25)).study(bed())
    assert [arm.name for arm in study.arms] == ["self", "cross100", "cross25"]
    made = [(config.decoder, config.predict_share) for config in study.configs]
    assert made == [("self", 1.0), ("cross", 1.0), ("cross", 0.25)]
    for option, value in (("decoder", "cross"), ("predict_share", 0.5)):
        with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} is what this study varies"):
            Decoder().study(bed(**{option: value}))


def test_an_unknown_arm_names_the_nearest():
    with pytest.raises(UsageError, match="unknown recipe 'improvd'; nearest: improved"):
        Compare(arms=("original", "improvd")).study(bed())


@pytest.mark.parametrize("options", [Compare(ablate=True), MaskRatio(), DecoderDepth(), Target()])
def test_all_arms_begin_with_the_same_encoder(options: Any, digits: Any):
    """And with the same decoder, as far as it is the same size."""
    study = options.study(bed(model="mae_vit_lesson_patch4", img_size=8, patch_size=2))
    states = []
    for config in study.configs:
        _, model_config = settle(config, digits, torch.device("cpu"), mae_world())
        torch.manual_seed(3)
        states.append(build_model(model_config).state_dict())
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items() if name.startswith("encoder"))


def mae_world() -> Any:
    from mae.training.distributed import World

    return World()


@pytest.fixture(scope="module")
def digits() -> Any:
    from mae.data.images import load_images
    from mae.data.sources import open_source

    return load_images(open_source("builtin:digits", data_root=Path("data")), in_chans=None)


def test_the_masks_of_arms_that_hide_more_hold_those_that_hide_less():
    model = mae.create_model("mae_vit_lesson_patch4")
    keys = torch.arange(5)
    less, more = (model.masking.plan((8, 8), keys, ratio).hidden for ratio in (0.5, 0.75))
    assert bool((more | ~less).all()) and int(more.sum()) > int(less.sum())


@pytest.mark.parametrize(
    "options",
    [
        {"img_size": (32, 48), "norm_pix_loss": False, "betas": (0.9, 0.99), "lr": 0.000123456789},
        {"steps": 7, "base_lr": 1.5e-4, "clip_grad": None, "compile": True},
        {"mask_schedule": "cosine", "laplacian": 0.05, "loss": "l1", "max_unreadable": 0.01},
    ],
    ids=str,
)
def test_the_commands_shown_mean_the_same_run(options: dict[str, Any], tmp_path: Path):
    folder, where = tmp_path / "my runs", tmp_path / "my sets"
    config = recipe_config("default").override(
        {"source": "cifar10", "data_root": where, **options, "out": folder, "seed": 2}
    )
    judgement = Judgement(protocol="knn", options={"ks": [20], "comparators": False})
    job = Job(
        arm="a", seed=2, folder=folder, data="cifar10", data_root=where, device="cpu",
        judgements=(judgement,), config=config.to_json(),
    )  # fmt: skip
    train, judge = commands(job, recipe_config("default"))
    assert train.startswith("mae pretrain cifar10 ")
    assert parse(shlex.split(train)[2:])[0] == config
    assert shlex.split(judge) == [
        "mae", "evaluate", "knn", str(folder), "--data", "cifar10", "--data-root", str(where), "--ks", "20",
        "--no-comparators", "--seed", "2", "--device", "cpu",
    ]  # fmt: skip


def test_a_short_fine_tuning_mixes_nothing():
    (*_, finetune) = bed(precision="bf16").judgements()
    assert finetune.protocol == "finetune"
    assert finetune.options == {
        "epochs": 2.0, "batch_size": 128, "base_lr": 1e-3, "mixing": False, "precision": "bf16"
    }  # fmt: skip
    assert replace(bed(), labelled=60).judgements()[-1].options["batch_size"] == 60
    assert [judgement.protocol for judgement in replace(bed(), finetune_epochs=0.0).judgements()] == [
        "knn", "linear_probe", "reconstruction"
    ]  # fmt: skip


def test_plain_pixels_need_not_be_told_statistics():
    assert "psnr_told" in {metric.name for metric in Compare().study(bed()).metrics}
    assert "psnr_told" not in {metric.name for metric in Compare().study(bed(norm_pix_loss=False)).metrics}


def test_every_arm_is_judged_under_the_same_masks():
    for options in (Compare(), MaskRatio(), DecoderDepth(), Target()):
        judged = [j for j in options.study(bed()).judgements if j.protocol == "reconstruction" and not j.suffix]
        assert [judgement.options for judgement in judged] == [{"mask_ratio": 0.75}]


@pytest.mark.parametrize(
    ("model", "features"),
    [
        ("runs/photos", ("mean",)),
        ("timm:vit_tiny", ("pooled", "cls", "mean")),
        ("hf:facebook/x", ("cls", "pooled", "mean")),
    ],
)
def test_another_models_own_feature_is_read(model: str, features: tuple[str, ...]):
    assert feature_read(model) == features
    found = {"cls": {"top1": 0.1}, "mean": {"top1": 0.2}, "pooled": {"top1": 0.3}}
    record = Evaluation(
        protocol="linear_probe", model=model, weights=None, data={}, constants={}, seed=0,
        result={"this model": found, "raw pixels": {"pixels": {"top1": 0.05}}}, chance=0.1, majority=0.1, pictures={},
        near_copies=None, seconds=0.0, hardware={}, versions={}, finished_at="",
    )  # fmt: skip
    assert read_numbers(record) == {"linear_probe": found[features[0]]["top1"]}
    assert read_yardsticks(record) == {"linear_probe, raw pixels": 0.05, "accuracy, commonest class": 0.1}


def test_k_nn_of_too_few_images_is_not_measured():
    record = Evaluation(
        protocol="knn", model="run", weights=None, data={}, constants={}, seed=0,
        result={"this model": {"mean": {"20": None}}}, chance=0.1, majority=None, pictures={}, seconds=0.0,
        near_copies=None, hardware={}, versions={}, finished_at="",
    )  # fmt: skip
    assert read_numbers(record) == {}
