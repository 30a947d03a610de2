"""`mae evaluate PROTOCOL MODEL --data LABELLED`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from mae.config import Device
from mae.options import shown
from mae.records import check_known

if TYPE_CHECKING:
    from mae.evaluation.run import Evaluator

# What stands here is shown without loading PyTorch; each protocol's own help loads its file.
_PROTOCOLS = {
    "knn": "the nearest training images vote on each test image",
    "linear_probe": "a linear classifier on frozen features: the quick one, or the official recipe",
    "attentive_probe": "a learned query over frozen patch tokens, and a linear classifier",
    "finetune": "train the encoder itself: all of it, its last blocks, LoRA or biases; or from scratch",
    "reconstruction": "how good the pictures of hidden pixels are (needs no labels)",
    "label_free": "how spread out the features are (needs no labels)",
    "all": "the cheap ones of these, on one page",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every protocol is told."""

    model: Annotated[str, tyro.conf.Positional]
    """A run folder, one of its checkpoints, a .safetensors file, timm:NAME or hf:NAME_OR_PATH."""
    data: str
    """Labelled images: a folder or .zip with a folder a class, cifar10, stl10, builtin:photos or builtin:digits."""
    test: Annotated[str | None, shown("the test part of --data", "LABELLED")] = None
    """Labelled images to test on."""
    out: Annotated[Path | None, shown("the run's folder, or one under runs/ named after the model", "DIR")] = None
    """Where results and features are kept."""
    data_root: Path = Path("data")
    """Where sets known by name are kept."""
    device: Device = "auto"
    """auto: CUDA, else Apple's MPS, else the CPU."""
    seed: int = 0
    """Decides what the protocol draws."""
    overlap: Literal["error", "drop"] = "error"
    """Test images that are among the training images: an error, or left out of the test."""
    gpus: Annotated[int | None, shown("one", "N")] = None
    """Judge on so many GPUs of this machine, a process each; with --device cpu so many processes."""


def run(args: list[str]) -> int:
    """Judge a model's features and print the numbers beside what they must beat."""
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    name, rest = args[0], args[1:]
    check_known([name], list(_PROTOCOLS), what="protocol")
    return _all(rest) if name == "all" else _one(name, rest)


def _help() -> str:
    lines = "".join(f"  {name:<16} {what}\n" for name, what in _PROTOCOLS.items())
    return (
        "usage: mae evaluate PROTOCOL MODEL --data LABELLED ...\n\nTell how good a model's features are.\n\n"
        f"protocols:\n{lines}\n'mae evaluate PROTOCOL --help' tells more of each.\n"
    )


def _one(name: str, args: list[str]) -> int:
    from mae.evaluation.run import find_protocol

    kind = find_protocol(name)

    def evaluate(
        request: Annotated[Request, tyro.conf.arg(name="")],
        protocol: Annotated[kind, tyro.conf.arg(name="")],  # type: ignore[valid-type]
    ) -> tuple[Request, Any]:
        return request, protocol

    request, protocol = tyro.cli(
        evaluate, args=args, prog=f"mae evaluate {name}", description=f"{name}: {_PROTOCOLS[name]}."
    )
    if request.gpus is not None:
        return _in_many(request, [name, *args])
    with _evaluator(request) as evaluator:
        evaluator.judge(name, protocol)
    return 0


def _all(args: list[str]) -> int:
    from mae.report.canvas import visible

    request = tyro.cli(Request, args=args, prog="mae evaluate all", description=f"all: {_PROTOCOLS['all']}.")
    if request.gpus is not None:
        return _in_many(request, ["all", *args])
    with _evaluator(request) as evaluator:
        page = evaluator.judge_all()
        evaluator.console.print(f"\nLook at {visible(str(page))}", soft_wrap=True, highlight=False, markup=False)
    return 0


def _in_many(request: Request, args: list[str]) -> int:
    from mae.cli.launch import launch

    assert request.gpus is not None
    return launch(request.gpus, device=request.device, command=["evaluate", *args])


@contextmanager
def _evaluator(request: Request) -> Iterator["Evaluator"]:
    from rich.console import Console

    from mae.evaluation.run import Evaluator
    from mae.training.distributed import joined_world

    values = dict(vars(request))
    del values["gpus"]
    with joined_world(values.pop("device")) as (world, device):
        yield Evaluator(values.pop("model"), **values, device=device, world=world, console=Console())
