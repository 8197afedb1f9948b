"""`fever train --seeds`: several runs of one experiment side by side on this machine, and their score."""

from __future__ import annotations

import math
import os
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from fever import layout
from fever.algos.batch import check_sizes
from fever.algos.registry import check_settings, find_provider
from fever.config import RunConfig
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.experiments.compare import measures, score
from fever.experiments.member import BAD_INPUT, DONE, FAILED, INTERRUPTED, RUNNING, WAITING, Member
from fever.experiments.scores import common_metric, horizon, read_curves
from fever.experiments.select import SEED
from fever.experiments.table import SeedsDisplay, errors_text
from fever.files import user_path
from fever.runs.run import Run, fresh_name, to_yaml, trust_word
from fever.scratch import Scratch
from fever.signals import Interrupts
from fever.system import usable_cores
from fever.training.named import make_callbacks, make_loggers
from fever.tune.study import try_once
from fever.zoo.preset import find_preset, line

SCRATCH = "fever-seeds-"  # before the names of temporary folders
MOST = 1000  # seeds
LOOK_SECONDS = 0.2  # between two looks at all runs
END_SECONDS = 8.5  # for all to save and end after Ctrl-C; then they are killed


def several_configs(config: RunConfig, seeds: int) -> list[RunConfig]:
    """The configurations of the runs, with consecutive seeds and a name each. Raises `FeverError` if one is taken."""
    if config.search is not None:
        raise FeverError("a search has its own --seeds: fever tune; leave out --seeds, or the search in the file")
    if not 1 <= seeds <= MOST:
        raise FeverError(f"--seeds {seeds}: must be a number from 1 to {MOST:,}")
    to_yaml(config.model_copy(update={"seed": config.seed + seeds - 1}))  # a number that no file can hold is said now
    base = config.name or fresh_name(config)
    found = []
    for seed in range(config.seed, config.seed + seeds):
        one = config.model_copy(update={"seed": seed, "name": f"{base}{SEED}{seed}"})
        path = user_path(user_path(one.runs) / str(one.name))
        if os.path.lexists(path):
            raise FeverError(
                f"{path} exists already; choose another --name or --seed, or continue it with: "
                f"fever resume {path}{trust_word(config)}"
            )
        found.append(one)
    return found


def check(config: RunConfig, say: Callable[[str], None]) -> None:
    """Find mistakes that all runs would have in common before the first one starts, and say what they get from the
    zoo: they are silent."""
    check_settings(config.algo, config.settings)
    check_sizes(config)
    make_callbacks(config)
    make_loggers(config)
    source, provider = EnvSource(config.env, config.env_kwargs), find_provider(config.algo)
    try_once(provider.env_source(source) if provider is not None else source)
    if told := line(config, find_preset(config, source.name, source.kwargs), source.name):
        say(told)


