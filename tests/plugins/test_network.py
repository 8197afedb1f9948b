"""Networks of the user's own: the same on both sides, in every algorithm, with every kind of observation."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import fever
from fever.algos.base import build_network
from fever.algos.on_policy import OnPolicySettings, unroll
from fever.algos.ppo import PPO, PPOConfig
from fever.algos.registry import config_of, find_algorithm
from fever.config import validate
from fever.envs.contract import describe_space, stack_observations
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.plugins.network import CustomNetwork
from fever.policy.spaces import encode, unflatten
from fever.runs.export import export
from tests.environments import DictEnv, IdentityEnv, MaskedEnv, MemoryEnv, TupleEnv
from tests.factories import make_sampler, make_task, random_weights
from tests.plugins import networks

Fever = Callable[..., subprocess.CompletedProcess[str]]
HERE = "tests.plugins.networks"
KINDS = pytest.mark.parametrize("name", ["FlaxNet", "EquinoxNet", "plain"])
SMALL: dict[str, dict[str, Any]] = {
    "ppo": {"steps": 16, "minibatch": 32, "epochs": 2},
    "trpo": {"steps": 16, "value_epochs": 1},
    "impala": {"steps": 16},
    "dqn": {"batch": 16, "updates": 2, "warmup": 20, "buffer": 500, "report_steps": 50},
    "sac": {"batch": 16, "updates": 2, "warmup": 20, "buffer": 500, "report_steps": 50, "hidden": (8,)},
}


def network_of(target: Any, name: str = "FlaxNet", **settings: Any) -> CustomNetwork:
    """PPO's network on this environment, with one of the networks above before its heads."""
    found = PPO(PPOConfig(network=f"{HERE}:{name}", steps=8, minibatch=8, **settings), make_task(target)).network
    assert isinstance(found, CustomNetwork)
    return found


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2, 3)),
        spaces.Box(0, 255, (5, 4, 3), np.uint8),
        spaces.Box(0, 255, (7,), np.uint8),
        spaces.MultiBinary((2, 2)),
        spaces.Tuple((spaces.Box(-1, 1, (2, 2)), spaces.Box(0, 255, (4, 5, 2), np.uint8))),
        spaces.Dict({"b": spaces.Box(-1, 1, (3,)), "a": spaces.Dict({"x": spaces.MultiBinary(2)})}),
    ],
    ids=str,
)
def test_columns_are_put_back_into_the_structure_of_their_space(space: Any) -> None:
    space.seed(3)
    description, drawn = describe_space(space), [space.sample() for _ in range(3)]
    found = unflatten(description, encode(description, stack_observations(description, drawn)))

    def compare(part: Any, found: Any, values: list[Any]) -> None:
        if isinstance(part, spaces.Dict | spaces.Tuple):
            pairs = part.spaces.items() if isinstance(part, spaces.Dict) else enumerate(part.spaces)
            for key, inner in pairs:
                compare(inner, found[key], [value[key] for value in values])
            return
        expected = np.array(values, np.float32) / (255 if part.dtype == np.uint8 else 1)
        np.testing.assert_allclose(found, expected, rtol=1e-6)

    compare(space, found, drawn)


def test_discrete_parts_are_one_hot() -> None:
    description = describe_space(spaces.Dict({"kind": spaces.Discrete(3, start=5), "x": spaces.Box(-1, 1, (1,))}))
    found = unflatten(description, encode(description, {"kind": np.array([7, 5]), "x": np.array([[0.5], [1.0]])}))
    assert found["kind"].tolist() == [[0, 0, 1], [1, 0, 0]]
    assert found["x"].tolist() == [[0.5], [1.0]]


@KINDS
@pytest.mark.parametrize("target", [DictEnv, TupleEnv, MemoryEnv, MaskedEnv])
def test_sampler_and_learner_compute_the_same(name: str, target: Any) -> None:
    network = network_of(target, name)
    params, rng = random_weights(network), np.random.default_rng(0)
    x = rng.random((5, *network.input_shape)).astype(np.float32)
    state = network.initial_state(5)
    outputs, _ = network.actor(params)(x, state)
    features = network.features(params, jnp.asarray(x), jnp)
    np.testing.assert_allclose(outputs, network.policy(params, features, jnp), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        network.values(params, x, state), network.value(params, features, jnp), rtol=1e-5, atol=1e-6
    )
    assert outputs.std() > 0.01  # it depends on the observation


