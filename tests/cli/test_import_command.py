"""`mae import` as it is typed, and `mae.load` of what others wrote."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from data.pictures import png
from foreign import official, saved
from tiny import images_for, tiny_model

import mae
from mae.cli import main
from mae.errors import UsageError
from mae.interop.imports.convert import WeightMetadata
from mae.interop.imports.open import open_model
from mae.models.file import load_with_report

HEADS = ["--num-heads", "3", "--decoder-num-heads", "2"]
STATISTICS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with official weights, in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    tensors = official(tiny_model(img_size=16))
    saved(tmp_path / "full.pth", {"model": tensors})
    encoder = {name: tensor for name, tensor in tensors.items() if not name.startswith(("decoder", "mask_token"))}
    saved(tmp_path / "encoder.pth", encoder)
    return tmp_path


def test_help_loads_no_pytorch() -> None:
    program = (
        "import sys; from mae.cli import main\n"
        "try: main(['import', '--help'])\n"
        "finally: sys.stderr.write(' '.join({'torch', 'numpy', 'timm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "--norm-pix-loss" in done.stdout and done.stderr == ""


def test_a_whole_model_comes_in_and_is_one_of_ours(typed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["import", "full.pth", "--out", "mine", *HEADS, "--norm-pix-loss", "True", "--no-photo-check"]
    assert main([*words, "--licence", "CC-BY-NC-4.0"]) == 0
    told = capsys.readouterr().out
    assert "loaded encoder 29/29 tensors" in told and "same outputs as timm's" in told
    assert told.endswith("Model in mine\n")
    model, report = load_with_report(typed / "mine" / "model.safetensors")
    expected = tiny_model(img_size=16, **STATISTICS)
    assert model.config == expected.config and report.probe is not None
    assert report.origin["licence"] == "CC-BY-NC-4.0" and report.origin["imported_from"].startswith(
        "full.pth (official"
    )
    images = images_for(expected)
    assert torch.equal(mae.load("mine").encode(images).mean, expected.eval().encode(images).mean)
    assert main(words) == 2 and "exists and is not overwritten; give another name" in capsys.readouterr().err


def test_a_folder_with_something_in_it_is_left_alone(typed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["import", "full.pth", *HEADS, "--norm-pix-loss", "True", "--no-photo-check", "--out"]
    (typed / "run" / "checkpoints").mkdir(parents=True)
    for there in ("run", "full.pth"):
        assert main([*words, there]) == 2
        assert f"{there} exists and is not overwritten; give another name" in capsys.readouterr().err
    assert [path.name for path in (typed / "run").iterdir()] == ["checkpoints"]
    (typed / "empty").mkdir()
    assert main([*words, "empty"]) == 0 and (typed / "empty" / "model.safetensors").exists()


def test_a_model_that_cannot_be_read_again_is_not_left(
    typed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mae.interop.imports.proof.find_spec", lambda name: None)  # timm would see it
    tensors = official(tiny_model(img_size=16))
    tensors["cls_token"] = torch.full((1, 1, 24), 3e38)
    tensors["pos_embed"][:, 0] = 3e38  # their sum is infinite
    saved(typed / "w.pth", {name: t for name, t in tensors.items() if not name.startswith(("decoder", "mask_token"))})
    for out in ("mine", "mine.safetensors"):
        assert main(["import", "w.pth", *HEADS[:2], "--out", out]) == 1
        assert "finite" in capsys.readouterr().err and not (typed / out).exists()


def test_an_encoder_alone_can_be_evaluated_and_not_drawn_with(typed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["import", "encoder.pth", "--out", "encoder.safetensors", *HEADS[:2]]
    statistics = ["--mean", "0.5", "0.5", "0.5", "--std", "0.3", "0.3", "0.3"]
    assert main([*words, *statistics]) == 0
    for number in range(20):
        path = typed / "labelled" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(18, 17, seed=number))
    assert main(["evaluate", "knn", "encoder.safetensors", "--data", "labelled", "--out", "e"]) == 0
    assert "random weights" in capsys.readouterr().out
    assert main(["show", "encoder.safetensors"]) == 0
    shown = capsys.readouterr().out
    assert "decoder" in shown and "none" in shown and "decoder_embed_dim" not in shown
    assert main(["reconstruct", "encoder.safetensors", "labelled/a/0.png", "--out", "p.png"]) == 2
    assert "has no decoder" in capsys.readouterr().err
    features = mae.load("encoder.safetensors").encode(torch.zeros(1, 3, 16, 16))
    assert features.mean.shape == (1, 24)


def test_what_fails_leaves_nothing(typed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "full.pth", "--out", "mine"]) == 2
    assert "give --num-heads" in capsys.readouterr().err
    assert main(["import", "missing.pth", "--out", "mine"]) == 2
    assert "missing.pth is not there" in capsys.readouterr().err
    assert (
        main(["import", "full.pth", "--out", "full.pth/m", *HEADS, "--norm-pix-loss", "True", "--no-photo-check"]) == 1
    )
    assert "cannot be written" in capsys.readouterr().err
    assert sorted(path.name for path in typed.iterdir()) == ["encoder.pth", "full.pth"]


def test_our_own_models_need_no_telling(typed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["import", "full.pth", "--out", "mine", *HEADS, "--norm-pix-loss", "True", "--no-photo-check"])
    assert main(["import", "mine", "--out", "copy.safetensors"]) == 0
    assert "probe reproduced" in capsys.readouterr().out
    for name, tensor in mae.load("mine").state_dict().items():
        assert torch.equal(mae.load("copy.safetensors").state_dict()[name], tensor)
    with pytest.raises(UsageError, match="carries its own metadata"):
        open_model(typed / "mine", metadata=WeightMetadata(num_heads=3))


def test_loading_what_is_not_there_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not there; expected a run folder"):
        mae.load(tmp_path / "nothing")
    with pytest.raises(UsageError, match="holds no weights"):
        mae.load(tmp_path)
