"""The environment that hosts get: packages in the versions that fever was tested with, named by their content."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, requires
from importlib.resources import files

from fever.errors import FeverError

EXTRAS = {  # an extra of fever's -> a package that is installed if the extra is
    "render": "pygame",
    "mujoco": "mujoco",
    "box2d": "box2d",
    "atari": "ale-py",
    "rllib": "torch",
    "tune": "optuna",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
}


@dataclass(frozen=True)
class Environment:
    """The packages that pip installs on a host."""

    requirements: tuple[str, ...]
    constraints: str  # the text of a constraints file

    @property
    def name(self) -> str:
        """A hash: environments with the same content have the same name."""
        text = "\n".join([*self.requirements, self.constraints])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def describe_environment(packages: tuple[str, ...] = (), extras: tuple[str, ...] | None = None) -> Environment:
    """The environment for hosts, without fever itself, which every job brings; `extras` None: those installed here."""
    for extra in extras or ():
        if extra not in EXTRAS:
            raise FeverError(f"extras: {extra} is unknown; the extras are: {', '.join(EXTRAS)}")
    chosen = [name for name, package in EXTRAS.items() if (_installed(package) if extras is None else name in extras)]
    wanted = []
    for line in requires("fever") or ():
        requirement, _, condition = (part.strip() for part in line.partition(";"))
        named = re.search(r'extra == "(\w+)"', condition.replace("'", '"'))
        if named is None or named[1] in chosen:
            wanted.append(requirement)
    wanted.append("ray[default]")  # with the server of the Jobs API
    return Environment(tuple(sorted({*wanted, *packages})), (files("fever") / "constraints.txt").read_text())


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
