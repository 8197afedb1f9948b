"""Another thread saves the run in the place of the main thread, which may go on meanwhile, and ends the process."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fever import last_resort
from fever.runs.run import Run
from fever.training import emergency
from fever.training.emergency import Emergency
from tests.experiments.made import make_run


def trainer_that_counts_while_it_is_saved(run: Run) -> Any:
    """Its main thread counts iteration 2 just when the checkpoint is written."""
    progress = SimpleNamespace(begin=0.0, iteration=1, counters=lambda steps: {"iteration": 2, "steps": steps})

    def write_checkpoint(_: Run) -> Path:
        progress.iteration = 2
        return run.path

    return SimpleNamespace(
        progress=progress, consistent=True, closing=False, all_saved=False, logged=True,
        info=SimpleNamespace(metrics={"iteration": 1, "steps": 100}), write_checkpoint=write_checkpoint,
        learner=SimpleNamespace(steps=200, state=lambda: SimpleNamespace(facts={})), pool=None,
    )  # fmt: skip


@pytest.mark.parametrize("assigned", [False, True])
def test_the_iteration_that_is_saved_has_a_row(tmp_path: Path, assigned: bool) -> None:
    run = make_run(tmp_path, "a", [1.0])
    trainer = trainer_that_counts_while_it_is_saved(run)
    if assigned:
        trainer.info.metrics, trainer.logged = {"iteration": 2, "steps": 200, "return_mean": 5.0}, False
    Emergency(trainer, run)._save(at_once=True)
    run.close()
    assert [row["iteration"] for row in run.metrics()] == [1, 2]
    assert ("return_mean" in run.last_row()) is assigned


def test_whatever_blocks_at_the_end_the_process_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks, the output and the end of Ray: ten seconds after Ctrl-C are over before each of them has had some."""
    summary: dict[str, Any] = {}
    block = threading.Event()
    trainer: Any = SimpleNamespace(
        saving=threading.Lock(), replay=SimpleNamespace(busy=False), prepared=SimpleNamespace(uninterruptible=False),
        progress=SimpleNamespace(begin=0.0, iteration=0), interrupts=SimpleNamespace(reason="interrupted"),
        callbacks=SimpleNamespace(busy_since=None, stop=lambda leave_out: block.wait(60)), display=None,
        failure=None, reason="", closing=False, write_summary=lambda run, reason: summary,
    )  # fmt: skip
    disk = SimpleNamespace(require_saved=lambda: None)
    run: Any = SimpleNamespace(saved=True, close=lambda: None, disk=disk)
    codes: list[int] = []
    monkeypatch.setattr(emergency, "closing_lines", lambda summary: ["the end"])
    monkeypatch.setattr(emergency, "kill_private_ray", lambda: block.wait(60))
    monkeypatch.setattr(emergency, "LAST_SECONDS", 2.0)
    monkeypatch.setattr(emergency, "KILL_SECONDS", 0.1)
    monkeypatch.setattr(last_resort, "IN_FORCE", SimpleNamespace(heard=True, report=lambda summary: block.wait(60)))
    monkeypatch.setattr("os._exit", codes.append)
    began = time.monotonic()
    emergency.Emergency(trainer, run)(at_once=False)
    block.set()
    assert codes == [130]
    assert time.monotonic() - began < 2 * 2.0
