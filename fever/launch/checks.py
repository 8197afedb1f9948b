"""`fever doctor --on ...`: problems that would keep a job's machines from working together, one line each.

Every rank describes its host, then tries to resolve and to reach every other host; rank 0 prints what was found.
Inside a Slurm allocation `srun` starts the ranks. Outside of an allocation only the scheduler itself is examined.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from fever.errors import FeverError
from fever.job import EXIT, RANKS, JobFolder
from fever.launch.doctor import Finding
from fever.launch.on_host import host
from fever.launch.rendezvous.launchers import Rank
from fever.launch.rendezvous.member import Lost, Member, Unwritable, absent_hosts, writing
from fever.launch.targets import Allocation, load_target
from fever.scratch import scratch_folder

CONNECT_SECONDS = 3.0  # for a port of another host to answer
CLOCK_SECONDS = 2.0  # the most by which clocks may differ
MEET_SECONDS = 60.0  # for all ranks to arrive
LIMITS = {"files": 1024, "processes": 1024}  # ulimits below these are too low for Ray


def examine_target(on: str, runs: Path) -> list[Finding]:
    """All findings about a target; empty in ranks other than 0."""
    return load_target(on, {}).examine(on, runs)


def examine_folder(runs: Path) -> Finding:
    """Whether the folder of run directories has room and can be written to."""
    folder = next(path for path in (runs, *runs.parents) if path.exists())
    free = shutil.disk_usage(folder).free / 2**30
    writable = os.access(folder, os.W_OK)
    return Finding("ok" if writable and free > 2 else "problem", "runs", f"{folder}: {free:.1f} GiB free" + (
        "" if writable else ", but it cannot be written to"))  # fmt: skip


def examine_ranks(target: Allocation, rank: Rank, runs: Path) -> list[Finding]:
    """Examine all hosts and the network between them, together with the other ranks; empty in ranks other than 0."""
    seconds = min(target.connect_seconds, MEET_SECONDS)
    folder = JobFolder(runs / f".doctor-{rank.launch or 'ranks'}")
    examiner = Examiner(folder, target.model_copy(update={"connect_seconds": seconds}), rank)
    try:
        findings = examiner.run()
    except (FeverError, Lost) as error:
        findings = [Finding("problem", "rendezvous", f"{examiner.host}: {error}")]
        if isinstance(error, Unwritable):
            return findings
        if examiner.leads:
            examiner.dismiss(1, str(error))
    examiner.leave()
    if examiner.leads:
        shutil.rmtree(folder.path, ignore_errors=True)
        with suppress(OSError):
            runs.rmdir()  # if it was made for this
    return findings


class Examiner(Member):
    """One rank that examines its host, and the connections from it to the others."""

    def run(self) -> list[Finding]:
        with socket.create_server((host.own_address(self.target.interface), 0)) as server:
            self.address = server.getsockname()[:2]
            threading.Thread(target=_answer, args=(server,), daemon=True).start()
            if not self.leads:
                plan = self.join()
                self.folder.write(f"views/{self.rank.number}.json", {"plan": plan["id"], **self.look(plan)})
                self.until(lambda: self.own(EXIT), lambda: "rank 0 published no findings")
                return []
            with writing(self.host, self.folder.path):
                self.open_meeting()
                self.announce()
            ranks = self.until(self.arrivals, self.missing)
            self.publish(ranks, {"addresses": {facts["host"]: facts["address"] for facts in ranks.values()}})
            views = [self.look(self.plan), *(self._view(number) for number in ranks if number)]
            offsets = {number: facts["clock"] - self._written(number) for number, facts in ranks.items()}
            self.dismiss(0)
            return [*report(ranks, views, offsets, self.folder.path), *self.bound()]

    def describe(self) -> dict[str, Any]:
        limits = {"files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC}
        most = {name: resource.getrlimit(which)[0] for name, which in limits.items()}
        traps = [name for name in (*self.target.unset, "RAY_ADDRESS") if os.environ.get(name)]
        scratch = scratch_folder(self.target.scratch)
        writable = os.access(scratch, os.W_OK) and shutil.disk_usage(scratch).free > 2**30
        shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
        more = {"address": self.address, "limits": most, "traps": traps, "scratch": writable, "shm": shared}
        return {**super().describe(), **more}

    def look(self, plan: dict[str, Any]) -> dict[str, Any]:
        """The other hosts whose names this host cannot resolve, and those that do not answer it."""
        others = {name: tuple(address) for name, address in plan["addresses"].items() if name != self.host}
        nameless = [name for name in others if not _resolves(name)]
        silent = [name for name, address in others.items() if not _reaches(address)]
        return {"host": self.host, "nameless": nameless, "silent": silent}

    def bound(self) -> list[Finding]:
        """Hosts on which the launcher has bound the ranks to few cores; one finding for all with the same sentence."""
        hosts: dict[str, list[str]] = {}
        for name, node in self.plan["nodes"].items():
            if node["note"]:
                hosts.setdefault(node["note"], []).append(name)
        return [Finding("note", "binding", f"{', '.join(names)}: {note}") for note, names in hosts.items()]

    def _view(self, number: int) -> dict[str, Any]:
        return self.until(lambda: self.own(f"views/{number}.json"), lambda: f"rank {number} published no findings")

    def _written(self, number: int) -> float:
        """When a rank announced itself, by the file server's clock."""
        return (self.folder.path / RANKS / f"{number}.json").stat().st_mtime


