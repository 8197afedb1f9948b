"""How much of an environment's step is spent computing, found out in a process of its own.

    python -P -m fever.scaling.probe RUN.yaml

prints one JSON object, or one sentence to standard error with exit code 2. Workers share cores while they compute, and
do not while they wait, for a simulator on another machine or for a device: beyond the number of cores this is what
decides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fever.config import RunConfig, load_yaml, validate
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource
from fever.envs.watchdog import close_quietly
from fever.envs.worker_count import time_steps
from fever.errors import FeverError, TrainingError
from fever.plugins.user_code import user_code
from fever.text import say

SECONDS = 120.0  # for a probe, imports included


def probe(config: RunConfig) -> float:
    """Share of a step that one environment spends computing, in this process."""
    source = EnvSource(config.env, config.env_kwargs)
    with tempfile.TemporaryDirectory(prefix="fever-") as folder:
        envs = make_envs(source, 1, EnvContext(workdir=Path(folder)))
        try:
            with user_code(f"{source.name} cannot be tried"):
                return time_steps(envs)[1]
        finally:
            close_quietly(source.name, envs.close, limited=True)


def ask(file: Path) -> float:
    """The same in another process, for the run that a file describes. Raises FeverError if the environment fails."""
    command = [sys.executable, "-P", "-m", "fever.scaling.probe", str(file)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
        return float(json.loads(done.stdout.splitlines()[-1])["computing"])
    except subprocess.TimeoutExpired:
        raise FeverError(f"the environment could not be tried within {SECONDS:.0f} s") from None
    except (IndexError, KeyError, TypeError, ValueError):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise FeverError(lines[-1].removeprefix("fever: ")) from None


def main() -> int:
    sys.path.insert(0, "")  # the user's modules, as for `fever train`
    file = Path(sys.argv[1])
    try:
        found = probe(validate(RunConfig, load_yaml(file), str(file)))
    except (FeverError, TrainingError) as error:
        say(f"fever: {' '.join(str(error).split())}", sys.stderr)
        return 2
    say("")
    say(json.dumps({"computing": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
