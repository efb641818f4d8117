"""`fastload.serve`: checkpoints over HTTP, from a thread of this process."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import WeakSet

from fastload.base.tracebacks import short_tracebacks
from fastload.errors import OptionError
from fastload.ext.serve.access import read_token, server_context
from fastload.ext.serve.checkpoints import Shelf, open_checkpoint, open_copy
from fastload.ext.serve.pace import give_way
from fastload.ext.serve.process import SERVERS
from fastload.formats.sources import CopyInProgress
from fastload.options import parse_bytes
from fastload.storage import local_directory

if TYPE_CHECKING:
    from fastload.ext.serve.server import Responder

_log = logging.getLogger(__name__)

_BACKLOG = 1024
_END_S = 5.0


_listeners: WeakSet[socket.socket] = WeakSet()


def _close_all() -> None:
    """Closes the ports in a process that was forked, where nobody serves."""
    for listener in list(_listeners):
        listener.close()


os.register_at_fork(after_in_child=_close_all)


@short_tracebacks
def serve(
    path: str | os.PathLike[str] | None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token_file: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
    insecure: bool = False,
    rate: int | str | None = None,
    max_connections: int = 512,
) -> Server:
    """Serves checkpoints over HTTP, read-only and with ranges, in a thread of its own; returns at once.

    Any HTTP client can read them, `fastload.load` too; `fastload.peers` makes hosts that serve the same
    checkpoint sources of a load. Only the files that the commit record or seal of a checkpoint covers are
    there. ``GET /`` returns a JSON object with the checkpoints and the load of the server.

    The thread gives way to others: it has a nice value of 10 and idle I/O priority.

    Args:
        path: A checkpoint with checksums, or a directory of such, for example the root of a
            `CheckpointManager`: then each of them is below its name, new ones too. None for copies alone that
            `Server.follow` gets.
        host: Address or name to listen at; ``0.0.0.0`` for all interfaces.
        port: Port to listen at; 0 for one that is free.
        token_file: A file with a word that clients have to send as ``Authorization: Bearer WORD``.
        certificate: A file with a certificate, and those between it and its root; for TLS.
        key: A file with its key; None if that is in the same file.
        insecure: Whether to listen on other interfaces than loopback with neither token nor certificate.
        rate: Most bytes per second, to all clients together, such as ``"200MB"``; None for no limit.
        max_connections: Most connections at once. Further ones take the place of idle ones.

    Raises:
        OptionError: An argument cannot be used, or the port is taken.
        CheckpointNotFound: There is nothing at the path.
        CheckpointError: The checkpoint has no checksums: `seal` makes them.
        StorageError: It cannot be read.
    """
    try:
        from fastload.ext.serve.server import Responder, ServeTerms
    except ModuleNotFoundError as error:
        raise OptionError(f"serving needs {error.name}: pip install 'fastload-torch[serve]'") from None
    bytes_s = _parse_rate(rate)
    if type(max_connections) is not int or max_connections < 1:
        raise OptionError(f"max_connections={max_connections!r}: must be at least 1")
    if key is not None and certificate is None:
        raise OptionError("key= is that of a certificate: give certificate=, too")
    token = read_token(token_file) if token_file is not None else None
    context = server_context(certificate, key) if certificate is not None else None
    shelf = Shelf(local_directory(path, "serve") if path is not None else None)
    try:
        listener = _listen(host, port, is_protected=insecure or token is not None or context is not None)
    except BaseException:
        shelf.close()
        raise
    ident = secrets.token_hex(8)
    SERVERS.add(ident)
    terms = ServeTerms(token, bytes_s, max_connections, ident)
    return Server(partial(Responder, shelf, terms), shelf, listener, context)


class Server:
    """A server in a thread of this process. Made by `fastload.serve`; use it as a context manager.

    Attributes:
        url: Its URL, by the address that it listens at.
    """

    def __init__(
        self,
        open_responder: Callable[[], Responder],
        shelf: Shelf,
        listener: socket.socket,
        context: ssl.SSLContext | None,
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.url = f"http{'s' if context else ''}://{f'[{host}]' if ':' in host else host}:{port}"
        self._shelf = shelf
        _listeners.add(listener)
        self._loop = asyncio.new_event_loop()
        self._ends = asyncio.Event()
        work = partial(self._run, open_responder, listener, context)
        self._thread = threading.Thread(target=work, name="fastload-serve", daemon=True)
        self._thread.start()

    @property
    def checkpoints(self) -> list[str]:
        """The names of the checkpoints: parts of their URLs, empty for one at the root."""
        return sorted(self._shelf.all())

    def follow(self, copy: CopyInProgress) -> None:
        """Serves a copy while it is made, as `StageOptions.on_copy`: what is verified, and no more."""
        self._shelf.add(open_copy(copy))

    def add(self, path: str | os.PathLike[str]) -> None:
        """Serves one more checkpoint, below its name.

        Raises:
            CheckpointNotFound: There is none at the path.
            CheckpointError: It has no checksums, or is malformed.
            StorageError: It cannot be read.
        """
        place = local_directory(path, "serve")
        found = open_checkpoint(place)
        self._shelf.add({name or os.path.basename(place): served for name, served in found.items()})

    def close(self) -> None:
        """Ends all connections, and waits until the thread has ended."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join(_END_S)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self, open_responder: Callable[[], Responder], listener: socket.socket, context: ssl.SSLContext | None
    ) -> None:
        give_way()
        try:
            self._loop.run_until_complete(_run_responder(open_responder, listener, context, self._ends))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        except Exception:
            _log.exception("%s: the server has ended", self.url)
        finally:
            self._loop.close()
            listener.close()
            self._shelf.close()


async def _run_responder(
    open_responder: Callable[[], Responder],
    listener: socket.socket,
    context: ssl.SSLContext | None,
    ends: asyncio.Event,
) -> None:
    try:
        await open_responder().run(listener, context, ends)
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:  # such as a response to a client that has left
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _listen(host: str, port: int, *, is_protected: bool) -> socket.socket:
    """Opens the socket of a server.

    Raises:
        OptionError: The address is unknown or taken, or others could read without a token or certificate.
    """
    where = f"host={host!r}, port={port!r}"
    if type(port) is not int or not 0 <= port < 1 << 16:
        raise OptionError(f"{where}: no port")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not is_protected and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise OptionError(
                f"{where}: whoever reaches this address could read the checkpoints: give token_file= (and "
                "certificate=), or insecure=True for a network that you trust"
            )
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OptionError(f"{where}: cannot listen there: {error}") from None


def _parse_rate(rate: int | str | None) -> int | None:
    try:
        bytes_s = parse_bytes(rate) if isinstance(rate, str) else rate
    except ValueError as error:
        raise OptionError(f"rate={rate!r}: {error}") from None
    if bytes_s is not None and (type(bytes_s) is not int or bytes_s < 1):
        raise OptionError(f"rate={rate!r}: must be a number of bytes per second, at least 1")
    return bytes_s
