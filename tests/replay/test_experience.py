"""Experience in one process: the ratio, the warm-up, and the replay buffer in a run directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import fever
from fever.algos.base import SamplingContext
from fever.algos.dqn import DQN, DQNConfig
from fever.envs.source import EnvSource
from fever.errors import DamagedError, FeverError
from fever.files import SEAL, sealed, sha256
from fever.replay.experience import LocalExperience
from fever.replay.make import make_experience
from fever.replay.saved import load_shards, save_shards
from fever.runs.run import Run
from fever.signals import Interrupts, interruptible
from fever.training.resume import resume
from tests.factories import make_task

TINY = {
    "envs": 2, "hidden": (8,), "batch": 16, "updates": 4, "replay_ratio": 8.0, "warmup": 50, "buffer": 500,
    "report_steps": 100, "n_step": 3,
}  # fmt: skip


def start(folder: Path, generation: int = 0, env: str = "CartPole-v1", **settings: Any) -> Any:
    """An experience in this process, with weights published; draws of 32 transitions, unless the settings say else."""
    settings = {"hidden": (8,), "batch": 16, "updates": 2, "warmup": 100, "buffer": 400, "n_step": 3, **settings}
    algorithm = DQN(DQNConfig(**settings), make_task(env))
    experience = algorithm.start(SamplingContext(EnvSource(env), folder, generation))
    experience.publish(algorithm.weights(), 0, np.full(2, 0.5))
    return experience


# The ratio.


@pytest.mark.parametrize("ratio", [0.5, 4.0, 32.0, 100.0])
def test_the_ratio_is_held_after_the_warm_up(ratio: float, tmp_path: Path) -> None:
    experience = start(tmp_path, replay_ratio=ratio)
    assert isinstance(experience, LocalExperience)
    draws = 0
    for _ in range(2000):
        before = experience.added
        draw = experience.draw()
        if before < 100:
            assert draw is None or experience.added > 100
        if draw is not None:
            draws += 1
            assert len(draw.batch.rewards) == 32
            assert experience.added > 100
        assert experience.drawn == 32 * draws
        assert experience.drawn <= ratio * max(0, experience.added - 100)
        if draws and experience.added > 100 + 40 / ratio:  # what is owed is never more than one call's steps give
            steps = experience.steps * 2
            assert experience.owed() < 32 + ratio * steps
        if draws == 60:
            break
    assert draws == 60
    assert experience.drawn / (experience.added - 100) == pytest.approx(ratio, rel=0.15)


def test_nothing_is_drawn_before_the_warm_up_is_over(tmp_path: Path) -> None:
    experience = start(tmp_path, warmup=200, replay_ratio=4.0)
    while experience.added <= 200:
        assert experience.drawn == 0
        if experience.draw() is not None:
            break
    assert experience.added > 200
    assert experience.buffer.size == experience.added
    without = start(tmp_path, warmup=0, replay_ratio=4.0)
    draws = [without.draw() for _ in range(8)]
    assert draws[0] is None  # no transition of three steps is known yet, or too few for a draw
    assert any(draw is not None for draw in draws)


def test_all_that_was_done_is_reported_once(tmp_path: Path) -> None:
    experience = start(tmp_path)
    for _ in range(40):
        experience.draw()
    reports = experience.take_reports()
    steps = sum(report.steps for report in reports)
    phantoms_and_unripe = experience.explorer.carried["valid"].sum()
    assert steps == experience.added + phantoms_and_unripe
    assert sum(len(report.episodes) for report in reports) > 0
    assert experience.take_reports() == []
    assert {report.version for report in reports} == {0}


def test_a_signal_cuts_no_block_in_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experience = start(tmp_path)
    add = experience.buffer.add

    def interrupted(block: Any) -> int:
        count = add(block)
        if count:
            signal.raise_signal(signal.SIGINT)
        return count

    monkeypatch.setattr(experience.buffer, "add", interrupted)
    with Interrupts(held=True), pytest.raises(KeyboardInterrupt), interruptible():  # noqa: PT012 - some add nothing yet
        for _ in range(100):
            experience.draw()
    assert experience.added == experience.buffer.arrays()["counters"][1] > 0


def test_new_weights_and_epsilons_act_from_the_next_draw_on(tmp_path: Path) -> None:
    experience = start(tmp_path)
    experience.draw()
    experience.publish(experience.params, 17, np.zeros(2))
    while not any(report.version == 17 for report in experience.take_reports()):
        experience.draw()
    assert experience.version == 17


def test_new_priorities_change_what_is_drawn(tmp_path: Path) -> None:
    experience = start(tmp_path, replay_ratio=4.0)
    while (draw := experience.draw()) is None:
        pass
    errors = np.zeros(len(draw.batch.serials))
    experience.buffer.update(np.arange(experience.added), np.zeros(experience.added))
    errors[0] = 1e3
    experience.update(draw, errors)
    chosen = draw.batch.serials[0]
    last = errors[draw.batch.serials == chosen][-1]  # where it was drawn more than once, the last one counts
    share = (experience.buffer.sample(experience.rng, 500).serials == chosen).mean()
    assert share > 0.9 if last else share < 0.5


def test_measures_are_those_of_the_buffer(tmp_path: Path) -> None:
    experience = start(tmp_path)
    assert experience.measure()["buffer_fill"] == 0
    assert re.fullmatch(r"replay buffer: 400 transitions, \d+ kB when full", experience.description)
    for _ in range(300):
        experience.draw()
    assert experience.measure()["buffer_fill"] == min(1.0, experience.added / 400)
    assert experience.measure()["priority_mean"] > 0


def test_the_same_start_gives_the_same_draws_and_another_start_others(tmp_path: Path) -> None:
    def draws(generation: int) -> np.ndarray:
        experience = start(tmp_path, generation)
        found = [draw for draw in (experience.draw() for _ in range(60)) if draw is not None]
        return np.concatenate([draw.batch.observations for draw in found])

    np.testing.assert_array_equal(draws(0), draws(0))
    assert not np.isin(draws(1), draws(0)).all()


# Saving.


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    experience = start(tmp_path)
    while experience.added < 450:  # the ring has gone round
        draw = experience.draw()
        if draw is not None:
            experience.update(draw, np.linspace(0, 3, 32))
    experience.save(tmp_path / "replay")
    other = start(tmp_path, generation=1)
    other.restore(tmp_path / "replay")
    assert (other.added, other.drawn) == (experience.added, experience.drawn)
    here, there = experience.buffer.arrays(), other.buffer.arrays()
    assert here.keys() == there.keys()
    for name, array in here.items():
        np.testing.assert_array_equal(array, there[name], err_msg=name)
    assert other.owed() == experience.owed()
    before = other.added
    for _ in range(20):
        other.draw()
    assert other.added > before
    assert other.measure()["buffer_fill"] == 1
    assert len(list((tmp_path / "replay").iterdir())) == 2  # one shard and the manifest


def test_saving_again_replaces_what_was_saved(tmp_path: Path) -> None:
    experience = start(tmp_path)
    for _ in range(2):
        for _ in range(20):
            experience.draw()
        experience.save(tmp_path / "replay")
    assert load_shards(tmp_path / "replay", 1)[1:] == (experience.added, experience.drawn)


@pytest.mark.parametrize("damage", ["cut", "garbage", "missing", "foreign"])
def test_a_damaged_buffer_is_one_sentence(damage: str, tmp_path: Path) -> None:
    experience = start(tmp_path)
    experience.draw()
    folder = tmp_path / "replay"
    experience.save(folder)
    (file,) = folder.glob("shard-0-*")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "garbage":
        file.write_bytes(b"nothing that was ever saved")
    elif damage == "missing":
        file.unlink()
    else:
        from safetensors.numpy import save_file

        save_file({"something": np.zeros(3)}, file)
    sentence = re.escape(f"the saved replay buffer is damaged: {file}")
    with pytest.raises(DamagedError, match=f"^{sentence}$"):
        start(tmp_path, generation=1).restore(folder)


def test_another_number_of_shards_is_one_sentence(tmp_path: Path) -> None:
    experience = start(tmp_path)
    experience.draw()
    arrays = {name: array.copy() for name, array in experience.buffer.arrays().items()}
    save_shards(tmp_path / "two", [arrays, arrays], 2, 60, 32)
    sentence = re.escape(f"{tmp_path / 'two'} holds 2 shards of a replay buffer, not replay_shards=1")
    with pytest.raises(FeverError, match=f"^{sentence}$"):
        experience.restore(tmp_path / "two")
    save_shards(tmp_path / "one", [arrays], 1, 60, 32)
    with pytest.raises(FeverError, match="holds 1 shards of a replay buffer, not replay_shards=2"):
        load_shards(tmp_path / "one", 2)
    assert load_shards(tmp_path / "two", 2)[1:] == (60, 32)


def test_shards_are_written_one_at_a_time(tmp_path: Path) -> None:
    seen: list[weakref.ref[np.ndarray]] = []

    def fetch() -> dict[str, np.ndarray]:
        assert all(one() is None for one in seen)
        array = np.arange(3)
        seen.append(weakref.ref(array))
        return {"frames": array}

    save_shards(tmp_path / "replay", (fetch() for _ in range(3)), 3, 60, 32)
    shards, *counters = load_shards(tmp_path / "replay", 3)
    assert counters == [60, 32]
    assert [arrays["frames"].tolist() for arrays in shards] == [[0, 1, 2]] * 3


def test_a_buffer_of_another_size_is_one_sentence(tmp_path: Path) -> None:
    experience = start(tmp_path)
    experience.draw()
    experience.save(tmp_path / "replay")
    with pytest.raises(FeverError, match="holds 400 transitions, this one holds 500"):
        start(tmp_path, buffer=500).restore(tmp_path / "replay")


# In a run directory.


def train(folder: Path, **settings: Any) -> Run:
    return fever.train("CartPole-v1", "dqn", runs=folder, stop={"steps": 300}, **(TINY | settings)).run


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has met its stop rule."""
    return train(tmp_path_factory.mktemp("stopped")).path


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Run:
    """A copy of that run, to go on with."""
    return Run(Path(shutil.copytree(stopped, tmp_path / "copy")))


