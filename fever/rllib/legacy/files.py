"""Reads files of the removed `rllib train -f` for the options of `fever train` and `fever tune`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fever.errors import FeverError
from fever.rllib.legacy.old_names import OFF
from fever.rllib.legacy.translate import Translation, translate


def is_old_yaml(values: dict[str, Any]) -> bool:
    """Whether a file was written for `rllib train -f`: it says what to `run`, at the top or under a name.

    One of fever's own has the text `env` at the top, and may have a `run` among the environment's arguments.
    """
    experiments = any(isinstance(one, dict) and "run" in one for one in values.values())
    return "run" in values or (experiments and not isinstance(values.get("env"), str))


def read_experiment(
    values: dict[str, Any], path: str, experiment: str | None, env: str | None
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """One experiment of an old file as values of RunConfig and of Search, and notes for the user.

    `env` is the environment of the command line, if any; old ids are understood.
    """
    found = translate(values, path, experiment, env)
    if found.values["algo"].startswith("rllib:"):
        found = known_part(found)
    search: dict[str, Any] = {"space": found.space}
    if found.grid:
        search["method"] = "grid"
    if found.trials is not None:  # repeats of every point of a grid, or samples
        search["seeds" if found.grid else "trials"] = found.trials
    return found.values, search, found.notes


def known_part(translation: Translation) -> Translation:
    """The translation without settings that the installed RLlib does not have; a note names them.

    Raises FeverError for an algorithm that RLlib does not have. If RLlib is not installed here, all settings stay: they
    are checked where the run starts.
    """
    from fever.rllib.catalogue import require_rllib
    from fever.rllib.settings import default_config, parameters

    algo = translation.values["algo"]
    try:
        require_rllib()
    except FeverError:
        return translation
    known = {*parameters(default_config(algo)), "observation_filter"}
    settings, space = translation.values["settings"], translation.space
    lost = [name for name, value in settings.items() if name not in known and value not in OFF]
    note = [f"not translated: {', '.join(lost)}: {algo} has no such setting"] if lost else []
    kept = {name: value for name, value in settings.items() if name in known}
    return replace(
        translation,
        values={**translation.values, "settings": kept},
        notes=(*note, *translation.notes),
        space={name: text for name, text in space.items() if name.partition(".")[0] in known},
    )
