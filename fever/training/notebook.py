"""Displays in a notebook: output of a cell that is redrawn in place."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 100  # characters
PAGE = '<pre style="line-height: 1.2; overflow-x: auto">{code}</pre>'


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookLive:
    """Has the methods of rich's `Live` that displays use. rich's own needs ipywidgets, and leaves nothing in the saved
    notebook; this one is an ordinary output, which stays as it was drawn last."""

    def __init__(self) -> None:
        self.handle: Any = None

    def start(self) -> None:
        """Nothing to do: the output begins with the first drawing."""

    def stop(self) -> None:
        """Leave the output as it is."""

    def update(self, renderable: RenderableType, refresh: bool) -> None:
        """Draw this in place of what was drawn before."""
        from IPython.display import display

        bundle = render(renderable)
        if self.handle is None:
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)


def render(renderable: RenderableType) -> dict[str, str]:
    """Something of rich's as HTML and as text, by MIME type."""
    from rich.console import Console

    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False, color_system="truecolor")
    console.print(renderable)
    html = console.export_html(inline_styles=True, code_format=PAGE, clear=False)
    return {"text/html": html, "text/plain": console.export_text()}
