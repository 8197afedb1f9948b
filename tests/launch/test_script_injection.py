"""No setting, folder or name becomes a command: hostile values are refused, or do nothing in scripts that bash runs."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fever.errors import FeverError
from fever.launch.aws import config as aws
from fever.launch.aws.target import Aws
from fever.launch.clusters.ssh import command, shell_word
from fever.launch.clusters.ssh_cluster import Ssh
from fever.launch.schedulers.base import Scheduler
from fever.launch.script_text import is_one_line, quote_words
from fever.launch.targets import load_target, restore_target

QUICK = settings(deadline=None, derandomize=True, database=None)  # the same examples every time, on slow machines too
CANARY = "PWNED"
DO = f">{CANARY}"  # a whole command for a shell, without any program
BREAKS = ["\n", "\r", "\r\n", "\v", "\f", "\x85", "\u2028", "\u2029", "\0", "\x1b"]
PAYLOADS = [
    *(f"x{end}{DO}{end}" for end in BREAKS), *(f"x{end}#SBATCH --wrap={DO}" for end in BREAKS[:3]),
    f"$({DO})", f"`{DO}`", f"; {DO};", f"&& {DO}", f"| {DO}", f"'; {DO}; '", f'"; {DO}; "', f"x #'\"; {DO}",
    f"\\'; {DO}; #", f"-x; {DO}", f"--export=$({DO})", f"${{x:=$({DO})}}", f"$x`{DO}`", f"{{nodes}};{DO}", f"x\\\n{DO}",
    f"<({DO})", f"$'\\n'{DO}", f"~$({DO})", f"~/$({DO})", DO, "\ud800",
]  # fmt: skip
ONE_LINE = [payload for payload in PAYLOADS if is_one_line(payload)]
PIECES = ["a", " ", "'", '"', "\\", "$", "`", "(", ")", "-", "#"]
values = st.one_of(
    st.sampled_from(ONE_LINE),
    st.lists(st.sampled_from([*ONE_LINE, *PIECES]), min_size=1, max_size=4).map("".join),
    st.lists(st.sampled_from([*PAYLOADS, *PIECES, *BREAKS]), max_size=4).map("".join),
)
lists = st.lists(values, min_size=1, max_size=2)
further = st.lists(values.map("--x={}".format), min_size=1, max_size=2)  # options of a command
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "account": values, "partition": values, "conda": values, "venv": values, "modules": lists, "options": lists,
    "env": st.dictionaries(st.one_of(values, st.just("NAME")), values, min_size=1, max_size=2), "unset": lists,
    "interface": values, "scratch": values,
    "container": st.fixed_dictionaries({"image": values, "mounts": lists, "options": further, "python": values}),
}  # fmt: skip
OWN = {
    "slurm": {
        "qos": values,
        "mem": values,
        "srun_options": further,
        "learner": st.fixed_dictionaries({"partition": values, "options": lists}),
    },
    "pbs": {"select": values, "place": values, "filesystems": values, "launcher": values},
    "lsf": {"resources": values, "launcher": values},
}
PREFIX = {"slurm": "#SBATCH", "pbs": "#PBS", "lsf": "#BSUB"}
STUBS = ("python", "srun", "mpiexec", "apptainer", "conda", "true")


def make_place(folder: Path) -> dict[str, str]:
    """A folder with programs that do nothing; returns the environment of a script that finds only them."""
    (folder / "bin").mkdir()
    for name in STUBS:
        (folder / "bin" / name).write_text("#!/bin/sh\nexit 0\n")
        (folder / "bin" / name).chmod(0o755)
    return {"PATH": str(folder / "bin"), "BASH_FUNC_module%%": "() { return 0; }", "HOME": str(folder)}


def run(text: str, folder: Path, variables: dict[str, str]) -> None:
    """Run a script with bash; fails if it has made the file that only an injected command would make."""
    script = folder / "script.sh"
    script.write_text(text)
    subprocess.run(["/bin/bash", str(script)], cwd=folder, env=variables, capture_output=True, timeout=20)
    assert not [path for path in folder.rglob(f"{CANARY}*") if path.is_file()], text


PLAIN = {"name": "plain", "where": ".", "folder": "plain", "python": "python"}  # the words of a script but its settings


def check(kind: str, given: dict[str, Any], words: dict[str, str]) -> bool:
    """Render a script and run it; returns False if it was refused."""
    name, where, folder, python = {**PLAIN, **words}.values()
    try:
        target = restore_target({"kind": kind, "nodes": 2, **given})
        assert isinstance(target, Scheduler)
        text = target.script(name, Path(where), Path(folder) / "job", python)
    except FeverError:
        return False
    head, body = text.split("\n\n", 1)  # directives, and commands
    assert len(head.splitlines()) == 1 + len(target.directives(name, Path(folder) / "job"))
    assert all(line.startswith(PREFIX[kind]) for line in head.splitlines()[1:])
    assert not any(line.startswith(PREFIX[kind]) for line in body.splitlines())
    with tempfile.TemporaryDirectory() as place:
        for made in (Path(place) / where, Path(place) / folder / "job"):  # so that the script runs to its end
            made.mkdir(parents=True, exist_ok=True)
        run(text, Path(place), make_place(Path(place)))
    return True


@pytest.mark.parametrize("kind", PREFIX)
def test_no_hostile_value_runs_a_command(kind: str) -> None:
    """Every payload in every place, one at a time."""
    ran: dict[str, int] = {}
    for payload in ONE_LINE:
        for name in {**FIELDS, **OWN[kind]}:
            value: Any = [payload] if name in ("modules", "options", "unset") else payload
            value = [f"--x={payload}"] if name == "srun_options" else value
            value = {"A": payload} if name == "env" else value
            value = {"options": [payload]} if name == "learner" else value
            value = (
                {"image": payload, "mounts": [payload], "options": [f"--x={payload}"]} if name == "container" else value
            )
            ran[name] = ran.get(name, 0) + check(kind, {name: value}, {})
        for word in PLAIN:
            ran[word] = ran.get(word, 0) + check(kind, {}, {word: payload})
    refused = {name for name, count in ran.items() if not count}
    words = {"slurm": {"qos", "mem"}, "pbs": {"place", "filesystems"}, "lsf": set()}
    assert refused == {"account", "partition", "unset"} | words[kind]


@settings(QUICK, max_examples=100)
@pytest.mark.parametrize("kind", PREFIX)
@given(data=st.data())
def test_no_script_runs_an_injected_command(kind: str, data: st.DataObject) -> None:
    """Up to two settings at a time, and one of the run's name, its folder, the working folder and the interpreter."""
    known = {**FIELDS, **OWN[kind]}
    chosen = data.draw(st.lists(st.sampled_from(sorted(known)), max_size=2, unique=True))
    given = {name: data.draw(known[name], label=name) for name in chosen}
    words = data.draw(st.sampled_from([(), *zip(PLAIN)]))
    event("ran" if check(kind, given, {word: data.draw(values, label=word) for word in words}) else "refused")


