"""What the trainer and the algorithms see of the processes that gather experience."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fever.policy import Params


class Pool:
    """What the trainer sees of the processes that gather experience."""

    count = 0  # workers; 0: in this process
    version = 0  # of the weights that were sent out last
    restarts = 0  # processes replaced so far
    can_change_env = True  # whether `change_env` works
    can_restart = False  # whether it can be closed and started anew after Ray has died
    description = ""  # a line about the pool for the display
    notices: tuple[str, ...] = ()  # what the user is to be told; the trainer takes and shows it

    def track_machines(self, places: int) -> None:
        """Keep as many workers as fit as machines join and leave; `places` of them fit now."""

    def change_env(self, kwargs: dict[str, Any]) -> None:
        """Make every environment anew with these arguments when its episode ends; those of later workers as well."""
        raise NotImplementedError

    def take_notices(self) -> tuple[str, ...]:
        """The notices so far, each once."""
        taken, self.notices = self.notices, ()  # at once: a thread may add some
        return taken

    def replaced(self, index: int) -> int:
        """How often this worker was replaced since the pool was started."""
        return 0

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

    def broadcast(self, params: Params) -> int:
        """Use these weights from the next call on; returns their version."""
        self.params = self.store(params)
        self.version += 1
        return self.version

    def store(self, params: Params) -> Any:
        """What a call passes for these weights: the weights themselves, or a reference in Ray's object store."""
        return params
