"""Ranks of PALS, the launcher of HPE Cray EX machines: a stand-in starts real processes that meet, without Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fever.launch.rendezvous.launchers import find_rank, note_binding
from fever.launch.rendezvous.member import SETTLE_SECONDS
from tests.helpers import ROOT

PALS = ROOT / "tests" / "lab" / "pals.py"
MEET = """
import json, sys
from pathlib import Path
from fever.job import JobFolder
from fever.launch.rendezvous.launchers import find_rank
from fever.launch.rendezvous.member import Member
from fever.launch.rendezvous.mpi import Mpi

folder, rank = JobFolder(Path(sys.argv[1])), find_rank()
member = Member(folder, Mpi(connect_seconds=float(sys.argv[2])), rank)
if member.leads:
    folder.clear()
    member.announce()
    member.gather()
else:
    member.join()
[node] = member.plan["nodes"].values()
folder.write(f"met/{rank.number}", {"ranks": len(member.plan["members"]), "launch": rank.launch, "note": node["note"]})
"""


def meet(folder: Path, ranks: int, seconds: float) -> list[dict[str, Any]]:
    """Start ranks that arrive over some seconds; what each of them saw."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MEET, str(folder), str(seconds + 60)]
    pals = [sys.executable, str(PALS), "-n", str(ranks), "--over", str(seconds), *command]
    done = subprocess.run(pals, env=environ, capture_output=True, text=True, timeout=seconds + 400)
    assert done.returncode == 0, done.stderr
    return [json.loads(path.read_text()) for path in (folder / "met").iterdir()]


def test_ranks_that_arrive_one_by_one_all_join(tmp_path: Path) -> None:
    saw = meet(tmp_path, 3, 2 * (SETTLE_SECONDS + 1))  # longer apart than a launch without a number of ranks waits
    assert [facts["ranks"] for facts in saw] == [3, 3, 3]
    assert len({facts["launch"] for facts in saw}) == 1
    if (os.cpu_count() or 1) > 1:
        assert "mpiexec --cpu-bind none" in saw[0]["note"]


@pytest.mark.slow
def test_64_ranks_that_arrive_over_a_minute_all_join(tmp_path: Path) -> None:
    saw = meet(tmp_path, 64, 60)
    assert [facts["ranks"] for facts in saw] == 64 * [64]


def test_the_doctor_says_how_ranks_start_unbound(tmp_path: Path) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("there is one core, and nothing to bind")
    doctor = [sys.executable, "-m", "fever", "doctor", "--on", "mpi", "--runs", str(tmp_path / "runs")]
    pals = [sys.executable, str(PALS), "-n", "2", *doctor]
    done = subprocess.run(pals, cwd=ROOT, capture_output=True, text=True, timeout=120)
    [line] = [line for line in done.stdout.splitlines() if " binding " in line]
    assert "bound to 1 of" in line
    assert "mpiexec --cpu-bind none" in line


STEP = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "3"}
CRAY = {"PALS_RANKID": "1", "PALS_APID": "17.2", "PALS_NODEID": "0", "PALS_LOCAL_RANKID": "1"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "3", "PMI_LOCAL_RANK": "1", "PMI_JOBID": "17"}


@pytest.mark.parametrize("more", [PMI, {}], ids=["today", "older"])
def test_ranks_of_srun_with_crays_pmi_are_slurms(more: dict[str, str]) -> None:
    rank = find_rank({**STEP, **CRAY, **more})
    assert (rank.launcher, rank.number, rank.size, rank.launch) == ("Slurm", 1, 3, "17-2")


def test_ranks_of_pals_inside_a_job_of_slurm_are_pals() -> None:
    rank = find_rank({**STEP, "PALS_RANKID": "5", "PALS_APID": "9d0c-11", "PMI_SIZE": "8"})
    assert (rank.launcher, rank.number, rank.size, rank.launch) == ("PALS", 5, 8, "9d0c-11")


def test_ranks_bound_to_few_cores_are_noted() -> None:
    assert note_binding("PALS", list(range(33)), 64, 33) is None
    note = note_binding("Slurm", [0, 1, 2, 52], 104, 4)
    assert note == (
        "the ranks of this host are bound to 4 of 104 cores (0-2,52); the training has no more; "
        "unbound they start with: srun --cpu-bind=none --cpus-per-task=CORES"
    )
    assert "the training undoes that and uses all" in (note_binding("PALS", [0], 64, 64) or "")
