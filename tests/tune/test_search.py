"""Whole searches on Ray Tune: interrupted, resumed, failed, with early ends and copies."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fever.algos.registry import find_provider
from fever.config import RunConfig, Stop, validate
from fever.envs.source import EnvSource
from fever.errors import FeverError, TrainingError
from fever.runs.run import Run
from fever.sampling.ray_cluster import Cluster, Machine
from fever.training import trainer
from fever.tune import search
from fever.tune.records import Record
from fever.tune.space import parse
from fever.tune.study import first_point, may_resume, resolve
from fever.tune.table import LiveTable, PlainTable, SearchDisplay, closing_lines
from tests.environments import TimeLimitEnv
from tests.helpers import without_ray
from tests.tune.helpers import configure

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def searched(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A random search of four trials, with what it printed."""
    folder, stream = tmp_path_factory.mktemp("searched"), io.StringIO()
    summary = search(configure(folder, trials=4, name="first"), display=PlainTable(stream))
    return {"folder": folder, "printed": stream.getvalue(), **summary}


def rows_of(run: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / "trials.jsonl").read_text().splitlines()]


def test_random_search_leaves_a_complete_run_directory(searched: dict[str, Any]) -> None:
    run, rows = Run(Path(searched["run"])), rows_of(searched["run"])
    assert searched["stop_reason"] == "trials"
    assert (searched["trials"], searched["failed"], searched["stopped_early"]) == (4, 0, 0)
    assert sorted(row["number"] for row in rows) == [1, 2, 3, 4]
    assert {row["state"] for row in rows} == {"finished"}
    assert run.summary == {key: value for key, value in searched.items() if key not in ("folder", "printed")}
    assert run.config.search.trials == 4  # type: ignore[union-attr]
    assert (run.path / "search.png").stat().st_size > 10_000
    assert (run.path / "tune" / "tuner.pkl").is_file()
    assert not run.running
    for row in rows:
        trial = Run(run.path / "trials" / f"{row['number']:04d}")
        assert trial.summary["stop_reason"] == "steps"  # type: ignore[index]
        assert {key: trial.config.settings[key] for key in row["settings"]} == row["settings"]
        assert 1e-5 <= row["settings"]["learning_rate"] <= 1e-2
        assert trial.config.search is None
    best = max(rows, key=lambda row: row["score"])
    assert searched["best"] == {key: best[key] for key in ("score", "settings")} | {"trial": best["number"]}
    assert 0 < searched["cores_busy"] <= 1


def test_search_prints_a_line_per_trial_and_what_is_next(searched: dict[str, Any]) -> None:
    printed = searched["printed"]
    assert sum(line.startswith("trial ") and " finished: score " in line for line in printed.splitlines()) == 4
    assert printed.splitlines()[-1] == f"next: fever train -f {searched['best_file']}"
    assert "ray" not in printed.replace("starting Ray", ""), "what libraries say is in the log"


def test_best_settings_train(searched: dict[str, Any], tmp_path: Path) -> None:
    values = yaml.safe_load(Path(searched["best_file"]).read_text())
    assert not {"search", "name", "runs"} & set(values)
    config = validate(RunConfig, {**values, "runs": str(tmp_path), "stop": {"iterations": 1}}, "best.yaml")
    assert trainer.train(config).run.config.settings["hidden"] == searched["best"]["settings"]["hidden"]


def test_search_that_is_done_is_not_resumed(searched: dict[str, Any]) -> None:
    run = Run(Path(searched["run"]))
    with pytest.raises(FeverError, match="has run all its trials"):
        search(run.config, run=run, trust=True)


