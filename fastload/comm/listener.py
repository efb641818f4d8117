"""Listening for other ranks of the job, which identify themselves with a secret."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator

_SECRET_BYTES = 32
_ACCEPTED = b"come in"
_RANK = struct.Struct("!I")
_GREETING_S = 1.0


class Unreachable(Exception):
    """A rank does not listen at the addresses that it published."""


class Listener:
    """Accepts connections from ranks that know its secret.

    The name alone is not enough, since every process of the machine can read it.

    Args:
        kind: Type of the unix socket.

    Attributes:
        name: Name of the unix socket, in the abstract namespace.
        secret: The secret, as text.
    """

    def __init__(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> None:
        self.name = f"fastload-{secrets.token_hex(16)}"
        self.secret = secrets.token_hex(_SECRET_BYTES // 2)
        unix = socket.socket(socket.AF_UNIX, kind)
        unix.bind(f"\0{self.name}")
        unix.listen(socket.SOMAXCONN)
        self._sockets = [unix]

    def listen_at(self, listener: socket.socket) -> None:
        """Accepts connections at one more socket, which `close` closes."""
        self._sockets.append(listener)

    def accept(
        self, ranks: Collection[int], look: Callable[[], float]
    ) -> Iterator[tuple[int, socket.socket]]:
        """Yields a blocking connection for each of some ranks as they come.

        Args:
            ranks: The ranks to wait for.
            look: Called repeatedly; returns the seconds until the next call. It may raise.
        """
        missing, poll = set(ranks), select.poll()
        by_number = {each.fileno(): each for each in self._sockets}
        for number in by_number:
            poll.register(number, select.POLLIN)
        while missing:
            for number, _ in poll.poll(1e3 * look()):
                link, _ = by_number[number].accept()
                if (rank := self._rank_of(link)) in missing:
                    with contextlib.suppress(OSError):
                        link.sendall(_ACCEPTED)
                    link.settimeout(None)
                    missing.discard(rank)
                    yield rank, link
                else:
                    link.close()

    def _rank_of(self, link: socket.socket) -> int:
        """Returns the rank that has connected; -1 if it does not know the secret."""
        try:
            greeting = _read(link, _SECRET_BYTES + _RANK.size)
        except OSError:
            return -1
        if not hmac.compare_digest(greeting[:_SECRET_BYTES], self.secret.encode()):
            return -1
        return int(_RANK.unpack(greeting[_SECRET_BYTES:])[0])

    def close(self) -> None:
        """Stops listening."""
        for each in self._sockets:
            each.close()


def connect_unix(name: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Connects to the unix socket of a `Listener` on this machine.

    Raises:
        OSError: Nobody listens there.
    """
    link = socket.socket(socket.AF_UNIX, kind)
    try:
        link.connect(f"\0{name}")
    except OSError:
        link.close()
        raise
    return link


def greet(link: socket.socket, secret: str, rank: int, look: Callable[[], float]) -> None:
    """Identifies this rank at the other end of a connection and waits until it is accepted.

    Args:
        link: A connection to a `Listener`; closed if this raises, else blocking.
        secret: `Listener.secret`.
        rank: This rank.
        look: As for `Listener.accept`.

    Raises:
        Unreachable: The other end refused or is gone.
    """
    try:
        link.sendall(secret.encode() + _RANK.pack(rank))
        poll = select.poll()
        poll.register(link, select.POLLIN)
        while not poll.poll(1e3 * look()):
            pass
        _read(link, len(_ACCEPTED))
        link.settimeout(None)
    except OSError as error:
        link.close()
        raise Unreachable(str(error)) from error
    except BaseException:
        link.close()
        raise


def _read(link: socket.socket, num_bytes: int) -> bytes:
    """Reads a number of bytes.

    Raises:
        OSError: They did not come within a second.
    """
    link.settimeout(_GREETING_S)
    data, until = b"", time.monotonic() + _GREETING_S
    while len(data) < num_bytes:
        more = link.recv(num_bytes - len(data))
        if not more or time.monotonic() > until:
            raise ConnectionResetError("the other end closed the connection")
        data += more
    return data
