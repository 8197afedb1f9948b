"""`--on mpi`: take part in a job as one of the ranks that the user has started, with mpirun, mpiexec, aprun, jsrun."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fever.errors import FeverError
from fever.job import ALIVE, ENDED, RUNNING, JobFolder
from fever.launch import jobs
from fever.launch.doctor import Finding
from fever.launch.rendezvous.launchers import find_rank
from fever.launch.rendezvous.member import LOST_SECONDS
from fever.launch.targets import Allocation

if TYPE_CHECKING:
    from fever.launch.dispatch import Order


class Mpi(Allocation):
    kind: Literal["mpi"] = "mpi"

    def run(self, order: Order) -> int:
        from fever.launch.rendezvous.rank import run_rank

        if order.dry_run or order.detach:
            raise FeverError("--dry-run and --detach are for schedulers; ranks of --on mpi are started by you")
        rank = find_rank()
        if order.run is None and order.config.name is None and rank.launch is None:
            raise FeverError(
                f"{rank.launcher} gives this launch no name that all its ranks know; choose one with --name"
            )
        run = order.run_directory(f"{order.config.stem}-{rank.launch}")

        def prepare() -> None:  # in rank 0, which can tell the others what is wrong
            order.reserve(run)
            number = rank.launch or run.name
            jobs.prepare(order.config, self, run, order.flags, number)
            jobs.remember(f"mpi-{number}", run)

        return run_rank(JobFolder.of(run), self, rank, prepare)

    def state(self, job: jobs.Job) -> tuple[str, str]:
        """Running as long as rank 0 gives signs of life."""
        if job.code is not None or job.folder.read_text(ALIVE) is None:
            return job.ended()
        silent = time.time() - (job.folder.path / ALIVE).stat().st_mtime
        if silent < LOST_SECONDS:
            return RUNNING, ""
        job.folder.drop_token()
        return ENDED, "was killed"

    def cancel(self, job: jobs.Job) -> str:
        raise FeverError(f"{job.name} does not stop; end its launcher (mpirun) where it was started")

    def examine(self, on: str, runs: Path) -> list[Finding]:
        from fever.launch.checks import examine_ranks

        return examine_ranks(self, find_rank(), runs)
