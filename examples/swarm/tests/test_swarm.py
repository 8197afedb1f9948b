"""The set is learned by attention and not by a perceptron; the order of its rows makes no difference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nets import Attention
from swarm import Swarm

import fever

SMALL = {"width": 32, "heads": 4}


def test_the_environment_keeps_its_contract() -> None:
    check_env(Swarm(), skip_render_check=True)


def test_taken_berries_are_gone_and_counted() -> None:
    env = Swarm(most=4)
    env.reset(seed=0)
    env.berries[:] = [[0.2, 0, 1], [0.9, 0.9, -1], [0.25, 0.1, 1], [0, 0.9, -1]]
    observation, reward, *_ = env.step(1)  # to the right
    assert reward == 2
    assert observation["there"].tolist() == [0, 1, 0, 1]
    np.testing.assert_allclose(observation["berries"][1], [0.7, 0.9, -1], rtol=1e-6)


def test_order_and_empty_rows_make_no_difference() -> None:
    observation, _ = Swarm().reset(seed=1)
    batch = {name: value[None] for name, value in observation.items()}
    network = Attention(**SMALL)
    params = network.init(jax.random.key(0), batch)
    order = np.random.default_rng(0).permutation(16)
    shuffled = {name: value[:, order] for name, value in batch.items()}
    hidden = {**batch, "berries": batch["berries"] + 7 * (1 - batch["there"][..., None])}
    expected = network.apply(params, batch)
    np.testing.assert_allclose(network.apply(params, shuffled), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(network.apply(params, hidden), expected, rtol=1e-5, atol=1e-6)


def train(runs: Path, **settings: Any) -> float:
    stop = {"steps": 100_000, "window": 200}
    result = fever.train(Swarm, learning_rate=1e-3, stop=stop, runs=runs, **settings)
    return float(result.return_mean or 0)


@pytest.mark.slow
def test_attention_learns_what_a_perceptron_does_not(tmp_path: Path) -> None:
    assert train(tmp_path, network=Attention, network_kwargs=SMALL) > 1.5
    assert train(tmp_path) < 0.75
