"""A stand-in for PALS's `mpiexec` on one machine: `python pals.py -n RANKS [--over SECONDS] COMMAND...`.

It sets what PALS sets (and no PALS_SIZE), binds every rank to one core, and starts ranks in a mixed order, spread over
some seconds, as a large machine does. Exits with the highest exit code.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
import uuid


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=1)
    parser.add_argument("--over", type=float, default=0.0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    own = [name for name in os.environ if name.startswith(("PALS_", "PMI_", "OMPI_", "SLURM_"))]
    environ = {name: value for name, value in os.environ.items() if name not in own}
    environ |= {"PALS_APID": str(uuid.uuid4()), "PMI_SIZE": str(options.n), "PALS_NODEID": "0"}
    order = list(range(1, options.n))
    random.Random(0).shuffle(order)
    order.insert(0, 0)  # rank 0 waits for all others
    cores, began, ranks = sorted(os.sched_getaffinity(0)), time.monotonic(), []
    for place, number in enumerate(order):
        time.sleep(max(0.0, began + place * options.over / max(options.n - 1, 1) - time.monotonic()))
        variables = {"PALS_RANKID": str(number), "PALS_LOCAL_RANKID": str(number)}
        os.sched_setaffinity(0, cores[:1])
        ranks.append(subprocess.Popen(options.command, env={**environ, **variables}))
        os.sched_setaffinity(0, cores)
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
