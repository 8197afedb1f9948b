"""The environment that hosts get: the packages, in the versions that fever was tested with, and a name for all that."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, requires
from importlib.resources import files

from fever.errors import FeverError

EXTRAS = {  # of fever -> a package that says that it is installed
    "render": "pygame",
    "mujoco": "mujoco",
    "box2d": "box2d-py",
    "atari": "ale-py",
    "rllib": "torch",
    "tune": "optuna",
}


@dataclass(frozen=True)
class Environment:
    """What pip is given."""

    requirements: tuple[str, ...]
    constraints: str  # the text of a constraints file

    @property
    def name(self) -> str:
        """The same for the same content."""
        text = "\n".join([*self.requirements, self.constraints])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def describe_environment(packages: tuple[str, ...] = (), extras: tuple[str, ...] | None = None) -> Environment:
    """What a host needs besides fever itself, which goes with every job; None: the extras that are installed here."""
    for extra in extras or ():
        if extra not in EXTRAS:
            raise FeverError(f"extras: there is no {extra}; there are: {', '.join(EXTRAS)}")
    chosen = [name for name, package in EXTRAS.items() if (_installed(package) if extras is None else name in extras)]
    wanted = []
    for line in requires("fever") or ():
        requirement, _, condition = (part.strip() for part in line.partition(";"))
        named = re.search(r'extra == "(\w+)"', condition.replace("'", '"'))
        if named is None or named[1] in chosen:
            wanted.append(requirement)
    wanted.append("ray[default]")  # with what serves jobs
    return Environment(tuple(sorted({*wanted, *packages})), (files("fever") / "constraints.txt").read_text())


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
