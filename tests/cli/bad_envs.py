"""Environments with one mistake each, for test_bad_inputs.py."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

BOX = spaces.Box(-1, 1, (2,))


class Good(gym.Env):
    """Ten steps to an episode; it cannot be drawn."""

    observation_space: Any = BOX
    action_space: Any = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 10
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return np.zeros(2, np.float32), 1.0, False, self.left == 0, {}


class Unreadable(Exception):
    """Its message cannot be read."""

    def __str__(self) -> str:
        raise ValueError("no message")


class Odd(BaseException):
    """Not an Exception."""


def deeper(depth: int = 0) -> int:
    return deeper(depth + 1)


RAISES: dict[str, Any] = {
    "ValueError": lambda: ValueError("no licence"),
    "TypeError": lambda: TypeError("wrong\nkind"),
    "KeyError": lambda: KeyError("key"),
    "Empty": Exception,
    "Long": lambda: ValueError("x" * 100_000),
    "Unreadable": Unreadable,
    "Odd": lambda: Odd("odd"),
    "Exit": lambda: SystemExit(0),
    "ExitText": lambda: SystemExit("bye"),
    "GeneratorExit": GeneratorExit,
    "StopIteration": StopIteration,
    "Memory": lambda: MemoryError("no memory"),
    "Assertion": lambda: AssertionError(),
    "OSError": lambda: OSError(2, "no such file", "scene.xml"),
    "Group": lambda: ExceptionGroup("several", [ValueError("one")]),
    "Import": lambda: ModuleNotFoundError("No module named 'simulator'", name="simulator"),
}


class Raises(Good):
    """Raises in its constructor, in `reset`, or where its spaces are read."""

    def __init__(self, where: str = "init", what: str = "ValueError") -> None:
        self.where, self.what = where, what
        self._fail("init")

    def _fail(self, where: str) -> None:
        if self.where == where:
            if self.what == "Recursion":
                deeper()
            if self.what == "sys.exit":
                sys.exit()
            raise RAISES[self.what]()

    def reset(self, **options: Any) -> Any:
        self._fail("reset")
        return super().reset(**options)

    def render(self) -> Any:
        self._fail("render")

    @property
    def action_space(self) -> Any:  # type: ignore[override]
        self._fail("space")
        return spaces.Discrete(2)


class NoSeed(Good):
    def reset(self) -> Any:  # type: ignore[override]
        return np.zeros(2, np.float32), {}


class OldReset(Good):
    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0]


class ResetsTo(Good):
    """Its first observation is another one than its space says."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def reset(self, **options: Any) -> Any:
        results: dict[str, Any] = {
            "none": None,
            "info": (np.zeros(2, np.float32), None),
            "three": (np.zeros(2, np.float32), {}, {}),
            "shape": (np.zeros(3, np.float32), {}),
            "text": ("observation", {}),
            "nothing": (None, {}),
            "objects": (np.array([object(), object()]), {}),
            "dict": ({"a": 1}, {}),
            "ragged": ([[1.0], [1.0, 2.0]], {}),
        }
        return results[self.kind]


class StepsTo(Good):
    """Its steps return something else."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def step(self, action: Any) -> Any:
        here = np.zeros(2, np.float32)
        results: dict[str, Any] = {
            "four": (here, 1.0, False, {}),
            "none": None,
            "six": (here, 1.0, False, False, {}, 0),
            "reward": (here, "much", False, False, {}),
            "shape": (np.zeros(3, np.float32), 1.0, False, False, {}),
            "many": (here, 1.0, np.zeros(2, bool), False, {}),
            "info": (here, 1.0, True, False, None),
            "nothing": (None, 1.0, False, False, {}),
        }
        return results[self.kind]


SPACES: dict[str, Any] = {
    "none": lambda: None,
    "text": lambda: "Box",
    "list": lambda: [2],
    "class": lambda: spaces.Box,
    "gigantic": lambda: spaces.MultiBinary(10**9),
    "empty": lambda: spaces.Box(-1, 1, (0,)),
    "empty-image": lambda: spaces.Box(0, 255, (0, 8, 3), np.uint8),
    "no-parts": lambda: spaces.Dict({}),
    "no-tuple": lambda: spaces.Tuple(()),
    "graph": lambda: spaces.Graph(BOX, None),
    "sequence": lambda: spaces.Sequence(BOX),
    "words": lambda: spaces.Text(5),
    "one-of": lambda: spaces.OneOf((BOX, spaces.Discrete(2))),
    "nested": lambda: spaces.Dict({"a": spaces.Tuple((spaces.Text(5),))}),
    "many": lambda: spaces.Discrete(10**9),
    "one": lambda: spaces.Discrete(1),
    "ones": lambda: spaces.MultiDiscrete([1, 1]),
    "unbounded": lambda: spaces.Box(-np.inf, np.inf, (2,)),
    "narrow": lambda: spaces.Box(1, 1, (2,)),
    "complex": lambda: spaces.Box(-1, 1, (2,), np.int64),
}


class Space(Good):
    """One of its spaces cannot be trained on."""

    def __init__(self, observation: str | None = None, action: str | None = None) -> None:
        if observation is not None:
            self.observation_space = SPACES[observation]()
        if action is not None:
            self.action_space = SPACES[action]()

    def reset(self, **options: Any) -> Any:
        return self.observation_space.sample() if self.observation_space is not BOX else np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 1.0, False, True, {}


def number() -> int:
    """A factory of something else."""
    return 3


def nothing() -> None:
    """A factory that forgets to return."""


not_callable = 3
