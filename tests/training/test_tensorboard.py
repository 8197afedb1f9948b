"""`--tensorboard`: the real program's answers, its end with the run's, and what happens where it does not start."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import fever
from fever.errors import FeverError
from fever.system import alive, began, descendants
from fever.training import tensorboard
from fever.training.callbacks import Callback, TrainingInfo
from fever.training.tensorboard import Server
from tests.helpers import run_fever, wait_for

SMALL = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 1}
STATUSES = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]


def ask(address: str, path: str, **body: Any) -> Any:
    """What the server says; with a body it is a POST."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(address + path, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


class Asking(Callback):
    """Asks the server, after the first iteration, until it has read the runs; then the training may end."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.answers: dict[str, Any] = {}

    def on_iteration(self, info: TrainingInfo) -> None:
        address = wait_for(lambda: self.said, "address")[0].removeprefix("TensorBoard: ").rstrip("/")
        if info.iteration == 2:  # TensorBoard looks for new rows every five seconds
            names = {"second", "seed-0", "seed-1"}
            wait_for(lambda: names <= set(ask(address, "/data/plugin/scalars/tags")), "runs", pause=0.5)
            hparams = "/data/plugin/hparams"
            self.answers = {
                "tags": ask(address, "/data/plugin/scalars/tags"),
                "points": ask(address, "/data/plugin/scalars/scalars?run=seed-0&tag=return_mean"),
                "experiment": ask(address, f"{hparams}/experiment", experimentName="", includeMetrics=True),
                "groups": ask(
                    address, f"{hparams}/session_groups", experimentName="", allowedStatuses=STATUSES,
                    colParams=[{"hparam": "algo"}], startIndex=0, sliceSize=10,
                ),
            }  # fmt: skip


def test_tensorboard_shows_metrics_and_settings_of_all_runs(tmp_path: Path) -> None:
    more = {"runs": tmp_path, "stop": {"iterations": 4}}
    env = "tests.environments:InfoEnv"
    evaluated = {"eval_every": 64, "eval_episodes": 2, **SMALL}
    first = [fever.train(env, name=f"seed-{seed}", seed=seed, **evaluated, **more) for seed in (0, 1)]
    asking = Asking()
    server = Server(asking.said.append)
    dqn = {"warmup": 20, "batch": 8, "updates": 2, "report_steps": 64, "envs": 2, "hidden": (8, 8)}
    fever.train(env, "dqn", name="second", callbacks=[server, asking], **dqn, **more)
    rows, found = first[0].run.metrics(), asking.answers
    written = {name for row in rows for name in row if name != "steps"}
    assert set(found["tags"]["seed-0"]) == written
    assert {"info/score", "eval/return_mean", "return_mean"} <= written
    points = [(step, value) for _, step, value in found["points"]]
    assert points == [(row["steps"], pytest.approx(row["return_mean"])) for row in rows if "return_mean" in row]
    settings = {one["name"] for one in found["experiment"]["hparamInfos"]}
    assert {"algo", "epochs", "warmup", "hidden"} <= settings  # of both algorithms
    groups = {one["hparams"]["algo"]: one for one in found["groups"]["sessionGroups"]}
    assert [session["name"] for session in groups["ppo"]["sessions"]] == ["seed-0", "seed-1"]  # in one row
    assert [session["status"] for session in groups["ppo"]["sessions"]] == ["STATUS_SUCCESS"] * 2
    assert groups["dqn"]["hparams"]["hidden"] == "8,8"
    process = server.process
    assert process is not None
    assert process.poll() is not None


SERVING = """#!/bin/sh
# Says what TensorBoard says once it serves.
echo first; echo 'TensorBoard 2.21.0 at http://127.0.0.1:7007/ (Press CTRL+C to quit)' >&2
exec sleep 600
"""


def program(folder: Path, text: str) -> Path:
    """A program of the name tensorboard, which is found before the real one."""
    folder.mkdir()
    path = folder / "tensorboard"
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGKILL,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_it_ends_with_the_run_however_that_ends(number: signal.Signals, tmp_path: Path) -> None:
    path = program(tmp_path / "bin", SERVING)
    code = (
        f"import fever.training.tensorboard as board, sys; board.find_program = lambda: {str(path)!r}\n"
        "sys.argv[1:] = 'train CartPole-v1 --stop-steps 1000M --tensorboard'.split()\n"
        "from fever.cli.main import main; main()"
    )
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=file, stderr=file)
    try:
        wait_for(lambda: "TensorBoard: http://127.0.0.1:7007/\n" in output.read_text(), "address")
        (child,) = [
            pid for pid in descendants(process.pid) if b"sleep\x00600" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        start = began(child)
        assert alive(child, start)
        process.send_signal(number)
        assert process.wait(60) == (-9 if number == signal.SIGKILL else 130)
        wait_for(lambda: not alive(child, start), "end of TensorBoard")
    finally:
        process.kill()
        process.wait()


def train_with(path: Path, tmp_path: Path, monkeypatch: Any) -> tuple[Any, list[str]]:
    """Train with this program for TensorBoard until it is told of; the result, and what was said."""
    monkeypatch.setattr(tensorboard, "find_program", lambda: str(path))
    said: list[str] = []

    class Waiting(Callback):
        def on_iteration(self, info: TrainingInfo) -> None:
            wait_for(lambda: said, "word of TensorBoard")

    more = {"callbacks": [Server(said.append), Waiting()], **SMALL}
    return fever.train("CartPole-v1", runs=tmp_path, stop={"iterations": 2}, **more), said


def test_a_tensorboard_that_does_not_start_does_not_end_the_training(tmp_path: Path, monkeypatch: Any) -> None:
    path = program(tmp_path / "bin", "#!/bin/sh\necho first\necho 'ImportError: no protobuf' >&2\nexit 1\n")
    result, said = train_with(path, tmp_path, monkeypatch)
    assert result.stop_reason == "iterations"
    assert said == ["note: TensorBoard did not start, and training goes on: ImportError: no protobuf"]
    path.chmod(0o644)
    result, said = train_with(path, tmp_path, monkeypatch)
    assert said == ["note: TensorBoard did not start, and training goes on: Permission denied"]
    path.write_text("#!/bin/sh\nexec sleep 100\n")
    path.chmod(0o755)
    monkeypatch.setattr(tensorboard, "START_SECONDS", 0.5)
    result, said = train_with(path, tmp_path, monkeypatch)
    assert said == ["note: TensorBoard did not start, and training goes on: it has not answered within 0.5 s"]


def test_it_must_be_installed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tensorboard.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FeverError, match="--tensorboard: TensorBoard is not installed; install it with: pip install"):
        Server(print)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("train", "CartPole-v1", "--on", "slurm"), "with --on that is elsewhere; the run directory comes here while"),
        (("resume", "search"), "--tensorboard is for one run; for a search: tensorboard --logdir runs"),
        (("train", "CartPole-v1", "--seeds", "2"), "for several seeds: tensorboard --logdir runs"),
    ],
)
def test_it_is_refused_where_it_has_no_place(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs/search"
    folder.mkdir(parents=True)
    space = "{space: {gamma: 'uniform(0.9,1)'}}"
    (folder / "config.yaml").write_text(f"env: CartPole-v1\nruns: runs\nsearch: {space}\n")
    (folder / "trials.jsonl").touch()
    done = run_fever(*words, "--tensorboard", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert sentence in done.stderr
