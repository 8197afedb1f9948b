"""Runs that were not made on this account: nothing that they name is imported before the user says --trust."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

import fever
from fever import layout
from fever.cli.main import _run
from fever.config import RunConfig, Search
from fever.errors import FeverError
from fever.files import SEAL, sealed
from fever.job import JobFolder
from fever.launch.jobs import prepare
from fever.launch.schedulers.slurm import Slurm
from fever.runs import trust
from fever.runs.mirror import Exchange, Mirror, answer
from fever.runs.run import Run
from fever.training.result import Result

CODE = """
from pathlib import Path
Path("{canary}").touch()
from tests.environments import InfoEnv as Env
from tests.plugins.networks import *
from fever.training.callbacks import Callback
"""


class Stranger:
    """A run directory that somebody else has sent, and code of theirs that leaves a trace when it is imported."""

    def __init__(self, folder: Path, made: Path) -> None:
        self.path, self.canary = folder / "theirs", folder / "canary"
        (folder / "evil_code.py").write_text(CODE.format(canary=self.canary))
        shutil.copytree(made, self.path)
        (self.path / layout.SIGNATURE).unlink()

    def change(self, **values: Any) -> None:
        """Change the configuration."""
        file = self.path / layout.CONFIG
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **values}))

    def change_manifests(self, change: Callable[[dict[str, Any]], None]) -> None:
        for file in self.path.glob(f"{layout.CHECKPOINTS}/*/{layout.MANIFEST}"):
            manifest = json.loads(file.read_text())
            change(manifest)
            file.write_text(sealed({name: value for name, value in manifest.items() if name != SEAL}))

    @property
    def imported(self) -> bool:
        return self.canary.exists()


@pytest.fixture
def stranger(tmp_path: Path, result: Result, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stranger's run of `evil_code:Env`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    made = Stranger(tmp_path, result.run.path)
    made.change(env="evil_code:Env")
    yield made
    sys.modules.pop("evil_code", None)


CALLS: dict[str, Callable[..., Any]] = {
    "evaluate": lambda run, **more: fever.evaluate(run, episodes=1, **more),
    "watch": lambda run, **more: fever.watch(run, "a.gif", steps=2, **more),
    "resume": lambda run, **more: fever.resume(run, stop={"iterations": 7}, **more),
}


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run the command line in this process."""
    monkeypatch.setattr(sys, "argv", ["fever", *map(str, words)])
    return _run()


@pytest.mark.parametrize("name", CALLS)
def test_a_strangers_environment_needs_trust(stranger: Stranger, name: str) -> None:
    with pytest.raises(FeverError, match=r"wants to import evil_code:Env; if you know who wrote it, add --trust \(in"):
        CALLS[name](stranger.path)
    assert not stranger.imported
    with suppress(FeverError):  # `watch`: it cannot be drawn
        CALLS[name](stranger.path, trust=True)
    assert stranger.imported


@pytest.mark.parametrize("words", [("eval", "--episodes", "1"), ("watch",), ("resume", "--stop-iterations", "7")])
def test_commands_ask_with_exit_code_2(
    stranger: Stranger, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, words[0], stranger.path, *words[1:]) == 2
    assert "evil_code:Env; if you know who wrote it, add --trust" in capsys.readouterr().err
    assert not stranger.imported
    command(monkeypatch, words[0], stranger.path, *words[1:], "--trust")
    assert stranger.imported


def test_what_the_user_names_now_needs_no_trust(stranger: Stranger) -> None:
    scores = fever.evaluate(stranger.path, env="tests.environments:InfoEnv", episodes=1)
    assert len(scores.returns) == 1
    assert not stranger.imported


