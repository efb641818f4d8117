"""Connections between neighbours in the control tree, and the messages on them."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import select
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from fastload.comm.hosts import host_addresses, interface_address
from fastload.comm.listener import Listener, Unreachable, connect_unix, greet

_FANOUT = 8  # so the ranks of a host of eight are next to each other in the tree
_HEAD = struct.Struct("!IIII")
_ACKNOWLEDGED = 1 << 31  # with the number of a step
_READ_BYTES = 1 << 18
_LONGEST_S, _SHORT_S = 1.0, 0.05
_CONNECTING_S = 2.0

Tag = tuple[int, int]
"""Number of a call, and of a step in it."""


class TreeBroken(Exception):
    """A rank has closed its links or died; the ranks continue through the store."""


def parent_of(rank: int) -> int | None:
    """Returns the rank above: its number in base 8 with the last nonzero digit set to 0."""
    if not rank:
        return None
    step = _FANOUT
    while rank % step == 0:
        step *= _FANOUT
    return rank - rank % step


def children_of(rank: int, size: int) -> list[int]:
    """Returns the ranks below, the largest subtrees first."""
    steps, step = [], 1
    while step < size and rank % (step * _FANOUT) == 0:
        steps.append(step)
        step *= _FANOUT
    return [
        child
        for step in reversed(steps)
        for child in range(rank + step, min(rank + step * _FANOUT, size), step)
    ]


# Messages


class TreeLinks:
    """One rank's links to its neighbours in the tree, for all calls of the group.

    A message belongs to a step of a call and has two parts: a table of responses, and an attachment. Calls in
    several threads share the links; one of the threads moves the messages of all.

    Args:
        rank: This rank.
        sockets: A connected socket to each neighbour, by rank.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket]) -> None:
        self._turn = threading.Condition()
        self._parent = parent_of(rank)
        self._num_acknowledged: Counter[Tag] = Counter()
        self._unacknowledged: dict[Tag, Sequence[str]] = {}
        self._acknowledged: list[str] = []
        self._links = {rank: _TreeLink(link) for rank, link in sockets.items()}
        self._inbox: dict[tuple[int, Tag], tuple[str, bytes]] = {}
        self._is_broken = self._is_moving = False
        self._num_waiting = 0

    def are_intact(self) -> bool:
        """Whether all neighbours are connected, as far as this rank knows."""
        with self._turn:
            if not self._is_moving and not self._is_broken:
                self._move(0.0)
            return not self._is_broken

    def send(self, ranks: Collection[int], tag: Tag, table: str, attachment: bytes) -> None:
        """Begins to send a message to neighbours; `wait` sends the rest."""
        text = table.encode("ascii")
        message = b"".join([_HEAD.pack(*tag, len(text), len(attachment)), text, attachment])
        with self._turn:
            for rank in ranks:
                self._links[rank].send(message)

    def acknowledge(self, tag: Tag, keys: Sequence[str] = ()) -> None:
        """Tells rank 0 that a call's last decision has reached this rank and all below it.

        Args:
            tag: The step.
            keys: Keys that `take_acknowledged` returns once all ranks have acknowledged it.
        """
        with self._turn:
            if keys:
                self._unacknowledged[tag] = keys
            self._num_acknowledged[tag] += 1
            if self._num_acknowledged[tag] < len(self._links) + (self._parent is None):
                return  # one of this rank, and one of each child
            del self._num_acknowledged[tag]
            if self._parent is None:
                self._acknowledged += self._unacknowledged.pop(tag, ())
            else:
                self._links[self._parent].send(_HEAD.pack(tag[0], tag[1] | _ACKNOWLEDGED, 0, 0))

    def take_acknowledged(self) -> list[str]:
        """Returns, on rank 0, the keys of steps that all ranks have newly acknowledged."""
        with self._turn:
            keys, self._acknowledged = self._acknowledged, []
        return keys

    def take_unacknowledged(self) -> list[str]:
        """Returns the keys of all other steps, once the tree is broken."""
        with self._turn:
            unacknowledged, self._unacknowledged = self._unacknowledged, {}
        return self.take_acknowledged() + [key for keys in unacknowledged.values() for key in keys]

    def take(self, ranks: Collection[int], tag: Tag) -> list[tuple[str, bytes]]:
        """Returns the messages from neighbours that have arrived and were not received."""
        with self._turn:
            return [self._inbox.pop((rank, tag)) for rank in ranks if (rank, tag) in self._inbox]

    def receive(self, ranks: Collection[int], tag: Tag, look: Callable[[], float]) -> list[tuple[str, bytes]]:
        """Waits for a message of each of some neighbours; see `wait`."""
        wanted = [(rank, tag) for rank in ranks]
        self.wait(lambda: all(key in self._inbox for key in wanted), look)
        return [self._inbox.pop(key) for key in wanted]

    def flush(self, ranks: Collection[int], look: Callable[[], float]) -> None:
        """Waits until the messages to some neighbours have left; see `wait`."""
        self.wait(lambda: not any(self._links[rank].is_sending for rank in ranks), look)

    def wait(self, is_done: Callable[[], bool], look: Callable[[], float]) -> None:
        """Moves messages until a condition holds.

        Args:
            is_done: The condition.
            look: Called repeatedly; returns the seconds until the next call. It may raise.

        Raises:
            TreeBroken: A neighbour is gone.
        """
        while True:
            with self._turn:
                if is_done():
                    return
                if self._is_broken:
                    raise TreeBroken
                if others_move := self._is_moving:
                    self._num_waiting += 1
                    self._turn.wait(_SHORT_S)
                    self._num_waiting -= 1
                else:
                    self._is_moving = True
            if others_move:
                look()
            else:
                self._move_for(look)

    def _move_for(self, look: Callable[[], float]) -> None:
        try:
            self._move(min(look(), _SHORT_S if self._num_waiting else _LONGEST_S))
        finally:
            with self._turn:
                self._is_moving = False
                self._turn.notify_all()
                if self._is_broken:
                    self._close()

    def drop(self) -> None:
        """Disconnects the neighbours, who then disconnect theirs; never blocks or raises."""
        with self._turn:
            self._is_broken = True
            for link in self._links.values():
                link.shut()
            if not self._is_moving:
                self._close()

    def disown(self) -> None:
        """Closes the descriptors in a forked child, so that neighbours notice when the parent ends."""
        self._close()
        self._links = {}
        self._is_broken = True

    def _close(self) -> None:
        for link in self._links.values():
            link.close()

    def _move(self, wait_s: float) -> None:
        """Sends and receives what is ready; in one thread at a time."""
        poll = select.poll()
        by_number = {}
        for rank, link in self._links.items():
            if (number := link.number) >= 0:
                by_number[number] = rank, link
                poll.register(number, select.POLLIN | (select.POLLOUT if link.is_sending else 0))
        found = poll.poll(1e3 * wait_s)
        with self._turn:
            is_gone = False
            for number, event in found:
                rank, link = by_number[number]
                try:
                    if event & ~select.POLLOUT:  # first, since a closed end accepts no more bytes
                        for tag, table, attachment in link.take():
                            if tag[1] & _ACKNOWLEDGED:
                                self.acknowledge((tag[0], tag[1] ^ _ACKNOWLEDGED))
                            else:
                                self._inbox[rank, tag] = table, attachment
                    if event & select.POLLOUT:
                        link.flush()
                except OSError:
                    is_gone = True
            if is_gone:
                self.drop()


