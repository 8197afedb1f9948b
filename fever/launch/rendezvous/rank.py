"""What every rank of a job runs, whichever launcher has started it.

    rank 0: clear the job's folder, wait for the others, publish the plan, start Ray's head and publish its address,
            run the driver, publish its exit code
    lowest rank of every other host: announce itself, wait for plan and head, start Ray, wait for the exit code
    further ranks on a host: wait for the exit code
    all: stop their own Ray, remove their temporary folder, wait until all have done so, exit with that code

A rank is two processes. The outer one is the launcher's child. The inner one, `RankProcess`, does the work in a session
of its own, so that it survives launchers that kill ranks within a second: it saves and cleans up when the outer process
is signalled or dies.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

from fever import layout, system
from fever.envs.local_folder import LOCAL
from fever.errors import FeverError
from fever.job import (
    ALIVE,
    BREAKDOWN,
    CONNECTED,
    CONTINUED,
    EXIT,
    HEAD,
    JOB,
    LEFT,
    RECORD,
    RUN,
    STARTED,
    STOP,
    JobFolder,
)
from fever.launch.on_host import host
from fever.launch.rendezvous.breakdown import Moments, breakdown
from fever.launch.rendezvous.launchers import Rank, find_rank, without_launcher
from fever.launch.rendezvous.member import (
    BEAT_SECONDS,
    LEAVE_SECONDS,
    LOST_SECONDS,
    POLL_SECONDS,
    SIGNALS,
    Lost,
    Member,
    Unwritable,
    refuse_occupied,
    writing,
)
from fever.launch.targets import Allocation, restore_target
from fever.sampling.ray_settings import MPI_SETTINGS, PRIVATE_SETTINGS, RAY_SETTINGS
from fever.scratch import Scratch
from fever.signals import OUTLIVED
from fever.text import say

SEE_SECONDS = 10.0  # for the files of the submitting host to become visible
SAVE_SECONDS = 60.0  # for a driver to save that was told to stop
CANCEL_SECONDS = 20.0  # the same, if a scheduler cancels: most give half a minute before they kill everything
RAY_EXITED_SECONDS = 10.0  # without a heartbeat of rank 0, in a rank whose Ray has exited
NOTICE_SECONDS = 3600.0  # for a scheduler to notice that a machine died; Slurm's default is 300 (SlurmdTimeout)
ASK_SECONDS = 10.0  # between two questions to it
ORPHAN_SECONDS = 5.0  # for the driver's exit code, in a rank that was killed, perhaps alone
RAY = {
    **RAY_SETTINGS,
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # no work is moved to other nodes when a job ends
    "RAY_health_check_initial_delay_ms": "0",  # a dead machine is noticed after a few seconds instead of 13,
    "RAY_health_check_period_ms": "1000",  # but one that is starved of CPU for a moment is not taken for dead
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
}


def run_rank(
    folder: JobFolder,
    target: Allocation,
    rank: Rank,
    prepare: Callable[[], None] = lambda: None,
    keep_stop: bool = False,
) -> int:
    """Take part in a job as one rank; returns the exit code. Call it before this process has threads.

    Rank 0 calls `prepare` once the folder is its own; a FeverError that it raises ends all ranks. `keep_stop`: the job
    may have been told to stop already.
    """
    refuse_occupied(folder, rank)
    lifeline, held = os.pipe()
    inner = os.fork()
    if inner == 0:
        code = 1
        try:
            os.setsid()
            os.close(held)
            code = RankProcess(folder, target, rank, lifeline, prepare, keep_stop).run()
        finally:
            os._exit(code)
    os.close(lifeline)

    def forward(number: int, frame: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(inner, number)

    for number in SIGNALS:
        signal.signal(number, forward)
    return system.exit_code(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]))


class RankProcess(Member):
    """The inner process of one rank: runs its host's node of Ray, and in rank 0 the driver."""

    def __init__(
        self,
        folder: JobFolder,
        target: Allocation,
        rank: Rank,
        lifeline: int,
        prepare: Callable[[], None],
        keep_stop: bool,
    ) -> None:
        super().__init__(folder, target, rank, lifeline)
        self.ship = target.ship
        self.supervised, self.lead = target.supervised, target.lead
        self.prepare, self.keep_stop = prepare, keep_stop
        self.scratch: Scratch | None = None
        self.ray: subprocess.Popen[bytes] | None = None
        self.driver: subprocess.Popen[bytes] | None = None
        self.born = time.time()
        self.printing: list[threading.Thread] = []  # copy the driver's output
        self.connected = False  # this host's Ray has joined
        self.ray_exited = False  # this host's Ray has exited, perhaps because the head has
        self.driver_began = 0.0  # when the driver was started
        self.joined: float | None = None  # when all hosts had joined Ray, as far as rank 0 has seen it
        self.ended = 0.0  # when the driver ended
        self.ending: dict[str, Any] | None = None  # the exit.json of an earlier job in this folder
        self.refused = False  # `prepare` refused this job
        self.leader_lost = False  # rank 0 writes no heartbeats any more

    def run(self) -> int:
        """Do everything from arriving to leaving; returns the driver's exit code."""
        system.adopt_orphans()
        code, reason, told = 1, "", True
        try:
            code = self._lead() if self.leads else self._follow()
        except (FeverError, Lost) as error:
            told = not isinstance(error, Unwritable)
            code, reason = error.code if isinstance(error, Lost) else 2, str(error)
        except Exception:  # noqa: BLE001 - whatever it is, the others must not wait for this rank
            reason = traceback.format_exc()
        self.patient = False
        if reason:
            self.log(reason, loud=True)
        steps = [self._clean_up]
        if told:
            steps = [lambda: self.dismiss(code, reason)] if reason and self.leads else []
            steps += [self._clean_up, self.leave]
            own = [self._account, self.folder.tidy, self._put_back] if self.leads else [self._tidy_for_rank_0]
            steps += [*own, self._end_job]
        for step in steps:
            try:
                step()
            except Exception:  # noqa: BLE001 - the next step matters no less
                self.log(traceback.format_exc(), loud=True)
        return code

    def _put_back(self) -> None:
        """Restore the exit.json of an earlier job in this folder if this one was refused before it began."""
        if not self.refused:
            return
        if self.ending is not None:
            self.folder.write(EXIT, self.ending)
        else:
            (self.folder.path / EXIT).unlink(missing_ok=True)

    def _tidy_for_rank_0(self) -> None:
        """Remove the token and other files if rank 0 cannot, because its machine died: there are no heartbeats."""
        if not self.plan or not (self.leader_lost or self.orphaned):
            return
        beat, deadline = self.folder.read_text(ALIVE), time.monotonic() + RAY_EXITED_SECONDS
        while self.folder.meeting == self.plan["id"]:
            if self.folder.read_text(ALIVE) != beat:
                return
            if time.monotonic() > deadline:
                self.folder.tidy()
            self.pause()

    def _end_job(self) -> None:
        """End the job if rank 0 cannot, and the scheduler does not: its machine died, and the job's script with it."""
        if not self.leader_lost:
            return
        beat, deadline = self.folder.read_text(ALIVE), time.monotonic() + NOTICE_SECONDS
        asked = -math.inf
        while not self.signalled and time.monotonic() < deadline and self.folder.read_text(ALIVE) == beat:
            if time.monotonic() - asked > ASK_SECONDS:
                asked = time.monotonic()
                with suppress(FeverError):  # it is asked again
                    if self.target.end_without(self.plan["leader"]):
                        return
            self.pause()

    # rank 0

    def _lead(self) -> int:
        self.ending = self.folder.read(EXIT)
        self.refused = True
        with writing(self.host, self.folder.path):
            self.open_meeting(STOP if self.keep_stop else "")
            self.folder.write_token()
            self.announce()
            self.prepare()
        self.refused = False
        self.log(f"rendezvous in {self.folder.path}" + (f", {self.rank.size} ranks" if self.rank.size else ""))
        own = host.own_address(self.target.interface)
        self.gather(ship=self.ship, connect_seconds=self.target.connect_seconds)
        self._start_ray(own, self.plan["nodes"][self.host])
        address = self.until(self._ray_address, lambda: f"Ray's head did not start: {self._last_words()}")
        self._note_connection(f"Ray's head is at {address}; {len(self.plan['nodes'])} hosts")
        self.folder.write(HEAD, {"plan": self.plan["id"], "address": address})
        self.driver_began = time.monotonic()
        self.driver = self._start_driver()
        code = self._drive(self.driver)
        self.dismiss(code)
        return code

    def _start_driver(self) -> subprocess.Popen[bytes]:
        """Start the training in a process of its own; a run that has a checkpoint is resumed."""
        folder = self.folder.path
        words = ["resume", str(folder.parent)] if self.folder.saved else ["train", "-f", str(folder / RUN)]
        words += (self.folder.read(RECORD) or {}).get("flags", [])
        self.log(f"driver: fever {' '.join(words)}")
        environ = {**self._environment(), JOB: str(folder)}
        pipe = None if self.supervised else subprocess.PIPE  # schedulers keep what their jobs print
        driver = system.start([sys.executable, "-m", "fever", *words], environ, stdout=pipe, stderr=pipe)
        for lines, stream in ((driver.stdout, sys.stdout), (driver.stderr, sys.stderr)) if pipe else ():
            self.printing.append(threading.Thread(target=self._print, args=(lines, stream), daemon=True))
            self.printing[-1].start()
        return driver

    def _print(self, lines: IO[bytes], stream: TextIO) -> None:
        """Copy what the driver prints to the terminal and to the job's log."""
        with open(self.folder.log, "ab", buffering=0) as log:
            for line in lines:
                log.write(line)
                with suppress(OSError):
                    stream.buffer.write(line)
                    stream.flush()

    def _drive(self, driver: subprocess.Popen[bytes]) -> int:
        """Wait for the driver, and pass on requests to stop; returns its exit code."""
        deadline, limit, late = float("inf"), False, False
        while driver.poll() is None:
            if self.joined is None and len(self.folder.names(CONNECTED)) == len(self.plan["nodes"]):
                self.joined = time.monotonic()
            stop = self.folder.read_text(STOP)
            if deadline == float("inf") and (self.signalled or stop):
                limit = stop == "limit" or self.signalled == signal.SIGUSR1
                self.log(f"stopping: {stop or signal.Signals(self.signalled).name}")
                driver.send_signal(signal.SIGUSR1 if limit else signal.SIGTERM)
                deadline = time.monotonic() + self._seconds_to_save(limit, stop == "terminated")
            if time.monotonic() > deadline:
                late = True
                self.log("the driver did not stop in time and is killed", loud=True)
                system.end(driver, 0)
            self.pause()
        self.ended = time.monotonic()
        for thread in self.printing:
            thread.join(timeout=5)
        code = system.exit_code(driver.returncode)
        if late and limit and self.folder.saved:  # in a long iteration: the next job resumes from its checkpoint
            code = CONTINUED
        self.log(f"the driver ended with {code} after {self.elapsed()}")
        return code

    def _seconds_to_save(self, limit: bool, cancelled: bool = False) -> float:
        """How long a driver that was told to stop may take; before its job's limit, most of the lead time."""
        if not limit:
            return CANCEL_SECONDS if self.signalled or cancelled else SAVE_SECONDS
        return max(self.lead / 2, self.lead - 2 * LEAVE_SECONDS)

    def _account(self) -> None:
        """Write where the job's time went to the log and to breakdown.json."""
        if self.driver is None:
            return
        names = sorted(self.folder.names(CONNECTED))
        said = self.folder.read_all([f"{CONNECTED}/{name}" for name in names])
        connect = {Path(name).stem: (one or {})["seconds"] for name, one in zip(names, said, strict=True)}
        before: dict[str, float] = {}
        if self.supervised and (started := self.folder.read(STARTED)) is not None:
            before = {"queue": started["queued"], "start": self.born - started["began"]}
        parts: dict[str, float] = {}
        with suppress(OSError, ValueError, KeyError):
            parts = json.loads((self.folder.path.parent / layout.SUMMARY).read_text())["breakdown"]
        moments = Moments(self.begin, self.driver_began, self.joined, self.ended, time.monotonic())
        spent = {name: round(seconds, 2) for name, seconds in breakdown(before, moments, parts).items()}
        self.folder.write(BREAKDOWN, {**spent, "connect_by_host": connect})
        slowest = sorted(connect.items(), key=lambda pair: -pair[1])[:3]
        hosts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in slowest)
        phases = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in spent.items())
        self.log(f"the time went into: {phases}; slowest to connect: {hosts}")

    # the other ranks

    def _follow(self) -> int:
        node = self.join()["nodes"][self.host]
        if node["rank"] == self.rank.number:
            found = self.until(self._head_or_exit, lambda: "Ray's head did not start")
            if "address" in found:
                own = host.own_address(self.target.interface, found["address"].rpartition(":")[0])
                self._start_ray(own, node, found["address"])
        return self._await_exit()

    def _head_or_exit(self) -> dict[str, Any] | None:
        return self.own(EXIT) or self.own(HEAD)

    def _await_exit(self) -> int:
        """Wait for the exit code from rank 0 and return it. Raises Lost if rank 0 writes no heartbeats, or if this rank
        was told to stop and the code does not come in time."""
        self.patient = True
        beat, heard, looked, deadline = None, time.monotonic(), time.monotonic(), float("inf")
        while (ending := self.own(EXIT)) is None:
            now = time.monotonic()
            if self.signalled and deadline == float("inf"):
                self.log(f"{'killed' if self.orphaned else signal.Signals(self.signalled).name}; the driver may save")
                patience = max(SAVE_SECONDS, self._seconds_to_save(self.signalled == signal.SIGUSR1))
                deadline = now + (ORPHAN_SECONDS if self.orphaned else patience)
            if now > deadline:
                raise Lost("the driver did not end in time")
            if now - looked > BEAT_SECONDS:
                if now - looked > 2 * BEAT_SECONDS:  # this rank itself was blocked, perhaps by a file server
                    heard += now - looked
                looked = now
                if (newest := self.folder.read_text(ALIVE)) != beat:
                    beat, heard = newest, now
            if now - heard > (RAY_EXITED_SECONDS if self.ray_exited else LOST_SECONDS):
                self.leader_lost = True
                raise Lost("no sign of life from rank 0")
            if self.ray is not None:
                self._watch_ray(self.ray)
            self.pause()
        if ending["reason"]:
            self.log(f"rank 0 says: {ending['reason']}")
        return int(ending["code"])

    def _watch_ray(self, ray: subprocess.Popen[bytes]) -> None:
        """Note when this host's Ray has joined, and when it has exited. If it never joined, the driver is told, which
        ends the job; this rank does not exit alone, because some launchers would kill the others at once."""
        assert self.scratch is not None
        if ray.poll() is not None and not self.signalled:
            if self.connected:
                self.log(f"this host's Ray ended with {ray.returncode}; the others continue", loud=True)
            else:
                self.log(f"Ray did not start: {self._last_words()}", loud=True)
                self.folder.write_text(f"{LEFT}/{self.rank.number}", "")
            self.ray, self.ray_exited = None, True
        elif not self.connected and host.cluster_of(self.scratch.ray):
            self._note_connection("Ray has joined")

    # Ray, on every host

    def _environment(self) -> dict[str, str]:
        """The environment of Ray and the driver: with the target's variables, without those that it unsets, without the
        launcher's, which would make a program that uses MPI think it is a rank, and without the settings of a Ray on
        one machine, which a program that trains and then starts ranks has. A simulator's own mpirun stays on its
        machine (`MPI_SETTINGS`)."""
        environ = {name: value for name, value in without_launcher(os.environ).items() if name not in PRIVATE_SETTINGS}
        for name in (*self.target.unset, "RAY_ADDRESS", "RAY_AUTH_TOKEN"):
            if environ.pop(name, None) and self.driver is None and self.ray is None:
                self.log(f"{name} was set and is unset for Ray and the training")
        own = {"RAY_AUTH_TOKEN_PATH": str(self.folder.token)}
        own |= {LOCAL: str(self.scratch.path)} if self.scratch is not None else {}
        return {**environ, **MPI_SETTINGS, **self.target.env, **RAY, **own}

    def _start_ray(self, address: str, node: dict[str, Any], head: str | None = None) -> None:
        """Start this host's node of Ray, with its own folder and ports; returns before it is up."""
        self.scratch = Scratch(self.target.scratch)
        for note in filter(None, (host.raise_limits(), self.scratch.note, node["note"])):
            self.log(note)
        with suppress(OSError):
            os.sched_setaffinity(0, node["cpus"])
        self.log(f"starting Ray at {address} with {node['cores']} cores")
        # A scheduler that cancels a job signals all its processes; Ray has to be there until the driver has saved.
        with open(self.folder.log_of(self.host), "a") as log:
            command = host.ray_command(sys.executable, self.scratch.ray, address, node["cores"], head)
            self.ray = system.start_deaf(
                command, self._environment(), OUTLIVED, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def _ray_address(self) -> str | None:
        """The address of the Ray cluster that this host's Ray has joined; None while it starts."""
        assert self.scratch is not None
        assert self.ray is not None
        if self.ray.poll() is not None:
            raise Lost(f"Ray did not start: {self._last_words()}")
        return host.cluster_of(self.scratch.ray)

    def _last_words(self) -> str:
        return self.folder.last_words(self.host)

    def _note_connection(self, text: str) -> None:
        self.connected = True
        self.folder.write(f"{CONNECTED}/{self.host}.json", {"seconds": round(time.monotonic() - self.begin, 2)})
        self.log(f"{text}, after {self.elapsed()}")

    def _clean_up(self) -> None:
        """End the processes and remove the files that this rank has made on its host."""
        if self.driver is not None and (killed := system.end(self.driver)):
            self.log(f"did not end by themselves: {', '.join(killed)}")
        if self.ray is not None:
            system.end(self.ray, 0)
        system.end_orphans()
        if self.scratch is not None:
            self.scratch.remove()


def main() -> None:
    """`python -m fever.launch.rendezvous.rank JOB`: what the ranks of a submitted job run."""
    folder = JobFolder(Path(sys.argv[1]))
    try:
        sys.exit(run_rank(folder, _target_of(folder), find_rank(), keep_stop=True))
    except FeverError as error:
        say(f"fever: {error}", sys.stderr)
        sys.exit(2)


def _target_of(folder: JobFolder) -> Allocation:
    """The target of a job, once this host sees its record."""
    deadline = time.monotonic() + SEE_SECONDS
    while (job := folder.read(RECORD)) is None:
        if time.monotonic() > deadline:
            here = socket.gethostname()
            raise FeverError(f"{here} does not see {folder.path}; is it on a file system that all machines share?")
        time.sleep(POLL_SECONDS)
    target = restore_target(job["target"])
    assert isinstance(target, Allocation)
    return target


if __name__ == "__main__":
    main()
