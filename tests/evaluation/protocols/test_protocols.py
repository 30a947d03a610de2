"""The list of protocols: what each must say of itself, and that a new one needs nothing but its place in the list."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from data.pictures import png
from tiny_task import evaluator, small_model
from torch import Tensor

import mae
from mae.cli import main
from mae.core.contracts import Batch, Target, Taught
from mae.errors import UsageError
from mae.evaluation import protocols
from mae.evaluation.protocol import EvaluationProtocol, ProtocolResult
from mae.evaluation.protocols import PROTOCOLS, find_protocol
from mae.models.masked_autoencoder import MaskedAutoencoder


@dataclass(frozen=True, kw_only=True)
class Contrast(EvaluationProtocol):
    """The std of the features."""

    name = "contrast"
    title = "Std of features"
    summary = "how large features are (a toy)"
    labels = "none"
    cheap = True

    scale: float = 1.0
    """What it is multiplied by."""

    def run(self, task) -> ProtocolResult:
        (features, *_) = task.features().arrays.values()
        std = self.scale * float(features.std())
        return ProtocolResult(numbers={"std": std}, header=("features", "std"), rows=(("all", f"{std:.3f}"),))


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Labelled images in the folder in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(16, 16, seed=number))
    return tmp_path / "photos"


def record(folder: Path, name: str) -> dict:
    return json.loads((folder / "evaluation" / f"{name}.json").read_text())


def test_each_protocol_describes_itself():
    names = [protocol.name for protocol in PROTOCOLS]
    assert len(set(names)) == len(names) and "all" not in names
    for protocol in PROTOCOLS:
        assert find_protocol(protocol.name) is protocol
        assert protocol.__dataclass_params__.frozen and protocol.title and protocol.summary
        assert isinstance(protocol(), EvaluationProtocol)  # every option has a default
        assert sys.modules[protocol.__module__].__file__.endswith(f"/{protocol.name}.py")
    with pytest.raises(UsageError, match="unknown protocol 'knnn'; did you mean knn?"):
        find_protocol("knnn")


@pytest.mark.parametrize("name", ["", *(protocol.name for protocol in PROTOCOLS)])
def test_help_is_shown_without_pytorch(name: str):
    program = (
        "import sys; from mae.cli import main\n"
        "try: main(['evaluate', *sys.argv[1:], '--help'])\n"
        "except SystemExit: pass\n"
        "sys.stderr.write(' '.join({'torch', 'numpy', 'scipy', 'jaxtyping'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, *name.split()], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    for protocol in PROTOCOLS:
        if not name:
            assert f"  {protocol.name} " in done.stdout and protocol.summary in done.stdout
        elif name == protocol.name:
            # `labels` itself says what a protocol needs, so the option --labels has another name.
            names = [option.name.removesuffix("_used").replace("_", "-") for option in fields(protocol)]
            assert all(f"--{name}" in done.stdout for name in names)


def test_new_protocol_needs_only_its_place_in_the_list(photos: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(protocols, "PROTOCOLS", (*PROTOCOLS, Contrast))
    asked = {"data": photos, "device": "cpu", "quiet": True}
    model = small_model(in_chans=3, mean=(0.5,) * 3, std=(0.25,) * 3)
    once, twice = (mae.evaluate("contrast", model, out="out", scale=scale, **asked) for scale in (1.0, 2.0))
    assert twice.result["std"] == 2 * once.result["std"] != 0
    assert record(Path("out"), "contrast")["options"] == {"scale": 2.0}
    with pytest.raises(UsageError, match="unknown option of contrast 'scales'; did you mean scale?"):
        mae.evaluate("contrast", model, scales=1.0, **asked)
    mae.save(model, "model.safetensors")
    assert main(["evaluate"]) == 0
    assert re.search(
        r"^  contrast +how large features are \(a toy\) \(needs no labels\)$", capsys.readouterr().out, re.M
    )
    words = ["model.safetensors", "--data", "photos", "--device", "cpu"]
    assert main(["evaluate", "contrast", *words, "--out", "typed", "--scale", "3"]) == 0
    assert "Std of features, photos" in capsys.readouterr().out
    assert record(Path("typed"), "contrast")["result"]["std"] == pytest.approx(3 * once.result["std"])
    assert main(["evaluate", "all", *words, "--out", "all"]) == 0
    assert record(Path("all"), "contrast")["result"] == once.result
    assert "<h2>Std of features</h2>" in Path("all/evaluation/index.html").read_text()


def test_all_leaves_out_what_too_few_images_cannot_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for number, place in enumerate(("train/cat", "train/dog", "test/cat", "test/dog")):
        folder = tmp_path / "few" / place
        folder.mkdir(parents=True)
        (folder / "1.png").write_bytes(png(12, 12, number))
    model = small_model(in_chans=3, mean=(0.5,) * 3, std=(0.25,) * 3)
    mae.save(model, tmp_path / "model.safetensors")
    words = [str(tmp_path / "model.safetensors"), "--data", str(tmp_path / "few"), "--device", "cpu"]
    assert main(["evaluate", "all", *words, "--out", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "left out, no class has two samples, so none can be held out; give more training samples." in said
    text = (tmp_path / "out/evaluation/index.html").read_text()
    assert text.count("Left out: no class has two samples") == said.count("left out, no class has two samples") >= 1
    assert record(tmp_path / "out", "knn")["result"]


@dataclass(frozen=True)
class Gradients(Target):
    """A target that is no picture."""

    kind = "gradients"

    def __call__(self, batch: Batch, tokens: Tensor | None = None, taught: Taught | None = None) -> Tensor:
        raise AssertionError("an evaluation needs no targets")


def test_protocols_say_why_they_do_not_apply(photos: Path):
    model: MaskedAutoencoder = small_model(in_chans=3, mean=(0.5,) * 3, std=(0.25,) * 3)
    model.target = Gradients()
    asked = {"data": photos, "device": "cpu", "quiet": True, "out": "out"}
    with pytest.raises(UsageError, match="^model predicts gradients; reconstruction needs a target of pixels$"):
        mae.evaluate("reconstruction", model, **asked)
    function = mae.Extractor(
        name="colours",
        encode=lambda images: images.mean(dim=(2, 3)),
        preprocessing=mae.Preprocessing(img_size=(16, 16)),
    )
    with pytest.raises(UsageError, match="^colours has no decoder; reconstruction needs a masked autoencoder"):
        mae.evaluate("reconstruction", function, **asked)
    with pytest.raises(UsageError, match="^colours cannot be fine-tuned; that needs a model of this package$"):
        mae.evaluate("finetune", function, **asked)
    assert not Path("out").exists()
    page = evaluator(model, photos, Path("all")).run_all()
    assert "Left out: model predicts gradients; reconstruction needs a target of pixels." in page.read_text()
    assert not page.with_name("reconstruction.json").exists() and page.with_name("knn.json").is_file()
