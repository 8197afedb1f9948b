"""A training on machines of the tests' lab, under Slurm: one machine dies, another loses its cable for a while."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from chaos.case import CLEAN_SECONDS, Drill, FailedError
from chaos.envs import STOP
from chaos.faults import Fault, NoVictimError
from chaos.schedule import Case
from chaos.training import NAME, TARGET, Recipe, Training
from fever import layout
from fever.files import read_json
from fever.job import EXIT

if TYPE_CHECKING:
    from tests.lab.site import Site

RECIPE = Recipe("ppo", 3, "steps=64")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
MACHINES = 3
LINK_SECONDS = (2.0, 6.0)  # Ray gives a machine up after about 10 s, and so does the lab's Slurm (SlurmdTimeout)
TARGET_SECONDS, END_SECONDS = 120.0, 120.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


def why_no_machines() -> str | None:
    """Why there can be no lab here; None if there can."""
    try:
        from tests.lab.machines import why_no_lab
    except ImportError as error:  # the lab is part of the tests
        return f"the lab needs {error.name}"
    return why_no_lab(*PROGRAMS)


class LabTraining(Training):
    """A training that is a job of Slurm."""

    site: Site
    number = ""
    state, looked = "PENDING", 0.0

    def start(self) -> None:
        target = self.folder / "site.yaml"
        target.write_text(f"kind: slurm\nnodes: {MACHINES}\ntime: 20m\nscratch: {self.folder / 't'}\n")
        done = self.site.fever("train", *self.words(), "--name", NAME, "--on", str(target), "--detach")
        found = re.search(r"submitted slurm-(\d+)", done.stderr)
        if found is None:
            raise FailedError(f"not submitted: {done.stderr.strip()[-200:]}")
        self.number = found[1]

    def alive(self) -> bool:
        if time.monotonic() - self.looked > 1:
            self.state, self.looked = self.site.job(self.number)["JobState"], time.monotonic()
        return self.state not in ENDED

    def why_ended(self) -> str:
        lines = self.site.log(NAME).strip().splitlines()
        return f"{self.state}: {lines[-1] if lines else 'no output'}"[:200]

    def restarts(self) -> int:
        """Workers that were replaced so far."""
        return self.rows[-1].row["worker_restarts"] if self.rows else 0


class MachineFault(Fault):
    """What happens to a machine other than the learner's, which is the first. Workers of one that died go to others."""

    def __init__(self, kind: str, rng: Random, used: set[str]) -> None:
        super().__init__(kind, rng, limit=120.0)
        self.used = used

    def strike(self, training: Training) -> None:
        assert isinstance(training, LabTraining)
        whole = [one for one in training.site.lab.machines[1:] if one.name not in self.used]
        if not whole:
            raise NoVictimError("no machine is left")
        self.machine, self.before, self.cut = self.rng.choice(whole), training.restarts(), False
        self.seconds = self.rng.uniform(*LINK_SECONDS)
        self.used.add(self.machine.name)
        super().strike(training)
        if self.kind == "kill_machine":
            self.machine.crash()
        else:
            self.machine.unplug()
            self.cut = True

    def pending(self, training: Training) -> str | None:
        assert isinstance(training, LabTraining)
        if self.cut:
            if time.monotonic() - self.struck < self.seconds:
                return "its link"
            self.clean(training)
        if self.kind == "kill_machine" and training.restarts() == self.before:
            return "workers elsewhere"
        return super().pending(training)

    def clean(self, training: Training) -> None:
        if self.cut:
            self.machine.plug()
            self.cut, self.struck = False, time.monotonic()


class LabDrill(Drill):
    """As `Drill`, in a lab of its own."""

    training_class = LabTraining

    def __init__(self, case: Case, folder: Path, deadline: float, say: Callable[[str], None]) -> None:
        super().__init__(Case(RECIPE, case.seed, case.kinds), folder, deadline, say)
        self.result.case = "ppo, 3 machines"
        self.used: set[str] = set()
        self.left: list[str] = []

    def prepare(self, folder: Path) -> bool:
        return False  # the file system is shared by all machines

    def make_fault(self, kind: str) -> Fault:
        return MachineFault(kind, self.rng, self.used)

    def train(self) -> None:
        from tests.lab.machines import Lab
        from tests.lab.site import Site

        training = self.training
        assert isinstance(training, LabTraining)
        with ExitStack() as stack:
            lab = stack.enter_context(Lab(training.folder / "lab", MACHINES))
            lab.start_slurm()
            training.site = Site(lab, training.folder)
            try:
                super().train()
            finally:
                self.left = self._left_on(training)

    def rescue(self, fault: Fault) -> None:
        raise FailedError(self.result.outcomes[-1].reason)  # a job goes on by itself or not at all

    def finish(self) -> None:
        training = self.training
        assert isinstance(training, LabTraining)
        self.wait(lambda: training.score() >= TARGET, TARGET_SECONDS, f"mean return of {TARGET:g}")
        (training.control / STOP).touch()
        limit = time.monotonic() + END_SECONDS
        while training.alive():
            if time.monotonic() > limit:
                raise FailedError(f"the job did not end within {END_SECONDS:.0f} s of being asked to")
            time.sleep(0.5)
        training.follow()
        ended = training.path / layout.JOB / EXIT  # Slurm's own word for a job that has lost a machine is NODE_FAIL
        if not ended.exists() or read_json(ended)["code"] != 0:
            raise FailedError(f"it ended with {training.why_ended()}")

    def _left_on(self, training: LabTraining) -> list[str]:
        """Processes on the machines, a while after the end."""
        limit = time.monotonic() + (CLEAN_SECONDS if training.state in ENDED else 0)
        while (found := training.site.processes()) and time.monotonic() < limit:
            time.sleep(1)
        return found

    def leftovers(self) -> list[str]:
        crashed = sum(one.kind == "kill_machine" and not one.reason for one in self.result.outcomes)
        folders = sorted(path.name for path in (self.training.folder / "t").iterdir())
        return [*self.left, *folders[crashed:]]  # what is on a machine that died goes with it
