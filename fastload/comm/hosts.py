"""Hosts of ranks: their identifiers and addresses, and connections between their ranks."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from fastload.base.threads import in_threads
from fastload.errors import WorldError, some_of

_SIOCGIFADDR = 0x8915

_ADDRESSES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}  # offset and length in a sockaddr
_MOST = 8  # addresses that a rank tries
_PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = "/proc/self/ns/net"


class Peer(NamedTuple):
    """The address of another rank.

    Attributes:
        rank: The rank.
        host: Name of its host.
        address: IP address.
        port: Port there.
    """

    rank: int
    host: str
    address: str
    port: int


# Identity


def node(host: str) -> str:
    """Returns an identifier of this machine; several machines may have the same host name.

    Args:
        host: Name of the host; `host_of` returns it.
    """
    try:
        kernel = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        kernel = ""
    return f"{host}/{kernel[:8]}"


def host_of(node: str) -> str:
    """Returns the host name in a `node`."""
    return node.partition("/")[0]


def machine(host: str, rank: int) -> str:
    """Returns an identifier shared by the ranks that can share memory: one kernel, network and user.

    Ranks of one host may run in separate containers.

    Args:
        host: Name of the host.
        rank: This rank, which gets an identifier of its own where memory cannot be shared.
    """
    try:
        os.close(os.memfd_create("fastload"))
        where = [_BOOT_ID.read_text().strip(), os.readlink(_NETWORK), str(os.getuid())]
    except (AttributeError, OSError):  # not Linux, or no permission
        where = [f"rank {rank}"]
    return " ".join([host, *where])


def machine_digest(host: str, rank: int) -> str:
    """Returns a short digest of `machine`, for the other ranks."""
    return xxhash.xxh3_64_hexdigest(machine(host, rank).encode())


# Addresses


def address_in(published: bytes) -> str | None:
    """Returns the IP address in the bytes that Gloo publishes; None if their format is unknown.

    They begin with the name of the host and a ``sockaddr_storage``, each after its length.
    """
    try:
        (name_bytes,) = struct.unpack_from("=Q", published)
        (family,) = struct.unpack_from("=H", published, 16 + name_bytes)
        place, num_bytes = _ADDRESSES[family]
    except (struct.error, KeyError):
        return None
    packed = published[16 + name_bytes + place :][:num_bytes]
    return socket.inet_ntop(family, packed) if len(packed) == num_bytes else None


def interface_address() -> str | None:
    """Returns the IP address of the network interface in ``GLOO_SOCKET_IFNAME``; None without one."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return address_of(name) if name else None


def address_of(interface: str) -> str | None:
    """Returns the IP address of a network interface; None without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        packed = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, packed)[20:24])
    return None


def host_addresses() -> list[str]:
    """Returns the IP addresses that this host's name resolves to."""
    try:
        addresses = socket.getaddrinfo(os.uname().nodename, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(where[0]) for *_, where in addresses]


def listener_at(address: str) -> socket.socket | None:
    """Returns a socket that listens at a free port; None if the system refuses."""
    try:
        return socket.create_server((address, 0), family=_family(address), backlog=socket.SOMAXCONN)
    except OSError:
        return None


# Reachability


def require_reachable(rank: int, peers: Sequence[Peer], *, limit_s: float) -> None:
    """Checks that this rank can connect to a few others, those that come next in the group.

    With many ranks, each one is tried by a few others.

    Args:
        rank: This rank.
        peers: Other ranks.
        limit_s: Longest wait for all of them.

    Raises:
        WorldError: Some cannot be reached.
    """
    one_at_each: dict[str, Peer] = {}
    for peer in sorted(peers, key=lambda peer: (peer.rank < rank, peer.rank)):
        one_at_each.setdefault(peer.address, peer)
    tried = sorted(list(one_at_each.values())[:_MOST])
    problems = in_threads(lambda peer: _problem_with(peer, limit_s), tried, _MOST)
    unreachable = [
        f"rank {peer.rank} on {peer.host} at {peer.address} port {peer.port} ({problem})"
        for peer, problem in zip(tried, problems, strict=True)
        if problem
    ]
    if unreachable:
        raise WorldError(
            f"could not connect to {some_of(unreachable)}: open {_free_ports()} between the hosts, or name "
            "another network interface in GLOO_SOCKET_IFNAME"
        )


def _problem_with(peer: Peer, limit_s: float) -> str:
    """Returns why a peer cannot be reached; empty if it can."""
    try:
        socket.create_connection((peer.address, peer.port), timeout=limit_s).close()
    except TimeoutError:
        return f"no answer within {limit_s:.1f} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _free_ports() -> str:
    """Returns the range of the ports that the system assigns."""
    try:
        with open(_PORTS) as file:
            first, last = file.read().split()
    except (OSError, ValueError):
        return "all TCP ports"
    return f"TCP ports {first} to {last}"


# Connections to ranks that identify themselves with a secret

_SECRET_BYTES = 32
_ACCEPTED = b"come in"
_RANK = struct.Struct("!I")
_GREETING_S = 1.0
_CONNECTING_S = 2.0


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
        by_number = {listening.fileno(): listening for listening in self._sockets}
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
        for listening in self._sockets:
            listening.close()


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


def listen(rank: int, store: Any) -> tuple[Listener, str]:
    """Listens for the ranks below; returns the listener and its address for `connect`.

    Args:
        rank: This rank.
        store: A ``torch.distributed.Store``. All ranks can reach this host on its route to the store's host.
    """
    listener = Listener()
    dual = socket.has_dualstack_ipv6()
    tcp = socket.create_server(
        ("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
    )
    listener.listen_at(tcp)
    address = {
        "machine": machine(socket.gethostname(), rank),
        "name": listener.name,
        "secret": listener.secret,
        "port": tcp.getsockname()[1],
        "hosts": list(dict.fromkeys(_own_addresses(_host_of(store)))),
    }
    return listener, json.dumps(address)


def connect(address: str, rank: int, look: Callable[[], float]) -> socket.socket:
    """Connects to the rank above and waits until it accepts this one.

    Args:
        address: Address of that rank, from `listen`.
        rank: This rank.
        look: As for `Listener.accept`.

    Raises:
        Unreachable: It does not listen there any more.
    """
    place = json.loads(address)
    link = _connect(place, machine(socket.gethostname(), rank))
    greet(link, place["secret"], rank, look)
    return link


def _connect(place: dict[str, Any], here: str) -> socket.socket:
    if place["machine"] == here:
        with contextlib.suppress(OSError):
            return connect_unix(place["name"])
    problem = "no address"
    for host in place["hosts"]:
        try:
            return socket.create_connection((host, place["port"]), timeout=_CONNECTING_S)
        except OSError as error:
            problem = f"{host}: {error}"
    raise Unreachable(problem)


def _own_addresses(store: str) -> Iterator[str]:
    """Yields addresses of this host for others, the most likely first, without name lookups."""
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
    """Returns the host of a TCPStore; empty for other stores."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


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
