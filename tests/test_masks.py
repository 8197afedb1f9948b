"""Masks of allowed actions, from an environment's info or observation to the action that is taken.

Most of these use `tests.environments:MaskedEnv`, which raises when it gets a forbidden action.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import fever
import fever.envs.worker_count
from fever.algos.on_policy import unroll
from fever.envs.contract import Envs, describe_space
from fever.envs.make import make_envs, make_one
from fever.envs.source import EnvContext, EnvSource
from fever.envs.worker_count import time_steps
from fever.errors import ContractError, FeverError
from fever.policy import Network, Params, distribution_for
from fever.policy.networks import FORBIDDEN
from fever.policy.policy import network_for
from fever.policy.spaces import encode, encoded_shape, with_mask
from fever.replay.explorer import Exploration, Explorer
from fever.runs.evaluate import evaluate, source_of
from fever.runs.run import Run
from fever.sampling.sampler import Sampler
from fever.sampling.spec import SamplerSpec
from tests.environments import SPACES, MaskedEnv, NextStepMasked, SameStepMasked
from tests.factories import random_weights

BOX = describe_space(spaces.Box(-1, 1, (2,)))
NATIVE = [NextStepMasked, SameStepMasked]
SOURCES = [EnvSource(target, {"where": where}) for target in (MaskedEnv, *NATIVE) for where in ("info", "dict")] + [
    EnvSource(MaskedEnv, {"action_space": "multidiscrete", "parts": True}),
    EnvSource(NextStepMasked, {"action_space": "multidiscrete", "parts": True}),
    EnvSource(SameStepMasked, {"action_space": "multidiscrete"}),
    EnvSource(MaskedEnv, {"action_space": "multibinary", "where": "dict"}),
]
everywhere = pytest.mark.parametrize("source", SOURCES, ids=str)
FAULTS = {
    "size": "the action mask has 4 entries for 3 actions",
    "nothing": "the action mask allows no action",
    "missing": "there is no action_mask, but there was one after the first reset",
}
MISSING = {
    "info": "info has no action_mask, but had one after the first reset",
    "dict": "the observation has no part 'action_mask'",
}
TINY: dict[str, dict[str, Any]] = {
    "ppo": {"steps": 16, "minibatch": 64, "epochs": 2, "hidden": (8,)},
    "dqn": {"hidden": (8,), "batch": 16, "updates": 4, "warmup": 50, "buffer": 500, "report_steps": 100},
}


def make(target: Any = MaskedEnv, count: int = 3, **kwargs: Any) -> Envs:
    return make_envs(EnvSource(target, kwargs), count, EnvContext())


def start(source: EnvSource) -> Envs:
    envs = make_envs(source, 1, EnvContext())
    envs.reset([0])
    return envs


def weights(network: Network, seed: int = 0) -> Params:
    """Random weights, with statistics of observations that are nonsense in the columns of the mask."""
    params = random_weights(network, 0.7, seed)
    mean, std = np.full((2, *network.input_shape), 99, np.float32)
    mean[: -network.mask], std[: -network.mask] = 0.1, 2
    return {**params, "observation/mean": mean, "observation/std": std}


# From spaces and masks to columns.


@pytest.mark.parametrize("inside", [False, True], ids=["info", "dict"])
@pytest.mark.parametrize(
    ("space", "mask", "columns"),
    [
        ("discrete", [1, 0, 1], [1, 0, 1]),
        ("discrete", (1, 0, 1), [1, 0, 1]),
        ("discrete_start", np.array([0, 1, 0], np.int8), [0, 1, 0]),
        ("multidiscrete", np.array([1, 0, 0, 1, 1, 0, 0, 0, 1], bool), [1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0]),
        ("multidiscrete", (np.array([1, 0]), [0, 1, 1, 0], [0, 0, 1]), [1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0]),
        ("multibinary", np.array([[1, 0], [1, 1], [0, 1]]), [1, 0, 1, 1, 0, 1]),
    ],
)
def test_a_mask_is_the_last_columns_of_an_observation(space: str, mask: Any, columns: list[int], inside: bool) -> None:
    rows, action = np.full((1, 2), 7, np.float32), describe_space(SPACES[space])
    description = with_mask(BOX, action, None)
    if inside:
        parts = {"type": "dict", "spaces": {"action_mask": describe_space(spaces.MultiBinary(1)), "cue": BOX}}
        description = with_mask(parts, action, "action_mask")
        mask = np.hstack([np.ravel(part) for part in mask])
        encoded = encode(description, {"action_mask": mask[None], "cue": rows})
    else:
        encoded = encode(description, rows, [mask])
    np.testing.assert_array_equal(encoded, [[7, 7, *columns]])
    assert (encoded.shape[1:], encoded.dtype) == encoded_shape(description)
    if not inside:
        outside = [index >= size for size in description["sizes"] for index in range(max(description["sizes"]))]
        np.testing.assert_array_equal(encode(description, rows)[0, 2:] == 0, outside)  # without a mask, all are allowed


@pytest.mark.parametrize("at", [0, 3, 8])  # at the first reset, in a step, at a reset
@pytest.mark.parametrize("fault", ["size", "nothing", "missing"])
@pytest.mark.parametrize("where", ["info", "dict"])
def test_a_broken_mask_is_refused_with_its_step_and_environment(where: str, fault: str, at: int) -> None:
    envs, said = make(where=where, fault=fault, at=at, only=1), {**FAULTS, "missing": MISSING[where]}[fault]
    with pytest.raises(ContractError, match=f":MaskedEnv .* at step {at} of environment 1: {said}$"):
        time_steps(envs)


@pytest.mark.parametrize(("fault", "at"), [("size", 0), ("size", 3), ("nothing", 0), ("nothing", 3), ("missing", 3)])
@pytest.mark.parametrize("target", NATIVE)
def test_a_broken_mask_of_a_vector_environment_is_refused(target: Any, fault: str, at: int) -> None:
    with pytest.raises(ContractError, match=f" at step {at}: {FAULTS[fault]}$"):
        time_steps(make(target, fault=fault, at=at))


@pytest.mark.parametrize("target", [MaskedEnv, *NATIVE])
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"action_space": "box"}, "an action mask needs a Discrete, MultiDiscrete or MultiBinary action space"),
        ({"action_space": "box", "where": "dict"}, "an action mask needs a Discrete, MultiDiscrete or MultiBinary .*"),
        ({"observation_space": spaces.Box(0, 255, (4, 4), np.uint8)}, "an action mask beside an image is not .*"),
    ],
)
def test_a_mask_that_cannot_be_used_is_refused(target: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(FeverError, match=rf"^tests.environments:\w+ cannot be trained on: {message}$"):
        make(target, **kwargs).reset([0, 0, 0])


def test_a_mask_in_both_places_is_the_same_as_in_the_observation() -> None:
    both, inside = make(where="both"), make(where="dict")
    np.testing.assert_array_equal(both.reset([0, 1, 2]), inside.reset([0, 1, 2]))
    assert both.observation == inside.observation
    time_steps(both)


@pytest.mark.parametrize("where", ["info", "dict"])
@pytest.mark.parametrize("target", [MaskedEnv, SameStepMasked])
def test_the_last_mask_of_an_episode_counts_if_it_allows_anything(target: Any, where: str) -> None:
    """A truncated episode's last value is that of an allowed action."""
    envs = make(target, 1, where=where, dead=False, length=1)
    masks, columns = [], envs.reset([0])[:, -3:]
    for _ in range(20):
        step = envs.step(columns.argmax(1) + 5)
        columns = step.observations[:, -3:]
        masks.append(step.final[0][-3:])
    assert any((mask == 0).any() for mask in masks)


