"""The driver of a search: checks its input, starts Ray, has Ray Tune run the trials, and writes the results."""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from fever import layout
from fever.algos.batch import check_sizes
from fever.algos.registry import find_provider
from fever.config import DEFAULT_STEPS, NetworkSettings, RunConfig, Search, Stop
from fever.envs.source import EnvContext, EnvSource, make_any
from fever.envs.watchdog import close_quietly
from fever.errors import FeverError, RayLost, TrainingError
from fever.job import current_job
from fever.runs.disk import Appender
from fever.runs.facts import facts
from fever.runs.run import Run
from fever.runs.trust import TRUST_HINT, names_to_train
from fever.sampling.ray_cluster import Cluster, connect, kill_private_ray
from fever.sampling.ray_machines import cores_in_reach, try_everywhere
from fever.signals import Interrupts
from fever.text import clean
from fever.training.named import make_callbacks, make_loggers
from fever.training.start_from import resolve as resolve_start
from fever.tune import records
from fever.tune.driver import CoresBusy, environment, quiet, send_to_root
from fever.tune.space import Space, check_space, parse
from fever.tune.store import SearchFolder, TrialStore
from fever.tune.table import SearchDisplay
from fever.tune.trial import Plan
from fever.zoo.preset import find_preset, line, with_preset

TUNE_SETTINGS = {  # environment variables of Ray Tune: it writes no logs, handles no signals, changes no directory
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output prints whatever `verbose` says
}
NETWORK = {  # settings of which a checkpoint fits one value
    *NetworkSettings.model_fields, "recurrent", "recurrent_size", "log_std", "dueling", "quantiles",
}  # fmt: skip


