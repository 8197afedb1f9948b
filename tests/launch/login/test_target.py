"""`login:` in a site's file: what is accepted, and what the login node's shell is told to run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fever.errors import FeverError
from fever.launch.clusters.ssh import REASONS
from fever.launch.login.target import LoginSite
from fever.launch.schedulers.pbs import Pbs
from fever.launch.schedulers.slurm import Slurm
from fever.launch.targets import load_target, restore_target
from tests.helpers import ROOT


def load(folder: Path, given: dict[str, Any] | None = None, /, **settings: Any) -> LoginSite:
    file = folder / "my-site.yaml"
    file.write_text(yaml.safe_dump({"kind": "slurm", **settings}))
    target = load_target(str(file), given or {})
    assert isinstance(target, LoginSite)
    return target


def test_a_host_is_enough(tmp_path: Path) -> None:
    site = load(tmp_path, login="kestrel", account="abc", time="20m", options=["--mail-type=END"])
    assert (site.kind, site.name, site.login.ssh_command) == ("slurm", "my_site", ["ssh", "kestrel"])
    assert isinstance(site.scheduler, Slurm)
    assert (site.scheduler.account, site.scheduler.seconds) == ("abc", 1200)
    assert restore_target(site.model_dump(mode="json")) == site


def test_the_example_can_be_used() -> None:
    site = load_target(str(ROOT / "examples" / "sites" / "from-laptop.yaml"), {})
    assert isinstance(site, LoginSite)
    assert (site.login.host, site.login.runs) == ("kestrel", "/scratch/me/runs")


def test_options_of_the_command_line_are_the_schedulers(tmp_path: Path) -> None:
    site = load(tmp_path, {"nodes": 7, "time": "1h", "gpus": 1}, login={"host": "k", "user": "ada", "options": ["-4"]})
    assert site.login.ssh_command == ["ssh", "-4", "-l", "ada", "k"]
    assert isinstance(site.scheduler, Slurm)
    assert (site.scheduler.nodes, site.scheduler.seconds) == (7, 3600)
    assert site.scheduler.learner is not None
    assert isinstance(load(tmp_path, kind="pbs", login="polaris").scheduler, Pbs)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no scheduler": ({"kind": "mpi", "login": "k"}, "kind='mpi' cannot be used"),
    "an option": ({"login": "-oProxyCommand=x"}, "is not the name of a host"),
    "a list": ({"login": ["k"]}, "login="),
    "no host": ({"login": {"user": "ada"}}, "needs a value for login.host"),
    "a wrong name": ({"login": {"host": "k", "hsot": 1}}, "hsot"),
    "a line break": ({"login": {"host": "k\nrm"}}, "must be one line"),
    "of the scheduler": ({"login": "k", "nodes": 0}, "nodes=0 cannot be used"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence(case: str, tmp_path: Path) -> None:
    settings, sentence = MISTAKES[case]
    with pytest.raises(FeverError, match=sentence) as error:
        load(tmp_path, **settings)
    assert "my-site.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "python"),
    [
        ({}, None),
        ({"modules": ["gcc"]}, None),
        ({"venv": "~/envs/rl/"}, "~/envs/rl/bin/python"),
        ({"conda": "rl"}, "python"),
        ({"venv": "~/x", "login": {"host": "k", "python": "/opt/python"}}, "/opt/python"),
    ],
)
def test_the_sites_own_environment_is_used(settings: dict[str, Any], python: str | None, tmp_path: Path) -> None:
    assert load(tmp_path, **{"login": "k", **settings}).own_python == python


PROFILE = """
module() { echo "module $*"; printf '%s\\n' "$@" >> "$HOME/loaded"; [ "$2" != missing ]; }
echo Welcome
read -r answer; echo "read: $answer"
"""
PROGRAM = b"import os, sys; print('answers', sys.stdin.buffer.readline())"
ODD = 'it\'s "quoted" $(touch pwned) `touch pwned` \\ ; touch pwned'


def run_shell(site: LoginSite, home: Path) -> subprocess.CompletedProcess[bytes]:
    """What ssh's server does with the command, for a user with a talkative profile."""
    (home / ".profile").write_text(PROFILE)
    sent = b"%d\n%sthe next request\n" % (len(PROGRAM), PROGRAM)
    variables = {"HOME": str(home), "PATH": os.environ["PATH"]}
    return subprocess.run(
        ["sh", "-c", site.remote_command], input=sent, capture_output=True, env=variables, cwd=home, timeout=60
    )


def test_the_shell_there_prepares_and_leaves_the_connection_alone(tmp_path: Path) -> None:
    before = ["module purge # of what the profile has loaded", "if true; then", "module use /apps", "fi"]
    site = load(tmp_path, login="k", before_modules=before, modules=["gcc/12", ODD], shell=["touch pwned"])
    done = run_shell(site, tmp_path)
    assert done.stdout == b"answers b'the next request\\n'\n", done.stderr
    assert b"Welcome" in done.stderr
    assert (tmp_path / "loaded").read_text().splitlines() == ["purge", "use", "/apps", "load", "gcc/12", "load", ODD]
    assert not (tmp_path / "pwned").exists()


def test_values_of_variables_are_not_in_a_command_that_others_see(tmp_path: Path) -> None:
    site = load(tmp_path, login="k", env={"API_KEY": "secret"})
    assert "secret" not in site.remote_command
    assert site.scheduler.env == {"API_KEY": "secret"}


def test_a_module_that_is_missing_ends_the_connection(tmp_path: Path) -> None:
    done = run_shell(load(tmp_path, login="k", modules=["missing"]), tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")


def test_an_interpreter_that_is_missing_is_named(tmp_path: Path) -> None:
    done = run_shell(load(tmp_path, login="k", venv="~/not here"), tmp_path)
    assert done.stderr.decode().splitlines()[-1] in REASONS


def test_the_command_is_one_line_since_csh_allows_no_other_between_quotation_marks(tmp_path: Path) -> None:
    before = ["module use /a\nmodule use /b", "# a remark", "module use '/c d'"]
    site = load(tmp_path, login="k", before_modules=before, modules=["gcc"])
    assert "\n" not in site.remote_command
    done = run_shell(site, tmp_path)
    assert done.stdout == b"answers b'the next request\\n'\n", done.stderr
    assert (tmp_path / "loaded").read_text().split() == ["use", "/a", "use", "/b", "use", "/c", "d", "load", "gcc"]
