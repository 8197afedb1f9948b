"""Large launches by simulation: how long many ranks take to meet, and what they ask of the shared file system.

    python benchmarks/rendezvous.py 64 512 2048 --latency 5

Every rank is a thread that runs the real rendezvous (`fever.launch.rendezvous.member`), each on a host of its own,
without Ray. Every operation on the job's folder (open, list, make, rename, remove) takes `--latency` more milliseconds,
as on a shared file system. All ranks share the cores of this machine: at a site, where each has its own, it is faster.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fever.job import CONNECTED, HEAD, JobFolder
from fever.launch.rendezvous.launchers import Rank
from fever.launch.rendezvous.member import SIGNALS, Member
from fever.launch.rendezvous.mpi import Mpi

OPERATIONS = {  # audit event -> what it is called here
    "open": "opened", "os.listdir": "listed", "os.scandir": "listed", "os.mkdir": "made", "os.rename": "renamed",
    "os.remove": "removed", "os.rmdir": "removed",
}  # fmt: skip


SILENT, _ = os.pipe()
FACTS: dict[str, Any] = {}
SHARE = 128  # ranks in a process
Outcome = tuple[list[float], Counter[str]]  # when the last of some ranks had met, joined and left; what they did


class Storage:
    """Counts this process's operations on a folder, and delays each."""

    def __init__(self, folder: Path, latency: float) -> None:
        self.folder, self.latency = str(folder), latency
        self.counts: Counter[str] = Counter()
        self.inside = threading.local()
        self.lock = threading.Lock()
        sys.addaudithook(self.note)

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Called by Python at every operation, in the thread that asks for it."""
        if event not in OPERATIONS or getattr(self.inside, "noting", False):
            return
        path = str(arguments[0])
        if not path.startswith(self.folder):
            return
        self.inside.noting = True
        try:
            time.sleep(self.latency)
            with self.lock:
                self.counts[OPERATIONS[event]] += 1
            if OPERATIONS[event] == "listed":
                entries = len(os.listdir(path)) if os.path.isdir(path) else 0
                with self.lock:
                    self.counts["entries"] += entries
            elif event == "open":
                size = os.stat(path).st_size if os.path.exists(path) else 0
                with self.lock:
                    self.counts["bytes"] += size
        finally:
            self.inside.noting = False


class SimulatedRank(Member):
    """One rank on a host of its own."""

    def __init__(self, folder: JobFolder, rank: Rank, per_host: int) -> None:
        super().__init__(folder, Mpi(connect_seconds=300.0), rank)
        self.host = f"node{rank.number // per_host:05d}"
        os.close(self.wake)  # threads get no signals: one pipe is enough for all
        os.close(signal.set_wakeup_fd(-1))
        self.wake = SILENT
        self.met = self.headed = self.left = 0.0

    def describe(self) -> dict[str, Any]:
        """What every host finds out about itself, at a site with cores of its own: here once for all."""
        if not FACTS:
            FACTS.update(super().describe())
        return {**FACTS, "host": self.host, "nonce": self.nonce}

    def log(self, text: str, loud: bool = False) -> None:
        """Hosts write their logs alone: no other rank reads them."""

    def take_part(self) -> None:
        """What a rank does, without Ray: meet, learn the head's address, say that it has joined, leave."""
        if self.leads:
            self.open_meeting()
            self.announce()
            self.gather()
            self.met = time.monotonic()
            self.folder.write(HEAD, {"plan": self.plan["id"], "address": "none"})
            hosts = len(self.plan["nodes"])
            self.until(lambda: len(self.folder.names(CONNECTED)) >= hosts - 1, lambda: "hosts are missing")
            self.headed = time.monotonic()
            self.dismiss(0)
        else:
            node = self.join()["nodes"][self.host]
            self.met = time.monotonic()
            if node["rank"] == self.rank.number:
                self.until(lambda: self.own(HEAD), lambda: "no head")
                self.folder.write(f"{CONNECTED}/{self.host}.json", {"seconds": 0.0})
            self.headed = time.monotonic()
            self.until(lambda: self.own("exit.json"), lambda: "no end")
        self.leave()
        if self.leads:
            self.folder.tidy()
        self.left = time.monotonic()


def run_share(folder: Path, numbers: range, ranks: int, options: argparse.Namespace) -> Outcome:
    """Run some of the ranks as threads of this process."""
    launch = [Rank("PMI", number, ranks, "one") for number in numbers]
    members = [SimulatedRank(JobFolder(folder / "job"), rank, options.per_host) for rank in launch]
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    members[0].describe()
    threads = [threading.Thread(target=one.take_part) for one in members]
    storage = Storage(folder, options.latency / 1000)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [max(getattr(one, name) for one in members) for name in ("met", "headed", "left")], storage.counts


def simulate(ranks: int, options: argparse.Namespace) -> None:
    """Launch so many ranks at once, rank 0 in a process of its own, and print a row."""
    folder = Path(tempfile.mkdtemp(prefix="fever-rendezvous-"))
    shares = [range(1), *(range(first, min(first + SHARE, ranks)) for first in range(1, ranks, SHARE))]
    began = time.monotonic()
    with multiprocessing.get_context("fork").Pool(len(shares)) as pool:
        outcomes = pool.starmap(run_share, [(folder, share, ranks, options) for share in shares], chunksize=1)
    seen = sum((counts for _, counts in outcomes), Counter())
    met, joined, left = (max(times) - began for times in zip(*(times for times, _ in outcomes), strict=True))
    operations = sum(count for name, count in seen.items() if name not in ("entries", "bytes"))
    cells = [ranks, f"{met:.1f}", f"{joined:.1f}", f"{left:.1f}", f"{operations / ranks:.1f}"]
    cells += [f"{seen[name] / ranks:.1f}" for name in ("listed", "entries", "opened")]
    cells.append(f"{seen['bytes'] / ranks / 1000:.1f}")
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="*", default=[64, 512, 2048])
    parser.add_argument("--latency", type=float, default=5.0, help="milliseconds of an operation")
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    options = parser.parse_args()
    names = ["ranks", "met (s)", "joined (s)", "left (s)", "operations per rank", "listings", "entries listed"]
    names += ["files opened", "kB read"]
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for ranks in options.ranks:
        simulate(ranks, options)


if __name__ == "__main__":
    main()
