"""The peers of one reader: which one is asked next, and which are left alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from fastload.base.threads import Workers
from fastload.ext.serve.connection import Connection, Endpoint, PeerFault
from fastload.ext.serve.peer import Peer, Speed, last_within, parse_offer
from fastload.ext.serve.process import SERVERS

_log = logging.getLogger(__name__)

_NUM_ASKERS = 16
_CONNECT_S = 2.0
_INDEX_S = 5.0
_GREETING_S = 2.5  # the longest wait for the first answers
_ANSWER_S = 0.25  # and for later ones
_RESOLVE_S = 5.0
_WAIT_S = 1.0
_REST_S = 1.0  # for a peer after a passing fault
_MOST_FAULTS = 3  # in a row
_MOST_REQUESTS = 4  # at once to one peer
# A request that takes longer is late: what a peer needs for one at least, or much more than it usually does.
_LATE_S, _LEAST_BYTES_S = 10.0, 1e6
_LEAST_LATE_S, _LATE_FACTOR = 5.0, 8
_USUAL_BYTES_S = 32e6  # of an origin that was not measured yet
_SLOW_PART = 4


class Loan(NamedTuple):
    """A peer that is asked for bytes next.

    Attributes:
        peer: It.
        folder: The path of the checkpoint there.
        end: The end of the bytes to ask it for.
        is_coming: Whether some of them are only on their way there.
        timeout_s: How long they may take.
    """

    peer: Peer
    folder: str
    end: int
    is_coming: bool
    timeout_s: float


class PeerPool:
    """The peers of a reader; for many threads.

    Args:
        resolve: Returns where peers are.
        digest: The digest of the checkpoint.
    """

    def __init__(self, resolve: Callable[[], Sequence[Endpoint]], digest: str) -> None:
        self._resolve = resolve
        self._digest = digest
        self._changed = threading.Condition()
        self._peers: dict[Endpoint, Peer] = {}
        self._workers = Workers(_NUM_ASKERS, "fastload-peers")
        self._questions = _Questions()
        self._is_stopped = False
        self._in_use: set[Connection] = set()
        self._origin = Speed()

    def lend(self, name: str, at: int, ends: Sequence[int]) -> Loan | None:
        """Chooses a peer for the next bytes of a file; waits while those that have them are busy.

        Args:
            name: The file.
            at: The first byte.
            ends: The ends of the checksum blocks from there on, ascending.

        Returns:
            The peer, for `give_back`; None if none has the first block, or if the origin is far faster.
        """
        with self._changed:
            while not self._is_stopped:
                now_s = time.monotonic()
                self._ask_due(now_s)
                loans = self._possible(name, at, ends, now_s)
                if not loans:
                    left_s = self._questions.left_s(now_s)
                    if left_s <= 0:
                        return None
                    self._changed.wait(left_s)
                    continue
                loan = min(loans, key=lambda one: (one.is_coming, one.peer.speed.expected_s(one.end - at)))
                if loan.is_coming:
                    return loan
                if self._is_origin_faster(now_s):
                    return None
                if loan.peer.speed.num_requests < (_MOST_REQUESTS if loan.peer.speed.bytes_s else 1):
                    loan.peer.speed.begin(loan.end - at)
                    return loan
                self._changed.wait(_WAIT_S)
        return None

    def give_back(self, loan: Loan, nbytes: int, fault: PeerFault | None) -> None:
        """Notes the outcome of a request.

        Args:
            loan: The peer.
            nbytes: The bytes that it was asked for.
            fault: Why they did not come; None if they did.
        """
        peer = loan.peer
        with self._changed:
            if not loan.is_coming:
                peer.speed.end(nbytes, nbytes if fault is None else 0)
            if fault is None:
                peer.num_faults = 0
            elif not self._is_stopped:
                self._note_fault(peer, fault)
            self._changed.notify_all()

    def gap_end(self, name: str, at: int, end: int) -> int:
        """Returns the first byte after one that no peer has, which some peer has or will have soon."""
        now_s = time.monotonic()
        with self._changed:
            offers = [peer.offer for peer in self._peers.values() if peer.is_usable(now_s) and peer.offer]
        return min((offer.begins_after(name, at, end) for offer in offers), default=end)

    @contextmanager
    def reading_origin(self, nbytes: int) -> Iterator[None]:
        """Measures a read from the origin."""
        came_bytes = 0
        with self._changed:
            self._origin.begin(nbytes)
        try:
            yield
            came_bytes = nbytes
        finally:
            with self._changed:
                self._origin.end(nbytes, came_bytes)

    @contextmanager
    def connection(self, peer: Peer) -> Iterator[Connection]:
        """Lends a connection to a peer, which is closed if its use fails.

        Raises:
            PeerFault: It does not connect.
        """
        with self._changed:
            idle = peer.idle.pop() if peer.idle else None
        if idle is not None and not idle.is_open():
            idle.close()
            idle = None
        connection = idle or Connection(peer.endpoint, _CONNECT_S)
        with self._changed:
            self._in_use.add(connection)
            if self._is_stopped:
                connection.stop()
        is_good = False
        try:
            yield connection
            is_good = True
        finally:
            with self._changed:
                self._in_use.discard(connection)
                is_kept = is_good and not self._is_stopped
                if is_kept:
                    peer.idle.append(connection)
            if not is_kept:
                connection.close()

    def problems(self) -> list[str]:
        """Returns a line for each peer that has delivered nothing, or not to the end."""
        with self._changed:
            peers = [peer for peer in self._peers.values() if peer.problem]
            return [f"{peer.endpoint} {peer.problem}" for peer in peers]

    def stop(self) -> None:
        """Ends all requests; no peer is lent from now on."""
        with self._changed:
            self._is_stopped = True
            for connection in self._in_use:
                connection.stop()
            self._changed.notify_all()

    def close(self) -> None:
        """Closes all connections, and ends the threads."""
        self.stop()
        with self._changed:
            for peer in self._peers.values():
                while peer.idle:
                    peer.idle.pop().close()
        self._workers.close(wait_s=0.0)

    # The choice, with the lock

    def _possible(self, name: str, at: int, ends: Sequence[int], now_s: float) -> list[Loan]:
        """Returns a loan for each peer that has the first block, or will have it soon."""
        found = []
        for peer in self._peers.values():
            if peer.offer is None or not peer.is_usable(now_s):
                continue
            there = last_within(ends, peer.offer.covered_to(name, at, ends[-1]))
            end = there or last_within(ends, peer.offer.coming_to(name, at, ends[-1]))
            if end:
                timeout_s = _timeout_s(peer.speed, end - at, is_coming=not there)
                found.append(Loan(peer, peer.offer.folder, end, not there, timeout_s))
        return found

    def _is_origin_faster(self, now_s: float) -> bool:
        """Whether all peers together are so slow that the origin is read instead.

        An origin that was not measured yet is read once, to find out.
        """
        peers = [peer for peer in self._peers.values() if peer.is_usable(now_s)]
        if not all(peer.speed.is_measured for peer in peers):
            return False
        origin_s = self._origin.bytes_s or _USUAL_BYTES_S
        if sum(peer.speed.bytes_s for peer in peers) * _SLOW_PART >= origin_s:
            return False
        if self._origin.bytes_s:
            for peer in peers:
                rates = f"{peer.speed.bytes_s / 1e6:.1f} MB/s, and storage {origin_s / 1e6:.1f} MB/s"
                self._leave(peer, f"delivers {rates}")
        return True

    def _note_fault(self, peer: Peer, fault: PeerFault) -> None:
        peer.num_faults += 1
        peer.rests_until_s = time.monotonic() + _REST_S
        peer.answered_s = float("-inf")
        peer.problem = str(fault)
        if not fault.is_passing or peer.num_faults >= _MOST_FAULTS:
            self._leave(peer, str(fault))

    def _leave(self, peer: Peer, why: str) -> None:
        if not peer.is_left:
            peer.is_left, peer.problem = True, f"{why}: left alone"
            _log.warning("%s %s", peer.endpoint, peer.problem)

    # Questions to peers, with the lock but for `_ask` and `_find`

    def _ask_due(self, now_s: float) -> None:
        """Begins to ask what peers have, and where there are others, if it is time to."""
        if self._questions.is_resolve_due(now_s):
            self._questions.begin(now_s, resolves=True)
            self._workers.submit(self._find)
        for peer in self._peers.values():
            if peer.is_due(now_s):
                peer.is_asking = True
                self._questions.begin(now_s)
                self._workers.submit(partial(self._ask, peer))

    def _find(self) -> None:
        """Finds out where peers are."""
        found: Sequence[Endpoint] = ()
        try:
            found = self._resolve()
        finally:
            with self._changed:
                for endpoint in found:
                    self._peers.setdefault(endpoint, Peer(endpoint, problem="was not asked"))
                if not self._is_stopped:
                    self._ask_due(time.monotonic())
                self._questions.end()
                self._changed.notify_all()

    def _ask(self, peer: Peer) -> None:
        """Asks a peer what it has."""
        fault = offer = None
        is_own = False
        try:
            with self.connection(peer) as connection:
                index = connection.index(_INDEX_S)
            offer = parse_offer(index, self._digest)
            is_own = index.get("id") in SERVERS
        except PeerFault as error:
            fault = error
        with self._changed:
            peer.is_asking, peer.answered_s, peer.offer = False, time.monotonic(), offer
            if is_own:
                peer.offer, peer.is_left, peer.problem = None, True, ""
            elif offer is not None:
                peer.problem = peer.problem if peer.num_faults or peer.is_left else ""
            elif fault is None or fault.is_passing:
                peer.problem = str(fault or "has no such checkpoint")
            else:
                self._leave(peer, str(fault))
            self._questions.end()
            self._changed.notify_all()


class _Questions:
    """The questions to peers that have no answer yet."""

    def __init__(self) -> None:
        self._num_open = 0
        self._began_s = 0.0
        self._resolved_s = float("-inf")
        self._is_first = True  # until all of the first ones have an answer

    def is_resolve_due(self, now_s: float) -> bool:
        """Whether to find out again where peers are."""
        return now_s - self._resolved_s >= _RESOLVE_S

    def begin(self, now_s: float, *, resolves: bool = False) -> None:
        """Notes a question."""
        if not self._num_open or not self._is_first:
            self._began_s = now_s
        self._num_open += 1
        if resolves:
            self._resolved_s = now_s

    def end(self) -> None:
        """Notes an answer."""
        self._num_open -= 1
        self._is_first = self._is_first and bool(self._num_open)

    def left_s(self, now_s: float) -> float:
        """Returns how long it pays to wait for an answer; 0 or less if it does not."""
        if not self._num_open:
            return 0.0
        return self._began_s + (_GREETING_S if self._is_first else _ANSWER_S) - now_s


def _timeout_s(speed: Speed, nbytes: int, *, is_coming: bool) -> float:
    longest_s = _LATE_S + nbytes / _LEAST_BYTES_S
    if is_coming:
        return 2 * longest_s
    if not speed.is_measured:
        return longest_s
    return min(longest_s, max(_LEAST_LATE_S, _LATE_FACTOR * speed.expected_s(nbytes)))
