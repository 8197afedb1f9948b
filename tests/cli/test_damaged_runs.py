"""Commands on run directories whose files are damaged: a sentence, never a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

import fever
from fever.files import SEAL, sealed
from fever.runs.run import Run
from tests.helpers import call_fever

SMALL = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 2}
COMMANDS = (["show"], ["plot"], ["eval", "--episodes", "2", "--no-compare"], ["export"])
FILES = (
    "config.yaml", "facts.json", "summary.json", "metrics.jsonl", "episodes.jsonl", "episodes-old.jsonl.gz",
    "evaluations.jsonl", "lock", "job/job.json", "checkpoints/*/manifest.json", "checkpoints/*/arrays.safetensors",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with all kinds of files."""
    runs = tmp_path_factory.mktemp("trained")
    result = fever.train("tests.environments:InfoEnv", runs=runs, name="a", stop={"iterations": 2}, **SMALL)
    with contextlib.closing(Run(result.run.path)) as run:
        run.log_evaluation({"iteration": 2, "steps": 64, "return_mean": 1.0, "return_interval": None, "returns": [1.0]})
    return result.run.path


def call(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command, run in this process."""
    done = call_fever(*words)
    return done.returncode, done.stdout, done.stderr


def copy(trained: Path, runs: Path, name: str = "a") -> Path:
    shutil.rmtree(runs / name, ignore_errors=True)
    return Path(shutil.copytree(trained, runs / name))


VALUES: Any = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}),
    st.just(10**400), st.just("\x1b[31mred\x1b[0m"), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def paths_in(values: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every value in nested objects."""
    parts = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [way for key, part in parts for way in [(*before, key), *paths_in(part, (*before, key))]]


def changed(text: str, draw: Any, load: Any, dump: Any) -> str:
    """A text of JSON or YAML in which one value is removed or another one."""
    values = load(text)
    ways = paths_in(values)
    *parents, last = draw(st.sampled_from(ways))
    place = values
    for key in parents:
        place = place[key]
    if draw(st.booleans()):
        del place[last]
    else:
        place[last] = draw(VALUES)
    return dump(values)


@st.composite
def damage(draw: Any) -> Any:
    """A function that damages one file of a run directory; returns its description."""
    name, kind = draw(st.sampled_from(FILES)), draw(st.sampled_from(["bytes", "cut", "flip", "value", "folder"]))
    noise, place = draw(st.binary(max_size=60) | st.just(b"[" * 100_000)), draw(st.floats(0, 1))

    def apply(run: Path) -> str:
        path = max(run.glob(name), default=run / name)
        path.parent.mkdir(exist_ok=True)
        old = path.read_bytes() if path.exists() else b"{}\n"
        cut = int(place * len(old))
        new = {"bytes": noise, "cut": old[:cut], "flip": old[:cut] + noise + old[cut + len(noise) :]}.get(kind, old)
        if kind == "value" and len(old) > 5 and path.suffix in (".json", ".yaml", ".jsonl") and "manifest" not in name:
            yml = path.suffix == ".yaml"
            load, dump = (yaml.safe_load, yaml.safe_dump) if yml else (json.loads, json.dumps)
            lines = [old.decode()] if path.suffix != ".jsonl" else old.decode().splitlines()
            new = "\n".join([*lines[:-1], changed(lines[-1], draw, load, dump), ""]).encode()
        if kind == "folder":
            path.unlink(missing_ok=True)
            path.mkdir()
        else:
            path.write_bytes(new)
        return f"{kind} {name} {new[-300:]!r}"

    return apply


def check(code: int, out: str, err: str, what: str) -> None:
    assert code in (0, 1, 2), (what, code, err)
    assert "Traceback" not in err, f"{what}\n{err}"
    assert "\x1b" not in out + err, what
    if code == 2:
        assert err.startswith("fever: "), (what, err)
        assert len(err.splitlines()) == 1, (what, err)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(apply=damage(), command=st.sampled_from(COMMANDS))
def test_no_damage_of_a_run_directory_is_a_traceback(
    trained: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    apply: Any,
    command: list[str],
) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)  # takes half a second
    runs = tmp_path_factory.getbasetemp() / "damaged"
    run = copy(trained, runs)
    what = f"{command} after " + apply(run)
    check(*call(*command, "a", "--runs", str(runs)), what)
    code, out, err = call("runs", "--runs", str(runs))
    check(code, out, err, what)
    assert code == 0, (what, err)
    assert "a " in out, (what, out)


