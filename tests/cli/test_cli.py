import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mae.cli import COMMANDS, main
from mae.cli.pretrain import parse
from mae.config import RunConfig, as_flags
from mae.core.describe import describe
from mae.core.kinds import ROOMS, kinds
from mae.errors import UsageError
from mae.version import __version__


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]):
    assert main([]) == main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


@pytest.mark.parametrize("columns", ["1", "5", "30"])
def test_help_in_a_narrow_terminal(columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as ended:
        main(["list", "--help"])
    assert ended.value.code == 0 and "what can be named" in capsys.readouterr().out


def test_lists_without_docstrings():
    """As `python -OO` and `PYTHONOPTIMIZE=2` have it."""
    words = [sys.executable, "-OO", "-m", "mae", "list", "models"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=100).stdout
    assert "mae_vit_base_patch16_dec512d8b" in listed


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mae {__version__}\n"


def test_unknown_command(capsys: pytest.CaptureFixture[str]):
    assert main(["pretain"]) == 2
    assert "unknown command 'pretain'" in capsys.readouterr().err


def test_a_name_in_an_error_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]):
    name = "photos\x1b[2J\x9b1m\r\u202e\udcff\nmae: error: forged"
    assert main(["pretrain", name]) == 2
    told = capsys.readouterr().err
    assert not set("\x1b\x9b\r\u202e\udcff") & set(told)
    assert told.startswith("mae: error: photos\ufffd[2J") and "mae: error: forged" in told
    assert told.index("\n") == len(told) - 1


@pytest.mark.parametrize(("words", "named"), [(["x", "--out", "runs/b\udcff"], "runs/b"), (["b\udcff"], "b")])
def test_bytes_that_are_no_text_are_refused_before_anything_is_written(words, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", *words]) == 2
    assert f"{named}\ufffd: an argument holds bytes that are not text here" in capsys.readouterr().err
    for name in ("source", "out", "data_root", "monitor", "init_from", "recipe"):
        with pytest.raises(UsageError, match="holds bytes that are not text here; expected UTF-8"):
            RunConfig.of(**{name: "b\udcff"})
    assert not list(tmp_path.iterdir())


def test_names_are_read_and_shown_where_everything_is_ascii(tmp_path):
    """In a locale without UTF-8 names of files are not text, and a terminal cannot show every sign."""
    (tmp_path / "photos").mkdir()
    for number in range(20):
        Image.new("RGB", (8, 8), (number, 0, 9)).save(tmp_path / f"photos/\u00fc\u732b{number}.png")
    code = """
import sys
from mae.cli import main
from mae.data.dataset.reading import ImageReader
from mae.data.sources.open import open_source
from pathlib import Path
source = open_source("photos", data_root=Path("."))
assert [ImageReader(source=source).load(number).shape for number in range(20)] == [(8, 8, 3)] * 20
sys.exit(main(["neighbours", source.item_name(0), "photos", "--out", "x.png"]))
"""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | plain, capture_output=True, text=True
    )
    assert found.returncode == 2 and "Traceback" not in found.stderr and "PYTHONUTF8=1" in found.stderr


def test_flags_reach_the_configuration():
    args = (
        "photos --model mae_vit_small --img-size 96x128 --patch-size 4x8 --in-chans 1 --mask-ratio 0.5 --steps 7 "
        "--batch-size 32 --lr 1e-3 --weight-decay 0.1 --warmup-epochs 2 --clip-grad 2 --precision fp32 --compile on "
        "--workers 3 --seed 4 --out there --no-norm-pix-loss --no-cls-token --pos-embed learned"
    )
    config, given, resume, gpus = parse(args.split())
    assert not resume and gpus is None
    assert (config.source, config.model, config.machine.out) == ("photos", "mae_vit_small", Path("there"))
    assert config.method == {
        "img_size": (96, 128), "patch_size": (4, 8), "in_chans": 1, "mask_ratio": 0.5, "norm_pix_loss": False,
        "cls_token": False, "pos_embed": "learned",
    }  # fmt: skip
    optim, machine = config.optim, config.machine
    assert (optim.steps, optim.batch_size, optim.lr, optim.base_lr) == (7, 32, 1e-3, None)
    assert (optim.weight_decay, optim.warmup_epochs, optim.clip_grad) == (0.1, 2, 2)
    assert (optim.precision, optim.seed, machine.compile, machine.workers) == ("fp32", 4, "on", 3)
    assert {"source", "model", "img_size", "lr", "norm_pix_loss", "seed"} <= given
    assert "base_lr" not in given and "epochs" not in given


def test_a_recipe_gives_the_defaults_and_flags_go_over_it():
    config, given, _, _ = parse(["--recipe", "imagenet_base", "imagenet", "--epochs", "5"])
    assert (config.optim.batch_size, config.optim.epochs, config.recipe) == (4096, 5, "imagenet_base")
    config, _, _, _ = parse(["imagenet", "--recipe=imagenet_base", "--steps", "5"])
    assert (config.optim.steps, config.optim.epochs) == (5, None)
    assert given == {"recipe", "epochs"}  # the source is the one the recipe names


def test_of_a_recipe_or_kind_that_is_given_twice_the_last_counts():
    twice = ["photos", "--recipe", "improved", "--recipe=mae"]
    assert parse(twice)[0] == parse(["photos", "--recipe=mae"])[0]
    words = ["photos", "--mask", "grid", "--mask", "block", "--mask-min-patches", "4"]
    flat = parse(words)[0].flat()
    assert (flat["mask"], flat["mask_min_patches"]) == ("block", 4)


