"""The wheel: what is in it, and that it works where the checkout is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from fever import __version__
from tests.helpers import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [path] = folder.iterdir()
    return path


def test_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    assert wheel.name == f"fever-{__version__}-py3-none-any.whl"
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fever/")}
    files = (path for path in (ROOT / "fever").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert packed == {path.relative_to(ROOT).as_posix() for path in files}
    data = {"py.typed", "constraints.txt", "launch/aws/policy.json", "launch/aws/prices.json"}
    assert {f"fever/{name}" for name in data} <= packed


class Installed:
    """fever from the wheel in an environment of its own; its commands run in a folder away from the checkout.

    Dependencies come from this environment: what is tested is fever's own package.
    """

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.folder, place = folder, folder / "venv"
        venv.create(place)
        self.python, self.fever = str(place / "bin" / "python"), str(place / "bin" / "fever")
        words = ["--python", self.python, "install", "-q", "--no-deps", "--no-index", str(wheel)]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=300)
        [self.site] = place.glob("lib/python*/site-packages")
        (self.site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(self, *words: str) -> str:
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp("installed"))


@pytest.mark.slow
def test_wheel_works_in_a_clean_environment(installed: Installed) -> None:
    run, fever = installed.run, installed.fever
    assert run(installed.python, "-c", "import fever; print(fever.__file__)") == f"{installed.site}/fever/__init__.py\n"
    assert run(fever, "--version") == f"fever {__version__}\n"
    assert "Usage: fever" in run(fever, "--help")
    assert "learning_rate" in run(fever, "config", "ppo")
    assert "next: fever" in run(fever, "train", "CartPole-v1", "--stop-iterations", "2")


@pytest.mark.slow
@pytest.mark.ray
def test_an_algorithm_outside_works_with_every_command(installed: Installed) -> None:
    """CrossQ of the examples, in the folder where the commands are started; its class is not needed to act."""
    package = installed.folder / "fever_crossq"
    shutil.copytree(
        ROOT / "examples" / "crossq" / "fever_crossq", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    algo = "fever_crossq:CrossQ"
    small = ("hidden=8", "critic_hidden=8", "batch=16", "updates=2", "warmup=20", "report_steps=100", "--envs", "2")
    words = ("Pendulum-v1", "--algo", algo, *small)

    def fever(*words: str) -> str:
        return installed.run(installed.fever, *words)

    assert re.search(r"policy_delay +3 +gradient steps .* Bhatt et al. 2024", fever("config", algo))
    fever("train", *words, "--stop-steps", "200", "--name", "outside")
    last = json.loads(fever("resume", "outside", "--stop-steps", "400", "--json").splitlines()[-1])
    assert (last["algo"], last["steps"], last["stop_reason"]) == (algo, 400, "steps")
    searched = ("policy_delay=choice(2)", "--search", "grid", "--stop-steps", "500", "--from", "outside", "--json")
    summary = json.loads(fever("tune", *words, *searched, "--name", "searched").splitlines()[-1])
    assert (summary["trials"], summary["stop_reason"]) == (1, "trials")
    trial = (installed.folder / "runs" / "searched" / "trials" / "0001" / "config.yaml").read_text()
    assert f"start_from: {installed.folder / 'runs' / 'outside'}:" in trial
    package.rename(installed.folder / "moved")
    assert json.loads(fever("eval", "outside", "--episodes", "1", "--json"))["episodes"] == 1
    assert "import it from" in fever("export", "outside")
    assert "fever_crossq:CrossQ" in fever("runs")
