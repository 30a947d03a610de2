"""What the documentation says is tried: its commands run, its Python runs, its links lead somewhere."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign import official
from jobs_here import run_jobs_here
from light import little_measuring
from PIL import Image

from mae.cli import main
from mae.models.pretrained import PretrainedEncoder
from mae.models.zoo import create_model

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def mae_commands(page: Path) -> list[list[str]]:
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("mae ")]


def as_pages(attribute: object) -> list[Path]:
    return [page for page in PAGES if attribute(page)]  # type: ignore[operator]


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the images that the pages speak of."""
    rng = np.random.default_rng(0)
    for folder in ("photos", "path/to/photos", "labelled/cat", "labelled/dog"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 256, (8, 10, 3), dtype=np.uint8).repeat(12, axis=0).repeat(12, axis=1)
            Image.fromarray(pixels).save(tmp_path / folder / f"{number}.jpg")
    monkeypatch.chdir(tmp_path)
    little_measuring(monkeypatch)
    run_jobs_here(monkeypatch)
    return tmp_path


def write_official_weights(page: Path) -> bool:
    """A stand-in for the official file of ViT-Base, for the page that speaks of it."""
    if page.name != "weights.md":
        return False
    model = create_model("mae_vit_lesson_patch4")
    torch.save(official(PretrainedEncoder(encoder=model.encoder, config=model.config)), "mae_pretrain_vit_base.pth")
    return True


def shortened(args: list[str]) -> list[str]:
    """The same command for two steps, on a run that is there; a study with one seed."""
    places = {"RUN": "runs/photos", "RUN/config.json": "runs/photos/config.json"}
    if "CLASSIFIER" in args:
        places["CLASSIFIER"] = str(next(Path("runs/photos/evaluation/finetune").glob("*/classifier.safetensors")))
    args = [places.get(arg, arg) for arg in args]
    tiny = "--model mae_vit_lesson_patch4 --img-size 32 --steps 2 --batch-size 4 --device cpu --workers 0".split()
    if args[0] in ("doctor", "plan") and not args[1].startswith("runs/"):
        # As many steps as a plan must have: fewer make no sense, and it says so.
        return [*args, *"--model mae_vit_lesson_patch4 --img-size 32 --batch-size 4 --epochs 100 --device cpu".split()]
    if args[:2] == ["study", "compare"]:
        return [*args, *tiny, "--skip-doctor", "--mask-warmup", "0.1", "--seeds", "1", "--finetune-epochs", "0"]
    if args[0] != "pretrain" or "--resume" in args or "--help" in args:
        return args
    if "improved" in args:
        args = [*args, "--model", "mae_vit_lesson_patch4", "--mask-warmup", "0.1"]
    if "--epochs" in args:
        at = args.index("--epochs")
        args = args[:at] + args[at + 2 :]
    return [*args, "--steps", "2", "--batch-size", "4", "--device", "cpu"]


@pytest.mark.parametrize("page", as_pages(mae_commands), ids=lambda page: page.name)
def test_commands_run(page: Path, somewhere: Path, capsys: pytest.CaptureFixture[str]):
    known = "pretrain photos/ --model mae_vit_lesson_patch4 --img-size 32 --steps 2 --batch-size 4 --out runs/photos"
    write_official_weights(page)
    if page.name != "README.md":  # which makes this run itself
        assert main([*known.split(), "--device", "cpu"]) == 0
    for args in mae_commands(page):
        assert main(shortened(args)) == 0, args


@pytest.mark.parametrize("page", as_pages(lambda page: blocks(page, "python")), ids=lambda page: page.name)
def test_python_runs(page: Path, somewhere: Path):
    if write_official_weights(page):
        assert main("import mae_pretrain_vit_base.pth --out vit-base".split()) == 0
    known = (
        "pretrain photos/ --model mae_vit_lesson_patch4 --img-size 32 --steps 2 --batch-size 4 --out RUN --device cpu"
    )
    assert main(known.split()) == 0
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_tests_that_are_named_are_there():
    named = [test for page in PAGES for test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())]
    assert len(named) >= 27
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), (path, name)


def test_the_two_commands_are_targets_of_the_makefile():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    promised = re.findall(r"make (\w+)", "".join(blocks(ROOT / "README.md", "bash")))
    assert promised and set(promised) <= targets
