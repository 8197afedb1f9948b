"""Any RLlib algorithm as a `Learner`, so that the trainer logs, saves and stops as with fever's own algorithms.

One iteration is one call of RLlib's `Algorithm.train()`. RLlib samples, learns and replaces dead env runners itself. A
callback adds the return of every episode to RLlib's result.
"""

from __future__ import annotations

import importlib
import logging
import math
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from fever import layout
from fever.algos.base import Iteration, SamplingContext, State
from fever.algos.batch import require_scalable, share
from fever.config import RunConfig
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource
from fever.envs.watchdog import close_quietly
from fever.envs.worker_count import choose_workers
from fever.errors import FeverError, TrainingError
from fever.files import as_count
from fever.job import current_job
from fever.rllib.catalogue import require_rllib, silence
from fever.rllib.environment import MakeEnv, Spaces, probe_spaces, with_env_config
from fever.rllib.failures import RESTART_SECONDS, EnvRunnerFailures, forget, reports, root_cause
from fever.rllib.metrics import (
    NO_SECONDS,
    episodes_of,
    learner_metrics,
    log_episode,
    phases_of,
    reports_of,
    sampled_steps,
    steps_metric,
)
from fever.rllib.settings import SETTING_OF_FIELD, default_config, fill, first_sentence, split_settings, validated
from fever.rllib.structure import pack
from fever.sampling.pool import Pool
from fever.sampling.ray_cluster import Cluster, connect
from fever.sampling.ray_machines import cores_in_reach, require_ranks
from fever.sampling.spec import Report
from fever.system import absolute_sys_path, usable_cores
from fever.training.logs import errors_to
from fever.training.setup import Prepared

DATA_CORES = 4  # that Ray Data needs to read and prepare offline data; with fewer it waits for ever
SMALL_WIDTH = 256  # units of a layer up to which one thread of PyTorch is fastest
OF_AGENTS = ("policies", "policies_to_train", "policy_mapping_fn")  # settings that name agents of the environment
SEED_STRIDE = 100_000  # added to the seed each time a run is resumed


def prepare_rllib(config: RunConfig, source: EnvSource, say: Callable[[str], None]) -> Prepared:
    """Find the algorithm, make the environment once, and let RLlib validate the configuration."""
    require_rllib()
    _refuse_own_cores(config)
    if config.scale_batch:
        require_scalable(config.algo, None)
    config, notes = split_settings(config)
    for note in notes:
        say(note)
    spaces = probe_spaces(source)
    config = with_defaults(config).model_copy(
        update={"env": source.name, "stop": config.stop.or_default(source.reward_threshold)}
    )
    if not isinstance(config.workers, int):
        workers, reason = _all_workers(config, source, spaces)
        say(f"workers {workers}: {reason}")
        config = config.model_copy(update={"workers": workers})
    config = with_envs(config)
    learner = RllibLearner(config, source, spaces, say)
    if (crowd := learner.crowd()) is not None:
        say(crowd)
    policy = {"rllib": config.algo, "observation": spaces.observation, "action": spaces.action}
    made = with_env_config(source)
    return Prepared(config, learner, policy, made, on_ray=True, uninterruptible=True, files=RllibFiles(learner))


def with_defaults(config: RunConfig) -> RunConfig:
    """The configuration with RLlib's default number of workers if none is given."""
    if config.workers is not None:
        return config
    return config.model_copy(update={"workers": getattr(default_config(config.algo), SETTING_OF_FIELD["workers"]) or 0})


def with_envs(config: RunConfig) -> RunConfig:
    """The configuration, whose number of workers is known, with the number of environments of the whole run: that of
    each worker is a setting of RLlib's, or RLlib's default."""
    config = split_settings(config)[0]
    if config.envs is not None:
        return config
    each = getattr(default_config(config.algo), SETTING_OF_FIELD["envs"])
    assert isinstance(config.workers, int)
    return config.model_copy(update={"envs": each * max(1, config.workers)})


def _refuse_own_cores(config: RunConfig) -> None:
    if config.cpus_per_worker is not None:
        raise FeverError(
            f"--cpus-per-worker is for fever's own algorithms; {config.algo} takes num_cpus_per_env_runner="
            f"{config.cpus_per_worker}, which places its workers and binds none"
        )


