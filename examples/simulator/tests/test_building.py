"""The environment with its simulator, and with programs that fail as simulators do."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

EXAMPLE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(EXAMPLE))

from building import HEATSIM, STEPS, Building, read_output  # noqa: E402

from fever.errors import FeverError  # noqa: E402

HALF = np.array([0.5], np.float32)
SIMULATE = f"exec {shlex.join(HEATSIM[:-1])} {EXAMPLE / 'heatsim.py'}"
# Writes its process id and that of a child to the file in its first argument, and then never ends.
HANG = 'sleep 100 & echo $$ $! > "$1.part" && mv "$1.part" "$1"; wait'


def shell(script: str, *arguments: Any) -> list[str]:
    """The command that runs a shell script in place of the simulator."""
    return ["sh", "-c", script, "program", *map(str, arguments)]


def at_later_steps(script: str) -> str:
    """A script that simulates in the reset and runs `script` in the steps after it."""
    return f"if grep -q '\"minutes\": 0' control.json; then {SIMULATE}; fi\n{script}"


def alive(identifier: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{identifier}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Any, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def identifiers(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()]


def trajectory(env: Building, seed: int, steps: int) -> list[tuple[list[float], float]]:
    observation, _ = env.reset(seed=seed)
    seen = [(observation.tolist(), 0.0)]
    for number in range(steps):
        observation, reward, *_ = env.step(np.array([number % 3 / 2], np.float32))
        seen.append((observation.tolist(), reward))
    env.close()
    return seen


def test_keeps_gymnasiums_contract(tmp_path: Path) -> None:
    env = Building(workdir=tmp_path)
    check_env(env, skip_render_check=True)
    env.close()


def test_a_day_ends_after_96_steps_and_heating_is_what_warms() -> None:
    rooms: dict[int, list[float]] = {}
    for power in (0.0, 1.0):
        env = Building()
        env.reset(seed=1)
        for number in range(STEPS if power else 8):
            observation, reward, terminated, truncated, info = env.step(np.array([power], np.float32))
            assert not terminated
            assert truncated == (number == STEPS - 1)
            rooms.setdefault(number, []).append(float(observation[0]))
        env.close()
    assert all(cold < warm for cold, warm in (rooms[number] for number in range(8)))
    assert info == {"simulator_failed": 0.0, "failed_tries": 0.0, "kwh": pytest.approx(3.0 * 24)}
    assert reward < -0.2 * 0.75  # the energy of a step, and far too warm


def test_same_seed_same_trajectory_even_if_tries_fail(tmp_path: Path) -> None:
    # The first try of every step fails, in turn with a crash and with half a file.
    flaky = f"""case $PWD in
        *[02468]-0) echo minute,ro > output.csv; exit 0;;
        *-0) exit 3;;
    esac
    {SIMULATE}"""
    expected = trajectory(Building(), 7, 6)
    assert expected[6][0][3] == pytest.approx(
        np.sin(2 * np.pi * 1.5 / 24)
    )  # half past one: every step continues the one before
    assert trajectory(Building(), 7, 6) == expected
    assert trajectory(Building(), 8, 6) != expected
    env = Building(shell(flaky), workdir=tmp_path)
    assert trajectory(env, 7, 6) == expected
    assert env.program.failures == 7


def test_a_crash_is_retried_and_its_folder_kept(tmp_path: Path) -> None:
    once = at_later_steps(f'mkdir "$1" 2> /dev/null && {{ echo overflow >&2; exit 3; }}; {SIMULATE}')
    (tmp_path / "work").mkdir()
    env = Building(shell(once, tmp_path / "crashed"), workdir=tmp_path / "work")
    env.reset(seed=0)
    *_, truncated, info = env.step(HALF)
    assert (truncated, info["failed_tries"], info["simulator_failed"]) == (False, 1.0, 0.0)
    log = (tmp_path / "work/failed/log.txt").read_text()
    assert log == "overflow\n\ntry-episode-1-step-1-0 failed: ended with exit code 3\n"
    assert {"start.json", "control.json"} <= {path.name for path in (tmp_path / "work/failed").iterdir()}
    env.close()
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["failed"]


def test_a_hang_is_killed_in_time_with_its_children(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    env = Building(shell(at_later_steps(HANG), ids), timeout=2, retries=1, workdir=tmp_path)
    before, _ = env.reset(seed=0)
    begin = time.monotonic()
    observation, reward, terminated, truncated, info = env.step(HALF)
    assert 4.0 <= time.monotonic() - begin < 60.0  # two tries
    assert (reward, terminated, truncated, info["simulator_failed"]) == (0.0, False, True, 1.0)
    assert (observation == before).all()
    assert wait_for(lambda: not any(alive(one) for one in identifiers(ids)))
    assert "killed after 2 s" in (tmp_path / "failed/log.txt").read_text()
    with pytest.raises(ResetNeeded):
        env.step(HALF)
    env.reset()
    env.close()


def test_children_that_outlive_the_program_are_killed(tmp_path: Path) -> None:
    env = Building(shell(f'sleep 100 & echo $! > "$1"; {SIMULATE}', tmp_path / "ids"), workdir=tmp_path)
    env.reset(seed=0)
    assert wait_for(lambda: not alive(identifiers(tmp_path / "ids")[0]))  # killed; it may stay a zombie
    env.close()


@pytest.mark.parametrize(
    ("output", "end"),
    [
        (None, "{}"),
        ("", "{}"),
        ("minute,room,wall,outside,kwh\n0,20,15,5,0\n1,20,15,5,0", "{}"),  # the last line may be incomplete
        ("minute,room,wall,outside,kwh\n0,20,15,5,0\n", "{}"),  # a line is missing
        ("minute,room,wall,outside,kwh\n0,20,15,5,0\n1,20,15,5,0\n2", "{}"),  # a line too many
        ("minute,room,wall,outside,kwh\n0,20,15,5\n1,20,15,5\n", "{}"),
        ("minute,room,wall,outside,kwh\n0,20,15,5,0\n1,20,15,5\n", "{}"),
        ("minute,room,wall,outside,kwh\n0,20,15,5,0\n1,nan,15,5,0\n", "{}"),
        ("minute,room,wall,outside,kwh\n0,20,15,5,0\n1,#####,15,5,0\n", "{}"),
        ("minute,room,wall,outside,kwh\n0,20,15,5,0\n1,1e30,15,5,0\n", "{}"),
        ("minute,wall,room,outside,kwh\n0,20,15,5,0\n1,20,15,5,0\n", "{}"),
        ("minute,room,wall,outside,kwh\n0,20,15,5,0\n1,20,15,5,0\n", '{"minute": 1, "ro'),
        ("minute,room,wall,outside,kwh\n0,20,15,5,0\n1,20,15,5,0\n", None),
    ],
)
def test_output_that_is_not_whole_is_refused(tmp_path: Path, output: str | None, end: str | None) -> None:
    for name, text in (("output.csv", output), ("end.json", end)):
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises((OSError, ValueError)):
        read_output(tmp_path, 1)


def test_whole_output_is_read(tmp_path: Path) -> None:
    (tmp_path / "output.csv").write_text("minute,room,wall,outside,kwh\n0,20,15,5,0\n1,21,15,5,0.5\n")
    (tmp_path / "end.json").write_text("{}")
    assert read_output(tmp_path, 1).tolist() == [[0, 20, 15, 5, 0], [1, 21, 15, 5, 0.5]]


@pytest.mark.parametrize("day", [1, 2], ids=["a whole day", "an early reset"])
def test_garbage_ends_the_episode_and_a_good_one_forgives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, day: int
) -> None:
    monkeypatch.setattr("building.STEPS", day)
    garbage = at_later_steps(f'if test -e "$1"; then echo half > output.csv; exit 0; fi; {SIMULATE}')
    switch = tmp_path / "switch"
    env = Building(shell(garbage, switch), retries=0, failed_episodes=2, workdir=tmp_path)
    for bad in (True, False, True, False):
        switch.touch() if bad else switch.unlink()
        env.reset(seed=0)
        *_, truncated, info = env.step(HALF)
        assert (truncated, info["simulator_failed"]) == (bad or day == 1, float(bad))
    env.close()


def test_too_many_failed_episodes_raise_and_quote_the_log(tmp_path: Path) -> None:
    fatal = at_later_steps("echo reading mesh; echo ERROR 42: negative volume >&2; exit 9")
    env = Building(shell(fatal), retries=1, failed_episodes=2, workdir=tmp_path, worker_index=3, env_index=1)
    env.reset(seed=0)
    assert env.step(HALF)[3]
    env.reset()
    with pytest.raises(FeverError) as error:
        env.step(HALF)
    assert "environment 1 of worker 3 failed in 2 episodes in a row" in str(error.value)
    assert "reading mesh | ERROR 42: negative volume | try-episode-2-step-1-1 failed: ended with exit code 9" in str(
        error.value
    )
    assert str(tmp_path / "failed") in str(error.value)
    env.close()


def test_a_reset_that_never_works_raises(tmp_path: Path) -> None:
    env = Building(shell("exit 1"), retries=0, failed_episodes=3, workdir=tmp_path)
    with pytest.raises(FeverError, match="3 episodes in a row"):
        env.reset(seed=0)
    assert env.program.failures == 3
    env.close()


@pytest.mark.parametrize("program", ["", "no-such-program --fast", []])
def test_a_program_that_is_not_there_is_refused_at_once(program: Any) -> None:
    with pytest.raises(FeverError, match="there is no program"):
        Building(program)


def test_environments_do_not_share_folders(tmp_path: Path) -> None:
    envs = []
    for index in range(2):
        (tmp_path / str(index)).mkdir()
        envs.append(Building(workdir=tmp_path / str(index), env_index=index))
    for env in envs:
        env.reset(seed=5)
    first = [env.step(HALF)[0].tolist() for env in envs]
    assert first[0] == first[1]
    folders = [[path.name for path in (tmp_path / str(index)).iterdir()] for index in range(2)]
    assert folders == [["try-episode-1-step-1-0"]] * 2
    for env in envs:
        env.close()
    assert not list(tmp_path.glob("*/*"))


def test_nothing_accumulates_on_disk(tmp_path: Path) -> None:
    (tmp_path / "try-episode-9-step-9-0").mkdir()  # left by a process that was killed
    flaky = f"case $PWD in *5-0) exit 3;; esac; {SIMULATE}"
    env = Building(shell(flaky), workdir=tmp_path)
    assert not list(tmp_path.iterdir())
    most = 0
    for seed in range(3):
        env.reset(seed=seed)
        for _ in range(10):
            env.step(HALF)
            most = max(most, len(list(tmp_path.rglob("*"))))
    assert env.program.failures == 3
    assert most <= 2 + 5 + 3  # two folders; all files of a good step, inputs and log of one that crashed
    env.close()
    own = Building()
    own.reset(seed=0)
    own.close()
    assert not own.program.workdir.exists()


def test_close_in_the_middle_of_a_step_leaves_no_process(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    env = Building(shell(at_later_steps(HANG), ids), timeout=60, workdir=tmp_path)
    env.reset(seed=0)
    errors: list[Exception] = []

    def step() -> None:
        try:
            env.step(HALF)
        except FeverError as error:
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    assert wait_for(ids.exists)
    assert all(alive(one) for one in identifiers(ids))
    env.close()
    thread.join(60)
    assert not thread.is_alive()
    assert "closed in the middle" in str(errors[0])
    assert wait_for(lambda: not any(alive(one) for one in identifiers(ids)))


def test_close_just_before_a_try_is_said_as_well(tmp_path: Path) -> None:
    env = Building(shell(SIMULATE), timeout=60, workdir=tmp_path)
    env.reset(seed=0)
    assert env.program.guard.stdin is not None
    env.program.guard.stdin.close()  # as `close` does in another thread
    with pytest.raises(FeverError, match="closed in the middle"):
        env.step(HALF)
    env.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_in_the_middle_of_a_step_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    ids = tmp_path / "ids"
    code = f"""
from building import Building
import numpy as np
env = Building({shell(at_later_steps(HANG), ids)!r}, timeout=60, workdir={str(tmp_path)!r})
env.reset(seed=0)
try:
    env.step(np.array([0.5]))
finally:
    env.close()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=EXAMPLE, stderr=subprocess.PIPE)
    assert wait_for(ids.exists)
    parent.send_signal(number)
    assert parent.wait(60) != 0
    assert wait_for(lambda: not any(alive(one) for one in identifiers(ids)))
    if number == signal.SIGINT:
        assert not list(tmp_path.glob("try-*"))


@pytest.mark.slow
def test_fever_trains_on_it_from_the_command_line(tmp_path: Path) -> None:
    program = "python heatsim.py --crash 0.05 --garbage 0.05"
    words = ["train", "building:Building", "--workers", "0", "--envs", "2", "--stop-steps", "128", "--json", "-q"]
    words += ["--runs", str(tmp_path), "--name", "a", "--env-kwargs", json.dumps({"program": program, "timeout": 5})]
    command = [sys.executable, "-m", "fever", *words, "steps=32", "minibatch=32", "epochs=1"]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["steps"] >= 128
    assert {path.name for path in (tmp_path / "a/work").glob("*/*")} <= {"failed"}
