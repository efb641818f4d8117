"""An HTTP server with ranges and ETags that misbehaves on demand: real sockets, real faults."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

__all__ = ["OUTAGE_S", "FlakyServer", "Handler", "Server", "serve", "serving"]

OUTAGE_S = 5.0
_SMALL_BYTES = 4096  # these, and ranges from the beginning, are headers, which most tests leave alone
_STALL_S = 30.0
_TRICKLE_S = 0.25
_GATHERING_S = 20.0


class Server(ThreadingHTTPServer):
    """A server, on a free port of loopback if none is given, which says nothing of clients that give up."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, handler: type[BaseHTTPRequestHandler], address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        super().__init__(address, handler)

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.server_address)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that give up on an answer are part of the test


class Handler(BaseHTTPRequestHandler):
    """Keeps connections, and says nothing of requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body would wait for the client to acknowledge the headers, for 40 ms

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _reset(self) -> None:
        """Ends the connection with RST."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


class FlakyServer(Server):
    """Serves the files of a folder.

    Attributes:
        faults: How to fail, for the data requests to come: taken from the front, one each.
        log: (method, path, range) of every request.
        dead_until: Until when, by `time.monotonic`, every connection is reset.
        late_s: Seconds before each answer.
        num_together: The first data requests wait until there are so many; 0 once they have waited in vain.
        num_waiting: Data requests so far.
        came_together: Set when they need not wait.
        cut_off: Clients that name themselves so (header ``X-Rank``) get a reset for every data request.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(_Handler)
        self.folder = folder
        self.faults: list[str] = []
        self.log: list[tuple[str, str, str]] = []
        self.lock = threading.Lock()
        self.dead_until = 0.0
        self.late_s = 0.0
        self.num_together = 0
        self.num_waiting = 0
        self.came_together = threading.Event()
        self.cut_off = ""


class _Handler(Handler):
    server: FlakyServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.server.folder / self.path.lstrip("/")
        wanted = self.headers.get("Range", "")
        with self.server.lock:
            self.server.log.append((self.command, self.path, wanted))
        if time.monotonic() < self.server.dead_until:
            return self._reset()
        time.sleep(self.server.late_s)
        if not path.is_file():
            return self._status(404)
        data = path.read_bytes()
        begin, end = 0, len(data)
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            begin, end = int(first), min(int(last) + 1, len(data))
        fault = ""
        if with_body and begin and end - begin > _SMALL_BYTES:
            if self.server.cut_off and self.headers.get("X-Rank") == self.server.cut_off:
                return self._reset()
            self._wait_for_others()
            with self.server.lock:
                fault = self.server.faults.pop(0) if self.server.faults else ""
                if fault == "outage":
                    self.server.dead_until = time.monotonic() + OUTAGE_S
        self._send(data, begin, end, partial=bool(wanted), with_body=with_body, fault=fault)

    def _wait_for_others(self) -> None:
        server = self.server
        with server.lock:
            server.num_waiting += 1
            if server.num_waiting >= server.num_together:
                server.came_together.set()
        if not server.came_together.wait(_GATHERING_S):
            server.num_together = 0

    def _send(self, data: bytes, begin: int, end: int, *, partial: bool, with_body: bool, fault: str) -> None:
        if fault.isdigit():
            return self._status(int(fault))
        if fault in ("reset-before", "outage"):
            return self._reset()
        body = data[begin:end]
        if fault == "flip":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault == "wrong-length":
            body = body[: len(body) // 2]
        self.send_response(206 if partial else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"replaced"' if fault == "replaced" else '"v1"')
        if partial:
            self.send_header("Content-Range", f"bytes {begin}-{begin + len(body) - 1}/{len(data)}")
        self.end_headers()
        if not with_body:
            return None
        if fault in ("reset", "short", "stall", "trickle"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if fault == "stall":
                time.sleep(_STALL_S)
            for byte in body[: int(_STALL_S / _TRICKLE_S)] if fault == "trickle" else b"":
                self.wfile.write(bytes([byte]))
                time.sleep(_TRICKLE_S)
            return self._reset() if fault == "reset" else self._close()
        self.wfile.write(body)
        return None

    def _status(self, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _close(self) -> None:
        self.close_connection = True


S = TypeVar("S", bound=Server)


@contextlib.contextmanager
def serving(server: S) -> Iterator[S]:
    """Runs a server until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def serve(folder: Path) -> contextlib.AbstractContextManager[FlakyServer]:
    """Serves the files of a folder until the end of the block."""
    return serving(FlakyServer(folder))
