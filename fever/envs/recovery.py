"""What is done about environments that raise, hang or break their contract: they are made anew, and counted.

An environment's code may raise anything, such as the BaseException of a library in Rust or of asyncio. Only
KeyboardInterrupt is never its failure: it is the user's.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import gymnasium as gym

from fever.envs.watchdog import EnvTimeout
from fever.errors import ContractError, FeverError, TrainingError
from fever.plugins.user_code import message_of, sentence_of

FIRST_STEPS = 100  # of all environments of a worker, in which a broken contract is the environment's usual behaviour
NEAR, IN_A_ROW = 10, 3  # so many failures of one environment, each within so many steps of the last, end the run
WAITS = (0.1, 1.0, 5.0)  # seconds before an environment that could not be made anew is tried again


@dataclass(frozen=True)
class FailureRules:
    """How failures of environments are treated."""

    rebuild: bool = False  # make an environment that fails anew; otherwise its error is raised
    step_timeout: float | None = None  # seconds for one step of one environment; None: no limit
    reset_timeout: float | None = None
    strict_start: bool = True  # whether a contract that is broken in the first steps ends the run

    @property
    def replaces(self) -> bool:
        """Whether these environments are made in the place of others, in a worker that died. What those held, a port
        or a licence, may not be free yet."""
        return self.rebuild and not self.strict_start


RAISE_AT_ONCE = FailureRules()  # the first failure is raised, and no call has a limit


class Failure(NamedTuple):
    """One failure of an environment."""

    sentence: str
    traceback: str


class EnvRecovery:
    """The failures of some environments, and whether they are too many."""

    def __init__(self, name: str, rules: FailureRules, where: str) -> None:
        """`where` says whose environments these are, in messages."""
        self.name, self.rules, self.where = name, rules, where
        self.failures: list[Failure] = []  # not taken yet
        self.count = 0
        self.rows: dict[int, tuple[int, int]] = {}  # environment -> step of its last failure, failures in a row

    def note(self, index: int, call: str, error: BaseException, steps: int, taken: int) -> None:
        """Count a failure of environment `index` after so many steps of it, and so many of all. Raises it if
        environments are not made anew, or if making this one anew does not help."""
        before, row = self.rows.get(index, (-NEAR, 0))
        row = row + 1 if steps - before < NEAR else 1
        self.rows[index] = steps, row
        first = isinstance(error, ContractError) and self.rules.strict_start and taken <= FIRST_STEPS
        if not self.rules.rebuild or first or row >= IN_A_ROW:
            self._end(error, taken)
        self.count += 1
        text = "".join(traceback.format_exception(error)).rstrip()
        self.failures.append(Failure(self._sentence(index, call, error), text))

    def _end(self, error: BaseException, taken: int) -> NoReturn:
        if isinstance(error, EnvTimeout):
            raise TrainingError(str(error)) from error
        if not isinstance(error, Exception):
            kind = TrainingError if taken else FeverError  # one that exits before its first step cannot be used
            exits = isinstance(error, SystemExit)
            what = f" called sys.exit({message_of(error)})" if exits else f": {sentence_of(error)}"
            raise kind(f"{self.name}{what}") from error
        if isinstance(error, gym.error.Error):
            raise FeverError(f"{self.name}: {error}") from error
        raise error

    def _sentence(self, index: int, call: str, error: BaseException) -> str:
        if isinstance(error, EnvTimeout | ContractError):
            return str(error)
        raised = f"{type(error).__name__}: {message_of(error)}"
        return f"{self.name}'s {call}() raised {raised} (environment {index}{self.where})"

    def take(self) -> list[Failure]:
        """The failures since the last call."""
        taken, self.failures = self.failures, []
        return taken

    def make(self, make: Callable[[], Any]) -> Any:
        """Make an environment in the place of one that failed; tries again a few times."""
        for wait in WAITS:
            try:
                return make()
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: BLE001 - a user's constructor may raise anything
                time.sleep(wait)
        try:
            return make()
        except (FeverError, KeyboardInterrupt):
            raise
        except BaseException as error:
            what = f"{self.name} failed and could not be made anew{self.where}"
            raise TrainingError(f"{what}: {sentence_of(error)}") from error
