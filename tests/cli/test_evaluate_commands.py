"""`mae evaluate`, `embed` and `neighbours` as they are typed."""

import errno
import json
import signal
from pathlib import Path

import pytest
import torch
from data.pictures import png
from safetensors.torch import save_file

import mae
from mae.cli import main
from mae.errors import Stopped
from mae.evaluation.protocols import PROTOCOLS
from mae.evaluation.protocols.knn import Knn
from mae.evaluation.run import Evaluator
from mae.models.file import load_model, load_with_report, model_metadata
from mae.models.fingerprint import output_fingerprint
from mae.models.presets import create_model

NAMES = [protocol.name for protocol in PROTOCOLS]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a labelled set and a flat one, in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(5)
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 1, "decoder_depth": 1}
    model = create_model("mae_vit_lesson_patch4", **sizes, mean=(0.5,) * 3, std=(0.3,) * 3)
    save_file(model.state_dict(), tmp_path / "model.safetensors", model_metadata(model))
    for number in range(20):
        path = tmp_path / "labelled" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(10, 9, seed=number))
    (tmp_path / "flat").mkdir()
    for number in range(3):
        (tmp_path / "flat" / f"{number}.png").write_bytes(png(10, 9, seed=number))
    return tmp_path


def code_of(words: str) -> int:
    """Exit code, also where the parser stops the program itself."""
    try:
        return main(words.split())
    except SystemExit as stopped:
        return int(stopped.code or 0)


@pytest.mark.parametrize("name", [*NAMES, "all"])
def test_each_protocol_tells_its_options(name, capsys):
    assert code_of(f"evaluate {name} --help") == 0
    shown = capsys.readouterr().out
    assert "--data" in shown and "--overlap" in shown and f"mae evaluate {name}" in shown
    option = {
        "knn": "--ks",
        "finetune": "--lora",
        "reconstruction": "--count",
        "label_free": "--views",
        "labels": "--shares",
        "segmentation_knn": "--metrics",
        "segmentation_linear": "--iterations",
        "finetune_segmentation": "--beside",
        "neighbours_patches": "--rows",
        "finetune_detection": "--scales",
        "finetune_instances": "--scales",
        "all": "--out",
    }
    assert option.get(name, "--epochs") in shown


def test_one_protocol(typed, capsys):
    words = "evaluate knn model.safetensors --data labelled --ks 1 3 --seed 4 --device cpu --out out"
    assert code_of(words) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("this model, mean", "random weights, mean", "raw pixels", "chance", "50.0%"))
    record = json.loads((typed / "out" / "evaluation" / "knn.json").read_text())
    assert len(record["weights"]) == 16
    assert record["options"]["ks"] == [1, 3] and record["seed"] == 4 and record["model"] == "model.safetensors"


def test_without_labels_and_without_out(typed):
    assert code_of("evaluate label_free model.safetensors --data flat --device cpu") == 0
    assert (typed / "runs" / "evaluate-model.safetensors" / "evaluation" / "label_free.json").is_file()


def test_all(typed, capsys):
    assert code_of("evaluate all model.safetensors --data labelled --device cpu --out out") == 0
    assert "Look at out/evaluation/index.html" in capsys.readouterr().out
    assert (typed / "out" / "evaluation" / "index.html").is_file()


def test_embed_and_neighbours(typed, capsys):
    assert code_of("embed model.safetensors flat --out f.npz --features mean patches --device cpu") == 0
    assert code_of("neighbours model.safetensors flat --out n.png --queries 1.png --k 2 --device cpu") == 0
    shown = capsys.readouterr().out
    assert "Features in f.npz" in shown and "Look at n.png" in shown
    assert (typed / "f.npz").is_file() and (typed / "n.png").is_file()
    for command in ("embed", "neighbours"):
        assert code_of(f"{command} --help") == 0


@pytest.mark.parametrize(
    "words",
    [
        "embed model.safetensors flat --out f.npz --device cpu",
        "neighbours model.safetensors flat --out n.png --k 1 --device cpu",
        "evaluate label_free model.safetensors --data flat --device cpu --out out",
        "evaluate all model.safetensors --data labelled --device cpu --out out",
    ],
)
def test_one_line_says_what_was_loaded(typed, capsys, words):
    file = typed / "model.safetensors"
    model = load_model(file)
    save_file(model.state_dict(), file, model_metadata(model, probe=output_fingerprint(model)))
    assert code_of(words) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == load_with_report(file)[1].line() and "probe reproduced" in first
    assert not any("loaded" in line for line in others)


