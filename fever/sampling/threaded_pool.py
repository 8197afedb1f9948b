"""Worker processes that are kept busy by a thread, also while the learner computes."""

from __future__ import annotations

import logging
import threading
from typing import Any

from fever.sampling.ray_pool import RayPool


class ThreadedPool(RayPool):
    """A pool whose workers are kept busy by a thread of this process, also while the learner computes."""

    def __init__(self, *arguments: Any) -> None:
        """As `RayPool`."""
        super().__init__(*arguments)
        self.failure: BaseException | None = None  # what ended the thread
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._run, name="submit", daemon=True)

    def calls(self) -> list[Any]:
        """All calls that have not been received."""
        raise NotImplementedError

    def submit(self) -> None:
        """Submit calls to workers that have too few; runs in the thread."""
        raise NotImplementedError

    def receive(self, call: Any) -> None:
        """Handle the result of a call, or the death of its worker; runs in the thread."""
        raise NotImplementedError

    def look_meanwhile(self) -> None:
        """The thread looks after the processes, once it runs."""
        if not self.thread.is_alive() or threading.current_thread() is self.thread:
            self.look_after()

    def start_thread(self) -> None:
        """Start the thread, unless it runs."""
        if self.thread.ident is None:
            self.thread.start()

    def check(self) -> None:
        """Raise the error that ended the thread, in the learner."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self.closing.is_set():
                self.adjust_to_machines()
                self.submit()
                calls = self.calls()
                if not calls:
                    self.closing.wait(0.005)
                for call in self.finished(calls, timeout=0.1) if calls else ():
                    self.receive(call)
        except BaseException as error:
            logging.debug("the thread that submits calls ended", exc_info=True)
            self.failure = error

    def stop_thread(self) -> None:
        """Submit no more calls; those submitted go on."""
        self.closing.set()
        if self.thread.ident is not None:
            self.thread.join(timeout=5)

    def close(self) -> None:
        self.stop_thread()
        super().close()
