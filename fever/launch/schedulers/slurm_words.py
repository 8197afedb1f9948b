"""What Slurm's commands say of a job, in words: why it waits, how it ended, and why it could never start."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

STARTS = re.compile(r" to start at .* in partition (\S+)")  # what `sbatch --test-only` says of a job
UNAVAILABLE = "Requested node configuration is not available"  # of machines that do not exist, or are down
REASONS = {  # beginning of squeue's reason -> what a user makes of it; the longer ones first
    "Assoc": "a limit of the account is reached",
    "BadConstraints": "no machine has what it asks for",
    "BeginTime": "its time to begin has not come",
    "DependencyNeverSatisfied": "the job that it waits for did not end as it should",
    "Dependency": "it waits for another job",
    "InvalidAccount": "the account is invalid",
    "InvalidQOS": "the quality of service is invalid",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held; release it with scontrol release",
    "JobHoldMaxRequeue": "it was requeued too often and is held",
    "launch failed": "its machines could not start it and it is held",
    "Licenses": "it waits for a license",
    "Nodes required for job are DOWN": "machines that it needs are down or reserved",
    "PartitionConfig": "the partition has no such machines",
    "PartitionDown": "its partition starts no jobs now",
    "PartitionInactive": "its partition starts no jobs now",
    "PartitionNodeLimit": "the partition allows fewer machines, or some are down",
    "PartitionTimeLimit": "its time limit is longer than the partition's",
    "Priority": "jobs of higher priority come first",
    "QOS": "a limit of the quality of service is reached",
    "ReqNodeNotAvail": "a machine that it needs is not available",
    "Reservation": "its reservation is not available yet",
    "Resources": "it waits for machines to become free",
    "WaitingForScheduling": "Slurm has not looked at it yet",
}
STATES = {  # of jobs that are over
    "BOOT_FAIL": "its machines did not boot",
    "CANCELLED": "it was cancelled",
    "DEADLINE": "its deadline came",
    "NODE_FAIL": "one of its machines failed",
    "OUT_OF_MEMORY": "it ran out of memory",
    "PREEMPTED": "another job took its machines",
    "TIMEOUT": "it reached its time limit",
}


class Waiting(NamedTuple):
    """A row of `squeue --format ROW`: a job that waits, or one component of a heterogeneous job."""

    state: str
    reason: str
    start: str  # expected, or N/A
    nodes: str
    partition: str


ROW = "%T|%r|%S|%D|%P"


def read_rows(answer: str) -> list[Waiting]:
    """The rows of an answer in the format ROW; what else was printed is left out."""
    rows = [[part.strip() for part in line.split("|")] for line in answer.splitlines()]
    return [Waiting(*row) for row in rows if len(row) == len(Waiting._fields)]


def in_words(reason: str) -> str:
    """A reason of Slurm's with its meaning; nothing if Slurm gives none."""
    if reason in ("", "None"):
        return ""
    meaning = next((words for begin, words in REASONS.items() if reason.startswith(begin)), "")
    return f"{meaning} ({reason})" if meaning else reason


def why_it_waits(rows: Iterable[Waiting], free: int | None, now: datetime) -> str:
    """One sentence: the reason, how many machines it asks for and how many are free, and when it may start."""
    waiting = list(rows)
    reason = next((words for row in waiting if (words := in_words(row.reason))), "starting")
    asked = sum(int(row.nodes) for row in waiting if row.nodes.isdecimal())
    parts = [reason, f"asks for {asked} machine{'s' if asked != 1 else ''}"]
    if free is not None:
        parts[1] += f", {free} {'is' if free == 1 else 'are'} free"
    starts = [time for row in waiting if (time := _time(row.start)) is not None]
    if len(starts) == len(waiting) and max(starts) > now:
        same_day = max(starts).date() == now.date()
        parts.append(f"may start at {max(starts):{'%H:%M' if same_day else '%Y-%m-%d %H:%M'}}")
    return "; ".join(parts)


def _time(text: str) -> datetime | None:
    with suppress(ValueError):
        return datetime.fromisoformat(text)
    return None