def _answer(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            server.accept()[0].close()


def _resolves(name: str) -> bool:
    try:
        return bool(socket.gethostbyname(name))
    except OSError:
        return False


def _reaches(address: tuple[Any, ...]) -> bool:
    try:
        with socket.create_connection((address[0], address[1]), timeout=CONNECT_SECONDS):
            return True
    except OSError:
        return False


def report(
    ranks: dict[int, dict[str, Any]], views: list[dict[str, Any]], offsets: dict[int, float], folder: Path
) -> list[Finding]:
    """What rank 0 prints: one finding per topic; a problem names its hosts.

    `ranks`: the facts of every rank; `views`: the result of `look` of every rank; `offsets`: seconds by which the clock
    of a rank is ahead of the file server's.
    """
    first = {facts["host"]: facts for _, facts in sorted(ranks.items(), reverse=True)}
    absent = absent_hosts(first)
    late = {ranks[number]["host"]: offset - offsets[0] for number, offset in offsets.items()}
    few = {
        name: [f"{host}: {most}" for host, facts in first.items() if 0 <= (most := facts["limits"][name]) < least]
        for name, least in LIMITS.items()
    }
    return [
        Finding("ok", "ranks", f"{len(ranks)} on {', '.join(sorted(first))}; all see {folder.parent}"),
        Finding("ok", "cores", ", ".join(f"{name} {len(facts['cpus'])}" for name, facts in sorted(first.items()))),
        _line("hosts", "of the allocation have no rank", "all of the allocation", absent, note=True),
        *[
            _line(name, f"differs from {ranks[0]['host']}'s {wanted}", wanted, _other(first, name, wanted))
            for name, wanted in ranks[0]["versions"].items()
        ],
        _line("names", "is unknown", "every host knows the others", _pairs(views, "nameless")),
        _line("ports", "does not answer", "every host reaches the others", _pairs(views, "silent")),
        _line("clock", "", "together", [
            f"{name} is off by {seconds:+.1f} s" for name, seconds in late.items() if abs(seconds) > CLOCK_SECONDS
        ], note=True),
        _line("open files", "allowed; Ray wants more: ulimit -n 4096", "enough", few["files"]),
        _line("processes", "allowed; Ray wants more: ulimit -u 4096", "enough", few["processes"], note=True),
        _line("variables", "(unset for Ray and the training)", "none of those that disturb Ray", [
            f"{name} has {', '.join(facts['traps'])}" for name, facts in first.items() if facts["traps"]
        ], note=True),
        _line("scratch", "cannot be used or is full", "there is room", [
            name for name, facts in first.items() if not facts["scratch"]
        ]),
        _line("/dev/shm", "is under 1 GiB; Ray's object store is small", "there is room", [
            name for name, facts in first.items() if facts["shm"] < 2**30
        ], note=True),
    ]  # fmt: skip


def _line(topic: str, bad: str, good: str, found: list[str], note: bool = False) -> Finding:
    if not found:
        return Finding("ok", topic, good)
    return Finding("note" if note else "problem", topic, f"{', '.join(found)} {bad}".strip())


def _other(first: dict[str, dict[str, Any]], name: str, wanted: str) -> list[str]:
    return [f"{host}: {facts['versions'][name]}" for host, facts in first.items() if facts["versions"][name] != wanted]


def _pairs(views: list[dict[str, Any]], kind: str) -> list[str]:
    """`node2 from node1`, for every host that cannot be seen from another."""
    return sorted({f"{other} from {view['host']}" for view in views for other in view[kind]})
