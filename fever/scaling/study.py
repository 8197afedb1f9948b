"""A whole report: probe, measurements, model, files. Ctrl-C keeps what was measured."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fever.algos.batch import check_sizes
from fever.algos.registry import check_settings, config_of, find_provider, overlaps
from fever.config import DEFAULT_ENVS, RunConfig, validate
from fever.errors import FeverError
from fever.files import user_path, write_atomically
from fever.runs.run import to_yaml
from fever.scaling import probe, report
from fever.scaling.figures import Figures, collect
from fever.scaling.measure import HOSTS, WORKERS, Measurement, Plan, counted, measure
from fever.scaling.model import Setting
from fever.signals import Interrupts
from fever.system import usable_cores
from fever.text import format_duration

AHEAD = 2  # powers of two that are predicted beyond the largest count, if nothing else is asked for
ALL_OF_IT = 1.05  # sum of shares of the time, beyond which workers and learner work at the same time
Say = Callable[[str], None]


@dataclass(frozen=True)
class Study:
    """What was found, and where it is written."""

    folder: Path
    figures: Figures
    predicted: list[int]
    facts: dict[str, Any]  # report.json
    load: float | None  # of this machine before it began


def run_study(plan: Plan, predict: list[int] | None, say: Say) -> Study:
    """Measure, and write the report. Raises FeverError if no count could be measured, with the reason of the first, and
    KeyboardInterrupt if there was none yet; then nothing is left behind but the runs that failed."""
    check_settings(plan.config.algo, plan.config.settings)
    check_sizes(plan.config)
    load = None if plan.elsewhere else os.getloadavg()[0]
    folder, found, complete = make_folder(plan), [], True
    with Interrupts():
        try:
            setting = _setting(plan, folder)
            say(_announcement(plan, setting, folder))
            for one in measure(plan, folder, say):
                found.append(one)
        except KeyboardInterrupt:
            complete = False
        except BaseException:
            _discard(folder)
            raise
    if not any(one.problem is None for one in found):
        _discard(folder)
        if complete:
            raise FeverError(found[0].problem or "")
        left = f"what was begun is in {folder}" if folder.exists() else "nothing is left behind"
        raise KeyboardInterrupt(f"before anything was measured; {left}")
    return _finish(plan, setting, found, predict, folder, complete, load)


def _finish(
    plan: Plan,
    setting: Setting,
    found: list[Measurement],
    predict: list[int] | None,
    folder: Path,
    complete: bool,
    load: float | None,
) -> Study:
    """Write what was found."""
    from fever.scaling.picture import draw

    if any(sum(one.shares.values()) > ALL_OF_IT for one in found):
        setting = replace(setting, overlaps=True)
    figures = collect(plan, setting, found)
    predicted = [count for count in _ahead(figures, predict) if figures.predict(count) is not None]
    facts = report.write(figures, predicted, folder, complete, load)
    draw(figures, predicted, folder / report.PICTURE)
    return Study(folder, figures, predicted, facts, load)


def make_folder(plan: Plan) -> Path:
    """A new folder for the report and its runs."""
    runs = user_path(plan.config.runs)
    base = plan.config.name or f"scale-{plan.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [base] if plan.config.name else [base, *(f"{base}-{number}" for number in range(2, 100))]
    for name in names:
        try:
            (runs / name).mkdir(parents=True)
            return runs / name
        except FileExistsError:
            continue
        except OSError as error:
            raise FeverError(f"{runs / name} cannot be made: {error.strerror}") from error
    raise FeverError(f"{runs / base} exists already; choose another --name")


def _discard(folder: Path) -> None:
    """Remove the folder, and that of the runs, unless there is something in it."""
    for path in (folder, folder.parent):
        try:
            path.rmdir()
        except OSError:
            return


def _setting(plan: Plan, folder: Path) -> Setting:
    """What is known before anything runs. The environment is tried where it will run, if that is this machine."""
    provider = find_provider(plan.config.algo)
    at_once = provider is None and overlaps(plan.config)  # another library's are seen by their rows
    shared = what_is_shared(plan.config)
    if plan.kind != WORKERS or plan.elsewhere:
        return Setting(at_once, **shared)
    if provider is not None:  # its environments are made in another way, and it reports no times
        return Setting(at_once, usable_cores(), **shared)
    with tempfile.TemporaryDirectory(prefix="fever-") as place:
        file = Path(place) / "run.yaml"
        write_atomically(file, to_yaml(plan.config.model_copy(update={"runs": str(folder)})))
        return Setting(at_once, usable_cores(), probe.ask(file), **shared)


def what_is_shared(config: RunConfig) -> dict[str, Any]:
    """The fields `envs` and `same_batch` of a `Setting`, as far as is known of algorithms that are not fever's own.

    With `--scale-batch` every worker has as many environments, and with whole episodes one; another library's default
    is a number for each, too.
    """
    if find_provider(config.algo) is not None:
        return {"envs": config.envs, "same_batch": True}
    settings = validate(config_of(config.algo), config.settings, config.algo)
    on_policy, episodes = hasattr(settings, "batch_fixed_by"), getattr(settings, "timesteps_per_batch", None)
    each = config.scale_batch or episodes is not None
    return {"envs": None if each else config.envs or DEFAULT_ENVS, "same_batch": on_policy and not config.scale_batch}


def _announcement(plan: Plan, setting: Setting, folder: Path) -> str:
    """What will be done, where, and how long it takes."""
    about = format_duration(round(plan.duration))
    if plan.target is not None:
        runs = len(plan.counts) * plan.rounds
        about += f", at most {format_duration(runs * plan.longest)} until the target is reached"
    queued = "; waiting in the queue comes on top" if plan.elsewhere and plan.kind != HOSTS else ""
    counts = ", ".join(map(str, plan.counts[:-1]))
    what = f"{counts} and {counted(plan.kind, plan.counts[-1])}"
    more = [count for count in plan.counts if setting.cores is not None and count > setting.cores]
    shared = f"; {', '.join(map(str, more))} workers share {setting.cores:g} cores" if more else ""
    return f"{what}, {plan.rounds} x {plan.seconds:g} s each, takes about {about}{queued}{shared}: {folder}"


def _ahead(figures: Figures, predict: list[int] | None) -> list[int]:
    """The counts to predict: those asked for, or the next powers of two."""
    if predict is not None:
        return predict
    power = 1
    while power <= figures.counts[-1].count:
        power *= 2
    return [power * 2**place for place in range(AHEAD)]