def test_a_recurrent_network_learns_the_sequences_that_its_sampler_has_seen() -> None:
    settings: dict[str, Any] = {"network": f"{HERE}:FlaxMemory", "steps": 8, "minibatch": 16}
    ppo = PPO(PPOConfig(**settings), make_task(MemoryEnv))
    assert ppo.network.state_size == 16
    weights = random_weights(ppo.network)
    sampler = make_sampler(ppo, MemoryEnv, 2)
    fragment = [sampler.sample(weights) for _ in range(2)][1]  # the second begins with a state
    arrays = fragment.arrays
    assert np.abs(arrays["state"]).max() > 0
    features = unroll(ppo.network, weights, arrays["observations"][:-1], arrays["state"], arrays["first"][:-1])
    outputs = ppo.network.policy(weights, features, jnp)
    log_probs = ppo.distribution.log_prob(outputs, arrays["actions"], jnp)
    np.testing.assert_allclose(log_probs, arrays["log_probs"], rtol=1e-4, atol=1e-5)


def test_memory_of_ones_own_solves_what_needs_memory(tmp_path: Path) -> None:
    result = fever.train(
        MemoryEnv, network=networks.FlaxMemory, steps=32, minibatch=64, learning_rate=3e-3, runs=tmp_path,
        stop={"reward": 0.95, "steps": 80_000, "window": 100},
    )  # fmt: skip
    assert result.stop_reason == "reward"


def test_numpy_of_ones_own_is_what_samplers_call(tmp_path: Path) -> None:
    networks.OnNumpy.calls = 0
    fever.train("CartPole-v1", network=networks.OnNumpy, runs=tmp_path, stop={"iterations": 1})
    assert networks.OnNumpy.calls >= 128


def test_vectors_are_normalised_and_parts_of_a_dict_are_not() -> None:
    assert network_of(MemoryEnv).normalizable
    assert not network_of(DictEnv).normalizable


@pytest.mark.parametrize(("algo", "name"), [*((algo, "FlaxNet") for algo in SMALL), ("ppo", "EquinoxNet")])
def test_every_algorithm_trains_resumes_and_acts(algo: str, name: str, tmp_path: Path) -> None:
    target, kwargs = (IdentityEnv, {"action_space": "box"}) if algo == "sac" else (DictEnv, {})
    source = EnvSource(target, kwargs)
    more = {**SMALL[algo], "network": f"{HERE}:{name}"}
    result = fever.train(target, algo, env_kwargs=kwargs, envs=2, runs=tmp_path, stop={"iterations": 2}, **more)
    policy = fever.load(result.run.path)
    task = make_task(source)
    learner = find_algorithm(algo)(validate(config_of(algo), more, algo), task)
    assert {*learner.weights()} <= {*policy.params}
    env = target(**kwargs)
    observation, _ = env.reset(seed=0)
    assert env.action_space.contains(policy.act(observation))
    config = result.run.config
    stop = config.stop.model_copy(update={"iterations": 3})
    from fever.training.resume import resume

    again = resume(result.run, config.model_copy(update={"stop": stop}))
    assert again.summary["iterations"] == 3


def test_weights_are_the_same_under_a_seed(tmp_path: Path) -> None:
    found = [
        fever.train(DictEnv, network=networks.FlaxNet, runs=tmp_path / str(i), stop={"iterations": 2}).policy.params
        for i in range(2)
    ]
    assert all((found[0][name] == found[1][name]).all() for name in found[0])


def test_only_what_it_is_made_of_is_pickled() -> None:
    network = network_of(DictEnv)
    x = np.zeros((2, *network.input_shape), np.float32)
    params = random_weights(network)
    expected, _ = network.act(params, x, network.initial_state(2))
    other = pickle.loads(pickle.dumps(network))
    assert other == network
    assert "module" not in vars(other)
    np.testing.assert_array_equal(other.act(params, x, other.initial_state(2))[0], expected)


def test_recurrent_layers_of_fever_may_follow() -> None:
    network = network_of(MemoryEnv, "FlaxNet", recurrent="gru", recurrent_size=4)
    outputs, state = network.act(random_weights(network), np.ones((2, 2), np.float32), network.initial_state(2))
    assert outputs.shape == (2, 2)
    assert np.abs(state).max() > 0


BAD = {
    "nowhere:Net": "there is no module nowhere here",
    f"{HERE}:Flaxnet": "module tests.plugins.networks has no Flaxnet; did you mean FlaxNet",
    f"{HERE}:no_apply": "made a SimpleNamespace, which has no method apply",
    f"{HERE}:whole_numbers": "has weights that are no floats: steps",
    f"{HERE}:flat_features": "must return features [N, F], and returned shape () for N = 1",
    f"{HERE}:nothing": "must return features [N, F], and returned NoneType for N = 1",
    f"{HERE}:no_state": "must return features and a state [N, 3]",
    f"{HERE}:raising": "failed on observations of shape (1, 2): ",
}