def test_a_damaged_run_is_one_line_and_the_others_are_listed(trained: Path, tmp_path: Path) -> None:
    for name in ("good", "yaml", "folder", "list", "loop", "mapping", "bytes"):
        copy(trained, tmp_path, name)
    (tmp_path / "yaml/config.yaml").write_text("env: [")
    (tmp_path / "folder/config.yaml").unlink()
    (tmp_path / "folder/config.yaml").mkdir()
    (tmp_path / "list/summary.json").write_text("[1]")
    (tmp_path / "loop/config.yaml").unlink()
    os.symlink("config.yaml", tmp_path / "loop/config.yaml")
    (tmp_path / "mapping/config.yaml").write_text("- 1")
    (tmp_path / "bytes/config.yaml").write_bytes(b"\x00\xff\x1b[31m")
    (tmp_path / "no-run").mkdir()
    code, out, err = call("runs", "--runs", str(tmp_path))
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert lines.keys() == {"run", "good", "yaml", "folder", "list", "loop", "mapping", "bytes"}
    assert "iter. limit" in lines["good"]
    assert lines["yaml"].startswith("yaml  damaged: config.yaml is not YAML")
    assert lines["folder"] == "folder  damaged: config.yaml cannot be read: Is a directory"
    assert lines["list"] == "list  damaged: summary.json is damaged: it does not hold a JSON object"
    assert "\x1b" not in out
    code, out, err = call("runs", "--runs", str(tmp_path), "--json")
    problems = {row["run"]: row["problem"] for row in json.loads(out)}
    assert problems["good"] is None
    assert "config.yaml" in problems["loop"]
    for name in problems.keys() - {"good", "list"}:
        for command in COMMANDS:
            code, out, err = call(*command, name, "--runs", str(tmp_path))
            assert code == 2 or command[0] == "export", (name, command, out)


