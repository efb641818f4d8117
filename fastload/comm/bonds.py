"""Connections of the ranks of a group in a tree, along which answers come together and verdicts go out."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping

__all__ = ["Bonds", "BondsBroken", "Tag", "children_of", "parent_of"]

_BASE = 8  # so the ranks of a host of eight are next to each other in the tree
_HEAD = struct.Struct("!IIII")
_HEARD = 1 << 31  # with the number of a step
_READ_BYTES = 1 << 18
_LONGEST_S, _SHORT_S = 1.0, 0.05

Tag = tuple[int, int]  # number of a call, number of a step in it


class BondsBroken(Exception):
    """Some rank has let go of the tree, or has died: the ranks go on through the store."""


def parent_of(rank: int) -> int | None:
    """Returns who is above a rank: its number with the last digit that is not 0 made 0, to the base of 8."""
    if not rank:
        return None
    step = _BASE
    while rank % step == 0:
        step *= _BASE
    return rank - rank % step


def children_of(rank: int, size: int) -> list[int]:
    """Returns who is below a rank, those first that have most below themselves."""
    steps, step = [], 1
    while step < size and rank % (step * _BASE) == 0:
        steps.append(step)
        step *= _BASE
    return [
        child
        for step in reversed(steps)
        for child in range(rank + step, min(rank + step * _BASE, size), step)
    ]


class Bonds:
    """What connects one rank to those above and below it; the same object serves all calls of the group.

    Messages are of a step of a call, and of two parts: a table of answers, and bytes that go along. Several
    threads may be in calls at once: one of them moves the messages of all.

    Args:
        rank: This rank.
        links: By rank, a connected socket to each neighbour.
    """

    def __init__(self, rank: int, links: Mapping[int, socket.socket]) -> None:
        self._turn = threading.Condition()
        self._parent = parent_of(rank)
        self._num_heard: Counter[Tag] = Counter()
        self._all_heard: list[Tag] = []
        self._links = {rank: _Link(link) for rank, link in links.items()}
        self._inbox: dict[tuple[int, Tag], tuple[str, bytes]] = {}
        self._is_broken = self._is_moving = False
        self._num_waiting = 0

    def are_whole(self) -> bool:
        """Whether no neighbour is known to have gone."""
        with self._turn:
            if not self._is_moving and not self._is_broken:
                self._move(0.0)
            return not self._is_broken

    def send(self, ranks: Collection[int], tag: Tag, table: str, along: bytes) -> None:
        """Begins to send a message to neighbours; `wait` sends what did not go at once."""
        text = table.encode("ascii")
        message = b"".join([_HEAD.pack(*tag, len(text), len(along)), text, along])
        with self._turn:
            for rank in ranks:
                self._links[rank].send(message)

    def tell_heard(self, tag: Tag) -> None:
        """Tells the first rank that this one has heard of a last step, once those below it have, too."""
        with self._turn:
            self._num_heard[tag] += 1
            if self._num_heard[tag] < len(self._links) + (self._parent is None):
                return  # of itself, and of those below
            del self._num_heard[tag]
            if self._parent is None:
                self._all_heard.append(tag)
            else:
                self._links[self._parent].send(_HEAD.pack(tag[0], tag[1] | _HEARD, 0, 0))

    def take_heard(self) -> list[Tag]:
        """Returns the steps of which all ranks have heard; on the first rank, each once."""
        with self._turn:
            heard, self._all_heard = self._all_heard, []
        return heard

    def come(self, ranks: Collection[int], tag: Tag) -> list[tuple[str, bytes]]:
        """Returns those messages of neighbours that have come and were not received."""
        with self._turn:
            return [self._inbox.pop((rank, tag)) for rank in ranks if (rank, tag) in self._inbox]

    def receive(self, ranks: Collection[int], tag: Tag, look: Callable[[], float]) -> list[tuple[str, bytes]]:
        """Waits for a message of each of some neighbours; see `wait`."""
        wanted = [(rank, tag) for rank in ranks]
        self.wait(lambda: all(key in self._inbox for key in wanted), look)
        return [self._inbox.pop(key) for key in wanted]

    def flush(self, ranks: Collection[int], look: Callable[[], float]) -> None:
        """Waits until all that was to be sent to some neighbours is on its way; see `wait`."""
        self.wait(lambda: not any(self._links[rank].is_sending for rank in ranks), look)

    def wait(self, is_done: Callable[[], bool], look: Callable[[], float]) -> None:
        """Moves messages until something is done.

        Args:
            is_done: Says so.
            look: Called now and then, after as many seconds as it has returned; may raise.

        Raises:
            BondsBroken: The tree is no longer whole.
        """
        while True:
            with self._turn:
                if is_done():
                    return
                if self._is_broken:
                    raise BondsBroken
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
        """Lets go of the neighbours, and so of all that are in the tree; blocks nobody, and never raises."""
        with self._turn:
            self._is_broken = True
            for link in self._links.values():
                link.shut()
            if not self._is_moving:
                self._close()

    def disown(self) -> None:
        """Closes the descriptors in a forked child, which would hide the end of its parent."""
        for link in self._links.values():
            link.close()
        self._links = {}
        self._is_broken = True

    def _close(self) -> None:
        for link in self._links.values():
            link.close()

    def _move(self, wait_s: float) -> None:
        """Sends and takes what can be, for one thread at a time."""
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
                    if event & ~select.POLLOUT:  # first, for an end that has gone takes nothing more
                        for tag, table, along in link.take():
                            if tag[1] & _HEARD:
                                self.tell_heard((tag[0], tag[1] ^ _HEARD))
                            else:
                                self._inbox[rank, tag] = table, along
                    if event & select.POLLOUT:
                        link.flush()
                except OSError:
                    is_gone = True
            if is_gone:
                self.drop()


class _Link:
    """A connection to a neighbour."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        if link.family != socket.AF_UNIX:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = link
        self._leaving: deque[memoryview] = deque()
        self._come = bytearray()

    @property
    def number(self) -> int:
        """Its descriptor; -1 if it is closed."""
        return self._socket.fileno()

    @property
    def is_sending(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._leaving)

    def send(self, message: bytes) -> None:
        """Sends as much as can be sent at once, and the rest with `flush`."""
        self._leaving.append(memoryview(message))
        if len(self._leaving) == 1:
            with contextlib.suppress(OSError):  # who reads next finds that the other end is gone
                self.flush()

    def flush(self) -> None:
        """Sends what can be sent without a wait.

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
        """Returns the messages that have come.

        Raises:
            OSError: The other end is gone, and all that it has sent was taken before.
        """
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                if messages := self._cut():
                    return messages
                raise ConnectionResetError
            self._come += data
            if len(data) < _READ_BYTES:
                break
        return self._cut()

    def _cut(self) -> list[tuple[Tag, str, bytes]]:
        messages, begin = [], 0
        while len(self._come) - begin >= _HEAD.size:
            call, step, table_bytes, along_bytes = _HEAD.unpack_from(self._come, begin)
            middle = begin + _HEAD.size + table_bytes
            end = middle + along_bytes
            if len(self._come) < end:
                break
            table = str(memoryview(self._come)[begin + _HEAD.size : middle], "ascii")
            messages.append(((call, step), table, bytes(memoryview(self._come)[middle:end])))
            begin = end
        if begin:
            del self._come[:begin]
        return messages

    def shut(self) -> None:
        """Ends it for both ends; whoever waits for it wakes up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives its descriptor back."""
        self._socket.close()
