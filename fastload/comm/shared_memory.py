"""Memory shared by the ranks of one host, and the sockets between them.

The ranks talk to the first of them, the *leader*, over abstract unix sockets, and share an unnamed memory
file. So nothing is left behind however they end, and ``/dev/shm`` needs no space. A rank that dies is noticed
at once, because its socket closes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastload.base.memory import advise_huge_pages
from fastload.base.threads import background
from fastload.comm.world import World
from fastload.errors import Interrupted

_TICK_S = 0.05
_MOST_BYTES = 1 << 16  # of one message
_PEER_OF = struct.Struct("3i")  # process, user, group
_MOST_DIGITS = 20
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class HostMemory:
    """Memory shared by the ranks of one host in one load, and their progress through its rounds.

    Args:
        world: All ranks.
        ranks: The ranks of this host, at least two; the first one leads.

    Attributes:
        ranks: The ranks of this host.
        memory: The shared memory, flat uint8, once they are connected.
        number: Number of the load on its link.
        observer: Receives the events of the rounds.
    """

    observer: RoundObserver

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.number = 0
        self.memory = _NOTHING
        self._rank = world.rank
        self._patience_s = world.patience_s
        self._cache = world.cache  # not the world: a read that never ends keeps all of this
        self._num_clears = world.cache.num_clears
        self._name = f"the ranks {self.ranks} of a host"
        self._link: HostLink | None = None
        self._listener: HostListener | None = None
        self._leader_name = ""

    def offer(self) -> dict[str, str]:
        """Returns the address of this rank on its host; `close` ends it."""
        self._link = self._cache.take(self._name)
        if self._link is not None and not self._link.is_alive:
            self.renew()
        if self._link is not None:
            return {"leader": str(self.ranks[0]), "token": self._link.token}
        self._listener = self._listener or HostListener()
        return {"leader": str(self.ranks[0]), "token": "", "listener": self._listener.name}

    def renew(self) -> None:
        """Drops the cached connections, since other ranks have theirs no more."""
        if self._link is not None:
            self._link.drop()
            self._link = None

    def accept(self, offers: Sequence[Mapping[str, str]]) -> None:
        """Sets the offers of all ranks of the world."""
        self._leader_name = offers[self.ranks[0]].get("listener", "")

    def connect(self, nbytes: int, observer: RoundObserver, *, give_up: Callable[[], bool]) -> None:
        """Connects to the others, unless the connections were cached, and shares the memory.

        Args:
            nbytes: Bytes of shared memory; the same on all ranks.
            observer: Called in another thread.
            give_up: Polled; True ends the wait for the others.

        Raises:
            Interrupted: A rank did not come, or `give_up` returned True.
            MemoryError: The system refuses that much memory.
        """
        self.observer = observer
        limit_s = self._patience_s
        if self._link is None:
            assert self._listener is not None, "offered"
            self._link = HostLink(
                self._rank,
                self.ranks,
                self._listener,
                self._leader_name,
                until_s=limit_s,
                give_up=give_up,
            )
            self._listener.close()
        self._link.begin(self, nbytes, until_s=limit_s, give_up=give_up)

    def arrive(self, index: int, released: int, statuses: dict[int, int]) -> None:
        """Tells the others that this rank has its part of a round in the shared memory.

        Args:
            index: Number of the round.
            released: This rank needs this round and earlier ones no more.
            statuses: Problems with chunks of its part, by reader.
        """
        assert self._link is not None, "connected"
        self._link.arrive(_Message(self.number, index, released, statuses))

    def close(self) -> None:
        """Ends the load; caches the connections for the next one, if all ranks are alive."""
        if self._listener is not None:
            self._listener.close()
        link, self._link, self.memory = self._link, None, _NOTHING
        if link is None:
            return
        link.end(self)
        if link.is_alive:
            self._cache.put(self._name, link, self._num_clears)
        else:
            link.drop()


class RoundObserver(Protocol):
    """Receives the events of the rounds of one load."""

    def complete(self, index: int, statuses: Mapping[int, int], released: int) -> None:
        """Called when all ranks of the host have their part of a round in the shared memory.

        Args:
            index: Which round.
            statuses: Problems with chunks of it, by reader.
            released: No rank needs this round or an earlier one any more.
        """
        ...

    def lost(self, rank: int) -> None:
        """Called when a rank of the host has died."""
        ...


class _Message(NamedTuple):
    """A message between ranks of a host.

    Attributes:
        load: Number of the load on this link.
        number: Number of the round; -1 with a memory file.
        released: Last round that is needed no more; with a memory file, its bytes.
        statuses: Problems with chunks of the round, by reader.
    """

    load: int
    number: int
    released: int
    statuses: dict[int, int]

    def pack(self) -> bytes:
        return json.dumps([self.load, self.number, self.released, list(self.statuses.items())]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> _Message:
        load, number, released, statuses = json.loads(data)
        return cls(load, number, released, dict(statuses))


class _Collector:
    """The messages of the ranks for the rounds of one load, on the leader."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._arrived: dict[int, dict[int, dict[int, int]]] = {}
        self._released = dict.fromkeys(ranks, -1)

    def collect(self, rank: int, message: _Message) -> _Message | None:
        """Notes the message of a rank; returns the message to all after the last one."""
        found = self._arrived.setdefault(message.number, {})
        found[rank] = message.statuses
        self._released[rank] = max(self._released[rank], message.released)
        if len(found) < len(self._released):
            return None
        statuses: dict[int, int] = {}
        for part in self._arrived.pop(message.number).values():
            statuses |= part
        return _Message(message.load, message.number, min(self._released.values()), statuses)


