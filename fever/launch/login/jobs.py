"""Jobs that are submitted on a login node: sent, followed, stopped, fetched."""

from __future__ import annotations

import secrets
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fever.errors import FeverError
from fever.job import ENDED, EXIT, RUNNING, JobFolder, records
from fever.launch.clusters.ssh import Unreachable, ask
from fever.launch.clusters.watch import ClusterWatch
from fever.launch.jobs import PATIENCE_SECONDS, SILENT, Job, claim_name, forget, list_jobs, prepare, undo_for
from fever.launch.login.link import STOP_SECONDS, LoginLink
from fever.launch.on_host.login import RECORDS
from fever.launch.targets import restore_target
from fever.text import format_duration, say
from fever.training.start_from import pack_start

if TYPE_CHECKING:
    from fever.launch.clusters.package import Package
    from fever.launch.dispatch import Order
    from fever.launch.login.target import LoginSite


def require_environment(target: LoginSite, link: LoginLink) -> None:
    """Set up the environment on the login node unless it is there; raises FeverError if it cannot train."""
    facts = link.facts
    if facts["python"] is None:
        environment, node = target.login.environment, target.login
        count = len(environment.requirements)
        say(f"setting up {node.host}: {count} packages, which takes minutes the first time", sys.stderr)
        request: dict[str, Any] = {"action": "install", "environment": environment.name, "wheels": node.wheels}
        request |= {"requirements": environment.requirements, "constraints": environment.constraints}
        request["environ"] = target.scheduler.env
        try:
            made = ask(node.ssh_command, request, remote_command=target.remote_command)
        except FeverError as error:
            raise FeverError(f"{node.host}: {error}") from None
        what = f"environment {environment.name} in {format_duration(made['seconds'])}"
        say(f"{node.host}: {what}", sys.stderr)
        facts |= {"python": made["python"], "versions": made["versions"]}
    if missing := [name for name, has in facts["versions"].items() if has == "none"]:
        raise FeverError(f"{link.head}: {facts['python']} has no {', '.join(missing)}")


def dry_run(order: Order, target: LoginSite, link: LoginLink, run: Path, package: Package) -> str:
    """The script that would be submitted; nothing of it stays there."""
    if link.facts["python"] is None:
        raise FeverError(f"{link.head} has no environment for fever yet; the first job sets it up")
    folder = new_folder(target, link)
    try:
        link.send_code(folder, package)
        link.enter(folder)
        return str(link.ask(order_for(order, target, f"{folder}/{run.name}"))["script"])
    finally:
        clean_up(target, link, folder, "discard")


def new_folder(target: LoginSite, link: LoginLink, name: str = "") -> str:
    """A job's folder on the login node that nobody else has."""
    return f"{link.runs}/{name or target.name}-{secrets.token_hex(4)}"


def order_for(order: Order, target: LoginSite, remote_path: str) -> dict[str, Any]:
    """The request that has a run trained there."""
    there = Path(remote_path)
    config = order.config.model_copy(update={"runs": str(there.parent), "name": there.name})
    own = {"FEVER_HOME": str(there.parent / RECORDS)}  # as in this request's session
    site = {**target.site, "env": {**target.site["env"], **own}}
    return {
        "do": "submit", "folder": remote_path, "on": order.on, "site": site, "flags": order.flags,
        "config": config.model_dump(mode="json"), "dry_run": order.dry_run,
    }  # fmt: skip


def submit(order: Order, target: LoginSite, link: LoginLink, run: Path, package: Package) -> Job:
    """Send a run directory and the code, and have the job submitted there.

    If that fails, everything is as it was before on both machines, unless the scheduler may have the job all the same.
    """
    with ExitStack() as undo:
        job = Job(claim_name(target.name), run.resolve())
        undo.callback(forget, job)
        before = folder_of_run(run, link)
        folder = before or new_folder(target, link, job.name)
        remote_path = f"{folder}/{run.name}"
        undo.callback(undo_for(run))
        here = prepare(order.config, target, run, order.flags, "", folder)
        here.note(cluster=target.name, head=link.head, remote_path=remote_path, sent=False)
        here.clear()
        if order.config.start_from is not None and not here.saved:
            pack_start(order.config, here)
        undo.callback(clean_up, target, link, folder, "discard" if before is None else "tidy")
        link.send_run(job.run, remote_path)
        link.send_code(folder, package)
        link.enter(folder)
        record(job, target, remote_path, str(link.facts["python"]))
        try:
            reply = link.ask(order_for(order, target, remote_path))
        except BaseException as error:
            if isinstance(error, Unreachable) or not isinstance(error, FeverError):
                undo.pop_all()  # it may be in the queue: `fever jobs` shows it, or that it was not submitted
            raise
        undo.pop_all()
    here.note(id=reply["id"], sent=True)
    for line in reply["said"]:
        say(line, sys.stderr)
    return job


