"""The ranks of one host: memory that they share, and one message for each round.

They talk through the first of them, the *leader*, over unix sockets without a name in any file system, and
share memory that has none either: nothing of it is left behind, however they end, and it needs no room in
``/dev/shm``. A rank that ends without a word is noticed at once, since its socket closes.
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
from fastload.base.threads import background
from fastload.comm.door import Door, come_in
from fastload.errors import Interrupted

__all__ = ["HostLink", "HostRounds", "Listener"]

_TICK_S = 0.05
_MOST_BYTES = 1 << 16  # of one message


class Listener(Protocol):
    """Who is told of the rounds."""

    def complete(self, index: int, statuses: Mapping[int, int], released: int) -> None:
        """Hears that all ranks of the host have their part of a round.

        Args:
            index: Which round.
            statuses: What is the matter with chunks of it, by reader.
            released: All of them need no round up to this one any more.
        """
        ...

    def lost(self, rank: int) -> None:
        """Hears that a rank of the host is gone."""
        ...


class _Message(NamedTuple):
    """What ranks of a host tell each other.

    Attributes:
        load: Which load on this link.
        number: Which round; -1 with memory.
        released: Up to which round nothing is needed any more; with memory, its bytes.
        statuses: What is the matter with chunks of the round, by reader.
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


