"""The markers of /conftest.py: which tests run in one process, and which are run once more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

TESTS = """
import os
from pathlib import Path
import pytest

def note(group):
    with open(f"{group}.txt", "a") as file:
        file.write(os.environ.get("PYTEST_XDIST_WORKER", "alone") + "\\n")

@pytest.mark.lab
@pytest.mark.parametrize("index", range(5))
def test_lab(index): note("lab")

@pytest.mark.ray
@pytest.mark.parametrize("index", range(5))
def test_ray(index): note("ray")

@pytest.mark.flaky_under_load("the first time is slow")
def test_flaky():
    note("flaky")
    assert len(Path("flaky.txt").read_text().splitlines()) == 2

def test_plain():
    assert not Path("broken").exists()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    return tmp_path


def run_pytest(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-q", "--strict-markers", "--rootdir", ".", *options]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take a second to import
    return subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, timeout=300)


def test_tests_of_a_group_run_in_one_process_and_a_flaky_test_twice(project: Path) -> None:
    first = run_pytest(project, "-n", "2")
    assert first.returncode == 1, first.stdout + first.stderr
    for group in ("lab", "ray"):
        workers = (project / f"{group}.txt").read_text().split()
        assert len(workers) == 5
        assert len(set(workers)) == 1
    again = run_pytest(project, "--retry-flaky")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "once more: test_some.py::test_flaky (the first time is slow)" in again.stdout
    assert "1 passed" in again.stdout


def test_a_test_without_the_marker_gets_no_second_chance(project: Path) -> None:
    (project / "broken").touch()
    assert run_pytest(project).returncode == 1
    (project / "broken").unlink()  # it would pass now
    again = run_pytest(project, "--retry-flaky")
    assert again.returncode != 0
    assert "not marked flaky_under_load: test_some.py::test_plain" in again.stderr
    assert (project / "flaky.txt").read_text().split() == ["alone"]


def test_nothing_to_retry_is_a_failure(project: Path) -> None:
    again = run_pytest(project, "--retry-flaky")
    assert again.returncode != 0
    assert "no test has failed" in again.stderr
