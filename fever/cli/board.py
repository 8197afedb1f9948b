"""`fever board`: the live page of all runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Annotated, Any

import typer

from fever.cli.runs import Runs
from fever.errors import FeverError
from fever.files import user_path
from fever.text import say

commands = typer.Typer()
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY")  # variables that are set where a browser can be opened


@commands.command()
def board(
    runs: Runs = "runs",
    on: Annotated[
        str | None, typer.Option(metavar="FILE", help="Cluster whose runs are copied here while they train.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0: any free one.  \\[default: 8300 or a free one]")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that other machines reach asks for a token.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Show all runs in a folder on a live page, until Ctrl-C."""
    from fever.board.guard import token_path
    from fever.board.server import Board

    folder = user_path(runs)
    if folder.exists() and not folder.is_dir():
        raise FeverError(f"{runs} is not a folder")
    record = None if on is None else _record(on)
    with Board(folder, host, port) as served:
        say(f"{served.url}  shows {served.listing.folder}")
        if served.guard.token is not None:
            say(f"it asks for the token in {token_path()}; what it shows is not encrypted on its way")
        if browser and any(name in os.environ for name in SCREENS):
            threading.Thread(target=_open, args=(served.url,), daemon=True).start()
        elif browser and "SSH_CONNECTION" in os.environ:
            say(f"from your own machine: ssh -L {served.port}:127.0.0.1:{served.port} THIS-MACHINE, then that address")
        say("Ctrl-C ends it; runs are not changed")
        if record is None:
            _wait()
        else:
            from fever.launch.clusters.tunnel import copy_runs
            from fever.signals import signals_interrupt

            with signals_interrupt():
                copy_runs(record)


def _record(on: str) -> Any:
    """The cluster that is meant by `--on`."""
    from fever.launch.clusters.base import ClusterTarget
    from fever.launch.clusters.record import require_record
    from fever.launch.targets import load_target

    target = load_target(on, {})
    if not isinstance(target, ClusterTarget) or not target.starts_ray:
        raise FeverError(f"{on}: its runs are on a file system that this machine shares; use fever board --runs FOLDER")
    return require_record(target, on)


def _open(url: str) -> None:
    import webbrowser

    webbrowser.open(url)


def _wait() -> None:
    """Until Ctrl-C, SIGTERM or SIGHUP."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    while not ended.wait(1.0):
        pass
    sys.stdout.write("\n" if sys.stdout.isatty() else "")
