"""Go against an engine, as a Gymnasium environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from fever_go.board import BLACK, WHITE, Board, move_of, points, vertex_of
from fever_go.gtp import COLORS, Engine, EngineError

# With --capture-all-dead the engine takes the agent's dead stones off before it passes, as scoring by area demands.
GNUGO = "gnugo --mode gtp --level {level} --seed {seed} --chinese-rules --capture-all-dead"


class Go9x9(gym.Env[np.ndarray, np.int64]):
    """The agent plays one color, the engine the other; one step is the agent's move and the engine's answer.

    Actions: points row by row from the top left corner, then the pass. `info["action_mask"]` (bool, one per action)
    has the legal ones in every info. An illegal action loses the game at once.

    Observation: float32 [3 * size * size + 2] of 0 and 1: the agent's stones, the engine's stones and the points that
    the agent may play on, each row by row; 1 if the engine has just passed, so that a pass ends the game; 1 if the
    agent is white, and has the komi.

    Reward: 0 until the end, then 1 for a win, -1 for a loss, 0 for a draw. The last info also has `won` (1, 0, or 0.5
    for a draw), `score` (points ahead on the last board), `moves` (of both players) and `illegal` (1: lost by that).
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        engine: str | list[str] = GNUGO,
        level: int = 0,
        komi: float = 7.5,
        size: int = 9,
        color: str = "black",
        max_moves: int | None = None,
        scoring: str = "area",
        superko: bool = False,
        timeout: float = 60.0,
        workdir: Path | str | None = None,
        render_mode: str | None = None,
    ) -> None:
        """
        engine: the command of a GTP engine, with {level} and {seed} filled in, or "random" for a built-in player
        color: "black", "white" or "random"
        max_moves: of both players, by default twice the points of the board; the game is then scored as it stands. It
            terminates and is not truncated, because that score is its result and nothing after it is worth more.
        scoring: "area" counts the board with all stones alive, "engine" asks the engine for its final_score
        superko: no move may bring back any earlier position; for an engine that has this rule
        timeout: seconds for one answer of the engine, before it is started again
        workdir: where the engine runs and engine.log has what it prints to stderr
        """
        _choose("color", color, (*COLORS, "random"))
        _choose("scoring", scoring, ("area",) if engine == "random" else ("area", "engine"))
        if not 2 <= size <= 19:
            raise gym.error.Error(f"size is a number from 2 to 19, not {size!r}")
        self.size, self.komi, self.superko, self.color, self.scoring = size, komi, superko, color, scoring
        self.max_moves = 2 * size * size if max_moves is None else max_moves
        self.render_mode = render_mode
        folder = None if workdir is None else Path(workdir)
        self.engine = None if engine == "random" else Engine(engine, level, timeout, folder)
        self.action_space = spaces.Discrete(size * size + 1)
        self.observation_space = spaces.Box(0.0, 1.0, (3 * size * size + 2,), np.float32)
        self.board = Board(size, komi, superko)
        self.agent = BLACK
        self.ended = True
        self.resigned = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start a game; this and all later games follow from the last seed that was given and the actions."""
        super().reset(seed=seed)
        self.board = Board(self.size, self.komi, self.superko)
        self.agent = int(self.np_random.integers(2)) if self.color == "random" else COLORS.index(self.color)
        self.ended = self.resigned = False
        if self.engine is not None:
            self.engine.new_game(int(self.np_random.integers(1, 2**31 - 1)), self.size, self.komi)
        if self.agent == WHITE:
            self._answer()
        mask = self.board.mask(self.agent)
        return self._observation(mask), {"action_mask": mask}

    def step(self, action: np.int64 | int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Play the agent's move and the engine's answer to it."""
        if self.ended:
            raise gym.error.ResetNeeded("the game is over; call reset() first")
        try:
            self.board.play(int(action))
            illegal = False
        except ValueError:
            illegal = True
        if not illegal:
            if self.engine is not None:
                self.engine.play(self.agent, vertex_of(int(action), self.size))
            if not self._finished:
                self._answer()
        self.ended = illegal or self._finished
        mask = self.board.mask(self.agent)
        info: dict[str, Any] = {"action_mask": mask}
        reward = 0.0
        if self.ended:
            score = self._score()
            reward = -1.0 if illegal else 1.0 if self.resigned else float(np.sign(score))
            info.update(won=(reward + 1) / 2, score=score, moves=self.board.moves, illegal=float(illegal))
        return self._observation(mask), reward, self.ended, False, info

    @property
    def _finished(self) -> bool:
        return self.resigned or self.board.over or self.board.moves >= self.max_moves

    def _answer(self) -> None:
        """Let the other player move."""
        if self.engine is None:
            self.board.play(random_move(self.board, self.np_random))
            return
        vertex = self.engine.genmove(self.board.turn)
        if vertex == "RESIGN":
            self.resigned = True
            return
        try:
            self.board.play(move_of(vertex, self.size))
        except ValueError as error:
            raise EngineError(
                f"{self.engine.program} plays {vertex}, which is not legal here; "
                "start it with simple ko, or set superko, and with suicide forbidden"
            ) from error

    def _score(self) -> float:
        """Points that the agent is ahead."""
        black = self.board.score()
        if self.scoring == "engine" and self.engine is not None:
            winner, _, points = self.engine.ask("final_score").partition("+")  # "B+3.5", "W+3.5" or "0"
            black = float(points or 0) * (1 if winner == "B" else -1)
        return black if self.agent == BLACK else -black

    def _observation(self, mask: np.ndarray) -> np.ndarray:
        own, other = (self.board.array(self.board.stones[color]) for color in (self.agent, 1 - self.agent))
        flags = [self.board.passes > 0, self.agent == WHITE]
        return np.concatenate([own, other, mask[:-1], flags]).astype(np.float32)

    def render(self) -> str | None:  # type: ignore[override]
        """The board as text: X is black, O is white."""
        return str(self.board) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """End the engine's process."""
        if self.engine is not None:
            self.engine.close()


def random_move(board: Board, random: np.random.Generator) -> int:
    """Any legal move that does not fill an eye of the player's own; a pass if there is none."""
    choices = list(points(board.legal() & ~board.eyes(board.turn)))
    return choices[random.integers(len(choices))].bit_length() - 1 if choices else board.pass_move


def _choose(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise gym.error.Error(f"{name} is one of {', '.join(choices)}, not {value!r}")