def test_the_options_of_a_chosen_kind_are_offered(capsys: pytest.CaptureFixture[str]):
    words = (
        "photos --target low_pass --target-cutoff 0.25 --focal-frequency 0.5 --focal-frequency-alpha 2 --betas 0.9 0.99"
    )
    config, given, _, _ = parse(words.split())
    assert config.method == {
        "target": "low_pass", "target_cutoff": 0.25, "focal_frequency": 0.5, "focal_frequency_alpha": 2.0
    }  # fmt: skip
    assert config.optim.betas == (0.9, 0.99) and "target_cutoff" in given
    config, _, _, _ = parse(["photos", "--decoder", "linear", "--encoder-mask-tokens"])
    assert config.method == {"decoder": "linear", "encoder_mask_tokens": True}
    with pytest.raises(UsageError, match="--target-cutoff is an option of target low_pass; give --target low_pass too"):
        parse(["photos", "--target-cutoff", "0.25"])
    with pytest.raises(SystemExit):
        parse(["--loss", "smooth_l1", "--help"])
    shown = capsys.readouterr().out
    assert "--loss-beta" in shown and "--target-cutoff" not in shown


@pytest.mark.parametrize("command", ["pretrain", "plan", "doctor"])
def test_help_says_what_a_value_is(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert not re.search(r"\b(STR|INT|FLOAT|PATH)\b|\{None\}", shown)
    assert "--mask-ratio FRACTION" in shown and "--crop-scale MIN MAX" in shown and "(default: 0.001)" in shown


@pytest.mark.parametrize("command", ["demo", "embed", "neighbours"])
def test_help_tells_a_default_once(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(re.findall(r"[^\s│]+", capsys.readouterr().out))
    assert "(default: " in shown and not re.search(r"\(default: (None)?\)|\(default: [^)]*\)\. \(default: ", shown)


def test_none_is_typed_as_such():
    assert parse(["photos", "--clip-grad", "None"])[0].optim.clip_grad is None
    assert parse(["photos", "--recipe", "imagenet_base", "--clip-grad", "2"])[0].optim.clip_grad == 2


def test_names_of_channels_as_they_are_told():
    words = ["photos", *as_flags("channels", ("B02", "B08")), *as_flags("rgb", ("B08", "B04", "B03"))]
    config = parse(words)[0]
    assert (config.method["channels"], config.machine.rgb) == (("B02", "B08"), ("B08", "B04", "B03"))
    assert words[2:] == ["B02,B08", "--rgb", "B08", "B04", "B03"]


def test_both_rates_are_refused():
    with pytest.raises(UsageError, match="both --lr and --base-lr"):
        parse(["photos", "--lr", "1", "--base-lr", "1"])


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("pretrain x --img-size 96y96", "--img-size"),
        ("pretrain --mask-ration 0.5", "--mask-ratio"),
        ("list things", "things"),
        ("evaluate knn", "--data"),
    ],
)
def test_wrong_words_exit_with_2(args: str, named: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(args.split())
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_lists(capsys: pytest.CaptureFixture[str]):
    assert main(["list", "models"]) == 0
    shown = capsys.readouterr().out
    assert "mae_vit_huge_patch14_dec512d8b" in shown and "short for mae_vit_small_patch16" in shown
    assert main(["list", "recipes"]) == 0
    assert "imagenet_large" in capsys.readouterr().out


@pytest.mark.parametrize("room", ROOMS)
def test_the_kinds_of_every_component_are_listed(room: str, capsys: pytest.CaptureFixture[str]):
    assert main(["list", room]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == (kinds(room) or ["none"])
    assert all(describe(room, kind).summary in line for kind, line in zip(kinds(room), shown, strict=False))


def test_a_component_is_shown_with_its_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["show", "mask", "block"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "mask block: Blocks of patches, drawn until enough are masked" in shown
    assert "--mask-ratio 0 < FRACTION < 1 0.4 Fraction of the patches masked." in shown
    assert main(["show", "tokenizer", "image"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--img-size SIDE|HxW 224x224 Height" in shown and "--nodata VALUE None" in shown and "--mean" not in shown
    assert main(["show", "decoder", "cross"]) == 0
    assert "--pos-embed {sincos2d,learned} sincos2d" in " ".join(capsys.readouterr().out.split())
    assert main(["show", "loss", "mse"]) == 0
    assert "It has no options." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ("show mask", "no kind of mask is named; give one of 'mae list masks'"),
        ("show mask blok", "unknown mask 'blok'; did you mean block or multi_block?"),
        ("show masks block", "unknown component 'masks'; expected one of tokenizer, encoder, mask"),
        ("show mask block --in-chans 3", "--in-chans is for a model"),
        ("list masks block", "block is one name too many; 'mae list masks' shows all ('mae show mask block' tells"),
    ],
)
def test_what_cannot_be_shown_is_told(args: str, told: str, capsys: pytest.CaptureFixture[str]):
    assert main(args.split()) == 2
    assert told in capsys.readouterr().err


def test_show(capsys: pytest.CaptureFixture[str]):
    assert main(["show", "mae_vit_lesson_patch4", "--img-size", "64"]) == 0
    shown = capsys.readouterr().out
    assert "16x16" in shown and "GFLOP" in shown and re.search(r"mask_ratio +0.75\b", shown)
    assert main(["show", "mae_vit_giant"]) == 2
    assert "unknown model 'mae_vit_giant'; nearest: " in capsys.readouterr().err
