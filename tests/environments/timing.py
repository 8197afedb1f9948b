"""Environments whose steps wait or compute for a given time."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from tests.environments.episodes import TimeLimitEnv


class SleepEnv(TimeLimitEnv):
    """Every step sleeps for the given milliseconds, as if it waited for a simulator."""

    def __init__(self, milliseconds: float, limit: int = 50) -> None:
        super().__init__(limit)
        self.milliseconds = milliseconds

    def step(self, action: Any) -> Any:
        time.sleep(self.milliseconds / 1000)
        return super().step(action)


class BusyEnv(SleepEnv):
    """Every step uses the given milliseconds of processor time."""

    def step(self, action: Any) -> Any:
        end = time.thread_time() + self.milliseconds / 1000
        while time.thread_time() < end:
            pass
        return TimeLimitEnv.step(self, action)


class UnevenEnv(SleepEnv):
    """Waits ten times as long on worker 0 as on others."""

    def __init__(self, milliseconds: float, worker_index: int = 0) -> None:
        super().__init__(milliseconds * (10 if worker_index == 0 else 1))


SIMULATOR = """
import sys, time
for line in sys.stdin:
    end = time.process_time() + float(sys.argv[1]) / 1000
    while time.process_time() < end:
        pass
    print(flush=True)
"""


class SimulatorEnv(TimeLimitEnv):
    """Every step uses the given milliseconds of processor time in another process."""

    def __init__(self, milliseconds: float, limit: int = 50) -> None:
        super().__init__(limit)
        command = [sys.executable, "-c", SIMULATOR, str(milliseconds)]
        self.simulator = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def step(self, action: Any) -> Any:
        assert self.simulator.stdin
        assert self.simulator.stdout
        self.simulator.stdin.write(b"\n")
        self.simulator.stdin.flush()
        self.simulator.stdout.readline()
        return super().step(action)

    def close(self) -> None:
        self.simulator.communicate()
