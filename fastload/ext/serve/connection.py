"""One connection to a server: ranges straight into buffers, with a deadline for every wait."""

from __future__ import annotations

import json
import re
import select
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote

from fastload.storage import take

_MOST_HEAD_BYTES = 64 << 10
_MOST_INDEX_BYTES = 64 << 20
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")


class PeerFault(Exception):
    """A peer did not deliver.

    Attributes:
        is_passing: Whether it may deliver later, as after a refused connection.
    """

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing


class Endpoint(NamedTuple):
    """Where a server listens, and how to talk to it.

    Attributes:
        host: Its name, by which its certificate is checked.
        address: The address to connect to.
        port: Its port.
        context: The TLS settings; None without TLS.
        token: The token to send; None for none.
    """

    host: str
    address: str
    port: int
    context: ssl.SSLContext | None
    token: str | None

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        named = "" if self.host in (self.address, "") else f" ({self.host})"
        return f"http{'s' if self.context else ''}://{address}:{self.port}{named}"

    def __repr__(self) -> str:
        return str(self)  # without the token


class Connection:
    """A connection to a server.

    Args:
        endpoint: The server.
        timeout_s: The longest wait for it to connect.

    Raises:
        PeerFault: It does not connect.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._until_s = time.monotonic() + timeout_s
        try:
            connected = socket.create_connection((endpoint.address, endpoint.port), timeout_s)
        except OSError as error:
            raise PeerFault(f"cannot connect: {_text_of(error)}", is_passing=True) from None
        self._socket = connected
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if endpoint.context is not None:
                self._socket = endpoint.context.wrap_socket(connected, server_hostname=endpoint.host)
        except OSError as error:
            connected.close()
            raise PeerFault(f"TLS: {_text_of(error)}") from None

    def index(self, timeout_s: float) -> dict[str, Any]:
        """Returns what the server says of itself and its checkpoints.

        Raises:
            PeerFault: It does not answer, or not as a server of fastload does.
        """
        self._until_s = time.monotonic() + timeout_s
        status, headers, rest = self._request("/", {})
        if status != 200:
            raise PeerFault(_refusal(status), is_passing=status == 503)
        nbytes = _length(headers)
        if nbytes > _MOST_INDEX_BYTES:
            raise PeerFault(f"its index has {nbytes} bytes")
        body = bytearray(nbytes)
        self._receive([memoryview(body)], rest)
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("checkpoints"), dict):
            raise PeerFault("no server of fastload")
        return found

    def read(
        self, path: str, begin: int, buffers: Sequence[memoryview], digest: str, timeout_s: float
    ) -> float:
        """Fills buffers with the bytes of a file from an offset on; returns the seconds to the first byte.

        Args:
            path: The file on the server.
            begin: First byte.
            buffers: Where they go.
            digest: The digest of the checkpoint.
            timeout_s: The longest time for all of it.

        Raises:
            PeerFault: They did not come, or not all of them.
        """
        began_s = time.monotonic()
        self._until_s = began_s + timeout_s
        end = begin + sum(map(len, buffers))
        headers = {"Range": f"bytes={begin}-{end - 1}", "If-Match": f'"{digest}"'}
        status, found, rest = self._request(f"/{quote(path, errors='replace')}", headers)
        if status != 206:
            raise PeerFault(_refusal(status), is_passing=status == 503)
        if _length(found) != end - begin or found.get("content-range", "").partition("/")[0] != (
            f"bytes {begin}-{end - 1}"
        ):
            raise PeerFault("sent another range than the one that was asked for")
        first_s = time.monotonic() - began_s
        self._receive(buffers, rest)
        return first_s

    def is_open(self) -> bool:
        """Whether the server has neither closed it nor sent anything unasked."""
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

    def _request(self, path: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Sends a request; returns the status, the headers, and the first bytes of the body."""
        host = f"[{self._endpoint.host}]" if ":" in self._endpoint.host else self._endpoint.host
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}:{self._endpoint.port}"]
        if self._endpoint.token is not None:
            lines.append(f"Authorization: Bearer {self._endpoint.token}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = b""
        try:
            self._set_timeout()
            self._socket.sendall("\r\n".join([*lines, "", ""]).encode("ascii", "replace"))
            while b"\r\n\r\n" not in head:
                self._set_timeout()
                more = self._socket.recv(_MOST_HEAD_BYTES)
                if not more or len(head) > _MOST_HEAD_BYTES:
                    raise PeerFault("ended the connection", is_passing=not head)
                head += more
        except OSError as error:
            raise PeerFault(_text_of(error), is_passing=not isinstance(error, TimeoutError)) from None
        head, _, rest = head.partition(b"\r\n\r\n")
        first, *others = head.split(b"\r\n")
        status = _STATUS.match(first)
        if status is None:
            raise PeerFault("no HTTP server")
        found = {}
        for line in others:
            name, _, value = line.decode("latin-1").partition(":")
            found[name.strip().lower()] = value.strip()
        return int(status[1]), found, rest

    def _receive(self, buffers: Sequence[memoryview], rest: bytes) -> None:
        """Fills buffers with a body whose first bytes are known."""
        wanted = [buffer for buffer in buffers if len(buffer)]
        if len(rest) > sum(map(len, wanted)):
            raise PeerFault("sent more bytes than it said")
        try:
            while wanted:
                nbytes = min(len(rest), len(wanted[0]))
                if nbytes:
                    wanted[0][:nbytes], rest = rest[:nbytes], rest[nbytes:]
                else:
                    self._set_timeout()
                    nbytes = self._socket.recv_into(wanted[0])
                if not nbytes:
                    raise PeerFault("ended the connection before the last byte", is_passing=True)
                _, wanted = take(wanted, nbytes)
        except OSError as error:
            raise PeerFault(_text_of(error), is_passing=not isinstance(error, TimeoutError)) from None

    def _set_timeout(self) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)


def _length(headers: Mapping[str, str]) -> int:
    """Returns the length of a body, which is not sent in chunks."""
    text = headers.get("content-length", "")
    if not text.isdecimal() or len(text) > 18 or "transfer-encoding" in headers:
        raise PeerFault("sent no Content-Length")
    return int(text)


def _refusal(status: int) -> str:
    texts = {
        401: "wants another token than FASTLOAD_PEERS_TOKEN_FILE or token_file= has (401)",
        404: "has no such file any more (404)",
        412: "has another checkpoint now (412)",
        503: "has not got it yet (503)",
    }
    return texts.get(status, f"answered with status {status}")


def _text_of(error: OSError) -> str:
    return "took too long" if isinstance(error, TimeoutError) else str(error.strerror or error)
