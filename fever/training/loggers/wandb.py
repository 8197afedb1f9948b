"""Weights & Biases. Its files go to its own folder: `wandb` where fever was started, or that of WANDB_DIR."""

from __future__ import annotations

import os
import uuid
from importlib.util import find_spec
from typing import Any

from fever.config import RunConfig
from fever.errors import FeverError
from fever.runs.run import Run
from fever.training.loggers.base import END_SECONDS, Ending, Logger, Row, group_of, name_of

INIT_SECONDS = 20.0  # to reach the server, of one attempt
PROJECT = "fever"  # unless WANDB_PROJECT names one


class Wandb(Logger):
    """One run of W&B for each run; runs that differ in their seeds are one group."""

    tracker = "wandb"

    def __init__(self) -> None:
        """Raises FeverError if the library is missing, or nobody is logged in."""
        if find_spec("wandb") is None:
            raise FeverError(
                '--log wandb needs wandb, which is not installed; install it with: pip install "fever[wandb]"'
            )
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # would delay the exit if there is no network
        import wandb

        online = wandb.setup(wandb.Settings(silent=True)).settings.mode in ("online", "shared", "run")
        if online and not (wandb.api.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")):
            raise FeverError(
                "--log wandb: nobody is logged in; run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"
            )
        self.run: Any = None

    def begin(self, config: RunConfig, run: Run) -> None:
        import wandb

        identity = self.read_id(run) or uuid.uuid4().hex[:8]
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=identity,
            resume="allow",
            name=name_of(run),
            group=group_of(config, run),
            config=config.model_dump(mode="json"),
            allow_val_change=True,  # stop rules change when a run is resumed
            reinit="create_new",  # a process may train several runs
            settings=wandb.Settings(console="off", init_timeout=INIT_SECONDS, finish_timeout=END_SECONDS),
        )
        self.write_id(run, identity)
        self.run.define_metric("*", step_metric="steps")

    def write(self, rows: list[Row]) -> None:
        for _, metrics in rows:
            self.run.log(metrics)

    def end(self, ending: Ending) -> None:
        import wandb

        if ending.best is not None:
            artifact = wandb.Artifact(f"best-{self.run.id}", type="checkpoint")
            artifact.add_dir(str(ending.best))
            self.run.log_artifact(artifact)
        for path in ending.videos:
            self.run.log({f"videos/{path.stem}": wandb.Video(str(path))})
        self.run.summary.update({f"summary/{name}": value for name, value in ending.summary.items() if name != "run"})
        self.run.finish(exit_code=int(ending.failed))