def check_sizes(config: RunConfig) -> None:
    """Have RLlib validate the configuration of a run whose environment is not made yet, and whose machines may be
    unknown. What depends on these is left out: policies, and the fragments of a number of workers."""
    _refuse_own_cores(config)
    config = with_defaults(split_settings(config)[0])
    known = isinstance(config.workers, int)
    unknown = OF_AGENTS if known else (*OF_AGENTS, "rollout_fragment_length")
    settings = {name: value for name, value in config.settings.items() if name not in unknown}
    config = config.model_copy(update={"settings": settings, "workers": config.workers if known else 0})
    validated(rllib_config(with_envs(config), None, config.env), config.algo)


def rllib_config(config: RunConfig, spaces: Spaces | None, env: str) -> Any:
    """RLlib's `AlgorithmConfig` for a run whose environment is registered under the name `env`; without its spaces,
    only to be validated."""
    filled = fill(default_config(config.algo), config.settings, config.algo, spaces)
    workers = config.workers if isinstance(config.workers, int) else 0
    with silence():
        filled.environment(env=env, env_config={})
        filled.env_runners(num_env_runners=workers, num_gpus_per_env_runner=config.gpus_per_worker)
        if config.envs is not None:
            filled.env_runners(num_envs_per_env_runner=share(config.envs, workers))
        filled.debugging(seed=config.seed)
        if "delay_between_env_runner_restarts_s" not in config.settings:
            filled.fault_tolerance(delay_between_env_runner_restarts_s=RESTART_SECONDS)
        ends = filled.callbacks_on_episode_end
        others = [] if ends is None else ends if isinstance(ends, list) else [ends]
        filled.callbacks(on_episode_end=[*others, log_episode])
        if config.device == "gpu" and not filled.num_gpus_per_learner:
            filled.learners(num_gpus_per_learner=1)
        if filled.is_offline and filled.evaluation_interval is None:  # otherwise there would be no episodes
            filled.evaluation(evaluation_interval=1)
    return filled


