"""Experiment trackers: the real libraries, offline, and what happens if a tracker cannot be reached."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import fever
from fever.config import RunConfig
from fever.errors import FeverError
from fever.runs.run import Run
from fever.training.loggers import base
from fever.training.loggers.base import Ending, Logger, Row, group_of, name_of, redact
from fever.training.named import make_loggers
from tests.helpers import run_fever

SMALL = ("tests.environments:InfoEnv", "--envs", "2", "steps=16", "minibatch=32", "--runs", "runs", "-q")
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef" * 3,
    "MLFLOW_TRACKING_TOKEN": "do-not-show",
    "MLFLOW_DISABLE_TELEMETRY": "1",
}


def places(folder: Path) -> dict[str, str]:
    """Environment variables that keep both libraries in this folder, and offline."""
    own = {name: str(folder) for name in ("HOME", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")}
    return {
        **own,
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"{folder}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }


@pytest.mark.slow
def test_a_run_and_its_resumption_are_one_run_of_both_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for reading; quicker to make than a database
    variables = {**places(tmp_path), **SECRETS}
    words = ("train", *SMALL, "--name", "maze-seed-3", "--stop-iterations", "3", "--log", "wandb", "--log", "mlflow")
    done = run_fever(*words, cwd=tmp_path, **variables)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    run = Run(tmp_path / "runs/maze-seed-3")
    (run.path / "videos").mkdir()
    (run.path / "videos/00000003.gif").write_bytes(b"GIF89a")
    (run.path / "videos/.00000004.5d0a.gif").write_bytes(b"GIF89a")  # of a process that was killed
    done = run_fever(
        "resume", "maze-seed-3", "--runs", "runs", "--stop-iterations", "5", "-q", cwd=tmp_path, **variables
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    rows = run.metrics()
    assert len(rows) == 5
    _check_mlflow(run, rows, variables["MLFLOW_TRACKING_URI"])
    _check_wandb(run, rows, tmp_path / "wandb")
    texts = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert not any(secret.encode() in text for secret in list(SECRETS.values())[:2] for text in texts)
    assert not (run.path / "wandb").exists()


def _check_mlflow(run: Run, rows: list[dict[str, Any]], store: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        client = MlflowClient(store)
        identity = json.loads((run.path / "trackers/mlflow.json").read_text())["id"]
        found = client.get_run(identity)
        experiment = client.get_experiment_by_name("infoenv-ppo-maze")
        assert found.info.experiment_id == experiment.experiment_id
        assert (found.info.run_name, found.info.status) == ("maze-seed-3", "FINISHED")
        assert found.data.params["settings.steps"] == "16"
        for name in ("return_mean", "info/score", "iteration"):
            history = client.get_metric_history(identity, name)
            assert [(one.step, one.value) for one in history] == [(row["steps"], row[name]) for row in rows]
        kept = {path for folder in ("", "best", "videos") for path in _listed(client, identity, folder)}
    assert {"summary.json", "best/arrays.safetensors", "best/manifest.json", "videos/00000003.gif"} <= kept
    assert not any("00000004" in path for path in kept)


def _listed(client: Any, identity: str, folder: str) -> list[str]:
    return [one.path for one in client.list_artifacts(identity, folder)]


def _check_wandb(run: Run, rows: list[dict[str, Any]], folder: Path) -> None:
    identity = json.loads((run.path / "trackers/wandb.json").read_text())["id"]
    files = sorted(folder.glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(files) == 2, "the resumed run has the same id"
    records = [record for file in files for record in _records(file)]
    begun = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(one.run_id, one.run_group, one.display_name, one.project) for one in begun} == {
        (identity, "infoenv-ppo-maze", "maze-seed-3", "fever")
    }
    config = {item.key: json.loads(item.value_json) for item in begun[0].config.update}
    assert config["settings"]["steps"] == 16
    history = [
        {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json) for item in one.history.item}
        for one in records
        if one.WhichOneof("record_type") == "history"
    ]
    curve = [(row["steps"], row["return_mean"]) for row in history if "return_mean" in row]
    assert curve == [(row["steps"], row["return_mean"]) for row in rows]
    assert any("videos/00000003" in row for row in history)
    artifacts = [record.request.log_artifact.artifact for record in records if record.request.HasField("log_artifact")]
    artifacts += [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    assert {entry.path for one in artifacts for entry in one.manifest.contents} >= {"arrays.safetensors"}


def _records(file: Path) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from wandb.proto.wandb_internal_pb2 import Record
        from wandb.sdk.internal.datastore import DataStore

        store = DataStore()
        store.open_for_scan(str(file))
        found = []
        while (data := store.scan_data()) is not None:
            found.append(Record())
            found[-1].ParseFromString(data)
        return found


def test_nobody_is_logged_in(tmp_path: Path) -> None:
    variables = {**places(tmp_path), "WANDB_MODE": "online", "WANDB_API_KEY": ""}
    done = run_fever("train", *SMALL, "--log", "wandb", cwd=tmp_path, **variables)
    assert done.returncode == 2
    assert done.stderr == (
        "fever: --log wandb: nobody is logged in; run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline\n"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_library_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(f"fever.training.loggers.{name}.find_spec", lambda one: None if one == name else find(one))
    with pytest.raises(FeverError, match=rf'pip install "fever\[{name}\]"$'):
        make_loggers(RunConfig(env="CartPole-v1", loggers=(name,)))


class Fake(Logger):
    """A tracker in memory, which refuses the first `failures` calls."""

    tracker = "fake"

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.sent, self.ended = failures, [], []  # type: ignore[var-annotated]

    def begin(self, config: RunConfig, run: Run) -> None:
        pass

    def write(self, rows: list[Row]) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("cannot reach https://me:my-password@host/api with do-not-show")
        self.sent += rows

    def end(self, ending: Ending) -> None:
        self.ended.append(ending)


def train(folder: Path, logger: Logger) -> Any:
    settings = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 1}
    return fever.train(
        "tests.environments:InfoEnv", runs=folder, name="a", stop={"iterations": 4}, callbacks=[logger], **settings
    )


def test_an_unreachable_tracker_gets_the_rows_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "RETRY_SECONDS", 0.01)
    monkeypatch.setenv("FAKE_TOKEN", "do-not-show")
    logger = Fake(failures=1)
    run = train(tmp_path, logger).run
    assert [steps for steps, _ in logger.sent] == [row["steps"] for row in run.metrics()]
    assert logger.ended[0].summary["stop_reason"] == "iterations"
    assert logger.ended[0].best == run.checkpoint("best").path
    log = (run.path / "log.txt").read_text()
    assert "fake cannot be reached; training goes on: OSError: cannot reach https://***@host/api with ***" in log


def test_a_tracker_that_hangs_does_not_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Fake):
        def write(self, rows: list[Row]) -> None:
            released.wait(60)

    released = threading.Event()
    monkeypatch.setattr(base, "END_SECONDS", 0.1)
    monkeypatch.setattr(base, "UNREACHED_SECONDS", 0.1)
    began = time.monotonic()
    assert train(tmp_path, Hangs()).stop_reason == "iterations"
    assert time.monotonic() - began < 30
    released.set()


@pytest.mark.parametrize(
    ("name", "path", "group", "shown"),
    [
        (None, "runs/maze-ppo-20260101-000000", "maze-ppo", "maze-ppo-20260101-000000"),
        ("big_s12", "runs/big_s12", "maze-ppo-big", "big_s12"),
        ("seed-1", "runs/seed-1", "maze-ppo", "seed-1"),
        ("0007-seed-1", "runs/sweep/trials/0007-seed-1", "sweep", "sweep-0007-seed-1"),
    ],
)
def test_runs_of_several_seeds_are_a_group(name: str | None, path: str, group: str, shown: str) -> None:
    config, run = RunConfig(env="my_envs:Maze", name=name), Run(Path(path))
    assert (group_of(config, run), name_of(run)) == (group, shown)


def test_secrets_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter22")
    assert redact("http://a:b@c/d, hunter22, x@y") == "http://***@c/d, ***, x@y"
