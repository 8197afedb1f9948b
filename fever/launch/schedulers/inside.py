"""A run in an allocation that the user already has, such as salloc's: its machines train, and nothing is submitted."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from fever.errors import FeverError
from fever.launch.jobs import prepare, remember, undo_for
from fever.launch.rendezvous.mpi import Mpi
from fever.launch.schedulers.supervisor import Supervisor

if TYPE_CHECKING:
    from fever.launch.dispatch import Order
    from fever.launch.schedulers.base import Scheduler

OF_JOB = ("time", "account", "partition", "qos", "requeue", "gpus")  # options that only a new job can have


def run_inside(scheduler: Scheduler, order: Order, launcher: list[str]) -> int:
    """Train with ranks that `launcher` starts on the allocation's machines; returns the exit code. What the run prints
    comes here, and Ctrl-C lets it save and stop. Its job is one of `--on mpi`: the allocation outlives it."""
    if useless := [name for name in OF_JOB if name in order.options]:
        raise FeverError(f"--{useless[0]} has no effect inside an allocation: its machines are there already")
    if order.detach:
        raise FeverError(
            "--detach and --seeds do not go with an allocation that you are in: its one run ends with this command"
        )
    run = order.run_directory()
    order.reserve(run)
    order.check(environment=True)
    target = Mpi.model_validate({name: getattr(scheduler, name) for name in Mpi.model_fields if name != "kind"})
    with ExitStack() as undo:
        undo.callback(undo_for(run))
        folder = prepare(order.config, target, run, order.flags, run.name)
        folder.clear()
        undo.pop_all()
    remember(f"mpi-{run.name}", run)
    return Supervisor(folder, launcher).run()
