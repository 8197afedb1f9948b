"""Reading configurations: durations, assignments, YAML files, bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fever.algos.registry import config_of
from fever.config import RunConfig, Settings, Stop, load_yaml, parse_assignments, validate
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


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FeverError, match="the value of learning_rate cannot be read: '!!int x'"):
        parse_assignments(["learning_rate=!!int x"])
    file = tmp_path / "run.yaml"
    file.write_text("env: CartPole-v1\nname: !!int x\n")
    with pytest.raises(FeverError, match=r"run\.yaml is not YAML \(line 2\): 'x' is not an integer of 64 bits"):
        load_yaml(file)


@pytest.mark.parametrize("name", ["seed", "workers", "envs", "stop.steps", "stop.seconds", "checkpoint_keep"])
def test_a_truth_value_is_no_number(name: str) -> None:
    first, _, last = name.partition(".")
    values = {"env": "CartPole-v1", first: {last: True} if last else True}
    with pytest.raises(FeverError, match=rf"^here: {name}=True cannot be used: must be a (whole )?number$"):
        validate(RunConfig, values, "here")


def test_truth_values_that_are_meant_stay_so() -> None:
    kept = validate(config_of("dqn"), {"double": False, "clip_rewards": True}, "here")
    assert (kept.double, kept.clip_rewards) == (False, True)  # type: ignore[attr-defined]


def test_a_date_is_text(tmp_path: Path) -> None:
    assert parse_assignments(["a=2024-01-31", "b=2020-13-45"]) == {"a": "2024-01-31", "b": "2020-13-45"}


def test_values_in_sentences_are_short() -> None:
    for values in (
        {"steps": ["x" * 10**6]},
        {"seconds": "9" * 10**6},
        {"window": -(10**5000)},
        {"x" * 10**6: 1},
        {"a.b": 1},
    ):
        with pytest.raises(FeverError) as refused:
            validate(Stop, values, "x")
        assert len(str(refused.value)) < 500
    with pytest.raises(FeverError) as refused:
        parse_assignments(["a=[" + "x" * 10**6])
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("name", "value"), [("epsilon_base", 0), ("epsilon_base", 1.1), ("epsilon_base", -0.4), ("epsilon_ladder", -1)]
)
def test_a_ladder_of_what_is_no_epsilon_is_refused(name: str, value: float) -> None:
    from fever.algos.apex import ApexConfig

    with pytest.raises(FeverError, match=rf"apex: {name}={value} cannot be used"):
        validate(ApexConfig, {name: value}, "apex")
