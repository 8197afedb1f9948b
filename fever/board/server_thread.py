"""A server in a thread of its own: what the live page and Ray's page have in common."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from typing import Self

from fever.errors import FeverError

START_SECONDS = 10.0  # also for its end


class ServerThread(ABC):
    """Serves from `start` until `close`. A context manager."""

    def __init__(self, name: str, what: str) -> None:
        """`name`: of the thread; `what` is served, as an error message says it."""
        self.what = what
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.ended = asyncio.Event()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    async def _serve(self) -> None:
        """Set `ready` once requests are answered, and answer them until `ended` is set."""

    def start(self) -> None:
        """Raises `FeverError` if nothing is served."""
        self.thread.start()
        if not self.ready.wait(START_SECONDS) or self.failure is not None:
            raise FeverError(f"{self.what} could not be served: {self.failure or 'it did not start in time'}")

    def close(self) -> None:
        """End the server, also while pages are open."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.ended.set)
            self.thread.join(START_SECONDS)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as error:  # noqa: BLE001 - it is told where the server was started
            self.failure = error
            self.ready.set()
        finally:
            self.loop.close()
