"""The HTTP server: read-only, with ranges, bounded in connections, time and rate."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from fastload.base.version import __version__
from fastload.errors import StorageError
from fastload.ext.serve.access import is_authorized
from fastload.ext.serve.checkpoints import Served, Shelf
from fastload.ext.serve.pace import FIRST_PART_BYTES, Rate, next_part
from fastload.ext.serve.process import READS

_log = logging.getLogger(__name__)

_TICK_S = 1.0
_IDLE_S = 15.0  # until a connection without a complete request is closed
_STALL_S = 30.0  # for a client to take one part of a response
_COMING_S = 10.0  # for bytes that are on their way here
_POLL_S = 0.02
_CHECK_S = 0.5  # between looks at whether they still are, which take longer
_ACCEPT_TURNS = 2  # of the loop, until a connection that was accepted has a transport and a handler
_INDEX_PAUSE = 4  # × the time to make the index, before it is made again
_TLS_BYTES = 256 << 10
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_METHODS = ("GET", "HEAD")
_TOKEN_NEEDED = (
    "send the server's token as 'Authorization: Bearer WORD': storage_options= of fastload takes it as "
    "{'default_headers': {'Authorization': 'Bearer WORD'}}"
)


@dataclass(frozen=True)
class ServeTerms:
    """How to serve.

    Attributes:
        token: What clients have to know; None lets all of them read.
        rate: The most bytes per second for all clients together; None for no limit.
        max_connections: The most connections at once.
        ident: Identifies the server, so that a client recognizes its own.
    """

    token: str | None = field(repr=False)
    rate: int | None
    max_connections: int
    ident: str


class _Refused(Exception):
    """A response without a file.

    Args:
        status: Its status.
        text: What to say.
        headers: More headers.
    """

    def __init__(self, status: HTTPStatus, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers or {}


class _Wanted:
    """The bytes that a request asks for: of a file, from `begin` to `end`; `is_part` if it names a range."""

    def __init__(self, served: Served, path: str, request: web.BaseRequest) -> None:
        self.served = served
        self.path = path
        self.nbytes = nbytes = served.files[path].nbytes
        text = request.headers.get("Range", "")
        if request.headers.get("If-Range", self.etag) != self.etag:
            text = ""
        self.is_part = bool(text)
        self.begin, self.end = _parse_range(text, nbytes) if text else (0, nbytes)

    @property
    def etag(self) -> str:
        return f'"{self.served.digest}"'

    def is_there(self) -> bool:
        return self.begin == self.end or self.served.has(self.path, self.begin, self.end)

    def is_coming(self) -> bool:
        """Whether all that is not there is being read from the origin by this process."""
        at = self.begin
        for begin, end in READS.of(self.served.digest).get(self.path, ()):
            if begin >= self.end or (at < begin and not self.served.has(self.path, at, begin)):
                break
            at = max(at, end)
        return at >= self.end or self.served.has(self.path, at, self.end)


def _parse_range(text: str, nbytes: int) -> tuple[int, int]:
    """Returns (begin, end) of the one range in a header."""
    found = _RANGE.fullmatch(text.replace(" ", ""))
    begin, end = 0, 0
    if found is not None and found[1]:
        begin, end = int(found[1]), min(int(found[2] or nbytes) + bool(found[2]), nbytes)
    elif found is not None and found[2]:
        begin, end = max(0, nbytes - int(found[2])), nbytes
    if begin >= end:
        unsatisfied = {"Content-Range": f"bytes */{nbytes}"}
        raise _Refused(
            HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            "only one range, within the file, is sent",
            unsatisfied,
        )
    return begin, end


class Connections(web.Server):
    """Bounds the connections of a server. Those without a complete request make room for new ones.

    Args:
        responder: Responds to requests.
        most: The most connections at once.
    """

    def __init__(self, responder: Responder, most: int) -> None:
        super().__init__(self._respond, keepalive_timeout=_IDLE_S, lingering_time=0.0, access_log=None)
        self._responder = responder
        self._most = most
        self._idle: dict[RequestHandler, float] = {}  # since when, the longest first
        self._busy: set[RequestHandler] = set()

    @property
    def num_open(self) -> int:
        """Connections that are open."""
        return len(self._idle) + len(self._busy)

    @property
    def num_busy(self) -> int:
        """Connections with a request that is being responded to."""
        return len(self._busy)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Takes a connection; closes the one that has been idle for longest if there are too many."""
        super().connection_made(handler, transport)
        loop = asyncio.get_running_loop()
        self._idle[handler] = loop.time()
        if self.num_open > self._most:
            surplus = next(iter(self._idle))
            self._forget(surplus)
            loop.call_soon(self.abort, surplus)  # if it is this one, aiohttp has yet to start its task

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """Forgets a connection."""
        super().connection_lost(handler, exc)
        self._forget(handler)

    def close_idle(self) -> None:
        """Closes the connections that have been idle for too long."""
        now_s = asyncio.get_running_loop().time()
        for handler in [one for one, since_s in self._idle.items() if now_s - since_s > _IDLE_S]:
            self.abort(handler)

    def abort(self, handler: RequestHandler) -> None:
        """Ends a connection at once, also if a process that was forked meanwhile has it open."""
        self._forget(handler)
        if isinstance(handler.transport, asyncio.Transport):
            with suppress(OSError):  # it has ended
                handler.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            handler.transport.abort()

    def abort_all(self) -> None:
        """Ends all connections at once, and each that is being accepted once it is made."""
        self._most = 0
        for handler in [*self._idle, *self._busy]:
            self.abort(handler)

    def _forget(self, handler: RequestHandler) -> None:
        self._idle.pop(handler, None)
        self._busy.discard(handler)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = request.protocol
        if handler not in self._idle:  # aborted
            return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE)
        del self._idle[handler]
        self._busy.add(handler)
        try:
            return await self._responder.respond(request)
        finally:
            if handler in self._busy:
                self._busy.remove(handler)
                self._idle[handler] = asyncio.get_running_loop().time()


