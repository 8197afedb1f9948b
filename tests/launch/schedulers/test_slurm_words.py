"""What Slurm says of a job is what the user reads, on the real Slurm; no training begins here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from fever.job import JobFolder
from fever.launch.endings import how_it_ended
from fever.launch.schedulers import slurm_words as words
from tests.helpers import wait_for
from tests.lab.machines import Lab, require_lab
from tests.lab.site import Site

pytestmark = pytest.mark.lab
NOW = datetime(2026, 11, 19, 15, 0)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    require_lab("slurmctld", "slurmd", "munged", "sbatch")
    folder = tmp_path_factory.mktemp("slurm")
    with Lab(folder / "lab", private=("/tmp/ray", str(folder / "own"))) as lab:
        lab.start_slurm()
        yield Site(lab, folder)


def on(site: Site, **settings: object) -> tuple[str, ...]:
    (site.folder / "site.yaml").write_text(json.dumps({"kind": "slurm", "time": "5m", **settings}))
    return ("train", "CartPole-v1", "--on", "site.yaml")


def test_a_job_whose_script_fails_says_where(site: Site) -> None:
    for settings, code, line in (
        ({"modules": ["nothing/1.0"]}, 127, "module load nothing/1.0"),
        ({"venv": "/nothing/here"}, 1, ". /nothing/here/bin/activate"),
    ):
        done = site.fever(*on(site, **settings), "--name", f"failing-{code}")
        assert done.returncode == 1
        name = re.escape(
            f"failed before fever started; Slurm: FAILED, NonZeroExitCode, exit code {code}; it said last: "
        )
        assert re.search(name, done.stderr), done.stderr
        assert f"likely cause, in its script: {line}; its log: " in done.stderr
    assert "NonZeroExitCode, exit code 127" in site.fever("jobs").stdout  # from the job's record, too


def test_a_folder_that_machines_do_not_see_is_named(site: Site) -> None:
    runs = site.folder / "own" / "runs"
    done = site.fever(*on(site), "--name", "unseen", "--runs", str(runs))
    assert done.returncode == 1
    assert "could not write its log; Slurm: FAILED, JobLaunchFailure" in done.stderr
    assert f"is {runs / 'unseen' / 'job'} on a file system that its machines share?" in done.stderr


def test_a_job_that_waits_says_why_and_for_what(site: Site) -> None:
    site.slurm("sbatch", "--nodes=2", "--exclusive", "--time=5", "--output=/dev/null", "--wrap=sleep 300")
    wait_for(lambda: "RUNNING" in site.slurm("squeue", "-h", "-o", "%T"), "a job that is in the way")
    try:
        done = site.fever(*on(site), "--nodes", "3", "--name", "waiting", "--detach")
        assert done.returncode == 0, done.stderr
        said = r"queued +for \d.*: it waits for machines to become free \(Resources\); asks for 3 machines, 1 is free"
        wait_for(
            lambda: re.search(f"{said}; may start at [^/]*/", site.fever("jobs").stdout), "a reason and a time", 60
        )
        assert "is cancelled" in site.fever("stop", "waiting").stdout
        wait_for(lambda: "was cancelled before it began" in site.fever("jobs").stdout, "the end of that job")
    finally:
        site.slurm("scancel", "--user=root")


def test_what_can_never_start_is_refused(site: Site) -> None:
    for options, said in (
        (["--nodes", "9"], "9 machines are asked for, but partition batch has 3"),
        (["--cpus-per-node", "36"], "36 cores of a machine are asked for, but those of batch have 2"),
    ):
        done = site.fever(*on(site), *options, "--name", "never")
        assert (done.returncode, done.stderr) == (2, f"fever: this job could never start: {said}\n")
        assert not site.run("never").exists()
    done = site.fever(*on(site), "--nodes", "3", "--envs", "6", "steps=100", "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not divide the batch of 6 environments x 100 steps" in done.stderr
    done = site.fever(*on(site, options=["--mem=900G"]), "--name", "never")
    assert done.returncode == 2
    assert "partition batch has no machines as they are asked for; Slurm says: allocation failure: " in done.stderr
    site.slurm("scontrol", "update", "PartitionName=other", "MaxTime=10", "MaxNodes=2")
    done = site.fever(*on(site), "--partition", "other", "--time", "1h", "--name", "never")
    assert "--time is longer than partition other allows, 10:00" in done.stderr
    done = site.fever(*on(site), "--partition", "other", "--nodes", "3", "--name", "never")
    assert "3 machines are asked for, but partition other gives a job at most 2" in done.stderr


def test_machines_that_are_down_may_come_back(site: Site) -> None:
    site.slurm("scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=test")
    try:
        done = site.fever(*on(site), "--nodes", "3", "--name", "later", "--detach")
        assert done.returncode == 0, done.stderr
        wait_for(lambda: "machines that it needs are down" in site.fever("jobs").stdout, "the reason", 60)
        site.fever("stop", "later")
    finally:
        site.slurm("scontrol", "update", "NodeName=node3", "State=RESUME")


def test_a_heterogeneous_job_waits_for_the_sum_of_its_machines() -> None:
    rows = words.read_rows("PENDING|None|N/A|1|gpu\nPENDING|Priority|2026-11-20T01:00:00|2|batch\n")
    assert words.why_it_waits(rows, 0, NOW) == (
        "jobs of higher priority come first (Priority); asks for 3 machines, 0 are free"
    )
    later = words.read_rows("PENDING|AssocGrpCpuLimit|2026-11-20T01:00:00|1|batch")
    assert words.why_it_waits(later, None, NOW).endswith("asks for 1 machine; may start at 2026-11-20 01:00")
    assert words.why_it_waits(words.read_rows("PENDING|SomethingNew|N/A|1|batch"), None, NOW).startswith("SomethingNew")


def test_the_partition_that_slurm_would_choose_counts() -> None:
    said = "sbatch: Job 7 to start at 2026-11-20T01:00:00 using 8 processors on nodes n[1-2] in partition long\n"
    every = words.read_partitions("short*|2|4|infinite|1:00:00|0/2/0/2\nlong|2|4|infinite|2-00:00:00|0/2/0/2\n")
    assert words.chosen_partition(said) == "long"
    assert words.never_starts(words.partitions_for("long", every), 2, 4, 7200.0, said) == ""
    assert words.chosen_partition("sbatch: error: allocation failure: Invalid account") is None


def test_limits_as_sinfo_prints_them() -> None:
    limits = {"10:00": 600.0, "1:00:00": 3600.0, "2-00:00:00": 172800.0, "infinite": None}
    assert {text: words.limit_seconds(text) for text in limits} == limits


def test_the_line_of_a_module_system_is_found_by_its_name(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.write_text("script.sh", "#!/bin/bash\nset -e\nmodule load gcc\nmodule load cray/9\ncd /here\nexec x\n")
    folder.write_text("log.txt", 'Lmod has detected an error:\nThe following are unknown: "cray/9"\n')
    assert how_it_ended(folder, "").endswith("likely cause, in its script: module load cray/9")
    later = (tmp_path / "log.txt").stat().st_mtime + 60
    assert how_it_ended(folder, "Slurm: CANCELLED", later) == "was cancelled before it began"
