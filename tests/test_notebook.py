"""fever in a real kernel: the tutorial, the display in a cell, the stop button."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from fever.runs.run import Run
from tests.helpers import ROOT, wait_for

TUTORIAL = ROOT / "examples" / "notebook.ipynb"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that kernels start in."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outputs(cell: Any) -> list[str]:
    """What a cell shows: the text of streams, and the kinds of data of displays and results."""
    return [
        one["text"] if one["output_type"] == "stream" else " ".join(sorted(one.get("data", {"error": 0})))
        for one in cell["outputs"]
    ]


def test_the_tutorial_runs(place: Path) -> None:
    notebook = nbformat.read(TUTORIAL, 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # committed without outputs
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(place)}}).execute()
    train, plot, evaluate, *_, refused, resumed, compared, listed = [
        outputs(cell) for cell in notebook.cells if cell["cell_type"] == "code"
    ]
    assert train[0] == "text/html text/plain"  # one panel, redrawn
    assert "".join(train[1:]).splitlines()[0].startswith("the step limit was reached: return")
    assert len("".join(train[1:]).splitlines()) == 3
    panel = notebook.cells[1]["outputs"][0]["data"]
    assert "100% of 20,000 steps" in panel["text/plain"]
    assert "<pre" in panel["text/html"]
    assert plot == ["image/png text/plain"]  # shown once
    assert evaluate == ["text/plain"]
    assert len(refused) == 1
    assert "__main__:<lambda> is known only to" in refused[0]
    assert resumed == ["text/plain"]
    assert compared == ["image/png text/plain"]
    assert (place / "compared.png").is_file()
    assert [line.split()[1] for line in "".join(listed).splitlines()] == ["steps"] * 3


@pytest.fixture
def kernel(place: Path) -> Iterator[tuple[Any, Any]]:
    manager, client = start_new_kernel(kernel_name="python3")
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_the_stop_button_saves(kernel: tuple[Any, Any], place: Path) -> None:
    manager, client = kernel
    client.execute("import fever; r = fever.train('CartPole-v1', stop={'time': '100s'}, runs='r', name='a')")
    wait_for(lambda: (place / "r/a/metrics.jsonl").is_file(), "row of metrics")
    time.sleep(0.2)
    manager.interrupt_kernel()
    assert client.get_shell_msg(timeout=60)["content"]["status"] == "ok"
    run = Run(place / "r/a")
    assert run.status == "interrupted"
    assert run.checkpoint().iteration == run.last_row()["iteration"]
    again = "r = fever.resume(r, stop={'iterations': r.summary['iterations'] + 1})"
    client.execute(again, user_expressions={"reason": "r.stop_reason"})
    content = client.get_shell_msg(timeout=60)["content"]
    assert content["status"] == "ok", content
    assert content["user_expressions"]["reason"]["data"]["text/plain"] == "'iterations'"
    client.execute("while True: pass")  # the kernel's own handler of interrupts is back
    time.sleep(0.5)
    manager.interrupt_kernel()
    assert client.get_shell_msg(timeout=60)["content"]["ename"] == "KeyboardInterrupt"