class RllibLearner:
    """One of RLlib's algorithms, built when the trainer starts it."""

    def __init__(
        self, config: RunConfig, source: EnvSource, spaces: Spaces, say: Callable[[str], None] = logging.warning
    ) -> None:
        self.config, self.source, self.spaces, self.say = config, source, spaces, say
        self.steps = 0
        self.name = f"fever-{uuid.uuid4().hex}"  # of the registered environment, unique in a shared Ray
        self.rllib = validated(rllib_config(config, spaces, self.name), config.algo)
        self.algorithm: Any = None
        self.checkpoint: Path | None = None  # RLlib's own, to resume from
        self.host = socket.gethostname()
        self.counted = 0  # steps by RLlib's count, which may restart at 0 when a run is resumed

    def start(self, place: SamplingContext) -> RllibPool:
        """Build RLlib's algorithm with its env runners, and restore its checkpoint if there is one."""
        from ray.tune.registry import register_env

        cluster = connect(math.ceil(self._cores()))
        try:
            cluster.require_gpus(place.gpus * self.rllib.num_env_runners)
            self._fit_gpus(cluster)
            cluster.require_cores(self.config.algo, self.bundles()[1:])
            limit_torch_threads(self.rllib, self.spaces)
            register_env(self.name, MakeEnv(self.source, place.workdir, absolute_sys_path(), run=self.name))
            self.rllib.debugging(seed=self.config.seed + place.generation * SEED_STRIDE)
            with errors_to(place.workdir.parent / layout.LOG):  # Ray's C++ code writes to stderr
                self.algorithm = self._build()
                if self.checkpoint is not None:
                    self._restore(self.checkpoint)
        except BaseException:
            cluster.leave()
            raise
        EnvRunnerFailures(self.name, self.algorithm, self._sampled, self.say)
        return RllibPool(self.name, self.algorithm, self.rllib.num_env_runners, cluster)

    def _fit_gpus(self, cluster: Cluster) -> None:
        """Without a GPU, use one learner on the CPU with the batches of all; raise FeverError for `--device gpu`."""
        rllib, learners = self.rllib, self.rllib.num_learners
        if self.config.device == "gpu":
            cluster.require_gpus(rllib.num_gpus_per_learner * max(1, learners))
        elif rllib.num_gpus_per_learner and not cluster.ask(cluster.ray.cluster_resources).get("GPU"):
            sizes = ("train_batch_size_per_learner", "minibatch_size") if learners > 1 else ()
            whole = {name: size * learners for name in sizes if (size := getattr(rllib, name, None))}
            note = "".join(f", {name} is {size}" for name, size in whole.items())
            logging.warning("there is no GPU: num_gpus_per_learner and num_learners are 0%s", note)
            rllib.learners(num_gpus_per_learner=0, num_learners=0)
            rllib.training(**whole)

    def _restore(self, checkpoint: Path) -> None:
        """Read RLlib's own checkpoint. It does not hold replay buffers: they start empty."""
        try:
            self.algorithm.restore_from_path(str(checkpoint.resolve()))
        except Exception as error:
            self.algorithm.stop()
            logging.exception("RLlib could not read its checkpoint")
            raise FeverError(f"RLlib cannot resume from {checkpoint}: {first_sentence(root_cause(error))}") from error
        self.counted = self._sampled()

    def _sampled(self) -> int:
        """Environment steps by RLlib's count."""
        return int(self.algorithm.metrics.peek(steps_metric(self.rllib.is_offline), default=0))

    def _build(self) -> Any:
        try:
            with no_home_folder():
                return self.rllib.build_algo()
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, FeverError):
                raise cause from None
            if failed := list(reports(self.name).values()):  # RLlib's own error tells only that a worker is missing
                logging.exception("RLlib could not start its workers")
                raise FeverError(f"RLlib's workers cannot start: {failed[-1]}") from error
            logging.exception("RLlib could not build %s", self.config.algo)
            spaces = f"observations: {self.spaces.observation}, actions: {self.spaces.action}"
            what = f"{self.config.algo} for {self.config.env} ({spaces})"
            raise FeverError(f"RLlib cannot build {what}: {first_sentence(cause)}") from error

    def _cores(self) -> float:
        """Cores that RLlib's processes ask Ray for, without this process."""
        return sum(bundle.get("CPU", 0.0) for bundle in self.bundles()[1:])

    def crowd(self) -> str | None:
        """The sentence about more processes than this machine has cores; None if they fit, and in a job, which is
        refused then (`Cluster.require_cores`)."""
        cores = usable_cores()
        if current_job() is not None or (wanted := math.ceil(self._cores())) <= cores:
            return None
        return f"{self.config.algo} asks for {wanted} cores, and there are {cores}: its processes share them"

    def bundles(self) -> list[dict[str, float]]:
        """Ray resources of each of RLlib's processes, this process first."""
        with silence():
            asked = self.rllib.algo_class.default_resource_request(self.rllib.copy(copy_frozen=False)).bundles
        return [dict(bundle) for bundle in asked] + ([{"CPU": 1.0}] * DATA_CORES if self.rllib.is_offline else [])

    def train(self, pool: RllibPool) -> Iterator[Iteration]:
        while True:
            began = perf_counter()
            pool.cluster.check()
            result = self._train(pool.cluster)
            yield self._iteration(result, pool, perf_counter() - began)

    def _train(self, cluster: Cluster) -> dict[str, Any]:
        """One iteration of RLlib's. An error becomes one sentence; its traceback goes to the log."""
        try:
            return self.algorithm.train()
        except Exception as error:
            cluster.check()  # if Ray is dead, that is the error
            cause = root_cause(error)
            logging.exception("RLlib failed")
            if isinstance(cause, ModuleNotFoundError):
                raise FeverError(f"{self.config.algo} needs a package that is not installed: {cause.name}") from error
            if isinstance(cause, FeverError | TrainingError):
                raise cause from None
            kind = type(cause).__name__
            raise TrainingError(f"RLlib failed, see log.txt in the run: {kind}: {first_sentence(cause)}") from error

    def _iteration(self, result: dict[str, Any], pool: RllibPool, wall: float) -> Iteration:
        """An `Iteration` from a result of RLlib's that took `wall` seconds."""
        counted = sampled_steps(result, self.rllib.is_offline)
        taken = counted - self.counted
        self.counted, self.steps = counted, self.steps + taken
        pool.restarts = int(result.get("fault_tolerance", {}).get("num_remote_worker_restarts", 0))
        phases, width = phases_of(result, wall), max(1, pool.count)
        ended = result.get("evaluation", {}) if self.rllib.is_offline else result
        reports = reports_of(taken, episodes_of(ended)) or [Report(taken, [], 0, 0, dict(NO_SECONDS), self.host)]
        reports[0].seconds = {"env": phases.pop("env", 0.0) * width, "total": phases.get("sample", 0.0) * width}
        return Iteration(reports, learner_metrics(result), phases)

    def weights(self) -> dict[str, np.ndarray]:
        """What acting needs of every policy, as `POLICY/PARAMETER`."""
        part = self.algorithm.learner_group.get_state(components="learner/rl_module", inference_only=True)
        policies = part["learner"]["rl_module"]
        return {
            f"{policy}/{name}": np.asarray(value) for policy, state in policies.items() for name, value in state.items()
        }

    def state(self) -> State:
        """The step count and the connectors' states; the rest is in RLlib's own checkpoint, see `RllibFiles`."""
        arrays: dict[str, np.ndarray] = {}
        try:
            connectors = pack(connector_states(self.algorithm), arrays, "connectors/")
        except TypeError as error:
            connectors = {"unknown": str(error)}
        return State(arrays, {"steps": self.steps, "connectors": connectors})

    def restore(self, state: State, weights: dict[str, np.ndarray]) -> None:
        self.steps = as_count(state.facts["steps"])


