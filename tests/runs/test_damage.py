"""Damaged checkpoints, older and later formats, and what is in a run directory that fever did not make."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fever
from fever.config import RunConfig
from fever.errors import DamagedError, FeverError
from fever.files import SEAL, read_sealed, sealed
from fever.runs.checkpoint import FORMAT
from fever.runs.run import Run
from tests.helpers import run_fever

FORMATS = sorted(path.name for path in (Path(__file__).parent / "formats").iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with checkpoints 1 (the best), 2 and 3."""
    run = Run.create(RunConfig(env="X-v0", runs=str(tmp_path), name="a"), {})
    for iteration, score in enumerate([9.0, 1.0, 2.0], start=1):
        save(run, iteration, score)
    return run


def save(run: Run, iteration: int, score: float | None = None, keep: int = 3) -> Path:
    manifest = {
        "iteration": iteration,
        "score": score,
        "algo": "ppo",
        "steps": 100 * iteration,
        "trainer": {"a": 1e-05},
    }
    return run.save_checkpoint({"x": np.full(3, float(iteration))}, manifest, keep)


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def folder(run: Run, iteration: int) -> Path:
    return run.path / "checkpoints" / f"{iteration:08d}"


def names(run: Run) -> list[str]:
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


@pytest.mark.parametrize("file", ["manifest.json", "arrays.safetensors"])
def test_the_newest_whole_checkpoint_is_taken_in_place_of_a_damaged_one(run: Run, file: str) -> None:
    flip(folder(run, 3) / file, 333)
    chosen = run.checkpoint()
    assert (chosen.iteration, chosen.arrays()["x"][0]) == (2, 2.0)
    assert chosen.note.startswith(f"checkpoint 00000003 is damaged ({file} ")
    assert " and " not in chosen.note
    assert (run.checkpoint("1").iteration, run.checkpoint("1").note) == (1, "")
    assert run.checkpoint("best").iteration == 1
    flip(folder(run, 1) / file, 333)
    assert run.checkpoint("best").iteration == 2
    with pytest.raises(DamagedError, match=r"checkpoint 00000003 of .*a is damaged \(.*\); these are whole: 2$"):
        run.checkpoint("3")
    flip(folder(run, 2) / file, 333)
    with pytest.raises(DamagedError, match=r"^all checkpoints of .* are damaged: 00000001 .*; nothing was deleted$"):
        run.checkpoint()
    assert names(run) == ["00000001", "00000002", "00000003"]


def test_any_flipped_bit_of_a_checkpoint_is_noticed(run: Run) -> None:
    rng = np.random.default_rng(1)
    for file in (folder(run, 3) / "manifest.json", folder(run, 3) / "arrays.safetensors"):
        whole = file.read_bytes()
        for bit in rng.choice(8 * len(whole), 250):
            flip(file, int(bit))
            assert run.checkpoint().iteration == 2, f"bit {bit} of {file.name}"
            file.write_bytes(whole)
    assert run.checkpoint().iteration == 3


def test_another_text_of_the_same_values_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    file.write_text(sealed({"format": 2, "rate": 1e-05, "name": "é"}))
    assert read_sealed(file) == {"format": 2, "rate": 1e-05, "name": "é"}
    for old, new in (("1e-05", "1E-05"), ("\\u00e9", "\\u00E9"), ('"rate"', ' "rate"')):
        text = file.read_text()
        file.write_text(text.replace(old, new))
        assert file.read_text() != text
        with pytest.raises(DamagedError, match="has changed"):
            read_sealed(file)
        file.write_text(text)


def test_a_damaged_checkpoint_goes_when_newer_ones_are_whole(run: Run) -> None:
    flip(folder(run, 1) / "manifest.json", 333)
    flip(folder(run, 3) / "manifest.json", 333)
    save(run, 4, keep=2)
    assert names(run) == ["00000002", "00000003", "00000004"]  # 2 and 4 are the last two that can be read
    save(run, 5, 3.0, keep=2)
    assert names(run) == ["00000004", "00000005"]