class _TreeLink:
    """A connection to one neighbour."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        if link.family != socket.AF_UNIX:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = link
        self._leaving: deque[memoryview] = deque()
        self._received = bytearray()

    @property
    def number(self) -> int:
        """Its descriptor; -1 if it is closed."""
        return self._socket.fileno()

    @property
    def is_sending(self) -> bool:
        return bool(self._leaving)

    def send(self, message: bytes) -> None:
        """Sends as much as possible at once; `flush` sends the rest."""
        self._leaving.append(memoryview(message))
        if len(self._leaving) == 1:
            with contextlib.suppress(OSError):  # the next read raises it
                self.flush()

    def flush(self) -> None:
        """Sends as much as possible without waiting.

        Raises:
            OSError: The other end is gone.
        """
        while self._leaving:
            try:
                num_sent = self._socket.send(self._leaving[0])
            except BlockingIOError:
                return
            if num_sent == len(self._leaving[0]):
                self._leaving.popleft()
            else:
                self._leaving[0] = self._leaving[0][num_sent:]

    def take(self) -> list[tuple[Tag, str, bytes]]:
        """Returns the messages that have arrived.

        Raises:
            OSError: The other end is gone, and all its messages were taken.
        """
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                if messages := self._parse():
                    return messages
                raise ConnectionResetError
            self._received += data
            if len(data) < _READ_BYTES:
                break
        return self._parse()

    def _parse(self) -> list[tuple[Tag, str, bytes]]:
        messages, begin = [], 0
        while len(self._received) - begin >= _HEAD.size:
            call, step, table_bytes, attachment_bytes = _HEAD.unpack_from(self._received, begin)
            middle = begin + _HEAD.size + table_bytes
            end = middle + attachment_bytes
            if len(self._received) < end:
                break
            table = str(memoryview(self._received)[begin + _HEAD.size : middle], "ascii")
            messages.append(((call, step), table, bytes(memoryview(self._received)[middle:end])))
            begin = end
        if begin:
            del self._received[:begin]
        return messages

    def shut(self) -> None:
        """Ends the connection at both ends, and all waits for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


# Connecting


def listen(machine: str, store: Any) -> tuple[Listener, str]:
    """Listens for the ranks below; returns the listener and its address for `connect`.

    Args:
        machine: Identifier of this machine; see `hosts.machine`.
        store: A ``torch.distributed.Store``. All ranks can reach this host on its route to the store's host.
    """
    listener = Listener()
    dual = socket.has_dualstack_ipv6()
    tcp = socket.create_server(
        ("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
    )
    listener.listen_at(tcp)
    address = {
        "machine": machine,
        "name": listener.name,
        "secret": listener.secret,
        "port": tcp.getsockname()[1],
        "hosts": list(dict.fromkeys(_own_addresses(_host_of(store)))),
    }
    return listener, json.dumps(address)


def connect(address: str, machine: str, rank: int, look: Callable[[], float]) -> socket.socket:
    """Connects to the rank above and waits until it accepts this one.

    Args:
        address: Address of that rank, from `listen`.
        machine: Identifier of this machine.
        rank: This rank.
        look: As for `TreeLinks.wait`.

    Raises:
        Unreachable: It does not listen there any more.
    """
    found = json.loads(address)
    link = _connect(found, machine)
    greet(link, found["secret"], rank, look)
    return link


def _connect(found: dict[str, Any], machine: str) -> socket.socket:
    if found["machine"] == machine:
        with contextlib.suppress(OSError):
            return connect_unix(found["name"])
    problem = "no address"
    for host in found["hosts"]:
        try:
            return socket.create_connection((host, found["port"]), timeout=_CONNECTING_S)
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
