"""Copies a folder between two machines over one connection, incrementally: each byte is sent once and verified.

The client (`Mirror`) writes requests and the server (`serve`) answers them. Both are lines of JSON, followed by the
bytes of a file where one is sent. A file that has grown is sent from where the copy ends, after its beginning was
compared by hash. Every file is hashed by the sender and by the receiver. A new file gets its name only when it is
complete; what an interrupted transfer leaves is a prefix from which the next one continues.

    pull     {"do": "pull", "folder", "extra": {name: path outside the folder}, "have": {name: [size, hash]},
             "skip": [prefix]} is answered by {"name", "offset", "size", "hash"} and bytes for every file that differs,
             then by {"names": [...]}. Without "have" it continues from what this connection has sent before.
    list     {"do": "list", "folder"} is answered by {"files": {name: [size, hash]}}
    push     {"do": "push", "folder", "name", "size", "hash", "mode"} and bytes is answered by {}
    prune    {"do": "prune", "folder", "names", "prefixes"} is answered by {}: removes files whose name has one of
             these prefixes and is not in the list
    inspect  {"do": "inspect", "folder"} is answered by {"folder": its absolute path, "missing": [module]}

A connection is a pair of byte streams: those of ssh (`launch/clusters/link.py`), or an `Exchange` on top of whatever
carries one message and its reply: Ray's jobs (`launch/clusters/existing.py`), a Ray actor (`tune/store.py`).
`python -m fever.runs.mirror FILE` answers the requests in a file and prints the answers.

This module is sent to hosts over ssh and uses the standard library only.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fever import layout
from fever.errors import FeverError
from fever.files import refuse_link, user_path

CHUNK = 1 << 20
ANSWERS = "fever-files "  # begins the line in which a job prints its answers
REPLY = "fever-reply "  # begins the lines in which `agent.py` replies
REQUIRED = ("gymnasium", "jax", "numpy", "pydantic", "ray", "safetensors", "typer", "yaml")  # modules that train
PARTIAL = ".partial-"  # begins the name of an incomplete file
LOCAL = tuple(f"{layout.JOB}/{name}" for name in ("job.json", "exit.json", layout.SIGNATURE))  # the client's own
APPENDED = (".jsonl", ".txt", ".log")  # files that are appended to, and rarely shortened; TensorBoard's events, too
ENDING = 256  # bytes before a place that show whether a file was only appended to since it was read up to there
PRUNED = (  # prefixes of the names that are removed from a copy when the original no longer has them
    *(f"{folder}/" for folder in (layout.CHECKPOINTS, layout.REPLAY, layout.TRIALS, layout.TUNE)),
    f"{layout.VIDEOS}/{layout.TRAINING_VIDEO}", layout.SUMMARY,
)  # fmt: skip


class Digest:
    """A running hash of a file's beginning, continued as the file grows."""

    def __init__(self, name: str = "") -> None:
        """`name` of the file: only some kinds of files are known to be appended to, and not rewritten byte by byte."""
        self.size, self.inode, self.seen = 0, -1, (0, 0)
        self.ending = b""  # of what was hashed
        self.appended = name.endswith(APPENDED) or layout.EVENTS in name
        self.hash = hashlib.sha256()

    def upto(self, file: BinaryIO, size: int) -> str:
        """The hash of the first `size` bytes of an open file."""
        stat = os.fstat(file.fileno())
        rewritten = (stat.st_size, stat.st_mtime_ns) != self.seen and not (
            self.appended and stat.st_size > self.seen[0]
        )
        if stat.st_ino != self.inode or size < self.size or rewritten or self._ending(file) != self.ending:
            self.size, self.ending, self.hash = 0, b"", hashlib.sha256()
        self.saw(stat)
        file.seek(self.size)
        while self.size < size and (block := file.read(min(CHUNK, size - self.size))):
            self.add(block)
        return self.hash.hexdigest()

    def _ending(self, file: BinaryIO) -> bytes:
        """What the file has now at the end of the part that was hashed. A new file may have the inode of an old one."""
        file.seek(self.size - len(self.ending))
        return file.read(len(self.ending))

    def saw(self, stat: os.stat_result) -> None:
        """Note the state in which the file has the beginning that was hashed."""
        self.inode, self.seen = stat.st_ino, (stat.st_size, stat.st_mtime_ns)

    def add(self, block: bytes) -> None:
        self.hash.update(block)
        self.size += len(block)
        self.ending = (self.ending + block[-ENDING:])[-ENDING:]


def digest_of(path: Path, digest: Digest | None = None) -> tuple[int, str]:
    """A file's size and hash."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return size, (digest or Digest()).upto(file, size)


def names_in(folder: Path) -> list[str]:
    """Relative paths of the regular files below a folder, sorted. Hidden ones, such as partial files, are left out, and
    symbolic links, which may lead anywhere."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or error.filename == str(folder):
            raise error  # but an old checkpoint may be removed at this moment

    found = []
    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(parent) / name for name in files if not name.startswith("."))
        found += [path.relative_to(folder).as_posix() for path in paths if is_own_file(path)]
    return sorted(found)


