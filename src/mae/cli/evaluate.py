"""`mae evaluate PROTOCOL MODEL --data LABELLED`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from mae.cli.early import check_use
from mae.config import Device
from mae.evaluation import protocols
from mae.evaluation.protocol import EvaluationProtocol
from mae.options import shown
from mae.records import check_known
from mae.text import visible

if TYPE_CHECKING:
    from rich.console import Console

    from mae.evaluation.run import Evaluator

_ALL = "the cheap ones of these, on one page"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of every protocol."""

    model: Annotated[str, tyro.conf.Positional]
    """A run folder, one of its checkpoints, a .safetensors file, timm:NAME or hf:NAME_OR_PATH."""
    data: str
    """Labelled images: a folder or .zip with a folder a class, cifar10, stl10, builtin:photos or builtin:digits; for
    segmentation a folder with images/ and masks/; for detection one with COCO's, YOLO's or Pascal VOC's labels."""
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
    """Evaluate on so many GPUs of this machine, a process each; with --device cpu in so many processes."""


def run(args: list[str]) -> int:
    """Evaluate a model's features and print the numbers beside their baselines."""
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    name, rest = args[0], args[1:]
    check_known([name], [*(protocol.name for protocol in protocols.PROTOCOLS), "all"], what="protocol")
    if name == "all":
        return _all(rest)
    return one_protocol(protocols.find_protocol(name), rest, command=["evaluate", name])


def _help() -> str:
    summaries = {**{protocol.name: summary(protocol) for protocol in protocols.PROTOCOLS}, "all": _ALL}
    width = max(map(len, summaries))
    lines = "".join(f"  {name:<{width}} {summary}\n" for name, summary in summaries.items())
    return (
        "usage: mae evaluate PROTOCOL MODEL --data LABELLED ...\n\nMeasure how good a model's features are.\n\n"
        f"protocols:\n{lines}\n'mae evaluate PROTOCOL --help' shows the options of each.\n"
    )


def summary(kind: type[EvaluationProtocol]) -> str:
    """What a protocol measures, and the labels it needs."""
    needs = {"classes": "", "masks": " (needs masks)", "boxes": " (needs boxes)", "none": " (needs no labels)"}
    return f"{kind.summary}{needs[kind.labels]}"


def one_protocol(
    kind: type[EvaluationProtocol],
    args: list[str],
    *,
    command: list[str],
    prepare: Callable[[Request, EvaluationProtocol], tuple[Request, EvaluationProtocol]] | None = None,
) -> int:
    """Run a protocol as it is asked for.

    Args:
        kind: the protocol.
        args: its words.
        command: the words of `mae` before these.
        prepare: what is done to the request before anything is opened.
    """

    def evaluate(
        request: Annotated[Request, tyro.conf.arg(name="")],
        protocol: Annotated[kind, tyro.conf.arg(name="")],  # type: ignore[valid-type]
    ) -> tuple[Request, EvaluationProtocol]:
        return request, protocol

    description = f"{kind.name}: {summary(kind)}."
    request, protocol = tyro.cli(evaluate, args=args, prog=" ".join(["mae", *command]), description=description)
    check_request(request)
    if request.gpus is not None:
        return _in_many(request, [*command, *args])
    if prepare is not None:
        request, protocol = prepare(request, protocol)
    from rich.console import Console

    with opened_evaluator(request, Console()) as evaluator:
        evaluator.run(protocol)
    return 0


def _all(args: list[str]) -> int:
    from rich.console import Console

    request = tyro.cli(Request, args=args, prog="mae evaluate all", description=f"all: {_ALL}.")
    check_request(request)
    if request.gpus is not None:
        return _in_many(request, ["evaluate", "all", *args])
    with opened_evaluator(request, Console()) as evaluator:
        page = evaluator.run_all()
        evaluator.console.print(f"\nLook at {visible(str(page))}", soft_wrap=True, highlight=False, markup=False)
    return 0


def check_request(request: Request) -> None:
    """Refuse a model or labels that are not there, before PyTorch is loaded.

    Raises:
        UsageError: that.
    """
    sources = [request.data] if request.test is None else [request.data, request.test]
    check_use(request.model, *sources, data_root=request.data_root)


def _in_many(request: Request, command: list[str]) -> int:
    from mae.cli.launch import launch

    assert request.gpus is not None
    return launch(request.gpus, device=request.device, command=command)


@contextmanager
def opened_evaluator(request: Request, console: "Console") -> Iterator["Evaluator"]:
    """What a request asks for, opened in all processes that evaluate together."""
    from mae.evaluation.run import Evaluator
    from mae.training.distributed import joined_world

    values = dict(vars(request))
    del values["gpus"]
    with joined_world(values.pop("device")) as (world, device):
        yield Evaluator(values.pop("model"), **values, device=device, world=world, console=console)
