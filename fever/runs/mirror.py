"""A folder's files on two machines, kept the same over one connection: each byte travels once and is verified.

The side that asks writes a line of JSON, with bytes behind it where it sends a file; the other side answers in the same
way. Files that grew are sent from where they ended: the prefix is compared by its hash. What arrives is hashed on the
way and compared with what was read, a file that is new appears under its name only once it is whole, and what is left
of an interrupted transfer is a prefix to go on from.

    pull   {"do": "pull", "folder", "more": {name: path elsewhere}, "have": {name: [size, hash]}, "skip": [prefix]}
           answered by {"name", "offset", "size", "hash"} and bytes for every file that differs, then {"names": [...]}.
           Asked again without "have", it goes on from what it has sent in this connection.
    list   {"do": "list", "folder"} answered by {"files": {name: [size, hash]}}
    push   {"do": "push", "folder", "name", "size", "hash", "mode"} and bytes, answered by {}
    keep   {"do": "keep", "folder", "names"} answered by {}: checkpoints and the like with other names are removed
    where  {"do": "where", "folder"} answered by {"folder": its whole path, "lacks": packages that are not there}

`python -m fever.runs.mirror FILE` answers the requests in a file, for clusters that only take jobs.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fever import layout
from fever.errors import FeverError

CHUNK = 1 << 20
MARK = "fever-files "  # before what a job answers
REPLY = "fever-reply "  # before what `agent.py` says
NEEDED = ("gymnasium", "jax", "numpy", "pydantic", "ray", "safetensors", "typer", "yaml")  # modules that train
PARTIAL = ".partial-"  # before the name of a file that is not whole
OWN = (f"{layout.JOB}/job.json", f"{layout.JOB}/exit.json")  # what this side writes itself, and takes from nobody
GROWS = (".jsonl", ".txt", ".log")  # files that are only ever appended to, TensorBoard's events too
PASSING = (  # what is removed here when it is gone there
    *(f"{folder}/" for folder in (layout.CHECKPOINTS, layout.REPLAY, layout.TRIALS, layout.TUNE)), layout.SUMMARY
)  # fmt: skip


class Digest:
    """The hash of a file's beginning, which can go on as the file grows."""

    def __init__(self, name: str = "") -> None:
        """`name`: of the file; only some kinds are known to grow without being written anew."""
        self.size, self.inode, self.seen = 0, -1, (0, 0)
        self.grows = name.endswith(GROWS) or layout.EVENTS in name
        self.hash = hashlib.sha256()

    def upto(self, file: BinaryIO, size: int) -> str:
        """The hash of the first bytes of an open file."""
        stat = os.fstat(file.fileno())
        rewritten = (stat.st_size, stat.st_mtime_ns) != self.seen and not (self.grows and stat.st_size > self.seen[0])
        if stat.st_ino != self.inode or size < self.size or rewritten:
            self.size, self.hash = 0, hashlib.sha256()
        self.saw(stat)
        file.seek(self.size)
        while self.size < size and (block := file.read(min(CHUNK, size - self.size))):
            self.add(block)
        return self.hash.hexdigest()

    def saw(self, stat: os.stat_result) -> None:
        """The file as it is now has the beginning that was hashed."""
        self.inode, self.seen = stat.st_ino, (stat.st_size, stat.st_mtime_ns)

    def add(self, block: bytes) -> None:
        self.hash.update(block)
        self.size += len(block)


def digest_of(path: Path, digest: Digest | None = None) -> tuple[int, str]:
    """A file's size and hash."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return size, (digest or Digest()).upto(file, size)


def names_in(folder: Path) -> list[str]:
    """The ordinary files below a folder; none that are being written under another name."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or error.filename == str(folder):
            raise error  # but an old checkpoint may go in this moment

    found = []
    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(parent) / name for name in files if not name.startswith("."))
        found += [path.relative_to(folder).as_posix() for path in paths if path.is_file()]
    return sorted(found)


def write_line(stream: BinaryIO, values: dict[str, Any]) -> None:
    stream.write(json.dumps(values).encode() + b"\n")