@pytest.mark.parametrize("where", ["info", "dict"])
def test_the_last_mask_before_a_reset_by_hand_may_allow_nothing(where: str) -> None:
    envs = make_one(EnvSource(MaskedEnv, {"where": where, "length": 1}), EnvContext())
    for seed in range(3):
        step = envs.step(envs.reset([seed])[:, -3:].argmax(1) + 5)
        np.testing.assert_array_equal(step.observations[0, :3], step.final[0][:3])


# Networks.


def setup(space: str, count: int = 12, **settings: Any) -> tuple[Network, np.ndarray, np.ndarray]:
    """A network, encoded observations `[T, N, ...]` and the masks in them, `[T, N, K, max]`."""
    action, rng = describe_space(SPACES[space]), np.random.default_rng(0)
    description = with_mask(BOX, action, None)
    sizes = description["sizes"]
    network = network_for(description, action, hidden=(8,), recurrent_size=6, **settings)
    masks = np.concatenate([np.eye(size)[rng.integers(size, size=3 * count)] for size in sizes], 1)  # one for certain
    masks = np.maximum(masks, rng.random(masks.shape) < 0.4)
    observations = encode(description, rng.normal(size=(3 * count, 2)), masks).reshape(3, count, -1)
    return network, observations, observations[..., 2:].reshape(3, count, len(sizes), -1) > 0


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
def test_allowed_outputs_and_values_are_those_without_a_mask(core: str, dueling: bool) -> None:
    network, observations, masks = setup("multidiscrete", recurrent=core, dueling=dueling)
    allowed, plain = masks.reshape(3, 12, -1), replace(network, input_shape=(2,), mask=0)
    params = weights(network)
    cut = {name: value[:2] if name.startswith("observation/") else value for name, value in params.items()}
    state, other = network.initial_state(12), plain.initial_state(12)
    features = unroll(network, params, jnp.asarray(observations), state, np.zeros((3, 12), bool))
    there, values = network.policy(params, features, jnp), network.value(params, features, jnp)
    for t, rows in enumerate(observations):
        np.testing.assert_array_equal(network.values(params, rows, state), plain.values(cut, rows[:, :2], other))
        np.testing.assert_allclose(network.values(params, rows, state), values[t], atol=1e-5)
        outputs, state = network.act(params, rows, state)
        expected, other = plain.act(cut, rows[:, :2], other)
        np.testing.assert_array_equal(outputs, np.where(allowed[t], expected, np.float32(FORBIDDEN)))
        np.testing.assert_allclose(outputs, there[t], rtol=1e-6, atol=1e-5)
        np.testing.assert_array_equal(state, other)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("space", ["discrete_start", "multidiscrete", "multibinary"])
