"""What the documentation says is tried: its commands run, its Python runs, its links lead somewhere."""

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from answers_here import answer_here
from drawn_boxes import drawn_boxes
from drawn_domains import DRAWN
from drawn_masks import drawn_masks
from drawn_objects import drawn_objects
from foreign import lightly, official
from jobs_here import run_jobs_here
from light import little_measuring
from PIL import Image

from mae.cli import main
from mae.interop.exports.formats import write_hf_vitmae, write_timm
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.presets import create_model
from mae.models.pretrained import PretrainedEncoder

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FIGURE = re.compile(r"\d+(?:\.\d+)?(?:e-\d+)?(?:(?: ± | to |–)[-+]?\d+(?:\.\d+)?)?")
"""A number, with its interval or its range where it has one."""
FENCED = re.compile(r"^ *```.*?^ *```", flags=re.DOTALL | re.MULTILINE)
OTHERS = ("accelerate", "lightly", "pytorch_lightning", "timm", "transformers")
"""Libraries that pages speak of and the package does without."""
ABSENT = {name for name in OTHERS if find_spec(name) is None}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


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
    drawn_masks(tmp_path / "masks")
    drawn_boxes(tmp_path / "boxes")
    drawn_objects(tmp_path / "objects", train=4, test=2)
    monkeypatch.chdir(tmp_path)
    little_measuring(monkeypatch)
    run_jobs_here(monkeypatch)
    answer_here(monkeypatch)
    return tmp_path


WRITTEN_BY_OTHERS: dict[str, Callable[[MaskedAutoencoder, Path], None]] = {
    "mae_pretrain_vit_base.pth": lambda model, path: torch.save(
        official(PretrainedEncoder(encoder=model.encoder, config=model.config)), path
    ),
    "vit-base-mae": lambda model, folder: write_timm(model, folder, None),
    "vit-mae-base": lambda model, folder: write_hf_vitmae(model, folder, None),
    "lightly.ckpt": lambda model, path: torch.save({"state_dict": lightly(model)}, path),
}
"""Small models, never trained, in the place of the files and folders that pages name."""

RUN = "pretrain photos/ --model mae_vit_lesson_patch4 --img-size 32 --steps 2 --batch-size 4 --out runs/photos"


def make_what_it_names(page: Path) -> None:
    """The images of a domain, the files of others and the run that a page speaks of."""
    text = page.read_text()
    for name, draw in DRAWN.items():
        if f"{name}/" in text or f'"{name}"' in text:
            draw(Path(name))
    statistics = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    for name, write in WRITTEN_BY_OTHERS.items():
        if name in text:
            path = Path(name)
            if not path.suffix:
                path.mkdir()
            write(create_model("mae_vit_lesson_patch4", **statistics), path)
    trains_it = any(args[0] == "pretrain" and "runs/photos" in args for args in mae_commands(page))
    if not trains_it and re.search(r"\bRUN\b|runs/photos", text):
        assert main([*RUN.split(), "--device", "cpu"]) == 0
        Path("RUN").symlink_to("runs/photos")


def shortened(args: list[str]) -> list[str]:
    """The same command for two steps, on a run that is there; a study with one seed."""
    places = {"RUN": "runs/photos", "RUN/config.json": "runs/photos/config.json"}
    if "CLASSIFIER" in args:
        places["CLASSIFIER"] = str(next(Path("runs/photos/evaluation/finetune").glob("*/classifier.safetensors")))
    if "DETECTOR" in args:
        places["DETECTOR"] = str(next(Path("runs/photos/evaluation").glob("finetune_detection/*/detector.safetensors")))
    args = [places.get(arg, arg) for arg in args]
    tiny = "--model mae_vit_lesson_patch4 --img-size 32 --steps 2 --batch-size 4 --device cpu --workers 0".split()
    if args[:2] in (["doctor", "labels"], ["plan", "finetune"]):
        return args
    if args[0] in ("doctor", "plan") and not args[1].startswith("runs/"):
        # As many steps as a plan must have: fewer make no sense, and it says so.
        return [*args, *"--model mae_vit_lesson_patch4 --img-size 32 --batch-size 4 --epochs 100 --device cpu".split()]
    if args[:2] == ["study", "compare"]:
        return [*args, *tiny, "--no-doctor", "--mask-warmup", "0.1", "--seeds", "1", "--finetune-epochs", "0"]
    if args[0] != "pretrain" or "--resume" in args or "--help" in args:
        return args
    if "improved" in args:
        args = [*args, "--model", "mae_vit_lesson_patch4", "--mask-warmup", "0.1"]
    if "--epochs" in args:
        at = args.index("--epochs")
        args = args[:at] + args[at + 2 :]
    return [*args, "--steps", "2", "--batch-size", "4", "--device", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("page", as_pages(mae_commands), ids=page_id)
def test_commands_run(page: Path, somewhere: Path, capsys: pytest.CaptureFixture[str]):
    make_what_it_names(page)
    for args in mae_commands(page):
        assert main(shortened(args)) == 0, args


@pytest.mark.parametrize("page", as_pages(lambda page: blocks(page, "python")), ids=page_id)
def test_python_runs(page: Path, somewhere: Path):
    make_what_it_names(page)
    for args in mae_commands(page):
        if args[0] == "import":
            assert main(args) == 0
    left_out = set()
    for block in blocks(page, "python"):
        if absent := ABSENT.intersection(imported(block)):
            left_out |= absent
        else:
            exec(compile(block, str(page), "exec"), {})
    if left_out:
        pytest.skip(f"the other blocks ran; some need {', '.join(sorted(left_out))}, not installed")


def imported(block: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        file, _, anchor = target.partition("#")
        if not target.startswith("https://"):
            there = page.parent / file if file else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as a repository's web view makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), flags=re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


def test_every_page_is_on_the_list_of_pages():
    listed = {
        (DOCS / target).resolve() for target in re.findall(r"\]\(([^)#:]+\.md)\)", (DOCS / "README.md").read_text())
    }
    assert {page for page in DOCS.rglob("*.md")} - listed == {DOCS / "README.md"}


def test_the_table_of_results_says_what_its_pages_say():
    page = DOCS / "results" / "README.md"
    there, rows = "", 0
    for row in re.findall(r"^\| (.*) \|$", page.read_text().partition("## What others offer")[0], flags=re.MULTILINE):
        _, result, *others, where = (cell.strip() for cell in row.split(" | "))
        if linked := re.search(r"\]\(([^)#]+)", where):  # else "the same"
            there = (page.parent / linked[1]).read_text()
        for figure in re.findall(FIGURE, " ".join([result, *others])) if there else ():
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d]|\.\d)", there), (figure, row)
        rows += bool(there)
    assert rows > 18


def test_the_tests_that_are_named_are_there():
    named = [test for page in PAGES for test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())]
    assert len(named) >= 27
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), (path, name)


def test_the_table_of_rooms_has_all_of_them():
    rooms = {entry.name for entry in (ROOT / "src" / "mae").iterdir() if re.match(r"[a-z]\w*(\.py)?$", entry.name)}
    table = "\n".join(re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE))
    assert {name.removesuffix("/") for name in re.findall(r"`([\w./]+)`", table)} == rooms


def test_the_two_commands_are_targets_of_the_makefile():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    promised = re.findall(r"make (\w+)", "".join(blocks(ROOT / "README.md", "bash")))
    assert promised and set(promised) <= targets