class _Index:
    """The response to ``GET /``. It is made again after a multiple of the time that takes, however many ask.

    Args:
        describe: Returns its content.
    """

    def __init__(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        self._describe = describe
        self._text = ""
        self._good_until_s = float("-inf")

    def text(self) -> str:
        """Returns it as JSON."""
        began_s = time.monotonic()
        if began_s >= self._good_until_s:
            self._text = json.dumps(self._describe())
            ended_s = time.monotonic()
            self._good_until_s = ended_s + _INDEX_PAUSE * (ended_s - began_s)
        return self._text


class Responder:
    """Responds to the requests of clients.

    Args:
        shelf: The checkpoints.
        terms: How to serve.
    """

    def __init__(self, shelf: Shelf, terms: ServeTerms) -> None:
        self._shelf = shelf
        self._terms = terms
        self._rate = Rate(terms.rate)
        self._sent_bytes = 0
        self._sent_before = 0  # at the last tick
        self._bytes_s = 0.0
        self._connections = Connections(self, terms.max_connections)
        self._index = _Index(self._describe)

    async def run(self, listener: Any, context: ssl.SSLContext | None, until: asyncio.Event) -> None:
        """Serves until an event.

        Args:
            listener: The socket that listens.
            context: The TLS settings; None without TLS.
            until: The event.
        """
        loop = asyncio.get_running_loop()
        handshake: dict[str, Any] = {"ssl_handshake_timeout": _IDLE_S} if context is not None else {}
        server = await loop.create_server(self._connections, sock=listener, ssl=context, **handshake)
        try:
            while not until.is_set():
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(until.wait(), _TICK_S)
                self._connections.close_idle()
                self._bytes_s = (self._sent_bytes - self._sent_before) / _TICK_S
                self._sent_before = self._sent_bytes
        finally:
            loop.remove_reader(listener)
            for _ in range(_ACCEPT_TURNS):  # what a closed server has accepted stays open
                await asyncio.sleep(0)
            server.close()
            self._connections.abort_all()
            await self._connections.shutdown(_TICK_S)

    async def respond(self, request: web.BaseRequest) -> web.StreamResponse:
        """Responds to a request."""
        try:
            self._require_allowed(request)
            if self._shelf.is_stale:
                await asyncio.get_running_loop().run_in_executor(None, self._shelf.look)
            if request.path == "/":
                if "Range" in request.headers:  # a load, of a checkpoint that would be here
                    raise _Refused(HTTPStatus.NOT_FOUND, "the index, and no file")
                return web.json_response(text=self._index.text())
            wanted = _Wanted(*_find(self._shelf.all(), request.path), request)
            matches = request.headers.get("If-Match", "*")
            if matches != "*" and wanted.etag not in matches.split(", "):
                raise _Refused(HTTPStatus.PRECONDITION_FAILED, "another checkpoint is here")
            await self._await_bytes(wanted)
            return await self._send(request, wanted)
        except _Refused as refused:
            return web.Response(status=refused.status, text=f"{refused}\n", headers=refused.headers)
        except StorageError as error:  # such as too many open files
            _log.warning("%s", error)
            return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE, text="cannot be read now\n")

    def _require_allowed(self, request: web.BaseRequest) -> None:
        if request.method not in _METHODS:
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "read only", {"Allow": ", ".join(_METHODS)})
        token = self._terms.token
        if token is not None and not is_authorized(token, request.headers.get("Authorization", "")):
            raise _Refused(HTTPStatus.UNAUTHORIZED, _TOKEN_NEEDED, {"WWW-Authenticate": "Bearer"})

    def _describe(self) -> dict[str, Any]:
        """Returns what clients ask for first: what is here, and how busy the server is."""
        found = {}
        for name, served in self._shelf.all().items():
            found[name] = {
                "digest": served.digest,
                "nbytes": served.nbytes,
                "files": {path: file.nbytes for path, file in served.files.items()},
                "ranges": served.ranges(),
                "coming": READS.of(served.digest),
            }
        load = {
            "connections": self._connections.num_open,
            "requests": self._connections.num_busy,
            "bytes_sent": self._sent_bytes,
            "bytes_s": self._bytes_s,
        }
        return {"fastload": __version__, "id": self._terms.ident, "load": load, "checkpoints": found}

    async def _await_bytes(self, wanted: _Wanted) -> None:
        """Waits for bytes that are on their way here."""
        loop = asyncio.get_running_loop()
        late_s, checked_s = loop.time() + _COMING_S, 0.0
        while not wanted.is_there():
            now_s = loop.time()
            is_due = now_s >= checked_s + _CHECK_S
            if now_s > late_s or (is_due and not wanted.is_coming()):
                raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "not here yet", {"Retry-After": "1"})
            checked_s = now_s if is_due else checked_s
            await asyncio.sleep(_POLL_S)

    async def _send(self, request: web.BaseRequest, wanted: _Wanted) -> web.StreamResponse:
        with wanted.served.open(wanted.path) as number:
            if number is None:
                raise _Refused(HTTPStatus.NOT_FOUND, "the file is gone, or was changed")
            response = web.StreamResponse(
                status=HTTPStatus.PARTIAL_CONTENT if wanted.is_part else HTTPStatus.OK,
                headers={"ETag": wanted.etag, "Accept-Ranges": "bytes"},
            )
            response.content_type = "application/octet-stream"
            response.content_length = wanted.end - wanted.begin
            if wanted.is_part:
                place = f"bytes {wanted.begin}-{wanted.end - 1}/{wanted.nbytes}"
                response.headers["Content-Range"] = place
            await response.prepare(request)
            if request.method == "GET":
                await self._send_file(request, response, number, wanted.begin, wanted.end)
        return response

    async def _send_file(
        self, request: web.BaseRequest, response: web.StreamResponse, number: int, begin: int, end: int
    ) -> None:
        """Sends a part of a file; the connection ends if the client stops taking it."""
        loop, part_bytes = asyncio.get_running_loop(), FIRST_PART_BYTES
        while begin < end:
            nbytes = min(part_bytes, self._rate.part_bytes, end - begin)
            await self._rate.wait(nbytes)
            began_s = loop.time()
            try:
                sent = await asyncio.wait_for(_send_part(request, response, number, begin, nbytes), _STALL_S)
            except (OSError, RuntimeError, asyncio.TimeoutError):
                sent = 0
            if sent != nbytes:  # the client has left, or stalls; or the file is shorter now
                self._connections.abort(request.protocol)
                return
            part_bytes = next_part(nbytes, loop.time() - began_s)
            self._sent_bytes += sent
            begin += sent


