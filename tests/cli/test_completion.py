"""Shell completion: installed by the command and used in real shells; and what the candidates are read from."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from fever.algos.registry import ALGORITHMS, config_of
from fever.cli.completion import algorithms, jobs, runs, setting_names
from tests.helpers import ROOT, wait_for


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_settings_read_from_the_source_are_those_of_the_model(algo: str) -> None:
    fields = config_of(algo).model_fields
    assert list(setting_names(algo).items()) == [(name, field.description) for name, field in fields.items()]


def test_algorithms_include_those_of_rllib() -> None:
    pytest.importorskip("torch")
    from fever.rllib.catalogue import names

    assert algorithms("p") == ["ppo"]
    assert algorithms("rllib:") == sorted(names(), key=str.lower)


def test_jobs_are_completed_by_their_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEVER_HOME", str(tmp_path))
    assert jobs("") == ["last"]
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "slurm-7.json").write_text("{}")
    assert jobs("") == ["slurm-7", "last"]
    assert jobs("slurm") == ["slurm-7"]


def test_names_that_mean_something_to_a_shell_are_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEVER_HOME", str(tmp_path))
    for name in ("x\\$(touch PWNED)", "x`y`", "a b", "a;b", "-x", "*", "good-1.5+x"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
        (tmp_path / "jobs").mkdir(exist_ok=True)
        (tmp_path / "jobs" / f"{name}.json").touch()
    context = SimpleNamespace(params={"runs": str(tmp_path / "runs")})
    assert runs(context, "") == jobs("") == ["good-1.5+x", "last"]


def test_completion_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['fever']\n"
        "try:\n import fever.cli.main; fever.cli.main.main()\nexcept SystemExit: pass\n"
        "assert not {'jax', 'ray', 'gymnasium', 'numpy', 'fever.config', 'matplotlib'} & set(sys.modules)"
    )
    variables = {"_FEVER_COMPLETE": "complete_bash", "COMP_WORDS": "fever train A gam", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "gamma=\n", "")


class Home:
    """A home folder with a `fever` on the PATH, two runs, and a shell whose completion `fever` has installed."""

    def __init__(self, shell: str, path: Path) -> None:
        self.shell, self.path = shell, path
        program = path / "bin" / "fever"
        program.parent.mkdir()
        program.write_text(f"#!{sys.executable}\nfrom fever.cli.main import main\nmain()\n")
        program.chmod(0o755)
        for name in ("alpha", "beta"):
            (path / "runs" / name).mkdir(parents=True)
            (path / "runs" / name / "config.yaml").touch()
        kept = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
        paths = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(path)}
        self.environment = {**kept, **paths, "TERM": "dumb"}
        installed = self.run("fever --install-completion; true")
        assert f"{shell} completion installed" in installed.stdout, installed.stderr

    def run(self, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.shell, "-c", text], cwd=self.path, env=self.environment, capture_output=True, text=True, timeout=120
        )

    def press_tab(self, line: str) -> str:
        """The line after TAB and X in an interactive shell, read by turning it into an `echo` of itself."""
        result = self.path / "line"
        result.unlink(missing_ok=True)
        process, terminal = pty.fork()
        if process == 0:
            os.chdir(self.path)
            os.execvpe(self.shell, [self.shell, "-i"], self.environment)
        try:
            os.write(terminal, f'{line}\tX\x01echo "\x05" > line.new && mv line.new line\r'.encode())
            os.set_blocking(terminal, False)

            def written() -> bool:
                with suppress(OSError):
                    os.read(terminal, 65536)  # or the shell would wait for a reader
                return result.exists()

            wait_for(written, f"{self.shell} to complete {line}")
        finally:
            os.kill(process, 9)
            os.waitpid(process, 0)
            os.close(terminal)
        return result.read_text().removesuffix("\n")


@pytest.fixture
def at_home(tmp_path: Path) -> Callable[[str], Home]:
    def make(shell: str) -> Home:
        if shutil.which(shell) is None:
            (pytest.fail if os.environ.get("FEVER_REQUIRE") else pytest.skip)(f"{shell} is not installed")
        return Home(shell, tmp_path)

    return make


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_tab_completes_in_an_interactive_shell(shell: str, at_home: Callable[[str], Home]) -> None:
    home = at_home(shell)
    assert home.press_tab("fever tra") == "fever train X"
    assert home.press_tab("fever train A --algo pp") == "fever train A --algo ppo X"
    assert home.press_tab("fever train A --algo sac temp") == "fever train A --algo sac temperature=X"
    assert home.press_tab("fever eval al") == "fever eval alpha X"


def test_zsh_runs_nothing_of_what_is_offered(at_home: Callable[[str], Home]) -> None:
    home = at_home("zsh")
    lines = "touch A", "$(touch B)", "`touch C`\tits $(touch D)"
    (home.path / "bin" / "fever").write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    home.press_tab("fever show ")
    home.press_tab("fever show x")
    assert not [name for name in "ABCD" if (home.path / name).exists()]


def test_fish_completes(at_home: Callable[[str], Home]) -> None:
    home = at_home("fish")

    def complete(line: str) -> list[str]:
        return [row.partition("\t")[0] for row in home.run(f"complete -C '{line}'").stdout.splitlines()]

    assert complete("fever tra") == ["train"]
    assert complete("fever train A --algo pp") == ["ppo"]
    assert complete("fever train A --algo sac temp") == ["temperature="]
    assert complete("fever eval ") == ["alpha", "beta", "last"]
