"""The trackers that a run asks for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mae.errors import MAEError
from mae.records import to_json, write_json
from mae.training.log import Callback
from mae.training.run_folder import RunFolder
from mae.training.trackers.ids import read_ids
from mae.training.trackers.mlflow import MLflow
from mae.training.trackers.tensorboard import TensorBoard
from mae.training.trackers.wandb import WandB

_WITH_ID: Mapping[str, Callable[..., WandB | MLflow]] = {"wandb": WandB, "mlflow": MLflow}


def open_trackers(
    names: Sequence[str],
    folder: RunFolder,
    *,
    config: Mapping[str, Any],
    start: tuple[int, int],
    total_steps: int,
) -> Iterator[Callback]:
    """The trackers of those names, each opened when it is asked for.

    Which run of W&B and of MLflow is written is kept in the folder's `tracking.json`, and continued where it is there.

    Args:
        names: trackers, as `--log-to` has them.
        folder: the run's.
        config: the run's configuration, as JSON.
        start: optimizer steps done and samples seen before this part of the run.
        total_steps: of the whole run.

    Raises:
        UsageError: `tracking.json` holds what no run writes.
        MAEError: a tracker refuses the run, or cannot be reached.
    """
    steps = {"start_step": start[0], "total_steps": total_steps}
    for name in dict.fromkeys(names):
        if name == "tensorboard":
            yield TensorBoard(folder.tensorboard, start_samples=start[1])
            continue
        ids = read_ids(folder.tracking)
        run_id = getattr(ids, name)
        try:
            tracker = _WITH_ID[name](folder.root, run_id=run_id, config=config, **steps)
        except Exception as error:  # whatever these packages, their clients and data bases raise
            raise MAEError(_why_not(name, folder, run_id, error)) from error
        if tracker.run_id != run_id:
            write_json(folder.tracking, to_json(replace(ids, **{name: tracker.run_id})))
        yield tracker


def _why_not(name: str, folder: RunFolder, run_id: str | None, error: Exception) -> str:
    told = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    known = f" continue run {run_id} of {folder.tracking}" if run_id is not None else " begin a run"
    return (
        f"--log-to {name} cannot{known}: {told}. Mend that and go on with "
        f"{folder.resume_command}, where --log-to without {name} leaves it out"
    )
