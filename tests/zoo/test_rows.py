"""The zoo's files: every row can be used, and every value has a source."""

from __future__ import annotations

from pathlib import Path

import pytest

from fever.algos.registry import check_settings, config_of
from fever.config import NetworkSettings, load_yaml
from fever.envs.old_ids import find_current
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.zoo import rows
from fever.zoo.rows import FOLDER, Row, Sheet, all_rows, find_row, plain_id, read_sheet, text, written

ROWS = {name: (sheet, algo, row) for name, sheet, algo, row in all_rows()}
NAMES = """
    cartpole-ppo cartpole-dqn cartpole-apex cartpole-trpo cartpole-impala acrobot-ppo acrobot-dqn lunarlander-ppo
    lunarlander-dqn pendulum-ppo pendulum-sac mountaincar-dqn mountaincarcontinuous-sac bipedalwalker-ppo
    halfcheetah-ppo halfcheetah-trpo halfcheetah-sac hopper-sac hopper-trpo walker2d-ppo pong-ram-trpo pong-ppo
    pong-apex
"""


def test_names_are_short_and_nothing_is_missing() -> None:
    assert sorted(ROWS) == sorted(NAMES.split())
    assert len(list(all_rows())) == len(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_can_be_used_and_every_value_has_a_source(name: str) -> None:
    sheet, algo, row = ROWS[name]
    check_settings(algo, row.settings)
    assert all(len(row.source_of(value)) > 5 for value in row.values)
    assert row.sources.keys() <= {*row.values, "default", "steps"}
    defaults: type[NetworkSettings] = config_of(algo)
    if algo == "ppo" and not row.plain:  # batches are cut into equal minibatches
        settings = defaults.model_validate(row.settings).model_dump()
        assert settings["steps"] * (row.envs or 8) % settings["minibatch"] == 0
    assert find_row(sheet.env, sheet.env_kwargs, algo) == row
    assert find_current(sheet.env) is None


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_files_begin_with_the_environment_for_completion(path: Path) -> None:
    assert path.read_text().startswith(f"env: {read_sheet(path).env}\n")


def test_rows_are_found_by_current_id_and_arguments() -> None:
    def found(env: str, algo: str = "ppo", **kwargs: object) -> Row | None:
        source = EnvSource(env, kwargs)
        return find_row(source.name, source.kwargs, algo)

    lander = found("LunarLander-v3")
    assert lander is not None
    assert lander.settings["gamma"] == 0.999
    assert found("LunarLander-v2") == lander  # an old id
    assert found("gymnasium:LunarLander-v3") == lander
    assert found("LunarLander-v3", "a2c") is None
    assert found("LunarLander-v3", gravity=-5.0) is None
    assert found("LunarLander") is None
    assert found("gymnasium.envs.box2d.lunar_lander:LunarLander") is None
    images, memory = found("ALE/Pong-v5"), found("ALE/Pong-v5", "trpo", obs_type="ram")
    assert images is not None
    assert memory is not None
    assert found("ALE/Pong-v5", obs_type="ram") is None
    assert found("ALE/Pong-v5", "trpo") is None
    assert found("Pong-ram-v4", "trpo") is None  # without sticky actions
    assert found("../../etc") is None
    assert found("x" * 5000) is None


def test_arguments_of_any_kind_are_compared() -> None:
    import numpy as np

    sheet = Sheet(env="A-v0", env_kwargs={"n": 1}, rows={})
    assert sheet.fits("A-v0", {"n": 1})
    assert sheet.fits("module:A-v0", {"n": 1})
    others: list[object] = [True, 1.0, "1", np.array([1, 2])]
    assert not any(sheet.fits("A-v0", {"n": value}) for value in others)
    assert plain_id("mobile_env:mobile-small-central-v0") == "mobile-small-central-v0"
    assert plain_id("module:Class") == "module:Class"


def test_only_the_files_of_one_environment_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(rows, "read_sheet", lambda path: read.append(path.name) or read_sheet(path))  # type: ignore[func-returns-value]
    find_row("ALE/Pong-v5", {"obs_type": "ram"}, "trpo")
    find_row("Nothing-v0", {}, "ppo")
    assert {*read} <= {"ALE-Pong-v5.ram.yaml", "ALE-Pong-v5.yaml"}


def test_a_value_without_a_source_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "A-v0.yaml"
    path.write_text(
        "env: A-v0\nrows: {ppo: {settings: {gamma: 0.9, steps: 8}, steps: 1000, sources: {gamma: paper}}}\n"
    )
    assert load_yaml(path)["env"] == "A-v0"
    with pytest.raises(FeverError, match="sources has nothing for steps"):
        read_sheet(path)


def test_values_are_written_as_on_the_command_line() -> None:
    values = {"hidden": [256, 256], "double": False, "target": "hard", "clip": 0.1}
    assert written(values) == "hidden=256,256, double=false, target=hard, clip=0.1"
    assert written(values, 4) == written(values)
    assert written(values, 3) == "hidden=256,256, double=false, and 2 more"
    assert text([]) == "[]"