def test_the_distribution_is_over_allowed_actions_alone(space: str, xp: Any) -> None:
    network, (rows, *_), (masks, *_) = setup(space, 40)
    distribution, state = distribution_for(describe_space(SPACES[space])), network.initial_state(40)
    old, new = (network.act(weights(network, seed), rows, state)[0] for seed in (0, 1))
    actions = distribution.sample(old, distribution.noise(np.random.default_rng(0), (40,)))
    found = [
        distribution.log_prob(xp.asarray(old), actions, xp), distribution.entropy(xp.asarray(old), xp),
        distribution.kl(xp.asarray(old), xp.asarray(new), xp),
    ]  # fmt: skip
    expected = np.zeros((3, 40))
    for row, choice in np.ndindex(masks.shape[:2]):
        where = np.flatnonzero(masks[row, choice])
        p, q = (np.exp(side.reshape(masks.shape)[row, choice, where].astype(float)) for side in (old, new))
        p, q = p / p.sum(), q / q.sum()
        place = where.tolist().index(actions[row, choice])  # a forbidden one is not in the list
        expected[:, row] += np.log(p[place]), -(p * np.log(p)).sum(), (p * np.log(p / q)).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert (masks.sum(2).min(), masks.all(2).any()) == (1, True)  # the only one, or all of them
    probabilities = np.exp(distribution._log_probabilities(xp.asarray(old), xp))
    assert (np.asarray(probabilities)[~masks] == 0).all()


@pytest.mark.parametrize("space", ["discrete_start", "multidiscrete"])
def test_forbidden_actions_have_no_gradient(space: str) -> None:
    network, (rows, *_), (masks, *_) = setup(space)
    distribution, old = distribution_for(describe_space(SPACES[space])), weights(network, 1)

    def total(params: Params, row: Any) -> Any:
        here, before = (network.policy(side, network.features(side, row, jnp), jnp) for side in (params, old))
        actions = distribution.mode(before)
        parts = distribution.log_prob(here, actions, jnp), distribution.entropy(here, jnp)
        return sum(parts) + distribution.kl(before, here, jnp) + here.reshape(-1)[actions[0]]

    gradients = jax.jit(jax.vmap(jax.grad(total), (None, 0)))(weights(network), rows)  # [N, ...]
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    bias = np.asarray(gradients["policy/b"]).reshape(masks.shape)
    assert (bias[~masks] == 0).all()
    assert (bias[masks & (masks.sum(2, keepdims=True) > 1)] != 0).any()


# Actions that are taken.


def test_the_environment_of_these_tests_raises() -> None:
    envs = make(count=1)
    mask = envs.reset([0])[0, -3:]
    with pytest.raises(ValueError, match="is forbidden"):
        envs.step(np.array([mask.argmin() + 5]))


