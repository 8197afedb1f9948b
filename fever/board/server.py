"""The page's server: addresses, live events, start and stop. It runs in a thread of its own and reads runs only."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from fever import __version__
from fever.board import curves, details
from fever.board.guard import HEADERS, Guard, is_every_address, sentence
from fever.board.listing import Listing
from fever.board.live import Event, Watcher
from fever.board.server_thread import ServerThread
from fever.errors import FeverError
from fever.files import open_regular

PORT = 8300  # the usual one
LOOK_SECONDS = 0.3  # between two looks at the runs, while somebody watches
ALIVE_SECONDS = 10.0  # between two signs of life to a page
MOST_WATCHED = 50  # runs that one page follows
MOST_READERS = 100  # pages at the same time
WAITING = 1000  # events that a page may be behind, before it is cut off and connects anew
CHUNK = 1 << 18  # bytes of a file that are sent at once
QUIET = logging.getLogger(__name__)  # of requests that are none: anybody can send them, and they are answered with 400
QUIET.disabled = True
STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".png": "image/png",
}  # fmt: skip


class Reader:
    """A page that is open."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.queue: asyncio.Queue[bytes] = asyncio.Queue(WAITING)
        self.behind = False

    def tell(self, event: bytes) -> None:
        """An event as it is sent."""
        try:
            self.queue.put_nowait(event)
        except asyncio.QueueFull:
            self.behind = True


class Board(ServerThread):
    """The page of one folder of runs, served until `close`. A context manager."""

    def __init__(self, runs: str | Path, host: str = "127.0.0.1", port: int | None = None) -> None:
        """Bind the address: `port`, or else the usual port or any free one; 0 is any free one. Raises `FeverError` if
        that is not possible."""
        super().__init__("fever-board", "the page")
        self.host = host
        self.guard = Guard(host)
        self.listing = Listing(runs)
        self.socket = bind(host, port)
        self.port: int = self.socket.getsockname()[1]
        self.readers: set[Reader] = set()
        self.watcher = Watcher(self.listing)
        self.lock = threading.Lock()  # of the watcher
        self.threads = ThreadPoolExecutor(4, "fever-board")
        self.statics = {f"/static/{path.relative_to(STATIC)}": path for path in STATIC.rglob("*") if path.is_file()}

    @property
    def url(self) -> str:
        host = socket.gethostname() if is_every_address(self.host) else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    # start and stop

    def close(self) -> None:
        super().close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.socket.close()

    async def _serve(self) -> None:
        self.loop.set_default_executor(self.threads)
        app = web.Application(middlewares=[self.guard.middleware], client_max_size=10_000)
        app.add_routes([
            web.get("/", self._page), web.get("/login", self._page), web.post("/login", self.guard.log_in),
            web.get("/static/{name:.+}", self._static), web.get("/api/runs", self._runs),
            web.get("/api/run", self._detail), web.get("/api/series", self._series),
            web.get("/api/episodes", self._episodes), web.get("/api/group", self._group),
            web.get("/api/workers", self._workers), web.get("/api/log", self._log), web.get("/file", self._file),
            web.get("/api/events", self._events),
        ])  # fmt: skip
        runner = web.AppRunner(app, access_log=None, logger=QUIET, handle_signals=False, shutdown_timeout=0.5)
        await runner.setup()
        await web.SockSite(runner, self.socket).start()
        looking = asyncio.create_task(self._look())
        self.ready.set()
        await self.ended.wait()
        looking.cancel()
        for reader in self.readers:
            reader.behind = True
            reader.tell(encoded("end", {}))
        await runner.cleanup()

    # what is served

    async def _page(self, request: web.Request) -> web.StreamResponse:
        name = "login.html" if request.path == "/login" and self.guard.token is not None else "index.html"
        return await self._static_file(f"/static/{name}")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        return await self._static_file(request.path)

    async def _static_file(self, path: str) -> web.StreamResponse:
        file = self.statics.get(path)
        if file is None:
            raise FeverError("there is no such page")
        kind = TYPES.get(file.suffix, "text/plain")
        content = await asyncio.to_thread(file.read_bytes)
        return web.Response(body=content, content_type=kind, charset="utf-8" if kind.startswith("text") else None)

    async def _answer(self, make: Callable[[], dict[str, Any]]) -> web.Response:
        """An object that is made in another thread, as JSON."""
        body = await asyncio.to_thread(lambda: to_json(make()))
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def _runs(self, request: web.Request) -> web.Response:
        return await self._answer(self._list)

    def _list(self) -> dict[str, Any]:
        changed, gone = self.listing.scan()
        rows = self.listing.rows()
        if changed or gone:  # readers do not see them as changes any more
            events: list[tuple[str | None, Event]] = [(None, ("runs", {"rows": changed, "gone": gone}))]
            self.loop.call_soon_threadsafe(self._publish, events)
        return {"folder": str(self.listing.folder), "fever": __version__, "now": time.time(), "runs": rows}

    async def _detail(self, request: web.Request) -> web.Response:
        name = _word(request, "id")
        return await self._answer(lambda: details.describe(self.listing, name))

    async def _series(self, request: web.Request) -> web.Response:
        name, names, x = _word(request, "id"), _words(request, "names"), request.query.get("x", "steps")
        low, high, points = _number(request, "from"), _number(request, "to"), int(_number(request, "points") or 1000)
        return await self._answer(lambda: curves.series(self.listing.run(name), names, x, low, high, points))

    async def _episodes(self, request: web.Request) -> web.Response:
        name, names = _word(request, "id"), _words(request, "info")
        low, high, points = _number(request, "from"), _number(request, "to"), int(_number(request, "points") or 1500)
        return await self._answer(lambda: curves.episodes(self.listing.run(name), names, low, high, points))

    async def _group(self, request: web.Request) -> web.Response:
        names, metric = _words(request, "ids"), request.query.get("metric", "return_mean")
        x = request.query.get("x", "steps")
        return await self._answer(lambda: curves.group([self.listing.run(name) for name in names], metric, x))

    async def _workers(self, request: web.Request) -> web.Response:
        name = _word(request, "id")
        state = self.listing.entry(name).row["state"]
        return await self._answer(lambda: details.workers(self.listing.run(name), state))

    async def _log(self, request: web.Request) -> web.Response:
        name, most = _word(request, "id"), int(_number(request, "bytes") or 1 << 16)
        return await self._answer(lambda: details.log(self.listing.run(name), most))

    async def _file(self, request: web.Request) -> web.StreamResponse:
        """A video or a picture, or the part of it that a Range header asks for."""
        run = self.listing.run(_word(request, "id"))
        path, kind = await asyncio.to_thread(details.served_file, run, _word(request, "name"))
        with open_regular(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
            if not Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).is_relative_to(self.listing.folder):
                raise FeverError("there is no such file here")
            size = os.fstat(file.fileno()).st_size
            begin, end = _range(request.headers.get("Range"), size)
            response = web.StreamResponse(status=200 if end is None else 206)
            response.content_type = kind
            response.headers["Accept-Ranges"] = "bytes"
            if end is not None:
                response.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
            left = (size if end is None else end) - begin
            response.content_length = left
            response.headers.update(HEADERS)
            await response.prepare(request)
            file.seek(begin)
            while left > 0 and (part := await asyncio.to_thread(file.read, min(CHUNK, left))):
                await response.write(part)
                left -= len(part)
        return response

    # live events

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if len(self.readers) >= MOST_READERS:
            return sentence(503, "too many pages are open")
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        response.headers.update(HEADERS)
        response.headers["Cache-Control"] = "no-store"
        reader = Reader(set(_words(request, "watch")[:MOST_WATCHED]))
        self.readers.add(reader)
        try:
            await asyncio.to_thread(self._watch)
            await response.prepare(request)
            await response.write(b": alive\n\n")  # from here on nothing is missed: the page fetches now
            while not reader.behind:
                try:
                    event = await asyncio.wait_for(reader.queue.get(), ALIVE_SECONDS)
                except TimeoutError:
                    event = b": alive\n\n"
                await response.write(event)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.readers.discard(reader)
        return response

    def _watch(self) -> None:
        """Follow what all readers watch."""
        names: set[str] = set().union(*(reader.names for reader in list(self.readers)))
        with self.lock:
            self.watcher.watch(names)

    async def _look(self) -> None:
        """Look at the runs as long as somebody watches."""
        while True:
            if self.readers:
                with suppress(Exception):  # the next look may succeed
                    self._publish(await asyncio.to_thread(self._changes))
            await asyncio.sleep(LOOK_SECONDS)

    def _changes(self) -> list[tuple[str | None, Event]]:
        self._watch()
        with self.lock:
            return list(self.watcher.look())

    def _publish(self, events: list[tuple[str | None, Event]]) -> None:
        for name, (kind, content) in events:
            told = [reader for reader in self.readers if name is None or name in reader.names]
            event = encoded(kind, {**content, "now": time.time()}) if told else b""  # once, however many pages are open
            for reader in told:
                reader.tell(event)


