"""Where a rank is found by those below it in the tree of a group, and how these come in."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from fastload.comm.reach import host_addresses, interface_address

__all__ = ["Entrance", "Unreachable", "come_in"]

_SECRET_BYTES = 32
_WELCOME = b"come in"
_RANK = struct.Struct("!I")
_GREETING_S, _CONNECTING_S = 1.0, 2.0


class Unreachable(Exception):
    """A rank is not at the addresses that it has told."""


class Entrance:
    """Lets ranks in that know the secret, which is told with the addresses.

    Args:
        here: What ranks of this machine have in common; see `machine`.
        store: A ``torch.distributed.Store``; that of a host shows which way all ranks reach this one.
    """

    def __init__(self, here: str, store: Any) -> None:
        self._secret = secrets.token_hex(_SECRET_BYTES // 2)
        door = f"\0fastload-{secrets.token_hex(16)}"
        near = socket.socket(socket.AF_UNIX)
        near.bind(door)
        near.listen(socket.SOMAXCONN)
        dual = socket.has_dualstack_ipv6()
        far = socket.create_server(
            ("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
        )
        self._sockets = [near, far]
        found = {"machine": here, "door": door[1:], "secret": self._secret, "port": far.getsockname()[1]}
        self.address = json.dumps({**found, "hosts": list(dict.fromkeys(_own_addresses(_host_of(store))))})

    def admit(self, ranks: Collection[int], look: Callable[[], float]) -> Iterator[tuple[int, socket.socket]]:
        """Yields a connection for each of some ranks as they come.

        Args:
            ranks: Those.
            look: Called now and then, after as many seconds as it has returned; may raise.
        """
        missing, poll = set(ranks), select.poll()
        by_number = {each.fileno(): each for each in self._sockets}
        for number in by_number:
            poll.register(number, select.POLLIN)
        while missing:
            for number, _ in poll.poll(1e3 * look()):
                guest, _ = by_number[number].accept()
                if (rank := self._greet(guest)) in missing:
                    with contextlib.suppress(OSError):
                        guest.sendall(_WELCOME)
                    missing.discard(rank)
                    yield rank, guest
                else:
                    guest.close()

    def _greet(self, guest: socket.socket) -> int:
        """Returns which rank it is; -1 if it is none of ours."""
        guest.settimeout(_GREETING_S)
        try:
            said = _read(guest, _SECRET_BYTES + _RANK.size)
        except OSError:
            return -1
        if not hmac.compare_digest(said[:_SECRET_BYTES], self._secret.encode()):
            return -1
        return int(_RANK.unpack(said[_SECRET_BYTES:])[0])

    def close(self) -> None:
        """Lets nobody in any more."""
        for each in self._sockets:
            each.close()


def come_in(address: str, here: str, rank: int, look: Callable[[], float]) -> socket.socket:
    """Connects to the rank above, once that lets this one in.

    Args:
        address: Where that rank is.
        here: What ranks of this machine have in common.
        rank: This one.
        look: As for `Entrance.admit`.

    Raises:
        Unreachable: It is not there, or not any more.
    """
    found = json.loads(address)
    link = _connect(found, here)
    try:
        link.sendall(found["secret"].encode() + _RANK.pack(rank))
        poll = select.poll()
        poll.register(link, select.POLLIN)
        while not poll.poll(1e3 * look()):
            pass
        _read(link, len(_WELCOME))
        return link
    except OSError as error:
        link.close()
        raise Unreachable(str(error)) from error
    except BaseException:
        link.close()
        raise


def _connect(found: dict[str, Any], here: str) -> socket.socket:
    if found["machine"] == here:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(f"\0{found['door']}")
            return link
        except OSError:
            link.close()
    problem = "no address"
    for host in found["hosts"]:
        try:
            return socket.create_connection((host, found["port"]), timeout=_CONNECTING_S)
        except OSError as error:
            problem = f"{host}: {error}"
    raise Unreachable(problem)


def _read(link: socket.socket, num_bytes: int) -> bytes:
    """Returns so many bytes, which are about to come.

    Raises:
        OSError: They do not.
    """
    link.settimeout(_GREETING_S)
    data, until = b"", time.monotonic() + _GREETING_S
    while len(data) < num_bytes:
        more = link.recv(num_bytes - len(data))
        if not more or time.monotonic() > until:
            raise ConnectionResetError("it went again")
        data += more
    return data


def _own_addresses(store: str) -> Iterator[str]:
    """Yields where other hosts may find this one, the likeliest first; asks no name server for others."""
    if (address := interface_address()) is not None:
        yield address
    with contextlib.suppress(OSError, ValueError):
        version = ipaddress.ip_address(store).version
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as any_socket:
            any_socket.connect((store, 9))  # sends nothing
            yield any_socket.getsockname()[0]
    yield from host_addresses()


def _host_of(store: Any) -> str:
    """Returns the host of a TCPStore; empty for other ones."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))
