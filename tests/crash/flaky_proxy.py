"""A proxy in front of an S3 server that fails some of the requests: real sockets, a real server behind."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

__all__ = ["FlakyProxy", "proxy_of"]

_HOP = {"connection", "keep-alive", "transfer-encoding"}


class FlakyProxy(ThreadingHTTPServer):
    """Passes requests on.

    Attributes:
        fails: (method, text in path and query) → status of the answer, for all that fail.
        log: (method, path and query) of every request that failed.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = urlsplit(endpoint).netloc
        self.fails: dict[tuple[str, str], int] = {}
        self.log: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that give up are part of the test


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FlakyProxy

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        for (method, text), status in list(self.server.fails.items()):
            if method == self.command and text in self.path:
                self.server.log.append((self.command, self.path))
                return self._answer(status, {}, b"")
        # Host stays as it was, since the signature covers it.
        with contextlib.closing(http.client.HTTPConnection(self.server.behind, timeout=30)) as behind:
            behind.request(self.command, self.path, body, dict(self.headers))
            answer = behind.getresponse()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
            return self._answer(answer.status, headers, answer.read())

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


@contextlib.contextmanager
def proxy_of(endpoint: str) -> Iterator[FlakyProxy]:
    """Runs a proxy on loopback until the end of the block."""
    server = FlakyProxy(endpoint)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
