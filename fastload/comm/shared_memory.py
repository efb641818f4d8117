"""Memory shared by the ranks of one host, and the sockets between them.

The ranks connect to the first of them, the *leader*, with abstract unix sockets, and share an unnamed memory
file. So nothing is left behind however they end, and ``/dev/shm`` needs no space. The others notice at once
when a rank dies, because its socket closes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastload.base.memory import advise_huge_pages
from fastload.base.threads import Task
from fastload.comm.hosts import Listener, Unreachable, connect_unix, greet
from fastload.comm.world import World
from fastload.errors import Interrupted

_TICK_S = 0.05
_MOST_BYTES = 1 << 16  # of one message
_KIND = socket.SOCK_SEQPACKET  # preserves the bounds of messages
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class HostMemory:
    """Memory shared by the ranks of one host in one load, and their progress through its rounds.

    Args:
        world: All ranks.
        ranks: The ranks of this host, at least two; the first one leads.

    Attributes:
        ranks: The ranks of this host.
        memory: The shared memory, flat uint8, once they are connected.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.memory = _NOTHING
        self._rank = world.rank
        self._patience_s = world.patience_s
        self._cache = world.cache  # not the world: a read that never ends keeps all of this
        self._num_clears = world.cache.num_clears
        self._name = f"shared memory {self.ranks}"
        self._link: HostLink | None = None
        self._listener: Listener | None = None
        self._leader: Mapping[str, str] = {}

    def offer(self) -> dict[str, str]:
        """Returns the address of this rank on its host; `close` ends it."""
        leader = str(self.ranks[0])
        self._link = self._cache.take(self._name)
        if self._link is not None and not self._link.is_alive:
            self.renew()
        if self._link is not None:
            return {"leader": leader, "token": self._link.token}
        self._listener = self._listener or Listener(_KIND)
        return {
            "leader": leader,
            "token": "",
            "listener": self._listener.name,
            "secret": self._listener.secret,
        }

    def renew(self) -> None:
        """Drops the cached connections, since other ranks no longer have theirs."""
        if self._link is not None:
            self._link.drop()
            self._link = None

    def accept(self, offers: Sequence[Mapping[str, str]]) -> None:
        """Takes the offers of all ranks of the world."""
        self._leader = offers[self.ranks[0]]

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
        if self._link is None:
            assert self._listener is not None, "offered"
            sockets = _meet(self._rank, self.ranks, self._listener, self._leader, self._patience_s, give_up)
            self._link = HostLink(self._rank, self.ranks, sockets, self._leader["listener"])
            self._listener.close()
        self.memory = self._link.begin(nbytes, observer, until_s=self._patience_s, give_up=give_up)

    def arrive(self, index: int, released: int, statuses: dict[int, int]) -> None:
        """Reports that this rank has its part of a round in the shared memory.

        Args:
            index: Number of the round.
            released: This rank no longer needs this round and earlier ones.
            statuses: Status of each chunk of its part that could not be read, by reader.
        """
        assert self._link is not None, "connected"
        self._link.arrive(index, released, statuses)

    def close(self) -> None:
        """Ends the load; caches the connections for the next one, if all ranks are alive."""
        if self._listener is not None:
            self._listener.close()
        link, self._link, self.memory = self._link, None, _NOTHING
        if link is None:
            return
        link.end()
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
            statuses: Status of each chunk that could not be read, by reader.
            released: No rank needs this round or an earlier one.
        """

    def lost(self, rank: int) -> None:
        """Called when a rank of the host has died."""


class _HostMessage(NamedTuple):
    """A message between ranks of a host.

    Attributes:
        load: Number of the load on this link.
        number: Number of the round; -1 with a memory file.
        released: Last round that is no longer needed; with a memory file, its bytes.
        statuses: Status of each chunk of the round that could not be read, by reader.
    """

    load: int
    number: int
    released: int
    statuses: dict[int, int]

    def pack(self) -> bytes:
        return json.dumps([self.load, self.number, self.released, list(self.statuses.items())]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> _HostMessage:
        load, number, released, statuses = json.loads(data)
        return cls(load, number, released, dict(statuses))


class _Collector:
    """The messages of the ranks for the rounds of one load, on the leader."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._arrived: dict[int, dict[int, dict[int, int]]] = {}
        self._released = dict.fromkeys(ranks, -1)

    def collect(self, rank: int, message: _HostMessage) -> _HostMessage | None:
        """Notes the message of a rank; returns the message to all after the last one."""
        arrived = self._arrived.setdefault(message.number, {})
        arrived[rank] = message.statuses
        self._released[rank] = max(self._released[rank], message.released)
        if len(arrived) < len(self._released):
            return None
        statuses: dict[int, int] = {}
        for part in self._arrived.pop(message.number).values():
            statuses |= part
        return _HostMessage(message.load, message.number, min(self._released.values()), statuses)