def free_machines(answer: str) -> int | None:
    """The sum of idle machines in the output of `sinfo --format %F`: allocated/idle/other/total."""
    counts = [line.strip().split("/") for line in answer.splitlines()]
    idle = [int(count[1]) for count in counts if len(count) == 4 and count[1].isdecimal()]
    return sum(idle) if idle else None


def how_it_ended(shown: str) -> str:
    """State, reason and exit code in the output of `scontrol -o show job`; empty if the job is not over."""
    facts = dict(pair.split("=", 1) for pair in shown.splitlines()[0].split() if "=" in pair) if shown else {}
    state, reason = facts.get("JobState", ""), facts.get("Reason", "")
    if state in ("", "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED"):
        return ""
    code, _, number = facts.get("ExitCode", "0:0").partition(":")
    parts = [state + (f", {STATES[state]}" if state in STATES else "")]
    parts += [reason] if reason not in ("", "None") else []
    parts += [f"exit code {code}"] if code != "0" else []
    return ", ".join([*parts, *([f"signal {number}"] if number not in ("", "0") else [])])


class Partition(NamedTuple):
    """A row of `sinfo --format PARTITION`; there is one for each kind of machine in a partition."""

    name: str
    machines: int
    cores: int  # of each machine
    largest: str  # number of machines that one job may have, or infinite
    limit: str  # of a job's time, or infinite
    down: bool  # some machines are, or are drained or reserved


PARTITION = "%P|%D|%c|%s|%l|%F"


def read_partitions(answer: str) -> list[Partition]:
    """The rows of an answer in the format PARTITION."""
    found = []
    for line in answer.splitlines():
        with suppress(ValueError):
            name, machines, cores, largest, limit, states = line.strip().split("|")
            down = states.split("/")[2] != "0"
            largest = largest.rpartition("-")[2]
            found.append(Partition(name, int(machines), int(cores.rstrip("+")), largest, limit, down))
    return found


def partitions_for(name: str | None, every: list[Partition]) -> list[Partition]:
    """The rows of the partitions that a setting names, separated by commas; None: of the default one."""
    names = (name or "").split(",")
    return [row for row in every if (row.name.rstrip("*") in names if name else row.name.endswith("*"))]


def chosen_partition(said: str) -> str | None:
    """The partition that Slurm would take for a job, by its `sbatch --test-only`: sites choose one by what it asks
    for, and so does a variable of the user's shell. None if it says of none."""
    found = STARTS.search(said)
    return found[1] if found else None


def limit_seconds(text: str) -> float | None:
    """The seconds in a limit that Slurm prints as DAYS-HOURS:MINUTES:SECONDS; None for no limit."""
    if not (match := re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)):
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def never_starts(rows: list[Partition], nodes: int, cores: int | None, seconds: float | None, said: str) -> str:
    """Why a job could never start on these partitions, or nothing. `said`: what `sbatch --test-only` said."""
    if not rows:
        return ""
    name = ",".join(dict.fromkeys(row.name.rstrip("*") for row in rows))
    limits = [limit_seconds(row.limit) for row in rows]
    if seconds is not None and all(limit is not None and seconds > limit for limit in limits):
        longest = max(rows, key=lambda row: limit_seconds(row.limit) or 0)
        return f"--time is longer than partition {name} allows, {longest.limit}"
    if UNAVAILABLE not in said:
        return ""
    totals: dict[str, int] = {}
    for row in rows:
        totals[row.name] = totals.get(row.name, 0) + row.machines
    most = max(totals.values())
    if nodes > most:
        return f"{nodes} machines are asked for, but partition {name} has {most}"
    allowed = [int(row.largest) for row in rows if row.largest.isdecimal()]
    if len(allowed) == len(rows) and nodes > max(allowed):
        return f"{nodes} machines are asked for, but partition {name} gives a job at most {max(allowed)}"
    if cores is not None and cores > max(row.cores for row in rows):
        return f"{cores} cores of a machine are asked for, but those of {name} have {max(row.cores for row in rows)}"
    if any(row.down for row in rows):
        return ""  # it may start when they are back
    return f"partition {name} has no machines as they are asked for; Slurm says: {' '.join(said.split())}"
