"""A client of the Go Text Protocol, version 2: an engine in a process of its own, talked to over pipes."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gymnasium as gym

COLORS = ("black", "white")
RESTARTS = 3  # of an engine that dies again and again over one command
PATIENCE = 1.0  # seconds for an engine to end, after each way of asking


class EngineError(gym.error.Error):
    """The engine cannot be used; the message says what to do."""


class EngineDied(Exception):
    """The process ended or gave no answer in time; it is started again."""


class Engine:
    """One engine process, started at the first game, and what it needs to know to be started again.

    The process leads its own process group, so that an interrupt from the keyboard does not reach it. It ends with
    `close`, when this object is collected and when Python exits. If Python is killed, its end of the pipe closes,
    at which an engine ends too.
    """

    def __init__(self, command: str | list[str], level: int = 0, timeout: float = 60.0, workdir: Path | None = None):
        """The command has {seed} and {level} filled in; the timeout is in seconds for one answer."""
        self.command = shlex.split(command) if isinstance(command, str) else list(command)
        self.level, self.timeout, self.workdir = level, timeout, workdir
        self.program = find_program(self.command[0] if self.command else "")
        self.process: subprocess.Popen[bytes] | None = None
        self.seed = 0
        self.starts = 0
        self._stop: Callable[[], object] = lambda: None
        self._told: list[str] = []  # the commands that make a new process know the game

    def new_game(self, seed: int, size: int, komi: float) -> None:
        """Forget the last game; the new one is the same again for the same seed and moves."""
        running = self.process is not None
        self.seed, self._told = seed, []
        seedable = self.ask("known_command set_random_seed") == "true"
        if running and not seedable and any("{seed}" in word for word in self.command):
            self.close()
        for command in (f"boardsize {size}", f"komi {komi:g}", "clear_board"):
            self._tell(command)
        if seedable:
            self._tell(f"set_random_seed {seed}")  # last, because GNU Go draws a new seed at clear_board

    def play(self, color: int, vertex: str) -> None:
        """Tell the engine of the other player's move."""
        self._tell(f"play {COLORS[color]} {vertex}")

    def genmove(self, color: int) -> str:
        """Let the engine move: "D4", "PASS" or "RESIGN"."""
        vertex = self.ask(f"genmove {COLORS[color]}").upper()
        if vertex != "RESIGN":
            self._told.append(f"play {COLORS[color]} {vertex}")
        return vertex

    def _tell(self, command: str) -> None:
        self.ask(command)
        self._told.append(command)

    def ask(self, command: str) -> str:
        """The answer to a command; an engine that is not running is started and told the game so far first."""
        for _ in range(1 + RESTARTS):
            try:
                if self.process is None:
                    self._start()
                    for told in self._told:
                        self._exchange(told)
                return self._exchange(command)
            except EngineDied as error:
                self.close()
                reason = error
            except BaseException:  # an answer that is still to come must not be taken for that of the next command
                self.close()
                raise
        raise EngineError(f"{self.program} {reason} at {command!r}, {1 + RESTARTS} times in a row")

    def _start(self) -> None:
        seed, level = str(self.seed), str(self.level)
        words = [word.replace("{seed}", seed).replace("{level}", level) for word in self.command[1:]]
        with open(os.devnull if self.workdir is None else self.workdir / "engine.log", "ab") as log:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                [self.program, *words], stdin=pipe, stdout=pipe, stderr=log, cwd=self.workdir, process_group=0
            )
        self.starts += 1
        self._stop = weakref.finalize(self, _stop, self.process)

    def _exchange(self, command: str) -> str:
        """Send one command and wait for its answer: "= text" or "? text", then an empty line."""
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        deadline = time.monotonic() + self.timeout
        try:
            os.write(self.process.stdin.fileno(), f"{command}\n".encode())
        except BrokenPipeError as error:
            raise EngineDied("ended") from error
        output = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(output, select.POLLIN)
        data = b""
        while not data.lstrip().endswith(b"\n\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise EngineDied(f"gave no answer in {self.timeout:g} s")
            part = os.read(output, 65536)
            if not part:
                raise EngineDied("ended")
            data += part.replace(b"\r", b"")
        answer = data.decode(errors="replace").strip()
        if not answer.startswith("="):
            raise EngineError(f"{self.program} answers {answer!r} to {command!r}")
        return answer[1:].strip()

    def close(self) -> None:
        """End the process, if there is one; the next command starts another."""
        if self.process is not None:
            self.process = None
            self._stop()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process group and wait for it: ask, then terminate, then kill."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        os.write(process.stdin.fileno(), b"quit\n")
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
            break
        os.killpg(process.pid, number)
    process.wait()
    process.stdout.close()


def find_program(name: str) -> str:
    """Where an engine's program is; Debian keeps games in a folder that is not in every PATH."""
    found = shutil.which(name) or shutil.which(name, path="/usr/games")
    if found is None:
        how = "install it with: apt install gnugo" if name == "gnugo" else "install it, or give its full path"
        raise EngineError(f"the Go engine {name!r} is not installed here; {how}")
    return os.path.abspath(found)  # the process starts in another folder
