"""A cluster of hosts that ssh reaches, on machines made of namespaces; needs root, openssh-server and iproute2."""

import json
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.lab.machines import Command, Lab, why_no_lab  # noqa: E402 - not installed, found by the path above


class Hosts:
    """Three hosts and a user who has a terminal."""

    def __init__(self, folder: Path) -> None:
        if reason := why_no_lab("sshd", "ssh", "ssh-keygen"):
            raise RuntimeError(reason)
        self.folder = folder
        self.lab = Lab(folder / "lab", 3)
        self.there = folder / "there"  # run directories on the head

    def __enter__(self) -> "Hosts":
        self.lab.__enter__()
        self.lab.start_ssh()
        self.variables = self.lab.variables(PYTHONPATH=str(ROOT), FEVER_HOME=str(self.folder / "home"), TERM="xterm")
        self.variables["PATH"] = f"{self.lab.ssh_folder}:{self.variables['PATH']}"
        lines = ["kind: ssh", "hosts: [node1, node2, node3]", f"python: {sys.executable}", f"runs: {self.there}"]
        (self.folder / "lab.yaml").write_text("\n".join([*lines, ""]))
        return self

    def __exit__(self, *error: object) -> None:
        self.lab.__exit__(*error)

    def fever(self, *words: str) -> tuple[str, float]:
        """A command to its end: what it printed, and the seconds that it took."""
        began = time.perf_counter()
        command = [sys.executable, "-m", "fever", *words]
        done = self.lab.login.run(command, cwd=self.folder, env=self.variables, timeout=300)
        if done.returncode:
            raise RuntimeError(done.stdout[-500:] + done.stderr[-500:])
        return done.stdout + done.stderr, time.perf_counter() - began

    def on_terminal(self, *words: str) -> tuple[Command, int]:
        """A command that has a terminal, and the descriptor from which its screen is read."""
        screen, own = pty.openpty()
        command = [sys.executable, "-m", "fever", *words]
        streams = {"stdin": own, "stdout": own, "stderr": own}
        started = self.lab.login.popen(command, cwd=self.folder, env=self.variables, **streams)
        os.close(own)
        return started, screen

    def seconds_until_shown(self, text: str, *words: str) -> float:
        """From the start of a command on a terminal until its screen has a text; then it gets Ctrl-C."""
        began = time.perf_counter()
        started, screen = self.on_terminal(*words)
        seen = b""
        while text.encode() not in seen and time.perf_counter() - began < 60:
            if select.select([screen], [], [], 0.05)[0]:
                seen += os.read(screen, 65536)
        seconds = time.perf_counter() - began
        started.send_signal(signal.SIGINT)
        drain(started, screen)
        return seconds

    def train(self, name: str, seconds: int, shown: bool) -> dict:
        """One process trains on the head, with the live panel on a terminal or detached; returns the run's summary."""
        words = ["train", "CartPole-v1", "--on", "lab.yaml", "--name", name, "--workers", "0"]
        words += ["--stop-time", f"{seconds}s"]
        if shown:
            drain(*self.on_terminal(*words))
        else:
            self.fever(*words, "--detach")
            while not list(self.there.glob(f"*/{name}/summary.json")):
                time.sleep(0.5)
            self.fever("fetch", name)
        return json.loads((self.folder / "runs" / name / "summary.json").read_text())

    def fetch(self, name: str) -> float:
        """Fetch a run; returns the megabytes that were moved."""
        printed, _ = self.fever("fetch", name, "--to", "results")
        moved = re.search(r"([\d.]+) (kB|MB) moved", printed)
        assert moved is not None
        return float(moved[1]) / (1000 if moved[2] == "kB" else 1)


def drain(started: Command, screen: int) -> None:
    """Read a screen until its command ends."""
    try:
        while started.poll() is None:
            if select.select([screen], [], [], 0.1)[0]:
                os.read(screen, 65536)
    except OSError:
        started.wait(30)
    finally:
        os.close(screen)