def read_line(stream: BinaryIO) -> dict[str, Any]:
    """The next line; raises EOFError at the end, and what went wrong on the other side as a FeverError."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    if line.startswith(REPLY.encode()):
        error = json.loads(line[len(REPLY) :]).get("error") or "it ended"
        raise FeverError(error.strip().splitlines()[-1])
    return json.loads(line)


def blocks(stream: BinaryIO, count: int) -> Iterator[bytes]:
    """Exactly so many bytes; raises EOFError at the end."""
    while count:
        block = stream.read(min(CHUNK, count))
        if not block:
            raise EOFError
        count -= len(block)
        yield block


def inside(folder: Path, name: str) -> Path:
    """A path below a folder; the other side does not get to name others."""
    path = Path(name)
    hidden = any(part.startswith(".") for part in path.parts)  # as what is not whole is called
    if path.is_absolute() or hidden or path.as_posix() != name:
        raise FeverError(f"{name!r} is not the name of a file below {folder}")
    return folder / path


# the side that answers


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the other side closes."""
    sources: dict[str, Source] = {}
    while True:
        try:
            request = read_line(requests)
        except EOFError:
            return
        folder = Path(request["folder"]).expanduser()
        source = sources.setdefault(request["folder"], Source(folder))
        if request["do"] == "pull":
            source.pull(request, answers)
        elif request["do"] == "list":
            write_line(answers, {"files": source.list()})
        elif request["do"] == "where":
            lacks = [name for name in NEEDED if importlib.util.find_spec(name) is None]
            write_line(answers, {"folder": str(folder.resolve()), "lacks": lacks})
        elif request["do"] == "keep":
            for name in set(source.names()) - set(request["names"]):
                if name.startswith(PASSING):
                    remove(folder, name)
            write_line(answers, {})
        else:
            receive(folder, request, requests)
            write_line(answers, {})
        answers.flush()


