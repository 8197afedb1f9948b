"""The fever on a login node: answers the requests of a `LoginLink` until the connection closes.

The scheduler's own class does the work, as if its commands were typed there. Besides the files' requests
(`runs/mirror.py`) there are

    submit  {"folder": the run directory, "config", "site", "on", "flags", "dry_run"} is answered by {"id": the job's
            number, "said": [line]}, or for a dry run by {"script"}
    state   {"folder", "fresh"} is answered by {"state", "reason", "code", "id"}
    stop    {"folder", "now"} is answered by {"said"}
    tidy    as in `on_host/login.py`
"""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from fever import layout
from fever.config import RunConfig, validate
from fever.errors import FeverError
from fever.job import RUN
from fever.launch import jobs
from fever.launch.dispatch import Order
from fever.launch.jobs import Job, JobWatch
from fever.launch.on_host.login import tidy
from fever.launch.targets import restore_target
from fever.runs import mirror

Answer = dict[str, Any]


class Session:
    """The jobs that one connection asks for."""

    def __init__(self) -> None:
        self.watches: dict[str, JobWatch] = {}

    def submit(self, request: Answer) -> Answer:
        """Check and submit, as `fever train --on SITE --detach` does here."""
        run, printed, said = Path(request["folder"]), io.StringIO(), io.StringIO()
        config = validate(RunConfig, request["config"], RUN)
        again = run if (run / layout.CONFIG).is_file() else None
        order = Order(config, request["on"], again, request["flags"], request["dry_run"], detach=True)
        with redirect_stdout(printed), redirect_stderr(said):
            restore_target(request["site"]).run(order)
        if request["dry_run"]:
            return {"script": printed.getvalue()}
        lines = [line for line in said.getvalue().splitlines() if not line.startswith("submitted ")]
        return {"id": job_in(run).facts["id"], "said": lines}

    def state(self, request: Answer) -> Answer:
        run = Path(request["folder"])
        watch = self.watches.setdefault(str(run), job_in(run).watch())
        state, reason = watch.job.state() if request["fresh"] else watch.look()
        return {"state": state, "reason": reason, "code": watch.job.code, "id": watch.job.facts["id"]}

    def stop(self, request: Answer) -> Answer:
        return {"said": jobs.stop(job_in(Path(request["folder"])), request["now"])}


def job_in(run: Path) -> Job:
    """The job of a run directory, by the name that the scheduler's class gives it."""
    facts = Job("", run).facts
    return Job(f"{facts['kind']}-{facts['id']}", run)


def attempt(function: Callable[[Answer], Answer]) -> Callable[[Answer], Answer]:
    """A function whose errors are answers: the connection remains usable."""

    def call(request: Answer) -> Answer:
        try:
            return function(request)
        except FeverError as error:
            return {"error": str(error)}
        except Exception:  # noqa: BLE001 - told where the request was made
            return {"error": traceback.format_exc()}

    return call


def main() -> None:
    """Take the connection away from everything that might read or print, and answer."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    session = Session()
    verbs = {"submit": session.submit, "state": session.state, "stop": session.stop, "tidy": tidy}
    mirror.write_line(answers, {"entered": True})
    answers.flush()
    mirror.serve(requests, answers, more={name: attempt(function) for name, function in verbs.items()})


if __name__ == "__main__":
    main()