@everywhere
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_sampler_keeps_to_masks(source: EnvSource, core: str) -> None:
    probe = start(source)
    network = network_for(probe.observation, probe.action, hidden=(8,), recurrent=core, recurrent_size=6)
    sampler = Sampler(SamplerSpec(source, network, 3, 50, 0.9, 0), probe.observation, probe.action)
    for part in (sampler.sample(weights(network)) for _ in range(3)):
        arrays = part.arrays
        masks = arrays["observations"][:-1, ..., -network.mask :].reshape(*arrays["actions"].shape, -1)
        assert (np.take_along_axis(masks, arrays["actions"][..., None], -1) == 1).all()
        assert (arrays["log_probs"] > -50).all()
        assert arrays["terminated"].any()
        assert arrays["truncated"].any()
        assert (masks[arrays["valid"]] == 0).mean() > 0.2


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("source", SOURCES[:6], ids=str)
def test_an_explorer_keeps_to_masks(source: EnvSource, prioritized: bool) -> None:
    probe = start(source)
    network = network_for(probe.observation, probe.action, hidden=(8,), action_values=True, dueling=True)
    plan = Exploration(3, 0.9, 3, greedy=True, clip_rewards=False, prioritized=prioritized)
    for epsilon in (0.0, 0.5, 1.0):
        explorer = Explorer(SamplerSpec(source, network, 3, 5, None, 0), probe.observation, probe.action, plan)
        block, report = explorer.explore(weights(network), 0, np.full(3, epsilon), 400)
        assert len(report.episodes) > 100
        assert block.priorities.max() < 1e3
        masks, actions = block.frames[block.observations[:, 0], -3:], block.actions[:, 0]
        assert (masks[np.arange(len(actions)), actions] == 1).all()
        if epsilon == 1:
            for mask in np.unique(masks, axis=0):
                drawn = actions[(masks == mask).all(1)]
                shares = np.bincount(drawn, minlength=3) / len(drawn)
                np.testing.assert_allclose(shares, mask / mask.sum(), atol=0.15)


@everywhere
def test_the_probe_of_workers_auto_keeps_to_masks(source: EnvSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fever.envs.worker_count, "PROBE_SECONDS", 0.1)
    time_steps(make_envs(source, 2, EnvContext()))


# From end to end.


@pytest.mark.parametrize(
    ("algo", "target", "more"),
    [
        ("ppo", MaskedEnv, {"workers": "auto", "env_kwargs": {"action_space": "multidiscrete", "parts": True}}),
        ("ppo", NextStepMasked, {"recurrent": "gru", "recurrent_size": 6}),
        ("dqn", MaskedEnv, {"env_kwargs": {"where": "dict"}}),
        ("dqn", SameStepMasked, {}),
    ],
)
def test_training_and_evaluation_keep_to_masks(
    algo: str, target: Any, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fever.envs.worker_count, "CHEAP_STEP", 1.0)  # `auto` starts no Ray, however slow this is
    result = fever.train(target, algo, envs=4, runs=tmp_path, stop={"steps": 600}, **TINY[algo], **more)
    run = Run.open(result.run.path)
    assert all(np.isfinite(value).all() for value in result.policy.params.values())
    env, policy = MaskedEnv(**more.get("env_kwargs", {})), fever.load(run.path)
    for deterministic in (True, False):
        assert len(evaluate(run.checkpoint(), source_of(run), 10, deterministic=deterministic).returns) == 10
        observation, info = env.reset(seed=0)
        over = False
        while not over:
            action = policy.act(observation, deterministic, mask=info.get("action_mask"))
            observation, _, ended, cut, info = env.step(action)
            over = ended or cut


def test_masks_count_for_batches_and_may_be_left_out() -> None:
    network, rows, _ = setup("discrete_start")
    description = with_mask(BOX, describe_space(SPACES["discrete_start"]), None)
    policy = fever.policy.Policy(description, describe_space(SPACES["discrete_start"]), network, weights(network))
    best = policy.act(rows[0, 0, :2])
    masks = np.ones((2, 3))
    masks[1, best - 5] = 0
    first, second = policy.act_batch(np.repeat(rows[:1, 0, :2], 2, 0), masks=masks)
    assert first == best != second == policy.act(rows[0, 0, :2], mask=masks[1])


def test_taxi_never_drives_into_a_wall(tmp_path: Path) -> None:
    taxi = max(name for name in gym.registry if name.startswith("Taxi-v"))  # v3 or v4, by Gymnasium's version
    result = fever.train(taxi, envs=4, runs=tmp_path, stop={"iterations": 3}, **TINY["ppo"] | {"steps": 64})
    assert (result.policy.network.mask, result.summary["iterations"]) == (6, 3)