def go_on(run: Run, steps: int) -> list[dict[str, Any]]:
    """Resume a run; returns the rows of metrics that came to it."""
    before = len(run.metrics())
    stop = run.config.stop.model_copy(update={"steps": steps})
    resume(run, run.config.model_copy(update={"stop": stop}))
    return run.metrics()[before:]


def test_a_resumed_run_has_its_buffer(run: Run) -> None:
    _, added, drawn = load_shards(run.path / "replay", 1)
    assert added >= 290
    assert drawn > 0
    rows = go_on(run, 400)
    assert rows[0]["buffer_fill"] > added / 500
    assert rows[0]["updates"] > 0  # no new warm-up
    (arrays,), again, more = load_shards(run.path / "replay", 1)
    assert again >= added + 90
    assert more > drawn
    assert arrays["counters"].tolist()[:2] == [500, again]


def test_a_run_whose_buffer_is_damaged_says_so_and_goes_on_without_it(run: Run) -> None:
    (file,) = (run.path / "replay").glob("shard-0-*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    rows = go_on(run, 400)
    assert rows[0]["buffer_fill"] < 0.5
    assert rows[-1]["steps"] >= 400
    assert f"the saved replay buffer is damaged: {file}" in (run.path / "log.txt").read_text()
    assert load_shards(run.path / "replay", 1)[1] < 200  # filled anew, and whole


def test_a_run_without_its_buffer_says_so(run: Run) -> None:
    shutil.rmtree(run.path / "replay")
    assert go_on(run, 400)[0]["buffer_fill"] < 0.5
    assert "no replay buffer was saved" in (run.path / "log.txt").read_text()


def test_a_kill_while_the_buffer_is_saved_leaves_the_old_one(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "replay"
    save_shards(folder, [{"a": np.arange(3)}] * 2, 2, 60, 32)
    for step in ("flush_to_disk", "sha256", "write_atomically"):  # cut off after each; nothing is tidied after a kill
        with monkeypatch.context() as patch:
            patch.setattr(f"fever.replay.saved.{step}", lambda *_: os._exit(0))
            with warnings.catch_warnings(action="ignore"):  # JAX's: this child calls nothing of it
                child = os.fork()
            if child == 0:
                save_shards(folder, [{"a": np.zeros(9)}] * 2, 2, 99, 99)
            os.waitpid(child, 0)
        shards, *counters = load_shards(folder, 2)
        assert counters == [60, 32]
        assert [arrays["a"].tolist() for arrays in shards] == [[0, 1, 2]] * 2
    assert len(list(folder.iterdir())) > 3
    save_shards(folder, [{"a": np.zeros(9)}] * 2, 2, 99, 99)
    assert load_shards(folder, 2)[1:] == (99, 99)
    assert len(list(folder.iterdir())) == 3


def test_any_flipped_bit_of_a_saved_buffer_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "replay"
    save_shards(folder, [{"a": np.arange(40.0)}, {"a": np.ones(3)}], 2, 60, 32)
    rng = np.random.default_rng(0)
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        for bit in rng.choice(8 * len(content), 200):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            with pytest.raises(DamagedError):
                load_shards(folder, 2)
        file.write_bytes(content)
    assert load_shards(folder, 2)[1:] == (60, 32)


def test_a_run_need_not_keep_its_buffer(tmp_path: Path) -> None:
    run = train(tmp_path, save_replay=False)
    assert not (run.path / "replay").exists()
    assert run.metrics()[-1]["buffer_fill"] > 0.5


def test_a_buffer_that_cannot_fit_is_refused_and_leaves_nothing(fever: Callable[..., Any], tmp_path: Path) -> None:
    done = fever("train", "CartPole-v1", "--algo", "dqn", "buffer=100000000000")
    assert done.returncode == 2, done.stderr
    said = r"fever: the replay buffer of 100,000,000,000 transitions needs [\d.]+ GB, but [\d.]+ GB are free; "
    assert re.fullmatch(rf"{said}buffer=\d+ would fit\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_block_larger_than_the_buffer_is_refused_in_one_sentence(fever: Callable[..., Any], tmp_path: Path) -> None:
    done = fever("train", "CartPole-v1", "--algo", "dqn", "buffer=5", "--stop-steps", "500", "--json")
    if done.returncode == 0:  # it was made to fit
        assert json.loads(done.stdout.splitlines()[-1])["steps"] >= 500
    else:
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert list(tmp_path.iterdir()) == []


def test_memory_is_looked_at_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experience = start(tmp_path)
    monkeypatch.setattr("fever.replay.buffer.free_memory", lambda: 1000)
    monkeypatch.setattr("fever.replay.make.LocalExperience", lambda *arguments: pytest.fail("it was made"))
    with pytest.raises(FeverError, match="not even one transition would fit"):
        make_experience(experience.spec, 0, 0)


def test_shards_are_held_against_the_machines_that_they_are_spread_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(start(tmp_path).spec, shards=4)
    for module in ("make", "buffer"):
        monkeypatch.setattr(f"fever.replay.{module}.free_memory", lambda: spec.replay.bytes * 3 // 2)
    monkeypatch.setattr("fever.replay.make.RayExperience", lambda *arguments: "made")
    for machines in (1, 2, 3):
        monkeypatch.setattr("fever.replay.make.machines_in_reach", lambda count=machines: [2.0] * count)
        with pytest.raises(FeverError, match=r"the replay buffer of 1,600 transitions needs .* would fit"):
            make_experience(spec, 4, 0)
    monkeypatch.setattr("fever.replay.make.machines_in_reach", lambda: [2.0] * 4)
    assert make_experience(spec, 4, 0) == "made"


# a saved buffer that somebody else has written


def crafted(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A saved buffer whose manifest was changed and sealed again."""
    experience = start(folder)
    for _ in range(40):
        experience.draw()
    experience.save(folder / "replay")
    file = folder / "replay" / "manifest.json"
    manifest = {name: value for name, value in json.loads(file.read_text()).items() if name != SEAL}
    change(manifest)
    file.write_text(sealed(manifest))
    return folder / "replay"


MANIFESTS: list[dict[str, Any]] = [
    {"sha256": None}, {"sha256": 3}, {"sha256": ["x"]}, {"sha256": {"a\0b": ""}}, {"sha256": {"../a": ""}},
    {"sha256": {"shard-0.safetensors": 3}}, {"added": "x"}, {"added": None}, {"added": -5}, {"added": True},
    {"added": 10**30}, {"drawn": -1}, {"drawn": 1.5}, {"format": None}, {"format": []},
]  # fmt: skip


@pytest.mark.parametrize("values", MANIFESTS, ids=str)
def test_a_manifest_that_was_not_written_by_fever_is_damage(tmp_path: Path, values: dict[str, Any]) -> None:
    folder = crafted(tmp_path, lambda manifest: manifest.update(values))
    experience = start(tmp_path)
    with pytest.raises(DamagedError, match="the saved replay buffer is damaged: "):
        experience.restore(folder)
    assert (experience.added, experience.drawn, experience.buffer.size) == (0, 0, 0)


ARRAYS: dict[str, Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]] = {
    "one row": lambda arrays: {name: array[:1] for name, array in arrays.items()},
    "no row": lambda arrays: {name: array[:0] for name, array in arrays.items()},
    "fewer rewards": lambda arrays: {**arrays, "rewards": arrays["rewards"][:-1]},
    "not a number": lambda arrays: {**arrays, "frames": arrays["frames"] * np.nan},
    "pointers": lambda arrays: {**arrays, "pointers": arrays["pointers"] + 10**6},
    "oldest": lambda arrays: {**arrays, "oldest": arrays["oldest"] - 10**6},
    "priorities": lambda arrays: {**arrays, "priorities": arrays["priorities"] * 0},
    "counters": lambda arrays: {**arrays, "counters": -arrays["counters"]},
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_no_buffer_has_are_damage(tmp_path: Path, name: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        for file in (tmp_path / "replay").glob("*.safetensors"):
            arrays = ARRAYS[name](load_file(file))
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, file)
            manifest["sha256"][file.name] = sha256(file)

    experience = start(tmp_path)
    with pytest.raises(DamagedError, match="the saved replay buffer is damaged: no buffer has such"):
        experience.restore(crafted(tmp_path, change))
    assert (experience.added, experience.drawn, experience.buffer.size) == (0, 0, 0)


@pytest.mark.parametrize("counters", [{"added": 10**15}, {"drawn": 10**15}], ids=str)
def test_counters_that_do_not_fit_each_other_end_neither_learning_nor_exploring(
    tmp_path: Path, counters: dict[str, int]
) -> None:
    experience = start(tmp_path)
    experience.restore(crafted(tmp_path, lambda manifest: manifest.update(counters)))
    spec = experience.spec
    assert abs(experience.owed()) <= spec.ratio * (experience.capacity + spec.warmup) + spec.draw + 1
