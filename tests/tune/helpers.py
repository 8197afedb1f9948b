"""Configurations of small searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fever.config import RunConfig, validate

SMALL = {"steps": 32, "minibatch": 64, "epochs": 4}  # settings of PPO that learn in seconds
RATES = {"learning_rate": "loguniform(1e-5,1e-2)", "hidden": "choice([32],[16,16])"}


def configure(folder: Path, env: str = "CartPole-v1", **fields: Any) -> RunConfig:
    """A search's configuration; fields of the search and of the run side by side."""
    names = ("space", "trials", "method", "scheduler", "seeds", "parallel")
    values = {"space": RATES, **{name: fields.pop(name) for name in names if name in fields}}
    values = {"env": env, "settings": SMALL, "stop": {"steps": 3000}, "search": values, "runs": str(folder), **fields}
    return validate(RunConfig, values, "the test")
