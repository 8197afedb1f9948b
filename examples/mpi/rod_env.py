"""An environment around a simulator that is an MPI program: hold the rod's middle at a temperature.

The program is started once by `mpirun` and then talked to through pipes: starting it takes longer than many steps.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

HERE = Path(__file__).resolve().parent
STEPS = 50  # of an episode
TARGET = 1.0  # °C in the middle of the rod
CLOSE_SECONDS = 5.0  # for all ranks to end


class Rod(gym.Env[np.ndarray, np.ndarray]):
    """Action: the heater's power. Observation: the temperature at five places."""

    observation_space = gym.spaces.Box(-100.0, 100.0, (5,), np.float32)
    action_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)

    def __init__(self, mpirun: str = "mpirun -np 2", seconds: float = 0.0) -> None:
        """`mpirun` is how ranks are started here; a step takes `seconds` longer than it needs."""
        command = [*shlex.split(mpirun), sys.executable, str(HERE / "rod.py"), "--seconds", str(seconds)]
        # In a session of its own: Ctrl-C is for fever, which lets the step end. If this process is killed, the
        # program's input ends, and with it the program.
        self.program = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.places = self._read()  # host and cores of each rank
        print(f"rod: {len(self.places)} ranks: {self.places}", flush=True)  # into log.txt

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.left = STEPS
        return self._ask({"start": float(self.np_random.uniform(0.0, 2.0))}), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation = self._ask({"power": float(np.clip(action[0], 0.0, 1.0))})
        self.left -= 1
        return observation, -abs(float(observation[2]) - TARGET), False, self.left == 0, {}

    def _ask(self, order: dict[str, float]) -> np.ndarray:
        assert self.program.stdin is not None
        self.program.stdin.write(json.dumps(order) + "\n")
        self.program.stdin.flush()
        return np.array(self._read(), np.float32)

    def _read(self) -> Any:
        """The program's next answer. If it has died, fever makes this environment anew."""
        assert self.program.stdout is not None
        line = self.program.stdout.readline()
        if not line:
            raise RuntimeError(f"the simulator has ended with exit code {self.program.wait()}; its messages are above")
        return json.loads(line)

    def close(self) -> None:
        assert self.program.stdin is not None
        self.program.stdin.close()
        try:
            self.program.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.program.terminate()  # mpirun ends its ranks; a kill would leave them
            self.program.wait(CLOSE_SECONDS)
