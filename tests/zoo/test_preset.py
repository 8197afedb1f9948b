"""Where a row of the zoo goes: under what the user has set."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fever
from fever.config import RunConfig, Stop
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.training.setup import prepare
from fever.zoo import rows
from fever.zoo.preset import blames, find_preset, line, taken, with_preset
from fever.zoo.rows import Row

ROW = Row(
    settings={"gamma": 0.5, "steps": 16, "minibatch": 32, "epochs": 1, "hidden": [8]},
    envs=4, steps=640, sources={"default": "a test"},
)  # fmt: skip
SCHEDULED = ROW.model_copy(update={"settings": {**ROW.settings, "learning_rate_schedule": "linear"}})


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zoo of one small row, for Acrobot-v1 and ppo."""
    folder = tmp_path / "zoo"
    folder.mkdir()
    values = ROW.model_dump_json(exclude={"anchor"})
    (folder / "Acrobot-v1.yaml").write_text(f'{{"env": "Acrobot-v1", "rows": {{"ppo": {values}}}}}')
    (folder / "results").mkdir()
    (folder / "results" / "acrobot-ppo.json").write_text("{}")
    monkeypatch.setattr(rows, "FOLDER", folder)
    return folder


def test_a_row_that_is_not_measured_is_nobody_s_preset(zoo: Path) -> None:
    assert find_preset(config(), "Acrobot-v1", {}) is not None
    (zoo / "results" / "acrobot-ppo.json").unlink()
    assert find_preset(config(), "Acrobot-v1", {}) is None
    assert rows.find_row("Acrobot-v1", {}, "ppo") == ROW


def config(**fields: Any) -> RunConfig:
    return RunConfig(**{"env": "Acrobot-v1", **fields})


def test_what_the_user_has_set_wins() -> None:
    merged = with_preset(config(settings={"gamma": 0.9}, envs=2), ROW)
    assert merged.settings == {**ROW.settings, "gamma": 0.9}
    assert merged.envs == 2
    assert with_preset(config(), ROW).envs == 4
    assert with_preset(config(), None) == config()
    assert taken(merged, ROW) == {}
    assert "hidden" not in taken(config(settings={"network": "module:Net"}), ROW)


def test_stop_rules_stay_and_a_schedule_gets_an_end() -> None:
    timed = config(stop=Stop(seconds=5))
    assert with_preset(config(), SCHEDULED).stop == Stop()  # completed where the threshold is known
    assert with_preset(timed, ROW).stop == timed.stop
    assert with_preset(timed, SCHEDULED).stop == Stop(seconds=5, steps=640)
    assert with_preset(config(stop=Stop(steps=9)), SCHEDULED).stop == Stop(steps=9)
    constant = config(stop=Stop(seconds=5), settings={"learning_rate_schedule": "constant"})
    assert with_preset(constant, SCHEDULED).stop == constant.stop


def test_the_line_says_what_is_taken() -> None:
    whole = "gamma=0.5, steps=16, minibatch=32, epochs=1, hidden=8, envs=4; ends at 640 steps"
    begin, end = "preset of the zoo for Acrobot-v1, ppo: ", " (--no-preset: plain defaults)"
    assert line(config(), ROW, "Acrobot-v1") == f"{begin}{whole}{end}"
    own = config(settings={"gamma": 0.9, "hidden": [4]}, stop=Stop(steps=9))
    assert line(own, ROW, "Acrobot-v1", ["epochs"]) == f"{begin}steps=16, minibatch=32, envs=4{end}"
    assert line(with_preset(own, ROW), ROW, "Acrobot-v1") is None
    assert line(config(), None, "Acrobot-v1") is None
    timed = line(config(stop=Stop(seconds=5)), SCHEDULED, "Acrobot-v1")
    assert timed is not None
    assert "; ends at 640 steps" in timed


def test_no_preset_for_other_arguments_algorithms_and_on_request() -> None:
    wanted = config(env="LunarLander-v3")
    assert find_preset(wanted, "LunarLander-v3", {}) is not None
    assert find_preset(wanted.model_copy(update={"preset": False}), "LunarLander-v3", {}) is None
    assert find_preset(wanted, "LunarLander-v3", {"gravity": -5.0}) is None
    assert find_preset(wanted.model_copy(update={"algo": "rllib:PPO"}), "LunarLander-v3", {}) is None
    assert find_preset(config(env="CartPole-v1"), "CartPole-v1", {}) is None  # plain defaults


@pytest.mark.usefixtures("zoo")
def test_a_run_has_the_rows_values_and_ends_at_its_budget(tmp_path: Path) -> None:
    said: list[str] = []
    found = prepare(config(settings={"epochs": 2}), EnvSource("Acrobot-v1"), said.append)
    assert found.preset
    kept = found.config
    assert (kept.settings["gamma"], kept.settings["epochs"], kept.envs, kept.preset) == (0.5, 2, 4, True)
    assert (kept.stop.reward, kept.stop.steps) == (-100, 640)
    assert [sentence.partition(":")[0] for sentence in said] == ["preset of the zoo for Acrobot-v1, ppo"]
    said.clear()
    plain = prepare(config(preset=False), EnvSource("Acrobot-v1"), said.append)
    assert (plain.config.settings["gamma"], plain.config.envs, plain.config.stop.steps) == (0.99, 8, 1_000_000)
    assert (said, plain.preset) == ([], False)
    other = prepare(config(), EnvSource("Acrobot-v1", {"max_episode_steps": 50}), said.append)
    assert (other.config.envs, said, other.preset) == (8, [], False)


