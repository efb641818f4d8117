"""A proxy in front of an S3 server that fails or stalls some requests: real sockets, a real server behind."""

from __future__ import annotations

import contextlib
import http.client
import time
from urllib.parse import urlsplit

from tests.dist.flaky_server import OUTAGE_S, Handler, Server

__all__ = ["FlakyProxy"]

_HOP = {"connection", "keep-alive", "transfer-encoding"}


class FlakyProxy(Server):
    """Passes requests on.

    Attributes:
        fails: (method, text in path and query) → status of the answer, for all that fail.
        stalls: The same → seconds until it begins to read the body.
        dies: (method, text in path and query) of the request that takes the server down, for `OUTAGE_S`: it
            and all after it get a reset.
        loses: The same, of requests that are passed on and answered 500 all the same; once each.
        log: (method, path and query) of every request that failed.
        seen: (method, path and query) of every request.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(_Handler)
        self.behind = urlsplit(endpoint).netloc
        self.fails: dict[tuple[str, str], int] = {}
        self.stalls: dict[tuple[str, str], float] = {}
        self.dies: tuple[str, str] | None = None
        self.dead_until = 0.0
        self.loses: list[tuple[str, str]] = []
        self.log: list[tuple[str, str]] = []
        self.seen: list[tuple[str, str]] = []

    def came(self, method: str, path: str) -> None:
        """Called with each request."""
        self.seen.append((method, path))

    def hold(self, method: str, path: str) -> None:
        """Called before the store's answer to a request goes out; returns when it may."""


class _Handler(Handler):
    server: FlakyProxy

    def do_GET(self) -> None:
        self.server.came(self.command, self.path)
        if (
            self.server.dies is not None
            and self.server.dies[0] == self.command
            and self.server.dies[1] in self.path
        ):
            self.server.dies, self.server.dead_until = None, time.monotonic() + OUTAGE_S
        if time.monotonic() < self.server.dead_until:
            self.server.log.append((self.command, self.path))
            return self._reset()
        for (method, text), seconds in self.server.stalls.items():
            if method == self.command and text in self.path:
                time.sleep(seconds)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        for (method, text), status in list(self.server.fails.items()):
            if method == self.command and text in self.path:
                self.server.log.append((self.command, self.path))
                return self._answer(status, {}, b"")
        # Host stays as it was, since the signature covers it.
        with contextlib.closing(http.client.HTTPConnection(self.server.behind, timeout=30)) as behind:
            behind.request(self.command, self.path, body, dict(self.headers))
            answer = behind.getresponse()
            for method, text in self.server.loses:
                if method == self.command and text in self.path:
                    self.server.loses.remove((method, text))
                    return self._answer(500, {}, b"")
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
            content = answer.read()
            self.server.hold(self.command, self.path)
            return self._answer(answer.status, headers, content)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
