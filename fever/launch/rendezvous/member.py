"""One rank among those that meet: announcing itself, waiting for the others, leaving together.

Rank 0 clears the meeting place, waits for the others, and answers them with a plan that names them; the others wait for
a plan that does. Everybody knows by a number drawn for this meeting who belongs to it, so files of an earlier meeting
in the same folder, of a job that was killed and requeued, mislead nobody.
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
from fever.job import ALIVE, CONTINUED, EXIT, LEFT, PLAN, RANKS, STOP, JobFolder
from fever.launch.on_host import host
from fever.launch.rendezvous.launchers import BINDING, Rank
from fever.launch.targets import Allocation, allocated_hosts

POLL_SECONDS = 0.1
AGAIN_SECONDS = 1.0  # between two announcements of a rank that has had no answer
BEAT_SECONDS = 2.0  # between two signs of life of rank 0
LOST_SECONDS = 60.0  # without one, after which the others give up; file servers may be away for a while
DISMISS_SECONDS = 10.0  # from the beginning, for ranks to come and hear that it failed; they wait as much longer
LEAVE_SECONDS = 8.0  # for the last rank to clean up, before the others leave without it
SETTLE_SECONDS = 5.0  # without a new rank, after which all have come, where the launcher does not say how many
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Unwritable(FeverError):
    """The meeting place cannot be written to: nobody can be told anything there."""


class Lost(Exception):
    """This rank cannot go on; its text says why."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class Member:
    """One rank of a meeting."""

    def __init__(self, folder: JobFolder, target: Allocation, rank: Rank, lifeline: int = -1) -> None:
        """`lifeline`: the reading end of a pipe that closes when this rank is to stop."""
        self.folder, self.target, self.rank = folder, target, rank
        self.host = socket.gethostname()
        self.nonce = secrets.token_hex(8)
        self.begin = time.monotonic()
        self.plan: dict[str, Any] = {}
        self.signalled = 0  # the last signal
        self.orphaned = False  # the lifeline broke
        self.seen, self.seen_at = 0, 0.0  # ranks, and since when there are no more
        self.beats, self.beaten = 0, 0.0  # signs of life, and when the last one was given
        self.announced = 0.0
        self.patient = False  # waits for the end: asks the file server less often
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
        """One line with time, rank and host, in the host's log; from rank 0 or when it matters also on stderr."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self.rank.number} {self.host}: {text}\n"
        own = self.folder.log_of(self.host)
        for path in (own, self.folder.log) if self.leads and not self.target.supervised else (own,):
            with suppress(OSError):  # what launchers of ranks print is kept by nobody else
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
        """A moment, shorter if a signal comes or the lifeline breaks."""
        if self.leads and time.monotonic() - self.beaten >= BEAT_SECONDS:
            self.beats, self.beaten = self.beats + 1, time.monotonic()
            with suppress(OSError):
                self.folder.write_text(ALIVE, f"{sign_of(self.rank)} {self.beats}")
        ranks = self.rank.size or len(self.plan.get("members", ()))
        interval = max(POLL_SECONDS, ranks / (200 if self.patient else 1000))
        watched = [self.wake] + ([self.lifeline] if self.lifeline >= 0 else [])
        ready, _, _ = select.select(watched, [], [], interval)
        if self.wake in ready:
            os.read(self.wake, 512)
        if self.lifeline in ready:
            self.lifeline, self.orphaned = -1, True
            self.signalled = self.signalled or signal.SIGTERM

    def until(self, condition: Callable[[], Any], what: Callable[[], str]) -> Any:
        """Wait for something; raises when it takes too long, or when this rank is told to stop."""
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

    # meeting

    def describe(self) -> dict[str, Any]:
        """What the others need to know of this rank."""
        allotted = os.environ.get("SLURM_CPUS_ON_NODE") if self.rank.launcher == "Slurm" else None
        return {**host.describe_host(), "nonce": self.nonce, "allotted": int(allotted) if allotted else None}

    def announce(self) -> None:
        self.announced = time.monotonic()
        with suppress(FileNotFoundError), writing(self.host, self.folder.path):
            # not found: rank 0 clears the place right now; `_own_plan` announces again
            self.folder.write(f"{RANKS}/{self.rank.number}.json", self.describe())

    def gather(self, **more: Any) -> dict[int, dict[str, Any]]:
        """Rank 0: wait for all others and publish the plan, with these further facts; returns who they are."""
        ranks = self.until(self.arrivals, self.missing)
        check_versions(ranks)
        self.publish(ranks, more)
        return ranks

    def join(self) -> dict[str, Any]:
        """The others: announce this rank and wait for a plan that has it."""
        self.announce()
        seconds = self.target.connect_seconds
        self.plan = self.until(
            self._own_plan, lambda: f"rank 0 did not come to {self.folder.path} within {seconds:.0f} s; is it on a "
            "file system that all machines share?"
        )  # fmt: skip
        return self.plan

    def dismiss(self, code: int, reason: str = "") -> None:
        """Rank 0: tell every rank how it ended; those, too, that come in the next moments if it failed early."""
        if not self.plan:
            deadline = self.begin + (0 if self.signalled else min(DISMISS_SECONDS, self.target.connect_seconds))
            while (ranks := self.arrivals()) is None and time.monotonic() < deadline:
                self.pause()
            self.publish(ranks or self._here(), {})
        self.folder.write(EXIT, {"plan": self.plan["id"], "code": code, "reason": reason})

    def own(self, name: str) -> dict[str, Any] | None:
        """A file of this meeting, not of an earlier one."""
        found = self.folder.read(name)
        return found if found is not None and found["plan"] == self.plan["id"] else None

    def leave(self) -> None:
        """Wait until all have cleaned up, but not for ever: some launchers kill the rest when the first one goes."""
        if not self.plan:
            (self.folder.path / RANKS / f"{self.rank.number}.json").unlink(missing_ok=True)
        elif str(self.rank.number) in self.plan["members"]:
            self.folder.write_text(f"{LEFT}/{self.rank.number}", "")
            deadline = time.monotonic() + LEAVE_SECONDS
            while self._others_here() and time.monotonic() < deadline:
                self.pause()

    def _others_here(self) -> bool:
        """Whether somebody still cleans up. Rank 0 counts; for the others all have left when it has tidied up."""
        if self.leads:
            return len(self.folder.names(LEFT)) < len(self.plan["members"])
        return self.folder.read_text(PLAN) is not None

    # rank 0's part

    def _here(self) -> dict[int, dict[str, Any]]:
        """Who has come so far."""
        ranks = {int(Path(name).stem): self.folder.read(f"{RANKS}/{name}") for name in self.folder.names(RANKS)}
        return {number: facts for number, facts in sorted(ranks.items()) if facts is not None}

    def arrivals(self) -> dict[int, dict[str, Any]] | None:
        """Who all ranks are, once they have come; where nobody says how many there are, at least one per machine."""
        least = self.rank.size or self.target.least_ranks
        if len(self.folder.names(RANKS)) < least or len(here := self._here()) < least:
            return None  # one that is just announcing itself again cannot be read
        if len(here) != self.seen:
            self.seen, self.seen_at = len(here), time.monotonic()
        settled = self.rank.size or time.monotonic() - self.seen_at >= SETTLE_SECONDS
        return here if settled else None

    def missing(self) -> str:
        """Which ranks and hosts have not come, as far as the scheduler says who they are."""
        here = self._here()
        missing = [str(number) for number in range(self.rank.size or 0) if number not in here]
        came = sorted({facts["host"] for facts in here.values()})
        hosts = absent_hosts(came)
        where = f" (no word from {', '.join(hosts)})" if hosts else ""
        words = "".join(f"; {name} said last: {said}" for name in hosts if (said := self.folder.last_words(name)))
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else "some ranks"
        return (
            f"{who} did not come within {self.target.connect_seconds:.0f} s{where}; here are {', '.join(came)}{words}. "
            f"Is {self.folder.path} on a file system that all machines share?"
        )

    def publish(self, ranks: dict[int, dict[str, Any]], more: dict[str, Any]) -> None:
        """The plan: one node per host, for its lowest rank, with all cores that the host's ranks may use."""
        hosts: dict[str, list[dict[str, Any]]] = {}
        for number, facts in ranks.items():
            hosts.setdefault(facts["host"], []).append({**facts, "rank": number})
        nodes = {name: {"rank": here[0]["rank"], **self.cores(here)} for name, here in hosts.items()}
        members = {str(number): facts["nonce"] for number, facts in ranks.items()}
        self.plan = {"id": secrets.token_hex(8), "members": members, "nodes": nodes, **more}
        self.folder.write(PLAN, self.plan)

    def cores(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """The cores that a host's Ray may run on, and how many it offers: those of its ranks, or all if the launcher
        bound each rank to a few by itself."""
        cpus = sorted({cpu for facts in ranks for cpu in facts["cpus"]})
        if self.rank.launcher in BINDING:
            cpus = ranks[0]["allowed_cpus"]
        allotted, wanted = ranks[0]["allotted"], self.target.cores_of(ranks[0]["rank"])
        most = min(allotted or len(cpus), len(cpus))
        return {"cpus": cpus, "cores": most if wanted is None else min(wanted, allotted or wanted)}

    # the others' part

    def _own_plan(self) -> dict[str, Any] | None:
        """The plan, if it is of this meeting; announces this rank again if rank 0 cleared the place after it came."""
        plan = self.folder.read(PLAN)
        if plan is not None and plan["members"].get(str(self.rank.number)) == self.nonce:
            return plan
        if time.monotonic() - self.announced > AGAIN_SECONDS:
            self.announce()
        return None


def sign_of(rank: Rank) -> str:
    """By which the ranks of one launch know their own sign of life from another launch's."""
    return rank.launch or "unnamed"


def refuse_occupied(folder: JobFolder, rank: Rank) -> None:
    """Leave a place alone where another launch is meeting right now: its rank 0 gives signs of life."""
    first = folder.read_text(ALIVE)
    deadline = time.monotonic() + 2 * BEAT_SECONDS
    while time.monotonic() < deadline:
        newest = folder.read_text(ALIVE)
        if newest is None or newest.split()[0] == sign_of(rank):  # rank 0 of this launch may be there already
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
    """A disk that is full, or a folder that may not be written to, becomes a sentence."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unwritable(f"{host} cannot write into {place}: {error.strerror}") from error


def absent_hosts(arrived: Iterable[str]) -> list[str]:
    """The machines of this job on which no rank has started; schedulers and hosts may use longer names for the same."""
    return sorted(set(allocated_hosts()) - {name.split(".")[0] for name in arrived})
