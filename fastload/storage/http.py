"""One connection for HTTP: bodies straight into buffers, with a deadline for every wait."""

from __future__ import annotations

import re
import select
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from fastload.base.memory import touch_all

_MOST_HEAD_BYTES = 64 << 10
_TOUCHED_BYTES = 1 << 20  # at once: what the processor's cache still holds when it is filled
_AWAITED_BYTES = 512 << 10  # at most: the kernel keeps them, for each connection
_WAITS = 16  # for a shorter body: with fewer, bytes leave the processor's cache before they are received
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})[ \r]")


class HttpFault(Exception):
    """A server did not deliver.

    Attributes:
        is_passing: Whether it may deliver later, as after a refused connection.
    """

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing


class HttpTimeout(HttpFault):
    """An answer was not complete in time."""


class Answer(NamedTuple):
    """The head of an answer.

    Attributes:
        status: The status.
        headers: The headers, by name in lower case.
        keeps_open: Whether the server takes further requests over the connection.
    """

    status: int
    headers: Mapping[str, str]
    keeps_open: bool = False

    @property
    def nbytes(self) -> int:
        """Length of the body.

        Raises:
            HttpFault: It is unknown.
        """
        text = self.headers.get("content-length", "")
        if not text.isdecimal() or len(text) > 18 or "transfer-encoding" in self.headers:
            raise HttpFault("sent no Content-Length")
        return int(text)

    @property
    def content_range(self) -> str:
        """The range that the body is, without the length of the whole: ``bytes 0-99``; empty without one."""
        return self.headers.get("content-range", "").partition("/")[0]


class HttpConnection:
    """A connection to a server.

    Args:
        place: Address and port of the server.
        host: Its name, by which its certificate is checked.
        context: The TLS settings; None without TLS.
        timeout_s: The longest wait for it to connect.

    Raises:
        HttpFault: It does not connect.
    """

    def __init__(
        self, place: tuple[str, int], host: str, context: ssl.SSLContext | None, timeout_s: float
    ) -> None:
        self._until_s = 0.0
        self._rest = b""
        self._awaited = 1
        try:
            connected = socket.create_connection(place, timeout_s)
        except OSError as error:
            raise HttpFault(f"cannot connect: {_text_of(error)}", is_passing=True) from None
        self._socket = connected
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._most_awaited = _AWAITED_BYTES if context is None and _can_await(connected) else 1
            if context is not None:
                self._socket = context.wrap_socket(connected, server_hostname=host)
        except BaseException as error:
            connected.close()
            if not isinstance(error, OSError):
                raise
            raise HttpFault(f"TLS: {_text_of(error)}") from None

    def get(self, target: str, headers: Mapping[str, str], timeout_s: float) -> Answer:
        """Makes a request; `receive` takes the body of the answer, all of it.

        Args:
            target: The path, and the query.
            headers: The headers, with that of the host.
            timeout_s: The longest time for the answer, with its body.

        Raises:
            HttpFault: There is no answer, or not by HTTP.
        """
        self._until_s, self._rest = time.monotonic() + timeout_s, b""
        lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        try:
            self._set_timeout()
            self._socket.sendall("\r\n".join([*lines, "", ""]).encode("ascii", "replace"))
            while (answer := self._head()).status < 200:  # others precede the one that counts
                pass
        except OSError as error:
            raise _fault(error) from None
        return answer

    def _head(self) -> Answer:
        head, self._rest = self._rest, b""
        while b"\r\n\r\n" not in head:
            self._set_timeout()
            more = self._socket.recv(_MOST_HEAD_BYTES)
            if not more or len(head) > _MOST_HEAD_BYTES:
                raise HttpFault("ended the connection", is_passing=not head)
            head += more
        head, _, self._rest = head.partition(b"\r\n\r\n")
        first, *others = head.split(b"\r\n")
        status = _STATUS.match(first)
        if status is None:
            raise HttpFault("no HTTP server")
        found = {}
        for line in others:
            name, _, value = line.decode("latin-1").partition(":")
            found[name.strip().lower()] = value.strip()
        words = {word.strip() for word in found.get("connection", "").lower().split(",")}
        keeps_open = "close" not in words and (status[1] == b"1" or "keep-alive" in words)
        return Answer(int(status[2]), found, keeps_open)

    def receive(self, buffers: Sequence[memoryview]) -> None:
        """Fills buffers with the body of the last answer.

        Raises:
            HttpFault: It did not come, or not all of it.
        """
        rest, self._rest, body_bytes = self._rest, b"", sum(map(len, buffers))
        if len(rest) > body_bytes:
            raise HttpFault("sent more bytes than it said")
        most_awaited = max(1, min(self._most_awaited, body_bytes // _WAITS))
        try:
            for part in _touched(buffers):
                while len(part):
                    if nbytes := min(len(rest), len(part)):
                        part[:nbytes], rest = rest[:nbytes], rest[nbytes:]
                    else:
                        self._set_timeout()
                        self._await(min(len(part), most_awaited))
                        nbytes = self._socket.recv_into(part)
                    if not nbytes:
                        raise HttpFault("ended the connection before the last byte", is_passing=True)
                    part = part[nbytes:]
            self._await(1)
        except OSError as error:
            raise _fault(error) from None

    def is_open(self) -> bool:
        """Whether the server has neither closed it nor sent anything unasked."""
        if self._rest or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def stop(self) -> None:
        """Ends a request that another thread waits for."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes it."""
        self._socket.close()

    def _await(self, nbytes: int) -> None:
        """Has the next wait end once so many bytes have come, not as soon as any have.

        A thread that is woken for each few packets takes the processor from the others, of which there is one
        for each request under way.
        """
        if nbytes != self._awaited:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._awaited = nbytes

    def _set_timeout(self) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)


def _can_await(connected: socket.socket) -> bool:
    """Whether the system has room for the bytes that a wait is to end with; Linux makes it, since 4.18."""
    try:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _AWAITED_BYTES)
        room = connected.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    except OSError:
        return False
    return room >= _AWAITED_BYTES


def _touched(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yields the parts of buffers, each with memory that was just touched."""
    for buffer in buffers:
        for begin in range(0, len(buffer), _TOUCHED_BYTES):
            part = buffer[begin : begin + _TOUCHED_BYTES]
            touch_all([part])
            yield part


def _fault(error: OSError) -> HttpFault:
    if isinstance(error, TimeoutError):
        return HttpTimeout(_text_of(error))
    return HttpFault(_text_of(error), is_passing=True)


def _text_of(error: OSError) -> str:
    return "took too long" if isinstance(error, TimeoutError) else str(error.strerror or error)
