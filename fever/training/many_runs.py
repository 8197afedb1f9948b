"""What displays of many runs have in common: lines now and then, or a table that is redrawn in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TextIO

from fever.text import clean, say
from fever.training.display import make_live

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

REFRESH_SECONDS = 0.5  # of a table
LINE_SECONDS = 10.0  # between lines


class Lines:
    """Prints lines to a stream."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.began = self.printed = time.monotonic()

    def message(self, text: str) -> None:
        say(text, self.stream)

    def begin(self, text: str) -> None:
        """Print the first line; the time counts from here."""
        self.began = self.printed = time.monotonic()
        self.message(text)

    def now_and_then(self, line: Callable[[float], str]) -> None:
        """Print `line(seconds since the beginning)` if it is time to."""
        if time.monotonic() - self.printed >= LINE_SECONDS:
            self.printed = time.monotonic()
            self.message(line(self.printed - self.began))

    def print_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.message(line)


class LivePanel:
    """Draws a panel on a terminal again and again, below the messages."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = make_live(console)
        self.drawn = 0.0

    def message(self, text: str) -> None:
        self.console.print(clean(text), highlight=False, markup=False, style="dim")

    def begin(self) -> None:
        """Draw from now on; the time counts from here."""
        self.began = time.monotonic()
        self.live.start()

    def redraw(self, panel: Callable[[float], RenderableType]) -> None:
        """Draw `panel(seconds since the beginning)` if it is time to."""
        if time.monotonic() - self.drawn >= REFRESH_SECONDS:
            self.drawn = time.monotonic()
            self.live.update(panel(self.drawn - self.began), refresh=True)

    def stop(self) -> None:
        self.live.stop()

    def print_all(self, lines: Iterable[str]) -> None:
        """Print lines that a person may want to copy, whole."""
        for line in lines:
            self.console.print(clean(line), highlight=False, markup=False, soft_wrap=True)
