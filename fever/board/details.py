"""Everything about one run but its curves: settings, facts, checkpoints, videos, evaluations, workers, log."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from fever import layout
from fever.board.listing import RUNNING, Listing, Row, spelled
from fever.board.values import number, numbers, plain, text
from fever.config import RunConfig, Stop
from fever.errors import FeverError
from fever.files import open_regular, read_json, refuse_link
from fever.runs.checkpoint import best_of
from fever.runs.run import Run, column
from fever.scaling.report import PICTURE, REPORT
from fever.text import INFO_PREFIX, clean
from fever.tune.records import read as read_records

PICTURES = (layout.CURVES, layout.COMPARED, layout.SEEDS, layout.PICTURE, f"{PICTURE}.png")
KINDS = {".mp4": "video/mp4", ".gif": "image/gif", ".png": "image/png"}  # of files that the page shows
MEANINGS = Path(__file__).with_name("metrics.json")  # the tables of docs/metrics.md, which is not installed
SETTINGS = Path(__file__).with_name("settings.json")  # `defaults_of` all algorithms: to import them takes a second
LEFT_OUT = ("settings", "stop", "name", "runs", "search")  # fields of a configuration that are shown elsewhere
SILENT_SECONDS = 20.0  # without a report, after which a worker counts as silent
LOG_BYTES = 1 << 20  # of a log, at most
MOST_SEARCHED = 50  # settings of a search that are listed
MOST_FILES = 500  # videos of a run that are listed
SAMPLED = 200  # rows in which names of metrics are looked for


def describe(listing: Listing, name: str) -> dict[str, Any]:
    """What the page shows of a run, a search or a report on scaling."""
    entry, found = listing.entry(name), listing.run(name)
    row = entry.row
    if entry.kind == "scaling":
        return {**_empty(row, found), **_report(found)}
    try:
        config = found.config
    except FeverError:  # damaged, as the row says: the log may be whole
        return _empty(row, found)
    columns = [key for one in found.metrics(SAMPLED) for key, value in one.items() if number(value) is not None]
    metrics, meanings = list(dict.fromkeys(columns)), _known(MEANINGS)
    known = list(listing.entries.items())  # another thread may look at the folder
    return {
        **_empty(row, found),
        "metrics": metrics,
        "units": {name: meanings[name] for name in metrics if name in meanings},
        "config": _settings(config),
        "facts": _facts(found),
        "summary": plain(found.summary),
        "checkpoints": _checkpoints(found),
        "videos": _videos(found),
        "evaluations": _evaluations(found),
        "info_names": _info_names(found, metrics),
        "trials": [key for key, one in known if one.parent == name],
        "siblings": [key for key, one in known if _same_experiment(one.row, row)],
        "best_settings": _best_settings(found),
        "searched": _searched(found) if entry.kind == "search" else None,
    }


def _same_experiment(row: Row, other: Row) -> bool:
    same = row["experiment"] is not None and row["experiment"] == other["experiment"]
    return same and row["parent"] == other["parent"]


def _empty(row: Row, run: Run) -> dict[str, Any]:
    return {
        "row": row, "path": text(str(run.path)), "metrics": [], "units": {}, "config": [], "facts": [],
        "summary": None, "checkpoints": [], "videos": [], "pictures": list(_pictures(run)),
        "evaluations": _no_evaluations(), "info_names": [], "trials": [], "siblings": [], "best_settings": None,
        "searched": None, "report": None,
    }  # fmt: skip


def _settings(config: RunConfig) -> list[dict[str, Any]]:
    """Every setting with its default, where that is known without importing code that a run names."""
    own = {name: value for name, value in config if name not in LEFT_OUT}
    algorithm = _known(SETTINGS).get(config.algo, {})
    return [
        *_compared("run", own, defaults_of(RunConfig)),
        *_compared("stop", dict(config.stop), defaults_of(Stop)),
        *_compared("settings", config.settings, algorithm),
    ]


def _compared(group: str, values: dict[str, Any], known: dict[str, Any]) -> list[dict[str, Any]]:
    nothing = {"default": None, "meaning": ""}
    rows = []
    for name, value in values.items():
        written, told = _written(value), known.get(name, nothing)
        changed = told["default"] not in (None, written)
        rows.append({"group": group, "name": text(name, 200), "value": written, "changed": changed, **told})
    return rows


def defaults_of(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """Field -> its default as text, None if it has none, and its meaning."""
    return {
        name: {"default": None if field.is_required() else _written(field.default), "meaning": field.description or ""}
        for name, field in model.model_fields.items()
    }


@lru_cache
def _known(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _written(value: Any) -> str:
    """A value as it is shown: lists and tuples are the same."""
    with suppress(TypeError, ValueError):
        return text(value if isinstance(value, str) else json.dumps(value))
    return text(str(value))


def _facts(run: Run) -> list[list[str]]:
    with suppress(FeverError):
        facts = run.facts
        command = facts.get("command")
        words = [str(word) for word in command] if isinstance(command, list) else []
        git = facts.get("git")
        commit = f"{git.get('commit')}{', changed' if git.get('changed') else ''}" if isinstance(git, dict) else "-"
        packages = facts.get("packages")
        listed = [f"{name} {version}" for name, version in packages.items()] if isinstance(packages, dict) else []
        rows = [
            ["command", shlex.join(["fever", *words[1:]]) if words else "-"], ["started", facts.get("time", "-")],
            ["fever", facts.get("fever", "-")], ["git", commit], ["python", facts.get("python", "-")],
            ["packages", ", ".join(listed) or "-"], ["cores", facts.get("cores", "-")],
            ["system", facts.get("system", "-")],
        ]  # fmt: skip
        return [[key, text(value)] for key, value in rows]
    return []


def _checkpoints(run: Run) -> list[dict[str, Any]]:
    found, rows = run.checkpoints(), []
    best = best_of(found)
    for one in found:
        with suppress(FileNotFoundError):  # the training has removed it meanwhile
            rows.append({
                "iteration": one.iteration, "steps": number(one.manifest.get("steps")), "score": number(one.score),
                "score_of": text(one.manifest.get("score_of", ""), 50),
                "best": best is not None and one.path == best.path, "last": one is found[-1],
                "bytes": _size(one.path), "written": one.path.stat().st_mtime,
            })  # fmt: skip
    return rows


def _size(folder: Path) -> int:
    with suppress(OSError), os.scandir(folder) as found:
        return sum(one.stat(follow_symlinks=False).st_size for one in found)
    return 0


def _videos(run: Run) -> list[dict[str, Any]]:
    """Videos, the newest first."""
    rows: list[dict[str, Any]] = []
    for path, found in _files(run.path / layout.VIDEOS, (".mp4", ".gif")):
        steps = re.fullmatch(re.escape(layout.TRAINING_VIDEO) + r"(\d{1,18})", path.stem)
        rows.append({
            "name": f"{layout.VIDEOS}/{path.name}", "type": KINDS[path.suffix], "bytes": found.st_size,
            "written": found.st_mtime, "steps": int(steps[1]) if steps else None,
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["written"])[:MOST_FILES]


def _pictures(run: Run) -> Iterable[dict[str, Any]]:
    found = {path.name: one for path, one in _files(run.path, (".png",))}
    return ({"name": name, "written": found[name].st_mtime} for name in PICTURES if name in found)


def _files(folder: Path, endings: tuple[str, ...]) -> Iterable[tuple[Path, os.stat_result]]:
    """Regular files in a folder; links, hidden ones and those whose names are no text are left out."""
    with suppress(OSError), os.scandir(folder) as entries:
        for one in entries:
            path = Path(one.path)
            found = one.stat(follow_symlinks=False)
            named = not path.name.startswith(".") and spelled(path.name) == path.name
            if named and path.suffix in endings and stat.S_ISREG(found.st_mode):
                yield path, found


def served_file(run: Run, name: str) -> tuple[Path, str]:
    """The path and type of a video or picture that is listed. Raises `FeverError` for any other name."""
    known = [one["name"] for one in (*_videos(run), *_pictures(run))]
    if name not in known:
        raise FeverError("there is no such file here")
    return run.path / name, KINDS[Path(name).suffix]


def _no_evaluations() -> dict[str, Any]:
    return {name: [] for name in ("iteration", "steps", "seconds", "episodes", "mean", "low", "high")}


def _evaluations(run: Run) -> dict[str, Any]:
    rows = run.evaluations({"steps", "return_mean", "return_interval"}.__contains__)
    if not rows:
        return _no_evaluations()
    pairs = [row.get("return_interval") for row in rows]
    known = [dict(zip(("low", "high"), pair, strict=False)) if isinstance(pair, list) else {} for pair in pairs]
    steps, curves = column(rows, "steps"), run.curves(1000, {"steps", "seconds", "episodes"}.__contains__)
    times: dict[str, Any] = {}
    for name in ("seconds", "episodes"):  # rows of evaluations do not have them
        there = {"steps", name} <= curves.keys()
        times[name] = numbers(np.interp(steps, curves["steps"], curves[name])) if there else [None] * len(rows)
    return {
        "iteration": numbers(column(rows, "iteration")), "steps": numbers(steps), **times,
        "mean": numbers(column(rows, "return_mean")), "low": numbers(column(known, "low")),
        "high": numbers(column(known, "high")),
    }  # fmt: skip


def _info_names(run: Run, metrics: list[str]) -> list[str]:
    """Scalars that environments reported, those first that are metrics."""
    names = [name.removeprefix(INFO_PREFIX) for name in metrics if name.startswith(INFO_PREFIX)]
    for row in run.episodes(SAMPLED, {"info"}.__contains__):
        info = row.get("info")
        names += [text(str(name), 200) for name in info] if isinstance(info, dict) else []
    return list(dict.fromkeys(names))[:100]


def _best_settings(run: Run) -> str | None:
    path = run.path / layout.BEST
    with suppress(OSError), open_regular(path) as file:
        return text(file.read(1 << 16).decode(errors="replace"), 1 << 16)
    return None


def _searched(run: Run) -> dict[str, Any]:
    """What a search tried: names of settings, and by the number of each trial that ended its score and their values."""
    records = [one for one in read_records(run.path / layout.TRIALS_TABLE).values() if isinstance(one.settings, dict)]
    names = list(dict.fromkeys(name for one in records for name in one.settings))[:MOST_SEARCHED]
    trials = {
        text(str(one.number), 20): {"score": number(one.score), "values": [_short(one.settings.get(n)) for n in names]}
        for one in records
    }
    return {"names": [text(name, 200) for name in names], "trials": trials}


def _short(value: Any) -> float | str:
    """A number, which the page rounds, or anything else as text."""
    return _written(value) if (found := number(value)) is None else found


def _report(run: Run) -> dict[str, Any]:
    """What `fever scale` found."""
    trials = [path.name for path in run.path.iterdir() if (path / layout.CONFIG).is_file()]
    refuse_link(run.path / REPORT)  # it is not among what a training makes
    report = plain(read_json(run.path / REPORT))
    return {"report": report, "trials": [spelled(f"{run.path.name}/{name}") for name in sorted(trials)]}


def workers(run: Run, state: str) -> dict[str, Any]:
    """The workers as of the last look of the trainer, and what became of them."""
    path = run.path / layout.WORKERS
    if not path.is_file():
        return {"written": None, "workers": [], "hosts": {}}
    table = read_json(path)
    written = number(table.get("written")) or 0.0
    later = max(0.0, time.time() - path.stat().st_mtime) if state == RUNNING else 0.0
    found = table.get("workers")
    known = found if isinstance(found, list) else []
    rows = [_worker(row, written, later, state) for row in known if isinstance(row, dict)]
    hosts: dict[str, dict[str, float]] = {}
    for row in rows:
        host = hosts.setdefault(row["host"], {"workers": 0, "steps_per_second": 0.0})
        host["workers"] += 1
        host["steps_per_second"] += row["steps_per_second"] or 0.0
    return {"written": written, "workers": rows, "hosts": hosts}


def _worker(row: dict[str, Any], written: float, later: float, state: str) -> dict[str, Any]:
    heard = number(row.get("heard"))
    age = max(0.0, written - heard) + later if heard is not None else None
    silent = age is None or age > SILENT_SECONDS
    fields = ("worker", "steps", "episodes", "steps_per_second", "restarts", "time_env", "time_inference")
    return {
        **{name: number(row.get(name)) for name in fields}, "host": text(row.get("host", ""), 200),
        "weights_age": number(row.get("weights_behind")), "age": age,
        "state": "ended" if state != RUNNING else "silent" if silent else "alive",
    }  # fmt: skip


def log(run: Run, most: int) -> dict[str, Any]:
    """The last bytes of a run's log."""
    with suppress(FileNotFoundError), open_regular(run.path / layout.LOG) as file:
        size = file.seek(0, os.SEEK_END)
        most = min(max(most, 1), LOG_BYTES)
        file.seek(max(0, size - most))
        content = file.read(most).decode(errors="replace")
        whole = content.partition("\n")[2] if size > most else content  # the first line is cut
        return {"text": clean(whole), "cut": size > most}
    return {"text": "", "cut": False}