def bind(host: str, port: int | None) -> socket.socket:
    """A socket that listens on an address; raises `FeverError` if that is taken or not this machine's."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        try:
            return _listen(kind, (address[0], PORT if port is None else port))
        except OSError:
            if port is not None:
                raise
            return _listen(kind, (address[0], 0))
    except (OSError, OverflowError) as error:
        at = host if port is None else f"{host}:{port}"
        reason = getattr(error, "strerror", None) or str(error)
        raise FeverError(f"the page cannot be served at {at}: {reason}; choose another --port or --host") from error


def _listen(kind: int, address: tuple[Any, int]) -> socket.socket:
    made = socket.socket(kind, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen()
    except BaseException:
        made.close()
        raise
    return made


def encoded(kind: str, content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"event: " + kind.encode() + b"\ndata: " + to_json(content) + b"\n\n"


def to_json(value: Any) -> bytes:
    """As one line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode(errors="replace")


def _word(request: web.Request, name: str) -> str:
    return request.query.get(name, "")


def _words(request: web.Request, name: str) -> list[str]:
    """Names that are joined with commas; those within a name are encoded, as `join` in core/lists.js does."""
    return [unquote(word) for word in request.query.get(name, "").split(",") if word]


def _number(request: web.Request, name: str) -> float | None:
    text = request.query.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e300:
        raise FeverError(f"{name} must be a number")
    return value


def _range(header: str | None, size: int) -> tuple[int, int | None]:
    """The first byte that is asked for and the place behind the last one; None: the whole file."""
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", header or "")
    if match is None or not size or not (match[1] or match[2]):
        return 0, None
    if not match[1]:  # the last bytes
        return max(0, size - int(match[2])), size
    begin = int(match[1])
    end = min(size, int(match[2]) + 1) if match[2] else size
    return (begin, end) if begin < end else (0, None)
