"""Whatever is wrong with the input, a command ends with one sentence and exit code 2, and leaves nothing behind.

The command lines run in one process, as `fever` runs them, and some of them as real processes.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fever as library
from fever.cli import main
from fever.errors import FeverError
from fever.plugins import user_code
from fever.plugins.names import import_module
from tests.cli import bad_envs
from tests.cli.bad_inputs import ENVS, LINES, write_files
from tests.helpers import ROOT, run_fever

pytestmark = pytest.mark.filterwarnings("ignore")  # gymnasium's, about these environments
REAL = [  # started as processes of their own
    f'train {ENVS}:Raises --env-kwargs \'{{"what": "Exit"}}\'',
    "train bad_exit:Env",
    "train -f binary.yaml",
    "train CartPole-v1 --workers 1000000000",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with bad files and modules and a good run, and beside it a home folder."""
    folder = tmp_path_factory.mktemp("bad")
    (work := folder / "work").mkdir()
    (folder / "home").mkdir()
    write_files(work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder / "home"))
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.syspath_prepend(str(work))
        patch.chdir(work)
        library.train("CartPole-v1", stop={"iterations": 1}, name="good")
        yield folder


def files(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with its content if it is a file."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_one_sentence(code: int, stderr: str) -> None:
    assert code == 2, stderr
    assert stderr.startswith("fever: "), stderr
    assert stderr.count("\n") == 1, stderr
    assert len(stderr) < 6000
    assert "Traceback" not in stderr


def test_the_table_is_large() -> None:
    assert len(set(LINES)) == len(LINES) >= 200


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:60].replace("\n", " "))
def test_bad_input_is_one_sentence(
    line: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place / "work")
    monkeypatch.setattr(sys, "argv", ["fever", *shlex.split(line)])
    before = files(place)
    code = main._run()
    assert_one_sentence(code, capsys.readouterr().err)
    assert files(place) == before


@pytest.mark.parametrize("line", REAL)
def test_bad_input_ends_a_process_with_one_sentence(line: str, place: Path) -> None:
    before = files(place)
    done = run_fever(*shlex.split(line), cwd=place / "work", PYTHONDONTWRITEBYTECODE="1")
    assert_one_sentence(done.returncode, done.stderr)
    assert files(place) == before


@pytest.mark.parametrize("what", ["ValueError", "Exit", "Odd", "Unreadable"])
def test_python_receives_the_same_error(what: str, place: Path) -> None:
    before = files(place)
    with pytest.raises(FeverError, match=r"bad_envs:Raises cannot be made.*bad_envs\.py:\d+\)"):
        library.train(bad_envs.Raises, env_kwargs={"what": what})
    with pytest.raises(FeverError, match=r"bad_envs:Raises cannot be made"):
        library.evaluate("good", env=bad_envs.Raises, env_kwargs={"what": what})
    with pytest.raises(FeverError, match="module bad_exit cannot be imported: SystemExit: 0"):
        library.train("bad_exit:Env")
    assert files(place) == before


def test_a_sentence_has_type_message_place_and_hint() -> None:
    with pytest.raises(FeverError) as caught, user_code.user_code("x"):
        bad_envs.NoSeed().reset(seed=1)  # type: ignore[call-arg]
    assert "x: TypeError: " in str(caught.value)
    assert str(caught.value).endswith("def reset(self, *, seed=None, options=None)")
    with pytest.raises(FeverError, match=r"MUJOCO_GL=egl .* xvfb-run"), user_code.user_code("x"):
        raise RuntimeError("an OpenGL platform library has not been loaded")
    with pytest.raises(FeverError, match=r"^x: KeyError: 'key' \(.*bad_envs\.py:\d+\)$"), user_code.user_code("x"):
        bad_envs.Raises(what="KeyError")


def test_ctrl_c_in_code_of_the_users_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_interrupt.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        import_module("bad_interrupt")
    with pytest.raises(KeyboardInterrupt), user_code.user_code("x"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("module", "line", "extra"),
    [
        ("torch", "train CartPole-v1 --algo rllib:PPO", "fever[rllib]"),
        ("mujoco", "train HalfCheetah-v5", "fever[mujoco]"),
        ("ale_py", "train ALE/Pong-v5", "fever[atari]"),
        ("Box2D", "train LunarLander-v3", "fever[box2d]"),
        ("imageio_ffmpeg", "watch good --to x.mp4", "fever[render]"),
    ],
)
def test_a_missing_package_names_the_extra(module: str, line: str, extra: str, place: Path) -> None:
    hidden = place.parent / "hidden"
    (hidden / module).mkdir(parents=True, exist_ok=True)
    code = f"raise ModuleNotFoundError(\"No module named '{module}'\", name='{module}')\n"
    (hidden / module / "__init__.py").write_text(code)
    hide = "import sys; sys.modules.update(dict.fromkeys([MODULE]))".replace("MODULE", repr(module))
    (hidden / "sitecustomize.py").write_text(hide + "\n")
    paths = os.pathsep.join([str(hidden), str(ROOT)])
    done: Any = run_fever(*shlex.split(line), cwd=place / "work", PYTHONPATH=paths, PYTHONDONTWRITEBYTECODE="1")
    assert_one_sentence(done.returncode, done.stderr)
    assert extra in done.stderr
