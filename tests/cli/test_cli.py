"""Every command in a subprocess, as a user would type it, and every mistake that a user would make."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, run_fever, wait_for


def test_bare_command_solves_cartpole_and_says_so(trained: dict[str, Any]) -> None:
    wanted = {"run", "env", "algo", "workers", "steps", "episodes", "seconds", "steps_per_second", "return_mean"}
    assert wanted <= set(trained)
    assert trained["stop_reason"] == "reward"
    assert trained["return_mean"] >= 475
    assert trained["stdout"].count("\n") == 1  # the object and nothing else


def test_clean_run_prints_no_warning(trained: dict[str, Any]) -> None:
    assert "warn" not in trained["stderr"].lower()
    log = (trained["folder"] / trained["run"] / "log.txt").read_text()
    assert "WARNING" not in log


def test_mujoco_trains_without_a_word_of_warning(fever: Any, tmp_path: Path) -> None:
    done = fever("train", "HalfCheetah-v5", "--envs", "2", "--stop-iterations", "1", "-q", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_workers_zero_never_imports_ray(tmp_path: Path) -> None:
    code = (
        "import sys, fever; fever.train('CartPole-v1', stop={'iterations': 1}); "
        "assert 'ray' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)


def test_eval_scores_the_best_policy(trained: dict[str, Any]) -> None:
    done = run_fever("eval", "first", "--episodes", "10", "--json", cwd=trained["folder"])
    scores = json.loads(done.stdout)
    assert done.returncode == 0
    assert scores["episodes"] == 10
    assert scores["return_mean"] > 450


def test_eval_prints_a_table(trained: dict[str, Any]) -> None:
    done = run_fever("eval", "last", "--episodes", "3", "--stochastic", cwd=trained["folder"])
    assert "return mean" in done.stdout
    assert "length mean" in done.stdout


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_watch_films_an_episode(trained: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    video = tmp_path / f"episode.{suffix}"
    done = run_fever("watch", "first", "--to", str(video), "--steps", "40", cwd=trained["folder"])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert video.stat().st_size > 1000


def test_runs_lists_and_show_describes(trained: dict[str, Any]) -> None:
    rows = json.loads(run_fever("runs", "--json", cwd=trained["folder"]).stdout)
    assert [(row["run"], row["status"]) for row in rows] == [("first", "reward")]
    assert rows[0]["workers"] == 0
    listed = run_fever("runs", cwd=trained["folder"]).stdout
    assert listed.splitlines()[0].split() == ["run", "env", "algo", "status", "workers", "steps", "return", "steps/s"]
    assert "first CartPole-v1 ppo  goal reached" in listed
    shown = run_fever("show", "first", cwd=trained["folder"]).stdout
    assert "learning_rate" in shown
    assert "return_mean" in shown
    described = json.loads(run_fever("show", "first", "--json", cwd=trained["folder"]).stdout)
    assert described["config"]["stop"]["reward"] == 475


def test_plot_draws_one_run_and_several(trained: dict[str, Any], tmp_path: Path) -> None:
    for names in (["first"], ["first", "first"]):
        picture = tmp_path / f"{len(names)}.png"
        done = run_fever("plot", *names, "--to", str(picture), cwd=trained["folder"])
        assert done.returncode == 0, done.stderr
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_export_acts_with_numpy_alone(trained: dict[str, Any], tmp_path: Path) -> None:
    done = run_fever("export", "first", "--to", str(tmp_path / "balance"), cwd=trained["folder"])
    assert done.returncode == 0, done.stderr
    code = (
        "import sys; from balance import load; import numpy as np; a = load().act(np.array([0, 0, 0.1, 0.5], 'f'));"
        "assert a == 1, a; foreign = {'jax', 'gymnasium', 'fever', 'pydantic', 'safetensors'} & set(sys.modules);"
        "assert not foreign, foreign"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)


def test_resume_continues_the_curves(fever: Any, tmp_path: Path) -> None:
    fever("train", "CartPole-v1", "--name", "a", "--stop-iterations", "4", "-q")
    done = fever("resume", "a", "--stop-iterations", "7", "--json")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["iterations"] == 7
    rows = [json.loads(line) for line in (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, 8))
    assert all(after["steps"] > before["steps"] for before, after in pairwise(rows))
    assert all(after["seconds"] > before["seconds"] for before, after in pairwise(rows))


def test_train_from_a_file_with_options_on_top(fever: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "env: tests.environments:TimeLimitEnv\nenv_kwargs: {limit: 7}\nenvs: 4\nseed: 5\n"
        "stop: {time: 10m, iterations: 50}\nsettings: {steps: 16, minibatch: 64, learning_rate: 1e-3}\n"
    )
    done = fever("train", "-f", "run.yaml", "epochs=2", "--stop-iterations", "2", "--name", "a", "--json")
    assert done.returncode == 0, done.stderr
    config = json.loads(fever("show", "a", "--json").stdout)["config"]
    assert (config["seed"], config["envs"], config["env_kwargs"]) == (5, 4, {"limit": 7})
    assert (config["settings"]["epochs"], config["settings"]["learning_rate"]) == (2, 0.001)
    assert (config["stop"]["iterations"], config["stop"]["seconds"]) == (2, 600)


def test_own_environment_next_to_the_command(fever: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from tests.environments import TimeLimitEnv\ndef build(size=3):\n    return TimeLimitEnv(size)\n"
        "import gymnasium\ngymnasium.register('Mine-v0', entry_point='mine:build', max_episode_steps=9)\n"
    )
    for name in ("mine:build", "mine:Mine-v0"):
        words = ("--env-kwargs", '{"size": 5}', "--stop-iterations", "1", "--json")
        done = fever("train", name, *words)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["length_mean"] == 5


def test_json_of_two_runs_with_one_seed_is_the_same(fever: Any) -> None:
    words = ("train", "CartPole-v1", "--stop-iterations", "3", "--seed", "4", "--json", "-q")
    first, second = (json.loads(fever(*words, "--name", name).stdout) for name in "ab")
    assert [first[key] for key in ("steps", "return_mean")] == [second[key] for key in ("steps", "return_mean")]


def test_config_lists_every_setting_with_its_source(fever: Any) -> None:
    from fever.algos.ppo import PPOConfig

    printed = fever("config", "ppo").stdout
    assert all(name in printed for name in PPOConfig.model_fields)
    assert "Schulman et al. 2017" in printed
    names = fever("config").stdout.split()
    assert names[:11] == ["ppo", "a2c", "trpo", "impala", "appo", "dqn", "qrdqn", "apex", "sac", "td3", "tqc"]
    assert "rllib:DreamerV3" in names


def test_help_answers_without_heavy_imports() -> None:
    code = (
        "import sys; sys.argv = ['fever', '--help']\n"
        "try:\n import fever.cli.main; fever.cli.main.main()\nexcept SystemExit: pass\n"
        "assert not {'jax', 'ray', 'gymnasium', 'numpy', 'pydantic', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


MISTAKES = {
    "unknown environment": (["train", "CartPol-v1"], "did you mean CartPole-v1"),
    "no version": (["train", "cartpole"], "did you mean CartPole-v1"),
    "no module": (["train", "no_such:Thing"], "there is no module no_such"),
    "no attribute": (["train", "tests.environments:TimeLimitEn"], "did you mean TimeLimitEnv"),
    "not an environment": (["train", "numpy:get_include"], "observation_space"),
    "wrong arguments": (["train", "CartPole-v1", "--env-kwargs", '{"size": 3}'], "size"),
    "number of environments": (["train", "CartPole-v1", "--env-kwargs", '{"num_envs": 3}'], "--envs"),
    "arguments not JSON": (["train", "CartPole-v1", "--env-kwargs", "{size"], "not JSON"),
    "arguments no object": (["train", "CartPole-v1", "--env-kwargs", "3"], "JSON object"),
    "unknown setting": (
        ["train", "CartPole-v1", "learning_rat=1"],
        "did you mean learning_rate? It has: learning_rate,",
    ),
    "setting out of range": (["train", "CartPole-v1", "gamma=1.5"], "ppo: gamma=1.5 cannot be used: must be 1 or less"),
    "setting of wrong type": (["train", "CartPole-v1", "epochs=many"], "epochs='many'"),
    "setting that cannot be read": (
        ["train", "CartPole-v1", "learning_rate=[1,"],
        "the value of learning_rate cannot be read: '[1,'",
    ),
    "setting without value": (["train", "CartPole-v1", "epochs"], "name=value"),
    "setting that does not fit": (["train", "CartPole-v1", "--envs", "3"], "minibatch=192 does"),
    "schedule without end": (
        ["train", "CartPole-v1", "learning_rate_schedule=linear", "--stop-time", "1m"],
        "--stop-steps",
    ),
    "unknown algorithm": (["train", "CartPole-v1", "--algo", "pppo"], "did you mean ppo"),
    "unknown option": (["train", "CartPole-v1", "--sed", "3"], "--seed"),
    "workers": (
        ["train", "CartPole-v1", "--workers", "some"],
        "--workers some: must be a whole number, auto, all or ranks",
    ),
    "negative workers": (
        ["train", "CartPole-v1", "--workers", "-1"],
        "--workers -1: must be 0 or more, auto, all or ranks",
    ),
    "time": (
        ["train", "CartPole-v1", "--stop-time", "soon"],
        "--stop-time soon: 'soon' is not a time; write 90s, 10m or 2h",
    ),
    "device": (["train", "CartPole-v1", "--device", "gpu"], "JAX sees no GPU"),
    "name": (["train", "CartPole-v1", "--name", "a/b"], "letters, digits"),
    "nothing": (["train"], "fever train CartPole-v1"),
    "name of another library's": (["train", "CartPole-v1", "lr=1e-3"], "did you mean learning_rate? It has: "),
    "option as a setting": (["train", "CartPole-v1", "seed=3"], "did you mean --seed? It has: "),
    "list of widths": (["train", "CartPole-v1", "hidden=64,x"], "hidden.1='x' cannot be used: must be a whole number"),
    "no seconds": (["train", "CartPole-v1", "--checkpoint-every", "0"], "--checkpoint-every 0: must be greater than 0"),
    "number that is none": (["train", "CartPole-v1", "--envs", "x"], "valid int"),
    "no value": (
        ["train", "CartPole-v1", "gamma="],
        "gamma= is not a setting with a value; write settings as name=val",
    ),
    "no trials": (
        ["tune", "CartPole-v1", "gamma=uniform(0.9,1)", "--trials", "0"],
        "--trials 0: must be greater than 0",
    ),
    "no search": (
        ["tune", "CartPole-v1", "gamma=uniform(0.9,1)", "--search", "luck"],
        "--search luck: must be random, grid or optuna",
    ),
    "no file": (["train", "-f", "none.yaml"], "none.yaml cannot be read"),
    "no run": (["eval", "none"], "there is no run none"),
    "no last run": (["resume", "last"], "there is no run in runs"),
    "no command": (["trian"], "trian"),
    "no spaces": (["train", "tests.environments:TextEnv"], "Text is not supported"),
    "no bounds": (["train", "tests.environments:UnboundedEnv"], "cannot be trained on: the action space has no bounds"),
    "no bounds, measured": (
        ["train", "tests.environments:UnboundedEnv", "--workers", "auto"],
        "tests.environments:UnboundedEnv cannot be trained on: the action space has no bounds",
    ),
    "simulator fails": (["train", "tests.environments:FailingEnv"], "FailingEnv: the engine has ended"),
    "nan reward": (
        ["train", "tests.environments:BrokenEnv", "--env-kwargs", '{"fault": "nan_reward", "only": 2}'],
        "BrokenEnv breaks its contract at step 3 of environment 2 of worker 0: the reward is NaN",
    ),
    "wrong shape": (
        ["train", "tests.environments:BrokenEnv", "--env-kwargs", '{"fault": "wrong_shape", "only": 1}'],
        "at step 3 of environment 1: the observation has shape (4,)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_sentence_and_leaves_nothing(fever: Any, tmp_path: Path, mistake: str) -> None:
    words, sentence = MISTAKES[mistake]
    done = fever(*words)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert done.stderr.startswith("fever: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_name_that_exists_is_refused_and_untouched(trained: dict[str, Any]) -> None:
    before = sorted((trained["folder"] / "runs/first").rglob("*"))
    done = run_fever("train", "CartPole-v1", "--name", "first", cwd=trained["folder"])
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert sorted((trained["folder"] / "runs/first").rglob("*")) == before


def test_bad_yaml_is_named_with_its_line(fever: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("env: CartPole-v1\nstop: {reward: [}\n")
    done = fever("train", "-f", "bad.yaml")
    assert done.returncode == 2
    assert "bad.yaml is not YAML (line 2)" in done.stderr


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a long run and wait until its first metrics are written; it is killed at the latest with the test's end."""
    started: list[subprocess.Popen[str]] = []

    def call(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fever", "train", *words, "--name", "a", "--stop-steps", "100000000"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        metrics = tmp_path / "runs/a/metrics.jsonl"
        try:
            wait_for(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size), "metrics")
            assert process.poll() is None, "it has ended"
        except AssertionError as error:
            process.kill()  # or reading what it says would wait for its end
            raise AssertionError(process.communicate()[1]) from error
        return process

    yield call
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_closes_and_says_how_to_resume(start: Any, tmp_path: Path, number: int) -> None:
    (tmp_path / "closed").mkdir()
    words = ["tests.environments:ClosingEnv", "--env-kwargs", json.dumps({"folder": str(tmp_path / "closed")})]
    process = start(*words, "--envs", "2", "steps=16", "minibatch=32")
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "next: fever resume runs/a" in output
    assert sorted(path.name for path in (tmp_path / "closed").iterdir()) == ["closed-0", "closed-1"]
    described = json.loads(run_fever("show", "a", "--json", cwd=tmp_path).stdout)
    assert described["status"] == "interrupted"
    last = described["last"]["iteration"]
    assert described["checkpoints"][-1]["iteration"] == last
    done = run_fever("resume", "a", "--stop-steps", str(described["last"]["steps"] + 100), "--json", cwd=tmp_path)
    assert json.loads(done.stdout.splitlines()[-1])["stop_reason"] == "steps", done.stderr


