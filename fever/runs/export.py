"""`fever export`: a folder that acts with NumPy alone, by copying `fever.policy` next to the weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import fever.policy
from fever import layout
from fever.errors import FeverError
from fever.runs.checkpoint import Checkpoint

EXAMPLE = '''"""A trained policy, described in policy.json. It needs Python and NumPy, nothing else.

    from {name} import load
    policy = load()
    action = policy.act(observation)      # call policy.reset() when an episode begins
"""

from pathlib import Path

from .policy import Policy


def load() -> Policy:
    """The policy in this folder."""
    return Policy.from_files(Path(__file__).parent)
'''  # nothing of the run goes into code: a run may come from anyone, and its environment's name may be any text


def export(checkpoint: Checkpoint, target: Path) -> Path:
    """Write an importable folder with the policy; refuses to overwrite."""
    name = target.name
    if not name.isidentifier():
        raise FeverError(
            f"{name!r} cannot be imported in Python; choose a folder name of letters, digits and underscores"
        )
    policy = own_policy(checkpoint)
    with new_folder(target) as folder:
        for module in ("distributions.py", "networks.py", "policy.py", "spaces.py"):
            shutil.copy(Path(fever.policy.__file__).parent / module, folder / module)
        (folder / "__init__.py").write_text(EXAMPLE.format(name=name))
        about = {"env": checkpoint.field("env", str), "algo": checkpoint.field("algo", str), **policy.describe()}
        (folder / "policy.json").write_text(json.dumps(about, indent=2) + "\n")
        np.savez(folder / "weights.npz", **policy.params)
    return target


def own_policy(checkpoint: Checkpoint) -> Any:
    """The policy of a checkpoint. Raises `FeverError` if its network is another library's, or the user's."""
    weights, names = checkpoint.path / layout.ARRAYS, checkpoint.names
    if checkpoint.provider is not None or names:
        what = names[0] if names else f"a network of {checkpoint.field('algo', str)}"
        raise FeverError(f"{what} does not act with NumPy alone; its weights, by name, are in {weights}")
    return checkpoint.policy()


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which gets the name `target` when all is written. Raises `FeverError` if that exists."""
    if os.path.lexists(target):  # pathlib raises if the name is too long
        raise FeverError(f"{target} exists already; choose another with --to")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise FeverError(f"{target} cannot be made: {error.strerror}; choose another with --to") from error
    try:
        yield partial
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
