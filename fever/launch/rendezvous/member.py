"""One rank of a rendezvous: it announces itself, waits for the others, and leaves together with them.

Ranks exchange files in the job's folder. Rank 0 clears it, opens a meeting, waits for the others, and publishes a plan
that lists them; the others wait for a plan that lists them. Every rank draws a random number (nonce) that the plan
repeats, so files of an earlier attempt in the same folder, of a job that was killed and requeued, are recognised.

What all ranks together ask of the file server grows with their number, not faster: only rank 0 lists folders with a
file for every rank, and reads each file once; a rank announces itself once in a meeting, and reads its part of the plan
only.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fever.errors import FeverError
from fever.job import ALIVE, CONTINUED, EXIT, LEFT, MEETING, PLAN, PLANS, RANKS, STOP, JobFolder
from fever.launch.on_host import host
from fever.launch.rendezvous.launchers import BINDING, Rank, granted_cores, note_binding
from fever.launch.targets import Allocation, allocated_hosts

POLL_SECONDS = 0.1
SELDOM_SECONDS = 4.0  # the longest polling interval
PART = 64  # ranks in a part of the plan
BEAT_SECONDS = 2.0  # between two heartbeats of rank 0
LOST_SECONDS = 60.0  # without a heartbeat, after which the others give up; file servers may hang for a while
DISMISS_SECONDS = 10.0  # for a failed rank 0 to tell late ranks; the others wait this much longer for rank 0
LEAVE_SECONDS = 8.0  # for the last rank to clean up, before the others exit
SETTLE_SECONDS = 5.0  # without a new rank, after which all have arrived, if the launcher does not say how many
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Unwritable(FeverError):
    """The job's folder cannot be written to, so the other ranks cannot be told."""


