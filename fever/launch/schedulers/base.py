"""What batch schedulers have in common: settings, the script, submitting, asking, cancelling.

One scheduler is one subclass in a file of its own, and one line in `fever/launch/targets.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar

from fever.config import Duration, RunConfig, setting
from fever.errors import FeverError
from fever.job import ENDED, LOG, RUNNING, SCRIPT, STARTED, JobFolder
from fever.launch.doctor import Finding
from fever.launch.jobs import Job, prepare, remember, undo_for
from fever.launch.rendezvous.launchers import find_rank
from fever.launch.schedulers.container import Container
from fever.launch.schedulers.times import TimeFormat
from fever.launch.script_text import Argument, Command, Word, quote_words, require_one_line
from fever.launch.targets import Allocation
from fever.text import say

if TYPE_CHECKING:
    from fever.launch.dispatch import Order

ASK_SECONDS = 20.0  # for what the user is told about a job
CALL_SECONDS = 60.0  # for a scheduler's command; busy ones take half a minute


class Scheduler(Allocation):
    """A batch scheduler: it runs the script of a job when machines are free.

    A subclass sets the class variables without a value, and implements `directives`, `launcher_command`,
    `state_command`, `read_state` and `allocated_hosts`; it overrides the rest where its scheduler differs.
    """

    submit_program: ClassVar[str]
    cancel_program: ClassVar[str]
    ping: ClassVar[tuple[str, ...]]  # a command that shows whether the scheduler answers
    unknown_job: ClassVar[str]  # pattern of its error message about a job that it does not know (any more)
    number_variable: ClassVar[str]  # environment variable of a job: its number
    inside: ClassVar[str]  # a command that runs the doctor on the machines of an allocation
    signals_limit: ClassVar[bool] = False  # it sends SIGUSR1 before the time limit
    supervised: ClassVar[bool] = True
    time_format: ClassVar[TimeFormat]  # how its users write times
    free_text: ClassVar[frozenset[str]] = frozenset({"before_modules", "shell"})

    nodes: int = setting(1, "machines, the learner's included", gt=0)
    seconds: Duration | None = setting(
        None, "time limit; `time` in a file, as the scheduler's users write it or as 20m; null: the scheduler's default"
    )
    account: Word | None = setting(None, "account or project that the hours are charged to")
    partition: Word | None = setting(None, "partition (Slurm) or queue (PBS, LSF)")
    requeue: bool = setting(False, "at the time limit save, go back into the queue and continue")
    login_shell: bool = setting(False, "the script's shell is a login shell, which reads the site's profile")
    before_modules: tuple[str, ...] = setting((), "lines of shell before modules are loaded, such as module purge")
    modules: tuple[Argument, ...] = setting((), "environment modules to load")
    conda: Argument | None = setting(None, "conda environment to activate")
    venv: str | None = setting(None, "folder of a virtual environment to activate; null: the one that submits")
    shell: tuple[str, ...] = setting((), "lines of shell before the training begins")
    container: Container | None = setting(None, "container in which the ranks start; null: none")
    options: tuple[str, ...] = setting((), "further options for the scheduler, such as --exclusive")

    @classmethod
    def read_time(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return value
        return cls.time_format.seconds(str(value))

    @property
    def lead(self) -> float:
        """At most a quarter of the time limit."""
        return self.lead_seconds if self.seconds is None else min(self.lead_seconds, self.seconds / 4)

    @property
    def least_ranks(self) -> int:
        return self.nodes

    # the script

    def directives(self, name: str, folder: Path) -> list[str]:
        """The lines that tell the scheduler what a job needs; `folder` is the job's."""
        raise NotImplementedError

    def launcher_command(self) -> str:
        """The command that starts one rank on every machine, without the ranks' own command."""
        raise NotImplementedError

    def script(self, name: str, submitted_in: Path, folder: Path, python: str) -> str:
        """The whole script of a job. Raises FeverError for a folder or a name that cannot be written into it."""
        require_one_line(folder=folder, name=name, python=python, submitted_in=submitted_in)
        interpreter = "python" if self.venv or self.conda else quote(python)
        supervisor = f"{interpreter} -m fever.launch.schedulers.supervisor {quote(str(folder))}"
        ranks = [self.launcher_command()]
        if self.container is not None:
            ranks.append(self.container.command(submitted_in, folder.parent))
        lines = [
            "#!/bin/bash -l" if self.login_shell else "#!/bin/bash",
            *self.directives(name, folder),
            "",
            *self.preparation(folder),
            f"cd {quote(str(submitted_in))}",
            f"exec {supervisor} {' '.join(ranks)}",
        ]
        return "\n".join(lines) + "\n"

    def preparation(self, folder: Path) -> list[str]:
        """The lines of the script that set up a site's environment before Python starts."""
        lines = ["set -e"]
        if self.unset:
            lines.append(f"unset {' '.join(self.unset)}")
        lines += [*self.before_modules, *(f"module load {quote(module)}" for module in self.modules)]
        if self.conda:
            lines += ['eval "$(conda shell.bash hook)"', f"conda activate {quote(self.conda)}"]
        if self.venv:
            home = Path(os.path.expanduser(self.venv))  # pathlib raises if there is no such user
            lines += ["# shellcheck disable=SC1091", f". {quote(str(home / 'bin' / 'activate'))}"]
        lines += [f"export {name}={quote(value)}" for name, value in self.env.items()]
        return [*lines, *self.shell]

    def script_for(self, run: Path) -> str:
        """The script of a run's job, submitted in the current folder with this Python."""
        return self.script(run.name, Path.cwd(), JobFolder.of(run).path, sys.executable)

    # a job

    def run(self, order: Order) -> int:
        """Submit a job and follow its log; Ctrl-C detaches, the job continues."""
        run = order.run_directory()
        if order.dry_run:
            self.check(order)
            say(self.script_for(run), end="")
            return 0
        order.reserve(run)
        self.check(order)
        log = JobFolder.of(run).log
        shown = log.stat().st_size if log.exists() else 0  # a run that is resumed has a log already
        return order.follow(self.submit(order.config, run, order.flags), shown)

    def check(self, order: Order) -> None:
        """Find mistakes before a job waits: in what it trains, and in the cores that its workers want of a machine."""
        from fever.sampling.ray_machines import require_room

        elsewhere = (self.modules, self.conda, self.venv, self.shell, self.before_modules, self.container)
        order.check(environment=not any(elsewhere))  # else only the job has it
        cores = [self.cores_of(rank) for rank in range(min(self.nodes, 2))]  # all but the learner's are alike
        if order.config.cpus_per_worker is not None and None not in cores:
            require_room([float(count or 0) for count in cores], order.config.cpus_per_worker)

    def submit(self, config: RunConfig, run: Path, flags: list[str]) -> Job:
        """Submit a job that trains; the run directory is left as it was if the scheduler refuses."""
        if shutil.which(self.submit_program) is None:
            where = "submit from a login node of the cluster, or see --dry-run"
            raise FeverError(f"there is no {self.submit_program} here; {where}")
        with ExitStack() as undo:
            undo.callback(undo_for(run))
            folder = prepare(config, self, run, flags)
            folder.clear()
            (folder.path / STARTED).unlink(missing_ok=True)
            folder.write_text(SCRIPT, self.script_for(run), mode=0o700)
            refused = undo.pop_all()
        try:
            self.refuse_impossible(folder.path / SCRIPT)
            number = self.submit_script(folder.path / SCRIPT)
        except FeverError:
            refused.close()
            raise
        folder.note(id=number)
        return remember(f"{self.kind}-{number}", run)

    def refuse_impossible(self, script: Path) -> None:
        """Raise FeverError if the scheduler would accept a job and never start it."""

    def submit_script(self, script: Path) -> str:
        """Hand a script to the scheduler; returns the job's number. Raises FeverError if it is refused."""
        return call(self.submit_program, str(script)).strip()

    def put_back(self, script: Path, number: str) -> str:
        """Put a job that ends now into the queue again; returns its number. Raises FeverError if it is refused."""
        return self.submit_script(script)

    def state(self, job: Job) -> tuple[str, str]:
        if not (number := job.facts["id"]):
            return ENDED, "was not submitted"
        command = self.state_command(number)
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return RUNNING, f"{command[0]} does not answer"
        unknown = re.search(self.unknown_job, answer.stderr)
        if answer.returncode and not unknown:
            return RUNNING, f"{command[0]} does not answer"
        return (None if unknown else self.read_state(answer.stdout.strip())) or self._ended(job, number)

    def _ended(self, job: Job, number: str) -> tuple[str, str]:
        """The state of a job that is over. Schedulers forget jobs: what this one says is kept in the job's record."""
        if job.code is None and (said := self.how_it_ended(number)) and said != job.facts.get("ended"):
            with suppress(OSError):
                job.folder.note(ended=said)
        return job.ended()

    def how_it_ended(self, number: str) -> str:
        """What the scheduler says of a job's end, its exit code for example; empty if it says nothing."""
        return ""

    def state_command(self, number: str) -> list[str]:
        """The command that asks for the state of a job."""
        raise NotImplementedError

    def read_state(self, answer: str) -> tuple[str, str] | None:
        """QUEUED or RUNNING and a short reason, from what that command printed; None if the job is over."""
        raise NotImplementedError

    def cancel(self, job: Job) -> str:
        call(self.cancel_program, job.facts["id"])
        return f"{job.name} is cancelled"

    # the doctor

    def examine(self, on: str, runs: Path) -> list[Finding]:
        from fever.launch.checks import examine_ranks

        try:
            rank = find_rank()
        except FeverError:
            return self.examine_from_outside(on, runs)
        return examine_ranks(self, rank, runs)

    def examine_from_outside(self, on: str, runs: Path) -> list[Finding]:
        """What can be seen without being a rank, on a login node."""
        from fever.launch.checks import examine_folder

        if shutil.which(self.submit_program) is None:
            return [Finding("problem", self.submit_program, "not found; work on a login node of the cluster")]
        try:
            done = subprocess.run(self.ping, capture_output=True, text=True, timeout=20)
            answer, failed = (done.stdout + done.stderr).strip().splitlines(), done.returncode != 0
        except (OSError, subprocess.TimeoutExpired) as error:
            answer, failed = [str(error)], True
        return [
            Finding("problem" if failed else "ok", "scheduler", answer[0] if answer else "answers"),
            examine_folder(runs),
            Finding("note", "machines", f"can be examined from inside an allocation: {self.inside}"),
        ]