def test_no_error_in_one_run_hides_the_others(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bad", "good"):
        copy(trained, tmp_path, name)
    last_row = Run.last_row

    def fail(run: Run) -> Any:
        if run.path.name == "bad":
            raise KeyError("x" * 10_000)
        return last_row(run)

    monkeypatch.setattr(Run, "last_row", fail)
    code, out, err = call("runs", "--runs", str(tmp_path))
    assert (code, err) == (0, "")
    assert "good" in out
    assert "\nbad  damaged: KeyError('xxx" in out
    assert len(out) < 3000


YAML = {
    "settings: {a: !!bool maybe}": "'maybe' is not a bool",
    "settings: {a: !!timestamp 2020-01-01}": "'!!timestamp' is not read",
    "settings: {a: !!set {b}}": "'!!set' is not read",
    f"settings: {{a: {'9' * 5000}}}": "is not an integer of 64 bits",
    "settings: {a: &a [1], b: *a}": "an alias, *name, is not read",
    'env: "\\UFFFFFFFF"': "it holds what cannot be read",
    f"workers: [{'x, ' * 100_000}x]": "workers=['x', 'x',",
    "a.b: 1": "has no setting a.b",
    f"env_kwargs: {{a: {'[' * 260}{']' * 260}}}": "it is nested too deeply",
}


@pytest.mark.parametrize("line", YAML, ids=lambda line: line[:30])
def test_a_configuration_that_somebody_has_written_is_no_traceback(trained: Path, tmp_path: Path, line: str) -> None:
    path = copy(trained, tmp_path)
    config = yaml.safe_load((path / "config.yaml").read_text())
    config.pop(line.partition(":")[0], None)
    (path / "config.yaml").write_text(f"{yaml.safe_dump(config)}{line}\n")
    code, out, err = call("runs", "--runs", str(tmp_path))
    assert (code, err) == (0, "")
    assert out.startswith("a  damaged: config.yaml")
    assert YAML[line] in out
    code, _, err = call("show", str(path))
    check(code, "", err, line)
    assert code == 2
    assert len(err) < 3000


def test_a_date_in_a_configuration_is_shown(trained: Path, tmp_path: Path) -> None:
    path = copy(trained, tmp_path)
    with open(path / "config.yaml", "a") as file:
        file.write("eval_env_kwargs:\n  day: 2024-01-31\n")
    text = (path / "config.yaml").read_text().replace("eval_env_kwargs: {}\n", "", 1)
    (path / "config.yaml").write_text(text)
    code, out, err = call("show", str(path))
    assert (code, err) == (0, "")
    assert '{"day": "2024-01-31"}' in out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_run_that_may_not_be_read_is_one_line(trained: Path, tmp_path: Path) -> None:
    copy(trained, tmp_path, "good")
    copy(trained, tmp_path, "shut").chmod(0)
    try:
        code, out, _ = call("runs", "--runs", str(tmp_path))
    finally:
        (tmp_path / "shut").chmod(0o755)
    assert code == 0
    assert "shut  damaged: " in out
    assert "good" in out


def test_what_a_terminal_would_obey_is_not_printed(trained: Path, tmp_path: Path) -> None:
    evil = "\x1b[2J\x1b]0;title\x07[bold red]x[/]\u202egnp\r"
    run = copy(trained, tmp_path, "a\x1b[31mb")
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "env": evil}))
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": 3, "steps": 9, evil: evil}) + "\n")
    for command in (["runs"], ["show", str(run)]):
        code, out, err = call(*command, "--runs", str(tmp_path))
        assert code == 0, err
        assert "[bold red]x[/]gnp" in out, "markup is text"
        assert not {"\x1b", "\x07", "\r", "\u202e"} & {*out, *err}
    code, out, err = call("eval", str(run))
    assert code == 2
    assert "\x1b" not in err
    assert "[bold red]x[/]gnp" in err


def test_long_names_and_values_are_shortened(trained: Path, tmp_path: Path) -> None:
    """Every line is as wide as the longest name: a small file would otherwise print gigabytes."""
    run = copy(trained, tmp_path)
    row = {"iteration": 3, "k" * 400_000: 1, "v": "w" * 400_000, **{f"a{number}": 1 for number in range(300)}}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (run / "facts.json").write_text(json.dumps({"time": "t" * 400_000}))
    code, out, err = call("show", str(run))
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) < 1200
    for file in run.glob("checkpoints/*/manifest.json"):
        kept = {name: value for name, value in json.loads(file.read_text()).items() if name != SEAL}
        kept["policy"]["action"]["shape"] = "a" * 400_000
        file.write_text(sealed(kept))
    code, out, err = call("eval", str(run))
    assert (code, out, err.count("\n"), len(err) < 5000) == (2, "", 1, True)


