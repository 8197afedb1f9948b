"""Curricula: callbacks change the environment's arguments, in this process and in workers."""

from __future__ import annotations

import os
import signal
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fever
from fever.envs.loop import LoopEnvs
from fever.envs.source import EnvContext, EnvSource
from fever.errors import ContractError, TrainingError
from fever.runs.evaluate import evaluate, source_of
from fever.runs.run import Run
from fever.training.callbacks import Callback, TrainingInfo
from fever.training.resume import resume
from tests.environments import IdentityEnv, InfoEnv, SameStepCounters
from tests.sampling.helpers import make_workers

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray")]
ENV = "tests.environments:InfoEnv"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"steps": 16, "minibatch": 32, "epochs": 1},
    "dqn": {"warmup": 32, "buffer": 1000, "target_updates": 10},
    "impala": {},
    "trpo": {"timesteps_per_batch": 60},  # whole episodes
}


class Vectorised(SameStepCounters):
    def __init__(self, num_envs: int, limit: int = 5) -> None:
        super().__init__(num_envs)


class Lengthens(Callback):
    """Makes episodes longer in iteration 2."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes or {"limit": 9}

    def on_iteration(self, info: TrainingInfo) -> None:
        if info.iteration >= 2:
            info.set_env_kwargs(**self.changes)
            assert info.env_kwargs.items() >= self.changes.items()
            info.set_env_kwargs(**self.changes)  # changes nothing


def train(folder: Path, algo: str, workers: int, callback: Callback, env: Any = ENV, **stop: Any) -> Any:
    more = {"workers": workers, "envs": 2 * max(1, workers), **ALGORITHMS[algo]}
    return fever.train(env, algo, runs=folder, name="a", stop=stop, callbacks=[callback], **more)


def lengths(rows: list[dict[str, Any]]) -> dict[tuple[int, int], list[int]]:
    """(worker, environment) -> lengths of its episodes in order, equal neighbours once."""
    own: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        assert row["info"]["score"] == 10 * row["length"]
        own.setdefault((row["worker"], row["env"]), []).append(row["length"])
    return {key: [length for length, _ in groupby(values)] for key, values in own.items()}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_episodes_change_in_every_worker(tmp_path: Path, algo: str, workers: int) -> None:
    class StopsLater(Lengthens):
        """Stops once all environments have ended two episodes of the new length."""

        def on_episode(self, info: TrainingInfo, episode: dict[str, Any]) -> None:
            rows.append(episode)

        def on_iteration(self, info: TrainingInfo) -> None:
            super().on_iteration(info)
            pairs = [(row["worker"], row["env"]) for row in rows if row["length"] == 9]
            wanted = max(1, workers) * (1 if algo == "trpo" else 2)
            if len({pair for pair in pairs if pairs.count(pair) > 1}) == wanted:
                info.request_stop("done")

    rows: list[dict[str, Any]] = []
    run = train(tmp_path, algo, workers, StopsLater(), steps=100_000).run
    assert run.status == "done"
    assert set(map(tuple, lengths(run.episodes()).values())) <= {(5, 9), (9,)}, "each changes once, between episodes"
    metrics = run.metrics()
    assert [row.get("env/limit") for row in metrics[:3]] == [None, None, 9]
    assert 'the environment\'s arguments from the next episodes on: {"limit": 9}' in (run.path / "log.txt").read_text()
    assert run.config.env_kwargs == {}, "a new run with this configuration begins as this one did"


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_and_evaluation_have_the_new_arguments(tmp_path: Path, workers: int) -> None:
    run = train(tmp_path, "ppo", workers, Lengthens(), iterations=8).run
    before = len(run.episodes())
    config = run.config.model_copy(update={"stop": run.config.stop.model_copy(update={"iterations": 10})})
    resume(run, config)
    assert {row["length"] for row in run.episodes()[before:]} == {9}
    assert run.metrics()[-1]["env/limit"] == 9
    assert run.checkpoint().env_changes == {"limit": 9}
    assert set(evaluate(run.checkpoint(), source_of(run, checkpoint=run.checkpoint()), 2).lengths) == {9}
    assert set(evaluate(run.checkpoint(), source_of(run), 2).lengths) == {5}


def test_a_replaced_worker_starts_with_the_new_arguments(ray: Any) -> None:
    workers, algorithm = make_workers(EnvSource(ENV), 2, envs=1, steps=18)
    try:
        workers.broadcast(algorithm.weights())
        assert [[one.length for one in part.episodes] for part in workers.collect(2)] == [[5, 5, 5]] * 2
        workers.change_env({"limit": 9})
        victim = ray.get(workers.actors[1].facts.remote())["pid"]
        os.kill(victim, signal.SIGKILL)
        made = [*workers.collect(4), *workers.collect(2)]
        assert workers.restarts == 1
        first = {index: next(part for part in made if part.worker_index == index) for index in (0, 1)}
        assert [one.length for one in first[0].episodes] == [5, 9], "3 steps were taken already"
        assert [one.length for one in first[1].episodes] == [9, 9], "it has never had other arguments"
    finally:
        workers.close()


@pytest.mark.parametrize(
    ("env", "changes", "why"),
    [
        (ENV, {"limits": 9}, "InfoEnv has no argument limits"),
        (ENV, {"limit": {1}}, "must be what JSON can hold"),
        (Vectorised, {"limit": 9}, "is natively vectorised, so its arguments cannot be changed"),
        (IdentityEnv, {"action_space": "multibinary"}, r"with .* does not fit the run: it has another"),
    ],
)
def test_what_cannot_be_changed_ends_the_run_saved(tmp_path: Path, env: Any, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(TrainingError, match=rf"^the callback .*:Lengthens failed in on_iteration: .*{why}"):
        train(tmp_path, "ppo", 0, Lengthens(**changes), env=env, iterations=4)
    run = Run(tmp_path / "a")
    assert (run.checkpoint().iteration, run.checkpoint().env_changes) == (2, {}), "it can be resumed"


def test_new_environments_are_seeded_and_the_old_ones_closed() -> None:
    class Seeded(InfoEnv):
        closed = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            seeds.append(seed)
            return super().reset(seed=seed)

        def close(self) -> None:
            Seeded.closed += 1

    histories = []
    for _ in range(2):
        seeds: list[int | None] = []
        envs = LoopEnvs(EnvSource(Seeded, {"limit": 2}), 2, EnvContext())
        envs.reset([11, 12])
        envs.change({"limit": 3})
        for _ in range(5):
            envs.step(np.zeros(2, int))
        envs.close()
        histories.append(seeds)
    assert Seeded.closed == 8
    assert histories[0] == histories[1]
    assert histories[0][:2] == [11, 12]
    assert None not in histories[0][:4], "an environment that was made anew would draw a seed by chance"
    assert len(set(histories[0][:4])) == 4
    assert histories[0][4:] == [None, None]


def test_other_spaces_in_a_worker_are_refused() -> None:
    envs = LoopEnvs(EnvSource(IdentityEnv), 1, EnvContext())
    envs.reset([0])
    envs.change({"action_space": "multibinary"})
    with pytest.raises(ContractError, match="does not fit the run"):
        envs.reset([0])
    envs.close()
