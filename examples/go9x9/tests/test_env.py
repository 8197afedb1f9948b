from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from fever_go import Go9x9
from fever_go.board import BLACK, move_of, vertex_of
from fever_go.gtp import Engine, EngineError

PASS = 81
no_spec = pytest.mark.filterwarnings("ignore:.*not having a spec:UserWarning")  # it is not in the registry


def play(env: Go9x9, seed: int | None = None, steps: int = 1000) -> list[Any]:
    """Play a game with legal moves that a seed chooses; returns the results of reset and of every step."""
    random = np.random.default_rng(0 if seed is None else seed)
    rows: list[Any] = [env.reset(seed=seed)]
    while len(rows) <= steps and (len(rows) == 1 or not rows[-1][2]):
        points = np.flatnonzero(rows[-1][-1]["action_mask"][:-1])
        rows.append(env.step(random.choice(points) if len(points) else np.int64(PASS)))
    return rows


def scripted(folder: Path, *answers: str, **arguments: Any) -> Go9x9:
    """An environment whose engine gives these answers."""
    (folder / "engine.py").write_text(
        f"import sys\nanswers = iter({answers!r})\n"
        "for line in sys.stdin:\n"
        "    if line.startswith('quit'): break\n"
        "    print('=', next(answers) if line.startswith(('genmove', 'final')) else '', end='\\n\\n', flush=True)\n"
    )
    return Go9x9(engine=[sys.executable, "-S", str(folder / "engine.py")], **arguments)


@no_spec
@pytest.mark.parametrize("color", ["black", "white", "random"])
def test_the_contract_of_gymnasium_holds_for_the_random_player(color: str) -> None:
    check_env(Go9x9(engine="random", color=color, render_mode="ansi"))


@no_spec
def test_the_contract_of_gymnasium_holds_for_gnugo(gnugo: Engine) -> None:
    env = Go9x9(render_mode="ansi")
    check_env(env)
    env.close()


@pytest.mark.parametrize("color", ["black", "white"])
def test_a_game_against_gnugo_to_its_end(gnugo: Engine, color: str, tmp_path: Path) -> None:
    env = Go9x9(color=color, workdir=tmp_path)
    rows = play(env, seed=3)
    _, reward, terminated, truncated, info = rows[-1]
    assert (reward, terminated, truncated) == (-1.0, True, False)  # a random player has no chance
    assert all(row[1] == 0 for row in rows[1:-1])
    assert info["won"] == info["illegal"] == 0
    assert info["score"] < 0
    assert info["moves"] == env.board.moves > 30
    env.close()


def test_gnugo_takes_dead_stones_off_before_it_passes(gnugo: Engine) -> None:
    """Counting all stones as alive then gives the engine's own score."""
    env = Go9x9()
    for seed in range(2):
        info = play(env, seed, steps=12)[-1][-1]
        while "score" not in info:
            info = env.step(PASS)[-1]
        assert env.engine is not None
        assert env.engine.ask("final_score") == f"W+{-info['score']}"
        assert env.board.stones[BLACK] == 0
    env.close()


@pytest.mark.parametrize("engine", ["gnugo", "random"])
def test_a_seed_makes_the_same_games(engine: str, request: pytest.FixtureRequest) -> None:
    arguments: dict[str, Any] = {"color": "random"}
    if engine == "gnugo":
        request.getfixturevalue("gnugo")
    else:
        arguments["engine"] = engine
    games = []
    for warm_up in (False, True):
        env = Go9x9(**arguments)
        if warm_up:  # earlier games of an engine must not matter
            play(env, seed=77, steps=5)
        games.append([row[0] for seed in (5, None, None) for row in play(env, seed, steps=7)])
        games.append([row[0] for row in play(env, seed=6, steps=7)])
        env.close()
    np.testing.assert_array_equal(games[0], games[2])
    np.testing.assert_array_equal(games[1], games[3])
    assert not np.array_equal(games[0][:8], games[1])


def test_a_killed_engine_does_not_end_the_game(gnugo: Engine) -> None:
    env = Go9x9()
    play(env, seed=1, steps=6)
    assert env.engine is not None
    assert env.engine.process is not None
    os.kill(env.engine.process.pid, signal.SIGKILL)
    action = int(np.flatnonzero(env.board.mask())[0])
    _, reward, terminated, _, _ = env.step(action)
    assert (reward, terminated, env.engine.starts) == (0.0, False, 2)
    for color, name in enumerate(("black", "white")):
        mine = {vertex_of(int(move), 9) for move in np.flatnonzero(env.board.array(env.board.stones[color]))}
        assert mine == set(env.engine.ask(f"list_stones {name}").split())
    env.close()


@pytest.mark.parametrize("color", ["black", "white"])
def test_observation_and_mask(tmp_path: Path, color: str) -> None:
    env = scripted(tmp_path, "E5", "PASS", color=color)
    observation, info = env.reset(seed=0)
    if color == "black":
        observation, _, _, _, info = env.step(0)
    own, other, legal = observation[:-2].reshape(3, 81)
    assert np.flatnonzero(own).tolist() == ([0] if color == "black" else [])
    assert np.flatnonzero(other).tolist() == [40]
    np.testing.assert_array_equal(legal, 1 - own - other)
    assert observation[-2:].tolist() == [0, float(color == "white")]
    np.testing.assert_array_equal(info["action_mask"], [*legal.astype(bool), True])
    observation = env.step(1)[0]
    assert observation[-2] == 1
    env.close()


