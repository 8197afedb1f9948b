"""RLlib's env runners that fail: the run ends with their error, and nothing is left in the home folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fever.errors import TrainingError
from fever.rllib import failures
from fever.rllib.failures import PATIENCE, EnvRunnerFailures
from tests.helpers import ROOT, run_fever

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = ("train_batch_size_per_learner=100", "minibatch_size=50", "num_epochs=1")
ENVS = """
import os
import time
import gymnasium as gym
import numpy as np

os.environ.setdefault("DRIVER", str(os.getpid()))  # workers inherit it
HERE = os.environ["DRIVER"] == str(os.getpid())

class Good(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    left = 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 20
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.left -= 1
        return np.zeros(2, np.float32), 1.0, False, self.left == 0, {}

class NoConstructor(Good):
    def __init__(self):
        if not HERE:
            raise ValueError("no licence")

class NoReset(Good):
    def reset(self, **options):
        if not HERE:
            raise ValueError("no licence")
        return super().reset(**options)

class NoStep(Good):
    def step(self, action):
        raise ValueError("no licence")

class Exits(Good):
    def step(self, action):
        os._exit(3)

class Slow(Good):
    def step(self, action):
        time.sleep(0.2)
        return super().step(action)
"""


class Group:
    """Counts of env runners."""

    healthy, restarts, dropped = 0, 0, 0

    def num_remote_workers(self) -> int:
        return 2

    def num_healthy_remote_workers(self) -> int:
        return self.healthy

    def num_remote_worker_restarts(self) -> int:
        return self.restarts

    def num_env_runners_dropped_lifetime(self) -> int:
        return self.dropped


class Algorithm:
    """An RLlib algorithm whose training step does nothing."""

    class config:
        sample_timeout_s = 60.0

    def __init__(self) -> None:
        self.env_runner_group = Group()

    def training_step(self) -> None:
        pass


class Checked:
    """`EnvRunnerFailures` of such an algorithm, with steps and reports that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports: dict[bytes, str] = {}
        self.steps, self.said = 0, []
        monkeypatch.setattr(failures, "reports", lambda run: self.reports)
        self.algorithm = Algorithm()
        self.group = self.algorithm.env_runner_group
        EnvRunnerFailures("run", self.algorithm, lambda: self.steps, self.said.append)

    said: list[str]

    def fail(self, count: int) -> None:
        """So many more failures of env runners."""
        self.reports |= {f"{len(self.reports) + place}".encode(): "ValueError: no licence" for place in range(count)}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Checked:
    return Checked(monkeypatch)


def test_all_runners_failing_before_the_first_step_end_the_run(checked: Checked) -> None:
    checked.fail(1)
    checked.algorithm.training_step()  # the other one has not failed yet
    checked.fail(1)
    with pytest.raises(TrainingError, match=r"workers fail before they have sampled anything: ValueError: no licence"):
        checked.algorithm.training_step()


def test_runners_whose_processes_end_without_a_word_end_the_run(checked: Checked) -> None:
    checked.algorithm.training_step()
    checked.group.restarts = 2
    with pytest.raises(TrainingError, match="end without an exception"):
        checked.algorithm.training_step()


def test_failures_between_samples_are_borne(checked: Checked) -> None:
    for _ in range(10):
        checked.steps += 100
        checked.algorithm.training_step()
        checked.fail(2 * PATIENCE - 1)
        checked.algorithm.training_step()
    checked.fail(1)
    with pytest.raises(TrainingError):
        checked.algorithm.training_step()


def test_slow_runners_are_told_of_once_and_never_end_the_run(checked: Checked) -> None:
    checked.group.healthy, checked.group.dropped, checked.group.restarts = 1, 1, 50
    checked.fail(50)
    for _ in range(10):
        checked.algorithm.training_step()
    assert len(checked.said) == 1
    assert "sample_timeout_s" in checked.said[0]


def train(folder: Path, env: str, *words: str, command: str = "train") -> Any:
    """Train with one env runner, in a folder with a fresh home folder in it."""
    (folder / "runners.py").write_text(ENVS)
    (folder / "home").mkdir()
    line = (command, f"runners:{env}", "--algo", "rllib:PPO", "--workers", "1", *SMALL, *words)
    variables = {"HOME": str(folder / "home"), "MPLCONFIGDIR": str(folder / "matplotlib")}  # a search draws a picture
    return run_fever(*line, cwd=folder, PYTHONPATH=f"{ROOT}:{folder}", **variables)


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_that_samples_nothing_fails_with_the_workers_error(tmp_path: Path) -> None:
    done = train(tmp_path, "NoReset", "--stop-time", "60s", "-q", "delay_between_env_runner_restarts_s=0.1")
    assert done.returncode == 1
    assert "fail before they have sampled anything: ValueError: no licence (runners.py:" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "home").iterdir()) == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    ("env", "code", "text"),
    [
        ("NoConstructor", 2, "workers cannot start: runners:NoConstructor cannot be made: ValueError: no licence"),
        ("NoStep", 1, "sampled anything: ValueError: no licence"),
        ("Exits", 1, "end without an exception"),
    ],
)
def test_other_failures_have_a_sentence_too(tmp_path: Path, env: str, code: int, text: str) -> None:
    done = train(tmp_path, env, "--stop-time", "60s", "-q")
    assert done.returncode == code
    assert text in done.stderr
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.slow
@pytest.mark.ray
def test_a_slow_environment_and_a_search_leave_nothing_at_home(tmp_path: Path) -> None:
    done = train(tmp_path, "Slow", "--stop-time", "20s", "sample_timeout_s=2", "rollout_fragment_length=50")
    assert done.returncode == 0
    assert done.stdout.count("raise sample_timeout_s") == 1
    assert list((tmp_path / "home").iterdir()) == []
    (other := tmp_path / "search").mkdir()
    words = ("lr=loguniform(1e-4,1e-3)", "--trials", "1", "--stop-iterations", "1", "-q")
    assert train(other, "Good", *words, command="tune").returncode == 0
    assert list((other / "home").iterdir()) == []
