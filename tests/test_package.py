"""The wheel: what is in it, and that it works where the checkout is not."""

from __future__ import annotations

import os
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


def test_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """Dependencies come from this environment: what is tested is fever's own package, away from the checkout."""
    place = tmp_path / "venv"
    venv.create(place)
    program = place / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(program), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True,
        timeout=300,
    )
    [site] = place.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(str(program), "-c", "import fever; print(fever.__file__)") == f"{site}/fever/__init__.py\n"
    fever = str(place / "bin" / "fever")
    assert run(fever, "--version") == f"fever {__version__}\n"
    assert "Usage: fever" in run(fever, "--help")
    assert "learning_rate" in run(fever, "config", "ppo")
    assert "next: fever" in run(fever, "train", "CartPole-v1", "--stop-iterations", "2")
