"""A simulator of a heated rod, as an MPI program: every rank has a part of the rod and exchanges its ends with its
neighbours.

It reads a line of JSON for each step from the standard input of rank 0, `{"power": from 0 to 1}` or `{"start": °C}`,
and answers with the temperatures at five places. It ends when its input ends. `--seconds S` makes a step that slow.
"""

import json
import os
import socket
import sys
import time

import numpy as np
from mpi4py import MPI

CELLS = 16  # of the whole rod
SUBSTEPS = 20  # of one step
SPREAD, LOSS, HEAT = 0.2, 0.002, 0.1  # per substep: between neighbours, to the air (0 °C), at the heated end


def receive(world: MPI.Comm) -> dict[str, float] | None:
    """What rank 0 has read, in every rank; None at the end of its input. Waiting ranks sleep: MPI would spin, and take
    the cores that the learner needs meanwhile."""
    text = sys.stdin.readline().encode() if world.rank == 0 else b""
    size = np.array([len(text)])
    wait(world.Ibcast(size, root=0))
    buffer = bytearray(text or int(size[0]))
    wait(world.Ibcast(buffer, root=0))
    return json.loads(buffer) if buffer else None


def wait(request: MPI.Request) -> None:
    while not request.Test():
        time.sleep(0.0002)


def step(world: MPI.Comm, cells: np.ndarray, power: float) -> None:
    """Advance this rank's cells in place. The two at the ends of the array are those of the neighbours."""
    left, right = (
        world.rank + offset if 0 <= world.rank + offset < world.size else MPI.PROC_NULL for offset in (-1, 1)
    )
    for _ in range(SUBSTEPS):
        cells[0], cells[-1] = cells[1], cells[-2]  # no heat leaves through the ends of the rod
        world.Sendrecv(cells[-2:-1].copy(), right, recvbuf=cells[:1], source=left)
        world.Sendrecv(cells[1:2].copy(), left, recvbuf=cells[-1:], source=right)
        cells[1:-1] += SPREAD * (cells[2:] - 2 * cells[1:-1] + cells[:-2]) - LOSS * cells[1:-1]
        if world.rank == 0:
            cells[1] += HEAT * power


def main() -> None:
    world = MPI.COMM_WORLD
    seconds = float(sys.argv[sys.argv.index("--seconds") + 1]) if "--seconds" in sys.argv else 0.0
    if CELLS % world.size:
        raise SystemExit(f"rod: {world.size} ranks cannot share {CELLS} cells evenly")
    cells = np.zeros(CELLS // world.size + 2)
    places = world.gather([socket.gethostname(), sorted(os.sched_getaffinity(0))])
    if world.rank == 0:
        print(json.dumps(places), flush=True)
    while (order := receive(world)) is not None:
        if "start" in order:
            cells[:] = order["start"]
        else:
            time.sleep(seconds)
            step(world, cells, order["power"])
        parts = world.gather(cells[1:-1])
        if world.rank == 0:
            print(json.dumps(np.concatenate(parts)[:: CELLS // 5][:5].round(6).tolist()), flush=True)


if __name__ == "__main__":
    main()
