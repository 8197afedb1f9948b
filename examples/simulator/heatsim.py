"""heatsim: a fictitious simulator of a heated room, in the place of a program that you have and cannot change.

It knows nothing of reinforcement learning. It is started in a folder, reads two files there and writes two:

    start.json    {"minute": of the day, "room": °C, "wall": °C, "mean": °C outside, averaged over the day}
    control.json  {"minutes": how long to simulate, "power": of the heater, from 0 to 1}
    output.csv    a row for the start and one for every minute after it: minute, room, wall, outside, kwh used so far
    end.json      what start.json has, for the next run to go on from

It also fails like a real one: `--crash P`, `--hang P` and `--garbage P` (half a file, yet exit code 0) do so with a
probability; `--seconds S` makes it slow. It has few imports, so that it starts quickly.
"""

import json
import os
import sys
import time
from math import cos, pi

HEATER = 3000.0  # W at full power
ROOM, WALL = 1.2e6, 1.5e7  # J/K that air with furniture and the walls hold
ROOM_WALL, ROOM_OUTSIDE, WALL_OUTSIDE = 200.0, 50.0, 33.0  # W/K that pass between them
SECONDS = 60.0  # of one time step


def outside(minute: float, mean: float) -> float:
    """Temperature outside in °C: warmest at three in the afternoon."""
    return mean + 5.0 * cos(2 * pi * (minute - 15 * 60) / (24 * 60))


def simulate(state: dict[str, float], minutes: int, power: float) -> list[list[float]]:
    """Advance a state in place; returns the rows of output.csv."""
    kwh = 0.0
    rows = [[state["minute"], state["room"], state["wall"], outside(state["minute"], state["mean"]), kwh]]
    for _ in range(minutes):
        room, wall, air = state["room"], state["wall"], outside(state["minute"], state["mean"])
        to_room = ROOM_WALL * (wall - room) + ROOM_OUTSIDE * (air - room) + HEATER * power
        to_wall = ROOM_WALL * (room - wall) + WALL_OUTSIDE * (air - wall)
        state["room"] = room + SECONDS * to_room / ROOM
        state["wall"] = wall + SECONDS * to_wall / WALL
        state["minute"] += 1
        kwh += HEATER * power * SECONDS / 3.6e6
        rows.append([state["minute"], state["room"], state["wall"], outside(state["minute"], state["mean"]), kwh])
    return rows


def option(name: str) -> float:
    """The number after an option on the command line, 0 without it."""
    return float(sys.argv[sys.argv.index(name) + 1]) if name in sys.argv else 0.0


def strikes(name: str) -> bool:
    """Whether a failure with this probability happens now."""
    return int.from_bytes(os.urandom(4), "big") / 2**32 < option(name)


def main() -> int:
    with open("start.json") as file:
        state = json.load(file)
    with open("control.json") as file:
        control = json.load(file)
    print(f"heatsim: {control['minutes']} minutes from minute {state['minute']:g} at power {control['power']:.3f}")
    time.sleep(option("--seconds"))
    rows = simulate(state, control["minutes"], control["power"])
    text = "minute,room,wall,outside,kwh\n" + "".join(",".join(map(repr, row)) + "\n" for row in rows)
    crash, garbage = strikes("--crash"), strikes("--garbage")
    with open("output.csv", "w") as file:
        file.write(text[: len(text) // 2] if crash or garbage else text)
    if crash:
        print("heatsim: ERROR 17: the solver does not converge", file=sys.stderr)
        return 1
    if strikes("--hang"):
        print("heatsim: waiting for a licence", flush=True)
        time.sleep(3600)
    with open("end.json", "w") as file:
        json.dump(state, file)
    print("heatsim: done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
