"""The archive that goes with a job: fever itself, and the projects or packages that its environment comes from."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

import fever
from fever import layout
from fever.errors import FeverError
from fever.job import RECORD, RUN
from fever.text import format_bytes

MOST = 100 * 2**20  # bytes that Ray accepts in one upload
CACHES = ("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", "node_modules")
NEVER_SENT = (".git", ".venv", *CACHES, ".fever", ".ssh", ".aws", ".gnupg", ".ray")  # large, or secret
TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # of every file, so that the same content makes the same archive


@dataclass(frozen=True)
class Package:
    """A zip archive."""

    content: bytes
    what: str  # a description of its content

    @property
    def uri(self) -> str:
        """The URI under which Ray stores it, made of its hash."""
        return f"gcs://_ray_pkg_{hashlib.sha256(self.content).hexdigest()[:32]}.zip"


def pack(*names: str, skip: Path | None = None, more: dict[str, bytes] | None = None) -> Package:
    """An archive of fever, of the modules that names such as `module:Env` are from, and of `more` files by name.

    `skip`: a folder that is left out, that of the runs.
    """
    try:
        return _pack(names, skip, more or {})
    except OSError as error:
        raise FeverError(f"{error.filename} cannot be sent: {error.strerror}") from None


def _pack(names: tuple[str, ...], skip: Path | None, more: dict[str, bytes]) -> Package:
    files: dict[str, Path] = {}
    sent: dict[Path, str] = {}  # folder -> description
    for module in dict.fromkeys(name.rpartition(":")[0].partition(".")[0] for name in names):
        root = _root_of(module) if module else None
        if root is None:
            continue
        whole = root.is_relative_to(Path.cwd())
        own = project_files(root, skip) if whole else package_files(root / module)
        size = sum(path.stat().st_size for path in own.values())
        what = f"{root if root == Path.cwd() else module}, {len(own)} files, {format_bytes(size)}"
        sent[root if whole else root / module] = what
        files |= own
        if sum(path.stat().st_size for path in files.values()) > MOST:
            raise FeverError(_too_large(what, files))
    files |= {f"fever/{name}": path for name, path in package_files(Path(fever.__file__).parent, "").items()}
    return Package(_zip(files, more), "; ".join(sent.values()) or "fever")


def _zip(files: dict[str, Path], more: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, path in sorted(files.items()):
            entry = zipfile.ZipInfo(name, TIMESTAMP)
            entry.external_attr = (path.stat().st_mode & 0o777) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
        for name, data in more.items():
            archive.writestr(zipfile.ZipInfo(name, TIMESTAMP), data)
    return content.getvalue()


def _root_of(module: str) -> Path | None:
    """The folder that a module is imported from; None for installed packages and the standard library."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    origin = places[0] if places else spec.origin if spec else None
    if origin is None or origin in ("built-in", "frozen"):
        return None
    root = Path(origin).resolve().parent
    installed = {Path(sysconfig.get_paths()[key]).resolve() for key in ("purelib", "platlib", "stdlib")}
    return None if root in installed or module == "fever" else root


def package_files(path: Path, prefix: str | None = None) -> dict[str, Path]:
    """The files of a package or module, by their names in the archive."""
    if not path.is_dir():
        single = path.with_suffix(".py")
        return {single.name: single}
    start = f"{path.name}/" if prefix is None else prefix
    return {f"{start}{name}": file for name, file in project_files(path).items()}


def project_files(root: Path, skip: Path | None = None) -> dict[str, Path]:
    """The files below a folder that no .gitignore excludes, by their relative paths; those of run directories, such as
    fetched ones, are left out wherever they are."""
    found: dict[str, Path] = {}
    ignores = _ignores_above(root)

    def walk(folder: Path, ignores: list[tuple[Path, GitIgnoreSpec]]) -> None:
        own = _ignores_in(folder)
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = Path(entry.path)
            if entry.name in NEVER_SENT or path == skip or entry.name.endswith(".pyc"):
                continue
            directory = entry.is_dir()
            if _ignored(path, directory, [*own, *ignores]):
                continue
            if directory and not entry.is_symlink():
                if not _is_run(path):
                    walk(path, [*own, *ignores])
            elif entry.is_file():
                found[path.relative_to(root).as_posix()] = path

    walk(root, ignores)
    return found


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run directory: a project may have a config.yaml, but not one of these pairs."""
    pairs = ((layout.CONFIG, layout.FACTS), (f"{layout.JOB}/{RECORD}", f"{layout.JOB}/{RUN}"))
    return any(all((folder / name).is_file() for name in pair) for pair in pairs)


def _ignores_in(folder: Path) -> list[tuple[Path, GitIgnoreSpec]]:
    file = folder / ".gitignore"
    if not file.is_file():
        return []
    return [(folder, GitIgnoreSpec.from_lines(file.read_text(errors="replace").splitlines()))]


def _ignores_above(folder: Path) -> list[tuple[Path, GitIgnoreSpec]]:
    """The rules of the folders above, up to the top of the repository; the nearest first."""
    found: list[tuple[Path, GitIgnoreSpec]] = []
    above = [folder, *folder.parents]
    top = next((number for number, path in enumerate(above) if (path / ".git").exists()), 0)
    for path in above[1 : top + 1]:
        found += _ignores_in(path)
    return found


def _ignored(path: Path, directory: bool, ignores: list[tuple[Path, GitIgnoreSpec]]) -> bool:
    """Whether a path is excluded: the nearest .gitignore with a matching rule decides."""
    for folder, spec in ignores:
        name = path.relative_to(folder).as_posix() + ("/" if directory else "")
        ignored = spec.check_file(name).include
        if ignored is not None:
            return ignored
    return False


def _too_large(what: str, files: dict[str, Path]) -> str:
    largest = sorted(files.items(), key=lambda item: -item[1].stat().st_size)[:3]
    names = ", ".join(f"{name} ({format_bytes(path.stat().st_size)})" for name, path in largest)
    return (
        f"{what}: more than the {format_bytes(MOST)} that can go with a job; the largest are {names}; "
        "exclude them with a .gitignore"
    )