def share_cores(config: RunConfig, seeds: int, cores: int) -> RunConfig:
    """The configuration with a number of workers. Runs side by side keep the cores busy, so none and `auto` are 0, or 1
    with cores of its own, as in a search; `all` is what each run's share of the cores has room for."""
    provider = find_provider(config.algo)
    if provider is not None:
        return provider.resolve(config)
    if isinstance(config.workers, int):
        return config
    least = int(config.cpus_per_worker is not None)
    share = max(0, cores // seeds - 1) // (config.cpus_per_worker or 1)
    workers = max(least, share) if config.workers == "all" else least
    return config.model_copy(update={"workers": workers})


def cores_of(config: RunConfig) -> int:
    """The cores that one run takes: one, and those of its workers."""
    provider = find_provider(config.algo)
    if provider is None:
        return 1 + (config.workers if isinstance(config.workers, int) else 0) * (config.cpus_per_worker or 1)
    bundles = provider.trial_bundles(config, EnvSource(config.env, config.env_kwargs))
    return max(1, math.ceil(sum(bundle.get("CPU", 0.0) for bundle in bundles)))


def at_once(config: RunConfig, cores: int) -> int:
    """How many runs go side by side: as many as the cores allow, one if each needs a GPU."""
    if config.device == "gpu" or config.gpus_per_worker:
        return 1
    return max(1, cores // cores_of(config))


def train_several(
    config: RunConfig, seeds: int, parallel: int | None, display: SeedsDisplay
) -> tuple[dict[str, Any], int]:
    """Train an experiment with this many seeds on this machine; returns the object that `--json` prints, and the exit
    code: 130 if it was interrupted, 1 if a run failed. Raises `FeverError` if all failed because of bad input."""
    cores = usable_cores()
    configs = several_configs(config, seeds)
    check(config, display.message)
    shared = share_cores(config, seeds, cores)
    configs = [one.model_copy(update={"workers": shared.workers, "settings": shared.settings}) for one in configs]
    parallel = min(seeds, parallel or at_once(configs[0], cores))
    began = time.monotonic()
    scratch = Scratch(tempfile.gettempdir(), SCRATCH)
    try:
        members = [Member(one, scratch.path) for one in configs]
        display.start(configs[0], members, parallel)
        interrupted = _train(members, parallel, display)
        display.stop()
        summary = _summarise(members, time.monotonic() - began, interrupted)
        code = _exit_code(members, interrupted)
    finally:
        scratch.remove()
    if code == BAD_INPUT:
        raise FeverError(f"all failed: {errors_text(summary['runs'])}")
    display.finish(summary)
    return summary, code


def _train(members: list[Member], parallel: int, display: SeedsDisplay) -> bool:
    """Train all, so many at a time; returns whether that was interrupted."""
    with Interrupts(held=True) as interrupts:
        try:
            while any(member.state in (WAITING, RUNNING) for member in members):
                waiting = [member for member in members if member.state == WAITING]
                for member in waiting[: parallel - sum(member.state == RUNNING for member in members)]:
                    member.start()
                _look(members, display)
                with interrupts.allow():
                    time.sleep(LOOK_SECONDS)
        except KeyboardInterrupt:
            _end(members, display, interrupts)
            return True
        finally:
            for member in members:
                member.kill()
    return any(member.state == INTERRUPTED for member in members)


def _look(members: Sequence[Member], display: SeedsDisplay) -> None:
    for member in members:
        if member.state == RUNNING and member.look():
            display.ended(member)
    display.update(members)


def _end(members: Sequence[Member], display: SeedsDisplay, interrupts: Interrupts) -> None:
    """Have all running runs save and end; a second Ctrl-C is passed on, by which they end at once."""
    display.message("interrupted: all seeds save and end")
    for member in members:
        member.ask_to_end()
    deadline = time.monotonic() + END_SECONDS
    while any(member.state == RUNNING for member in members) and time.monotonic() < deadline:
        _look(members, display)
        try:
            with interrupts.allow():
                time.sleep(LOOK_SECONDS)
        except KeyboardInterrupt:
            for member in members:
                member.ask_to_end(signal.SIGINT)
    for member in members:
        if member.state == RUNNING:
            member.kill()
            member.look()


def _exit_code(members: Sequence[Member], interrupted: bool) -> int:
    failed = [member.code for member in members if member.state == FAILED]
    if interrupted:
        return 130
    if failed and set(failed) == {BAD_INPUT} and len(failed) == len(members):
        return BAD_INPUT
    return 1 if failed else 0


def _summarise(members: Sequence[Member], seconds: float, interrupted: bool) -> dict[str, Any]:
    """The object that `--json` prints; draws the picture of the runs that are done."""
    failed = sum(member.state == FAILED for member in members)
    config, notes = members[0].config, list[str]()
    summary: dict[str, Any] = {
        "env": config.env,
        "algo": config.algo,
        "workers": config.workers,
        "stop_reason": "interrupted" if interrupted else "failed" if failed == len(members) else "done",
        "seconds": round(seconds, 3),
        "runs": [member.describe() for member in members],
        "failed": failed,
        "score": None,
        "picture": None,
        "next": next_commands(members),
        "notes": notes,
    }
    done = [member.run for member in members if member.state == DONE]
    if done and not interrupted:
        summary["score"] = score_of(done, notes)
        summary["picture"] = _draw(done, notes)
    return summary


def score_of(runs: Sequence[Run], notes: list[str]) -> dict[str, Any] | None:
    """The score of an experiment: at the most steps that all its runs have, with intervals over seeds."""
    metric = common_metric(runs)
    curves = read_curves(runs, metric, notes)
    if not curves:
        return None
    end = horizon(curves)
    found = {name: asdict(score(values)) for name, values in measures(curves, end).items()}
    return {"metric": metric, "steps": end, "seeds": len(curves), **found}


def _draw(runs: Sequence[Run], notes: list[str]) -> str | None:
    """Draw one curve with its band into the first run; returns the picture's path."""
    from fever.experiments.figure import Look, draw
    from fever.runs.plot import save

    try:
        metric = common_metric(runs)
        figure, _ = draw(runs, Look(metric=metric))
        path = runs[0].to_write(layout.SEEDS)
        save(figure, path)
    except FeverError as error:
        notes.append(f"there is no picture: {error}")
        return None
    return str(path)


def next_commands(members: Sequence[Member]) -> list[str]:
    """Commands that continue what has not reached its end."""
    unfinished = [member for member in members if member.state in (INTERRUPTED, FAILED, WAITING)]
    commands = [member.next_command for member in unfinished if member.exists]
    first = next((member.run.path for member in members if member.exists), None)
    for member in unfinished:
        if not member.exists and member.state != FAILED and first is not None:
            words = ["-f", str(first / layout.CONFIG), "--seed", str(member.seed), "--name", member.run.path.name]
            commands.append(shlex.join(["fever", "train", *words]))
    return commands
