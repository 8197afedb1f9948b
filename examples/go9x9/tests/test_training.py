"""Agents that learn to beat the random player, and one that trains against GNU Go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fever
import pytest
from fever.envs.source import EnvSource
from fever.runs.evaluate import evaluate

from fever_go import Go9x9
from fever_go.gtp import Engine

SETTINGS: dict[str, Any] = {"gamma": 0.999, "gae_lambda": 0.98}
PPO: dict[str, Any] = {"steps": 128, "minibatch": 512, "epochs": 4, "hidden": [128, 128], "envs": 16}


def win_rate(result: Any, arguments: dict[str, Any], games: int = 100) -> float:
    scores = evaluate(result.run.checkpoint(), EnvSource(Go9x9, arguments), games, deterministic=False)
    return float((scores.returns > 0).mean())


@pytest.mark.slow
def test_an_agent_learns_to_beat_the_random_player_on_a_small_board(tmp_path: Path) -> None:
    arguments = {"engine": "random", "size": 5, "komi": 2.5}
    stop = {"reward": 0.7, "window": 100, "steps": 150_000}
    result = fever.train(Go9x9, env_kwargs=arguments, runs=tmp_path, stop=stop, learning_rate=1e-3, **PPO, **SETTINGS)
    assert result.stop_reason == "reward"
    assert win_rate(result, arguments) > 0.7


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_agent_learns_to_beat_the_random_player(tmp_path: Path) -> None:
    arguments = {"engine": "random"}
    stop = {"reward": 0.6, "window": 100, "steps": 600_000}
    result = fever.train(Go9x9, env_kwargs=arguments, runs=tmp_path, stop=stop, learning_rate=5e-4, **PPO, **SETTINGS)
    assert result.stop_reason == "reward"
    assert win_rate(result, arguments) > 0.6


@pytest.mark.slow
def test_trpo_trains_on_whole_games_against_gnugo_in_workers(gnugo: Engine, tmp_path: Path) -> None:
    result = fever.train(
        Go9x9, algo="trpo", workers=2, runs=tmp_path, stop={"iterations": 2}, timesteps_per_batch=60,
        hidden=[32], env_kwargs={"max_moves": 40},
    )  # fmt: skip
    rows = result.run.episodes()
    assert sum(row["length"] for row in rows) == result.summary["steps"] >= 120
    assert all(row["info"]["illegal"] == 0 for row in rows)
    assert {row["worker"] for row in rows} == {0, 1}
