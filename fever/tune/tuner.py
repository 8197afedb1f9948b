"""Ray Tune's objects for a search: the searcher that proposes values, the scheduler that stops trials, the tuner."""

from __future__ import annotations

import math
import random
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from ray.tune.search.basic_variant import BasicVariantGenerator

from fever import layout
from fever.runs.run import Run
from fever.sampling.ray_cluster import Cluster
from fever.system import absolute_sys_path
from fever.tune.actor import TrialActor
from fever.tune.driver import send_to_root
from fever.tune.score import BUDGET
from fever.tune.trial import PERTURBATIONS, Plan
from fever.tune.watch import Watcher

if TYPE_CHECKING:
    from fever.tune.study import Study

REDUCTION = 3  # ASHA: a third of the trials that reach a comparison continue
FIRST_LOOK = BUDGET // REDUCTION**2  # when ASHA compares for the first time
SLACK = 0.1  # share of a core that a trial with workers leaves free for them
COPIES_KEPT = 4  # copies kept of every trial; another trial may be slow to fetch one


class Population(PopulationBasedTraining):
    """Population-based training whose trials pause for others only if not all of them fit on the cluster.

    With Ray Tune's own, a trial pauses whenever another one waits for a moment, and loses its unfinished episodes.
    """

    def __init__(self, yields: bool, **options: Any) -> None:
        super().__init__(**options)
        self.yields = yields

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        return decision if self.yields or decision != self.PAUSE else self.CONTINUE


def make_tuner(study: Study, run: Run, plan: Plan, cluster: Cluster, watcher: Watcher, slots: int) -> tune.Tuner:
    """A tuner for a new search, or one that continues from the state in the run directory."""
    search, parallel = study.search, min(study.parallel, slots)
    packed = cluster.ray.cloudpickle.dumps((plan, study.source))
    trainable = TrialActor.for_search(packed, absolute_sys_path(), trial_bundles(study, cluster))
    space = study.space.domains(tune, grid=search.method == "grid")
    if search.method == "optuna":
        import optuna  # noqa: F401 - importing it sets up its logging

        send_to_root("optuna")
    if study.resumable:
        tuner = tune.Tuner.restore(str(plan.folder.root / layout.TUNE), trainable, param_space=space)
        assert tuner._local_tuner is not None
        tuner._local_tuner.get_run_config().callbacks = [watcher]  # the stored one belongs to a process that has ended
        return tuner
    searcher: Any = None
    if search.method == "optuna":
        from ray.tune.search.optuna import OptunaSearch

        searcher = OptunaSearch(seed=study.config.seed)
    else:
        limited = (parallel < slots or study.workers) and search.scheduler != "pbt"  # otherwise only cores limit them
        searcher = BasicVariantGenerator(max_concurrent=parallel if limited else 0, random_state=study.config.seed)
    name = name_from_one if search.method == "optuna" else name_from_zero
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            num_samples=1 if search.method == "grid" else study.trials,
            search_alg=searcher,
            scheduler=make_scheduler(study, plan),
            max_concurrent_trials=parallel if search.method == "optuna" else None,
            reuse_actors=True,
            trial_name_creator=name,
            trial_dirname_creator=name,
        ),
        run_config=tune.RunConfig(
            name=layout.TUNE,
            storage_path=str(plan.folder.root),
            callbacks=[watcher],
            checkpoint_config=tune.CheckpointConfig(num_to_keep=COPIES_KEPT, checkpoint_at_end=False),
            verbose=0,
        ),
    )


def make_scheduler(study: Study, plan: Plan) -> Any:
    """The scheduler that stops or copies trials; None if all run to their end."""
    search = study.search
    if search.scheduler == "asha":
        whole = BUDGET * search.seeds
        return ASHAScheduler(
            time_attr="time", max_t=whole, grace_period=FIRST_LOOK * search.seeds, reduction_factor=REDUCTION
        )
    if search.scheduler == "pbt":
        random.seed(study.config.seed)  # it uses the global random generators
        np.random.seed(study.config.seed % 2**32)
        return Population(
            yields=(search.parallel or study.trials) < study.trials,
            time_attr="time",
            perturbation_interval=BUDGET // PERTURBATIONS,
            hyperparam_mutations=plan.space.mutations(tune),
            custom_explore_fn=plan.space.within,
            log_config=False,
        )
    return None


def trial_bundles(study: Study, cluster: Cluster) -> list[dict[str, float]]:
    """The resources of a trial: its own process first, then processes that its algorithm starts itself. Raises
    `FeverError` if the cluster will never have them.

    fever places its own workers itself, and they reserve hardly anything; a little is left free for them.
    """
    search, workers, config = study.search, study.workers, study.config
    largest = max(machine.cores for machine in cluster.machines())
    gpus = config.gpus_per_worker * workers + (config.device == "gpu")
    bundles = study.bundles or [{"CPU": study.cores - (SLACK if workers else 0.0), "GPU": gpus}]
    if study.bundles is not None and not gpus and not cluster.ask(cluster.ray.cluster_resources).get("GPU"):
        bundles = [{**bundle, "GPU": 0.0} for bundle in bundles]  # it learns without one then
    bundles = [kept for bundle in bundles if (kept := {name: amount for name, amount in bundle.items() if amount})]
    first, *others = bundles
    if others:
        cluster.require_cores(f"one trial of {config.algo}", bundles)
    elif search.scheduler == "pbt" and (search.parallel or study.trials * first["CPU"] > cluster.cores):
        share = cluster.cores / (search.parallel or study.trials)  # a trial that waits for a core would lose its
        first["CPU"] = math.floor(1000 * share) / 1000  # unfinished episodes, so trials share cores instead
    first["CPU"] = min(first["CPU"], largest)
    if wanted := sum(bundle.get("GPU", 0.0) for bundle in bundles):
        cluster.require_gpus(wanted)
    return bundles


def name_from_zero(trial: Any) -> str:
    """A trial's number, the first part of its tag, as its name; for searchers that count from 0."""
    return str(int(re.match(r"\d+", trial.experiment_tag)[0]) + 1)  # type: ignore[index]


def name_from_one(trial: Any) -> str:
    """The same for searchers that count from 1."""
    return str(int(re.match(r"\d+", trial.experiment_tag)[0]))  # type: ignore[index]
