"""Mistakes in what a user types or writes, for test_bad_inputs.py: command lines, files, modules."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

ENVS = "tests.cli.bad_envs"
LONG = "x" * 300
DEEP = f'{{"a": {"[" * 300}{"]" * 300}}}'
ANCHORS = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in itertools.pairwise("abcdefghijk"))
FILES: dict[str, str | bytes] = {  # for `train -f`
    "tabs.yaml": "env: CartPole-v1\nstop:\n\tsteps: 5\n",
    "list.yaml": "- CartPole-v1\n",
    "bomb.yaml": f"a: &a [x, x, x, x, x, x, x, x, x, x]\n{ANCHORS}env: CartPole-v1\n",
    "loop.yaml": "env: CartPole-v1\nsettings: &a {hidden: *a}\n",
    "deep.yaml": "env: " + "[" * 20_000,
    "binary.yaml": bytes(range(256)),
    "latin.yaml": "env: Pöle".encode("latin-1"),
    "empty.yaml": "",
    "text.yaml": "CartPole-v1\n",
    "unknown.yaml": "env: CartPole-v1\nspeed: 3\n",
    "noenv.yaml": "algo: ppo\n",
    "types.yaml": "env: [1]\n",
    "null.yaml": "env: null\n",
    "stop.yaml": "env: CartPole-v1\nstop: 5\n",
    "settings.yaml": "env: CartPole-v1\nsettings: [1]\n",
    "nan.yaml": "env: CartPole-v1\nsettings: {learning_rate: .nan}\n",
    "python.yaml": "env: !!python/object/apply:os.system [touch here]\n",
    "date.yaml": "env: 2020-13-45\n",
    "two.yaml": "env: CartPole-v1\n---\nenv: CartPole-v1\n",
    "name.yaml": 'env: CartPole-v1\nname: "a\\nb"\n',
    "nul.yaml": 'env: CartPole-v1\nruns: "a\\0b"\n',
    "nulenv.yaml": 'env: "Cart\\0Pole-v1"\n',
    "key.yaml": "1: 2\nenv: CartPole-v1\n",
    "listkey.yaml": "? [1]\n: 2\n",
    "kwargs.yaml": "env: CartPole-v1\nenv_kwargs: 3\n",
    "truth.yaml": "env: CartPole-v1\nworkers: yes\n",
    "kwkeys.yaml": "env: CartPole-v1\nenv_kwargs: {1: 2}\n",
    "callbacks.yaml": "env: CartPole-v1\ncallbacks: x\n",
    "search.yaml": "env: CartPole-v1\nsearch: 3\n",
}
MODULES: dict[str, str | bytes] = {  # that cannot be imported
    "bad_syntax": "def f(:\n",
    "bad_exit": "import sys\nsys.exit(0)\n",
    "bad_exit_text": "raise SystemExit('usage: exits')\n",
    "bad_recursion": "def f(): return f()\nf()\n",
    "bad_odd": "class Odd(BaseException): pass\nraise Odd\n",
    "bad_needs": "import no_such_package\n",
    "bad_nulls": b"x = 1\0\n",
    "bad_latin": "x = 'ö'".encode("latin-1"),
    "bad_circle": "from bad_circle import Env\n",
    "bad_indent": "if True:\nx = 1\n",
    "bad_raise": "raise ValueError('broken')\n",
    "bad_empty": "",
    "bad_getattr": "def __getattr__(name): raise ZeroDivisionError(name)\n",
}
OPTIONS = [  # beside `train CartPole-v1`
    "--envs 0", "--envs -1", "--envs 1000000000", "--envs many", "--envs 1.5", "--workers -1", "--workers some",
    "--workers 1.5", "--workers 1000000000", "--workers 9999", "--workers ''", "--seed -1", "--seed x",
    "--stop-steps -5", "--stop-steps 0", "--stop-steps nan", "--stop-steps 1e400", "--stop-steps 5x",
    "--stop-steps ''", "--stop-time 0", "--stop-time -1m", "--stop-time nan", "--stop-time inf",
    "--stop-time 5parsecs", "--stop-time 1000000h",
    "--step-timeout 1e30", "--step-timeout 99999999999",
    "--stop-reward nan", "--stop-reward inf", "--stop-reward high", "--stop-iterations 0",
    "--stop-iterations -3", "--stop-window 0", f"--stop-window 1{'0' * 20}",
    "--checkpoint-every 0", "--checkpoint-every nan", "--checkpoint-keep 0",
    "--eval-every 0", "--eval-every x", "--eval-episodes 5", "--eval-every 10k --eval-episodes 0",
    "--eval-every 10k --eval-env-kwargs [1]", "--video-every 0", "--video-every x",
    "--starts-at-once 0", "--cpus-per-worker 0", "--cpus-per-worker 9999", "--cpus-per-worker x",
    "--cpus-per-worker 1 --workers 0", "--workers ranks",
    "--gpus-per-worker -1", "--gpus-per-worker nan", "--device tpu",
    "--unknown", "--unknown=3", "-z", "--callback nonsense", "--callback no_such_module:Name",
    "--callback json:Missing", "--callback json:dumps", "--callback json:JSONEncoder={", "--callback bad_exit:C",
    "--log excel", "--name ..", "--name .", "--name a/b", "--name ''", "--name ../up", "--name -x", "--name 'a b'",
    "--name 'a\nb'", f"--name {LONG}", "--name good", "--runs /dev/null", "--runs list.yaml", "--runs /proc/nothing",
    "--runs ''", "--runs list.yaml/deeper", "learning_rate=nan", "learning_rate=inf", "learning_rate=-1",
    "learning_rate=", "learning_rate=fast", "learning_rate=1e400", "gamma=2", "gamma=nan", "steps=0", "steps=-1",
    "steps=1.5", "epochs=0", "clip=0", "minibatches=0", "hidden=0", "hidden=-1,64", "hidden=wide", "hidden=100000000",
    "activation=magic", "convolutions=8", "network=nonsense", "network=no_such:Net", "network=json:dumps",
    "network=json:Missing", "network=bad_exit:N", "network_kwargs=3", "=3", "x", "unknown=3", "'learning_rate=[1,'",
    "'learning_rate={a: b}'", "'learning_rate=&a [*a]'", "'learning_rate=uniform(0,1)'",
    "'learning_rate=!!python/object:os.system x'", "--algo nonsense", "--algo ''", "--algo :", "--algo json:Missing",
    "--algo json:dumps", "--algo no_such:Algo", "--algo bad_exit:A", "--algo sac", "--from nonsense", "--from ''",
    "--from good:99", "--from good:x", "--from /etc", "--env-kwargs 3", "--env-kwargs []",
    f"--env-kwargs '{'[' * 100_000}'", f"--env-kwargs '{DEEP}'", "--env-kwargs '{'",
    "--env-kwargs ''", """--env-kwargs '{"speed": 3}'""", "--on nonsense",
]  # fmt: skip
NAMES = [  # of environments
    "", "CartPole", "CartPole-v999", "nonsense", "no_such_module:Env", ":Env", "module:", "::", "'os path:join'",
    "../etc:passwd", "json", ".:x", "a..b:C", "ALE/Nothing-v5", "HalfCheetah-v99", "x" * 5000, "'Cart\nPole'",
    "bad_exit:Env-v0", *(f"{module}:Env" for module in MODULES), *(f"{ENVS}:{name}" for name in (
        "NoSeed", "OldReset", "number", "nothing", "not_callable", "Missing", "SPACES", "Good.more")),
    f"{ENVS}:NoSeed --workers auto", "Pendulum-v1 --algo dqn", "Pendulum-v1 --from good",
]  # fmt: skip
SPACES = ("none", "text", "list", "class", "empty", "empty-image", "no-parts", "graph", "sequence", "words", "one-of")
FAULTS = [  # name of an environment in bad_envs.py, its arguments
    *(("Raises", {"what": what}) for what in (
        "ValueError", "TypeError", "KeyError", "Empty", "Long", "Unreadable", "Odd", "Exit", "ExitText", "sys.exit",
        "GeneratorExit", "StopIteration", "Memory", "Assertion", "OSError", "Group", "Import", "Recursion")),
    *(("Raises", {"where": where, "what": what})
      for where in ("reset", "space") for what in ("ValueError", "Unreadable", "Odd", "Exit", "Recursion")),
    *(("ResetsTo", {"kind": kind}) for kind in (
        "none", "info", "three", "shape", "text", "nothing", "objects", "dict", "ragged")),
    *(("StepsTo", {"kind": kind}) for kind in ("four", "none", "six", "reward", "shape", "many", "info", "nothing")),
    *(("Space", {"observation": kind}) for kind in (*SPACES, "no-tuple", "nested", "many", "gigantic")),
    *(("Space", {"action": kind}) for kind in (*SPACES, "many", "complex", "unbounded")),
]  # fmt: skip
RUNS = ["nonsense", "''", "/etc", "list.yaml", "../../..", "damaged", "last --runs nowhere", "good --unknown", "", LONG]
COMMANDS = [
    *(f"{command} {run}" for command in ("resume", "eval", "watch", "plot", "show", "export", "compare")
      for run in RUNS),
    *(f"{command} nonsense" for command in ("logs", "stop", "fetch", "attach", "tunnel", "up", "down", "config")),
    "eval good --episodes 0", "eval good --episodes x", "eval good --episodes 1000000000",
    "eval good --max-steps 0", "eval good --seed -1",
    "eval good --checkpoint 99", "eval good --checkpoint nonsense", "eval good --checkpoint ''",
    "eval good --checkpoint ../..", "eval good --env Pendulum-v1", "eval good --env nonsense",
    f"eval good --env {ENVS}:Good", f"eval good --env {ENVS}:Raises", f"eval good --env {ENVS}:NoSeed",
    f"""eval good --env {ENVS}:Raises --env-kwargs '{{"where": "reset"}}'""", "eval good --env bad_exit:Env",
    f"""eval good --env {ENVS}:StepsTo --env-kwargs '{{"kind": "four"}}'""", "eval good --env-kwargs 3",
    "eval good --env-kwargs '{'", """eval good --env-kwargs '{"speed": 3}'""", "watch good --to video.avi",
    "watch good --to video", "watch good --to /proc/x.gif", "watch good --steps 0", "watch good --env nonsense",
    f"watch good --env {ENVS}:Good", f"watch good --env {ENVS}:NoSeed", "plot good --to x.exe",
    "plot good --to /proc/x.png", "plot good nonsense", "export good --to /proc/x", "export good --to list.yaml",
    "export good --checkpoint 99", "resume good", "resume good --stop-steps -5", "resume good --stop-time 0",
    "resume good --workers -1", "resume good --workers x", "resume good --checkpoint 99 --stop-iterations 5",
    "board --runs list.yaml", "board --port 70000", "board --port x", "board --host no.such.host.invalid",
    "board --on slurm", "board --on nonsense", "board good",
    "resume good --eval-episodes 5", "resume good --stop-iterations 1", "resume good --on nonsense", "tune",
    "tune CartPole-v1", "tune CartPole-v1 learning_rate=uniform(1)", "tune CartPole-v1 learning_rate=uniform(2,1)",
    "tune CartPole-v1 learning_rate=uniform(a,b)", "tune CartPole-v1 learning_rate=uniform(nan,1)",
    "tune CartPole-v1 learning_rate=loguniform(0,1)", "tune CartPole-v1 learning_rate=choice()",
    "tune CartPole-v1 learning_rate=gauss(0,1)", "tune CartPole-v1 nothing=uniform(0,1)",
    "tune CartPole-v1 learning_rate=uniform(0.1,1) --trials 0",
    "tune CartPole-v1 learning_rate=uniform(0.1,1) --search telepathy",
    "tune CartPole-v1 learning_rate=uniform(0.1,1) --search grid",
    "tune CartPole-v1 learning_rate=uniform(0.1,1) --scheduler nice",
    "tune CartPole-v1 learning_rate=uniform(0.1,1) --seeds 0",
    "tune CartPole-v1 learning_rate=uniform(0.1,1) --parallel 0", "tune CartPole-v1 hidden=choice(0,64)",
    "tune nonsense learning_rate=uniform(0.1,1)", f"tune {ENVS}:Raises learning_rate=uniform(0.1,1)",
    "tune -f list.yaml", "config json:dumps", "config bad_exit:A", "doctor --on nonsense", "up list.yaml", "up",
    "nonsense", "--nonsense", "'train CartPole-v1'", "train", "train -f ''", "train -f .", "train -f /dev/zero",
    "train -f missing.yaml", "train -f list.yaml:x", f"train -f {LONG}:x", f"train CartPole-v1 --runs {LONG}",
    f"tune CartPole-v1 learning_rate=uniform(0.1,1) --runs {LONG}", f"train CartPole-v1 --on slurm --name {LONG}",
    f"runs --runs {LONG}", f"export good --to {LONG}", f"export good --onnx --to {LONG}", "runs --runs '~nosuchuser'",
    "show '~nosuchuser/a'", "train CartPole-v1 --runs '~nosuchuser'", "train CartPole-v1 --on '~nosuchuser/a.yaml'",
    "up '~nosuchuser/a.yaml'", "doctor --on slurm --runs '~nosuchuser'",
    "train CartPole-v1 --eval-every 10k --eval-episodes 80000",
    "compare good", "compare good good", "compare good '*.yaml'", "compare 'good*' 'nonsense*'",
    "compare good nonsense --scale x", "plot good --by nonsense", "plot good --by ''", "plot good --rows search",
    "plot good --metric nonsense", "plot good --x nonsense", "plot 'nonsense*' --by algo", "plot damaged --by algo",
    "plot good --by algo --out x.exe", "plot good --by algo --out /proc/x.png", "train CartPole-v1 --seeds 0",
    "train CartPole-v1 --seeds -1", "train CartPole-v1 --seeds x", "train CartPole-v1 --seeds 1000000000",
    "train CartPole-v1 --seeds 2 --parallel 0", "train CartPole-v1 --parallel 2", "train nonsense --seeds 2",
    "train CartPole-v1 --seeds 2 nothing=3", f"train {ENVS}:Raises --seeds 2", "resume good --seeds 2",
    "train CartPole-v1 --seeds 2 --on mpi", "train CartPole-v1 --seeds 2 --nodes 2",
    f"train CartPole-v1 --seeds 2 --name {LONG}",
    f"train CartPole-v1 --seeds 2 --seed 1{'0' * 20}", "train CartPole-v1 --seeds 2 --name ../x",
    "train CartPole-v1 --seeds 2 --callback nonsense:X", "train CartPole-v1 --seeds 2 --tensorboard",
    f"train {ENVS}:Good --video-every 1k", "plot good --by stop.nonsense", "plot good --by env.size",
    "plot good --by algo --out /", "plot good --out .png", "plot good --out curves", "plot 'nonsense*'",
    "plot good --scale x", "plot good --scale Hopper-v5=0,1", "plot good --scale CartPole-v1=0,1 --metric entropy",
    "compare 'good*' '['", "compare good /dev/null", "watch good --checkpoint ''", "watch good --checkpoint best,no",
    "watch good --checkpoint ,", "watch good --episodes 0", f"watch good --episodes 1{'0' * 20}",
    "watch good --seed -1", "watch good --out /",
    *(f"scale CartPole-v1 {words}" for words in (
        "", "--workers 1", "--workers ''", "--workers 1,,2", "--workers all,2", "--workers 0,1 --rounds 0",
        "--workers 0,1 --rounds 101", "--workers 0,1 --seconds inf", "--workers 0,1 --longest 1s",
        "--workers 0,1 --target inf", "--workers 0,1 --target x", "--workers 0,1 --predict ''",
        "--workers 0,1 --name ../x", "--workers 0,1 --eval-every 3", "--workers 0,1 --stop-steps 3",
        "--workers 0,1 -f nofile.yaml", "--workers 0,1 --runs /proc/x", "--workers 0,1 --hosts 2",
        "--workers 0,1 --on nofile.yaml", "--workers 0,1 --seed -1",
    )), "scale nonsense --workers 0,1", "scale --workers 0,1", f"scale {ENVS}:Raises --workers 0,1",
    f"train CartPole-v1 --seed 1{'0' * 30}", f"train CartPole-v1 --seed 1{'0' * 5000}",
]  # fmt: skip
LINES = [
    *(f"train CartPole-v1 {option}" for option in OPTIONS),
    *(f"train {name or repr('')}" for name in NAMES),
    *(f"train {ENVS}:{name} -q --env-kwargs '{json.dumps(kwargs)}'" for name, kwargs in FAULTS),
    *(f"train -f {name}" for name in FILES),
    *COMMANDS,
]


def write_files(folder: Path) -> None:
    """Write the files that the command lines name, and a run that is damaged."""
    (folder / "damaged").mkdir()
    everything = {**FILES, **{f"{name}.py": text for name, text in MODULES.items()}, "damaged/config.yaml": "env: ["}
    for name, content in everything.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
