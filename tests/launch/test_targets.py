"""Targets and the scripts that are rendered from them; scripts as a scheduler gets them are in tests/launch/golden."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fever.config import load_yaml
from fever.errors import FeverError
from fever.launch.rendezvous.launchers import find_rank, without_launcher
from fever.launch.schedulers.base import Scheduler, clock
from fever.launch.schedulers.pbs import Pbs
from fever.launch.schedulers.slurm import Slurm
from fever.launch.targets import load_target, restore_target
from tests.helpers import ROOT

GOLDEN = Path(__file__).parent / "golden"
SITES = ROOT / "examples" / "sites"
MOUNTS = {"mounts": ["/scratch", "~/data:/data"], "options": ["--nv"]}
SCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "slurm": ("slurm", {"nodes": 3, "cpus_per_node": 36, "time": "20m", "account": "abc"}),
    "slurm-bare": ("slurm", {}),
    "slurm-site": (str(SITES / "slurm.yaml"), {}),
    "kestrel": (str(SITES / "kestrel.yaml"), {}),
    "perlmutter": (str(SITES / "perlmutter.yaml"), {"nodes": 4}),
    "gpu-learner": (str(SITES / "gpu-learner.yaml"), {}),
    "gpu-alone": (str(SITES / "gpu-learner.yaml"), {"nodes": 1}),
    "pbs": ("pbs", {"nodes": 2}),
    "pbs-aprun": ("pbs", {"nodes": 4, "cpus_per_node": 64, "launcher": "aprun -n {nodes} -N 1 -d 64 -cc none"}),
    "crux": (str(SITES / "crux.yaml"), {"nodes": 8}),
    "polaris": (str(SITES / "polaris.yaml"), {"partition": "preemptable", "nodes": 4, "requeue": True}),
    "aurora": (str(SITES / "aurora.yaml"), {}),
    "lsf": ("lsf", {"nodes": 2, "cpus_per_node": 16, "time": "90m"}),
    "lsf-bare": ("lsf", {}),
    "lsf-jsrun": (str(SITES / "lsf.yaml"), {"nodes": 8}),
    "apptainer": (str(SITES / "crux.yaml"), {"container": {"image": "~/fever.sif", **MOUNTS}}),
    "shifter": ("slurm", {"container": {"image": "me/fever:1", "runtime": "shifter", "mounts": ["$SCRATCH:/data"]}}),
    "podman-hpc": (
        "slurm",
        {"container": {"image": "fever:1", "runtime": "podman-hpc", **MOUNTS, "options": ["--gpu"]}},
    ),
}


def script(name: str) -> str:
    word, options = SCRIPTS[name]
    target = load_target(word, options)
    assert isinstance(target, Scheduler)
    return target.script(
        "one", Path("/home/me/my project"), Path("/home/me/my project/runs/one/job"), "/opt/py/bin/python"
    )


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")


def test_every_site_of_a_scheduler_has_a_golden_script() -> None:
    sites = {str(path): load_yaml(path) for path in SITES.iterdir()}
    files = {name for name, site in sites.items() if site["kind"] in ("slurm", "pbs", "lsf") and "login" not in site}
    assert files == {word for word, _ in SCRIPTS.values() if word.startswith(str(SITES))}


@pytest.mark.parametrize(
    ("site", "cores"),
    [("crux", 128), ("polaris", 32), ("aurora", 104 - 2), ("kestrel", 104)],  # Aurora keeps one of each socket
)
def test_sites_have_the_cores_that_jobs_may_use(site: str, cores: int) -> None:
    assert load_target(str(SITES / f"{site}.yaml"), {}).cpus_per_node == cores


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize("name", SCRIPTS)
def test_rendered_script(name: str) -> None:
    golden = GOLDEN / f"{name}.sh"
    if os.environ.get("FEVER_GOLDEN"):  # write them anew, and look at the difference
        golden.write_text(script(name))
    assert script(name) == golden.read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_has_nothing_to_say(name: str) -> None:
    if shutil.which("shellcheck") is None:
        if os.environ.get("FEVER_REQUIRE"):
            pytest.fail("shellcheck is required")
        pytest.skip("there is no shellcheck")
    done = subprocess.run(["shellcheck", "-"], input=script(name), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_target_survives_its_json() -> None:
    for word, options in SCRIPTS.values():
        target = load_target(word, options)
        assert restore_target(target.model_dump(mode="json")) == target


def test_options_win_over_the_file() -> None:
    target = load_target(str(SITES / "slurm.yaml"), {"nodes": 7, "time": "2h"})
    assert isinstance(target, Slurm)
    assert (target.nodes, target.seconds, target.account) == (7, 7200, "abc")


def test_gpus_are_put_over_the_files_learner() -> None:
    target = load_target(str(SITES / "gpu-learner.yaml"), {"gpus": 2})
    assert isinstance(target, Slurm)
    assert target.learner is not None
    assert (target.learner.gpus, target.learner.partition) == (2, "gpu")


def test_percent_signs_in_a_path_are_no_pattern() -> None:
    text = Slurm().script("one", Path("/50% off"), Path("/50% off/job"), "python")
    assert "#SBATCH --output='/50%% off/job/log.txt'" in text
    assert "supervisor '/50% off/job'" in text


def test_the_lead_is_no_more_than_a_quarter_of_the_time() -> None:
    assert Slurm(seconds=3600).lead == 120
    assert Slurm(seconds=60).lead == 15
    assert Slurm().lead == 120


@pytest.mark.parametrize("kind", [Slurm, Pbs])
def test_a_very_short_time_is_not_no_limit(kind: Any) -> None:
    text = kind(seconds=0.001).script("one", Path("/x"), Path("/x/job"), "python")
    assert "00:00:01" in text
    assert "USR1@0" not in text


def test_clock() -> None:
    assert [clock(seconds) for seconds in (59, 1200, 100 * 3600 + 61)] == ["00:00:59", "00:20:00", "100:01:01"]


@pytest.mark.parametrize(
    ("kind", "text", "seconds"),
    [
        ("slurm", "20", 1200), ("slurm", "00:20:00", 1200), ("slurm", "20:00", 1200), ("slurm", "1-12:00", 129600),
        ("slurm", "1-12", 129600), ("slurm", "1-12:00:30", 129630), ("slurm", "20m", 1200), ("slurm", "1:30:00", 5400),
        ("slurm", "2h", 7200), ("slurm", "90s", 90), ("slurm", "1.5", 90),
        ("pbs", "1200", 1200), ("pbs", "20:00", 1200), ("pbs", "01:30:00", 5400), ("pbs", "20m", 1200),
        ("lsf", "20", 1200), ("lsf", "1:30", 5400), ("lsf", "20m", 1200), ("lsf", "210", 12600),
    ],
)  # fmt: skip
def test_times_are_what_the_schedulers_users_write(tmp_path: Path, kind: str, text: str, seconds: float) -> None:
    """On the command line and, without quotes, in a file alike."""
    (tmp_path / "site.yaml").write_text(f"kind: {kind}\ntime: {text}\n")
    for target in (load_target(kind, {"time": text}), load_target(str(tmp_path / "site.yaml"), {})):
        assert isinstance(target, Scheduler)
        assert target.seconds == seconds
        assert restore_target(target.model_dump(mode="json")) == target


def test_numbers_with_a_leading_zero_are_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("{kind: slurm, time: 010, account: 0123, env: {MASK: 0022, N: 8, X: 0.5}}")
    target = load_target(str(tmp_path / "site.yaml"), {})
    assert isinstance(target, Slurm)
    assert (target.seconds, target.account) == (600, "0123")
    assert target.env == {"MASK": "0022", "N": "8", "X": "0.5"}


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("slurm", {"time": "soon"}, "--time soon: 'soon' is not a time; write 20 or 20:00 "),
        ("slurm", {"time": "1:2:3:4"}, "--time 1:2:3:4: '1:2:3:4' is not a time; write 20 or 20:00 "),
        ("slurm", {"time": "0"}, "--time 0: must be greater than 0"),
        ("slurm", {"time": "1-"}, "--time 1-: '1-' is not a time; write 20 or 20:00 "),
        ("pbs", {"time": "1-12"}, "--time 1-12: '1-12' is not a time; write 1200 "),
        ("lsf", {"time": "1:30:00"}, "--time 1:30:00: '1:30:00' is not a time; write 20 (minutes) or 1:30 "),
        ("slurm", {"nodes": 0}, "--nodes 0: must be greater than 0"),
        ("slurm", {"gpus": -1}, "--gpus -1: must be 0 or more"),
        ("slurm", {"cpus_per_node": 0}, "--cpus-per-node 0: must be greater than 0"),
    ],
)
def test_mistakes_name_the_option_as_typed(kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(FeverError, match=f"^{re.escape(said)}"):
        load_target(kind, options)


MISTAKES = {
    "unknown": ("--on wherever", "--on takes slurm, pbs, lsf, mpi, a file that ends in .yaml, or the address of a Ray"),
    "no file": ("--on nothing.yaml", "nothing.yaml cannot be read"),
    "kind": ("kind: sge", "needs a kind: slurm, pbs, lsf, mpi, ssh, aws, ray, not 'sge'"),
    "no kind": ("nodes: 3", "needs a kind"),
    "typo": ("kind: slurm\nacount: abc", "did you mean account?"),
    "nodes": ("kind: slurm\nnodes: 0", "nodes=0 cannot be used"),
    "time": ("kind: slurm\ntime: soon", "site.yaml: time='soon' cannot be used: 'soon' is not a time; write 20"),
    "no time": ("kind: slurm\ntime: [1]", "site.yaml: time=[1] cannot be used: must be a number"),
    "other kind": ("kind: mpi\nnodes: 3", "has no setting nodes"),
    "learner": ("kind: slurm\nlearner: {gpu: 1}", "learner.gpu"),
    "no learner": ("kind: slurm\nlearner: 5", "learner=5 cannot be used"),
    "no word": ("kind: [slurm]", "needs a kind"),
    "variable": ("kind: slurm\nenv: {MY-VAR: 1}", "'MY-VAR' is not the name of a variable"),
    "a truth value": ("kind: slurm\nenv: {A: off}", "the value of A is read as False; put it in quotes"),
    "values": ("kind: slurm\nenv: {A: [1]}", "env.A=[1] cannot be used: must be text"),
    "no value": ("kind: slurm\nenv: {A: null}", "env.A=None cannot be used"),
    "no trap": ("kind: slurm\nunset: ['a b']", "'a b' is not the name of a variable"),
    "no folder": ("{kind: ssh, hosts: [a], runs: ''}", "runs='' cannot be used"),
    "no launcher": ("kind: pbs\nlauncher: ''", "launcher='' cannot be used: must not be empty"),
    "no image": ("kind: slurm\ncontainer: {image: ' '}", "container.image=' ' cannot be used: must not be empty"),
    "no module": ("kind: slurm\nmodules: ['']", "modules.0='' cannot be used: must not be empty"),
    "half a place": ("kind: pbs\nlauncher: mpiexec -n {node}", "{node} is not known; {nodes} stands for the number"),
    "no place": ("{kind: pbs, select: '{nodes}:ncpus={cpus_per_node}'}", "{cpus_per_node} is not known; {nodes} "),
    "no places": ("{kind: lsf, resources: '-nnodes {node}'}", "{node} is not known; {nodes} stands for"),
    "half known": ("kind: slurm\ninterfaces: ib0", "did you mean interface?"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_sentence(fever: Any, tmp_path: Path, mistake: str) -> None:
    text, sentence = MISTAKES[mistake]
    if text.startswith("--on"):
        words = text.split()
    else:
        (tmp_path / "site.yaml").write_text(text)
        words = ["--on", "site.yaml"]
    done = fever("train", "CartPole-v1", "--dry-run", *words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_dry_run_prints_the_script_and_makes_nothing(fever: Any, tmp_path: Path) -> None:
    done = fever("train", "CartPole-v1", "--on", "slurm", "--nodes", "2", "--dry-run", "--name", "one")
    assert done.returncode == 0
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=one\n")
    assert not list(tmp_path.iterdir())


def test_gpus_of_rllib_train_are_asked_for(fever: Any) -> None:
    words = ("train", "CartPole-v1", "--num-gpus", "1.5", "--dry-run", "--on")
    assert "#SBATCH --gpus-per-node=2\n" in fever(*words, "slurm").stdout
    assert "#SBATCH --gpus-per-node=1\n" in fever(*words, "slurm", "--gpus", "1").stdout
    assert fever(*words, "pbs").returncode == 0  # its sites ask for GPUs in `select`
    done = fever("train", "CartPole-v1", "--num-gpus", "inf", "--dry-run", "--on", "slurm")
    assert (done.returncode, done.stderr) == (2, "fever: --num-gpus inf cannot be used: must be a number, 0 or more\n")


def test_options_of_a_target_need_one(fever: Any) -> None:
    for words in (["--nodes", "3"], ["--time", "10m"], ["--gpus", "1"], ["--dry-run"], ["--requeue"]):
        done = fever("train", "CartPole-v1", *words)
        assert (done.returncode, done.stderr) == (2, f"fever: {words[0]} has no effect without --on; add --on TARGET\n")


@pytest.mark.parametrize(
    ("environ", "launcher", "number", "size", "launch"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "6", "PMIX_NAMESPACE": "828", "SLURM_PROCID": "0"},
         "OpenMPI", 3, 6, "828"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_JOBID": "kvs_7"}, "PMI", 1, 4, "kvs_7"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "PMI", 1, 4, None),
        ({"PALS_RANKID": "5", "PMI_SIZE": "8", "PALS_APID": "9d0c-11"}, "PALS", 5, 8, "9d0c-11"),
        ({"ALPS_APP_PE": "2", "ALPS_APP_ID": "441"}, "ALPS", 2, None, "441"),
        ({"ALPS_APP_PE": "2", "ALPS_APP_ID": "441", "FEVER_RANKS": "4"}, "ALPS", 2, 4, "441"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2", "LSB_JOBID": "12"}, "jsrun", 0, 2, "12"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}, "Slurm", 1, 3, "17-0"),
        ({"PMI_RANK": "1", "PMI_SIZE": "3", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "2"}, "Slurm", 1, 3, "17-2"),
    ],
)  # fmt: skip
def test_ranks_of_launchers(environ: dict[str, str], launcher: str, number: int, size: int, launch: str) -> None:
    rank = find_rank(environ)
    assert (rank.launcher, rank.number, rank.size, rank.launch) == (launcher, number, size, launch)


@pytest.mark.parametrize("count", ["four", "0", "-1"])
def test_a_number_of_ranks_that_is_none_is_refused(count: str) -> None:
    with pytest.raises(FeverError, match="FEVER_RANKS takes a number from 1 on"):
        find_rank({"PMI_RANK": "0", "FEVER_RANKS": count})


def test_a_name_with_a_space_is_one_name() -> None:
    assert "#SBATCH --job-name='run 1'\n" in Slurm().script("run 1", Path("/home"), Path("/runs/run 1/job"), "python")


def test_a_long_name_of_a_launch_is_made_short() -> None:
    names = {"OMPI_MCA_orte_precondition_transports": "b372ab5dab702509-0f7c377149ace43c", "PMIX_NAMESPACE": "82837505"}
    launch = find_rank({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", **names}).launch
    assert launch is not None
    assert len(launch) == 8


def test_neither_a_batch_script_nor_the_shell_of_an_allocation_is_a_rank() -> None:
    for step in ({}, {"SLURM_STEP_ID": "4294967290"}):
        with pytest.raises(FeverError, match="a launcher has started"):
            find_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "17", **step})


def test_programs_of_ranks_do_not_take_themselves_for_ranks() -> None:
    environ = {"PATH": "/bin", "OMPI_COMM_WORLD_RANK": "1", "PMI_RANK": "1", "PMIX_NAMESPACE": "1", "SLURM_JOB_ID": "7"}
    assert without_launcher(environ) == {"PATH": "/bin", "SLURM_JOB_ID": "7"}