@pytest.mark.slow
def test_failed_trials_are_recorded_and_the_search_continues(
    ray: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    crash = {"marker": str(tmp_path / "crashed"), "at": 300}  # takes its process along, once
    space = {"learning_rate": "choice(1e-3,1e30,1e-4)"}
    config = configure(
        tmp_path, "tests.environments:CrashEnv", env_kwargs=crash, space=space, method="grid", parallel=1, name="some"
    )
    summary = search(config)
    rows = {row["number"]: row for row in rows_of(summary["run"])}
    assert [rows[number]["state"] for number in (1, 2, 3)] == ["failed", "failed", "finished"]
    assert rows[1]["error"] == "its process died"
    assert "the loss became NaN or infinite" in rows[2]["error"]
    assert (summary["failed"], summary["best"]["trial"]) == (2, 3)
    assert [without_ray(said) for said in capfd.readouterr()] == ["", ""], "only the display writes to the terminal"
    assert "the loss became NaN or infinite" in (tmp_path / "some" / "log.txt").read_text()


def test_search_of_which_every_trial_fails_says_why(ray: Any, tmp_path: Path) -> None:
    broken = {"fault": "nan_reward", "at": 3}
    config = configure(tmp_path, "tests.environments:BrokenEnv", env_kwargs=broken, trials=2, parallel=1, name="all")
    with pytest.raises(TrainingError, match=r"all 2 trials failed, most of them with: .*the reward is NaN"):
        search(config)
    assert Run(tmp_path / "all").status == "failed"


def test_asha_stops_bad_trials_early(ray: Any, tmp_path: Path) -> None:
    space = {"learning_rate": "choice(3e-3,1e-7,1e-8)"}
    config = configure(
        tmp_path, space=space, method="grid", scheduler="asha", parallel=1, stop={"steps": 8000}, name="asha"
    )
    summary = search(config)
    rows = {row["number"]: row for row in rows_of(summary["run"])}
    assert [rows[number]["state"] for number in (1, 2, 3)] == ["finished", "stopped early", "stopped early"]
    assert summary["stopped_early"] == 2
    assert rows[2]["steps"] < 4000
    early = Run(Path(summary["run"]) / "trials" / "0002")
    assert early.summary["stop_reason"] == "interrupted"  # type: ignore[index]
    assert early.checkpoints(), "it could be gone on with"


class Abreast(TimeLimitEnv):
    """Waits for the other one of two trials wherever that is behind, until one has gone on from a copy: so they are
    compared, and the copy is fetched before it has gone."""

    def __init__(self, workdir: Path, limit: int = 10) -> None:
        super().__init__(limit)
        self.run = workdir.parents[1]
        self.other = self.run.with_name({"0001": "0002"}.get(self.run.name, "0001"))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        deadline, own = time.monotonic() + 240, self._steps(self.run)
        copies = [run / "copied.json" for run in (self.run, self.other)]
        while own > self._steps(self.other) + 300 and time.monotonic() < deadline:
            if any(path.exists() for path in copies):
                break
            time.sleep(0.02)
        return super().reset(seed=seed, options=options)

    @staticmethod
    def _steps(run: Path) -> float:
        """That a run has learned from; it may be over, or not have begun, or about to go on from a copy."""
        try:
            if json.loads((run / "summary.json").read_text())["stop_reason"] != "interrupted":
                return float("inf")
        except (OSError, ValueError):
            pass
        try:
            return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["steps"]
        except (OSError, ValueError, LookupError):
            return 0


@pytest.mark.slow
def test_pbt_continues_from_copies_of_good_trials(ray: Any, tmp_path: Path) -> None:
    config = configure(
        tmp_path,
        "tests.tune.test_search:Abreast",
        space={"learning_rate": "loguniform(1e-6,1e-2)"},
        scheduler="pbt",
        trials=2,
        stop={"steps": 5000},
        name="pbt",
    )
    summary = search(config)
    rows = rows_of(summary["run"])
    assert {row["state"] for row in rows} == {"finished"}
    copied = [row for row in rows if row["copied"]]
    assert copied
    assert all(1e-6 <= row["settings"]["learning_rate"] <= 1e-2 for row in rows)
    run = Run(Path(summary["run"]) / "trials" / f"{copied[0]['number']:04d}")
    assert run.config.settings["learning_rate"] == copied[0]["settings"]["learning_rate"]
    iterations = [row["iteration"] for row in run.metrics()]
    assert iterations == list(range(1, len(iterations) + 1))
    assert not list((run.path.parents[1] / "tune").glob("*/checkpoint_*")), "copies go when all is done"


class Machines:
    """As much of a cluster as is needed to say what fits on it."""

    require_cores = Cluster.require_cores
    ray = SimpleNamespace(cluster_resources=dict)

    def __init__(self, *machines: Machine) -> None:
        self.found = list(machines)
        self.cores = sum(machine.cores for machine in machines)

    def machines(self) -> list[Machine]:
        return self.found

    def ask(self, question: Any) -> Any:
        return question()


TWO_CORES = Machines(Machine("node", "host", 2.0))


def make_study(tmp_path: Path, **fields: Any) -> SimpleNamespace:
    """As much of a study as is needed to say what a trial takes."""
    provider = find_provider(fields.get("algo", "ppo"))
    space = {"lr" if provider else "learning_rate": "loguniform(1e-5,1e-2)"}
    source = EnvSource("CartPole-v1")
    config = resolve(configure(tmp_path, **{"space": space, "settings": {}} | fields), source)
    assert config.search is not None
    bundles = provider.trial_bundles(first_point(config, parse(space)), source) if provider else None
    return SimpleNamespace(
        search=config.search,
        config=config,
        workers=config.workers,
        trials=config.search.trials,
        bundles=bundles,
        cores=1 + int(config.workers or 0),
    )


@pytest.mark.parametrize(
    ("fields", "cpus"),
    [
        ({}, [1]),
        ({"workers": 1}, [1.9]),  # of two cores: the rest is for the worker, which is not part of what Tune reserves
        ({"workers": 1, "algo": "rllib:PPO"}, [1, 1]),
        ({"algo": "rllib:IMPALA"}, [1, 1]),  # its learner
        ({"scheduler": "pbt", "trials": 8, "algo": "rllib:PPO"}, [0.25]),
        ({"scheduler": "pbt", "trials": 8}, [0.25]),  # all at once
        ({"scheduler": "pbt", "trials": 8, "parallel": 1}, [2]),
    ],
)
def test_trials_take_their_share_of_the_cores(tmp_path: Path, fields: dict[str, Any], cpus: list[float]) -> None:
    from fever.tune.tuner import trial_bundles

    bundles = trial_bundles(make_study(tmp_path, **fields), TWO_CORES)  # type: ignore[arg-type]
    assert [bundle["CPU"] for bundle in bundles] == cpus
    assert not any("GPU" in bundle for bundle in bundles)


def test_trial_that_would_wait_for_ever_is_refused(tmp_path: Path) -> None:
    from fever.tune.tuner import trial_bundles

    study = make_study(tmp_path, algo="rllib:IMPALA", workers=2)
    with pytest.raises(FeverError, match="one trial of rllib:IMPALA needs 4 cores for its processes, but there are 2"):
        trial_bundles(study, TWO_CORES)  # type: ignore[arg-type]


def test_process_that_no_machine_has_room_for_is_refused(tmp_path: Path) -> None:
    from fever.tune.tuner import trial_bundles

    study = make_study(tmp_path, algo="rllib:PPO", workers=1, settings={"num_cpus_per_env_runner": 3})
    cluster = Machines(Machine("one", "host-1", 2.0), Machine("two", "host-2", 2.0))
    sentence = (
        "one trial of rllib:PPO needs 3 cores for one process, but no machine has more than 2; lower num_cpus_per"
    )
    with pytest.raises(FeverError, match=sentence):
        trial_bundles(study, cluster)  # type: ignore[arg-type]


class Interrupting(SearchDisplay):
    """Presses Ctrl-C when one trial is over and the next one is under way."""

    pressed = False

    def update(self, records: list[Record]) -> None:
        states = {record.number: record for record in records}
        under_way = 2 in states and states[2].state == "running" and states[2].steps > 5000
        if under_way and not self.pressed:
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)