@pytest.mark.parametrize("name", BAD)
def test_a_network_that_does_not_fit_is_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(FeverError) as found:
        fever.train(MemoryEnv, network=name, runs=tmp_path / "runs")
    assert BAD[name] in str(found.value)
    assert not (tmp_path / "runs").exists()


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    def refused(match: str, **settings: Any) -> None:
        with pytest.raises(FeverError, match=match):
            fever.train("CartPole-v1", runs=tmp_path / "runs", **settings)

    refused("cannot be made with {'wdth': 3}", network=networks.FlaxNet, network_kwargs={"wdth": 3})
    refused("write it as module:Name", network="FlaxNet")
    refused("write it as module:Name", network=lambda: None)
    refused("is recurrent itself", network=networks.FlaxMemory, recurrent="lstm")
    refused("has a state, and this algorithm learns no sequences", network=networks.FlaxMemory, algo="dqn")
    refused("has a state, and this algorithm learns no sequences", network=networks.FlaxMemory, algo="trpo")
    assert not (tmp_path / "runs").exists()


def test_another_network_cannot_resume(tmp_path: Path) -> None:
    result = fever.train("CartPole-v1", network=networks.FlaxNet, runs=tmp_path, stop={"iterations": 1})
    config = result.run.config
    settings = {**config.settings, "network_kwargs": {"width": 8}}
    from fever.training.resume import resume

    with pytest.raises(FeverError, match="has another network; restore the network settings"):
        resume(result.run, config.model_copy(update={"settings": settings}))


def test_export_says_that_it_needs_numpy_alone(tmp_path: Path) -> None:
    result = fever.train("CartPole-v1", network=networks.FlaxNet, runs=tmp_path, stop={"iterations": 1})
    with pytest.raises(FeverError, match="does not act with NumPy alone"):
        export(result.run.checkpoint(), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_heads_keep_their_layers_if_asked_to() -> None:
    settings = OnPolicySettings(network=f"{HERE}:plain", network_kwargs={"width": 5}, hidden=(7,))
    params = build_network(settings, make_task(MemoryEnv)).init(np.random.default_rng(0))
    assert {name: value.shape for name, value in params.items() if name.startswith("policy")} == {
        "policy0/w": (5, 7), "policy0/b": (7,), "policy/w": (7, 2), "policy/b": (2,),
    }  # fmt: skip


@pytest.mark.ray
@pytest.mark.parametrize("algo", ["ppo", pytest.param("apex", marks=pytest.mark.slow)])
def test_workers_act_with_it(algo: str, fever: Fever) -> None:
    small = ("warmup=50", "batch=16") if algo == "apex" else ()
    words = ("train", "CartPole-v1", "--algo", algo, "--workers", "2", "--stop-steps", "2000", "--name", "run")
    done = fever(*words, f"network={HERE}:FlaxNet", *small)
    assert done.returncode == 0, done.stderr
    done = fever("eval", "run", "--episodes", "2")
    assert done.returncode == 0, done.stderr


def test_few_numbers_of_rows_are_compiled() -> None:
    network = network_of(DictEnv)
    params, rng = random_weights(network), np.random.default_rng(0)
    x = rng.random((300, *network.input_shape)).astype(np.float32)
    whole, _ = network.act(params, x[:8], network.initial_state(8))
    for count in (1, 5, 8, 7, 200, 300, 129, 260):
        outputs, state = network.act(params, x[:count], network.initial_state(count))
        assert (len(outputs), len(state)) == (count, count)
        np.testing.assert_allclose(outputs[:8], whole[:count], rtol=1e-5, atol=1e-6)
    assert network._compiled == {8, 256, 512}


def test_a_policy_prepares_its_network_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = fever.train("CartPole-v1", network=networks.FlaxNet, runs=tmp_path, stop={"iterations": 1}).policy
    made: list[Any] = []
    real = CustomNetwork.actor
    monkeypatch.setattr(CustomNetwork, "actor", lambda self, params: made.append(params) or real(self, params))
    for _ in range(3):
        policy.act(np.zeros(4, np.float32))
    policy.params = dict(policy.params)
    policy.act(np.zeros(4, np.float32))
    assert len(made) == 2
    pickle.loads(pickle.dumps(policy)).act(np.zeros(4, np.float32))