class MpiScheduler(Scheduler):
    """A scheduler whose jobs start ranks with a launcher of MPI programs, and print only when they have ended."""

    launcher: Command = setting(
        "mpiexec -n {nodes} --ppn 1", "what starts one rank on every machine, aprun for example"
    )

    def launcher_command(self) -> str:
        return quote_words(self.launcher.replace("{nodes}", str(self.nodes)))

    def preparation(self, folder: Path) -> list[str]:
        log = f"exec >> {quote(str(folder / LOG))} 2>&1  # the scheduler itself would show it only at the end"
        return [log, *super().preparation(folder)]


def ask(*command: str, errors: bool = False) -> str:
    """What a scheduler's command prints about a job or its machines, empty if it fails; with `errors`, what it
    prints to stderr."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if errors:
        return answer.stderr
    return "" if answer.returncode else answer.stdout


def call(*command: str, script: Path | None = None) -> str:
    """What a scheduler's command prints, with a script as its input; raises FeverError if it fails."""
    text = script.read_text() if script else ""
    try:  # in a session of its own: Ctrl-C is not meant for it
        answer = subprocess.run(
            command, input=text, capture_output=True, text=True, start_new_session=True, timeout=CALL_SECONDS
        )
    except OSError as error:
        raise FeverError(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise FeverError(f"{command[0]} did not answer within {CALL_SECONDS:.0f} s") from None
    if answer.returncode:
        raise FeverError(f"{command[0]} refused the job: {' '.join(answer.stderr.split())}")
    return answer.stdout


def clock(seconds: float) -> str:
    """`HH:MM:SS`, a second at least: schedulers take none for no limit."""
    whole = max(1, round(seconds))
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