def clean_up(target: LoginSite, link: LoginLink, folder: str, do: str) -> None:
    """Remove a job's folder there ("discard"), or all but its run directory ("tidy"): over a new connection, since the
    old one may have been interrupted in the middle of a request."""
    link.close()
    try:
        with LoginLink(target) as fresh:
            fresh.ask({"do": do, "folder": folder})
    except FeverError as error:
        say(f"{folder} may be left on {link.head}: {error}", sys.stderr)


# what was submitted, in the user's own records: files of a run directory may be anybody's


class Recorded(NamedTuple):
    target: LoginSite
    remote_path: str  # of the run directory there
    python: str  # the interpreter there


def record_of(job: Job) -> Path:
    """The file of a job's record."""
    return records("jobs") / f"{job.name}.json"


def record(job: Job, target: LoginSite, remote_path: str, python: str) -> None:
    """Record a job with what is needed to reach it."""
    where = {"run": str(job.run), "remote_path": remote_path, "python": python}
    values = {**where, "target": target.model_dump(mode="json")}
    JobFolder(record_of(job).parent).write(record_of(job).name, values, mode=0o600)  # it has the site's variables


def recorded(job: Job) -> Recorded | None:
    """How a job is reached; None if it was not submitted on a login node."""
    kept = JobFolder(record_of(job).parent).read(record_of(job).name) or {}
    if not {"remote_path", "python", "target"} <= kept.keys():
        return None
    return Recorded(cast("LoginSite", restore_target(kept["target"])), str(kept["remote_path"]), str(kept["python"]))


def folder_of_run(run: Path, link: LoginLink) -> str | None:
    """The folder on the login node in which a run's last job has left it, if that was there."""
    for job in list_jobs():
        found = recorded(job) if job.run == run.resolve() else None
        if found and found.target.login.host == link.head and found.remote_path.startswith(f"{link.runs}/"):
            return str(Path(found.remote_path).parent)
    return None


def connect(job: Job) -> LoginLink:
    """A connection for a job that was submitted."""
    found = recorded(job)
    if found is None or job.facts.get("remote_path") != found.remote_path:
        raise FeverError(f"{job.run} is not as {job.name} left it: its job.json was changed")
    link = LoginLink(found.target, found.python)
    try:
        link.enter(str(Path(found.remote_path).parent))
    except BaseException:
        link.close()
        raise
    return link


# the life of a job


def noted_end(job: Job) -> tuple[str, str] | None:
    """The end of a job if it has been noted here; the login node need not be asked again."""
    ending = job.folder.read(EXIT)
    if ending is None:
        return None
    return ENDED, str(ending.get("reason") or f"exit code {job.code}")


def state(job: Job) -> tuple[str, str]:
    """QUEUED, RUNNING or ENDED, and a short reason."""
    if (ended := noted_end(job)) is not None:
        return ended
    try:
        with connect(job) as link:
            return link.observe(job, fresh=True)
    except FeverError as error:
        return RUNNING, f"{SILENT}: {error}"


def stop(job: Job, now: bool) -> str:
    """Have the fever there stop a job, and fetch what it saved."""
    with connect(job) as link:
        facts, there = job.facts, job.facts["remote_path"]
        said = link.ask({"do": "stop", "folder": there, "now": now}, STOP_SECONDS)["said"]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while link.observe(job, fresh=True)[0] != ENDED and time.monotonic() < deadline:
            time.sleep(1)
        link.sync(job)
    return str(said).replace(there, str(job.run)).replace(f"{facts['kind']}-{facts['id']}", job.name)


class LoginWatch(ClusterWatch):
    """Follows a job's state as its scheduler gives it; copies its files at every look."""

    connection: LoginLink | None = None

    def look(self) -> tuple[str, str]:
        if self.job.home and (ended := noted_end(self.job)) is not None:
            return ended
        self._refresh()
        return self.state, self.reason

    def look_once(self) -> None:
        """Ask for the state once, and then copy what is new: after the end, that is all of it."""
        self.connection = self.connection or connect(self.job)
        self.state, self.reason = self.connection.observe(self.job)
        self.connection.sync(self.job, whole=False)


def fetch(job: Job) -> None:
    """Copy what is new of a job's run directory."""
    if not job.home:
        watch = LoginWatch(job)
        try:
            watch.look_once()
        finally:
            watch.close()
