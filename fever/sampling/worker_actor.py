"""What runs in a worker process, and what such a process has printed."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, NamedTuple

from fever.envs.local_folder import LOCAL_FOLDERS
from fever.envs.watchdog import WATCHDOG
from fever.sampling.cores import bind_to_cores, core_list
from fever.sampling.stopped import identity
from fever.signals import ignore_job_signals
from fever.text import say

OUTPUT_BYTES = 10_000  # of a worker's output that one call returns at most, of each file
FILE_BYTES = 8 << 20  # of such a file, which begins anew when it is longer: environments may print for days


class Output(NamedTuple):
    """What a worker process wrote to its standard output and error since the last time."""

    text: str
    positions: dict[str, int]  # file -> bytes read so far

    @classmethod
    def read(cls, positions: dict[str, int]) -> Output:
        """Read what was added to these files, of each the last `OUTPUT_BYTES`; files that are not here are skipped."""
        texts, sizes = [], dict(positions)
        for path, position in positions.items():
            with suppress(OSError):
                if (size := os.stat(path).st_size) == position:
                    continue
                position = 0 if size < position else position  # it began anew
                with open(path, "rb") as file:
                    file.seek(max(position, size - OUTPUT_BYTES))
                    text = file.read(OUTPUT_BYTES).decode(errors="replace")
                skipped = max(0, size - OUTPUT_BYTES - position)
                texts.append(f"({skipped} bytes are left out)\n{text}" if skipped else text)
                sizes[path] = size
        return cls("".join(text if text.endswith("\n") else f"{text}\n" for text in texts), sizes)

    def shortened(self) -> Output:
        """The same, and files of this process that have become long are empty. They are open to append."""
        positions = dict(self.positions)
        for path, position in self.positions.items():
            with suppress(OSError):
                if position >= FILE_BYTES:
                    os.truncate(path, 0)
                    positions[path] = 0
        return Output(self.text, positions)

    @classmethod
    def start(cls) -> Output:
        """Nothing yet, of this process. Ray sends standard output and error of a worker to two files."""
        paths = [os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2)]
        return cls("", {path: os.stat(path).st_size for path in paths if os.path.isfile(path)})


class WorkerActor:
    """What runs in a worker process. Made a Ray actor where it is started, so that this module need not import Ray."""

    def __init__(self, search_path: list[str], packed: bytes, cpus: int | None = None) -> None:
        """`packed` is a pickle of the runner's class and arguments, which may need modules on the search path. `cpus`:
        how many cores of its own this process gets."""
        sys.path.extend(path for path in search_path if path not in sys.path)
        ignore_job_signals()
        self.packed = packed
        self.runner: Any = None
        WATCHDOG.ends_process = True  # the pool replaces it
        self.output = Output.start()
        if cpus is not None:
            cores = bind_to_cores(cpus)
            say(f"bound to cores {core_list(cores)}" if cores else f"not bound: {cpus} cores together are not free")

    def build(self) -> Output:
        """Make the environments; not in the constructor, so that an error arrives as itself."""
        if self.runner is None:
            import ray.cloudpickle

            make_runner, arguments = ray.cloudpickle.loads(self.packed)
            self.runner = make_runner(*arguments)
        return self._new_output()

    def call(self, method: str, *arguments: Any) -> tuple[Any, Output]:
        """Call a method of the runner; returns what it returned, and what the process wrote since the last call."""
        self.build()
        value = getattr(self.runner, method)(*arguments)
        return value, self._new_output()

    def change_env(self, kwargs: dict[str, Any]) -> None:
        """Make environments anew with these arguments when their episodes end."""
        self.build()
        self.runner.change_env(kwargs)

    def _new_output(self) -> Output:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # an environment may have closed or replaced it
                stream.flush()
        self.output = Output.read(self.output.positions).shortened()
        return self.output

    def identity(self) -> tuple[str, int]:
        return identity()

    def facts(self) -> dict[str, Any]:
        """Process id, modules, memory and placement of this process, for tests and benchmarks."""
        import resource

        import ray

        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        context = ray.get_runtime_context()
        place = {"node": context.get_node_id(), "resources": context.get_assigned_resources()}
        return {"pid": os.getpid(), "modules": sorted(sys.modules), "megabytes": kilobytes / 1024, **place}

    def close(self) -> Output:
        """Close the environments."""
        try:
            if self.runner is not None:
                self.runner.close()
        finally:
            LOCAL_FOLDERS.remove()
        return self._new_output()


def output_since(process: int, positions: dict[str, int]) -> str:
    """What was added to these files of output, on the machine on which this is called."""
    return Output.read(positions).text
