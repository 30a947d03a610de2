"""MLflow."""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mae.training.log import LogRow
from mae.training.trackers.rows import numbers_of

_log = logging.getLogger(__name__)
_LONGEST_TEXT = 500  # characters of a parameter that every version and store of MLflow takes


class MLflow:
    """Writes each number of a row into a run of MLflow, over optimizer steps.

    The experiment is that of `MLFLOW_EXPERIMENT_NAME`, else called as the folder that the run's folder is in; the run
    is called as the run's folder. Where it is stored MLflow decides, by `MLFLOW_TRACKING_URI`. A store that fails later
    ends the logging, not the training.

    Args:
        folder: the run's folder.
        run_id: the run to continue; None: a new one.
        config: the run's configuration.
        start_step: optimizer steps done before this part of the run.
        total_steps: of the whole run.

    Attributes:
        run_id: of the run that is written.

    Raises:
        MlflowException: the store cannot be reached, or does not know the run.
    """

    def __init__(
        self, folder: Path, *, run_id: str | None, config: Mapping[str, Any], start_step: int, total_steps: int
    ) -> None:
        from mlflow.tracking import MlflowClient

        # A client leaves a run that a notebook has open as it is.
        self._client = MlflowClient()
        self._step, self._total_steps, self._is_lost = start_step, total_steps, False
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self.run_id = run_id
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or folder.resolve().parent.name or "mae"
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        self.run_id = self._client.create_run(number, run_name=folder.resolve().name).info.run_id
        self._write_params(config)

    def _write_params(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        # Once: MLflow refuses another value, which workers or device of a resumed run may have.
        params = [Param(name, str(value)[:_LONGEST_TEXT]) for name, value in _flat(config).items()]
        for start in range(0, len(params), 100):  # as many as MLflow takes at once
            self._client.log_batch(self.run_id, params=params[start : start + 100])

    def log(self, row: LogRow) -> None:
        """Write each number of a row, and a warning as a tag."""
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        self._step = row["step"]
        if self._is_lost:
            return
        try:
            if "warning" in row:
                self._client.set_tag(self.run_id, f"warning.{row['warning']['name']}", row["warning"]["text"])
                return
            now = time.time_ns() // 1_000_000
            metrics = [Metric(name, value, now, row["step"]) for name, value in numbers_of(row).items()]
            self._client.log_batch(self.run_id, metrics=metrics)
        except MlflowException as error:
            self._lose(error)

    def close(self) -> None:
        """Tell MLflow how the run ended; one that did not come to its last step counts as killed."""
        from mlflow.exceptions import MlflowException

        if self._is_lost:
            return
        try:
            self._client.set_terminated(self.run_id, "FINISHED" if self._step >= self._total_steps else "KILLED")
        except MlflowException as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self._is_lost = True
        _log.warning("MLflow takes no more numbers (%s); the run goes on, and metrics.jsonl has them", error)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one, names joined by dots."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
