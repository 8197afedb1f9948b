"""Ids of environments that have other ids now: `BreakoutNoFrameskip-v4`, `Pong-ram-v0`, `HalfCheetah-v2`.

An Atari id said how the game was played, and the arguments of its ALE id say it now:

| in the id | was | is |
|---|---|---|
| `v0`, `v4` | the last action is repeated with probability 0.25, or 0 | `repeat_action_probability` |
| `-ram` | 128 bytes of the console's memory instead of the screen | `obs_type="ram"` |
| `NoFrameskip` | every frame is a step; wrappers then skipped four of them | the standard's 4; with `-ram` 1 |
| `Deterministic` | 4 frames a step; 3 in Space Invaders | `frameskip` |
| neither | 2 to 4 frames a step, drawn at random | the standard's 4 |

Screens are preprocessed as described in `atari.py`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

ATARI = re.compile(r"([A-Z][A-Za-z0-9]*?)(-ram)?(NoFrameskip|Deterministic)?-v([04])")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


GAMES = _words(
    "Adventure AirRaid Alien Amidar Assault Asterix Asteroids Atlantis BankHeist BattleZone BeamRider Berzerk "
    "Bowling Boxing Breakout Carnival Centipede ChopperCommand CrazyClimber Defender DemonAttack DoubleDunk "
    "ElevatorAction Enduro FishingDerby Freeway Frostbite Gopher Gravitar Hero IceHockey Jamesbond JourneyEscape "
    "Kangaroo Krull KungFuMaster MontezumaRevenge MsPacman NameThisGame Phoenix Pitfall Pong Pooyan PrivateEye Qbert "
    "Riverraid RoadRunner Robotank Seaquest Skiing Solaris SpaceInvaders StarGunner Tennis TimePilot Tutankham "
    "UpNDown Venture VideoPinball WizardOfWor YarsRevenge Zaxxon"
)
ROBOTS = _words(
    "Ant HalfCheetah Hopper Humanoid HumanoidStandup InvertedDoublePendulum InvertedPendulum Pusher Reacher Swimmer "
    "Walker2d"
)
VERSIONS = {  # environment -> its current version, where Gymnasium has removed or replaced older ones
    "Pendulum": 1, "Acrobot": 1, "FrozenLake": 1, "FrozenLake8x8": 1, "CliffWalking": 1, "Taxi": 3, "CarRacing": 3,
    "LunarLander": 3, "LunarLanderContinuous": 3, "BipedalWalker": 3, "BipedalWalkerHardcore": 3,
    **dict.fromkeys(ROBOTS, 5),
}  # fmt: skip


class Current(NamedTuple):
    """What an old id is now."""

    id: str
    arguments: dict[str, Any]  # of the environment; those that the user gives win
    note: str  # a sentence for the user


def find_current(name: str) -> Current | None:
    """The current id and arguments for an old id; None for any other name."""
    if (match := ATARI.fullmatch(name)) and match[1] in GAMES:
        return _atari(name, *match.groups())
    stem, _, version = name.rpartition("-v")
    if not version.isdecimal() or int(version) >= VERSIONS.get(stem, 0):
        return None
    if stem in ROBOTS and version == "4":  # which still exists
        return None
    current = f"{stem}-v{VERSIONS[stem]}"
    return Current(current, {}, f"{name} is {current} now{': returns may differ' if stem in ROBOTS else ''}")


def _atari(name: str, game: str, ram: str | None, frames: str | None, version: str) -> Current:
    arguments: dict[str, Any] = {}
    if version == "4":
        arguments["repeat_action_probability"] = 0.0
    if ram:
        arguments["obs_type"] = "ram"
    if frames == "NoFrameskip" and ram:
        arguments["frameskip"] = 1
    elif frames == "Deterministic" and game == "SpaceInvaders":
        arguments["frameskip"] = 3
    said = [
        "without sticky actions" if version == "4" else "with sticky actions",
        f"{arguments.get('frameskip', 4)} frame{'s' if arguments.get('frameskip') != 1 else ''} a step",
    ]
    return Current(f"ALE/{game}-v5", arguments, f"{name} is ALE/{game}-v5 now, {', '.join(said)}")