class HostLink:
    """Connections between the ranks of one host, kept between loads; see `cache.CachedResource`.

    Args:
        rank: This rank.
        ranks: All ranks of the host; the first one leads.
        sockets: A connection to the leader, or on the leader one to each of the others, by rank.
        token: Name of the listener at which the ranks met.

    Attributes:
        token: As given.
        is_alive: Whether all of them are alive, as far as is known.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], sockets: Mapping[int, socket.socket], token: str
    ) -> None:
        self.token = token
        self._rank = rank
        self._ranks = ranks
        self._sockets = sockets
        self._num_loads = 0
        self._observer: RoundObserver | None = None
        self._collector = _Collector(ranks)
        self._memory: dict[int, tuple[int, int]] = {}  # of loads that this rank has not begun: file, bytes
        self._changed = threading.Condition(threading.Lock())  # guards all attributes
        self._lost: int | None = None
        Task(self._listen, "fastload-host").start()

    @property
    def is_alive(self) -> bool:  # noqa: D102  (see the class)
        return self._lost is None

    @property
    def _leads(self) -> bool:
        return self._rank == self._ranks[0]

    def begin(
        self, nbytes: int, observer: RoundObserver, *, until_s: float, give_up: Callable[[], bool]
    ) -> Tensor:
        """Begins the next load and returns its memory.

        Args:
            nbytes: Bytes of shared memory; the same on all ranks.
            observer: Receives the events of the rounds.
            until_s: Longest wait for the leader.
            give_up: Polled; True ends the wait.

        Raises:
            Interrupted: The leader did not come, or `give_up` returned True.
            MemoryError: The system refuses that much memory.
        """
        with self._changed:
            self._num_loads += 1
            number = self._num_loads
        file = _make_memory(nbytes) if self._leads else self._await_memory(number, nbytes, until_s, give_up)
        try:
            memory = _map(file, nbytes)
            with self._changed:
                self._collector = _Collector(self._ranks)
                self._observer = observer  # before the others have the memory and report rounds
                lost = self._lost
            if self._leads:
                for rank, other in self._sockets.items():
                    self._send(rank, other, _HostMessage(number, -1, nbytes, {}), file)
        finally:
            os.close(file)
        if lost is not None:
            observer.lost(lost)
        return memory

    def arrive(self, index: int, released: int, statuses: dict[int, int]) -> None:
        """Reports this rank's part of a round; see `HostMemory.arrive`."""
        message = _HostMessage(self._num_loads, index, released, statuses)
        if self._leads:
            self._collect(self._rank, message)
        else:
            for rank, other in self._sockets.items():
                self._send(rank, other, message)

    def end(self) -> None:
        """Ends a load; its observer is called no more."""
        with self._changed:
            self._observer = None

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
        with self._changed:
            while load not in self._memory:
                self._changed.wait(_TICK_S)
                if self._lost is not None:
                    raise Interrupted("the first rank of this host is gone")
                if give_up():
                    raise Interrupted("another rank failed")
                if time.monotonic() > deadline:
                    raise Interrupted(f"the first rank of this host shared no memory within {until_s:.1f} s")
            file, found_bytes = self._memory.pop(load)
        assert found_bytes == nbytes, (found_bytes, nbytes)
        return file

    def _send(self, rank: int, other: socket.socket, message: _HostMessage, file: int | None = None) -> None:
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
        with self._changed:
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
        message = _HostMessage.unpack(data)
        if files:
            with self._changed:
                self._memory[message.load] = files[0], message.released
                self._changed.notify_all()
        elif self._leads:
            self._collect(rank, message)
        else:
            self._complete(message)

    def _collect(self, rank: int, message: _HostMessage) -> None:
        """Merges, on the leader, the messages of the ranks for a round."""
        with self._changed:
            is_current = self._observer is not None and message.load == self._num_loads
            done = self._collector.collect(rank, message) if is_current else None
        if done is not None:
            for member, other in self._sockets.items():
                self._send(member, other, done)
            self._complete(done)

    def _complete(self, message: _HostMessage) -> None:
        with self._changed:
            observer = self._observer if message.load == self._num_loads else None
        if observer is not None:
            observer.complete(message.number, message.statuses, message.released)

    def _lose(self, rank: int) -> None:
        with self._changed:
            is_first, self._lost = self._lost is None, rank if self._lost is None else self._lost
            observer = self._observer
            self._changed.notify_all()
        if is_first and observer is not None:
            observer.lost(rank)


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
    memory = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)
    advise_huge_pages(memory)
    return memory


def _meet(
    rank: int,
    ranks: Sequence[int],
    listener: Listener,
    leader: Mapping[str, str],
    until_s: float,
    give_up: Callable[[], bool],
) -> dict[int, socket.socket]:
    """Connects the ranks of a host to the first of them; returns the sockets of this rank, by rank.

    Args:
        rank: This rank.
        ranks: All ranks of the host.
        listener: Listener of this rank.
        leader: `HostMemory.offer` of the first rank.
        until_s: Longest wait for the others.
        give_up: Polled; True ends the wait.

    Raises:
        Interrupted: A rank did not come in time, or `give_up` returned True.
    """
    deadline = time.monotonic() + until_s
    sockets: dict[int, socket.socket] = {}
    others = ranks[1:] if rank == ranks[0] else ranks[:1]

    def look() -> float:
        if give_up():
            raise Interrupted("another rank failed")
        if time.monotonic() > deadline:
            missing = sorted(set(others) - sockets.keys())
            raise Interrupted(f"ranks {missing} of this host did not connect within {until_s:.1f} s")
        return _TICK_S

    if rank == ranks[0]:
        for other, link in listener.accept(others, look):
            sockets[other] = link
        return sockets
    try:
        link = connect_unix(leader["listener"], _KIND)
        greet(link, leader["secret"], rank, look)
    except (OSError, Unreachable) as error:
        raise Interrupted(f"the first rank of this host does not answer: {error}") from error
    return {ranks[0]: link}