async def _send_part(
    request: web.BaseRequest, response: web.StreamResponse, number: int, begin: int, nbytes: int
) -> int:
    """Sends a part of an open file; returns the bytes that were sent."""
    loop, transport = asyncio.get_running_loop(), request.transport
    if transport is None:
        return 0
    sent = 0
    with os.fdopen(number, "rb", buffering=0, closefd=False) as file:
        if transport.get_extra_info("sslcontext") is None:
            return await loop.sendfile(transport, file, begin, nbytes)
        file.seek(begin)
        while sent < nbytes:  # sendfile of asyncio encrypts 16 KiB at once, which costs several times as much
            data = await loop.run_in_executor(None, file.read, min(_TLS_BYTES, nbytes - sent))
            if not data:
                break
            await response.write(data)
            sent += len(data)
    return sent


def _find(checkpoints: Mapping[str, Served], path: str) -> tuple[Served, str]:
    """Returns the checkpoint with a file, and the path of the file there. No path is joined."""
    asked = path.removeprefix("/")
    folder, _, rest = asked.partition("/")
    for name, file in (("", asked), (asked, ""), (folder, rest)):
        served = checkpoints.get(name)
        if served is not None and file in served.files:
            return served, file
    raise _Refused(HTTPStatus.NOT_FOUND, "no such file")