def test_killed_run_keeps_its_metrics_and_can_be_resumed(start: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("checkpoint_seconds: 0.2\n")
    process = start("CartPole-v1", "-f", "run.yaml")
    wait_for(lambda: list((tmp_path / "runs/a").glob("checkpoints/0*")), "checkpoint")
    busy = run_fever("resume", "a", cwd=tmp_path)
    assert (busy.returncode, "is being trained right now" in busy.stderr) == (2, True)
    assert json.loads(run_fever("runs", "--json", cwd=tmp_path).stdout)[0]["status"] == "running"
    process.kill()
    process.communicate()
    assert json.loads(run_fever("runs", "--json", cwd=tmp_path).stdout)[0]["status"] == "killed"
    rows = (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()
    done = run_fever("resume", "a", "--stop-steps", "1000", cwd=tmp_path)
    assert "has met its stop rule (steps) already" in done.stderr
    steps = json.loads(rows[-1])["steps"] + 20_000
    done = run_fever("resume", "a", "--stop-steps", str(steps), "--json", cwd=tmp_path)
    assert json.loads(done.stdout.splitlines()[-1])["steps"] >= steps, done.stderr


def test_a_search_is_not_gone_on_with_elsewhere_unless_it_is_trusted(fever: Any, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "found"
    (folder / "tune").mkdir(parents=True)
    (folder / "tune" / "tuner.pkl").write_bytes(b"who knows")
    (folder / "facts.json").write_text("{}")
    (folder / "config.yaml").write_text("env: CartPole-v1\nsearch: {space: {gamma: 'uniform(0.9,1)'}}\n")
    for words in ((), ("--on", "slurm")):
        done = fever("resume", "found", *words)
        assert done.returncode == 2
        assert "runs/found/tune holds pickles" in done.stderr
        assert "--trust" in done.stderr


def test_a_missing_extra_is_named(monkeypatch: Any, capsys: Any) -> None:
    from fever.cli import main as cli

    monkeypatch.setitem(sys.modules, "Box2D", None)  # importing it fails
    monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d.lunar_lander", raising=False)
    monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d", raising=False)
    monkeypatch.setattr(sys, "argv", ["fever", "train", "LunarLander-v3"])
    assert cli._run() == 2
    needs = "LunarLander-v3 needs a package that is not installed; install it with:"
    assert capsys.readouterr().err == f'fever: {needs} pip install "fever[box2d]"\n'


@pytest.mark.slow
@pytest.mark.parametrize("env", ["LunarLander-v3", "CarRacing-v3"])
def test_box2d_trains_without_a_word_of_warning(fever: Any, env: str) -> None:
    done = fever("train", env, "--envs", "1", "--stop-iterations", "1", "steps=8", "minibatch=8", "epochs=1", "-q")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [(), ("aws",)])
def test_without_a_command_help_is_printed(fever: Any, words: tuple[str, ...]) -> None:
    done = fever(*words)
    assert (done.returncode, done.stderr) == (2, "")
    assert "Usage: python -m fever" in done.stdout


def test_version(fever: Any) -> None:
    from fever import __version__

    assert (fever("--version").stdout, fever("--version").returncode) == (f"fever {__version__}\n", 0)


def test_checkpoints_are_written_and_kept_as_the_options_say(fever: Any, tmp_path: Path) -> None:
    words = ("--checkpoint-every", "0.001s", "--checkpoint-keep", "2", "--stop-iterations", "4", "-q")
    assert fever("train", "CartPole-v1", "hidden=8,8", "--name", "a", *words).returncode == 0
    config = json.loads(fever("show", "a", "--json").stdout)["config"]
    assert (config["checkpoint_seconds"], config["checkpoint_keep"]) == (0.001, 2)
    assert config["settings"]["hidden"] == [8, 8]
    assert {"00000003", "00000004"} <= {path.name for path in (tmp_path / "runs/a/checkpoints").iterdir()}
    assert fever("resume", "a", "--checkpoint-keep", "1", "--stop-iterations", "5", "-q").returncode == 0
    assert json.loads(fever("show", "a", "--json").stdout)["config"]["checkpoint_keep"] == 1


def test_ctrl_c_is_said_and_not_swallowed(monkeypatch: Any, capsys: Any) -> None:
    from fever.cli import main as cli
    from fever.training import trainer

    def interrupted(*given: Any, **more: Any) -> None:
        raise KeyboardInterrupt("before anything was learned; nothing is left behind")

    monkeypatch.setattr(trainer, "train", interrupted)
    monkeypatch.setattr(sys, "argv", ["fever", "train", "CartPole-v1"])
    assert cli._run() == 130
    assert capsys.readouterr().err == "fever: interrupted before anything was learned; nothing is left behind\n"


def test_a_video_of_another_kind_is_refused_before_it_is_filmed(
    trained: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fever.errors import FeverError
    from fever.runs.evaluate import source_of
    from fever.runs.film import record
    from fever.runs.run import Run

    run = Run(trained["folder"] / trained["run"])
    monkeypatch.setattr("fever.runs.film.make_env", lambda *arguments: pytest.fail("it is played"))
    with pytest.raises(FeverError, match=r"x\.avi: a video is written as \.mp4 or \.gif"):
        record(run.checkpoint(), source_of(run), tmp_path / "videos" / "x.avi", 10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [("watch", "--steps", "5", "x.mp4"), ("watch", "--steps", "5", "x.gif"), ("export", "x")]
)
def test_a_place_that_cannot_be_written_is_one_sentence(
    words: tuple[str, ...], trained: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    *command, name = words
    done = run_fever(*command, "first", "--to", str(tmp_path / "file" / name), cwd=trained["folder"])
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"fever: {tmp_path / 'file' / name} cannot be ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_rank_that_comes_late_does_not_take_its_own_job_for_anothers(tmp_path: Path, monkeypatch: Any) -> None:
    """Rank 0 has begun already when the others look at the run: only it asks whether somebody has it."""
    from fever.cli import main as cli
    from fever.config import RunConfig
    from fever.job import JobFolder
    from fever.launch import dispatch as launch
    from fever.launch.jobs import remember
    from fever.runs.run import Run

    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "home"))
    run = Run.create(RunConfig(env="CartPole-v1", runs=str(tmp_path), name="one"), {})
    JobFolder(run.job).write("job.json", {"kind": "mpi", "id": "7", "submitted": 0.0})
    JobFolder(run.job).write_text("alive", "rank 0")
    remember("mpi-7", run.path)
    went: list[Any] = []
    monkeypatch.setattr(launch, "run_elsewhere", lambda order: went.append(order.run) or 0)
    monkeypatch.setattr(sys, "argv", ["fever", "resume", str(run.path), "--on", "mpi"])
    assert cli._run() == 0
    assert went == [run.path]
    monkeypatch.setattr(sys, "argv", ["fever", "resume", str(run.path)])
    assert cli._run() == 2