def is_own_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def write_line(stream: BinaryIO, values: dict[str, Any]) -> None:
    stream.write(json.dumps(values).encode() + b"\n")


def read_line(stream: BinaryIO) -> dict[str, Any]:
    """The next line; raises EOFError at the end of the stream, and FeverError with an error of the other side."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    if line.startswith(REPLY.encode()):
        error = json.loads(line[len(REPLY) :]).get("error") or "it ended"
        raise FeverError(error.strip().splitlines()[-1])
    return json.loads(line)


def blocks(stream: BinaryIO, count: int) -> Iterator[bytes]:
    """Exactly `count` bytes, in blocks; raises EOFError if the stream ends before."""
    while count:
        block = stream.read(min(CHUNK, count))
        if not block:
            raise EOFError
        count -= len(block)
        yield block


def inside(folder: Path, name: str) -> Path:
    """The path of a file below a folder; refuses names from the other side that lead elsewhere, also by a link."""
    path = Path(name)
    hidden = any(part.startswith(".") for part in path.parts)  # partial files have such names
    if path.is_absolute() or hidden or path.as_posix() != name:
        raise FeverError(f"{name!r} is not the name of a file below {folder}")
    for part in (path, *path.parents[:-1]):
        refuse_link(folder / part)
    return folder / path


# the server


def serve(
    requests: BinaryIO,
    answers: BinaryIO,
    root: Path = Path(),
    more: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] | None = None,
) -> None:
    """Answer requests until the client closes the connection. Relative folders are below `root`; `more`: functions
    that answer further kinds of requests."""
    sources: dict[str, Source] = {}
    while True:
        try:
            request = read_line(requests)
        except EOFError:
            return
        if more is not None and request["do"] in more:
            write_line(answers, more[request["do"]](request))
            answers.flush()
            continue
        folder = root / user_path(request["folder"])
        source = sources.setdefault(request["folder"], Source(folder))
        if request["do"] == "pull":
            source.pull(request, answers)
        elif request["do"] == "list":
            write_line(answers, {"files": source.list()})
        elif request["do"] == "inspect":
            missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
            write_line(answers, {"folder": str(folder.resolve()), "missing": missing})
        elif request["do"] == "prune":
            for name in set(source.names()) - set(request["names"]):
                if name.startswith(tuple(request["prefixes"])):
                    remove(folder, name)
            write_line(answers, {})
        else:
            receive(folder, request, requests)
            write_line(answers, {})
        answers.flush()


def answer(requests: bytes, root: Path = Path()) -> bytes:
    """The answers to the requests of an `Exchange`."""
    answers = io.BytesIO()
    serve(io.BytesIO(requests), answers, root)
    return answers.getvalue()


class Source:
    """A folder whose files the server sends."""

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
        """Send what the client does not have."""
        if not self.folder.is_dir():
            write_line(answers, {"gone": True})
            return
        if "have" in request:
            self.sent = {name: (size, hash) for name, (size, hash) in request["have"].items()}
        paths = {name: self.folder / name for name in names_in(self.folder)}
        paths |= {name: Path(path) for name, path in request.get("extra", {}).items()}
        present = []
        for name, path in paths.items():
            if name.startswith(tuple(request.get("skip", ()))):
                present.append(name)
                continue
            try:
                with open(path, "rb") as file:
                    self._send(name, file, answers)
                present.append(name)
            except FileNotFoundError:  # an old checkpoint, removed at this moment
                continue
        write_line(answers, {"names": present})

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
    """Receive a complete file; raises FeverError if its hash differs."""
    path = inside(folder, header["name"])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, digest = path.with_name(PARTIAL + path.name), Digest()
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, header.get("mode", 0o644)), "wb") as file:
        for block in blocks(stream, header["size"]):
            digest.add(block)
            file.write(block)
    if digest.hash.hexdigest() != header["hash"]:
        partial.unlink()
        raise FeverError(f"{header['name']} was damaged in transfer; try again")
    partial.replace(path)


def remove(folder: Path, name: str) -> None:
    """Remove a file below a folder, and the folders that this leaves empty."""
    path = inside(folder, name)
    path.unlink(missing_ok=True)
    while (path := path.parent) != folder and path.is_dir() and not any(path.iterdir()):
        path.rmdir()


# the client


class RemoteFolderGone(FeverError):
    """The folder to be copied does not exist on the other side."""


class Exchange(io.BytesIO):
    """A connection on top of a call that takes requests and returns their answers, both as bytes.

    `flush` makes the call with all that was written; its answers are read from the same object. Every call may reach a
    new server, which knows nothing of earlier ones.
    """

    def __init__(self, call: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self.call, self.requests = call, bytearray()

    def write(self, data: Any) -> int:
        self.requests += data
        return len(data)

    def flush(self) -> None:
        if self.requests:
            requests, self.requests = bytes(self.requests), bytearray()
            answers = self.call(requests)
            self.seek(0)
            self.truncate(0)
            super().write(answers)
            self.seek(0)


class Mirror:
    """A local folder and its counterpart on another machine."""

    def __init__(
        self, folder: Path, remote_path: str, requests: BinaryIO, answers: BinaryIO, prune: tuple[str, ...] = PRUNED
    ) -> None:
        """`remote_path`: the folder as the server knows it; `requests`, `answers`: the connection.

        `prune`: prefixes of the names that are removed from the copy when the original no longer has them; other
        files that only the copy has are kept.
        """
        self.folder, self.remote_path = folder, remote_path
        self.requests, self.answers = requests, answers
        self.prune = prune
        self.id = secrets.token_hex(8)
        self.digests: dict[str, Digest] = {}
        self.announced = False  # whether the server knows what the local folder has
        self.names = {layout.SUMMARY}  # seen on the server, or possibly there before this connection
        self.moved = 0  # bytes received so far

    def pull(self, extra: dict[str, str] | None = None, skip: tuple[str, ...] = ()) -> None:
        """Bring the local folder up to date with the remote one.

        `extra`: further remote files, by the name that they get here; `skip`: prefixes of remote names that are left
        as they are here. Raises RemoteFolderGone if the remote folder does not exist, and FeverError if a local file
        cannot be written; the connection remains usable for other folders.
        """
        request = {"do": "pull", "folder": self.remote_path, "extra": extra or {}, "skip": skip}
        if not self.announced:
            request["have"] = self._have()
        write_line(self.requests, request)
        self.requests.flush()
        problem: FeverError | None = None
        while "name" in (header := read_line(self.answers)):
            arriving = blocks(self.answers, header["size"] - header["offset"])
            try:
                self._take(header, arriving)
            except FeverError as error:
                problem, self.announced = problem or error, False
                self.digests.pop(header["name"], None)
            for _ in arriving:  # the next header is behind it
                pass
        if "gone" in header:
            raise RemoteFolderGone(f"{self.remote_path} no longer exists on the cluster; what was fetched is kept")
        if problem is not None:
            raise problem
        self.announced = True
        for name in header["names"]:
            if not name.startswith(skip):
                self._finish(name)
        for name in self.names - set(header["names"]):
            if name.startswith(self.prune):
                path = inside(self.folder, name)
                path.with_name(PARTIAL + path.name).unlink(missing_ok=True)
                remove(self.folder, name)
                self.digests.pop(name, None)
        self.names = set(header["names"])

    def _have(self) -> dict[str, tuple[int, str]]:
        """Size and hash of every local file, including the prefixes that interrupted transfers left."""
        found: dict[str, tuple[int, str]] = {}
        for path in sorted(self.folder.rglob("*")):
            if is_own_file(path):
                whole = path.with_name(path.name.removeprefix(PARTIAL))
                name = whole.relative_to(self.folder).as_posix()
                if "/." in f"/{name}":  # hidden: the server has none of these
                    continue
                if path == whole and name in found:  # its next version is partly here
                    continue
                found[name] = digest_of(path, self.digests.setdefault(name, Digest(name)))
        self.names |= {name for name in found if name.startswith(self.prune)}  # of an earlier connection
        return found

    def _take(self, header: dict[str, Any], arriving: Iterator[bytes]) -> None:
        if header["name"] in LOCAL:
            return
        path = inside(self.folder, header["name"])
        partial = path.with_name(PARTIAL + path.name)
        grows = header["offset"] and not partial.exists()
        target = path if grows else partial
        if grows and path.stat().st_size != header["offset"]:
            raise ValueError(f"{path} was changed by another process")  # a new connection starts from what is here
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
            raise FeverError(f"{header['name']} was damaged in transfer; fetch again")
        if target == partial:
            partial.replace(path)
        digest.saw(path.stat())

    def _finish(self, name: str) -> None:
        """Rename a file that was complete when the last transfer was interrupted."""
        path = inside(self.folder, name)
        partial = path.with_name(PARTIAL + path.name)
        if partial.exists():
            partial.replace(path)

    def push(self, skip: tuple[str, ...] = ()) -> None:
        """Bring the remote folder up to date with the local one; `skip`: prefixes of names that are not sent."""
        write_line(self.requests, {"do": "list", "folder": self.remote_path})
        self.requests.flush()
        remote = read_line(self.answers)["files"]
        count, names = 0, [name for name in names_in(self.folder) if not name.startswith(skip)]
        for name in names:
            path = self.folder / name
            size, whole = digest_of(path)
            if remote.get(name) != [size, whole]:
                header = {"do": "push", "folder": self.remote_path, "name": name, "size": size, "hash": whole}
                write_line(self.requests, {**header, "mode": path.stat().st_mode & 0o777})
                with open(path, "rb") as file:
                    for block in blocks(file, size):
                        self.requests.write(block)
                count += 1
        write_line(self.requests, {"do": "prune", "folder": self.remote_path, "names": names, "prefixes": self.prune})
        self.requests.flush()
        for _ in range(count + 1):
            read_line(self.answers)


def main() -> None:
    """Answer the requests in a file."""
    print(ANSWERS + base64.b64encode(answer(Path(sys.argv[1]).read_bytes())).decode())


if __name__ == "__main__":
    main()
