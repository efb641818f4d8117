"""Bodies of ranges that are received straight into memory, and not by obstore."""

from __future__ import annotations

import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from email.utils import parsedate_to_datetime
from functools import cached_property
from itertools import chain
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from fastload.ext.remote.s3_settings import is_on
from fastload.storage.http import Answer, HttpConnection, HttpFault, HttpTimeout

_log = logging.getLogger(__name__)

# Options of obstore's HTTP client that count here, too. With any other one, all requests are obstore's.
_KNOWN = frozenset(
    """
    allow_http allow_invalid_certificates connect_timeout default_content_type default_headers http1_only
    root_certificate timeout user_agent
    """.split()
)
_PORTS = {"http": 80, "https": 443}
_PARTIAL = 206
_TOO_MANY = 429
_BUSY = 500  # and above: the server is overloaded, or has failed


class ServerBusy(HttpFault):
    """A server cannot answer now."""


class OtherAnswer(HttpFault):
    """An answer is not the range alone, as it is stored."""


class IdleConnections:
    """The idle connections of a storage to all its servers, with one set of certificates."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[HttpConnection]] = {}
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    def take(self, address: str, client: Mapping[str, Any]) -> HttpConnection:
        """Returns a connection to the server of a URL: an idle one that it has not closed, or a new one.

        Args:
            address: The URL.
            client: Options of obstore's HTTP client; see `DirectBodies.takes`.

        Raises:
            HttpFault: There is none.
        """
        parts = urlsplit(address)
        while True:
            with self._lock:
                idle = self._idle.setdefault(parts[:2], [])
                connection = idle.pop() if idle else None
                if connection is None and parts.scheme == "https" and self._context is None:
                    self._context = _trusting(client)  # takes 20 ms
            if connection is None:
                return self._connect(parts, client["connect_timeout"].total_seconds())
            if connection.is_open():
                return connection
            connection.close()

    def give_back(self, address: str, connection: HttpConnection) -> None:
        """Keeps a connection whose last answer has been received."""
        with self._lock:
            self._idle[urlsplit(address)[:2]].append(connection)

    def close(self) -> None:
        """Closes those that are not in use."""
        with self._lock:
            for connection in chain.from_iterable(self._idle.values()):
                connection.close()
            self._idle.clear()

    def _connect(self, parts: SplitResult, timeout_s: float) -> HttpConnection:
        """Connects to one of the addresses of a server: a store of several hosts has one for each."""
        scheme, host = parts.scheme, parts.hostname or ""
        if _has_proxy(scheme, host):
            raise HttpFault("the environment has a proxy for it")
        context = self._context if scheme == "https" else None
        try:
            found = socket.getaddrinfo(host, parts.port or _PORTS[scheme], type=socket.SOCK_STREAM)
        except OSError as error:
            raise HttpFault(f"cannot connect: {error.strerror}", is_passing=True) from None
        fault = HttpFault("it has no address")
        for *_, place in random.sample(found, len(found)):
            try:
                return HttpConnection((str(place[0]), int(place[1])), host, context, timeout_s)
            except HttpFault as error:
                fault = error
        raise fault


class DirectBodies:
    """Receives ranges of objects straight into memory.

    obstore collects what has arrived, and copies it once more while it holds Python's lock; a copy into the
    tensors follows. Here the kernel copies what has arrived into the tensors, or the TLS library decrypts it
    into them. Only bodies are received like this that the server sends just as they were asked for. Every
    other request is left to obstore, which follows redirects, renews credentials and says what is wrong; if
    no body has come like this before, so are all later ones.

    Args:
        address_of: Returns the URL of a key, with a signature if the store requires one.
        client: Options of obstore's HTTP client; see `takes`.
        connections: IdleConnections that are not in use.
        note_first_byte: Called with the seconds from each request to its answer.
    """

    def __init__(
        self,
        address_of: Callable[[str], str],
        client: Mapping[str, Any],
        connections: IdleConnections,
        note_first_byte: Callable[[float], None],
    ) -> None:
        self._address_of = address_of
        self._client = client
        self._note_first_byte = note_first_byte
        self._connections = connections
        self._has_worked = False
        self._is_off = False

    @staticmethod
    def takes(client: Mapping[str, Any]) -> bool:
        """Whether options of obstore's HTTP client have the same effect here."""
        times = [client.get("timeout"), client.get("connect_timeout")]
        texts = [
            client.get("user_agent") or "",
            *chain.from_iterable((client.get("default_headers") or {}).items()),
        ]
        return (
            client.keys() <= _KNOWN
            and all(isinstance(each, timedelta) for each in times)
            and all(isinstance(each, str) and each.isascii() and each.isprintable() for each in texts)
        )

    def read(self, key: str, offset: int, buffers: Sequence[memoryview]) -> Mapping[str, Any] | None:
        """Fills buffers with a range of an object.

        Returns:
            The object's ``size``, ``e_tag`` and ``last_modified``. None if obstore has to make the request;
            the buffers may hold anything then.

        Raises:
            HttpFault: Another attempt could succeed.
        """
        if self._is_off:
            return None
        try:
            meta = self._read(self._address_of(key), offset, buffers)
        except Exception as error:
            is_fault = isinstance(error, HttpFault) and not isinstance(error, OtherAnswer)
            if isinstance(error, HttpTimeout) or (is_fault and self._has_worked):
                raise
            if not isinstance(error, ServerBusy) and not self._has_worked:
                self._is_off = True
                _log.info("obstore receives all bodies: %s", error if is_fault else type(error).__name__)
            return None  # obstore meets the error again, and explains it
        self._has_worked = True
        return meta

    def _read(self, address: str, offset: int, buffers: Sequence[memoryview]) -> Mapping[str, Any]:
        if not address.isascii():
            raise HttpFault("its URL is not quoted")
        parts, nbytes = urlsplit(address), sum(map(len, buffers))
        wanted = f"{offset}-{offset + nbytes - 1}"
        headers = {"Host": parts.netloc, **self._headers, "Range": f"bytes={wanted}"}
        target = f"{parts.path or '/'}{'?' * bool(parts.query)}{parts.query}"
        asked_s = time.monotonic()
        connection, is_done = self._connections.take(address, self._client), False
        try:
            answer = connection.get(target, headers, self._client["timeout"].total_seconds())
            if answer.status == _TOO_MANY or answer.status >= _BUSY:
                raise ServerBusy(f"the server answers with status code {answer.status}")
            meta = _described(answer, wanted, nbytes)
            self._note_first_byte(time.monotonic() - asked_s)
            connection.receive(buffers)
            is_done = answer.headers.get("connection", "").lower() != "close"
            return meta
        finally:
            if is_done:
                self._connections.give_back(address, connection)
            else:
                connection.close()

    @cached_property
    def _headers(self) -> dict[str, str]:
        """The headers of every request, which keep the server from changing the body."""
        given = self._client.get("default_headers") or {}
        usual = {"User-Agent": self._client.get("user_agent") or "fastload", "Accept-Encoding": "identity"}
        names = set(map(str.lower, given))
        return {**{name: text for name, text in usual.items() if name.lower() not in names}, **given}