@pytest.mark.slow
@pytest.mark.parametrize("module", [False, True])
def test_reading_commands_import_nothing_from_the_folder_where_they_start(tmp_path: Path, module: bool) -> None:
    """A folder that somebody else has filled may hold a yaml.py."""
    for name in ("yaml", "numpy", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(99)\n")
    command = [sys.executable, "-m", "fever"] if module else [str(Path(sys.executable).with_name("fever"))]
    for words in (["runs", "--runs", "."], ["show", "."], ["plot", "."], ["export", "."], ["config", "ppo"],
                  ["plot", ".", "--by", "algo"], ["compare", ".", "*"]):  # fmt: skip
        done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode in (0, 2), (words, done)


CRAFTED: list[dict[str, Any]] = [
    {"format": []}, {"format": 10**30}, {"score": 10**400}, {"score_of": 3}, {"policy": None}, {"policy": {}},
    {"policy": {"observation": 3, "action": []}}, {"trainer": []}, {"trainer": {"env_changes": 3}}, {"steps": "x"},
    {"trainer": {"returns": 3, "seconds": 1.0}}, {"trainer": {"evaluation": [1]}}, {"algo": 3}, {"sha256": []},
    {"sha256": {"../../config.yaml": ""}}, {"iteration": 10**400},
]  # fmt: skip


@pytest.mark.parametrize("change", CRAFTED, ids=str)
def test_a_manifest_that_somebody_has_written_is_no_traceback(
    trained: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = copy(trained, tmp_path)
    for file in path.glob("checkpoints/*/manifest.json"):
        kept = {name: value for name, value in json.loads(file.read_text()).items() if name != SEAL}
        file.write_text(sealed({**kept, **change}))
    for words in (*COMMANDS, ["resume", "--stop-iterations", "3"]):
        code, _, said = call(words[0], str(path), *words[1:])
        assert code in (0, 2), (words, said)
        assert said.count("\n") <= 3, (words, said)
        assert "Traceback" not in said, (words, said)


@pytest.mark.parametrize("text", ["[]", "3", "[" * 100_000, "{", '{"code": "x", "kind": []}'])
def test_a_damaged_record_of_a_job_is_no_traceback(trained: Path, tmp_path: Path, text: str) -> None:
    path = copy(trained, tmp_path)
    (path / "job").mkdir(exist_ok=True)
    for name in ("job.json", "exit.json"):
        (path / "job" / name).write_text(text)
    commands = [[words[0], str(path), *words[1:]] for words in COMMANDS]
    for words in (*commands, ["runs", "--runs", str(tmp_path)]):
        code, _, said = call(*words)
        assert code in (0, 2), (words, said)
        assert "Traceback" not in said, (words, said)


RESTORED: list[tuple[str, str, Any]] = [
    ("trainer", "returns", ["x"]), ("trainer", "returns", []), ("trainer", "returns", {}), ("trainer", "lengths", 3),
    ("trainer", "lengths", [None]), ("trainer", "range", "ab"), ("trainer", "range", [1]), ("trainer", "seconds", "1"),
    ("trainer", "generation", None), ("trainer", "generation", -1), ("trainer", "evaluation_seconds", None),
    ("trainer", "episodes", 1.5), ("algorithm", "rng", None), ("algorithm", "rng", {"state": 3}),
    ("algorithm", "steps", "x"), ("algorithm", "steps", -1), ("algorithm", "steps", 10**30), ("policy", "network", 3),
]  # fmt: skip


@pytest.mark.parametrize(("part", "field", "value"), RESTORED, ids=str)
def test_what_is_restored_is_checked_before_anything_changes(
    trained: Path, tmp_path: Path, part: str, field: str, value: Any
) -> None:
    path = copy(trained, tmp_path)
    for file in path.glob("checkpoints/*/manifest.json"):
        kept = {name: value for name, value in json.loads(file.read_text()).items() if name != SEAL}
        kept[part][field] = value
        file.write_text(sealed(kept))
    before = {one: one.read_bytes() for one in path.rglob("*") if one.is_file() and one.name not in ("lock", "log.txt")}
    code, _, said = call("resume", str(path), "--stop-iterations", "3")
    assert (code, said.count("\n")) == (2, 1), said
    assert "the checkpoint" in said
    assert "is damaged" in said
    assert {one: one.read_bytes() for one in before} == before


@pytest.mark.parametrize(
    "change", [{"hidden": [10**9]}, {"activation": 3}, {"recurrent": "gru"}, {"mask": "x"}], ids=str
)
def test_onnx_of_a_manifest_that_somebody_has_written_is_a_sentence(
    trained: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    pytest.importorskip("onnx")
    path = copy(trained, tmp_path)
    for file in path.glob("checkpoints/*/manifest.json"):
        kept = {name: value for name, value in json.loads(file.read_text()).items() if name != SEAL}
        kept["policy"]["network"].update(change)
        file.write_text(sealed(kept))
    code, _, said = call("export", str(path), "--onnx", "--to", str(tmp_path / "out"))
    assert (code, said.count("\n")) == (2, 1) or code == 0, said
    assert "Traceback" not in said
