"""The layers of docs/architecture.md: a package imports only what is below it, and lazy imports hide no cycle."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (  # from the ground up; a room may import its own layer and those below
    (
        "errors",
        "files",
        "layout",
        "scratch",
        "system",
        "signals",
        "last_resort",
        "job",
        "config",
        "text",
        "plain_yaml",
        "expressions",
    ),
    ("zoo",),
    ("policy",),
    ("plugins",),
    ("envs",),
    ("sampling",),
    ("replay",),
    ("algos",),
    ("runs",),
    ("training",),
    ("rllib",),
    ("tune", "experiments"),
    ("scaling",),
    ("board",),
    ("launch",),
    ("cli", "__main__", "api", ""),  # "": fever/__init__.py, the Python interface
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FORBIDDEN = {  # room -> packages that none of its modules may import
    "policy": {"jax", "gymnasium", "ray", "pydantic"},
    "envs": {"jax", "ray"},
    "sampling": {"jax"},
    "algos": {"ray", "gymnasium"},
    "launch.on_host": {"jax", "ray", "numpy", "pydantic", "filelock", "gymnasium"},
    "runs.mirror": {"jax", "ray", "numpy", "pydantic", "filelock", "gymnasium"},  # sent to hosts as well
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "fever").rglob("*.py")
}


def imports(module: str, path: Path) -> Iterator[str]:
    """Everything that a module imports, inside functions too; what is for type checkers alone is left out."""
    tree = ast.parse(path.read_text())
    skipped = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    typing_only = {id(node) for block in skipped for part in block.body for node in ast.walk(part)}
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in typing_only:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
            base = (
                [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
                if node.level
                else [node.module]
            )
            yield from (".".join([*map(str, base), alias.name]) for alias in node.names)


def own(name: str) -> str | None:
    """The module of fever's that an imported name is, or is in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def room(module: str) -> str:
    return [*module.split("."), ""][1]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    for name in imports(module, MODULES[module]):
        if name.partition(".")[0] == "fever" and (imported := own(name)) != "fever":
            assert imported is not None, f"{module} imports {name}, which does not exist"
            assert LEVEL[room(imported)] <= LEVEL[room(module)], f"{module} imports {imported}, which is above it"
        for place, packages in FORBIDDEN.items():
            if module == f"fever.{place}" or module.startswith(f"fever.{place}."):
                assert name.partition(".")[0] not in packages, f"{module} imports {name}"


def test_no_cycles() -> None:
    """Not even cycles that imports inside functions would hide."""
    graph = {
        module: {found for name in imports(module, path) if (found := own(name)) not in (None, module, "fever")}
        for module, path in MODULES.items()
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules
