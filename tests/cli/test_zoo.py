"""`fever zoo`, `fever config --env`, and presets on the command line."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fever.cli.completion import environments
from tests.helpers import call_fever

TINY = ("hidden=8", "steps=8", "minibatch=16", "epochs=1", "--envs", "2", "--stop-iterations", "1")


def test_rows_are_listed() -> None:
    done = call_fever("zoo")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert re.match(r" environment +algorithm +steps +score +published", lines[0])
    assert any(re.match(r" LunarLander-v3 +ppo +1.0M +.+ +242.1 at 1.0M", line) for line in lines)
    assert any(re.match(r" ALE/Pong-v5 \(obs_type=ram\) +trpo +5.0M +.+ -", line) for line in lines)
    assert "fever train ENVIRONMENT" in lines[-1]


def test_rows_as_json() -> None:
    rows = {row["row"]: row for row in json.loads(call_fever("zoo", "--json").stdout)}
    row = rows["lunarlander-ppo"]
    assert (row["env"], row["algo"], row["steps"], row["envs"]) == ("LunarLander-v3", "ppo", 1_000_000, 16)
    assert row["settings"]["gamma"] == 0.999
    assert row["anchor"]["score"] == 242.119
    assert rows["pong-ram-trpo"]["env_kwargs"] == {"obs_type": "ram"}
    assert {row["result"] is None or row["result"]["mean"] is not None for row in rows.values()} == {True}


def test_config_shows_where_values_come_from() -> None:
    done = call_fever("config", "ppo", "--env", "LunarLander-v2")  # an old id
    assert done.returncode == 0
    assert "settings of ppo in LunarLander-v3" in done.stdout
    assert re.search(r"^ gamma +0.999 +discount per step.* zoo: rl-zoo3 hyperparams/ppo.yml", done.stdout, re.M)
    assert re.search(r"^ clip_schedule +constant +.*default: SB3 *$", done.stdout, re.M)
    assert re.search(r"^ --envs +16 +.*zoo: rl-zoo3", done.stdout, re.M)
    assert re.search(r"^ --stop-steps +1000000 +.*zoo: rl-zoo3", done.stdout, re.M)
    other = call_fever("config", "ppo", "--env", "LunarLander-v3", "--env-kwargs", '{"gravity": -5.0}').stdout
    assert 'the zoo has no settings for LunarLander-v3 with {"gravity": -5.0} and ppo' in other
    assert "zoo: " not in other
    assert (
        "the zoo has no settings for CartPole-v1 and ppo" in call_fever("config", "ppo", "--env", "CartPole-v1").stdout
    )
    assert re.search(r"^ gamma +0.99 +discount", call_fever("config", "ppo").stdout, re.M)
    pong = call_fever("config", "apex", "--env", "ALE/Pong-v5").stdout
    assert "the zoo has not measured its settings for ALE/Pong-v5 and apex: these are the defaults" in pong


def test_config_refuses_what_has_no_effect() -> None:
    done = call_fever("config", "--env", "LunarLander-v3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs an algorithm, for example: fever config ppo --env LunarLander-v3" in done.stderr
    done = call_fever("config", "ppo", "--env-kwargs", "{}")
    assert (done.returncode, done.stderr) == (2, "fever: --env-kwargs has no effect without --env; add --env ID\n")


def test_environments_are_completed() -> None:
    assert environments("Mountain") == ["MountainCar-v0", "MountainCarContinuous-v0"]
    assert environments("ALE") == ["ALE/Pong-v5"]


@pytest.mark.slow
def test_a_run_says_what_it_takes_and_no_preset_leaves_it_out(fever: Any) -> None:
    done = fever("train", "Acrobot-v1", *TINY, "--name", "a")
    assert done.returncode == 0, done.stderr
    [told] = [sentence for sentence in (done.stdout + done.stderr).splitlines() if "preset" in sentence]
    assert re.fullmatch(
        r"preset of the zoo for Acrobot-v1, ppo: gamma=0.99, gae_lambda=0.94, .* \(--no-preset: plain defaults\)", told
    )
    assert "preset" not in (plain := fever("train", "Acrobot-v1", *TINY, "--no-preset", "--json")).stderr
    assert json.loads(plain.stdout)["preset"] is False
    quiet = fever("train", "Acrobot-v1", *TINY, "--quiet")
    assert (quiet.stdout, quiet.stderr) == ("", "")


def test_a_yaml_file_may_say_that_there_is_none(fever: Any, tmp_path: Any) -> None:
    (tmp_path / "run.yaml").write_text("env: Acrobot-v1\npreset: false\n")
    done = fever("train", "-f", "run.yaml", *TINY, "--json")
    assert json.loads(done.stdout)["preset"] is False
    done = fever("train", "-f", "run.yaml", *TINY, "--preset", "--json")
    assert json.loads(done.stdout)["preset"] is True


def test_a_refusal_mentions_the_preset(fever: Any) -> None:
    done = fever("train", "LunarLander-v3", "steps=9", "--stop-iterations", "1")
    assert done.returncode == 2
    assert "(the preset of the zoo has minibatch=64: set it as well, or leave the preset out with --no-preset)" in (
        done.stderr
    )
