"""One run of an experiment in a process of its own: the command of a single run, whose output ends with its error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fever import system
from fever.config import RunConfig
from fever.errors import FeverError
from fever.files import user_path
from fever.runs.run import Run, to_yaml, trust_word
from fever.text import shorten
from fever.training.display import Rate
from fever.training.result import EXIT_CODES

WAITING, RUNNING, DONE, INTERRUPTED, FAILED = "waiting", "running", "done", "interrupted", "failed"
KEPT_OUTPUT = 1 << 20  # bytes of what a run prints; beyond, the file is emptied
LAST_WORDS = 1 << 14  # bytes at its end in which an error is looked for
LONGEST_ERROR = 1000  # characters
BAD_INPUT = 2  # exit code


class Member:
    """The run of one seed."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """`folder`: a temporary one, for the configuration and the output."""
        self.config, self.seed = config, config.seed
        self.run = Run(user_path(config.runs) / str(config.name))
        self.file, self.output = folder / f"{config.seed}.yaml", folder / f"{config.seed}.log"
        self.state, self.code = WAITING, 0
        self.process: subprocess.Popen[bytes] | None = None
        self.rate, self.row = Rate(), dict[str, Any]()
        self.error: str | None = None

    def start(self) -> None:
        """Begin to train. The process has a session of its own, so that Ctrl-C on the terminal is for this one alone,
        which passes it on; it ends if this process dies."""
        self.file.write_text(to_yaml(self.config))
        command = [sys.executable, "-P", "-m", "fever", "train", "-f", str(self.file), "--quiet"]
        variables = {name: value for name, value in os.environ.items() if name != "FEVER_RUNS"}  # it is in the file
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(os.open(self.output, flags, 0o600), "wb") as output:
            self.process = system.start(
                command, variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self.state = RUNNING

    def look(self) -> bool:
        """See how far it is; returns whether it has just ended."""
        assert self.process is not None
        code = self.process.poll()
        with suppress(FeverError):
            row = self.run.last_row()
            if row.get("iteration") != self.row.get("iteration") and {"steps", "seconds", "steps_per_second"} <= {*row}:
                self.row = row
                self.rate.add(row)
        with suppress(OSError):
            if self.output.stat().st_size > KEPT_OUTPUT:
                os.truncate(self.output, 0)
        if code is None:
            return False
        self._end(code)
        return True

    def _end(self, code: int) -> None:
        self.code = system.exit_code(code)
        if self.code == 0:
            self.state = DONE
        elif self.code in EXIT_CODES.values():
            self.state = INTERRUPTED
        else:
            self.state, self.error = FAILED, self._last_words(code)

    def _last_words(self, code: int) -> str:
        """Why it has failed: the sentence that it said, or the last line that it printed."""
        if code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        with suppress(OSError), open(self.output, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_WORDS))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
            said = [line.removeprefix("fever: ") for line in lines if line.startswith("fever: ")]
            if said or lines:
                return shorten((said or lines)[-1], LONGEST_ERROR)
        return f"exit code {code}"

    def ask_to_end(self, number: int = signal.SIGTERM) -> None:
        """Have it save and end."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it and all its children at once."""
        if self.process is not None and self.process.poll() is None:
            system.end(self.process, seconds=0.0)

    @property
    def exists(self) -> bool:
        """Whether it has left a run directory."""
        return self.run.saved

    @property
    def next_command(self) -> str:
        """What continues the run."""
        return f"fever resume {self.run.path}{trust_word(self.config)}"

    def describe(self) -> dict[str, Any]:
        """What `--json` says of it."""
        summary: dict[str, Any] = {}
        with suppress(FeverError):
            summary = self.run.summary or {}
        numbers = {name: summary.get(name, self.row.get(name)) for name in ("steps", "episodes", "seconds")}
        kept = {name: summary.get(name) for name in ("stop_reason", "return_mean", "evaluation")}
        return {
            "seed": self.seed,
            "run": str(self.run.path),
            "state": self.state,
            **numbers,
            **kept,
            "error": self.error,
        }