class HostLink:
    """Connections between the ranks of one host, kept for one load after the other; see `kept.Keepsake`.

    Attributes:
        token: The name of the door through which the ranks have come together.
        is_alive: Whether all of them are still there, as far as is known.

    Args:
        rank: This one.
        ranks: All of the host; the first one leads.
        door: That of this rank, which the leader admits the others through.
        doors: The names of the doors of all ranks.
        until_s: Longest wait for the others.
        give_up: Asked again and again; True ends the wait.

    Raises:
        Interrupted: Some rank did not come, or `give_up` said so.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        door: Door,
        doors: Mapping[int, str],
        *,
        until_s: float,
        give_up: Callable[[], bool],
    ) -> None:
        self.token = doors[ranks[0]]
        self.ranks = tuple(ranks)
        self._rank = rank
        self._leads = rank == ranks[0]
        if self._leads:
            self._sockets = door.admit(ranks[1:], until_s, give_up)
        else:
            self._sockets = {ranks[0]: come_in(doors[ranks[0]], rank)}
        self._lock = threading.Lock()
        self._num_loads = 0
        self._rounds: HostRounds | None = None
        self._memory: dict[int, tuple[int, int]] = {}  # of loads that this rank has not come to: file, bytes
        self._has_memory = threading.Condition(self._lock)
        self._lost: int | None = None
        background(self._listen, "fastload-host").start()

    @property
    def is_alive(self) -> bool:  # noqa: D102  (see the class)
        return self._lost is None

    def begin(
        self, nbytes: int, listener: Listener, *, until_s: float, give_up: Callable[[], bool]
    ) -> HostRounds:
        """Begins the next load.

        Args:
            nbytes: How much memory the ranks share in it; the same on all of them.
            listener: Is told of its rounds, in another thread.
            until_s: Longest wait for the leader.
            give_up: Asked again and again; True ends the wait.

        Raises:
            Interrupted: The leader did not come to it, or `give_up` said so.
            MemoryError: The system does not give that much.
        """
        with self._lock:
            self._num_loads += 1
            load = self._num_loads
        file = _make_memory(nbytes) if self._leads else self._await_memory(load, nbytes, until_s, give_up)
        try:
            rounds = HostRounds(self, load, _map(file, nbytes), listener)
            with self._lock:
                self._rounds = rounds  # before the others have the memory, and can tell of rounds
                lost = self._lost
            if self._leads:
                for rank, other in self._sockets.items():
                    self._tell(rank, other, _Message(load, -1, nbytes, {}), file)
        finally:
            os.close(file)
        if lost is not None:
            listener.lost(lost)
        return rounds

    def arrive(self, load: int, index: int, released: int, statuses: dict[int, int]) -> None:
        """Tells the others that this rank has its part of a round; see `HostRounds.arrive`."""
        message = _Message(load, index, released, statuses)
        if self._leads:
            self._collect(self._rank, message)
        else:
            for rank, other in self._sockets.items():
                self._tell(rank, other, message)

    def end(self, rounds: HostRounds) -> None:
        """Ends a load: nobody is told of its rounds any more."""
        with self._lock:
            if self._rounds is rounds:
                self._rounds = None

    def drop(self) -> None:
        """Ends the connections."""
        for other in self._sockets.values():
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)  # which the thread notices, and closes

    def disown(self) -> None:
        """Closes what a forked child has of them: the others are to notice when its parent ends."""
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
        """Hears the others, until one of them is gone."""
        with selectors.DefaultSelector() as selector:
            for rank, other in self._sockets.items():
                selector.register(other, selectors.EVENT_READ, rank)
            while self._lost is None:
                for key, _ in selector.select():
                    self._hear(key.data, self._sockets[key.data])
        for other in self._sockets.values():
            other.close()
        with self._lock:
            unused, self._memory = self._memory, {}
        for file, _ in unused.values():
            os.close(file)

    def _hear(self, rank: int, other: socket.socket) -> None:
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
        """On the leader, brings together what the ranks tell of a round."""
        with self._lock:
            rounds = self._rounds
            done = (
                rounds.collect(rank, message) if rounds is not None and rounds.load == message.load else None
            )
        if done is not None:
            for member, other in self._sockets.items():
                self._tell(member, other, done)
            self._complete(done)

    def _complete(self, message: _Message) -> None:
        with self._lock:
            rounds = self._rounds
        if rounds is not None and rounds.load == message.load:
            rounds.listener.complete(message.number, message.statuses, message.released)

    def _lose(self, rank: int) -> None:
        with self._has_memory:
            is_first, self._lost = self._lost is None, rank if self._lost is None else self._lost
            rounds = self._rounds
            self._has_memory.notify_all()
        if is_first and rounds is not None:
            rounds.listener.lost(rank)


class HostRounds:
    """The rounds of one load, as the ranks of a host go through them.

    Attributes:
        load: Which load on its link.
        memory: What the ranks share, flat uint8; the same bytes on all of them.
        listener: Is told of the rounds.
    """

    def __init__(self, link: HostLink, load: int, memory: Tensor, listener: Listener) -> None:
        self.load = load
        self.memory = memory
        self.listener = listener
        self._link = link
        self._arrived: dict[int, dict[int, dict[int, int]]] = {}
        self._released = dict.fromkeys(link.ranks, -1)

    def arrive(self, index: int, released: int, statuses: dict[int, int]) -> None:
        """Tells the others that this rank has its part of a round in the memory that they share.

        Args:
            index: Which round.
            released: This rank needs no round up to this one any more.
            statuses: What is the matter with chunks of its part, by reader.
        """
        self._link.arrive(self.load, index, released, statuses)

    def collect(self, rank: int, message: _Message) -> _Message | None:
        """On the leader, notes what a rank has told; returns what to tell all once it was the last one."""
        found = self._arrived.setdefault(message.number, {})
        found[rank] = message.statuses
        self._released[rank] = max(self._released[rank], message.released)
        if len(found) < len(self._released):
            return None
        statuses: dict[int, int] = {}
        for part in self._arrived.pop(message.number).values():
            statuses |= part
        return _Message(self.load, message.number, min(self._released.values()), statuses)

    def end(self) -> None:
        """Ends the load; the memory lives on as long as this rank uses it."""
        self._link.end(self)


def _make_memory(nbytes: int) -> int:
    """Returns a file without a name."""
    try:
        file = os.memfd_create("fastload")
        os.ftruncate(file, max(nbytes, mmap.PAGESIZE))
    except OSError as error:
        raise MemoryError(f"cannot share {nbytes} bytes with the ranks of this host: {error}") from None
    return file


def _map(file: int, nbytes: int) -> Tensor:
    """Maps a file without a name: the memory lives as long as the tensor."""
    try:
        pages = mmap.mmap(file, max(nbytes, mmap.PAGESIZE))
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot share {nbytes} bytes with the ranks of this host: {error}") from None
    advise_huge_pages(pages)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)