def test_interrupted_search_continues(ray: Any, tmp_path: Path) -> None:
    config = configure(tmp_path, method="optuna", trials=3, parallel=1, seeds=1, stop={"steps": 20000}, name="cut")
    handler = signal.getsignal(signal.SIGINT)
    summary = search(config, display=Interrupting())
    assert signal.getsignal(signal.SIGINT) is handler
    assert summary["stop_reason"] == "interrupted"
    assert [row["number"] for row in rows_of(summary["run"])] == [1]
    assert closing_lines(summary)[-1].startswith(f"next: fever resume {summary['run']} --trust")
    run = Run(Path(summary["run"]))
    before = Run(run.path / "trials" / "0002").checkpoint().iteration
    assert before > 1

    with pytest.raises(FeverError, match=r"/tune holds pickles, which can run any program .* add --trust"):
        search(run.config, run=run)
    again = search(run.config, run=run, trust=True)
    rows = rows_of(again["run"])
    assert [row["number"] for row in rows] == [1, 2, 3], "finished trials are not repeated"
    assert again["stop_reason"] == "trials"
    assert again["seconds"] > summary["seconds"]
    metrics = (run.path / "trials" / "0002" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert len(metrics) > before


def test_trials_with_pickles_are_not_continued_unless_trusted(tmp_path: Path) -> None:
    """Even without Ray Tune's state, with which the search starts anew, its trials would continue."""
    run = Run.create(
        configure(tmp_path, algo="rllib:PPO", settings={}, space={"lr": "uniform(0,1)"}, name="theirs"), {}
    )
    assert not may_resume(run, trust=False)
    (run.path / "trials" / "0001" / "checkpoints" / "000001" / "files").mkdir(parents=True)
    with pytest.raises(FeverError, match=r"/trials holds pickles, which can run any program .* --trust"):
        search(run.config, run=run)
    assert not may_resume(run, trust=True)


def test_a_search_that_was_killed_as_it_began_starts_anew(tmp_path: Path) -> None:
    """Ray Tune writes what the search is before it writes which trials there are."""
    run = Run.create(configure(tmp_path, space={"learning_rate": "uniform(0,1)"}, name="killed"), {})
    (run.path / "tune").mkdir()
    (run.path / "tune" / "tuner.pkl").write_bytes(b"the search")
    with pytest.raises(FeverError, match="holds pickles"):
        may_resume(run, trust=False)
    assert not may_resume(run, trust=True)
    (run.path / "tune" / "experiment_state-2026-11-19_05-32-37.json").write_text("{}")
    assert may_resume(run, trust=True)


def test_search_that_fails_leaves_what_there_is(ray: Any, tmp_path: Path, searched: dict[str, Any]) -> None:
    shutil.copytree(searched["run"], tmp_path / "broken")
    (tmp_path / "broken" / "summary.json").unlink()
    (tmp_path / "broken" / "best.yaml").unlink()
    (tmp_path / "broken" / "tune" / "tuner.pkl").write_bytes(b"nothing")
    run = Run(tmp_path / "broken")
    config = run.config.model_copy(update={"stop": Stop(steps=4000)})
    with pytest.raises(TrainingError, match=r"^Ray Tune failed: [^\n]*; more is in .*log.txt$"):
        search(config, run=run, trust=True)
    assert run.status == "failed"
    assert run.summary["trials"] == 4  # type: ignore[index]
    assert (run.path / "best.yaml").is_file()
    assert run.config.stop.steps == 4000, "what has changed is written"


def test_two_seeds_and_the_same_values_for_the_same_seed(ray: Any, searched: dict[str, Any], tmp_path: Path) -> None:
    config = configure(tmp_path, trials=2, seeds=2, stop={"iterations": 4}, name="seeds")
    summary = search(config)
    proposed = {row["number"]: row["settings"] for row in rows_of(searched["run"])}
    rows = {row["number"]: row for row in rows_of(summary["run"])}
    assert {number: row["settings"] for number, row in rows.items()} == {one: proposed[one] for one in (1, 2)}
    for number, row in rows.items():
        runs = [Run(Path(summary["run"]) / "trials" / f"{number:04d}{seed}") for seed in ("", "-seed-1")]
        assert [run.config.seed for run in runs] == [0, 1]
        assert row["steps"] == sum(run.metrics()[-1]["steps"] for run in runs)


def test_live_table_shows_the_best_first(tmp_path: Path) -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=30)
    table = LiveTable(console)
    table.start(configure(tmp_path), tmp_path, 3, 2)
    settings = {"learning_rate": 1e-3, "hidden": [32]}
    table.update([
        Record(1, settings, "finished", 11.0, 20.0, 3000), Record(2, settings, "finished", 33.0, 40.0, 3000),
        Record(3, settings, "failed", error="its process died"),
    ])  # fmt: skip
    table.stop()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3 of 3 trials done, 0 running, 1 failed, best score 33.0 (trial 2)" in text
    assert text.index("40.0") < text.index("20.0")
    assert "0.001" in text
    assert "[32]" in text
