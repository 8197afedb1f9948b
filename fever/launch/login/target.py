"""A scheduler behind a login node: `login:` in a site's file, and what `--on FILE` then does."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic import field_validator

from fever.algos.registry import without_prefix
from fever.config import setting
from fever.errors import FeverError
from fever.job import JobFolder
from fever.launch.clusters.host_packages import Environment, describe_environment
from fever.launch.clusters.package import pack
from fever.launch.clusters.ssh import load
from fever.launch.doctor import Finding
from fever.launch.login import jobs
from fever.launch.login.link import LoginLink
from fever.launch.schedulers.base import Scheduler
from fever.launch.script_text import ScriptSettings, Word
from fever.launch.targets import Target, restore_target
from fever.text import say

if TYPE_CHECKING:
    from fever.launch.dispatch import Order
    from fever.launch.jobs import Job

LEAST_FREE = 2 * 2**30  # bytes on the disk of the runs, below which the doctor warns
TOGETHER = 'eval "$(printf "%s\\n" "$@")"'  # runs words that are lines of shell, as one script


class LoginNode(ScriptSettings):
    """The host that submits, and the environment that trains; both as for clusters of ssh hosts."""

    host: str = setting(..., "as ssh knows it", min_length=1)
    user: Word | None = setting(None, "who logs in; null: what ssh's own configuration says")
    options: tuple[str, ...] = setting((), "further words for ssh, such as -p 2222")
    python: str | None = setting(
        None,
        "an interpreter there that has fever's dependencies; null: that of the site's venv or conda, or one is set up",
    )
    packages: tuple[str, ...] = setting((), "further packages for the interpreter that is set up")
    extras: tuple[str, ...] | None = setting(None, "fever's extras that it has; null: those installed here")
    wheels: str | None = setting(None, "folder of wheels there, if it has no package registry")
    runs: str = setting("~/.fever/runs", "folder of run directories there, which all machines see", min_length=1)

    @field_validator("host")
    @classmethod
    def _no_option(cls, value: str) -> str:
        if value.startswith("-") or not value.strip():
            raise ValueError(f"{value!r} is not the name of a host")
        return value

    @property
    def ssh_command(self) -> list[str]:
        """The words that run a command on it."""
        return ["ssh", *self.options, *(["-l", self.user] if self.user else []), self.host]

    @property
    def environment(self) -> Environment:
        """What is set up there if the site has no environment of its own."""
        return describe_environment(self.packages, self.extras)


class LoginSite(Target):
    """A site's scheduler, reached through its login node."""

    is_remote: ClassVar[bool] = True
    free_text: ClassVar[frozenset[str]] = frozenset({"site"})  # checked by the scheduler's own class

    kind: Literal["slurm", "pbs", "lsf"] = setting(..., "the scheduler")
    name: str = setting(..., "of its jobs: the file's name")
    login: LoginNode = setting(..., "the login node: a host as ssh knows it, or its settings")
    site: dict[str, Any] = setting(..., "the scheduler's settings")

    @field_validator("login", mode="before")
    @classmethod
    def _host_alone(cls, value: Any) -> Any:
        return {"host": value} if isinstance(value, str) else value

    @property
    def scheduler(self) -> Scheduler:
        return cast("Scheduler", restore_target(self.site))

    @property
    def own_python(self) -> str | None:
        """The interpreter that the site's file names; None: an environment is set up."""
        scheduler = self.scheduler
        venv = f"{scheduler.venv.rstrip('/')}/bin/python" if scheduler.venv else None
        return self.login.python or venv or ("python" if scheduler.conda else None)

    @property
    def remote_command(self) -> str:
        """The command for the login node's shell: in a login shell, with the site's modules, the first process there.

        Start-up files and modules may read and print; neither is to touch the connection, which is kept aside. It is
        one line, since the user's shell there may be csh, which allows no line break between quotation marks.
        """
        bare = self.scheduler.model_copy(update={"venv": None, "shell": (), "env": {}})
        lines = [line for line in Scheduler.preparation(bare, Path()) if not line.startswith("#")]
        inner = "\n".join([*lines, "exec 0<&8 1>&9 8<&- 9>&-", load(self.own_python)])
        words = " ".join(map(quote, inner.split("\n")))
        outer = f"exec 8<&0 9>&1 0</dev/null 1>&2; exec bash -l -c {quote(TOGETHER)} bash {words}"
        return f"exec sh -c {quote(outer)}"

    # what `--on FILE` does

    def connect(self, job: Job) -> LoginLink:
        """A connection for a job that was submitted, with the settings that it was submitted with."""
        return jobs.connect(job)

    def run(self, order: Order) -> int:
        """Send the code and the run directory, and have them submitted there; Ctrl-C detaches, the job goes on."""
        if order.config.start_from is not None and order.config.search is not None:
            raise FeverError("--from: a login node does not have the weights; search on this machine instead")
        run = order.run_directory()
        if not order.dry_run:
            order.reserve(run)
        order.check(environment=self.own_python is None and self.scheduler.container is None)
        package = pack(without_prefix(order.config.algo), *order.config.names(), skip=run.parent)
        with LoginLink(self) as link:
            if order.dry_run:
                say(jobs.dry_run(order, self, link, run, package), end="")
                return 0
            jobs.require_environment(self, link)
            say(f"sending {package.what}", sys.stderr)
            log = JobFolder.of(run).log
            shown = log.stat().st_size if log.exists() else 0
            job = jobs.submit(order, self, link, run, package)
        return order.follow(job, shown)

    def state(self, job: Job) -> tuple[str, str]:
        return jobs.state(job)

    def stop(self, job: Job, state: str, now: bool) -> str:
        return jobs.stop(job, now)

    def watch(self, job: Job) -> jobs.LoginWatch:
        return jobs.LoginWatch(job)

    def fetch(self, job: Job) -> None:
        jobs.fetch(job)

    def how_to_give_up(self, job: Job) -> str:
        return f"rm {quote(str(jobs.record_of(job)))}"

    def examine(self, on: str, runs: Path) -> list[Finding]:
        """What can be seen from here: the login node, its environment, its scheduler."""
        try:
            link = LoginLink(self)
        except FeverError as error:
            return [Finding("problem", self.login.host, str(error))]
        with link:
            scheduler = self.scheduler
            free, has = link.facts["free"], link.facts["versions"]
            words = list(scheduler.ping)
            answer = link.ask({"do": "call", "words": words, "seconds": 20})
            first = (answer["printed"].strip().splitlines() or ["answers"])[0]
            made = f"Python {has['Python']}, Ray {has['ray']}" if has else "is set up by the first job"
            missing = bool(has) and "none" in has.values()
            return [
                Finding("ok", self.login.host, f"answers, at home in {link.facts['home']}"),
                Finding("problem" if missing else "ok", "environment", made),
                Finding("problem" if answer["code"] != 0 else "ok", "scheduler", f"{words[0]}: {first}"),
                Finding("ok" if free > LEAST_FREE else "problem", "runs", f"{link.runs}: {free / 2**30:.1f} GiB free"),
            ]
