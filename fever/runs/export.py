"""`fever export`: a folder that acts with NumPy alone, by copying `fever.policy` next to the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

import fever.policy
from fever import layout
from fever.errors import FeverError
from fever.runs.checkpoint import Checkpoint

EXAMPLE = '''"""A trained policy ({env}, {algo}). It needs Python and NumPy, nothing else.

    from {name} import load
    policy = load()
    action = policy.act(observation)      # call policy.reset() when an episode begins
"""

from pathlib import Path

from .policy import Policy


def load() -> Policy:
    """The policy in this folder."""
    return Policy.from_files(Path(__file__).parent)
'''


def export(checkpoint: Checkpoint, target: Path) -> Path:
    """Write an importable folder with the policy; refuses to overwrite."""
    name = target.name
    if not name.isidentifier():
        raise FeverError(
            f"{name!r} cannot be imported in Python; choose a folder name of letters, digits and underscores"
        )
    if target.exists():
        raise FeverError(f"{target} exists already; choose another with --to")
    if checkpoint.provider is not None:
        weights, algo = checkpoint.path / layout.ARRAYS, checkpoint.manifest["algo"]
        raise FeverError(f"a network of {algo} does not act with NumPy alone; its weights, by name, are in {weights}")
    policy = checkpoint.policy()
    partial = target.with_name(f".{name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise FeverError(f"{target} cannot be made: {error.strerror}; choose another with --to") from error
    for module in ("distributions.py", "networks.py", "policy.py", "spaces.py"):
        shutil.copy(Path(fever.policy.__file__).parent / module, partial / module)
    manifest = checkpoint.manifest
    (partial / "__init__.py").write_text(EXAMPLE.format(env=manifest["env"], algo=manifest["algo"], name=name))
    (partial / "policy.json").write_text(json.dumps(policy.describe(), indent=2) + "\n")
    np.savez(partial / "weights.npz", **policy.params)
    partial.rename(target)
    return target