@pytest.mark.parametrize("kind", PREFIX)
@pytest.mark.parametrize("end", BREAKS, ids=repr)
def test_line_breaks_are_refused_in_every_setting(kind: str, end: str) -> None:
    hostile = f"x{end}{DO}"
    for name in ("account", "partition", "conda", "venv", "interface", "scratch", *OWN[kind]):
        value = {"learner": {"partition": hostile}, "srun_options": [hostile]}.get(name, hostile)
        with pytest.raises(FeverError, match=name):
            restore_target({"kind": kind, name: value})
    boxes = ({"image": hostile}, {"image": "a", "mounts": [hostile]}, {"image": "a", "options": [hostile]})
    for box in boxes:
        with pytest.raises(FeverError, match="container"):
            restore_target({"kind": kind, "container": box})
    for more in ({"options": [hostile]}, {"modules": [hostile]}, {"env": {"A": hostile}}, {"unset": [hostile]}):
        with pytest.raises(FeverError, match=next(iter(more))):
            restore_target({"kind": kind, **more})
    target = restore_target({"kind": kind})
    assert isinstance(target, Scheduler)
    for place in range(4):
        words = ["name", Path("in"), Path("job"), "python"]
        words[place] = type(words[place])(hostile)
        with pytest.raises(FeverError, match="has a line break or a control character"):
            target.script(*words)  # type: ignore[arg-type]


