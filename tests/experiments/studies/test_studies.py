"""The plans of all studies: what their variants share and where they differ."""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import tyro
from pieces import asked

import mae
from mae import records
from mae.cli import main
from mae.cli.evaluate import Request
from mae.cli.pretrain import parse
from mae.config import RunConfig
from mae.errors import UsageError
from mae.evaluation.common.record import Evaluation
from mae.evaluation.protocols import find_protocol
from mae.experiments.core.commands import commands
from mae.experiments.core.job import EvalSpec, Job
from mae.experiments.core.metrics import RECONSTRUCTION
from mae.experiments.core.plan import FROZEN_FEATURES, Study, StudySetup, differing, with_differences
from mae.experiments.core.readout import preferred_features, read_baselines, read_numbers
from mae.experiments.run import _held_fixed
from mae.experiments.studies import STUDIED, STUDIES, find_study
from mae.experiments.studies.ablate import ABLATIONS, Ablate
from mae.experiments.studies.compare import Compare, parts
from mae.experiments.studies.decoder import Decoder
from mae.experiments.studies.decoder_depth import DecoderDepth
from mae.experiments.studies.features import Features
from mae.experiments.studies.mask_ratio import MaskRatio
from mae.experiments.studies.quality import Quality
from mae.experiments.studies.target import Target
from mae.models.build import build_model
from mae.pretraining.derived import total_steps
from mae.pretraining.resolve import resolve_config
from mae.recipes import recipe_config
from mae.recipes.improved import improved


def setup(recipe: str = STUDIED, **given: Any) -> StudySetup:
    def find(name: str) -> RunConfig:
        return recipe_config(name).override({**given, "source": "builtin:digits"})

    return StudySetup(base=find(recipe), given=frozenset(given), find=find, finetune_epochs=2.0, labelled=5000)


def configs(study: Study) -> dict[str, RunConfig]:
    return {variant.name: config for variant, config in zip(study.variants, study.configs, strict=True)}


def test_every_listed_study_is_found():
    assert list(STUDIES) == [
        "compare", "mask_ratio", "decoder", "decoder_depth", "ablate", "quality", "target", "features"
    ]  # fmt: skip
    for name, entry in STUDIES.items():
        kind = find_study(name)
        assert (kind.__name__, kind.__module__) == (entry.options, f"mae.experiments.studies.{name}")
        unsaid = replace(setup(batch_size=64), finetune_epochs=None)
        plan = kind().study(unsaid) if kind.trains else kind(models=("runs/a",)).study()
        assert plan.name == name and plan.evaluations and plan.metrics
    with pytest.raises(UsageError, match="unknown study 'mask_ration'; did you mean mask_ratio"):
        find_study("mask_ration")


