"""The command `fever`, and `python -m fever`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def main() -> None:
    """Run a command. Signals while its modules are imported end the process at once: nothing has been made yet, and an
    exception in the middle of an import can leave a library half made."""
    signal.signal(signal.SIGINT, _leave)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
            signal.signal(number, _leave)
    _open_standard_files()
    from fever.cli.main import main as run

    run()


def _open_standard_files() -> None:
    """Open those of standard input, output and error that are closed (`>&-`), to nowhere. Otherwise files of a run
    would get their numbers, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _leave(number: int, frame: Any) -> None:
    os.write(2, b"fever: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