class RllibFiles:
    """RLlib's own checkpoint, which holds pickles."""

    def __init__(self, learner: RllibLearner) -> None:
        self.learner = learner

    def save(self, folder: Path) -> None:
        self.learner.algorithm.save_to_path(str(folder.resolve()))

    def restore(self, folder: Path) -> None:
        self.learner.checkpoint = folder  # read when the algorithm is built


def connector_states(algorithm: Any) -> dict[str, Any]:
    """The states of the connector pipelines before and after the policies."""
    runner = algorithm.env_runner
    pairs = {
        "env_to_module": getattr(runner, "_env_to_module", None) or algorithm.env_to_module_connector,
        "module_to_env": getattr(runner, "_module_to_env", None) or algorithm.module_to_env_connector,
    }
    return {name: connector.get_state() for name, connector in pairs.items() if connector is not None}


class RllibPool(Pool):
    """RLlib's env runners, which RLlib supervises itself."""

    can_change_env = False

    def __init__(self, run: str, algorithm: Any, count: int, cluster: Cluster) -> None:
        self.run, self.algorithm, self.count, self.cluster = run, algorithm, count, cluster

    def close(self) -> None:
        try:
            if self.cluster.reachable():
                self.algorithm.stop()
                forget(self.run)
        finally:
            self.cluster.leave()


@contextmanager
def no_home_folder() -> Iterator[None]:
    """Let an algorithm make its folder, which stays empty, in a temporary place instead of the home folder."""
    trainable: Any = importlib.import_module("ray.tune.trainable.trainable")
    before = trainable.DEFAULT_STORAGE_PATH
    with tempfile.TemporaryDirectory(prefix="fever-") as trainable.DEFAULT_STORAGE_PATH:
        try:
            yield
        finally:
            trainable.DEFAULT_STORAGE_PATH = before


def limit_torch_threads(rllib: Any, spaces: Spaces) -> None:
    """Use one PyTorch thread for small networks: splitting such small operations costs more than it saves."""
    import torch

    parts = [rllib.model_config.get(name) for name in ("fcnet_hiddens", "head_fcnet_hiddens")]
    widths = [one for part in parts if isinstance(part, list | tuple) for one in part if isinstance(one, int)]
    if not spaces.image and max(widths, default=0) <= SMALL_WIDTH:
        torch.set_num_threads(1)


def _all_workers(config: RunConfig, source: EnvSource, spaces: Spaces) -> tuple[int, str]:
    """The number of workers that `auto`, `all` or `ranks` stands for, and the reason."""
    if config.workers == "ranks":
        return (ranks := require_ranks()), f"one for each of {ranks} ranks"
    cores = cores_in_reach()
    others = RllibLearner(config.model_copy(update={"workers": 0}), source, spaces)._cores()
    left = max(1, cores - math.ceil(others))
    if config.workers == "auto" and not spaces.agents:
        with tempfile.TemporaryDirectory(prefix="fever-") as folder:
            envs = make_envs(with_env_config(source), 1, EnvContext(workdir=Path(folder)))
            try:
                return choose_workers(envs, left)
            finally:
                close_quietly(source.name, envs.close, limited=True)
    return left, f"one for each of {cores} cores" + (f" minus {others:g} for RLlib's other processes" if others else "")


def bundles_of(config: RunConfig, source: EnvSource) -> list[dict[str, float]]:
    """Ray resources that a run needs for each of its processes, the one that calls the trainer first."""
    require_rllib()
    config = with_defaults(split_settings(config)[0])
    if not isinstance(config.workers, int):
        config = config.model_copy(update={"workers": 0})
    first, *others = RllibLearner(config, source, probe_spaces(source)).bundles()
    return [{**first, "CPU": max(1.0, first.get("CPU", 0.0))}, *others]
