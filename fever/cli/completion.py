"""Shell completion of algorithms, settings, runs and jobs.

The shell calls fever at every press of TAB. So nothing here imports pydantic, NumPy or JAX: settings are read from the
algorithms' source, runs and jobs from the names of files.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fever import layout
from fever.algos.registry import ALGORITHMS
from fever.files import user_path
from fever.job import records

Candidates = list[tuple[str, str]]  # (word, its meaning)
SAFE_NAME = re.compile(r"\w[\w.+-]*")  # of runs and jobs; a folder may have any name, and shells expand what they get


def algorithms(incomplete: str) -> list[str]:
    """Algorithms of fever's own, and those that the source of the installed RLlib defines."""
    spec = find_spec("ray")
    folders = spec.submodule_search_locations if spec else None
    sources = sorted(Path(folders[0], "rllib", "algorithms").glob("*/*.py")) if folders else ()
    own = [path for path in sources if path.stem == path.parent.name]  # ppo/ppo.py defines PPO
    classes = (re.search(rf"(?im)^class ({path.stem})\(", path.read_text()) for path in own)
    names = [*ALGORITHMS, *(f"rllib:{found[1]}" for found in classes if found)]
    return [name for name in names if name.startswith(incomplete)]


def environments(incomplete: str) -> list[str]:
    """Environments that the zoo has settings for: the first line of its files names them."""
    files = sorted(Path(__file__).parents[1].glob("zoo/*.yaml"))
    names = dict.fromkeys(path.read_text().partition("\n")[0].removeprefix("env: ") for path in files)
    return [name for name in names if name.startswith(incomplete)]


def settings(ctx: Any, incomplete: str) -> Candidates:
    """`name=` of every setting of the chosen algorithm."""
    algo = ctx.params.get("algo") or "ppo"
    found = setting_names(algo) if algo in ALGORITHMS or ":" in algo else {}
    return [  # a backslash would undo the quotes in which scripts of older versions put the meaning
        (f"{name}=", meaning.replace("\\", "")) for name, meaning in found.items() if name.startswith(incomplete)
    ]


def settings_beside_file(ctx: Any, incomplete: str) -> Candidates:
    """The first word is the environment, or a setting if a file names the environment."""
    return settings(ctx, incomplete) if ctx.params.get("file") else []


def runs(ctx: Any, incomplete: str) -> list[str]:
    """Names of run directories, and `last`."""
    folder = user_path(ctx.params.get("runs") or "runs")
    return _offered((path.parent.name for path in folder.glob(f"*/{layout.CONFIG}")), incomplete)


def jobs(incomplete: str) -> list[str]:
    """Names of this user's jobs, and `last`."""
    return _offered((path.stem for path in records("jobs").glob("*.json")), incomplete)


def _offered(found: Iterable[str], incomplete: str) -> list[str]:
    """Those of the names of files and folders that mean nothing to a shell, and `last`."""
    names = sorted(name for name in found if SAFE_NAME.fullmatch(name))
    return [name for name in [*names, "last"] if name.startswith(incomplete)]


def setting_names(algo: str) -> dict[str, str]:
    """Names and meanings of an algorithm's settings, read from its source: importing it would import JAX."""
    module, _, name = ALGORITHMS.get(algo, algo).rpartition(":")
    for where, found in _lineage(module, name):
        for statement in found.body:
            match statement:
                case (
                    ast.Assign(targets=[ast.Name("Config")], value=ast.Name(config))
                    | ast.AnnAssign(target=ast.Name("Config"), value=ast.Name(config))
                ):
                    return _fields(where, config)
    return {}


def _fields(module: str, name: str) -> dict[str, str]:
    """The fields that a class of settings makes with `setting(default, meaning, ...)`, its bases' first."""
    found: dict[str, str] = {}
    for _, node in reversed(list(_lineage(module, name))):
        for statement in node.body:
            match statement:
                case ast.AnnAssign(
                    target=ast.Name(field),
                    value=ast.Call(func=ast.Name("setting"), args=[_, ast.Constant(meaning), *_]),
                ):
                    found[field] = str(meaning)
    return found


def _lineage(module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """A class and its bases as (module, definition), where they are in the same package or in fever."""
    for statement in _statements(module):
        match statement:
            case ast.ClassDef(name=found, bases=bases) if found == name:
                yield module, statement
                for base in bases:
                    if isinstance(base, ast.Name):
                        yield from _lineage(module, base.id)
            case ast.ImportFrom() if any(alias.name == name for alias in statement.names):
                source = _imported(module, statement)
                if source.partition(".")[0] in ("fever", module.partition(".")[0]):
                    yield from _lineage(source, name)


def _imported(module: str, statement: ast.ImportFrom) -> str:
    """The module that a statement in another one imports from: `.settings` in `package.algos` is `package.settings`."""
    if not statement.level:
        return str(statement.module)
    source, parts = _source(module), module.split(".")
    inside = statement.level - (source is not None and source.name == "__init__.py")  # a package is its own parent
    return ".".join([*parts[: len(parts) - inside], *filter(None, [statement.module])])


@cache
def _statements(module: str) -> list[ast.stmt]:
    """The statements of a module; none if it cannot be read."""
    try:
        return ast.parse(Path(str(_source(module))).read_text()).body
    except (OSError, SyntaxError, ValueError):
        return []


@cache
def _source(module: str) -> Path | None:
    """The file of a module, found as Python finds it but without importing its package."""
    places: Any = [str(Path(__file__).parents[2]), "", *sys.path]
    origin, parts = None, module.split(".")
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), places)
        if spec is None:
            return None
        origin, places = spec.origin, spec.submodule_search_locations or []
    return Path(origin) if origin else None


def mend_scripts() -> None:
    """Change Typer's scripts for bash and zsh: no space after `name=`. In zsh the first TAB completes, too, and what is
    offered is data: Typer's own script evaluates it. Of fish's answer, one `word TAB meaning` a line, zsh reads it."""
    from typer._completion_shared import _completion_scripts as scripts

    scripts["bash"] = scripts["bash"].replace(
        "    return 0\n", "    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace\n    return 0\n"
    )
    scripts["zsh"] = ZSH


ZSH = r"""
#compdef %(prog_name)s

%(complete_func)s() {
  local line word
  local -a plain settings
  for line in "${(@f)$(env _TYPER_COMPLETE_FISH_ACTION=get-args _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" \
      %(autocomplete_var)s=complete_fish %(prog_name)s)}"; do
    [[ -z $line ]] && continue
    word=${line%%%%$'\t'*}
    [[ $line == *$'\t'* ]] && line=${word//:/\\:}:${line#*$'\t'} || line=${word//:/\\:}
    [[ $word == *= ]] && settings+=("$line") || plain+=("$line")
  done
  if (( $#plain + $#settings )); then
    _describe '' plain -- settings -S ''
  else
    _files
  fi
}

compdef %(complete_func)s %(prog_name)s
[[ $funcstack[1] == _%(prog_name)s ]] && %(complete_func)s
"""
