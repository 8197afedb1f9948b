"""For all tests, those of the examples included."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = {  # files whose tests run in one process, one after the other -> its name; all other tests run anywhere
    "test_lab.py": "lab",  # machines on two cores, and what jobs leave in /tmp
    "test_node.py": "lab",
    "test_agent.py": "lab",
    "test_slurm.py": "lab",
    "test_mpi.py": "lab",
    "test_ssh.py": "lab",
    "test_aws_life.py": "lab",
    "test_cluster.py": "rays",  # one Ray for a file, and no more than one such at a time
    "test_elastic.py": "rays",
    "test_rllib.py": "rays",
    "test_rollout_batches.py": "rays",
    "test_shards.py": "rays",
    "test_stream.py": "rays",
    "test_search.py": "rays",
    "test_tune.py": "rays",
    "test_workers.py": "rays",
}
COMPILED = "JAX_COMPILATION_CACHE_DIR"  # read by JAX


def pytest_configure(config: pytest.Config) -> None:
    """Compile no program twice in all that a process of the tests starts: trainings of seconds compile for seconds.

    And have Ctrl-C mean what it means: a shell's background job, which this may be, and all that it starts ignore it.
    """
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # JAX may read what another process is just writing there
        os.environ[COMPILED] = os.path.join(os.environ[COMPILED], worker)
    elif COMPILED not in os.environ:
        os.environ[COMPILED] = tempfile.mkdtemp(prefix="fever-compiled-")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(COMPILED), ignore_errors=True))
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Together(LoadScopeScheduling):
    """Hands out single tests, but those of some files together; the largest such group first.

    pytest-xdist's own groups by mark have no effect with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0].rpartition("/")[2]
        return TOGETHER.get(file, nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Together:
    return Together(config, log)
