"""Finds worker processes that are stopped (SIGSTOP, a debugger, a container that is paused): they never answer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fever.sampling.ray_cluster import Cluster
from fever.system import STOPPED, process_state

LOOKS = 2  # in a row at which a process is stopped before it counts as such: Ctrl-Z and fg may be between two


class StoppedProcesses:
    """Looks at the processes of actors, on whichever machine they are, without waiting for anything."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.identities: dict[Any, Any] = {}  # name -> the call that returns the actor's machine and process id
        self.asked: dict[tuple[Any, str], Any] = {}  # name and function -> the call of it on another machine
        self.seen: Counter[Any] = Counter()  # name -> looks in a row at which the process was stopped

    def follow(self, name: Any, actor: Any) -> None:
        """Look at this new actor's process from now on when asked for `name`."""
        self.identities[name] = actor.identity.remote()
        self.asked = {key: call for key, call in self.asked.items() if key[0] != name}
        self.seen[name] = 0

    def look(self, name: Any) -> bool:
        """Whether the process is stopped, now and at the looks before."""
        state = self.ask(name, process_state)
        if state is not None:
            self.seen[name] = self.seen[name] + 1 if state == STOPPED else 0
        return self.seen[name] >= LOOKS

    def ask(self, name: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function(process id, *arguments)` returns on the machine of this actor; None: not known, or not yet.
        On another machine it is a task of Ray's, whose answer a later call with the same function gets."""
        identity = self._answer(self.identities.get(name))
        if identity is None:
            return None
        node, process = identity
        if node == self.cluster.here:
            return function(process, *arguments)
        key = name, function.__name__
        if key in self.asked:
            call = self.asked[key]
            if not self._ended(call):
                return None
            del self.asked[key]
            return self._answer(call)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, False)}
        self.asked[key] = self.cluster.ray.remote(function).options(**options).remote(process, *arguments)
        return None

    def _ended(self, call: Any) -> bool:
        return bool(self.cluster.ray.wait([call], timeout=0)[0])

    def _answer(self, call: Any) -> Any:
        """What a call returned; None if it has not ended, or its process has died."""
        if call is None or not self._ended(call):
            return None
        with suppress(self.cluster.ray.exceptions.RayError):
            return self.cluster.ray.get(call, timeout=1)
        return None


def identity() -> tuple[str, int]:
    """The machine, by Ray's name, and the process id of an actor."""
    import ray

    return ray.get_runtime_context().get_node_id(), os.getpid()