def test_every_info_has_the_mask_that_gnugo_agrees_with(gnugo: Engine) -> None:
    env, random = Go9x9(size=7, color="white"), np.random.default_rng(0)
    _, info = env.reset(seed=0)
    terminated = False
    while not terminated:
        mask = info["action_mask"]
        assert (mask.dtype, mask.shape) == (bool, (50,))
        assert env.engine is not None
        legal = {move_of(vertex, 7) for vertex in env.engine.ask("all_legal white").split()}
        assert set(np.flatnonzero(mask).tolist()) == legal | {49}
        _, _, terminated, _, info = env.step(random.choice(sorted(legal) or [49]))
    assert info["action_mask"].shape == (50,)
    env.close()


def test_all_masked_moves_lose_and_no_other_does() -> None:
    for action in range(PASS + 1):
        env = Go9x9(engine="random", color="white")
        mask = env.reset(seed=0)[1]["action_mask"]
        _, reward, terminated, _, info = env.step(action)
        assert terminated == (not mask[action])
        if terminated:
            assert (reward, info["won"], info["illegal"], info["moves"]) == (-1.0, 0.0, 1.0, 1)
            assert info["action_mask"].any()


@pytest.mark.parametrize("action", [-1, 82, 10**6])
def test_an_action_outside_the_space_loses_too(action: int) -> None:
    env = Go9x9(engine="random")
    env.reset(seed=0)
    assert env.step(action)[1:4] == (-1.0, True, False)


def test_two_passes_end_the_game_and_the_area_decides(tmp_path: Path) -> None:
    for color, reward, score in (("black", 1.0, 81 - 7.5), ("white", -1.0, 7.5 - 81)):
        answers = ("PASS", "PASS") if color == "black" else ("E5", "PASS")
        env = scripted(tmp_path, *answers, color=color)
        env.reset(seed=0)
        if color == "black":
            assert env.step(40)[2] is False
        _, found, terminated, _, info = env.step(PASS)
        assert (found, terminated, info["score"], info["won"]) == (reward, True, score, (reward + 1) / 2)
        env.close()


def test_a_draw_is_worth_nothing(tmp_path: Path) -> None:
    env = scripted(tmp_path, "PASS", komi=0)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step(PASS)
    assert (reward, terminated, info["won"], info["score"]) == (0.0, True, 0.5, 0.0)
    env.close()


def test_a_resignation_is_a_win_even_before_the_first_move(tmp_path: Path) -> None:
    for color in ("black", "white"):
        env = scripted(tmp_path, "resign", color=color)
        env.reset(seed=0)
        _, reward, terminated, _, info = env.step(0)
        assert (reward, terminated, info["won"]) == (1.0, True, 1.0)
        env.close()


@pytest.mark.parametrize(("answer", "score"), [("B+3.5", 3.5), ("W+12.5", -12.5), ("0", 0.0)])
def test_the_engine_can_be_asked_for_the_score(tmp_path: Path, answer: str, score: float) -> None:
    env = scripted(tmp_path, "PASS", answer, scoring="engine")
    env.reset(seed=0)
    _, reward, _, _, info = env.step(PASS)
    assert (info["score"], reward) == (score, np.sign(score))
    env.close()


def test_a_long_game_is_scored_as_it_stands(tmp_path: Path) -> None:
    env = scripted(tmp_path, "E5", "E6", max_moves=3)
    env.reset(seed=0)
    assert env.step(0)[1:4] == (0.0, False, False)
    _, reward, terminated, truncated, info = env.step(1)
    assert (reward, terminated, truncated, info["moves"], info["score"]) == (-1.0, True, False, 3, 2 - 1 - 7.5)
    env.close()


def test_an_illegal_move_of_the_engine_is_an_error(tmp_path: Path) -> None:
    env = scripted(tmp_path, "A9")
    env.reset(seed=0)
    with pytest.raises(EngineError, match="plays A9, which is not legal here"):
        env.step(0)
    env.close()


def test_a_step_after_the_end_needs_a_reset() -> None:
    env = Go9x9(engine="random")
    with pytest.raises(gym.error.ResetNeeded):
        env.step(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"color": "red"}, "color is one of black, white, random, not 'red'"),
        ({"scoring": "engine"}, "scoring is one of area, not 'engine'"),
        ({"size": 20}, "size is a number from 2 to 19"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(gym.error.Error, match=message):
        Go9x9(engine="random", **arguments)


def test_the_board_as_text() -> None:
    env = Go9x9(engine="random", size=5, render_mode="ansi")
    env.reset(seed=0)
    env.board.play(move_of("B4", 5))
    env.board.play(move_of("E1", 5))
    text = "   A B C D E\n 5 . . . . .\n 4 . X . . .\n 3 . . . . .\n 2 . . . . .\n 1 . . . . O"
    assert env.render() == text
