"""Decisions along a control tree of sockets while it is intact, and otherwise in the store."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fastload.comm.hosts import Listener, Unreachable, connect, listen
from fastload.comm.rendezvous import (
    JOINING,
    Decision,
    ExpiringKeys,
    GroupState,
    LastStep,
    Proposal,
    StoreRendezvous,
)
from fastload.comm.responses import join_responses
from fastload.comm.store import Member
from fastload.errors import FastloadError, PeerError

_FANOUT = 8  # so the ranks of a host of eight are next to each other in the tree
_HEAD = struct.Struct("!IIII")
_ACKNOWLEDGED = 1 << 31  # with the number of a step
_READ_BYTES = 1 << 18
_LOOK_S = 0.05  # between the looks of threads whose messages another one moves
_MOST_TRIES = 3
_NOTHING = "?"

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
        self._waker, self._wakes = socket.socketpair()  # the thread that moves messages waits for these, too
        self._waker.setblocking(False)

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
                self._send(rank, message)

    def _send(self, rank: int, message: bytes) -> None:
        link = self._links[rank]
        link.send(message)
        if link.is_sending and self._is_moving:
            with suppress(OSError):  # it is full, or closed with the links
                self._waker.send(b"\0")

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
                self._send(self._parent, _HEAD.pack(tag[0], tag[1] | _ACKNOWLEDGED, 0, 0))

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
                    self._turn.wait(_LOOK_S)
                else:
                    self._is_moving = True
            if others_move:
                look()
            else:
                self._move_for(look)

    def _move_for(self, look: Callable[[], float]) -> None:
        try:
            self._move(look())
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
        self._waker.close()
        self._wakes.close()

    def _move(self, wait_s: float) -> None:
        """Sends and receives what is ready; in one thread at a time."""
        poll = select.poll()
        if (wakes := self._wakes.fileno()) >= 0:
            poll.register(wakes, select.POLLIN)
        by_number = {}
        for rank, link in self._links.items():
            if (number := link.number) >= 0:
                by_number[number] = rank, link
                poll.register(number, select.POLLIN | (select.POLLOUT if link.is_sending else 0))
        events = poll.poll(1e3 * wait_s)
        with self._turn:
            is_gone = False
            for number, event in events:
                if number not in by_number:
                    with suppress(OSError):
                        self._wakes.recv(_READ_BYTES)
                    continue
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


# Decisions


class TreeState(GroupState):
    """One rank's tree of a group, from call to call.

    Attributes:
        links: Connections to the neighbours; None without a tree.
        num_tries: Number of calls that have failed to make a tree, since the last one that did.
        expiring: Keys of decisions that some ranks got along a tree which has broken since.
    """

    def __init__(self) -> None:
        super().__init__()
        self.links: TreeLinks | None = None
        self.num_tries = 0
        self.expiring = ExpiringKeys()

    def replace(self, links: TreeLinks | None) -> None:
        """Uses other links from now on; drops the old ones, which are broken."""
        if links is not None:
            self.num_tries = 0
        old, self.links = self.links, links
        if old is not None:
            old.drop()
            self.expiring.add(old.take_unacknowledged())

    def drop(self) -> None:
        """Disconnects; never blocks or raises."""
        if self.links is not None:
            self.links.drop()

    def disown(self) -> None:
        """Closes the descriptors in a forked child."""
        if self.links is not None:
            self.links.disown()


class TreeRendezvous(StoreRendezvous):
    """The store namespace of one call of a group whose ranks are connected in a tree.

    In a step each rank sends up its response and those from below. Rank 0 decides, stores the decision, and
    sends it down. A rank that finds the tree broken, or has waited too long, drops its links, which all
    others notice, and continues in the store, where the first decision counts.

    The first call makes the tree in its first step; so does the next call after it broke.

    Args:
        namespace: The group's namespace in a ``torch.distributed.Store``.
        state: The group's tree.
        member: This rank.
        call: As in the store.
        timeout_s: As in the store.
    """

    def __init__(
        self, namespace: Any, state: TreeState, member: Member, *, call: str, timeout_s: float
    ) -> None:
        super().__init__(namespace, state, member, call=call, timeout_s=timeout_s)
        self._tree = state
        self._thread = threading.get_ident()  # that begins the call
        self._listener: Listener | None = None
        self._links: TreeLinks | None = None
        self._last: list[str] = []  # keys to delete once all ranks have acknowledged the last decision

    @property
    def _parent(self) -> int | None:
        return parent_of(self.member.rank)

    @property
    def _children(self) -> list[int]:
        return children_of(self.member.rank, self.member.size)

    def begin(self) -> None:
        """Numbers the call, and listens for the ranks below if it is the first one."""
        links = self._tree.links
        self._take_number()
        if links is not None and links.are_intact():
            self._links = links
            return
        # Calls in the background, which make no tree, would wait for the store here: they find out when they
        # meet. In the first call, most ranks find out while they look for their parent.
        if links is not None or (self._number == 1 and self._parent is None):
            self._tree.replace(None)
            self._skip_decided(JOINING)
        if self._number == 1 and self._children and self._may_connect():
            with suppress(OSError):  # those below connect while this rank is busy with its part
                self._listen(JOINING)

    def acknowledge(self, last: LastStep) -> None:
        """As in the store; but a decision along the tree reaches all without this rank or the store."""
        keys, self._last = self._last, []
        if not last.in_tree or self._links is None:
            self._tree.expiring.add(keys)
            super().acknowledge(last)
            return
        if self._parent is None:
            keys += self._full(["progress", "failed"] if last.failed else ["progress"])
        self._links.acknowledge((self._number, last.step), keys)
        self._add_done(self._links.take_acknowledged())
        if self._done:
            with suppress(FastloadError):
                self.ask("ending the call", self.grace_s, self._delete_done)

    def withdraw(self, last: LastStep | None, responses: Sequence[tuple[int, str]], *, at_once: bool) -> None:
        """As in the store; the others find the tree broken, and go there."""
        self.disconnect()
        self._tree.expiring.add([*self._last, *self._done])
        super().withdraw(None if last and last.in_tree else last, responses, at_once=at_once)

    def note_shared(self, step: int, place: str, num_keys: int) -> None:
        """As in the store."""
        super().note_shared(step, place, num_keys)
        if self._parent is None:
            self._last += self._full(self._shared[step])

    def disconnect(self) -> None:
        """Drops the links, since the call has failed: whatever comes now is in the store."""
        self._stop_listening()
        if self._links is not None:
            self._links.drop()

    def _skip(self) -> None:
        self._links = None
        super()._skip()

    # A step

    def _decide(self, proposal: Proposal) -> Decision:
        """Decides along the tree, or else in the store."""
        what, step, response, wait_s, _ = proposal
        since = time.monotonic()
        self._versions.is_meeting = step == 0
        look = self._looking(step, wait_s - min(wait_s, self.grace_s) / 4)
        tries = step == 0 and self._links is None and self._may_connect()
        try:
            if tries:
                self._links = self._make_tree(what, look, wait_s)
            self._stop_listening()
            if (links := self._links) is not None:
                try:
                    decision = self._decide_in_tree(links, proposal, look)
                except (TreeBroken, OSError, MemoryError):
                    below = links.take(self._children, (self._number, step))
                    response = join_responses([response, *(table for table, _ in below)])
                    proposal = proposal._replace(response=response)
                    links.drop()
                else:
                    if tries:
                        self._tree.replace(links)
                        self._add_done(self._tree.expiring.rotate())
                    return decision
        except BaseException:
            self.disconnect()
            raise
        decision = self._decide_in_store(proposal, since=since)
        if tries and not decision.failed and not decision.in_tree:
            self._tree.num_tries += 1  # all ranks were there, and could not connect
        return decision

    def _decide_in_tree(self, links: TreeLinks, proposal: Proposal, look: Callable[[], float]) -> Decision:
        """Collects the responses and returns the decision.

        Raises:
            TreeBroken: The tree is broken, or a rank has not come in time.
        """
        what, step, response, wait_s, attachment = proposal
        tag = self._number, step
        below = links.receive(self._children, tag, look)
        table = join_responses([response, *(table for table, _ in below)]) if below else response
        attachment = attachment or next((more for _, more in below if more), b"")
        if self._parent is None:
            place = self._step(step)
            text = Decision.write(wait_s, table, in_tree=True)
            if self.ask(what, self.timeout_s, partial(place.put_decision, text)) != text:
                raise TreeBroken  # others have decided in the store
            self._add_done(self._last)
            self._last = self._full(place.keys_of(text))
        else:
            links.send([self._parent], tag, table, attachment)
            ((text, attachment),) = links.receive([self._parent], tag, look)
        links.send(self._children, tag, text, attachment)
        with suppress(TreeBroken):  # the ranks below notice it themselves
            links.flush(self._children, look)
        return Decision.from_text(text, self.member.size, attachment)

    def _looking(self, step: int, wait_s: float) -> Callable[[], float]:
        """Returns what a rank does repeatedly while it waits along the tree; see `TreeLinks.wait`."""
        began = time.monotonic()
        period_s = self._period_s(wait_s)
        next_look = began + period_s
        was_decided = False

        def look() -> float:
            nonlocal next_look, was_decided
            now = time.monotonic()
            left_s = max(began, self._progress.changed_at) + wait_s - now
            if left_s <= 0:
                raise TreeBroken
            if now >= next_look:
                next_look = now + period_s
                with suppress(PeerError):  # the tree may be intact without the store
                    is_left, is_decided = self.ask(
                        "waiting for the other ranks",
                        left_s + self.grace_s,
                        partial(self._look_around, step),
                    )
                    if is_left or was_decided:  # since the last look, and the decision has not arrived
                        raise TreeBroken
                    was_decided = is_decided
            return min(left_s, period_s)

        return look

    def _look_around(self, step: int) -> tuple[bool, bool]:
        """Returns whether ranks meet in the store instead, and whether they have decided there."""
        self._look(time.monotonic())
        place = self._step(step)
        return bool(self._store.check([place.log])), self._links is not None and place.is_decided()

    # Making a tree

    def _may_connect(self) -> bool:
        """Whether this call makes a tree: the same on all ranks, as only those in order come to the next."""
        return self._thread == threading.get_ident() and self._tree.num_tries < _MOST_TRIES

    def _make_tree(self, what: str, look: Callable[[], float], wait_s: float) -> TreeLinks | None:
        """Connects to the neighbours; returns None if the ranks meet in the store instead."""
        links: dict[int, socket.socket] = {}
        try:
            if self._children:
                self._listen(what)
            if self._parent is not None:
                address = self._find(what, f"at/{self._parent}", wait_s)
                links[self._parent] = connect(address, self.member.rank, look)
            if self._listener is not None:
                for child, link in self._listener.accept(self._children, look):
                    links[child] = link
            return TreeLinks(self.member.rank, links)
        except BaseException as error:
            for link in links.values():
                link.close()
            if isinstance(error, TreeBroken | Unreachable | OSError | MemoryError):
                if self._listener is not None:  # late ranks would try for seconds to connect
                    self.ask(what, self.timeout_s, lambda: self._delete([f"at/{self.member.rank}"]))
                return None
            raise

    def _listen(self, what: str) -> None:
        """Listens for those below.

        Raises:
            OSError: The system refuses.
        """
        if self._listener is None:
            self._listener, address = listen(self.member.rank, self._namespace)
            key = f"at/{self.member.rank}"
            self.delete_at_end([key])
            self.ask(what, self.timeout_s, lambda: self._store.set(key, address))

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _find(self, what: str, key: str, wait_s: float) -> str:
        """Returns the address of a rank, once it listens.

        Raises:
            TreeBroken: Ranks meet in the store instead, or it takes too long.
        """

        def find() -> str | None:
            if (address := self._peek(key)) is not None:
                return address
            keys = [key], [self._step(0).log]
            self._wait_until(lambda: any(map(self._store.check, keys)), wait_s, listen=True)
            return self._peek(key)

        address = self.ask(what, wait_s + self.grace_s, find)
        if address is None:
            raise TreeBroken
        return address

    def _peek(self, key: str) -> str | None:
        """Returns the value of a key or None, in one request: `get` takes two, and waits."""
        text = str(self._store.compare_set(key, _NOTHING, _NOTHING), "utf-8")
        return text if text != _NOTHING else None
