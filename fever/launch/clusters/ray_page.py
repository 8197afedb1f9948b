"""Ray's dashboard on this machine: a server on the loopback device that adds Ray's token to what a browser asks.

The token stays out of the browser, where Ray's own page would keep it as a cookie for 30 days. A browser shows that it
may ask by a key in the address that `fever tunnel` prints, which becomes a cookie: whoever else works on this machine
cannot use the page. The key is of one tunnel. Requests that another site has caused are refused, as by the live page.
"""

from __future__ import annotations

import hmac
import secrets

import aiohttp
from aiohttp import web
from yarl import URL

from fever.board.guard import Guard, sentence
from fever.board.server_thread import ServerThread

CONNECT_SECONDS = 10.0  # for the forwarded port to take a connection
OWN_HEADERS = {  # of every answer
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NOT_PASSED_ON = {  # in lower case: those of one connection, and of whom it is between
    "connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "cookie", "set-cookie",
    "authorization", "x-ray-authorization", "content-length",
}  # fmt: skip


class RayPage(ServerThread):
    """Serves a dashboard until `close`. A context manager."""

    def __init__(self, dashboard: str, token: str, port: int) -> None:
        """`dashboard`: the URL where Ray's answers on this machine; `port`: a free one of the loopback device."""
        super().__init__("ray-page", "Ray's page")
        self.dashboard, self.token, self.port = dashboard, token, port
        self.key, self.session = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self.cookie = f"fever_ray_{port}"  # browsers send the cookies of all ports of a host to each
        self.guard = Guard("127.0.0.1")

    @property
    def url(self) -> str:
        """The address to open, with the key."""
        return f"http://127.0.0.1:{self.port}/?key={self.key}"

    async def _serve(self) -> None:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)  # a log may be silent for long
        async with aiohttp.ClientSession(timeout=limits, auto_decompress=False) as client:
            self.client = client
            app = web.Application(client_max_size=10_000)
            app.add_routes([web.get("/{path:.*}", self._answer)])  # HEAD too; nothing that changes the cluster
            runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", self.port).start()
                self.ready.set()
                await self.ended.wait()
            finally:
                await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        refusal = self.guard.foreign(request)
        if refusal is None and _equal(request.query.get("key", ""), self.key):
            opened = web.Response(status=302, headers={"Location": "/", **OWN_HEADERS})
            opened.set_cookie(self.cookie, self.session, httponly=True, samesite="Lax")
            return opened
        if refusal is None and not _equal(request.cookies.get(self.cookie, ""), self.session):
            refusal = sentence(401, "open the address that fever tunnel has printed")
        if refusal is not None:
            refusal.headers.update(OWN_HEADERS)
            return refusal
        return await self._pass_on(request)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in NOT_PASSED_ON}
        headers["Authorization"] = f"Bearer {self.token}"
        url = URL(f"{self.dashboard}{request.raw_path}", encoded=True)
        answer: web.StreamResponse | None = None
        try:
            async with self.client.request(request.method, url, headers=headers, allow_redirects=False) as given:
                answer = web.StreamResponse(status=given.status, reason=given.reason)
                kept = {name: value for name, value in given.headers.items() if name.lower() not in NOT_PASSED_ON}
                answer.headers.update({**kept, **OWN_HEADERS})
                await answer.prepare(request)
                async for chunk in given.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
        except (aiohttp.ClientError, TimeoutError) as error:
            if answer is not None and answer.prepared:
                raise  # the answer is cut, and the browser sees that
            return sentence(502, f"Ray on the cluster does not answer: {error}")
        return answer


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())
