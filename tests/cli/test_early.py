"""Cheap mistakes are told before PyTorch is loaded, by the message that a later check would give."""

import subprocess
import sys
from pathlib import Path

import pytest

from mae.cli import main
from mae.errors import UsageError
from mae.training.run_folder import check_model, find_weights

_RUN = ("pretrain", "plan", "doctor")
MISTAKES = [
    *((f"{command} nowhere", "nowhere does not exist") for command in _RUN),
    *((f"{command} images --img-size 100 --patch-size 16", "nearest sizes that are: 96x96") for command in _RUN),
    *((f"{command} images --model mae_vit_bas", "unknown model 'mae_vit_bas'") for command in _RUN),
    *((f"{command} images --teacher frozen", "--teacher-source names none; give a run") for command in _RUN),
    *((f"{command} images --teacher frozen --teacher-source nowhere", "nowhere is not there") for command in _RUN),
    ("pretrain images --teacher frozen --teacher-source classes", "classes is a folder of images"),
    ("pretrain images --recipe second_stage", "--teacher-source names none"),
    (
        "pretrain images --teacher-source x",
        "--teacher-source is an option of teacher frozen; give --teacher frozen too",
    ),
    ("pretrain", "no images are named"),
    ("pretrain --resume", "--resume needs --out"),
    ("pretrain --resume --out nowhere", "nowhere holds no run to go on with"),
    ("pretrain images --out full", "full is there already and is not an empty folder"),
    ("pretrain images --out images/run", "images/run is inside images"),
    ("show s3://bucket/run", "s3://bucket/run is a remote address, and runs and models are read and written on this"),
    ("embed https://host/model.safetensors images --out f.npz", "https://host/model.safetensors is a remote address"),
    ("pretrain images --out s3://bucket/run", "s3://bucket/run is a remote address"),
    ("pretrain --resume --out s3://bucket/run", "s3://bucket/run is a remote address"),
    ("embed nowhere images --out f.npz", "nowhere is not there; expected a run folder"),
    ("embed model.safetensor images --out f.npz", "did you mean model.safetensors?"),
    ("embed model.safetensors nowhere --out f.npz", "nowhere does not exist"),
    ("embed images model.safetensors --out f.npz", "images is a folder of images, and the model comes first"),
    ("neighbours nowhere images", "nowhere is not there"),
    ("neighbours classes images", "classes is a folder of images"),
    ("reconstruct images/a.jpg", "images/a.jpg is an image, and the model comes first"),
    ("reconstruct images/a.jpg images/a.jpg", "images/a.jpg is an image, and the model comes first"),
    ("evaluate knn images --data classes", "images is a folder of images"),
    ("evaluate all model.safetensors --data nowhere", "nowhere does not exist"),
    ("show mae_vit_bas", "unknown model 'mae_vit_bas'"),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with names that could be a model's and images'."""
    for name in ("images/a.jpg", "classes/cat/a.png", "full/notes.txt", "model.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("typed", "says"), MISTAKES)
def test_mistakes_are_told_in_one_line(place: Path, capsys: pytest.CaptureFixture[str], typed: str, says: str):
    assert main(typed.split()) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_no_mistake_loads_torch(place: Path):
    """All in one process: had any of them loaded PyTorch, it would be there."""
    code = (
        "import sys\nfrom mae.cli import main\n"
        f"codes = {{main(typed.split()) for typed, _ in {MISTAKES!r}}}\n"
        "print(codes, sorted({'torch', 'numpy', 'PIL', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=place)
    assert done.stdout == "{2} []\n"


def test_what_takes_seconds_to_import_waits_until_it_is_needed():
    code = (
        "import sys; import mae.pretraining.run, mae.evaluation.run, mae.evaluation.pictures.predict\n"
        "from mae.models.presets import model_config; model_config('mae_vit_base_patch16')\n"
        "print(sorted({'torchvision', 'torch._dynamo', 'sympy', 'scipy.optimize', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_process_among_several_leaves_the_folder_to_the_first(place: Path, monkeypatch: pytest.MonkeyPatch):
    from mae.cli.early import check_run
    from mae.recipes import recipe_config

    config = recipe_config("default").override({"source": "images", "out": "full"})
    with pytest.raises(UsageError, match="not an empty folder"):
        check_run(config, resume=False)
    monkeypatch.setenv("RANK", "1")
    check_run(config, resume=False)


def test_the_same_is_refused_where_models_are_opened(place: Path):
    for path in (Path("images"), Path("classes"), Path("images/a.jpg")):
        with pytest.raises(UsageError, match="the model comes first"):
            find_weights(path)
    check_model(Path("model.safetensors"))
    (place / "images" / "config.json").touch()  # a run, whatever else is in its folder
    check_model(Path("images"))
