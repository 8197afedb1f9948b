"""How Ray is started in this process: what Ray must not do meanwhile, and what is noticed.

Ray has no options for these things, so its functions are replaced while it starts.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fever.errors import RayLost, TrainingError
from fever.scratch import Scratch
from fever.signals import uninterruptible


class PrivateRay:
    """What this process has of a Ray of its own, from the first moment of its start on: a start may be cut."""

    folder: Scratch | None = None
    nodes: tuple[Any, ...] = ()  # Ray's objects that started the processes
    cluster: Any = None  # the `Cluster`, until it is left
    killed = False  # because this process ends: nothing must be started any more


PRIVATE = PrivateRay()


def processes_of(node: Any) -> dict[str, Any]:
    """Raylet and GCS among the processes that a node of Ray's has started; None for no node."""
    started = {} if node is None else node.all_processes
    names = {"raylet": "raylet", "gcs_server": "GCS"}
    return {name: started[kind][0].process for kind, name in names.items() if kind in started}


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


@contextmanager
def lean() -> Iterator[None]:
    """Start neither the autoscaler's monitor, which has no machines to ask for, nor the dashboard's server, which Ray
    starts for its statistics of use even without a dashboard. A start waits for both, and they are Python processes."""
    from ray._private.node import Node

    monitor, server = Node.start_monitor, Node.start_api_server
    Node.start_monitor = lambda self: None  # type: ignore[method-assign]
    Node.start_api_server = lambda self, **options: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Node.start_monitor, Node.start_api_server = monitor, server  # type: ignore[method-assign]


@contextmanager
def own_signals() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which ray.init replaces by an immediate exit, and defer signals: a start
    that was cut would leave processes behind."""
    from ray._private import utils

    replace, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    kept = signal.getsignal(signal.SIGTERM)
    try:
        with uninterruptible():
            yield
    finally:
        utils.set_sigterm_handler = replace
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, kept)  # Ray's C++ part has one of its own


@contextmanager
def deaths_noticed() -> Iterator[None]:
    """Raise RayLost if a part of Ray dies while it starts: ray.init waits 30 s for a raylet, also for a dead one."""
    from ray._private import node, services

    PRIVATE.nodes = ()
    start, look = node.Node.start_ray_processes, services.get_node

    def start_and_note(started: Any) -> None:
        PRIVATE.nodes = (*PRIVATE.nodes, started)
        start(started)

    def look_or_fail(*arguments: Any, **options: Any) -> Any:
        try:
            return look(*arguments, **options)
        except RuntimeError:
            for name, process in (own for one in PRIVATE.nodes for own in processes_of(one).items()):
                if process.poll() is not None:
                    raise RayLost(f"its {name} died ({ending(process.returncode)})") from None
            raise

    node.Node.start_ray_processes, services.get_node = start_and_note, look_or_fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        node.Node.start_ray_processes, services.get_node = start, look  # type: ignore[method-assign]


@contextmanager
def start_errors() -> Iterator[None]:
    """Whatever Ray raises while it starts becomes one sentence; the traceback goes to the log."""
    try:
        yield
    except Exception as error:
        logging.exception("Ray did not start")
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise TrainingError(f"Ray did not start: {reason.strip()}; is the machine busy, or short of memory?") from error


def log_events() -> None:
    """Send to the log what Ray's processes tell the driver, of dead workers for example. Ray prints it, whatever its
    own settings of logging are."""
    from ray._private import worker

    def log(data: dict[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            logging.getLogger("ray.events").info("%s", line)

    worker.print_to_stdstream = log
