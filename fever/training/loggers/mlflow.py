"""MLflow: the server or file that MLFLOW_TRACKING_URI names, or else `mlflow.db` where fever was started."""

from __future__ import annotations

import logging
import os
import re
import time
from importlib.util import find_spec
from typing import Any

from fever.config import RunConfig
from fever.errors import FeverError
from fever.runs.run import Run
from fever.training.loggers.base import Ending, Logger, Row, group_of, name_of

MOST_METRICS, MOST_PARAMS = 1000, 100  # in one call of MLflow's
VALUE_LENGTH = 500  # of a parameter, that all versions accept


class Mlflow(Logger):
    """One run of MLflow for each run; runs that differ in their seeds are one experiment, unless
    MLFLOW_EXPERIMENT_NAME names another."""

    tracker = "mlflow"

    def __init__(self) -> None:
        """Raises FeverError if the library is missing."""
        if find_spec("mlflow") is None:
            raise FeverError(
                '--log mlflow needs mlflow, which is not installed; install it with: pip install "fever[mlflow]"'
            )
        self.client: Any = None
        self.identity = ""

    def begin(self, config: RunConfig, run: Run) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it reports every table that it makes
        self.client = MlflowClient()
        if kept := self.read_id(run):
            try:
                self.client.update_run(kept, status="RUNNING")
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            else:
                self.identity = kept
                return
        group = group_of(config, run)
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", group))
        made = self.client.create_run(experiment, run_name=name_of(run), tags={"group": group})
        self.identity = made.info.run_id
        self.write_id(run, self.identity)
        self._log_params(config)

    def _experiment(self, name: str) -> str:
        """The id of an experiment, which another run may be making at the same time."""
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                return self.client.create_experiment(name)
            except MlflowException:
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
        return found.experiment_id

    def _log_params(self, config: RunConfig) -> None:
        from mlflow.entities import Param

        values = flat(config.model_dump(mode="json"))
        params = [Param(allowed(name), str(value)[:VALUE_LENGTH]) for name, value in values.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self.client.log_batch(self.identity, params=params[first : first + MOST_PARAMS])

    def write(self, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(allowed(name), float(value), now, steps) for steps, row in rows for name, value in row.items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self.client.log_batch(self.identity, metrics=metrics[first : first + MOST_METRICS])

    def end(self, ending: Ending) -> None:
        if ending.best is not None:
            self.client.log_artifacts(self.identity, str(ending.best), "best")
        for path in ending.videos:
            self.client.log_artifact(self.identity, str(path), "videos")
        self.client.log_dict(self.identity, ending.summary, "summary.json")
        self.client.set_terminated(self.identity, "FAILED" if ending.failed else "FINISHED")


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values with names such as `stop.steps`; empty mappings are left out."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def allowed(name: str) -> str:
    """A name with the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name)
