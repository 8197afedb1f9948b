"""What the trainer and the algorithms see of the processes that gather experience."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fever.policy import Params


class Pool:
    """What the trainer sees of the processes that gather experience."""

    count = 0  # workers; 0: in this process
    restarts = 0  # processes replaced so far
    can_change_env = True  # whether `change_env` works
    description = ""  # a line about the pool for the display

    def track_cores(self, cores: int) -> None:
        """Keep one worker per core as machines join and leave; there are `cores` of them now."""

    def change_env(self, kwargs: dict[str, Any]) -> None:
        """Make every environment anew with these arguments when its episode ends; those of later workers as well."""
        raise NotImplementedError

    def starts_alike(self) -> bool:
        """Whether the environments of a worker all began with the same observation, though their seeds differ."""
        return False  # not known

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
        """Use these weights from the next call on; returns their version."""
        self.params = self.store(params)
        self.version += 1
        return self.version

    def store(self, params: Params) -> Any:
        """What a call passes for these weights: the weights themselves, or a reference in Ray's object store."""
        return params