class Lost(Exception):
    """This rank cannot continue, for the reason in the text."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class Member:
    """One rank of a rendezvous."""

    def __init__(self, folder: JobFolder, target: Allocation, rank: Rank, lifeline: int = -1) -> None:
        """`lifeline`: the reading end of a pipe that closes when this rank is to stop."""
        self.folder, self.target, self.rank = folder, target, rank
        self.host = socket.gethostname()
        self.nonce = secrets.token_hex(8)
        self.begin = time.monotonic()
        self.plan: dict[str, Any] = {}
        self.signalled = 0  # number of the last signal
        self.orphaned = False  # the lifeline closed: the launcher has killed this rank
        self.facts: dict[str, tuple[int, dict[str, Any]]] = {}  # file of a rank -> its inode number and content
        self.seen, self.seen_at = 0, 0.0  # ranks that have arrived, and when the last one did
        self.beats, self.beaten = 0, 0.0  # heartbeats, and when the last one was written
        self.announced = False
        self.meeting: str | None = None  # to which this rank has announced itself
        self.patient = False  # it waits for the job's end: poll the file server less often
        self.lifeline = lifeline
        self.wake, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in SIGNALS:
            signal.signal(number, self._note_signal)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def _note_signal(self, number: int, frame: Any) -> None:
        self.signalled = number

    @property
    def leads(self) -> bool:
        return self.rank.number == 0

    def log(self, text: str, loud: bool = False) -> None:
        """Write a line with time, rank and host to the host's log; if `loud`, and always in rank 0, also to stderr."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self.rank.number} {self.host}: {text}\n"
        own = self.folder.log_of(self.host)
        for path in (own, self.folder.log) if self.leads and not self.target.supervised else (own,):
            with suppress(OSError):  # without a scheduler, nobody else keeps what the launcher prints
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "a") as file:
                    file.write(line)
        if loud or self.leads:
            with suppress(OSError):
                sys.stderr.write(line)
                sys.stderr.flush()

    def elapsed(self) -> str:
        return f"{time.monotonic() - self.begin:.1f} s"

    # waiting

    def pause(self) -> None:
        """Sleep for a polling interval, shorter if a signal comes or the lifeline closes; rank 0 writes heartbeats."""
        if self.leads and time.monotonic() - self.beaten >= BEAT_SECONDS:
            self.beats, self.beaten = self.beats + 1, time.monotonic()
            with suppress(OSError):
                self.folder.write_text(ALIVE, f"{launch_name(self.rank)} {self.beats}")
        watched = [self.wake] + ([self.lifeline] if self.lifeline >= 0 else [])
        ready, _, _ = select.select(watched, [], [], self._interval())
        if self.wake in ready:
            os.read(self.wake, 512)
        if self.lifeline in ready:
            self.lifeline, self.orphaned = -1, True
            self.signalled = self.signalled or signal.SIGTERM

    def _interval(self) -> float:
        """Seconds until the next look: all ranks together look a thousand times a second. As long as nobody knows how
        many they are, a rank looks the less often the longer it has waited."""
        ranks = self.rank.size or self.plan.get("count")
        waited = time.monotonic() - self.begin
        wanted = waited / 20 if ranks is None else ranks / (200 if self.patient else 1000)
        return min(max(POLL_SECONDS, wanted), SELDOM_SECONDS)

    def until(self, condition: Callable[[], Any], what: Callable[[], str]) -> Any:
        """Wait until a condition is true and return its value. Raises FeverError(what()) when it takes too long, and
        Lost when this rank is told to stop."""
        seconds = self.target.connect_seconds
        deadline = time.monotonic() + seconds + (0 if self.leads else min(DISMISS_SECONDS, seconds))
        while not (found := condition()):
            stop = self.folder.read_text(STOP) if self.leads else None
            if self.signalled or stop:
                limit = stop == "limit" and self.folder.saved
                raise Lost("stopped before the training began", CONTINUED if limit else 130)
            if time.monotonic() > deadline:
                raise FeverError(what())
            self.pause()
        return found

    # rendezvous

    def describe(self) -> dict[str, Any]:
        """The facts about this rank that the others need."""
        allotted = os.environ.get("SLURM_CPUS_ON_NODE") if self.rank.launcher == "Slurm" else None
        cores = {
            "allotted": int(allotted) if allotted else None,
            "granted": granted_cores() if self.rank.launcher == "Slurm" else None,
        }
        return {**host.describe_host(), "nonce": self.nonce, **cores}

    def open_meeting(self, *keep: str) -> None:
        """Rank 0: clear the folder, except these files, and have those who are there announce themselves again."""
        self.folder.clear(*keep)
        self.folder.write_text(MEETING + self.nonce, "")

    def announce(self) -> None:
        with suppress(FileNotFoundError), writing(self.host, self.folder.path):
            # not found: rank 0 is clearing the folder right now; `_own_plan` tries again
            self.folder.write(f"{RANKS}/{self.rank.number}.json", self.describe())
            self.announced = True

    def gather(self, **more: Any) -> dict[int, dict[str, Any]]:
        """Rank 0: wait for all others and publish the plan, with further facts; returns the facts of every rank."""
        ranks = self.until(self.arrivals, self.missing)
        check_versions(ranks)
        self.publish(ranks, more)
        return ranks

    def join(self) -> dict[str, Any]:
        """The others: announce this rank and wait for a plan that lists it; returns this rank's part."""
        seconds = self.target.connect_seconds
        self.plan = self.until(
            self._own_plan, lambda: f"rank 0 did not appear in {self.folder.path} within {seconds:.0f} s; is it on a "
            "file system that all machines share?"
        )  # fmt: skip
        return self.plan

    def dismiss(self, code: int, reason: str = "") -> None:
        """Rank 0: publish the exit code for every rank; after an early failure, also for those that still arrive."""
        if not self.plan:
            deadline = self.begin + (0 if self.signalled else min(DISMISS_SECONDS, self.target.connect_seconds))
            while (ranks := self.arrivals()) is None and time.monotonic() < deadline:
                self.pause()
            self.publish(ranks or self._here(), {})
        self.folder.write(EXIT, {"plan": self.plan["id"], "code": code, "reason": reason})

    def own(self, name: str) -> dict[str, Any] | None:
        """A file of this rendezvous, not of an earlier attempt."""
        found = self.folder.read(name)
        return found if found is not None and found["plan"] == self.plan["id"] else None

    def leave(self) -> None:
        """Wait for a limited time until all have cleaned up: some launchers kill the others when one rank exits."""
        if not self.plan:
            (self.folder.path / RANKS / f"{self.rank.number}.json").unlink(missing_ok=True)
        elif str(self.rank.number) in self.plan["members"]:
            self.folder.write_text(f"{LEFT}/{self.rank.number}", "")
            deadline = time.monotonic() + LEAVE_SECONDS
            while self._others_here() and time.monotonic() < deadline:
                self.pause()

    def _others_here(self) -> bool:
        """Whether other ranks are still cleaning up. Rank 0 counts them; the others wait until the plan is gone."""
        if self.leads:
            return len(self.folder.names(LEFT)) < len(self.plan["members"])
        return PLAN in self.folder.names("")

    # rank 0's part

    def _here(self) -> dict[int, dict[str, Any]]:
        """The facts of the ranks that have arrived so far. Only files that are new are read."""
        files = self.folder.files(RANKS)
        fresh = [name for name, inode in files.items() if name not in self.facts or self.facts[name][0] != inode]
        for name, facts in zip(fresh, self.folder.read_all([f"{RANKS}/{name}" for name in fresh]), strict=True):
            if facts is not None:
                self.facts[name] = (files[name], facts)
        found = {int(Path(name).stem): self.facts[name] for name in files if name in self.facts}
        return {number: facts for number, (_, facts) in sorted(found.items())}

    def arrivals(self) -> dict[int, dict[str, Any]] | None:
        """The facts of all ranks once all have arrived, else None. If the launcher does not say how many there are, the
        target's minimum must have arrived, and no new one for a while."""
        least = self.rank.size or self.target.least_ranks
        if len(here := self._here()) < least:
            return None
        if len(here) != self.seen:
            self.seen, self.seen_at = len(here), time.monotonic()
        settled = self.rank.size or time.monotonic() - self.seen_at >= SETTLE_SECONDS
        return here if settled else None

    def missing(self) -> str:
        """A sentence about the ranks that did not arrive, with their hosts if the scheduler lists them."""
        here = self._here()
        missing = [str(number) for number in range(self.rank.size or 0) if number not in here]
        came = sorted({facts["host"] for facts in here.values()})
        hosts = absent_hosts(came)
        where = f" (no word from {', '.join(hosts)})" if hosts else ""
        words = "".join(f"; {name} said last: {said}" for name in hosts if (said := self.folder.last_words(name)))
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else "some ranks"
        return (
            f"{who} did not start in {self.target.connect_seconds:.0f} s{where}; only {', '.join(came)} did{words}; "
            f"check that {self.folder.path} is on a file system that all machines share"
        )

    def publish(self, ranks: dict[int, dict[str, Any]], more: dict[str, Any]) -> None:
        """Write the plan: one node of Ray per host, started by its lowest rank, with all cores of the host's ranks."""
        hosts: dict[str, list[dict[str, Any]]] = {}
        for number, facts in ranks.items():
            hosts.setdefault(facts["host"], []).append({**facts, "rank": number})
        nodes = {name: {"rank": here[0]["rank"], **self.cores(here)} for name, here in hosts.items()}
        members = {str(number): facts["nonce"] for number, facts in ranks.items()}
        common = {"id": self.nonce, "count": len(ranks), "leader": self.host, **more}
        for part in sorted({number // PART for number in ranks}):
            here = {number: facts for number, facts in ranks.items() if number // PART == part}
            own = {"members": {str(number): members[str(number)] for number in here}}
            own["nodes"] = {facts["host"]: nodes[facts["host"]] for facts in here.values()}
            self.folder.write(f"{PLANS}/{part}.json", {**common, **own})
        self.plan = {**common, "members": members, "nodes": nodes}
        self.folder.write(PLAN, self.plan)  # the last one: it says that the others are there

    def cores(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """The cores that a host's Ray may run on (`cpus`), and how many it offers (`cores`): those of the host's ranks,
        or all that the host allows if the launcher binds each rank to a few by default; and a sentence about ranks that
        are bound (`note`)."""
        bound, allowed = sorted({cpu for facts in ranks for cpu in facts["cpus"]}), ranks[0]["allowed_cpus"]
        cpus = allowed if self.rank.launcher in BINDING else bound
        allotted, wanted = ranks[0]["allotted"], self.target.cores_of(ranks[0]["rank"])
        most = min(allotted or len(cpus), len(cpus))
        available = min(ranks[0]["granted"] or len(allowed), wanted or len(allowed))
        note = note_binding(self.rank.launcher, bound, available, min(len(cpus), available))
        return {"cpus": cpus, "cores": most if wanted is None else min(wanted, allotted or wanted), "note": note}

    # the others' part

    def _own_plan(self) -> dict[str, Any] | None:
        """This rank's part of a plan that lists it, else None. Announces the rank, again if rank 0 has opened a meeting
        since."""
        names = self.folder.names("")
        meeting = next((name for name in names if name.startswith(MEETING)), None)
        if not self.announced or meeting not in (None, self.meeting):
            self.announced, self.meeting = False, meeting
            self.announce()
        if PLAN not in names:
            return None
        plan = self.folder.read(f"{PLANS}/{self.rank.number // PART}.json", listed=True)
        return plan if plan is not None and plan["members"].get(str(self.rank.number)) == self.nonce else None


def launch_name(rank: Rank) -> str:
    """The first word of a heartbeat, by which ranks recognise those of their own launch."""
    return rank.launch or "unnamed"


def refuse_occupied(folder: JobFolder, rank: Rank) -> None:
    """Refuse a folder in which another launch is running: the heartbeat of its rank 0 changes."""
    first = folder.read_text(ALIVE)
    deadline = time.monotonic() + 2 * BEAT_SECONDS
    while time.monotonic() < deadline:
        newest = folder.read_text(ALIVE)
        if newest is None or newest.split()[0] == launch_name(rank):  # rank 0 of this launch may have started already
            return
        if newest != first:
            raise FeverError(f"{folder.path.parent} is being trained by another job; choose another --name")
        time.sleep(POLL_SECONDS)


def check_versions(ranks: dict[int, dict[str, Any]]) -> None:
    """Refuse hosts whose Python or Ray is not the same as rank 0's."""
    wanted = ranks[0]["versions"]
    for facts in ranks.values():
        for name, has in facts["versions"].items():
            if has != wanted[name]:
                raise FeverError(
                    f"{facts['host']} has {name} {has}, but {ranks[0]['host']} has {wanted[name]}; "
                    "they must be the same on all machines"
                )


@contextmanager
def writing(host: str, place: Path) -> Iterator[None]:
    """Turn a full disk, or a folder without permission, into an error of one sentence."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unwritable(f"{host} cannot write into {place}: {error.strerror}") from error


def absent_hosts(arrived: Iterable[str]) -> list[str]:
    """The machines of this job on which no rank has started; schedulers and hosts may use longer names for the same."""
    return sorted(set(allocated_hosts()) - {name.split(".")[0] for name in arrived})