class Study:
    """One search, from its beginning or from where it was interrupted to its summary."""

    def __init__(
        self, config: RunConfig, source: EnvSource | None, display: SearchDisplay, run: Run | None, trust: bool
    ) -> None:
        assert config.search is not None
        self.search: Search = config.search
        self.display, self.resuming = display, run
        self.resumable = run is not None and may_resume(run, trust)
        self.source = source or EnvSource(config.env, config.env_kwargs)
        self.space = parse(self.search.space)
        check_kind(config, self.space)
        row = find_preset(config, self.source.name, self.source.kwargs)
        if row is not None and run is None:
            check_space(config, self.space)
            if told := line(config, row, self.source.name, self.space.dimensions):
                display.message(told)
            config = with_preset(config, row)
        require_packages(self.search.method)
        check_space(config, self.space)
        if config.scale_batch:
            check_sizes(config)
        make_callbacks(config)  # every trial makes its own: a mistake is found before the first one starts
        make_loggers(config)
        if config.start_from is not None and run is None:
            config = resolve_start(config)  # trials have another folder of runs
        provider = find_provider(config.algo)
        self.tried = provider.env_source(self.source) if provider is not None else self.source
        try_once(self.tried)
        self.config = resolve(config, self.source, row.steps if row is not None else DEFAULT_STEPS)
        self.trials = self.space.points if self.search.method == "grid" else self.search.trials
        assert isinstance(self.config.workers, int)
        self.workers = self.config.workers  # inside a trial
        self.cores = 1 + self.workers * (self.config.cpus_per_worker or 1)  # of a trial
        self.bundles: list[dict[str, float]] | None = None  # if a provider's algorithm asks Ray for its processes
        if provider is not None:
            self.bundles = provider.trial_bundles(first_point(self.config, self.space), self.source)
            self.cores = math.ceil(sum(bundle.get("CPU", 0.0) for bundle in self.bundles))
        self.parallel = self.search.parallel or max(1, cores_in_reach() // self.cores)
        self.ended: dict[int, records.Record] = {}  # trials, as far as this process knows them

    def run(self) -> dict[str, Any]:
        """Run all trials that have not ended; leave a complete run directory, whatever happens."""
        run = self.resuming or Run.create(self.config, facts())
        run.lock()
        began = self.began = time.monotonic()
        before = (run.summary or {}).get("seconds", 0.0)
        interrupts = Interrupts()
        reason = "trials"
        try:
            with quiet(run.path / layout.LOG, run.disk):
                run.disk.say = self.display.message
                (run.path / layout.SUMMARY).unlink(missing_ok=True)
                run.write_config(self.config)  # its stop rules may have changed
                busy = CoresBusy()
                try:
                    with interrupts:
                        self._fit(run, interrupts)
                except KeyboardInterrupt:
                    reason = interrupts.reason
                except Exception as error:
                    begun = self.resuming is not None or (run.path / layout.TUNE).exists()
                    if begun or isinstance(error, TrainingError):
                        self._write(run, "failed", before + time.monotonic() - began, busy.share())
                    else:
                        run.discard()
                    raise
                finally:
                    self.display.stop()
                summary = self._finish(run, reason, before + time.monotonic() - began, busy.share())
            run.disk.require_saved()
            return summary
        finally:
            run.close()

    def _fit(self, run: Run, interrupts: Interrupts) -> None:
        """Connect to Ray and have Ray Tune run the trials."""
        self.display.message("starting Ray")
        cluster = connect(self.parallel * self.cores)
        try:
            several = len(cluster.machines()) > 1
            if several:
                try_everywhere(cluster, self.tried)
            store = start_store(cluster, run.path.resolve()) if several or current_job() is not None else None
            folder = SearchFolder(run.path.resolve(), cluster.here, store)
            self.display.start(self.config, run.path, self.trials, cluster.cores)
            parent = cluster.folder.path if cluster.folder is not None else None  # removed also after a kill
            with tempfile.TemporaryDirectory("", "fever-compiled-", parent, ignore_cleanup_errors=True) as compiled:
                plan = self._plan(folder, compiled)
                send_to_root("ray")  # importing it has set up handlers of its own
                with interrupts.shield():  # Ray Tune saves its state and stops its trials first
                    self._tune(run, plan, cluster, interrupts)
        finally:
            cluster.leave()

    def _plan(self, folder: SearchFolder, compiled: str) -> Plan:
        """What every trial needs to know."""
        alone = self.config.model_copy(update={"search": None})
        return Plan(alone, self.space, self.search.seeds, self.search.scheduler == "pbt", folder, compiled)

    def _tune(self, run: Run, plan: Plan, cluster: Cluster, interrupts: Interrupts) -> None:
        from fever.tune.tuner import make_tuner
        from fever.tune.watch import Watcher, ending_with_ray

        table = Appender(run.path / layout.TRIALS_TABLE, run.disk)
        watcher = Watcher(self.space, table, self.display, interrupts, cluster)
        self.ended = watcher.written
        slots = max(1, int(cluster.cores) // self.cores)
        with environment({**TUNE_SETTINGS, "TUNE_MAX_PENDING_TRIALS_PG": str(max(2, slots))}):
            try:
                with ending_with_ray(cluster, partial(self._end_with_ray, run)):
                    make_tuner(self, run, plan, cluster, watcher, slots).fit()
            except (FeverError, TrainingError):
                raise
            except Exception as error:
                logging.exception("Ray Tune failed")
                what = " ".join(str(error).split()).rstrip(".")
                raise TrainingError(f"Ray Tune failed: {what}; more is in {run.path / layout.LOG}") from error
            finally:
                run.disk.try_now()
                table.close()

    def _end_with_ray(self, run: Run, error: RayLost) -> None:
        """Record how the search ended, say how it is continued, and end the process: Ray Tune waits for a dead Ray."""
        lines = [str(error), f"what the trials have saved is kept; continue with: fever resume {run.path} --trust"]
        try:
            seconds = time.monotonic() - self.began
            summary = records.summarise(run.path, self.config, self._records(run), "failed")
            run.write_summary({**summary, "seconds": round(seconds, 3), "cores_busy": None, "error": str(error)})
        except Exception as other:
            logging.exception("the summary could not be written")
            lines.append(f"how it ended could not be saved: {other}")
        os.write(2, "".join(f"fever: {clean(line)}\n" for line in lines).encode())
        kill_private_ray()
        os._exit(1)

    def _finish(self, run: Run, reason: str, seconds: float, busy: float | None) -> dict[str, Any]:
        """Write the results and show the summary."""
        if reason == "trials":
            for copy in (run.path / layout.TUNE).glob("*/checkpoint_*"):  # no trial will continue from them
                shutil.rmtree(copy)
        summary = self._write(run, reason, seconds, busy)
        if summary["stop_reason"] == "failed":
            found = self._records(run)
            raise TrainingError(
                f"all {len(found)} trials failed, most of them with: {records.commonest_error(found)}; "
                f"{run.path / layout.TRIALS_TABLE} has all errors"
            )
        self.display.finish(summary)
        return summary

    def _write(self, run: Run, reason: str, seconds: float, busy: float | None) -> dict[str, Any]:
        """Write the best settings, the picture and the summary; returns the summary. Its stop reason is `failed` if no
        trial has a score. What a full disk refuses is missing, and what was there before stays."""
        run.disk.try_now()
        if layout.CONFIG in run.disk.unsaved:
            run.write_config(self.config)
        found = self._records(run)
        best = records.best_of(found)
        failed = reason == "trials" and best is None
        summary = records.summarise(run.path, self.config, found, "failed" if failed else reason)
        summary |= {"seconds": round(seconds, 3), "cores_busy": busy}
        if best is not None:
            with run.disk.writing(layout.BEST):
                records.write_best(run.path / layout.BEST, self.config, best)
        if found:
            from fever.tune.picture import draw

            with run.disk.writing(layout.PICTURE):
                draw(found, self.space, f"{self.config.env} · {self.config.algo}", run.path / layout.PICTURE)
        run.write_summary(summary)
        return summary

    def _records(self, run: Run) -> list[records.Record]:
        """The trials that have ended, also those whose rows the disk refused."""
        return list((self.ended or records.read(run.path / layout.TRIALS_TABLE)).values())


def check_kind(config: RunConfig, space: Space) -> None:
    """Raise `FeverError` if method, scheduler and space do not fit together."""
    search, provider = config.search, find_provider(config.algo)
    assert search is not None
    network = provider.network_settings if provider is not None else NETWORK
    ranges = [name for name, dimension in space.dimensions.items() if not dimension.values]
    if search.method == "grid" and ranges:
        raise FeverError(f"a grid needs choice(...), but {ranges[0]} has a range; use --search random or optuna")
    if search.scheduler != "pbt":
        return
    if search.method != "random":
        raise FeverError(f"pbt starts with random settings and changes them itself; leave out --search {search.method}")
    if search.seeds > 1:
        raise FeverError("pbt copies one run onto another, so a trial has one seed; leave out --seeds")
    if search.trials < 2:
        raise FeverError("pbt needs at least two trials, to copy one to another")
    if fixed := [name for name in space.dimensions if name.partition(".")[0] in network]:
        raise FeverError(
            f"pbt cannot search {fixed[0]}: trials continue from each other's checkpoints, so all have the same network"
        )


def may_resume(run: Run, trust: bool) -> bool:
    """Whether there is a state of Ray Tune's to continue from. Raises `FeverError` if reading it, or pickles of trials,
    or importing what the run names needs trust."""
    run.trusted |= trust
    if (run.summary or {}).get("stop_reason") == "trials":
        raise FeverError(f"{run.path} has run all its trials; its best settings are in {run.path / layout.BEST}")
    folder = run.path / layout.TUNE
    pickled = (folder / "tuner.pkl").is_file()
    pickles = f"{layout.TRIALS}/*/{layout.CHECKPOINTS}/*/{layout.FILES}"
    left = any(run.path.glob(pickles))  # trials continue from them, even if Ray Tune starts anew
    if (pickled or left) and not trust and current_job() is None:  # a requeued job wrote them itself
        where = run.path / (layout.TUNE if pickled else layout.TRIALS)
        raise FeverError(f"{where} holds pickles, which can run any program when they are read; {TRUST_HINT}")
    run.require_trust(names_to_train(run.config))
    # A search that was killed as it began has no state yet: Ray Tune would run one trial of it, and end.
    return pickled and any(folder.glob("experiment_state-*.json"))


def require_packages(method: str) -> None:
    """Raise `FeverError` if a package that the search needs is not installed."""
    from importlib.util import find_spec

    names = ["pandas", "pyarrow", "tensorboardX", *(["optuna"] if method == "optuna" else [])]
    if missing := [name for name in names if find_spec(name) is None]:
        raise FeverError(
            f'a search needs {", ".join(missing)}, which is not installed; install it with: pip install "fever[tune]"'
        )


def try_once(source: EnvSource) -> None:
    """Create the environment once, so that an error in it is raised before anything starts."""
    with tempfile.TemporaryDirectory(prefix="fever-") as folder:
        close_quietly(source.name, make_any(source, EnvContext(workdir=Path(folder))).close)


def resolve(config: RunConfig, source: EnvSource, steps: int = DEFAULT_STEPS) -> RunConfig:
    """The configuration of the trials, with a budget, by default of `steps`, and a number of workers. `auto`, `all` and
    None become 0, or 1 if workers have cores of their own: trials on all cores keep the machine busy."""
    provider = find_provider(config.algo)
    if provider is not None:
        config = provider.resolve(config)  # a number of workers may be among the settings
    stop: Stop = config.stop.or_default(source.reward_threshold, steps)
    if stop.steps is None and stop.seconds is None and stop.iterations is None:
        stop = stop.model_copy(update={"steps": steps})
    workers = config.workers if isinstance(config.workers, int) else int(config.cpus_per_worker is not None)
    return config.model_copy(update={"stop": stop, "workers": workers, "env": source.name})


def first_point(config: RunConfig, space: Space) -> RunConfig:
    """The configuration of a trial with the first value of every searched setting."""
    return config.model_copy(update={"settings": {**config.settings, **space.first}, "search": None})


def start_store(cluster: Cluster, root: Path) -> Any:
    """The actor on this machine that trials on others send their files to."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(cluster.here, soft=False)
    return cluster.ray.remote(TrialStore).options(num_cpus=0, scheduling_strategy=here).remote(root)