class Source:
    """A folder whose files are sent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digests: dict[str, Digest] = {}
        self.sent: dict[str, tuple[int, str]] = {}

    def names(self) -> Iterable[str]:
        return names_in(self.folder) if self.folder.is_dir() else []

    def list(self) -> dict[str, tuple[int, str]]:
        return {name: digest_of(self.folder / name, self._digest(name)) for name in self.names()}

    def _digest(self, name: str) -> Digest:
        return self.digests.setdefault(name, Digest(name))

    def pull(self, request: dict[str, Any], answers: BinaryIO) -> None:
        """Send what the other side does not have."""
        if not self.folder.is_dir():
            write_line(answers, {"gone": True})
            return
        if "have" in request:
            self.sent = {name: (size, hash) for name, (size, hash) in request["have"].items()}
        paths = {name: self.folder / name for name in names_in(self.folder)}
        paths |= {name: Path(path) for name, path in request.get("more", {}).items()}
        there = []
        for name, path in paths.items():
            if name.startswith(tuple(request.get("skip", ()))):
                there.append(name)
                continue
            try:
                with open(path, "rb") as file:
                    self._send(name, file, answers)
                there.append(name)
            except FileNotFoundError:  # an old checkpoint, removed in this moment
                continue
        write_line(answers, {"names": there})

    def _send(self, name: str, file: BinaryIO, answers: BinaryIO) -> None:
        digest, size = self._digest(name), os.fstat(file.fileno()).st_size
        has, known = self.sent.get(name, (0, ""))
        offset = has if 0 < has <= size and digest.upto(file, has) == known else 0
        whole = digest.upto(file, size)
        if name in self.sent and (size, whole) == (has, known):
            return
        write_line(answers, {"name": name, "offset": offset, "size": size, "hash": whole})
        file.seek(offset)
        for block in blocks(file, size - offset):
            answers.write(block)
        self.sent[name] = size, whole


def receive(folder: Path, header: dict[str, Any], stream: BinaryIO) -> None:
    """Take a whole file."""
    path = inside(folder, header["name"])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, digest = path.with_name(PARTIAL + path.name), Digest()
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT, header.get("mode", 0o644)), "wb") as file:
        for block in blocks(stream, header["size"]):
            digest.add(block)
            file.write(block)
    if digest.hash.hexdigest() != header["hash"]:
        partial.unlink()
        raise FeverError(f"{header['name']} was damaged on its way")
    partial.replace(path)


def remove(folder: Path, name: str) -> None:
    """Remove a file below a folder, and the folders that are empty then."""
    path = inside(folder, name)
    path.unlink(missing_ok=True)
    while (path := path.parent) != folder and path.is_dir() and not any(path.iterdir()):
        path.rmdir()


# the side that asks


class Mirror:
    """A local copy of a folder that is elsewhere."""

    def __init__(self, folder: Path, there: str, requests: BinaryIO, answers: BinaryIO) -> None:
        """`there`: the folder as the other side knows it; `requests`, `answers`: the connection."""
        self.folder, self.there = folder, there
        self.requests, self.answers = requests, answers
        self.id = secrets.token_hex(8)
        self.digests: dict[str, Digest] = {}
        self.begun = False  # whether the other side knows what is here
        self.names = {layout.SUMMARY}  # that were seen on the other side, or may have been there before
        self.moved = 0  # bytes so far

    def pull(self, more: dict[str, str] | None = None, skip: tuple[str, ...] = ()) -> None:
        """Bring home what is new. `more`: files from elsewhere, by their name here; `skip`: beginnings of names that
        can wait.

        Old checkpoints that are gone there are removed here too. Raises FeverError if the folder itself is not there,
        or if a file cannot be written here; the connection can be used for other folders then.
        """
        request = {"do": "pull", "folder": self.there, "more": more or {}, "skip": skip}
        if not self.begun:
            request["have"] = self._have()
        write_line(self.requests, request)
        self.requests.flush()
        problem: FeverError | None = None
        while "name" in (header := read_line(self.answers)):
            arriving = blocks(self.answers, header["size"] - header["offset"])
            try:
                self._take(header, arriving)
            except FeverError as error:
                problem, self.begun = problem or error, False
                self.digests.pop(header["name"], None)
            for _ in arriving:  # the next header is behind it
                pass
        if "gone" in header:
            raise FeverError(f"there is no folder {self.there} there (any more); what was fetched is kept")
        if problem is not None:
            raise problem
        self.begun = True
        for name in header["names"]:
            if not name.startswith(skip):
                self._finish(name)
        for name in self.names - set(header["names"]):
            if name.startswith(PASSING):
                path = inside(self.folder, name)
                path.with_name(PARTIAL + path.name).unlink(missing_ok=True)
                remove(self.folder, name)
                self.digests.pop(name, None)
        self.names = set(header["names"])

    def _have(self) -> dict[str, tuple[int, str]]:
        """What is here already, the beginnings of interrupted transfers too."""
        found: dict[str, tuple[int, str]] = {}
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                whole = path.with_name(path.name.removeprefix(PARTIAL))
                name = whole.relative_to(self.folder).as_posix()
                if "/." in f"/{name}":  # nothing that the other side knows
                    continue
                if path == whole and name in found:  # its next version is on the way
                    continue
                found[name] = digest_of(path, self.digests.setdefault(name, Digest(name)))
        self.names |= {name for name in found if name.startswith(PASSING)}  # of an earlier connection
        return found

    def _take(self, header: dict[str, Any], arriving: Iterator[bytes]) -> None:
        if header["name"] in OWN:
            return
        path = inside(self.folder, header["name"])
        partial = path.with_name(PARTIAL + path.name)
        grows = header["offset"] and not partial.exists()
        target = path if grows else partial
        if grows and path.stat().st_size != header["offset"]:
            raise ValueError(f"{path} was changed by another")  # a new connection begins with what is here
        digest = self.digests.setdefault(header["name"], Digest(header["name"]))
        if not header["offset"]:
            digest = self.digests[header["name"]] = Digest(header["name"])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "r+b" if header["offset"] else "wb") as file:
                file.seek(header["offset"])
                for block in arriving:
                    file.write(block)
                    digest.add(block)
                    self.moved += len(block)
        except OSError as error:
            raise FeverError(f"{target} cannot be written: {error.strerror}") from error
        if (digest.size, digest.hash.hexdigest()) != (header["size"], header["hash"]):
            target.unlink()
            raise FeverError(f"{header['name']} was damaged on its way; fetch again")
        if target == partial:
            partial.replace(path)
        digest.saw(path.stat())

    def _finish(self, name: str) -> None:
        """Give a file its name that had arrived whole when the last transfer was interrupted."""
        path = inside(self.folder, name)
        partial = path.with_name(PARTIAL + path.name)
        if partial.exists():
            partial.replace(path)

    def push(self) -> None:
        """Send what the other side does not have.

        Checkpoints and the like that are only there are removed; what else is only there stays.
        """
        write_line(self.requests, {"do": "list", "folder": self.there})
        self.requests.flush()
        there = read_line(self.answers)["files"]
        count, names = 0, names_in(self.folder)
        for name in names:
            path = self.folder / name
            size, whole = digest_of(path)
            if there.get(name) != [size, whole]:
                header = {"do": "push", "folder": self.there, "name": name, "size": size, "hash": whole}
                write_line(self.requests, {**header, "mode": path.stat().st_mode & 0o777})
                with open(path, "rb") as file:
                    for block in blocks(file, size):
                        self.requests.write(block)
                count += 1
        write_line(self.requests, {"do": "keep", "folder": self.there, "names": names})
        self.requests.flush()
        for _ in range(count + 1):
            read_line(self.answers)


def main() -> None:
    """Answer the requests in a file."""
    answers = io.BytesIO()
    with open(sys.argv[1], "rb") as requests:
        serve(requests, answers)
    print(MARK + base64.b64encode(answers.getvalue()).decode())


if __name__ == "__main__":
    main()
