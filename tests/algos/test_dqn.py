"""DQN and Ape-X: the mathematics of a gradient step, schedules, switches, determinism."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fever.algos.dqn
from fever.algos.apex import Apex, epsilon_ladder
from fever.algos.dqn import DQN
from fever.algos.optimizer import named_arrays
from fever.errors import FeverError, TrainingError
from fever.replay.buffer import Batch
from fever.runs.run import Run
from fever.training.resume import resume
from tests.environments import IdentityEnv, ImageEnv
from tests.factories import make_task
from tests.helpers import same_arrays

COMPILED: dict[str, Any] = {}  # one update for all algorithms here whose update is the same program
TINY = {
    "envs": 2, "hidden": (8,), "batch": 16, "updates": 4, "replay_ratio": 8.0, "warmup": 50, "buffer": 500,
    "report_steps": 100, "target": "hard", "target_updates": 8,
}  # fmt: skip


def make(
    kind: Any = DQN, env: Any = IdentityEnv, total_steps: int | None = None, seed: int = 0, **settings: Any
) -> Any:
    """An algorithm for three observations (one-hot) and three actions, with weights that its actions depend on."""
    settings = {"hidden": (6,), "activation": "tanh", "batch": 8, "updates": 1, "target": "hard", **settings}
    dqn = kind(kind.Config(**settings), make_task(env, seed=seed, total_steps=total_steps))
    rng = np.random.default_rng(seed + 1)
    for name in ("online", "target"):
        dqn.learned[name] = jnp.asarray(rng.normal(0, 0.7, dqn.flat.size).astype(np.float32))
    dqn._update = COMPILED.setdefault(repr((kind, dqn.config)), jax.jit(dqn.update))
    return dqn


def draw(updates: int = 1, batch: int = 8, seed: int = 0) -> Batch:
    """Transitions with rewards large enough for some errors to be beyond 1, and others not."""
    rng, count = np.random.default_rng(seed), updates * batch
    return Batch(
        observations=rng.normal(size=(count, 3)).astype(np.float32),
        next_observations=rng.normal(size=(count, 3)).astype(np.float32),
        actions=rng.integers(0, 3, (count, 1)).astype(np.int32),
        rewards=rng.normal(0, 1.5, count).astype(np.float32),
        discounts=rng.choice(np.array([0, 0.5, 0.9], np.float32), count),
        serials=np.arange(count),
        relative_priorities=rng.uniform(0.2, 4, count).astype(np.float32),
    )


def part(batch: Batch, index: int, size: int = 8) -> Batch:
    return Batch(**{name: array[index * size : (index + 1) * size] for name, array in vars(batch).items()})


def values(dqn: Any, name: str, observations: np.ndarray) -> np.ndarray:
    """With NumPy, of the weights before anything was learned."""
    params = dqn.flat.unpack(np.asarray(dqn.learned[name]))
    return dqn.network.policy(params, dqn.network.features(params, observations))


def learn(dqn: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    return dqn.finish(*dqn.learn(batch))


def td_targets_by_hand(dqn: Any, batch: Batch, double: bool) -> np.ndarray:
    online, target = (values(dqn, name, batch.next_observations) for name in ("online", "target"))
    td_targets = []
    for row in range(len(batch.rewards)):
        best = int(np.argmax(online[row] if double else target[row]))
        td_targets.append(batch.rewards[row] + batch.discounts[row] * target[row, best])
    return np.array(td_targets)


# A gradient step.


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("double", [True, False])
def test_td_errors_by_hand(double: bool, dueling: bool) -> None:
    dqn, batch = make(double=double, dueling=dueling), draw()
    here, td_targets = values(dqn, "online", batch.observations), td_targets_by_hand(dqn, batch, double)
    assert not np.allclose(td_targets, td_targets_by_hand(dqn, batch, not double), atol=0.01)
    expected = here[np.arange(8), batch.actions[:, 0]] - td_targets
    errors, metrics = learn(dqn, batch)
    np.testing.assert_allclose(errors, expected, rtol=1e-4, atol=1e-5)
    row = dict(zip(dqn.metric_names, metrics[0], strict=True))
    assert row["td_error"] == pytest.approx(np.abs(expected).mean(), rel=1e-4)
    assert row["value_mean"] == pytest.approx(here[np.arange(8), batch.actions[:, 0]].mean(), rel=1e-4)


@pytest.mark.parametrize("loss", ["huber", "squared"])
def test_the_loss_and_its_gradient_by_hand(loss: str) -> None:
    dqn, batch = make(loss=loss, learning_rate=0.01), draw()
    td_targets, before = td_targets_by_hand(dqn, batch, True), np.asarray(dqn.learned["online"])
    weights = dqn.inputs(batch)["weights"][0]

    def objective(vector: Any) -> Any:
        params = dqn.flat.unpack(vector)
        every = dqn.network.policy(params, dqn.network.features(params, batch.observations, jnp), jnp)
        total = 0.0
        for row in range(8):
            error = every[row, batch.actions[row, 0]] - td_targets[row]
            small = 0.5 * error * error
            total += weights[row] * (jnp.where(abs(error) > 1, abs(error) - 0.5, small) if loss == "huber" else small)
        return total / 8

    expected, gradient = jax.value_and_grad(objective)(before)
    errors, metrics = learn(dqn, batch)
    assert 0 < (np.abs(errors) > 1).sum() < 8
    row = dict(zip(dqn.metric_names, metrics[0], strict=True))
    assert row["loss"] == pytest.approx(float(expected), rel=1e-4)
    assert row["gradient_norm"] == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-4)
    # The first step of Adam: the gradient by its own size.
    moved, sure = before - np.asarray(dqn.learned["online"]), np.abs(gradient) > 1e-4
    np.testing.assert_allclose(moved[sure], 0.01 * np.sign(gradient)[sure], rtol=1e-2)
    assert sure.sum() > 20


def test_gradients_are_scaled_down_to_their_longest_norm() -> None:
    dqn, batch = make(max_gradient_norm=1e-3), draw()
    _, metrics = learn(dqn, batch)
    assert metrics[0, 3] > 1e-2
    mean = optax.tree.get(dqn.learned["optimizer"], "mu")
    assert float(jnp.linalg.norm(mean)) == pytest.approx(1e-4, rel=1e-3)  # a tenth of it, Adam's decay being 0.9


def test_dueling_values_are_the_state_value_and_the_centred_advantages() -> None:
    dqn = make()
    params, x = dqn.weights(), np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    heads = {
        name: np.tanh(x @ params[f"{name}0/w"] + params[f"{name}0/b"]) @ params[f"{name}/w"] + params[f"{name}/b"]
        for name in ("policy", "value")
    }
    expected = heads["value"] + heads["policy"] - heads["policy"].mean(1, keepdims=True)
    np.testing.assert_allclose(dqn.network.policy(params, x), expected, rtol=1e-5, atol=1e-6)
    assert "value/w" not in make(dueling=False).weights()


def test_importance_weights_by_hand() -> None:
    dqn = make(total_steps=1000, importance=0.5, batch=2, updates=2)
    batch = draw(2, 2)
    batch.relative_priorities = np.array([1, 4, 0.25, 16], np.float32)
    for steps, beta in ((0, 0.5), (500, 0.75), (1000, 1.0), (5000, 1.0)):
        dqn.steps = steps
        expected = [[1, 4**-beta], [1, 64**-beta]]  # the largest of each batch is 1
        np.testing.assert_allclose(dqn.inputs(batch)["weights"], expected, rtol=1e-6)
    endless = make(importance=0.5, batch=2, updates=2)
    endless.steps = 10**6
    np.testing.assert_allclose(endless.inputs(batch)["weights"], [[1, 0.5], [1, 0.125]], rtol=1e-6)


def test_importance_weights_weigh_the_loss() -> None:
    batch = draw()
    losses = []
    for row in range(8):
        batch.relative_priorities = np.where(np.arange(8) == row, np.float32(1e-6), np.float32(1e6))
        dqn = make(importance=1.0, loss="squared")
        errors, metrics = learn(dqn, batch)
        losses.append(metrics[0, 0])
        assert losses[-1] == pytest.approx(0.5 * errors[row] ** 2 / 8, rel=1e-3)
    assert len(set(losses)) == 8


# The target network.


@pytest.mark.parametrize("env", [IdentityEnv, ImageEnv])
def test_uniform_weights_and_biases_are_within_their_bounds(env: Any) -> None:
    shape = {"convolutions": ((8, 4, 2),), "convolution_features": 32} if env is ImageEnv else {}
    dqn = DQN(DQN.Config(hidden=(64, 32), initial_weights="uniform", dueling=True, **shape), make_task(env))
    np.testing.assert_array_equal(dqn.learned["online"], dqn.learned["target"])
    found = dqn.weights()
    layers = [name.removesuffix("/w") for name in found if name.endswith("/w")]
    assert set(layers) == {"policy0", "policy1", "policy", "value0", "value1", "value"} | (
        {"conv0", "features"} if shape else set()
    )
    for layer in layers:
        weights, bound = found[f"{layer}/w"], 1 / np.sqrt(len(found[f"{layer}/w"]))
        assert 0.8 * bound < np.abs(weights).max() <= bound
        assert 0 < np.abs(found[f"{layer}/b"]).max() <= bound


def test_a_hard_target_is_copied_every_so_many_steps() -> None:
    dqn = make(target_updates=3)
    before = np.asarray(dqn.learned["target"])
    for count in range(1, 8):
        learn(dqn, draw(seed=count))
        online, target = np.asarray(dqn.learned["online"]), np.asarray(dqn.learned["target"])
        if count % 3 == 0:
            before = online
        np.testing.assert_array_equal(target, before)
        assert count % 3 == 0 or not np.array_equal(target, online)
    assert dqn.updates == 7


def test_a_polyak_target_moves_a_share_of_the_way() -> None:
    dqn = make(target="polyak", polyak=0.25, updates=2)
    alone = make(target="polyak", polyak=0.25)
    batch = draw(2)
    learn(dqn, batch)
    for index in range(2):
        before = np.asarray(alone.learned["target"])
        learn(alone, part(batch, index))
        expected = before + 0.25 * (np.asarray(alone.learned["online"]) - before)
        np.testing.assert_allclose(alone.learned["target"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dqn.learned["target"], alone.learned["target"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("target_updates", "piece"),
    [(4, 512), (8, 16), (6, 512)],
    ids=["target first", "in pieces", "target changes meanwhile"],
)
def test_many_gradient_steps_in_one_call_are_those_of_many_calls(
    target_updates: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fever.algos.dqn, "PIECE", piece)
    together, alone = make(updates=4, target_updates=target_updates), make(target_updates=target_updates)
    together._update = jax.jit(together.update)
    for seed in range(3):
        batch = draw(4, seed=seed)
        errors, metrics = learn(together, batch)
        singles = [learn(alone, part(batch, index)) for index in range(4)]
        np.testing.assert_allclose(errors, np.concatenate([one for one, _ in singles]), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(metrics, np.concatenate([one for _, one in singles]), rtol=1e-3, atol=1e-4)
    assert together.learned.keys() == alone.learned.keys()
    found = named_arrays("learned", alone.learned)
    for name, array in named_arrays("learned", together.learned).items():
        np.testing.assert_allclose(array, found[name], rtol=1e-3, atol=1e-4, err_msg=name)
    assert together.updates == alone.updates == 12


def test_a_loss_that_is_no_number_is_refused_and_the_weights_stay() -> None:
    dqn, batch = make(), draw()
    before = dqn.weights()
    batch.rewards[3] = np.nan
    with pytest.raises(TrainingError, match="a smaller learning_rate usually helps"):
        learn(dqn, batch)
    np.testing.assert_array_equal(dqn.weights()["policy/w"], before["policy/w"])
    assert dqn.updates == 0


# Exploration.


def test_epsilon_falls_along_its_schedule_and_stays() -> None:
    dqn = make(epsilon_start=0.9, epsilon_end=0.1, epsilon_steps=1000)
    for steps, epsilon in ((0, 0.9), (250, 0.7), (1000, 0.1), (10**6, 0.1)):
        dqn.steps = steps
        np.testing.assert_allclose(dqn.epsilons(), [epsilon] * 2)  # two environments


@pytest.mark.parametrize(
    ("explorers", "expected"),
    [(1, [0.4**4.5]), (2, [0.4, 0.4**8]), (8, [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.4**6, 0.4**7, 0.4**8])],
)
def test_the_ladder_by_hand(explorers: int, expected: list[float]) -> None:
    np.testing.assert_allclose(epsilon_ladder(0.4, 7, explorers), expected)


def test_apex_has_the_ladder_over_all_its_explorers() -> None:
    apex = make(Apex)
    apex.explorers, apex.steps = 8, 10**6
    np.testing.assert_allclose(apex.epsilons(), 0.4 ** (1.0 + np.arange(8)))


def test_apex_comes_down_to_its_ladder_from_actions_at_random() -> None:
    apex = make(Apex, epsilon_base=0.5, epsilon_ladder=1.0, epsilon_steps=100)
    for steps, epsilons in ((0, [1, 1]), (50, [0.75, 0.625]), (100, [0.5, 0.25]), (10**6, [0.5, 0.25])):
        apex.steps = steps
        np.testing.assert_allclose(apex.epsilons(), epsilons)


# What is refused, and switches.


@pytest.mark.parametrize("space", ["multidiscrete", "multibinary", "box"])
def test_other_actions_than_a_single_discrete_one_are_refused(space: str) -> None:
    with pytest.raises(
        FeverError, match=r"^a test does not have a single Discrete action, which DQN needs; use sac for Box"
    ):
        make(env=lambda: IdentityEnv(space))


def test_continuous_actions_are_refused_on_the_command_line(fever: Callable[..., Any], tmp_path: Path) -> None:
    done = fever("train", "Pendulum-v1", "--algo", "dqn")
    sentence = "fever: Pendulum-v1 does not have a single Discrete action, which DQN needs; use sac for Box actions\n"
    assert (done.returncode, done.stderr, done.stdout) == (2, sentence, "")
    assert list(tmp_path.iterdir()) == []


def test_images_are_learned_from(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"hidden": None, "convolutions": ((4, 4, 2),), "convolution_features": 8}
    result = train(tmp_path, "tests.environments:ImageEnv", **settings)
    assert result.run.metrics()[-1]["updates"] > 0


# Training.


def train(folder: Path, env: str = "CartPole-v1", algo: str = "dqn", stop: int = 300, **settings: Any) -> Any:
    return fever.train(env, algo, runs=folder, stop={"steps": stop}, **(TINY | settings))


def weights(run: Run) -> dict[str, np.ndarray]:
    return run.checkpoint().arrays()


def test_plain_dqn_is_a_matter_of_switches(tmp_path: Path) -> None:
    result = train(tmp_path, double=False, dueling=False, n_step=1, prioritized=False, loss="squared")
    row = result.run.metrics()[-1]
    assert (row["priority_mean"], row["updates"] > 0) == (1.0, True)
    assert "value/w" not in result.policy.params


def test_one_seed_gives_one_training_and_another_another(tmp_path: Path) -> None:
    runs = [train(tmp_path, seed=seed).run for seed in (1, 1, 2)]
    assert same_arrays(weights(runs[0]), weights(runs[1]))
    assert not same_arrays(weights(runs[0]), weights(runs[2]))
    rows = [[row["loss"] for row in run.metrics() if "loss" in row] for run in runs]
    assert rows[0] == rows[1] != rows[2]


def test_one_seed_gives_one_training_of_apex(tmp_path: Path) -> None:
    here, there = (train(tmp_path, algo="apex", updates=1, batch=64).run for _ in range(2))
    assert same_arrays(weights(here), weights(there))
    rows = [row["loss"] for row in here.metrics() if "loss" in row]
    assert rows == [row["loss"] for row in there.metrics() if "loss" in row] != []


def test_a_restored_algorithm_learns_on_as_if_nothing_had_happened() -> None:
    original, restored = (
        make(seed=1, target_updates=3),
        make(seed=2, target_updates=3),
    )  # another seed: all of it counts
    for seed in range(4):
        learn(original, draw(seed=seed))
    original.steps = 77
    state = original.state()
    facts = json.loads(json.dumps(state.facts))
    state = state._replace(facts=facts, arrays={name: array.copy() for name, array in state.arrays.items()})
    restored.restore(state, original.weights())
    assert (restored.steps, restored.updates) == (77, 4)
    for seed in range(4, 8):
        for here, there in zip(learn(original, draw(seed=seed)), learn(restored, draw(seed=seed)), strict=True):
            np.testing.assert_array_equal(here, there)
    assert same_arrays({**original.state().arrays}, {**restored.state().arrays})
    assert original.state().facts == restored.state().facts


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    run = train(tmp_path).run
    before, rows = run.checkpoint().manifest, run.metrics()
    stop = run.config.stop.model_copy(update={"steps": 600})
    again = resume(run, run.config.model_copy(update={"stop": stop}))
    after = run.checkpoint().manifest
    assert again.stop_reason == "steps"
    assert (before["steps"] < after["steps"], after["steps"] >= 600) == (True, True)
    assert before["algorithm"]["updates"] < after["algorithm"]["updates"]
    new = run.metrics()[len(rows) :]
    assert [row["iteration"] for row in new] == [len(rows) + 1 + place for place in range(len(new))]
    assert new[0]["steps"] > rows[-1]["steps"]
    assert new[0]["epsilon"] < rows[0]["epsilon"]
    assert new[-1]["replay_ratio"] == pytest.approx(8, rel=0.2)
