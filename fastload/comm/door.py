"""How the ranks of one host find each other: which of them share a kernel, and where the first one is."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fastload.errors import Interrupted

__all__ = ["Door", "come_in", "host_of", "machine", "node"]

_TICK_S = 0.05
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = "/proc/self/ns/net"
_PEER_OF = struct.Struct("3i")  # process, user, group
_MOST_DIGITS = 20


def node(host: str) -> str:
    """Returns what the ranks of one machine have in common: several machines may have the same name.

    Args:
        host: Name of the host; `host_of` returns it.
    """
    try:
        kernel = _BOOT_ID.read_text().strip()
    except OSError:  # another system: the name has to do
        kernel = ""
    return f"{host}/{kernel[:8]}"


def host_of(node: str) -> str:
    """Returns the name of the host of a `node`."""
    return node.partition("/")[0]


def machine(host: str, rank: int) -> str:
    """Returns what ranks have in common that can share memory: a kernel, a network and a user.

    Ranks of one host may be in containers of their own.

    Args:
        host: Name of the host.
        rank: This one, which has it for itself where memory cannot be shared.
    """
    try:
        os.close(os.memfd_create("fastload"))
        where = [_BOOT_ID.read_text().strip(), os.readlink(_NETWORK), str(os.getuid())]
    except (AttributeError, OSError):  # another system, or one that does not let us
        where = [f"rank {rank}"]
    return " ".join([host, *where])


class Door:
    """Where the others of a host find its first rank.

    Attributes:
        name: Of the socket, which nobody can guess.
    """

    def __init__(self) -> None:
        self.name = f"fastload-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(socket.SOMAXCONN)
        self._socket.settimeout(_TICK_S)

    def admit(
        self, ranks: Sequence[int], until_s: float, give_up: Callable[[], bool]
    ) -> dict[int, socket.socket]:
        """Waits for ranks to come in; returns a socket for each of them.

        Raises:
            Interrupted: Some did not come in time, or `give_up` said so.
        """
        deadline = time.monotonic() + until_s
        found: dict[int, socket.socket] = {}
        while missing := set(ranks) - found.keys():
            if give_up():
                raise Interrupted("another rank failed")
            if time.monotonic() > deadline:
                raise Interrupted(
                    f"ranks {sorted(missing)} of this host did not connect within {until_s:.1f} s"
                )
            with contextlib.suppress(TimeoutError):
                guest, _ = self._socket.accept()
                rank = _rank_of(guest)
                if rank in missing:
                    found[rank] = guest
                else:
                    guest.close()
        return found

    def close(self) -> None:
        """Lets nobody in any more."""
        self._socket.close()


def _rank_of(guest: socket.socket) -> int | None:
    """Returns which rank has come, if it is one of ours."""
    _, user, _ = _PEER_OF.unpack(guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_OF.size))
    guest.settimeout(_TICK_S)
    try:
        text = guest.recv(_MOST_DIGITS)
    except OSError:  # says nothing, or went again
        return None
    guest.settimeout(None)
    return int(text) if user == os.getuid() and text.isdigit() else None


def come_in(name: str, rank: int) -> socket.socket:
    """Connects to the leader.

    Raises:
        Interrupted: It is gone.
    """
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        guest.connect(f"\0{name}")
        guest.send(str(rank).encode())
    except OSError as error:
        guest.close()
        raise Interrupted(f"the first rank of this host does not answer: {error}") from error
    return guest