@pytest.mark.slow
@pytest.mark.usefixtures("zoo")
def test_python_takes_presets_and_can_leave_them_out(tmp_path: Path) -> None:
    first = fever.train("Acrobot-v1", runs=tmp_path, stop={"iterations": 1}, epochs=2)
    assert (first.summary["preset"], first.summary["envs"], first.summary["steps"]) == (True, 4, 64)
    plain = fever.train("Acrobot-v1", runs=tmp_path, stop={"iterations": 1}, preset=False, steps=8, envs=2)
    assert (plain.summary["preset"], plain.summary["steps"], plain.run.config.preset) == (False, 16, False)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_values_when_the_zoo_changes(zoo: Path, tmp_path: Path) -> None:
    first = fever.train("Acrobot-v1", runs=tmp_path, name="a", stop={"steps": 64})
    before = first.run.config
    path = zoo / "Acrobot-v1.yaml"
    path.write_text(path.read_text().replace("0.5", "0.7").replace('"envs":4', '"envs":2'))
    rows.read_sheet.cache_clear()
    again = fever.resume(first, stop={"steps": 128})
    assert again.summary["steps"] == 128
    assert again.run.config.model_copy(update={"stop": before.stop}) == before
    text = (first.run.path / "config.yaml").read_text()
    assert "preset: true\n" in text
    shorter = text.replace("  gamma: 0.5\n", "")  # as of a version without this setting
    (first.run.path / "config.yaml").write_text(shorter)
    resumed = fever.resume(first, stop={"steps": 192}, trust=True)
    assert (resumed.run.config.settings["gamma"], resumed.summary["preset"]) == (0.99, True)
    (first.run.path / "config.yaml").write_text(shorter.replace("preset: true\n", ""))
    assert first.run.config.preset is False  # runs of versions without a zoo had none
    assert fever.resume(first, stop={"steps": 256}, trust=True).summary["preset"] is False


@pytest.mark.usefixtures("zoo")
def test_a_value_that_does_not_go_with_the_preset_is_explained() -> None:
    with pytest.raises(FeverError, match=r"minibatch=32 does not divide .* \(the preset of the zoo has minibatch=32: "):
        prepare(config(settings={"steps": 9}), EnvSource("Acrobot-v1"), print)
    with pytest.raises(FeverError, match="ppo has no setting gama") as caught:  # which lists the others by name
        prepare(config(settings={"gama": 9}), EnvSource("Acrobot-v1"), print)
    assert "preset" not in str(caught.value)
    own = config(settings={"steps": 9, "minibatch": 33})
    with pytest.raises(FeverError, match="minibatch=33 does not divide") as caught:
        prepare(own, EnvSource("Acrobot-v1"), print)
    assert "preset" not in str(caught.value)
    with pytest.raises(FeverError, match=r"^other$"), blames(ROW, config()):
        raise FeverError("other")


def test_submission_checks_what_the_job_will_train(zoo: Path) -> None:
    from fever.launch.dispatch import Order

    def check(**fields: Any) -> None:
        Order(config(workers=0, **fields), "slurm").check(True)

    check()
    with pytest.raises(FeverError, match="the preset of the zoo has minibatch=32"):
        check(settings={"steps": 9})
    check(settings={"steps": 9}, preset=False, envs=256)


@pytest.mark.usefixtures("zoo")
def test_weights_of_a_run_with_other_settings_are_explained(tmp_path: Path) -> None:
    plain = fever.train("Acrobot-v1", runs=tmp_path, name="plain", stop={"iterations": 1}, preset=False, steps=8)
    with pytest.raises(FeverError, match=r"its network has hidden=.*the preset of the zoo has hidden=8"):
        fever.train("Acrobot-v1", runs=tmp_path, start_from=plain)


def test_a_search_samples_above_the_preset(zoo: Path, tmp_path: Path) -> None:
    from fever.tune.study import Study
    from fever.tune.table import make_table

    search = {"space": {"gamma": "choice(0.9,0.95)"}, "method": "grid"}
    study = Study(config(search=search, runs=str(tmp_path)), None, make_table("quiet"), None, False)
    assert (study.config.envs, study.config.settings["steps"], study.config.stop.steps) == (4, 16, 640)
    assert {**study.config.settings, **study.space.first}["gamma"] in (0.9, 0.95)
    with pytest.raises(FeverError, match="ppo has no setting gama"):
        Study(config(settings={"gama": 1}, search=search), None, make_table("quiet"), None, False)


@pytest.mark.usefixtures("zoo")
def test_seeds_say_it_once(tmp_path: Path) -> None:
    from fever.experiments.several import check

    said: list[str] = []
    check(config(), said.append)
    assert [sentence.partition(":")[0] for sentence in said] == ["preset of the zoo for Acrobot-v1, ppo"]
    check(config(env="CartPole-v1"), said.append)
    assert len(said) == 1


def test_presets_of_runs_do_not_tell_experiments_apart() -> None:
    from fever.runs.groups import experiment_of

    assert experiment_of(config(preset=False)) == experiment_of(config())


def test_help_and_import_read_no_file() -> None:
    code = (
        "import sys, fever, fever.cli.main\n"
        "assert not {name for name in sys.modules if name.startswith('fever.zoo.')} & {'fever.zoo.rows'}"
    )
    subprocess.run([sys.executable, "-c", code.replace("fever, fever.cli", "fever.cli")], check=True, timeout=60)
