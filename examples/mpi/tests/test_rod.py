"""The MPI simulator under real launchers, on one machine and inside ranks of Slurm and of other launchers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from fever.system import alive, descendants
from tests.helpers import ROOT, run_fever, wait_for
from tests.lab.machines import Lab, require_lab
from tests.lab.site import FEVER, Site, summary

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rod_env import Rod

EXAMPLE = Path(__file__).resolve().parent.parent
MPIRUN = {"OpenMPI": "mpirun.openmpi --allow-run-as-root -np 2", "MPICH": "mpirun.mpich -np 2"}


@pytest.fixture(scope="module")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The variables, for `env`, with which mpi4py finds Debian's MPICH, whose library has another name elsewhere."""
    folder = tmp_path_factory.mktemp("mpich")
    found = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    library = re.search(r"libmpich\.so\.12 .*=> (\S+)", found)
    (folder / "libmpi.so.12").symlink_to(library[1] if library else "missing")
    return f"env MPI4PY_MPIABI=mpich LD_LIBRARY_PATH={folder}"


@pytest.fixture
def mpirun(request: pytest.FixtureRequest, mpich: str) -> str:
    require(request.param)
    return MPIRUN[request.param] if request.param == "OpenMPI" else f"{mpich} {MPIRUN['MPICH']}"


def require(*launchers: str) -> None:
    """Skip the test without these launchers and mpi4py; fail it if FEVER_REQUIRE is set."""
    missing = [MPIRUN[one].split()[0] for one in launchers if not shutil.which(MPIRUN[one].split()[0])]
    if not find_spec("mpi4py"):
        missing.append("mpi4py")
    if missing:
        (pytest.fail if os.environ.get("FEVER_REQUIRE") else pytest.skip)(f"not installed: {', '.join(missing)}")


both = pytest.mark.parametrize("mpirun", list(MPIRUN), indirect=True)


@both
def test_the_environment_keeps_its_contract_and_leaves_no_rank(mpirun: str) -> None:
    env = Rod(mpirun)
    try:
        assert len(env.places) == 2
        ranks = descendants(env.program.pid)
        check_env(env, skip_render_check=True)
    finally:
        env.close()
    assert not any(alive(*rank) for rank in ranks.items())


def test_one_rank_and_two_compute_the_same() -> None:
    require("OpenMPI")
    found = []
    for ranks in (1, 2):
        env = Rod(f"mpirun.openmpi --allow-run-as-root --oversubscribe -np {ranks}")
        env.reset(seed=3)
        found.append([env.step(np.array([power]))[0] for power in (1.0, 0.5, 0.0)])
        env.close()
    np.testing.assert_array_equal(*found)
    assert found[0][0][0] > found[0][0][4]  # it is heated at one end


@both
def test_a_killed_worker_takes_its_ranks_with_it(mpirun: str) -> None:
    code = f"from rod_env import Rod; import signal; Rod({mpirun!r}); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=EXAMPLE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("rod: 2 ranks")
    ranks = descendants(process.pid)
    assert len(ranks) >= 3
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not any(alive(*rank) for rank in ranks.items()), "end of all ranks")


TRAIN = ("train", "rod_env:Rod", "--envs", "1", "steps=64", "minibatch=64", "--stop-iterations", "1")


@pytest.mark.ray
def test_ranks_run_on_the_cores_of_their_worker(tmp_path: Path) -> None:
    """Open MPI itself would bind the first rank of every worker to the machine's first core."""
    require("OpenMPI")
    mpirun = json.dumps({"mpirun": "mpirun.openmpi --allow-run-as-root -np 2 --oversubscribe"})
    cores = sorted(os.sched_getaffinity(0))[:2]
    words = ("--cpus-per-worker", "1", "--workers", str(len(cores)), "--env-kwargs", mpirun, "--name", "rod")
    done = run_fever(*TRAIN, *words, cwd=tmp_path, PYTHONPATH=str(EXAMPLE))
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "runs" / "rod" / "log.txt").read_text()
    places = [json.loads(line.replace("'", '"')) for line in re.findall(r"rod: 2 ranks: (.*)", log)]
    assert sorted([found for _, found in ranks] for ranks in places) == [[[core], [core]] for core in cores]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two machines that Slurm and ssh reach."""
    require_lab("slurmctld", "slurmd", "munged", "sbatch", "sshd", "mpirun.openmpi", "mpirun.mpich")
    folder = tmp_path_factory.mktemp("mpi")
    with Lab(folder / "lab", 2) as lab:
        lab.start_slurm()
        lab.start_ssh()
        found = Site(lab, folder)
        own = {"PYTHONPATH": f"{ROOT}:{EXAMPLE}", "FEVER_HOME": found.variables["FEVER_HOME"]}
        found.variables |= own
        lab.environment |= own
        yield found


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.flaky_under_load("several Ray nodes on two cores: a starved node is taken for a lost one")
@pytest.mark.parametrize(
    ("outer", "mpirun"),
    [
        ("Slurm", "OpenMPI"),
        ("Slurm", "MPICH"),
        ("OpenMPI", "OpenMPI"),
        ("OpenMPI", "MPICH"),
        ("MPICH", "OpenMPI"),
        ("MPICH", "MPICH"),
    ],
    indirect=["mpirun"],
)
def test_mpi_inside_a_worker_inside_a_launcher(
    site: Site, outer: str, mpirun: str, request: pytest.FixtureRequest
) -> None:
    """Each worker's ranks are on its own machine and cores, whatever has started the worker."""
    name = re.sub(r"\W+", "-", request.node.callspec.id)
    words = [*TRAIN, "--cpus-per-worker", "2", "--env-kwargs", json.dumps({"mpirun": mpirun}), "--name", name]
    if outer == "Slurm":
        done = site.fever(*words, "--on", "slurm", "--nodes", "2", "--time", "10m")
    else:
        begin = {"OpenMPI": site.lab.mpirun_openmpi, "MPICH": site.lab.mpirun_mpich}[outer]
        command = [*begin(2, site.lab.machines), *FEVER, *words, "--on", "mpi"]
        done = site.lab.login.run(command, cwd=site.folder, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    log = (site.run(name) / "log.txt").read_text()
    places = [json.loads(line.replace("'", '"')) for line in re.findall(r"worker \d: rod: 2 ranks: (.*)", log)]
    cores = sorted(os.sched_getaffinity(0))[:2]
    assert sorted(places) == [[[host, cores], [host, cores]] for host in ("node1", "node2")]
    assert summary(site.run(name))["workers"] == 2
    if outer == "Slurm":
        check_breakdown(site, name, re.search(r"submitted slurm-(\d+)", done.stderr))
    wait_for(lambda: not site.processes(), "end of all processes")


def check_breakdown(site: Site, name: str, submitted: re.Match[str] | None) -> None:
    """The parts of the job's time are as long together as Slurm says that it took, apart from its end."""
    assert submitted is not None
    job = site.job(submitted[1])
    begin, end = (datetime.fromisoformat(job[moment]) for moment in ("SubmitTime", "EndTime"))
    spent = json.loads((site.run(name) / "job" / "breakdown.json").read_text())
    spent.pop("connect_by_host")
    assert min(spent.values()) >= 0
    assert (end - begin).total_seconds() - 30 < sum(spent.values()) < (end - begin).total_seconds() + 3
