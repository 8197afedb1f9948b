from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fever_go import gtp
from fever_go.board import BLACK, WHITE, move_of
from fever_go.gtp import Engine, EngineError, find_program

# An engine that answers every command with "=", except as {special} says. `starts` counts its processes.
FAKE = """
import os, signal, sys, time
with open("starts", "a") as file: print(*sys.argv[1:], file=file)
starts = len(open("starts").readlines())
def answer(text): print(text, end="\\r\\n\\r\\n", flush=True)
for line in sys.stdin:
    command = line.split()
    with open("commands", "a") as file: print(starts, line.strip(), file=file)
    {special}
    if command[0] == "quit": break
    answer("= E5" if command[0] == "genmove" else "=")
"""


def fake(folder: Path, special: str = "", *arguments: str, timeout: float = 5.0) -> Engine:
    (folder / "engine.py").write_text(FAKE.replace("{special}", special))
    return Engine([sys.executable, "-S", str(folder / "engine.py"), *arguments], 3, timeout, folder)


def commands(folder: Path, start: int) -> list[str]:
    """The commands that the process number `start`, counted from 1, was sent."""
    lines = [line.split(" ", 1) for line in (folder / "commands").read_text().splitlines()]
    return [text for number, text in lines if int(number) == start]


def is_running(pid: int) -> bool:
    """Whether the process exists, also as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def pid_of(engine: Engine) -> int:
    assert engine.process is not None
    return engine.process.pid


def test_a_missing_program_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="engine 'no-such-engine' is not installed here"):
        Engine("no-such-engine --mode gtp")
    monkeypatch.setattr(gtp.shutil, "which", lambda *_, **__: None)
    with pytest.raises(EngineError, match="install it with: apt install gnugo"):
        find_program("gnugo")


def test_a_game_with_gnugo(gnugo: Engine) -> None:
    gnugo.new_game(seed=1, size=9, komi=6.5)
    gnugo.play(BLACK, "E5")
    vertex = gnugo.genmove(WHITE)
    assert 0 <= move_of(vertex, 9) < 81
    assert gnugo.ask("list_stones white") == vertex
    assert gnugo.ask("get_komi") == "6.5"
    assert gnugo.ask("get_random_seed") == "1"
    gnugo.new_game(seed=2, size=7, komi=0.5)
    assert gnugo.ask("list_stones black") == ""
    assert gnugo.ask("query_boardsize") == "7"
    assert gnugo.starts == 1


def test_an_engine_that_is_killed_is_started_again_with_the_same_position(gnugo: Engine) -> None:
    gnugo.new_game(seed=1, size=9, komi=6.5)
    for vertex in ("E5", "E6", "pass"):
        gnugo.play(BLACK, vertex)
        gnugo.genmove(WHITE)
    before = [gnugo.ask(command) for command in ("showboard", "move_history", "get_komi", "get_random_seed")]
    old = pid_of(gnugo)
    os.kill(old, signal.SIGKILL)
    after = [gnugo.ask(command) for command in ("showboard", "move_history", "get_komi", "get_random_seed")]
    assert after == before
    assert gnugo.starts == 2
    assert not is_running(old)
    gnugo.play(BLACK, "A1")
    gnugo.genmove(WHITE)


def test_close_leaves_no_process_and_can_be_called_again(gnugo: Engine) -> None:
    gnugo.close()
    gnugo.new_game(seed=1, size=9, komi=6.5)
    pid = pid_of(gnugo)
    assert os.getpgid(pid) == pid != os.getpgid(0)
    gnugo.close()
    assert not is_running(pid)
    gnugo.close()


def test_an_engine_that_nobody_closed_ends_with_its_object(tmp_path: Path) -> None:
    engine = fake(tmp_path)
    engine.new_game(seed=1, size=9, komi=6.5)
    pid = pid_of(engine)
    del engine
    assert not is_running(pid)


@pytest.mark.parametrize("how", ["pass", "os.kill(os.getpid(), 9)"])
def test_the_engine_ends_when_python_does(gnugo: Engine, how: str) -> None:
    script = (
        "import os; from fever_go.gtp import Engine\n"
        f"engine = Engine({gnugo.command!r}); engine.new_game(1, 9, 6.5); print(engine.process.pid, flush=True)\n{how}"
    )
    here = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert wait_until_gone(int(done.stdout))


def test_an_engine_that_hangs_is_started_again_and_told_the_game(tmp_path: Path) -> None:
    engine = fake(tmp_path, 'if starts == 1 and command[0] == "genmove": time.sleep(100)', timeout=3)
    engine.new_game(seed=1, size=9, komi=6.5)
    engine.play(BLACK, "D4")
    assert engine.genmove(WHITE) == "E5"
    assert engine.starts == 2
    assert commands(tmp_path, 2) == ["boardsize 9", "komi 6.5", "clear_board", "play black D4", "genmove white"]
    engine.close()


def test_an_engine_that_dies_every_time_is_given_up(tmp_path: Path) -> None:
    engine = fake(tmp_path, 'if command[0] == "genmove": sys.exit("out of ideas")')
    engine.new_game(seed=1, size=9, komi=6.5)
    with pytest.raises(EngineError, match=r"ended at 'genmove white', 4 times in a row"):
        engine.genmove(WHITE)
    assert engine.process is None
    assert "out of ideas" in (tmp_path / "engine.log").read_text()


def test_an_answer_that_is_an_error_is_raised_and_not_repeated(tmp_path: Path) -> None:
    engine = fake(tmp_path, 'if command[0] == "play": answer("? illegal move"); continue')
    engine.new_game(seed=1, size=9, komi=6.5)
    with pytest.raises(EngineError, match=r"answers '\? illegal move' to 'play black D4'"):
        engine.play(BLACK, "D4")
    assert engine.genmove(WHITE) == "E5"
    assert (tmp_path / "commands").read_text().count("play") == 1
    engine.close()


def test_an_interrupt_while_waiting_leaves_no_answer_for_the_next_command(tmp_path: Path) -> None:
    engine = fake(tmp_path, 'if starts == 1 and command[0] == "genmove": os.kill(os.getppid(), 2); time.sleep(0.2)')
    engine.new_game(seed=1, size=9, komi=6.5)
    with pytest.raises(KeyboardInterrupt):
        engine.genmove(WHITE)
    assert engine.ask("name") == ""
    engine.close()


def test_an_engine_that_does_not_want_to_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gtp, "PATIENCE", 0.1)
    engine = fake(tmp_path, 'signal.signal(15, signal.SIG_IGN)\n    while command[0] == "quit": time.sleep(1)')
    engine.new_game(seed=1, size=9, komi=6.5)
    pid = pid_of(engine)
    engine.close()
    assert not is_running(pid)


def test_an_engine_with_the_seed_in_its_command_alone_is_started_for_every_game(tmp_path: Path) -> None:
    engine = fake(tmp_path, "", "--seed={seed}", "{level}")
    for seed in (7, 8):
        engine.new_game(seed, size=9, komi=6.5)
    engine.close()
    assert (tmp_path / "starts").read_text().split("\n") == ["--seed=7 3", "--seed=8 3", ""]


def test_an_engine_without_a_seed_goes_on_to_the_next_game(tmp_path: Path) -> None:
    engine = fake(tmp_path)
    for seed in (7, 8):
        engine.new_game(seed, size=9, komi=6.5)
    engine.close()
    assert engine.starts == 1