@pytest.mark.parametrize("name, said", [("mask_ratio", "masked? Every option"), ("ablate", "alone. Every option")])
def test_help_begins_with_the_question(name: str, said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["study", name, "--help"])
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["--help"], ["compare", "--help"], ["features", "--help"]])
def test_help_needs_no_pytorch(words: list[str]):
    code = f"""
import sys
from mae.cli import main
try:
    main(["study", *{words!r}])
finally:
    sys.stderr.write(" ".join(sorted({{"torch", "numpy", "scipy", "matplotlib"}} & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "usage: mae study" in done.stdout


@pytest.mark.parametrize("name", STUDIES)
def test_every_evaluation_has_a_number_that_is_shown(name: str):
    kind = find_study(name)
    unsaid = replace(setup(batch_size=64), finetune_epochs=None)
    plan = kind().study(unsaid) if kind.trains else kind(models=("runs/a",)).study()
    numbers = {"reconstruction": {metric.name for metric in RECONSTRUCTION}}
    shown = {metric.name for metric in plan.metrics}
    for spec in plan.evaluations:
        assert shown & {f"{number}{spec.suffix}" for number in numbers.get(spec.protocol, {spec.protocol})}, spec


def test_one_model_under_two_names_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    for models in (("run", "./run"), ("run", str(tmp_path / "run")), ("timm:a", "timm:a")):
        with pytest.raises(UsageError, match=f"the models are {models[0]} .*; expected each one once"):
            Features(models=models)
    Features(models=("run", "elsewhere/run", "timm:run"))


def test_parts_make_up_the_improved_recipe():
    assert list(parts()) == ["curriculum", "laplacian", "uniformity"]
    together = {name: value for options in parts().values() for name, value in options.items()}
    whole = improved().flat()
    assert together == {
        "mask_schedule": "linear", "mask_start": 0.5, "mask_warmup": 5.0, "laplacian": 0.05, "uniformity": 0.01
    }  # fmt: skip
    assert all(whole[name] == value for name, value in together.items())


def test_original_and_improved_differ_in_the_additions_alone():
    study = Compare().study(setup())
    assert differing(configs(study)).keys() == {"mask_schedule", "laplacian", "uniformity"}
    assert replace(configs(study)["improved"], recipe="improved") == replace(improved(), source="builtin:digits")


def test_compare_ablates_one_part_at_a_time():
    found = configs(Compare(ablate=True).study(setup()))
    assert list(found) == ["original", "improved", "curriculum", "laplacian", "uniformity"]
    for name in ("curriculum", "laplacian", "uniformity"):
        pair = {"original": found["original"], name: found[name]}
        assert differing(pair).keys() == {"mask_schedule" if name == "curriculum" else name}


def test_original_has_no_additions_whatever_the_recipe():
    found = configs(Compare().study(setup("improved")))
    assert found["original"].flat()["laplacian"] == 0 and found["original"].optim.mask_schedule == "const"
    assert found["improved"].flat()["laplacian"] == 0.05


def test_given_strength_holds_where_the_part_is_on():
    found = configs(Compare(ablate=True).study(setup(laplacian=0.2, mask_warmup=1.0)))
    assert [config.flat()["laplacian"] for config in found.values()] == [0, 0.2, 0, 0.2, 0]
    assert found["curriculum"].optim.mask_warmup == 1.0


def test_any_recipe_is_a_variant():
    found = configs(Compare(variants=("mae", "cifar10")).study(setup(batch_size=64)))
    assert {config.optim.batch_size for config in found.values()} == {64}
    assert differing(found)["lr"] == {"mae": 1e-3, "cifar10": 2e-3}


def test_equal_variants_are_refused():
    for options, given, says in (
        (Compare(variants=("original", "mae", "improved")), {}, "variants original and mae are the same run"),
        (Compare(ablate=True), {"laplacian": 0.0}, "variants original and laplacian are the same run"),
        (MaskRatio(ratios=(0.75, 0.7500001)), {}, "have the same name"),
    ):
        with pytest.raises(UsageError, match=says):
            with_differences(options.study(setup(**given)))


def test_ablations_change_the_given_run():
    study = Ablate().study(setup("cifar10", batch_size=64, epochs=4.0, warmup_epochs=1.0))
    found = configs(study)
    assert list(found) == ["plain", *ABLATIONS] and found["plain"] == setup("cifar10", batch_size=64, epochs=4.0,
                                                                     warmup_epochs=1.0).base  # fmt: skip
    assert differing({name: found[name] for name in ("plain", "cross-third")}) == {
        "decoder": {"plain": "self", "cross-third": "cross"}, "mask_predicted": {"plain": 1.0, "cross-third": 1 / 3}
    }  # fmt: skip
    changed = {name: config.optim for name, config in found.items()}
    assert changed["batch-half"].batch_size == 32 and changed["rate-up"].lr == 5e-3
    assert changed["muon"].optimizer == "muon"
    assert changed["curriculum"].mask_warmup == 2.0  # half of the run, which is shorter than the default's
    repeated = found["repeated-aug"]
    assert (repeated.data.repeated_aug, repeated.optim.epochs, repeated.optim.warmup_epochs) == (2, 2.0, 0.5)
    assert total_steps(repeated, 50_000) == pytest.approx(total_steps(found["plain"], 50_000), rel=1e-3)
    for name in ABLATIONS:
        assert differing({"plain": found["plain"], name: found[name]}), f"{name} changes nothing"
    with_differences(study)
    assert list(configs(Ablate(ablations=("muon",)).study(setup()))) == ["plain", "muon"]


def test_batch_ablations_keep_the_number_of_images():
    found = configs(Ablate().study(setup(batch_size=64, steps=1000, warmup_epochs=0.0)))
    assert (found["batch-half"].optim.steps, found["batch-double"].optim.steps) == (2000, 500)


def test_what_is_held_fixed():
    assert "the same images in the same order and crops" in _held_fixed(["mask_ratio", "optimizer"])
    text = _held_fixed(["optimizer", "crop_scale", "batch_size"])
    assert "differ with batch size, crop scale" in text and "same images" not in text


def test_ablation_that_scales_nothing_is_refused():
    for name, says in (("batch-half", "give --batch-size"), ("rate-up", "give --lr")):
        with pytest.raises(UsageError, match=says):
            Ablate(ablations=(name,)).study(setup(lr=None))


@pytest.mark.parametrize(
    ("options", "option", "values"),
    [
        (MaskRatio(ratios=(0.25, 0.9)), "mask_ratio", [0.25, 0.9]),
        (DecoderDepth(depths=(1, 3)), "decoder_depth", [1, 3]),
        (Target(), "norm_pix_loss", [True, False]),
    ],
)
def test_varied_option_cannot_be_given(options: Any, option: str, values: list[Any]):
    study = options.study(setup())
    assert list(differing(configs(study))) == [option]
    assert [config.flat()[option] for config in study.configs] == values
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} is what this study varies"):
        options.study(setup(**{option: values[1]}))


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (Compare, {"variants": ("original",)}, "expected two different ones"),
        (Compare, {"variants": ("original", "original")}, "expected two different ones"),
        (MaskRatio, {"ratios": (0.5,)}, "expected two different ones"),
        (MaskRatio, {"ratios": (0.5, 1.0)}, "between 0 and 1"),
        (DecoderDepth, {"depths": (1, 0)}, "each 1 or more"),
        (Ablate, {"ablations": ("mun",)}, "did you mean muon"),
        (Ablate, {"ablations": ("muon", "muon")}, "expected different ones"),
        (Decoder, {"shares": ()}, "expected different ones"),
        (Decoder, {"shares": (0.5, 0.5)}, "expected different ones"),
        (Decoder, {"shares": (0.5, 0.500001)}, "expected different ones"),
        (Decoder, {"shares": (0.0,)}, "each above 0"),
    ],
)
def test_wrong_options_are_refused(kind: Any, options: dict[str, Any], says: str):
    with pytest.raises(UsageError, match=says):
        kind(**options)


def test_decoder_variants():
    study = Decoder(shares=(1.0, 0.25)).study(setup())
    assert [variant.name for variant in study.variants] == ["self", "cross100", "cross25"]
    made = [(config.flat()["decoder"], config.flat()["mask_predicted"]) for config in study.configs]
    assert made == [("self", 1.0), ("cross", 1.0), ("cross", 0.25)]
    for option, value in (("decoder", "cross"), ("mask_predicted", 0.5)):
        with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} is what this study varies"):
            Decoder().study(setup(**{option: value}))


def test_unknown_variant_names_the_nearest():
    with pytest.raises(UsageError, match="unknown recipe 'improvd'; nearest: improved"):
        Compare(variants=("original", "improvd")).study(setup())


@pytest.mark.parametrize("options", [Compare(ablate=True), MaskRatio(), DecoderDepth(), Target()])
def test_variants_start_from_the_same_encoder_weights(options: Any, digits: Any):
    """And with the same decoder, as far as it is the same size."""
    study = options.study(setup(model="mae_vit_lesson_patch4", img_size=8, patch_size=2))
    states = []
    for config in study.configs:
        method = resolve_config(config, digits, torch.device("cpu"), mae_world()).resolved
        torch.manual_seed(3)
        states.append(build_model(method).state_dict())
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items() if name.startswith("encoder"))


def mae_world() -> Any:
    from mae.training.distributed import World

    return World()


@pytest.fixture(scope="module")
def digits() -> Any:
    from mae.data.dataset.images import load_images
    from mae.data.sources.open import open_source

    return load_images(open_source("builtin:digits", data_root=Path("data")), in_chans=None)


def test_masks_of_higher_ratios_contain_those_of_lower():
    model = mae.create_model("mae_vit_lesson_patch4")
    less, more = (model.masking.plan(asked((8, 8), torch.arange(5), ratio)).hidden for ratio in (0.5, 0.75))
    assert bool((more | ~less).all()) and int(more.sum()) > int(less.sum())


@pytest.mark.parametrize(
    "options",
    [
        {"img_size": (32, 48), "norm_pix_loss": False, "betas": (0.9, 0.99), "lr": 0.000123456789},
        {"steps": 7, "base_lr": 1.5e-4, "clip_grad": None, "compile": "on"},
        {"mask_schedule": "cosine", "laplacian": 0.05, "loss": "l1", "max_unreadable": 0.01},
    ],
    ids=str,
)
def test_commands_repeat_the_run(options: dict[str, Any], tmp_path: Path):
    folder, where = tmp_path / "my runs", tmp_path / "my sets"
    config = recipe_config("default").override(
        {"source": "cifar10", "data_root": where, **options, "out": folder, "seed": 2}
    )
    spec = EvalSpec(protocol="knn", options={"ks": [20], "baselines": False})
    job = Job(
        variant="a", seed=2, folder=folder, data="cifar10", data_root=where, device="cpu",
        evaluations=(spec,), config=config.to_json(),
    )  # fmt: skip
    train, evaluate = commands(job, recipe_config("default"))
    assert train.startswith("mae pretrain cifar10 ")
    assert parse(shlex.split(train)[2:])[0] == config
    assert shlex.split(evaluate) == [
        "mae", "evaluate", "knn", str(folder), "--data", "cifar10", "--data-root", str(where), "--ks", "20",
        "--no-baselines", "--seed", "2", "--device", "cpu",
    ]  # fmt: skip


@pytest.mark.parametrize("overlap", ["error", "drop"])
@pytest.mark.parametrize("model", [None, "timm:vit"])
def test_commands_repeat_the_evaluations(overlap: Any, model: str | None, tmp_path: Path):
    specs = MaskRatio().study(setup()).evaluations
    job = Job(
        variant="a", seed=3, folder=tmp_path / "run", data=str(tmp_path), data_root=Path("data"), device="cpu",
        overlap=overlap, evaluations=specs, model=model,
    )  # fmt: skip
    for spec, command in zip(specs, commands(job, None), strict=True):
        protocol = find_protocol(spec.protocol)

        def evaluate(
            request: Annotated[Request, tyro.conf.arg(name="")],
            options: Annotated[protocol, tyro.conf.arg(name="")],  # type: ignore[valid-type]
        ) -> tuple[Request, Any]:
            return request, options

        name, *words = shlex.split(command)[2:]
        request, options = tyro.cli(evaluate, args=words)
        assert name == spec.protocol and options == records.from_json(protocol, spec.options, what="option")
        assert (request.data, request.device, request.seed, request.overlap) == (str(tmp_path), "cpu", 3, overlap)
        assert request.model == (model or str(tmp_path / "run"))


def test_evaluations():
    (*_, finetune) = setup(precision="bf16").evaluations()
    assert finetune.protocol == "finetune"
    assert finetune.options == {
        "epochs": 2.0, "batch_size": 128, "base_lr": 1e-3, "mixing": False, "precision": "bf16"
    }  # fmt: skip
    assert replace(setup(), labelled=60).evaluations()[-1].options["batch_size"] == 60
    assert [spec.protocol for spec in replace(setup(), finetune_epochs=0.0).evaluations()] == [
        "knn", "linear_probe", "reconstruction"
    ]  # fmt: skip


def test_fine_tuning_is_as_long_as_usual_where_nobody_says_and_none_in_quality():
    unsaid = replace(setup(), finetune_epochs=None)
    assert unsaid.evaluations()[-1].options["epochs"] == 5.0
    assert "finetune" in {metric.name for metric in Compare().study(unsaid).metrics}
    for epochs in (None, 0.0):
        assert Quality().study(replace(setup(), finetune_epochs=epochs)).evaluations == FROZEN_FEATURES
    with pytest.raises(UsageError, match="--finetune-epochs is 2, and .* fine-tunes nothing: .*leave it out"):
        Quality().study(setup())


def test_true_statistics_metric_needs_norm_pix_loss():
    assert "psnr_true_statistics" in {metric.name for metric in Compare().study(setup()).metrics}
    assert "psnr_true_statistics" not in {metric.name for metric in Compare().study(setup(norm_pix_loss=False)).metrics}


def test_reconstruction_uses_one_mask_ratio():
    for options in (Compare(), MaskRatio(), DecoderDepth(), Target()):
        found = [s for s in options.study(setup()).evaluations if s.protocol == "reconstruction" and not s.suffix]
        assert [spec.options for spec in found] == [{"mask_ratio": 0.75}]


@pytest.mark.parametrize(
    ("model", "features"),
    [
        ("runs/photos", ("mean",)),
        ("timm:vit_tiny", ("pooled", "cls", "mean")),
        ("hf:facebook/x", ("cls", "pooled", "mean")),
    ],
)
def test_preferred_features(model: str, features: tuple[str, ...]):
    assert preferred_features(model) == features
    found = {"cls": {"top1": 0.1}, "mean": {"top1": 0.2}, "pooled": {"top1": 0.3}}
    record = Evaluation(
        protocol="linear_probe", model=model, weights=None, data={}, options={}, seed=0,
        result={"this model": found, "raw pixels": {"pixels": {"top1": 0.05}}}, chance=0.1, majority=0.1, pictures={},
        verdict=None, classifier=None, near_copies=None, seconds=0.0, hardware={}, versions={}, finished_at="",
    )  # fmt: skip
    assert read_numbers(record) == {"linear_probe": found[features[0]]["top1"]}
    assert read_baselines(record) == {"linear_probe, raw pixels": 0.05, "accuracy, commonest class": 0.1}


def test_knn_of_too_few_images_is_absent():
    record = Evaluation(
        protocol="knn", model="run", weights=None, data={}, options={}, seed=0,
        result={"this model": {"mean": {"20": None}}}, chance=0.1, majority=None, pictures={}, seconds=0.0,
        verdict=None, classifier=None, near_copies=None, hardware={}, versions={}, finished_at="",
    )  # fmt: skip
    assert read_numbers(record) == {}