def test_a_checkpoint_of_the_same_iteration_is_there_until_its_successor_is(run: Run, monkeypatch: Any) -> None:
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name.startswith(".partial"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save(run, 3)
    monkeypatch.undo()
    assert names(run) == [".replaced-00000003", "00000001", "00000002"]
    assert (run.checkpoint().iteration, run.checkpoint().arrays()["x"][0]) == (3, 3.0)
    assert run.checkpoint("3").iteration == 3
    save(run, 3)
    assert names(run) == ["00000001", "00000002", "00000003"]


def test_folders_of_others_stay_and_do_not_count(run: Run) -> None:
    others = ["99-notes", "123", "00000002.old", "notes", ".partial-x", ".dropped-me"]
    for name in others:
        (run.path / "checkpoints" / name).mkdir()
        (run.path / "checkpoints" / name / "arrays.safetensors").touch()
    for number in (2, 50):  # the names of ours, with files of others
        shutil.rmtree(folder(run, number), ignore_errors=True)
        folder(run, number).mkdir()
        (folder(run, number) / "diary.txt").touch()
    assert [one.iteration for one in run.checkpoints()] == [1, 3]
    save(run, 2, keep=1)
    assert run.checkpoint().iteration == 2
    assert (run.path / "checkpoints" / "00000002.found" / "diary.txt").exists()
    assert {*others, "00000050", "00000001", "00000002"} <= set(names(run))
    assert "00000003" not in names(run)


def test_a_number_that_no_checkpoint_has_is_not_one(run: Run) -> None:
    theirs = run.path / "checkpoints" / ("1" * 255)
    shutil.copytree(folder(run, 3), theirs)
    assert [one.iteration for one in run.checkpoints()] == [1, 2, 3]
    save(run, 4)  # a longer name for a folder that is to be deleted would not be possible
    assert run.checkpoint().iteration == 4
    assert theirs.exists()


def test_a_later_format_is_refused(run: Run) -> None:
    file = folder(run, 3) / "manifest.json"
    file.write_text(sealed({**read_sealed(file), "format": FORMAT + 1}))
    for which in ("last", "best", "3"):
        with pytest.raises(
            FeverError, match=r"00000003 was written by a later version of fever \(format 3; .* knows 2"
        ):
            run.checkpoint(which)
    assert run.checkpoint("2").iteration == 2


@pytest.mark.parametrize("name", FORMATS)
def test_runs_of_all_formats_are_evaluated_and_resumed(name: str, tmp_path: Path) -> None:
    """The folders were written by the version of fever that had the format. Add one whenever it changes."""
    path = tmp_path / "a"
    shutil.copytree(Path(__file__).parent / "formats" / name, path)
    run = Run(path)
    before = run.checkpoint()
    assert fever.evaluate(path, episodes=2).returns.min() > 0
    result = fever.resume(path, stop={"steps": 128})
    assert (result.summary["steps"] >= 128, result.stop_reason) == (True, "steps")
    assert run.metrics()[-1]["iteration"] > before.iteration
    if "dqn" in name:
        assert run.metrics()[-1]["buffer_fill"] == 1.0  # 64 transitions of before came back: 64 more fill 64
        assert "damaged" not in (path / "log.txt").read_text()
    assert run.checkpoint().manifest["format"] == FORMAT


def test_every_format_has_a_folder() -> None:
    assert {int(name.partition("-")[0]) for name in FORMATS} == set(range(1, FORMAT + 1))


# Links, and directories of others.


LINKS = (
    "lock checkpoints replay metrics.jsonl log.txt work summary.json config.yaml trials events.out.tfevents.1.x.2 "
    "checkpoints/00000001 replay/manifest.json trackers/wandb.json"
)


@pytest.mark.parametrize("name", LINKS.split())
def test_a_link_in_a_run_directory_is_refused(run: Run, name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    path = run.path / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(outside)
    for _ in range(2):
        with pytest.raises(FeverError, match=rf"{name} is a symbolic link, which fever does not follow; remove it"):
            run.lock()
        outside.write_text("mine")
    with pytest.raises(FeverError, match="is a symbolic link"):
        run.to_write("curves.png")
    assert outside.read_text() == "mine"


def test_links_to_a_run_directory_and_links_of_others_in_it_are_fine(run: Run, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(run.path)
    (run.path / "notes.txt").symlink_to("/etc/passwd")
    other = Run(tmp_path / "elsewhere")
    other.lock()
    other.close()


def test_rows_are_not_appended_through_a_link(run: Run, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.touch()
    (run.path / "metrics.jsonl").symlink_to(outside)
    with pytest.raises(OSError, match="symbolic"):
        run.log({"iteration": 1})
    assert outside.read_text() == ""


def test_only_what_fever_made_is_discarded(run: Run, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (run.path / "work").symlink_to(outside)
    (run.path / "diary.txt").touch()
    (run.path / ".config.yaml.0123abcd").touch()  # left by a kill
    run.discard()
    assert sorted(path.name for path in run.path.iterdir()) == ["diary.txt", "work"]
    assert (outside / "precious").exists()


# From the command line.


def test_commands_fall_back_to_a_whole_checkpoint_and_say_so(tmp_path: Path) -> None:
    small = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 2, "hidden": [4]}
    run = fever.train("CartPole-v1", runs=tmp_path / "runs", name="a", stop={"iterations": 1}, **small).run
    fever.resume(run, stop={"iterations": 2})
    flip(folder(run, 2) / "arrays.safetensors", 999)
    note = "checkpoint 00000002 is damaged (arrays.safetensors has changed since it was written)"
    shown = run_fever("eval", "a", "--checkpoint", "last", "--episodes", "1", cwd=tmp_path)
    assert (shown.returncode, f"fever: {note}; using 00000001" in shown.stderr) == (0, True), shown.stderr
    with pytest.warns(UserWarning, match="is damaged .*; using 00000001$"):
        fever.load(run, "last")
    shown = run_fever("resume", "a", "--checkpoint", "2", cwd=tmp_path)
    assert (shown.returncode, "these are whole: 1" in shown.stderr, len(shown.stderr.splitlines())) == (2, True, 1)
    shown = run_fever("resume", "a", "--stop-iterations", "3", cwd=tmp_path)
    assert (shown.returncode, f"{note}; resuming from 00000001" in shown.stdout + shown.stderr) == (0, True), shown
    assert [row["iteration"] for row in run.metrics()] == [1, 2, 3]
    assert run.checkpoint().note == ""
    for path in run.path.glob("checkpoints/*"):
        flip(path / "manifest.json", 999)
    before = names(run)
    shown = run_fever("resume", "a", "--stop-iterations", "9", cwd=tmp_path)
    assert (shown.returncode, shown.stderr.startswith("fever: all checkpoints of")) == (2, True), shown.stderr
    assert names(run) == before


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    small = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 2, "hidden": [4]}
    run = fever.train("CartPole-v1", runs=tmp_path / "runs", name="a", stop={"iterations": 3}, **small).run
    curve = [row["return_mean"] for row in run.metrics() if "return_mean" in row]
    shutil.rmtree(run.path / "checkpoints")  # as after a kill in the first iteration
    shown = run_fever("train", "CartPole-v1", "--name", "a", cwd=tmp_path)
    assert (shown.returncode, "exists already" in shown.stderr) == (2, True)
    shown = run_fever("resume", "a", "--checkpoint", "best", cwd=tmp_path)
    assert (shown.returncode, "has no checkpoint yet" in shown.stderr) == (2, True)
    shown = run_fever("resume", "a", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "a has no checkpoint: it begins again from its configuration" in shown.stdout + shown.stderr
    assert [row["iteration"] for row in run.metrics()] == [1, 2, 3]
    assert [row["return_mean"] for row in run.metrics() if "return_mean" in row] == curve  # the same run, once more
    assert (run.status, run.checkpoint().iteration) == ("iterations", 3)


@pytest.mark.parametrize("name", ["/dev/zero", "../../config.yaml", "a\0b", "link"])
def test_names_in_a_manifest_do_not_lead_out_of_the_checkpoint(run: Run, name: str) -> None:
    """Hashing /dev/zero would take for ever."""
    place = folder(run, 3)
    (place / "link").symlink_to("/dev/zero")
    manifest = {key: value for key, value in read_sealed(place / "manifest.json").items() if key != SEAL}
    (place / "manifest.json").write_text(sealed({**manifest, "sha256": {**manifest["sha256"], name: "0"}}))
    with pytest.raises(DamagedError, match="is not a file of its own"):
        run.checkpoint("3")


def test_a_manifest_lists_the_arrays(run: Run) -> None:
    place = folder(run, 3)
    manifest = {key: value for key, value in read_sealed(place / "manifest.json").items() if key != SEAL}
    (place / "manifest.json").write_text(sealed({**manifest, "sha256": {}}))
    with pytest.raises(DamagedError, match="is not listed"):
        run.checkpoint("3")
