"""`mae reconstruct` as it is typed."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data.pictures import noise, png
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from mae.cli import main
from mae.models.file import model_metadata
from mae.models.presets import create_model
from mae.records import to_json
from mae.training import checkpoint

SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1, "decoder_embed_dim": 16, "decoder_depth": 1}


def write_model(path: Path, *, seed: int = 0, **options) -> None:
    torch.manual_seed(seed)
    model = create_model("mae_vit_lesson_patch4", **{**SIZES, "mean": (0.5,) * 3, "std": (0.3,) * 3, **options})
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), path, model_metadata(model))


def write_run(folder: Path, steps: list[int]) -> None:
    """The checkpoints of a run, each with other weights."""
    for step in steps:
        path = folder / "checkpoints" / f"step-{step:08d}"
        write_model(path / checkpoint.MODEL, seed=step)
        save_file({"none": torch.zeros(1)}, path / checkpoint.OPTIMIZER)
        (path / checkpoint.STATE).write_text("{}")
        files = {n: checkpoint._describe(path / n) for n in (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.STATE)}
        manifest = checkpoint.Manifest(step=step, kept=False, files=files)
        (path / checkpoint.MANIFEST).write_text(json.dumps(to_json(manifest)))


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a run, images and masks, in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model.safetensors")
    write_model(tmp_path / "bare.safetensors", mean=None, std=None)
    weights = {name: t for name, t in load_file("model.safetensors").items() if name.startswith("encoder.")}
    model = create_model("mae_vit_lesson_patch4", **SIZES, mean=(0.5,) * 3, std=(0.3,) * 3)
    save_file(weights, tmp_path / "encoder.safetensors", model_metadata(model))
    write_run(tmp_path / "run", [100, 20, 3])
    write_run(tmp_path / "short", [7])
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(16, 16, seed=number))
    mask = np.zeros((16, 16), dtype=np.uint8)
    mask[1:6, 5:7] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    Image.fromarray(np.full((16, 16), 100, dtype=np.uint8)).save(tmp_path / "grey.png")
    Image.fromarray(mask[:9]).save(tmp_path / "cut.png")
    return tmp_path


def code_of(words: str) -> int:
    """Exit code, also where the parser stops the program itself."""
    try:
        return main(words.split())
    except SystemExit as stopped:
        return int(stopped.code or 0)


def pixels(path: str) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_help_needs_no_pytorch():
    program = (
        "import sys; from mae.cli import main\n"
        "try: main(['reconstruct', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.stderr.write(' '.join(sorted({'torch', 'numpy', 'PIL', 'matplotlib'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert all(word in done.stdout for word in ("mae reconstruct", "--mask-ratio", "--inpaint", "--animation"))


def test_one_sheet_that_is_named(typed, capsys):
    assert code_of("reconstruct model.safetensors 0.png 1.png --device cpu") == 0
    loaded, look = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"loaded encoder (\d+)/\1 tensors \(.*\), decoder (\d+)/\2 \(.*\), probe not .*", loaded)
    assert look == "Look at reconstruction.png"
    first = pixels("reconstruction.png")
    assert first.shape[0] > 2 * 192 and first.shape[1] > 5 * 192
    assert code_of("reconstruct model.safetensors 0.png 1.png --device cpu --out b/again.png") == 0
    assert np.array_equal(pixels("b/again.png"), first)
    assert code_of("reconstruct model.safetensors 0.png 1.png --device cpu --seed 1 --out c.png") == 0
    assert not np.array_equal(pixels("c.png"), first)


def test_a_run_and_a_checkpoint_of_it_are_the_same_model(typed):
    assert code_of("reconstruct run 0.png --out a.png --device cpu") == 0
    assert code_of("reconstruct run/checkpoints/step-00000100 0.png --out b.png --device cpu") == 0
    assert code_of("reconstruct run/checkpoints/step-00000020 0.png --out c.png --device cpu") == 0
    inside = np.s_[120:300]  # the title names the model
    assert np.array_equal(pixels("a.png")[inside], pixels("b.png")[inside])
    assert not np.array_equal(pixels("a.png")[inside], pixels("c.png")[inside])


def column(sheet: np.ndarray, number: int) -> np.ndarray:
    """The pictures of a column of a sheet of 16-pixel images, one row, without its words."""
    left = 24 + number * (208 + 12)
    found = sheet[:, left : left + 208]
    return found[130:340]


def test_hidden_pixels_in_the_file_change_the_leaky_column_alone(typed):
    from mae.evaluation.pictures.reconstruct import reconstruct

    hidden = reconstruct("model.safetensors", "0.png", device="cpu").hidden[0].numpy()
    other = noise(16, 16, seed=0)
    other[hidden] = 255 - other[hidden] // 2
    Image.fromarray(other).save("other.png")
    for name in ("0", "other"):
        assert code_of(f"reconstruct model.safetensors {name}.png --out s-{name}.png --device cpu") == 0
    first, second = pixels("s-0.png"), pixels("s-other.png")
    same = [np.array_equal(column(first, number), column(second, number)) for number in range(6)]
    # input, masked, reconstruction, full reconstruction, error, leaky reconstruction
    assert same == [False, True, True, True, False, False]


def test_several_ratios_a_row_each(typed):
    assert code_of("reconstruct model.safetensors 0.png --mask-ratio 0.25 0.5 0.75 --out a.png --device cpu") == 0
    assert code_of("reconstruct model.safetensors 0.png --mask-ratio 0.5 --out b.png --device cpu") == 0
    assert pixels("a.png").shape[0] > pixels("b.png").shape[0] + 2 * 208


def test_inpainting_names_both_files(typed, capsys):
    assert code_of("reconstruct model.safetensors 0.png --mask mask.png --inpaint --out o.png --device cpu") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["Look at o.png", "Look at o-filled.png"]
    hole = pixels("mask.png")[..., 0] > 127
    assert np.array_equal(pixels("o-filled.png")[~hole], pixels("0.png")[~hole])
    assert code_of("reconstruct model.safetensors 0.png 1.png --mask mask.png --inpaint --out p.png --device cpu") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1:] == ["Look at p.png", "Look at p-filled-1.png", "Look at p-filled-2.png"]
    assert np.array_equal(pixels("p-filled-1.png"), pixels("o-filled.png"))


def test_an_animation_has_a_frame_a_checkpoint_in_order_of_steps(typed, capsys, monkeypatch):
    titles, masked = [], []
    from mae.report.figures import panels

    original = panels.write_sheet

    def watched(columns, **told):
        titles.append(told["title"])
        masked.append(columns[1].pictures)
        return original(columns, **told)

    monkeypatch.setattr(panels, "write_sheet", watched)
    assert code_of("reconstruct run 0.png 1.png --animation --mask-ratio 0.5 --device cpu") == 0
    told = "3 checkpoints, 3 frames; --checkpoint-keep-every of 'mae pretrain' keeps more\n"
    assert capsys.readouterr().out == f"{told}Look at reconstruction.gif\n"
    assert titles == ["Step 3 of 100", "Step 20 of 100", "Step 100 of 100"]
    assert all(torch.equal(each, masked[0]) for each in masked)
    with Image.open("reconstruction.gif") as image:
        assert image.n_frames == 3
    assert code_of("reconstruct run 0.png --animation --mask mask.png --out m.gif --device cpu") == 0


def test_a_damaged_checkpoint_is_no_frame(typed):
    (typed / "run/checkpoints/step-00000020/model.safetensors").write_bytes(b"\0")
    assert code_of("reconstruct run 0.png --animation --device cpu") == 0
    with Image.open("reconstruction.gif") as image:
        assert image.n_frames == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("reconstruct nowhere 0.png", 2, "nowhere is not there; expected a run folder"),
        ("reconstruct model.safetensors", 2, "no image is given"),
        ("reconstruct model.safetensors none.png --device cpu", 2, "none.png is not there; expected an image file"),
        ("reconstruct model.safetensors broken.png --device cpu", 1, "broken.png starts with"),
        ("reconstruct model.safetensors bands.tif --device cpu", 2, "has 5 channels; the model expects 3"),
        ("reconstruct model.safetensors 0.png --out o.jpg", 2, "--out is o.jpg; expected a name that ends in .png"),
        ("reconstruct run 0.png --animation --out o.png", 2, "expected a name that ends in .gif"),
        ("reconstruct model.safetensors 0.png --out 0.png", 2, "0.png exists and is not overwritten"),
        ("reconstruct model.safetensors 0.png --mask-ratio 1.5 --device cpu", 2, "mask_ratio is 1.5"),
        ("reconstruct model.safetensors 0.png --mask-ratio nan --device cpu", 2, "mask_ratio is nan"),
        ("reconstruct model.safetensors 0.png --mask-ratio 0.5 --mask mask.png", 2, "give one of them"),
        ("reconstruct model.safetensors 0.png --inpaint", 2, "--inpaint needs --mask"),
        ("reconstruct model.safetensors 0.png --mask grey.png --device cpu", 2, "expected a black and white picture"),
        ("reconstruct model.safetensors 0.png --mask cut.png --device cpu", 2, "the mask has 16 x 9 pixels"),
        ("reconstruct model.safetensors 0.png --seed -1", 2, "--seed is -1"),
        ("reconstruct encoder.safetensors 0.png --device cpu", 2, "holds an encoder only"),
        ("reconstruct bare.safetensors 0.png --device cpu", 2, "no channel statistics"),
        ("reconstruct timm:vit_tiny_patch16_224 0.png", 2, "timm:vit_tiny_patch16_224 has no decoder"),
        ("reconstruct hf:some/model 0.png", 2, "hf:some/model has no decoder"),
        ("reconstruct short 0.png --animation", 2, "short has 1 checkpoint; an animation needs two or more: pre-train"),
        ("reconstruct short 0.png --animation", 2, "--checkpoint-keep-every"),
        ("reconstruct model.safetensors 0.png --animation", 2, "model.safetensors is no run folder"),
        ("reconstruct run 0.png --animation --inpaint --mask mask.png", 2, "leave out --inpaint"),
        ("reconstruct run 0.png --animation --mask-ratio 0.5 0.7", 2, "give one --mask-ratio"),
    ],
)
def test_mistakes_are_one_line_a_code_and_no_file(typed, capsys, words, code, said):
    import tifffile

    tifffile.imwrite("bands.tif", noise(16, 16, 5), planarconfig="contig")
    Path("broken.png").write_bytes(b"no image")
    before = sorted(path.name for path in typed.iterdir())
    assert code_of(words) == code
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert error.startswith("mae: error: ") and error.count("\n") == 1
    assert sorted(path.name for path in typed.iterdir()) == before


def test_a_name_full_of_signs_is_only_text(typed, capsys):
    name = "a\x1b[2J[bold]$x.png"
    shutil.copy("0.png", name)
    assert main(["reconstruct", "model.safetensors", name, "--out", f"o-{name}", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["Look at o-a\ufffd[2J[bold]$x.png"]
    assert main(["reconstruct", "model.safetensors", name + "x", "--device", "cpu"]) == 2
    assert "\x1b" not in capsys.readouterr().err
