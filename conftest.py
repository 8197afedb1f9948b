"""Settings of pytest for all tests, those of the examples included."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Tests with one of these markers run in one process, one after the other. All other tests run in any process.
GROUPS = {
    "lab": "needs the lab's machines, or asserts what jobs leave in /tmp; runs beside no other such test",
    "ray": "starts Ray; runs beside no other such test",
}
FLAKY = "flaky_under_load(reason): may fail on a busy machine, for the reason given; `--retry-flaky` runs it once more"
COMPILED = "JAX_COMPILATION_CACHE_DIR"  # read by JAX
GROUPS_FOLDER = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the tests that failed last time once more, if all of them are marked flaky_under_load; fail otherwise"
    parser.addoption("--retry-flaky", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, share compiled programs between the processes of a run, and let Ctrl-C interrupt them.

    Short trainings spend most of their time compiling, hence the cache. A shell's background job, which this may be,
    ignores Ctrl-C, and under nohup the end of a terminal, and so would all processes that it starts. Keys and records
    are not kept in the home folder.
    """
    for name, meaning in GROUPS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.addinivalue_line("markers", FLAKY)
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # JAX may read what another process is just writing there
        os.environ[COMPILED] = os.path.join(os.environ[COMPILED], worker)
    elif COMPILED not in os.environ:
        os.environ[COMPILED] = tempfile.mkdtemp(prefix="fever-compiled-")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(COMPILED), ignore_errors=True))
    if "FEVER_HOME" not in os.environ:
        os.environ["FEVER_HOME"] = tempfile.mkdtemp(prefix="fever-home-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop("FEVER_HOME"), ignore_errors=True))
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)


class MarkerScheduling(LoadScopeScheduling):
    """Hands out single tests, but all tests of a group together; the largest group first.

    The scheduler knows tests by their names only, so every process writes the groups of its tests to a file (below).
    pytest-xdist's own `--dist loadgroup` changes names of tests instead, which has no effect since pytest 9.2.
    """

    def __init__(self, config: pytest.Config, log: Any, groups: Path) -> None:
        super().__init__(config, log)
        self.folder = groups
        self.groups: dict[str, str] = {}

    def schedule(self) -> None:
        for file in self.folder.glob("*.json"):  # of all processes: each has collected its tests by now
            self.groups.update(json.loads(file.read_text()))
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self.groups.get(nodeid, nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> MarkerScheduling:
    return MarkerScheduling(config, log, config.stash[GROUPS_FOLDER])


def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist, before it starts, where to write the groups of its tests."""
    config = node.config
    if GROUPS_FOLDER not in config.stash:
        config.stash[GROUPS_FOLDER] = Path(tempfile.mkdtemp(prefix="fever-groups-"))
        config.add_cleanup(lambda: shutil.rmtree(config.stash[GROUPS_FOLDER], ignore_errors=True))
    node.workerinput["groups"] = str(config.stash[GROUPS_FOLDER] / f"{node.workerinput['workerid']}.json")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if file := getattr(config, "workerinput", {}).get("groups"):
        marked = {item.nodeid: [name for name in GROUPS if item.get_closest_marker(name)] for item in items}
        Path(file).write_text(json.dumps({nodeid: names[0] for nodeid, names in marked.items() if names}))
    if config.getoption("retry_flaky"):
        items[:] = select_flaky(items, set(config.cache.get("cache/lastfailed", {})))


def select_flaky(items: list[pytest.Item], failed: set[str]) -> list[pytest.Item]:
    """The tests to run once more. Raises UsageError if a failed test has no such marker, or if no test has failed."""
    marks = {item: item.get_closest_marker("flaky_under_load") for item in items if item.nodeid in failed}
    reasons = {item: mark.args[0] for item, mark in marks.items() if mark}
    if others := failed - {item.nodeid for item in reasons}:
        raise pytest.UsageError(
            "not run again, since these are not marked flaky_under_load: " + ", ".join(sorted(others))
        )
    if not reasons:
        raise pytest.UsageError("nothing to run again: no test has failed")
    for item, reason in reasons.items():
        print(f"once more: {item.nodeid} ({reason})")
    return list(reasons)
