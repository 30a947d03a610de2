"""`mae evaluate PROTOCOL MODEL --data LABELLED`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from mae.config import Device

if TYPE_CHECKING:
    from rich.console import Console

    from mae.evaluation.comparison import KnnReport


def run(args: list[str]) -> int:
    """Judge a model's features and print the numbers beside what they must beat."""
    return tyro.cli(evaluate, args=args, prog="mae evaluate")


def evaluate(
    protocol: Annotated[Literal["knn"], tyro.conf.Positional],
    model: Annotated[Path, tyro.conf.Positional],
    data: str,
    data_root: Path = Path("data"),
    k: int = 20,
    device: Device = "auto",
) -> int:
    """Tell how good a model's features are.

    Args:
        protocol: knn: the nearest training images vote on each test image.
        model: a run folder, one of its checkpoints or a .safetensors file.
        data: labelled images: a folder or .zip with a folder for each class (perhaps below train/ and test/),
            cifar10, stl10, builtin:photos or builtin:digits.
        data_root: where sets known by name are kept.
        k: how many neighbours vote.
        device: where to compute; auto: CUDA, else Apple's MPS, else the CPU.
    """
    from rich.console import Console

    from mae.data.sources import open_labelled
    from mae.errors import UsageError
    from mae.evaluation.labelled import knn_on
    from mae.pretraining.run import load
    from mae.training.device import choose_device

    if k < 1:
        raise UsageError(f"--k is {k}; expected 1 or more")
    trained = load(model).to(choose_device(device))
    labelled = open_labelled(data, data_root=data_root)
    show_knn(Console(), knn_on(trained, labelled, k=k), data)
    return 0


def show_knn(console: "Console", report: "KnnReport", data: str) -> None:
    """Print a k-NN accuracy beside its comparators."""
    from mae.report.console import show_table

    show_table(
        console,
        f"k-NN on {data}: the {report.k} nearest of {report.n_train:,} images vote on each of {report.n_test:,}",
        [
            ("this model", f"{report.accuracy:.1%}"),
            ("random weights", f"{report.random_weights:.1%}"),
            ("raw pixels", f"{report.raw_pixels:.1%}"),
            ("commonest class", f"{report.majority:.1%}"),
            ("chance", f"{report.chance:.1%}"),
        ],
    )