def test_quiet_says_nothing_of_what_was_loaded(typed, capsys):
    quiet = {"device": "cpu", "quiet": True}
    mae.embed("model.safetensors", "flat", out="f.npz", **quiet)
    mae.neighbours("model.safetensors", "flat", out="n.png", k=1, **quiet)
    mae.evaluate("label_free", "model.safetensors", data="flat", out="out", **quiet)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "words",
    [
        ["embed", "model.safetensors", "flat", "--out", "\x1b[2J.npz"],
        ["neighbours", "model.safetensors", "flat", "--k", "1", "--out", "\x1b[2J.png"],
        ["evaluate", "all", "model.safetensors", "--data", "labelled", "--out", "\x1b[2J"],
    ],
)
def test_a_name_cannot_steer_the_terminal(typed, capsys, words):
    assert main([*words, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\ufffd[2J" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("evaluate knnn m --data labelled", 2, "unknown protocol 'knnn'; did you mean knn?"),
        ("evaluate knn nowhere --data labelled", 2, "nowhere is not there; expected a run folder"),
        ("evaluate knn model.safetensors --data labeled", 2, "did you mean 'labelled'?"),
        ("evaluate knn model.safetensors --data flat --device cpu", 2, "flat has no class folders"),
        ("evaluate knn model.safetensors --data labelled --ks 0", 2, "ks is [0]"),
        ("evaluate all model.safetensors --data flat --device cpu", 2, "flat has no class folders"),
        ("evaluate knn timm:nonsense --data labelled", 2, "timm has no such model"),
        ("evaluate knn cut.safetensors --data labelled", 1, "cut.safetensors cannot be read as a safetensors file"),
        ("evaluate label_free model.safetensors --data broken --device cpu", 1, "broken"),
        ("embed model.safetensors flat --out f.tsv", 2, "end its name with .csv, .parquet, .npz, .safetensors"),
        ("embed model.safetensors flat --out f.npz --features pooled --device cpu", 2, "no feature 'pooled'"),
        ("neighbours model.safetensors flat --count 0", 2, "0 images to start from"),
        ("neighbours model.safetensors flat --queries 9.png --device cpu", 2, "no readable image of that name"),
    ],
)
def test_mistakes_are_one_line_and_a_code(typed, capsys, words, code, said):
    (typed / "cut.safetensors").write_bytes(b"cut")
    (typed / "broken").mkdir()
    (typed / "broken" / "a.png").write_bytes(b"no image")
    assert code_of(words) == code
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert error.startswith("mae: error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("evaluate knn model.safetensors", "--data"),
        ("evaluate knn model.safetensors --data labelled --shot 3", "--shots"),
        ("evaluate all model.safetensors --data labelled --ks 3", "--ks"),
        ("embed model.safetensors flat", "--out"),
        ("neighbours model.safetensors flat --count many", "many"),
    ],
)
def test_usage_errors_exit_with_2(typed, capsys, words, said):
    assert code_of(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_stopped_training_says_so(typed, capsys, monkeypatch, signal_number, code):
    def stop(self, protocol):
        raise Stopped("stopped and saved in x; resumes when you rerun the same command", by=signal_number)

    monkeypatch.setattr(Evaluator, "run", stop)
    assert code_of("evaluate knn model.safetensors --data labelled --device cpu") == code
    assert capsys.readouterr().err == "mae: error: stopped and saved in x; resumes when you rerun the same command\n"


@pytest.mark.parametrize("words", ["evaluate knn m --data x", "evaluate all m --data x", "embed m x --out f.npz"])
def test_many_processes_are_given_the_same_command(monkeypatch, tmp_path, words):
    started = []
    monkeypatch.chdir(tmp_path)
    for name in ("m", "x"):  # what is not there is refused before a process is started
        (tmp_path / name).mkdir()

    def launched(gpus, *, device, command):
        started.append((gpus, device, command))
        return 75

    monkeypatch.setattr("mae.cli.launch.launch", launched)
    assert code_of(f"{words} --gpus 2 --device cpu") == 75
    assert started == [(2, "cpu", [*words.split(), "--gpus", "2", "--device", "cpu"])]


def test_out_of_memory_is_one_line_on_the_command_line(typed, capsys, monkeypatch):
    def fail(self, task):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMany lines")

    monkeypatch.setattr(Knn, "run", fail)
    assert code_of("evaluate knn model.safetensors --data labelled --device cpu --out out") == 1
    error = capsys.readouterr().err
    assert error.startswith("mae: error: the device ran out of memory: CUDA out of memory.; ")
    assert "--accumulate 2" in error and error.count("\n") == 1
    assert not (typed / "out" / "evaluation").exists()


def test_unknown_overlap_is_refused(typed, capsys):
    assert code_of("evaluate knn model.safetensors --data labelled --overlap dorp") == 2
    assert "dorp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("evaluate knn model.safetensors --data labelled --out labelled", "would be taken for images"),
        ("evaluate knn model.safetensors --data labelled --out labelled/new", "would be taken for images"),
        ("evaluate knn model.safetensors --data labelled --out model.safetensors", "model.safetensors is not a folder"),
        ("evaluate knn model.safetensors --data labelled --out o --draws 3", "draws is 3, and no shots are asked for"),
        ("evaluate finetune model.safetensors --data flat --device cpu --precision fp16", "fp16 needs a GPU"),
        ("evaluate finetune_segmentation model.safetensors --data flat --device cpu --precision fp16", "needs a GPU"),
        ("embed model.safetensors flat --out x.csv --features patches", "a .csv has no place for patches"),
        ("neighbours model.safetensors flat --queries 1.png --count 2 --out n.png", "give one of the two"),
    ],
)
def test_what_can_be_seen_to_be_wrong_is_refused_before_any_feature_is_computed(
    words: str, message: str, typed: Path, capsys: pytest.CaptureFixture[str]
):
    before = sorted(typed.rglob("*"))
    assert code_of(words) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(typed.rglob("*")) == before


def test_a_home_is_found_where_the_shell_leaves_it(
    typed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HOME", str(typed / "home"))
    (typed / "home").mkdir()
    assert code_of("embed model.safetensors flat --out=~/x.csv --device cpu") == 0
    assert (typed / "home" / "x.csv").is_file()
    assert code_of("embed ~/none flat --out ~/y.csv") == 2
    assert str(typed / "home" / "none") in capsys.readouterr().err.replace("\n", "")


def test_what_the_system_says_names_the_file(
    typed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fills(args: list[str]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "there/x.csv")

    monkeypatch.setattr("mae.cli.embed.run", fills)
    assert main(["embed"]) == 1
    told = "there/x.csv: No space left on device; free some space, or choose another place"
    assert capsys.readouterr().err == f"mae: error: {told}\n"