def _trusting(client: Mapping[str, Any]) -> ssl.SSLContext:
    """Returns the settings of TLS."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if certificates := client.get("root_certificate"):
        text = certificates.decode() if isinstance(certificates, bytes) else certificates
        context.load_verify_locations(cadata=text)
    if is_on(client.get("allow_invalid_certificates")):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _has_proxy(scheme: str, host: str) -> bool:
    """Whether the environment has a proxy for a server."""
    proxies = getproxies()
    return bool(proxies.keys() & {scheme, "all"}) and not proxy_bypass(host)


def _described(answer: Answer, wanted: str, nbytes: int) -> Mapping[str, Any]:
    """Returns what an answer says of its object, as obstore does.

    Raises:
        OtherAnswer: Its body is not the range that was wanted, as it is stored; or it says too little.
    """
    is_plain = answer.headers.get("content-encoding", "identity") == "identity"
    is_part = answer.status == _PARTIAL and answer.content_range == f"bytes {wanted}"
    size = answer.headers.get("content-range", "").rpartition("/")[2]
    tag, modified = answer.headers.get("etag"), answer.headers.get("last-modified")
    if not (is_plain and is_part and answer.nbytes == nbytes and size.isdecimal() and (tag or modified)):
        raise OtherAnswer(
            f"the server answers with status code {answer.status}, and not with the range alone"
        )
    return {
        "size": int(size),
        "e_tag": tag,
        "last_modified": parsedate_to_datetime(modified) if modified else None,
    }
