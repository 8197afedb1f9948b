"""Who may ask what of the page's server, and what browsers may do with its answers.

A browser that has another site open must not be able to read runs: requests carry that site's name in Host (after DNS
rebinding), in Origin, or in Sec-Fetch-Site, and are refused. On addresses that other machines reach, a token is asked
for. It is in a file that only this user can read, is typed into a page once, and becomes a cookie.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from fever.errors import FeverError
from fever.files import write_atomically
from fever.job import records

COOKIE = "fever_board"  # begins its name
OPEN = ("/login", "/static/login.js", "/static/login.css")  # what needs no token
REFUSED_SECONDS = 1.0  # until a wrong token is answered
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_every_address(host: str) -> bool:
    """Whether this stands for all addresses of the machine, and so is none that can be opened."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


class Guard:
    """Checks every request before anything is looked up."""

    def __init__(self, host: str) -> None:
        """`host`: the address that the server listens on."""
        self.local = is_loopback(host)
        self.token = None if self.local else read_token()
        self.sessions: set[str] = set()
        self.names = {"localhost"} if self.local else {host, "localhost", *_own_names()}

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = self._refusal(request)
        if refusal is not None:
            response: web.StreamResponse = refusal
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = sentence(error.status, error.reason)
            except (FeverError, OSError) as error:
                response = sentence(404, str(error) if isinstance(error, FeverError) else str(error.strerror))
            except Exception as error:
                logging.getLogger(__name__).info("%s failed", request.path, exc_info=True)
                response = sentence(500, f"a file of this run is damaged ({type(error).__name__})")
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def foreign(self, request: web.Request) -> web.StreamResponse | None:
        """The refusal of a request that another site has caused, or that is for another server."""
        if not self._is_ours(request.headers.get("Host", "")):
            return sentence(403, "this server has another name; open the address that fever board printed")
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"{request.scheme}://{request.headers.get('Host', '')}":
            return sentence(403, "another site has asked for this")
        site = request.headers.get("Sec-Fetch-Site", "none")
        opened = request.headers.get("Sec-Fetch-Mode") == "navigate" and request.path in ("/", "/login")
        if site not in ("none", "same-origin") and not opened:
            return sentence(403, "another site has asked for this")
        return None

    def _refusal(self, request: web.Request) -> web.StreamResponse | None:
        if (refusal := self.foreign(request)) is not None:
            return refusal
        if self.token is None or request.path in OPEN or self._is_known(request):
            return None
        if request.path == "/":
            return web.Response(status=302, headers={"Location": "/login"})
        return sentence(401, "the token is missing: open the page anew")

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header names this server. A port does not matter: a tunnel may have another one."""
        match = re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?", host)
        if match is None:
            return False
        name = match[1]
        if name.lower() in self.names:
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return address.is_loopback or not self.local

    def _is_known(self, request: web.Request) -> bool:
        given = request.cookies.get(cookie_name(request), "").encode(errors="replace")
        return any(hmac.compare_digest(given, one.encode()) for one in self.sessions)

    async def log_in(self, request: web.Request) -> web.Response:
        """Exchange the token, sent as the text of a POST request, for a cookie."""
        given = (await request.text())[:1000].strip()
        if self.token is None or not hmac.compare_digest(given.encode(), self.token.encode()):
            await asyncio.sleep(REFUSED_SECONDS)
            return sentence(401, "this is not the token")
        session = secrets.token_urlsafe(32)
        self.sessions.add(session)
        response = web.json_response({})
        response.set_cookie(cookie_name(request), session, httponly=True, samesite="Strict")
        return response


def cookie_name(request: web.Request) -> str:
    """It has the port: browsers send a cookie to all ports of a machine, and several pages may be served there."""
    port = re.search(r":(\d+)$", request.headers.get("Host", ""))
    return f"{COOKIE}_{port[1] if port else 80}"


def sentence(status: int, text: str) -> web.Response:
    """An error as the page shows it."""
    return web.json_response({"error": text}, status=status)


def token_path() -> Path:
    return records("board-token")


def read_token() -> str:
    """The token of this user's servers, made at the first use in a file that only this user can read."""
    path = token_path()
    try:
        if not path.is_file() or path.stat().st_mode & 0o077:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, secrets.token_urlsafe(24) + "\n", mode=0o600)
        token = path.read_text().strip()
    except OSError as error:
        raise FeverError(f"the token of the page cannot be kept in {path}: {error.strerror}") from error
    if len(token) < 16:
        raise FeverError(f"{path} holds no token; remove it")
    return token


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    return {name, name.partition(".")[0], socket.getfqdn().lower()}