def test_directives_hold_single_words() -> None:
    for name in ("account", "partition", "qos", "mem"):
        for value in ("a b", "-x", "--wrap=x", "a'b", 'a"b', "a\\b", "a#b", "$(x)", ""):
            with pytest.raises(FeverError, match=name):
                restore_target({"kind": "slurm", name: value})
        assert restore_target({"kind": "slurm", name: "hpc-2026_a,b@x.y"})


def test_shell_lines_are_the_users_own(tmp_path: Path) -> None:
    target = restore_target({"kind": "slurm", "before_modules": [">first"], "shell": ["if true\nthen >made\nfi"]})
    assert isinstance(target, Scheduler)
    text = target.script("a", tmp_path, tmp_path / "job", "true")
    run(text, tmp_path, make_place(tmp_path))
    assert (tmp_path / "first").exists()
    assert (tmp_path / "made").exists()


def test_odd_but_honest_folders_work(tmp_path: Path) -> None:
    """Spaces, quotes and dollars in names of folders reach the programs as they are."""
    place, odd = make_place(tmp_path), 'it\'s a "$HOME" `x` folder; really'
    (tmp_path / odd / "job").mkdir(parents=True)
    (tmp_path / "bin" / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$VALUE" "$@" > "$HOME/said"\n')
    target = restore_target({"kind": "pbs", "env": {"VALUE": odd}, "launcher": "aprun -f '$PBS_NODEFILE' -n {nodes}"})
    assert isinstance(target, Scheduler)
    folder = tmp_path / odd / "job"
    run(target.script(odd, tmp_path / odd, folder, "python"), tmp_path, {**place, "PBS_NODEFILE": "/a file"})
    said = (tmp_path / "said").read_text().splitlines()
    assert said[:2] == [str(tmp_path / odd), odd]
    assert said[4:] == [str(folder), "aprun", "-f", "/a file", "-n", "1"]
    with pytest.raises(FeverError, match="cannot be given to bsub"):
        restore_target({"kind": "lsf"}).script("a", tmp_path, folder, "python")  # type: ignore[attr-defined]


@settings(QUICK, max_examples=60)
@given(text=values)
def test_words_of_other_machines_are_quoted(text: str) -> None:
    """What a shell on a host gets: the interpreter, and the commands that Ray's launcher runs on instances."""
    with tempfile.TemporaryDirectory() as place:
        variables = make_place(Path(place))
        if is_one_line(text):
            run(f"echo {shell_word(text)}\n({command(text)})\n", Path(place), variables)
        try:
            target = restore_target({"kind": "aws", "region": "r", "python": text, "env": {"A": text}, "scratch": text})
        except FeverError:
            return
        assert isinstance(target, Aws)
        start = f"{aws._environment(target)} {aws._python(target)} stop"
        run(f"{start}\n{aws._install([text])[-1]}\n", Path(place), variables)


@pytest.mark.parametrize("user", ["-oProxyCommand=x", "a b", "a\nb"])
def test_who_logs_in_is_no_option_of_ssh(user: str) -> None:
    for more in ({"kind": "ssh", "hosts": ["a"]}, {"kind": "aws", "region": "r"}):
        with pytest.raises(FeverError, match="user"):
            restore_target({**more, "user": user})
    assert isinstance(restore_target({"kind": "ssh", "hosts": ["a"], "user": "me"}), Ssh)


@settings(QUICK)
@given(words=st.lists(st.one_of(values, st.text(max_size=5)), max_size=4))
def test_a_launcher_keeps_its_words(words: list[str]) -> None:
    if not any("$" in word for word in words):
        assert shlex.split(quote_words(shlex.join(words))) == words


def test_options_of_the_command_line_are_checked(tmp_path: Path) -> None:
    with pytest.raises(FeverError, match="account"):
        load_target("slurm", {"account": f"a\n{DO}"})
