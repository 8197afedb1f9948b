"""What the trainer and the algorithms see of the processes that gather experience."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fever.policy import Params


class Pool:
    """What the trainer sees of the processes that gather experience."""

    count = 0  # workers; 0: in this process
    restarts = 0  # processes replaced so far
    description = ""  # of what it keeps, for people

    def follow(self, cores: int) -> None:
        """There is a worker for every one of so many cores: machines that join later get workers too."""

    def close(self) -> None:
        """Close all environments and end all processes."""

    def save(self, folder: Path) -> None:
        """Write what was gathered and must survive a stop; nothing, unless the pool has a replay buffer."""

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote."""


class Broadcasting(Pool):
    """A pool whose workers all act with the weights that were broadcast last."""

    params: Any = None
    version = 0

    def broadcast(self, params: Params) -> int:
        """Make these the weights that act from now on; returns their version."""
        self.params = self.put(params)
        self.version += 1
        return self.version

    def put(self, params: Params) -> Any:
        """What a worker is given for these weights: themselves, or one copy for all of a cluster."""
        return params
