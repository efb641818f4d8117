"""Bodies of ranges that are received straight into memory, and not by obstore."""

from __future__ import annotations

import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta, timezone
from email.utils import parsedate_to_datetime
from functools import cached_property
from itertools import chain
from typing import Any
from urllib.parse import urlsplit
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
_IDLE_S = 60.0  # after which others on the way may have forgotten a connection
_MOST_REFUSED = 3  # requests of a key in a row, with other answers
# Headers of the user that would contradict those of a request.
_OWN_HEADERS = frozenset("connection content-length host range transfer-encoding".split())


class IdleConnections:
    """The idle connections of a storage to all its servers, with one set of certificates."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[tuple[HttpConnection, float]]] = {}  # and since when
        self._context: ssl.SSLContext | None = None
        self._proxied: dict[tuple[str, str], bool] = {}  # whether the environment has a proxy for a server
        self._is_closed = False
        self._lock = threading.Lock()

    def take(self, address: str) -> HttpConnection | None:
        """Returns a connection to the server of a URL that it has not closed; None if there is none."""
        while True:
            with self._lock:
                idle = self._idle.get(urlsplit(address)[:2])
                if not idle:
                    return None
                connection, since_s = idle.pop()
            if time.monotonic() - since_s < _IDLE_S and connection.is_open():
                return connection
            connection.close()

    def connect(self, address: str, client: Mapping[str, Any]) -> HttpConnection:
        """Connects to the server of a URL: to one of its addresses, since a store of several hosts has more.

        Args:
            address: The URL.
            client: Options of obstore's HTTP client; see `DirectBodies.takes`.

        Raises:
            HttpFault: There is no connection.
        """
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        server = parts.scheme, host
        if server not in self._proxied:
            self._proxied[server] = _has_proxy(*server)  # takes longer than a connection
        if self._proxied[server]:
            raise HttpFault("the environment has a proxy for it")
        context = self._context_of(client) if parts.scheme == "https" else None
        most_s, until_s = client["connect_timeout"].total_seconds(), time.monotonic()
        until_s += client["timeout"].total_seconds()
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise HttpFault(f"cannot connect: {error.strerror}", is_passing=True) from None
        fault = HttpFault("it has no address")
        for *_, place in sorted(random.sample(found, len(found)), key=lambda one: one[0] != found[0][0]):
            if (left_s := until_s - time.monotonic()) > 0:
                try:
                    return HttpConnection((str(place[0]), port), host, context, min(most_s, left_s))
                except HttpFault as error:
                    fault = error
        raise fault

    def give_back(self, address: str, connection: HttpConnection) -> None:
        """Keeps a connection whose last answer has been received."""
        with self._lock:
            if not self._is_closed:
                idle = self._idle.setdefault(urlsplit(address)[:2], [])
                return idle.append((connection, time.monotonic()))
        connection.close()

    def drop(self, address: str) -> None:
        """Closes the idle connections to the server of a URL."""
        with self._lock:
            idle = self._idle.pop(urlsplit(address)[:2], [])
        for connection, _ in idle:
            connection.close()

    def close(self) -> None:
        """Closes those that are not in use, and later all others."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = [*chain.from_iterable(self._idle.values())], {}
        for connection, _ in idle:
            connection.close()

    def _context_of(self, client: Mapping[str, Any]) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                self._context = _trusting(client)  # takes 20 ms
            return self._context


class DirectBodies:
    """Receives ranges of objects straight into memory.

    obstore collects what has arrived, and copies it once more while it holds Python's lock; a copy into the
    tensors follows. Here the kernel copies what has arrived into the tensors, or the TLS library decrypts it
    into them. Only bodies are received like this that the server sends just as they were asked for. Every
    other request is left to obstore, which follows redirects, renews credentials and says what is wrong; if
    no body has come like this before, so are all later ones, and those of an object after three in a row.

    Args:
        address_of: Returns the URL of a key, with a signature if the store requires one.
        client: Options of obstore's HTTP client; see `takes`.
        connections: The idle connections.
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
        self._has_worked = self._has_failed = False
        self._num_refused: dict[str, int] = {}  # by key, since the last body

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
            and not _OWN_HEADERS & {str(name).lower() for name in client.get("default_headers") or {}}
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
        is_off = self._has_failed and not self._has_worked
        if is_off or self._num_refused.get(key, 0) >= _MOST_REFUSED:
            return None
        try:
            meta = self._read(self._address_of(key), offset, buffers)
        except Exception as error:  # which obstore meets again, and explains, unless it passes
            may_pass = isinstance(error, HttpFault) and error.is_passing
            if isinstance(error, HttpTimeout) or (may_pass and self._has_worked):
                raise
            if isinstance(error, HttpFault | OSError | ValueError) and not may_pass:  # OSError: certificates
                self._num_refused[key] = self._num_refused.get(key, 0) + 1
                self._has_failed = True
                _log.info("obstore receives %s: %s", "a body" if self._has_worked else "all bodies", error)
            return None
        self._has_worked = True
        self._num_refused.pop(key, None)
        return meta

    def _read(self, address: str, offset: int, buffers: Sequence[memoryview]) -> Mapping[str, Any]:
        if not address.isascii():
            raise HttpFault("its URL is not quoted")
        parts, nbytes = urlsplit(address), sum(map(len, buffers))
        wanted = f"{offset}-{offset + nbytes - 1}"
        headers = {"Host": parts.netloc, **self._headers, "Range": f"bytes={wanted}"}
        target = f"{parts.path or '/'}{'?' * bool(parts.query)}{parts.query}"
        asked_s = time.monotonic()
        connection, answer = self._ask(address, target, headers)
        is_done = False
        try:
            if answer.status == _TOO_MANY or answer.status >= _BUSY:
                raise HttpFault(f"the server answers with status code {answer.status}", is_passing=True)
            meta = _described(answer, wanted, nbytes)
            self._note_first_byte(time.monotonic() - asked_s)
            connection.receive(buffers)
            is_done = answer.keeps_open
            return meta
        finally:
            if is_done:
                self._connections.give_back(address, connection)
            else:
                connection.close()

    def _ask(self, address: str, target: str, headers: Mapping[str, str]) -> tuple[HttpConnection, Answer]:
        """Makes a request: over an idle connection, or once more over a new one if that has ended."""
        most_s = self._client["timeout"].total_seconds()
        idle = self._connections.take(address)
        connection = idle or self._connections.connect(address, self._client)
        try:
            return connection, connection.get(target, headers, most_s)
        except BaseException as error:
            connection.close()
            if idle is None or not (isinstance(error, HttpFault) and error.is_passing):
                raise
        self._connections.drop(address)
        connection = self._connections.connect(address, self._client)
        try:
            return connection, connection.get(target, headers, most_s)
        except BaseException:
            connection.close()
            raise

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
        HttpFault: Its body is not the range that was wanted, as it is stored; or it says too little.
    """
    is_plain = answer.headers.get("content-encoding", "identity") == "identity"
    is_part = answer.status == _PARTIAL and answer.content_range == f"bytes {wanted}"
    size = answer.headers.get("content-range", "").rpartition("/")[2]
    tag, modified = answer.headers.get("etag"), answer.headers.get("last-modified")
    if not (is_plain and is_part and answer.nbytes == nbytes and size.isdecimal() and (tag or modified)):
        raise HttpFault(f"the server answers with status code {answer.status}, and not with the range alone")
    date = parsedate_to_datetime(modified) if modified else None
    if date is not None and date.tzinfo is None:  # written with -0000
        date = date.replace(tzinfo=timezone.utc)
    return {"size": int(size), "e_tag": tag, "last_modified": date}
