"""Reading configurations: durations, assignments, YAML files, bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fever.config import Settings, Stop, load_yaml, parse_assignments, validate
from fever.errors import FeverError
from fever.launch.schedulers.slurm import Slurm

DURATIONS = [(Stop, "seconds"), (Slurm, "seconds"), (Slurm, "connect_seconds"), (Slurm, "lead_seconds")]


@pytest.mark.parametrize(("model", "name"), DURATIONS)
def test_every_time_is_understood_with_and_without_a_unit(model: type[Settings], name: str) -> None:
    for text, seconds in {"90": 90, "90s": 90, "10m": 600, "2h": 7200, "1h30m": 5400, 7: 7, 0.5: 0.5}.items():
        assert getattr(validate(model, {name: text}, "x"), name) == seconds


@pytest.mark.parametrize(("model", "name"), DURATIONS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("soon", "'soon' is not a time; write 90s, 10m or 2h"),
        ("", "'' is not a time; write 90s, 10m or 2h"),
        ("0s", "must be greater than 0"),
        (-1, "must be greater than 0"),
        ([1], "must be a number"),
        (float("inf"), "must be a finite number"),
    ],
)
def test_every_time_that_is_none_is_refused(model: type[Settings], name: str, value: Any, message: str) -> None:
    with pytest.raises(FeverError) as refused:
        validate(model, {name: value}, "x")
    assert str(refused.value) == f"x: {name}={value!r} cannot be used: {message}"


def test_a_date_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FeverError, match="the value of learning_rate cannot be read: '2020-13-45'"):
        parse_assignments(["learning_rate=2020-13-45"])
    file = tmp_path / "run.yaml"
    file.write_text("env: CartPole-v1\nname: 2020-13-45\n")
    with pytest.raises(FeverError, match=r"run\.yaml is not YAML: month must be in 1\.\.12"):
        load_yaml(file)


@pytest.mark.parametrize(
    ("name", "value"), [("epsilon_base", 0), ("epsilon_base", 1.1), ("epsilon_base", -0.4), ("epsilon_ladder", -1)]
)
def test_a_ladder_of_what_is_no_epsilon_is_refused(name: str, value: float) -> None:
    from fever.algos.apex import ApexConfig

    with pytest.raises(FeverError, match=rf"apex: {name}={value} cannot be used"):
        validate(ApexConfig, {name: value}, "apex")