class HostLink:
    """Connections between the ranks of one host, kept between loads; see `cache.CachedResource`.

    Attributes:
        token: Name of the listener at which the ranks met.
        is_alive: Whether all of them are alive, as far as is known.

    Args:
        rank: This rank.
        ranks: All ranks of the host; the first one leads.
        listener: Listener of this rank, used on the leader.
        leader_name: Name of the listener of the leader.
        until_s: Longest wait for the others.
        give_up: Polled; True ends the wait.

    Raises:
        Interrupted: Some rank did not come, or `give_up` said so.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        listener: HostListener,
        leader_name: str,
        *,
        until_s: float,
        give_up: Callable[[], bool],
    ) -> None:
        self.token = leader_name
        self._rank = rank
        self._leads = rank == ranks[0]
        if self._leads:
            self._sockets = listener.accept(ranks[1:], until_s, give_up)
        else:
            self._sockets = {ranks[0]: _connect(leader_name, rank)}
        self._lock = threading.Lock()
        self._num_loads = 0
        self._load: HostMemory | None = None
        self._collector = _Collector(ranks)
        self._memory: dict[int, tuple[int, int]] = {}  # of loads that this rank has not come to: file, bytes
        self._has_memory = threading.Condition(self._lock)
        self._lost: int | None = None
        background(self._listen, "fastload-host").start()

    @property
    def is_alive(self) -> bool:  # noqa: D102  (see the class)
        return self._lost is None

    def begin(self, load: HostMemory, nbytes: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        """Begins the next load.

        Args:
            load: The load; gets its number and memory.
            nbytes: Bytes of shared memory; the same on all ranks.
            until_s: Longest wait for the leader.
            give_up: Polled; True ends the wait.

        Raises:
            Interrupted: The leader did not come, or `give_up` returned True.
            MemoryError: The system refuses that much memory.
        """
        with self._lock:
            self._num_loads += 1
            load.number = self._num_loads
        file = (
            _make_memory(nbytes) if self._leads else self._await_memory(load.number, nbytes, until_s, give_up)
        )
        try:
            load.memory = _map(file, nbytes)
            with self._lock:
                self._collector = _Collector(load.ranks)
                self._load = load  # before the others have the memory, and can tell of rounds
                lost = self._lost
            if self._leads:
                for rank, other in self._sockets.items():
                    self._tell(rank, other, _Message(load.number, -1, nbytes, {}), file)
        finally:
            os.close(file)
        if lost is not None:
            load.observer.lost(lost)

    def arrive(self, message: _Message) -> None:
        """Tells the others that this rank has its part of a round."""
        if self._leads:
            self._collect(self._rank, message)
        else:
            for rank, other in self._sockets.items():
                self._tell(rank, other, message)

    def end(self, load: HostMemory) -> None:
        """Ends a load; its observer is called no more."""
        with self._lock:
            if self._load is load:
                self._load = None

    def drop(self) -> None:
        """Ends the connections."""
        for other in self._sockets.values():
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)  # which the thread notices, and closes

    def disown(self) -> None:
        """Closes the sockets in a forked child, so that the others notice when the parent ends."""
        for other in self._sockets.values():
            other.close()

    def _await_memory(self, load: int, nbytes: int, until_s: float, give_up: Callable[[], bool]) -> int:
        deadline = time.monotonic() + until_s
        with self._has_memory:
            while load not in self._memory:
                self._has_memory.wait(_TICK_S)
                if self._lost is not None or give_up():
                    raise Interrupted(
                        "the first rank of this host is gone"
                        if self._lost is not None
                        else "another rank failed"
                    )
                if time.monotonic() > deadline:
                    raise Interrupted(f"the first rank of this host shared no memory within {until_s:.1f} s")
            file, found_bytes = self._memory.pop(load)
        assert found_bytes == nbytes, (found_bytes, nbytes)
        return file

    def _tell(self, rank: int, other: socket.socket, message: _Message, file: int | None = None) -> None:
        try:
            if file is None:
                other.send(message.pack())
            else:
                socket.send_fds(other, [message.pack()], [file])
        except OSError:
            self._lose(rank)

    def _listen(self) -> None:
        """Receives messages until a rank is gone."""
        with selectors.DefaultSelector() as selector:
            for rank, other in self._sockets.items():
                selector.register(other, selectors.EVENT_READ, rank)
            while self._lost is None:
                for key, _ in selector.select():
                    self._receive(key.data, self._sockets[key.data])
        for other in self._sockets.values():
            other.close()
        with self._lock:
            unused, self._memory = self._memory, {}
        for file, _ in unused.values():
            os.close(file)

    def _receive(self, rank: int, other: socket.socket) -> None:
        try:
            data, files, _, _ = socket.recv_fds(other, _MOST_BYTES, 1)
        except OSError:
            data, files = b"", []
        if not data:
            self._lose(rank)
            return
        message = _Message.unpack(data)
        if files:
            with self._has_memory:
                self._memory[message.load] = files[0], message.released
                self._has_memory.notify_all()
        elif self._leads:
            self._collect(rank, message)
        else:
            self._complete(message)

    def _collect(self, rank: int, message: _Message) -> None:
        """Merges, on the leader, the messages of the ranks for a round."""
        with self._lock:
            load = self._load
            done = None
            if load is not None and load.number == message.load:
                done = self._collector.collect(rank, message)
        if done is not None:
            for member, other in self._sockets.items():
                self._tell(member, other, done)
            self._complete(done)

    def _complete(self, message: _Message) -> None:
        with self._lock:
            load = self._load
        if load is not None and load.number == message.load:
            load.observer.complete(message.number, message.statuses, message.released)

    def _lose(self, rank: int) -> None:
        with self._has_memory:
            is_first, self._lost = self._lost is None, rank if self._lost is None else self._lost
            load = self._load
            self._has_memory.notify_all()
        if is_first and load is not None:
            load.observer.lost(rank)


def _make_memory(nbytes: int) -> int:
    """Returns the descriptor of an unnamed memory file."""
    try:
        file = os.memfd_create("fastload")
        os.ftruncate(file, max(nbytes, mmap.PAGESIZE))
    except OSError as error:
        raise MemoryError(f"cannot share {nbytes} bytes with the ranks of this host: {error}") from None
    return file


def _map(file: int, nbytes: int) -> Tensor:
    """Maps a memory file; the memory lives as long as the tensor."""
    try:
        pages = mmap.mmap(file, max(nbytes, mmap.PAGESIZE))
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot share {nbytes} bytes with the ranks of this host: {error}") from None
    advise_huge_pages(pages)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)


# Connecting


class HostListener:
    """Accepts connections from the ranks of this host.

    Attributes:
        name: Name of the socket, which nobody can guess.
    """

    def __init__(self) -> None:
        self.name = f"fastload-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(socket.SOMAXCONN)
        self._socket.settimeout(_TICK_S)

    def accept(
        self, ranks: Sequence[int], until_s: float, give_up: Callable[[], bool]
    ) -> dict[int, socket.socket]:
        """Waits for ranks to connect; returns a socket for each.

        Raises:
            Interrupted: Some did not come in time, or `give_up` returned True.
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
                link, _ = self._socket.accept()
                rank = _rank_of(link)
                if rank in missing:
                    found[rank] = link
                else:
                    link.close()
        return found

    def close(self) -> None:
        """Stops listening."""
        self._socket.close()


def _rank_of(link: socket.socket) -> int | None:
    """Returns the rank that has connected; None for other processes."""
    _, user, _ = _PEER_OF.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_OF.size))
    link.settimeout(_TICK_S)
    try:
        text = link.recv(_MOST_DIGITS)
    except OSError:  # says nothing, or went again
        return None
    link.settimeout(None)
    return int(text) if user == os.getuid() and text.isdigit() else None


def _connect(name: str, rank: int) -> socket.socket:
    """Connects to the leader.

    Raises:
        Interrupted: It is gone.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect(f"\0{name}")
        link.send(str(rank).encode())
    except OSError as error:
        link.close()
        raise Interrupted(f"the first rank of this host does not answer: {error}") from error
    return link