def test_a_registered_id_needs_no_trust(trained: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(trained["folder"] / trained["run"], tmp_path / "theirs")
    assert not (tmp_path / "theirs" / layout.SIGNATURE).exists()
    assert len(fever.evaluate(tmp_path / "theirs", episodes=1, max_steps=5).returns) == 1


def test_nothing_is_sent_with_the_users_login_without_trust(stranger: Stranger) -> None:
    stranger.change(env="CartPole-v1", loggers=["wandb"])
    with pytest.raises(FeverError, match="wants to import wandb; if you know who wrote it, add --trust"):
        fever.resume(stranger.path)


def test_every_name_is_in_the_sentence(stranger: Stranger) -> None:
    settings = yaml.safe_load((stranger.path / layout.CONFIG).read_text())["settings"]
    stranger.change(
        algo="evil_code:Algo", callbacks=['evil_code:Watch={"a": 1}'], settings={**settings, "network": "evil_code:Net"}
    )
    names = "evil_code:Algo and evil_code:Env and evil_code:Watch and evil_code:Net;"
    with pytest.raises(FeverError, match=names):
        fever.resume(stranger.path, stop={"iterations": 7})
    assert not stranger.imported


def test_a_network_in_a_manifest_needs_trust(stranger: Stranger) -> None:
    stranger.change(env="CartPole-v1")
    stranger.change_manifests(lambda manifest: manifest["policy"]["network"].update(custom="evil_code:Net"))
    for call in (fever.load, CALLS["evaluate"], lambda run: Run.open(run).checkpoint().policy()):
        with pytest.raises(FeverError, match="wants to import evil_code:Net;"):
            call(stranger.path)
    assert not stranger.imported


def test_a_manifest_that_says_rllib_needs_trust(stranger: Stranger) -> None:
    stranger.change(algo="rllib:evil_code:Algo", settings={"callbacks_class": "evil_code.Watch"})
    stranger.change_manifests(lambda manifest: manifest.update(algo="rllib:PPO"))
    for call in (fever.load, CALLS["evaluate"]):
        with pytest.raises(FeverError) as caught:
            call(stranger.path)
        for name in ("evil_code:Algo", "evil_code:Env", "evil_code.Watch"):
            assert name in str(caught.value)
    assert not stranger.imported


def test_a_search_needs_trust(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger.change(search={"space": {"network": "choice('evil_code:A','evil_code:B')"}}, algo="evil_code:Algo")
    shutil.rmtree(stranger.path / layout.CHECKPOINTS)
    assert command(monkeypatch, "resume", stranger.path) == 2
    assert command(monkeypatch, "resume", stranger.path, "--on", "slurm", "--dry-run") == 2
    assert not stranger.imported


HIDDEN = [  # expressions whose values name evil_code:A
    'choice("evil_code\\x3aA")', 'choice("evil_code" ":A")', "choice(tanh, [{a: 'evil_code\\N{COLON}A'}])",
    'choice("""evil_code:A""")',
]  # fmt: skip


@pytest.mark.parametrize("text", HIDDEN)
def test_no_spelling_hides_a_name_in_a_search(
    stranger: Stranger, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger.change(env="CartPole-v1", search={"space": {"network": text}})
    shutil.rmtree(stranger.path / layout.CHECKPOINTS)
    assert command(monkeypatch, "resume", stranger.path) == 2
    assert "wants to import evil_code:A;" in capsys.readouterr().err
    assert not stranger.imported


@pytest.mark.parametrize("text", ["choice('ä.b:C')", 'choice(" x:y")', "choice('a:ä')"])
def test_names_of_all_letters_are_names(text: str) -> None:
    config = RunConfig(env="CartPole-v1", search=Search(space={"network": text}))
    assert trust.names_in(config) == [text.removeprefix("choice(")[1:-2]]


@pytest.mark.parametrize(
    "text", ["choice(a:b)", "choice('a:b'", "choice(f'a:b')", "choice(__import__('a'))", "a:b", ""]
)
def test_a_search_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(FeverError, match="cannot be searched"):
        trust.names_in(RunConfig(env="CartPole-v1", search=Search(space={"network": text})))


def test_a_job_is_not_submitted_without_trust(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "resume", stranger.path, "--stop-iterations", "7", "--on", "slurm", "--dry-run") == 2
    assert "wants to import evil_code:Env" in capsys.readouterr().err
    assert not stranger.imported


def test_looking_at_a_run_imports_nothing(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = yaml.safe_load((stranger.path / layout.CONFIG).read_text())["settings"]
    stranger.change(algo="evil_code:A", callbacks=["evil_code:C"], settings={**settings, "network": "evil_code:N"})
    for words in (
        ("show",),
        ("show", "--json"),
        ("plot",),
        ("plot", "--by", "algo"),
        ("export",),
        ("export", "--onnx"),
    ):
        assert command(monkeypatch, words[0], stranger.path, *words[1:]) == 0
    assert command(monkeypatch, "runs", "--runs", stranger.path.parent) == 0
    stranger.change_manifests(lambda manifest: manifest["policy"]["network"].update(custom="evil_code:Net"))
    assert command(monkeypatch, "export", stranger.path, "--to", "other") == 2
    assert not stranger.imported


def test_weights_of_a_stranger_import_nothing(stranger: Stranger) -> None:
    small = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 2}
    fever.train("tests.environments:InfoEnv", start_from=stranger.path, stop={"iterations": 1}, **small)
    assert not stranger.imported


def test_terminal_codes_in_a_name_are_not_printed(stranger: Stranger) -> None:
    stranger.change(env="evil\x1b[2Jcode:Env")
    with pytest.raises(FeverError, match=r"import evil\?\[2Jcode:Env;"):
        fever.evaluate(stranger.path)


# the signature


def test_a_signature_cannot_be_forged(stranger: Stranger, result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    own = json.loads((result.run.path / layout.SIGNATURE).read_text())
    signature = stranger.path / layout.SIGNATURE
    for forged in (
        own,  # copied, for another name
        {**own, "names": ["evil_code:Env"]},
        {**own, "names": [*own["names"], "evil_code:Env"]},
        {"names": ["evil_code:Env"], "hmac": ""},
        {"names": ["evil_code:Env"], "hmac": None},
        {"names": "evil_code:Env"},
        ["evil_code:Env"],
    ):
        signature.write_text(json.dumps(forged))
        with pytest.raises(FeverError, match="wants to import evil_code:Env"):
            fever.evaluate(stranger.path)
    config = Run(stranger.path).config
    with monkeypatch.context() as other:  # their key
        other.setenv("FEVER_HOME", str(stranger.path.parent / "their_home"))
        trust.sign(stranger.path, config)
        trust.require(stranger.path, ["evil_code:Env"], False)
    with pytest.raises(FeverError, match="wants to import evil_code:Env"):
        fever.evaluate(stranger.path)
    assert not stranger.imported
    trust.sign(stranger.path, config)  # ours
    fever.evaluate(stranger.path, episodes=1)


def test_a_file_system_that_shows_another_owner_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS with all_squash, CIFS and sshfs do."""
    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "home"))
    run = Run.create(config_of(tmp_path).model_copy(update={"name": "a"}), {})
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    trust.require(run.path, ["my_envs:Grid"], False)


def test_a_key_that_others_may_have_written_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "home"))
    run = Run.create(config_of(tmp_path).model_copy(update={"name": "a"}), {})
    key = trust.records("key")
    for mode, accepted in ((0o600, True), (0o620, False), (0o602, False), (0o640, False), (0o604, False)):
        key.chmod(mode)
        assert (trust._key() is not None) is accepted, oct(mode)
    key.chmod(0o620)
    with pytest.raises(FeverError, match="no record that it was made on this account"):
        trust.require(run.path, ["my_envs:Grid"], False)
    key.chmod(0o600)
    if os.geteuid() == 0:  # only root can give files away
        os.chown(key, 12345, 12345)
        assert trust._key() is None


def test_a_name_changed_by_hand_is_signed_by_resuming_with_trust(stranger: Stranger) -> None:
    fever.resume(stranger.path, stop={"iterations": 7}, trust=True)
    fever.evaluate(stranger.path, episodes=1)  # asks no more


def test_a_finished_run_asks_once(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("eval", stranger.path, "--episodes", "1")
    assert [command(monkeypatch, *words, *more) for more in ([], ["--trust"], [])] == [2, 0, 0]
    capsys.readouterr()
    stranger.change(env="evil_code:Other")
    assert command(monkeypatch, *words) == 2
    assert "wants to import evil_code:Other" in capsys.readouterr().err


def test_the_key_is_the_users_alone_and_the_same_for_all(tmp_path: Path) -> None:
    code = "import sys; from fever.runs.trust import _key; sys.stdin.read(1); print(_key(make=True).hex())"
    variables = {**os.environ, "FEVER_HOME": str(tmp_path / "home")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racing = [subprocess.Popen([sys.executable, "-c", code], env=variables, **pipes) for _ in range(4)]
    assert len({process.communicate("\n", timeout=60)[0] for process in racing}) == 1
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["key"]
    assert (tmp_path / "home" / "key").stat().st_mode & 0o777 == 0o600


def test_without_a_home_runs_train_and_ask(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "file" / "home"))
    run = Run.create(result.run.config.model_copy(update={"runs": str(tmp_path), "name": "b"}), {})
    assert not (run.path / layout.SIGNATURE).exists()
    run.require_trust(["tests.environments:InfoEnv"])  # made by this process
    with pytest.raises(FeverError, match="add --trust"):
        Run(run.path).require_trust(["tests.environments:InfoEnv"])


# other machines


def config_of(runs: Path) -> RunConfig:
    return RunConfig(env="my_envs:Grid", runs=str(runs), callbacks=("my_calls:One",))


def test_a_job_signs_where_it_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is made on another machine, with another key, and fetched."""
    here, there = tmp_path / "here" / "a", tmp_path / "there" / "a"
    prepare(config_of(here.parent), Slurm(kind="slurm"), here, [])
    shutil.copytree(here, there)
    with monkeypatch.context() as other:
        other.setenv("FEVER_HOME", str(tmp_path / "their_home"))
        other.setenv("FEVER_JOB", str(there / layout.JOB))
        made = Run.create(config_of(there.parent).model_copy(update={"name": "a"}), {})
        trust.sign(made.job, config_of(there.parent))
    exchange = Exchange(answer)
    Mirror(here, str(there), exchange, exchange).pull()
    assert (here / layout.CONFIG).is_file()
    trust.require(here, ["my_envs:Grid", "my_calls:One"], False)
    with pytest.raises(FeverError, match="wants to import other:Name"):  # which that machine has slipped in
        trust.require(here, ["my_envs:Grid", "other:Name"], False)


def test_a_refused_submission_leaves_no_signature(tmp_path: Path) -> None:
    from fever.launch.jobs import undo_for

    run = Run.create(config_of(tmp_path).model_copy(update={"name": "a"}), {})
    undo = undo_for(run.path)
    prepare(config_of(tmp_path), Slurm(kind="slurm"), run.path, [])
    assert (JobFolder.of(run.path).path / layout.SIGNATURE).is_file()
    undo()
    assert not run.job.exists()


def test_trials_are_covered_by_their_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = Run.create(config_of(tmp_path).model_copy(update={"name": "s"}), {})
    trial = search.path / layout.TRIALS / "0001"
    trial.mkdir(parents=True)
    trust.require(trial, ["my_envs:Grid"], False)
    monkeypatch.chdir(trial.parent)
    trust.require(Path("0001"), ["my_envs:Grid"], False)
    with pytest.raises(FeverError, match="wants to import other:Name"):
        trust.require(trial, ["other:Name"], False)


@pytest.mark.parametrize("text", ["os.system", "runs/theirs/1.json", "os\\u002esystem", "a:b", "settings.yaml"])
def test_whatever_rllib_may_take_for_a_name_is_one(text: str) -> None:
    config = RunConfig(env="CartPole-v1", algo="rllib:PPO", settings={"policy_mapping_fn": {"type": text}, "lr": 0.5})
    assert trust.names_in(config) == [text]
    searched = Search(space={"type": f"choice(1, [{{a: {text!r}}}])"})
    assert trust.names_in(config.model_copy(update={"settings": {}, "search": searched})) == [text]


def test_recorded_episodes_of_a_stranger_need_trust(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """RLlib unpickles them, and no checkpoint has to be there for that."""
    stranger.change(env="CartPole-v1", algo="rllib:BC", settings={"input_": "recorded", "num_epochs": 1}, search=None)
    shutil.rmtree(stranger.path / layout.CHECKPOINTS)
    assert command(monkeypatch, "resume", stranger.path) == 2
    assert "wants to import recorded;" in capsys.readouterr().err
    with pytest.raises(FeverError, match="wants to import recorded;"):
        fever.resume(stranger.path)
    trust.sign(stranger.path, Run(stranger.path).config)
    trust.require(stranger.path, trust.names_to_train(Run(stranger.path).config), False)


def test_a_key_that_a_crash_left_empty_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEVER_HOME", str(tmp_path))
    path = trust.records("key")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert trust._key() is None
    assert len(trust._key(make=True) or b"") == trust.KEY_BYTES
    assert trust._key() == trust._key(make=True)
    assert [one.name for one in path.parent.iterdir()] == ["key"]


def test_a_key_is_made_where_the_file_system_has_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setenv("FEVER_HOME", str(tmp_path))
    monkeypatch.setattr(os, "link", refuse)
    assert trust._key(make=True) == trust._key() is not None
    assert [one.name for one in trust.records("key").parent.iterdir()] == ["key"]
