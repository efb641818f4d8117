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
from fastload.ext.serve.connection import Connection, Endpoint
from fastload.ext.serve.peer import KnownPeer, Speed, last_within, parse_offer
from fastload.ext.serve.process import SERVERS
from fastload.storage.http import HttpFault

_log = logging.getLogger(__name__)

_NUM_ASKERS = 16
_CONNECT_S = 2.0
_INDEX_S = 5.0
_GREETING_S = 2.5  # the longest wait for the first answers
_ANSWER_S = 1.0  # and for later ones of peers that have answered before
_RESOLVE_S = 5.0
_WAIT_S = 1.0
_REST_S = 1.0  # for a peer after a passing fault
_SHORT_REST_S = 0.25
_MOST_FAULTS = 3  # in a row
_MOST_REQUESTS = 4  # at once to one peer
# A request that takes longer is late: what a peer needs for one at least, or much more than it usually does.
_LATE_S, _LEAST_BYTES_S = 10.0, 1e6
_LEAST_LATE_S, _LATE_FACTOR = 5.0, 8
_USUAL_BYTES_S = 32e6  # of an origin that was not measured yet
_SLOW_PART = 4
_MOST_LINES = 20
_QUEUE_S, _FEWEST_READS = 0.5, 4  # of the origin, which are under way at once while peers may get more
_TRIAL_S = 1.0  # the longest wait for the first bytes of peers
_FRESH_S = 0.25  # what a peer has said it has, while it is getting more
_JUST_NOW_S = 0.02  # and where the origin is about to be read: others may be about to read the same


class Loan(NamedTuple):
    """Who is asked for bytes next.

    Attributes:
        peer: The peer; None for the origin.
        end: The end of the bytes to ask for.
        folder: The path of the checkpoint on the peer.
        is_coming: Whether some of them are only on their way there.
        timeout_s: How long they may take.
    """

    peer: KnownPeer | None
    end: int
    folder: str = ""
    is_coming: bool = False
    timeout_s: float = 0.0


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
        self._peers: dict[Endpoint, KnownPeer] = {}
        self._workers = Workers(_NUM_ASKERS, "fastload-peers")
        self._questions = _Questions()
        self._is_stopped = False
        self._in_use: set[Connection] = set()
        self._origin = Speed()
        self._waits = Speed()  # for bytes that are on their way to a peer

    def lend(self, name: str, at: int, ends: Sequence[int]) -> Loan:
        """Chooses who is asked for the next bytes of a file; waits while those who have them are busy.

        Args:
            name: The file.
            at: The first byte.
            ends: The ends of the checksum blocks from there on, ascending.

        Returns:
            A peer that has the first block, or else the origin; for `give_back`.
        """
        with self._changed:
            is_sure = False
            while not self._is_stopped:
                now_s = time.monotonic()
                self._ask_due(now_s)
                wait_s, loan = self._choose(name, at, ends, now_s)
                if loan is not None and loan.peer is None and not is_sure:
                    is_sure = True
                    if self._ask_due(now_s, _JUST_NOW_S):
                        continue
                if loan is not None:
                    self._speed_of(loan).begin(loan.end - at)
                    return loan
                self._changed.wait(wait_s)
            self._origin.begin(ends[-1] - at)
        return Loan(None, ends[-1])

    def give_back(self, loan: Loan, nbytes: int, fault: HttpFault | None) -> None:
        """Notes the outcome of a request.

        Args:
            loan: Who was asked.
            nbytes: The bytes that were asked for.
            fault: Why a peer has not delivered them; None if it has.
        """
        with self._changed:
            self._speed_of(loan).end(nbytes, nbytes if fault is None else 0)
            if loan.peer is not None and fault is None:
                loan.peer.num_faults = 0
                loan.peer.num_waits = 0 if loan.is_coming else loan.peer.num_waits
            elif loan.peer is not None and fault is not None and not self._is_stopped:
                self._note_fault(loan.peer, fault, is_coming=loan.is_coming)
            self._changed.notify_all()

    @contextmanager
    def connection(self, peer: KnownPeer) -> Iterator[Connection]:
        """Lends a connection to a peer, which is closed if its use fails.

        Raises:
            HttpFault: It does not connect.
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
        lines = [f"{peer.endpoint} {peer.problem}" for peer in peers[:_MOST_LINES]]
        return lines + ([f"and {len(peers) - _MOST_LINES} more"] if len(peers) > _MOST_LINES else [])

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

    def _choose(self, name: str, at: int, ends: Sequence[int], now_s: float) -> tuple[float, Loan | None]:
        """Returns who is asked; or how long to wait until someone else may be, in seconds, and None."""
        loans = self._possible(name, at, ends, now_s)
        if not loans:
            wait_s = self._questions.left_s(now_s)
            return (wait_s, None) if wait_s > 0 else self._choose_origin(name, at, ends, now_s)
        there = [one for one in loans if not one.is_coming]
        ready = [one for one in there if not self._speed_of(one).is_silent(now_s)]
        if not ready:
            since_s = min((self._speed_of(one).since_s for one in there), default=0.0)
            if since_s + _TRIAL_S > now_s:  # the first bytes of a peer may come in a moment
                return since_s + _TRIAL_S - now_s, None
            coming = min((one for one in loans if one.is_coming), key=lambda one: one.end, default=None)
            return (0.0, coming) if coming is not None else self._choose_origin(name, at, ends, now_s)
        if self._is_origin_faster(now_s):
            return 0.0, Loan(None, ends[-1])
        loan = min(ready, key=lambda one: self._speed_of(one).expected_s(one.end - at))
        speed = self._speed_of(loan)
        has_room = speed.queued_bytes + loan.end - at <= 2 * speed.request_bytes
        is_free = not speed.num_requests or (has_room and speed.num_requests < _MOST_REQUESTS)
        return _WAIT_S, loan if is_free else None

    def _choose_origin(
        self, name: str, at: int, ends: Sequence[int], now_s: float
    ) -> tuple[float, Loan | None]:
        """Chooses the origin, unless so much of it is being read that peers may have the bytes earlier."""
        gap_end = ends[-1]
        for peer in self._peers.values():
            if peer.offer is not None and peer.is_usable(now_s):
                gap_end = peer.offer.begins_after(name, at, gap_end)
        end = next(end for end in ends if end >= gap_end)
        others_may_come = not all(peer.is_left for peer in self._peers.values())
        most_bytes = max(_QUEUE_S * self._origin.bytes_s, _FEWEST_READS * (end - at))
        if others_may_come and self._origin.queued_bytes + end - at > most_bytes:
            return _SHORT_REST_S, None
        return 0.0, Loan(None, end)

    def _speed_of(self, loan: Loan) -> Speed:
        """Returns where the bytes of a loan count."""
        if loan.peer is None:
            return self._origin
        return self._waits if loan.is_coming else loan.peer.speed

    def _possible(self, name: str, at: int, ends: Sequence[int], now_s: float) -> list[Loan]:
        """Returns a loan for each peer that has the first block, or will have it soon."""
        found = []
        for peer in self._peers.values():
            if peer.offer is None or not peer.is_usable(now_s):
                continue
            most = max(ends[0], at + peer.speed.request_bytes)
            end = there = last_within(ends, min(most, peer.offer.covered_to(name, at, ends[-1])))
            if not end and peer.num_waits < _MOST_FAULTS:
                end = last_within(ends, peer.offer.coming_to(name, at, ends[-1]))
            if end:
                timeout_s = _timeout_s(peer.speed, end - at, is_coming=not there)
                found.append(Loan(peer, end, peer.offer.folder, not there, timeout_s))
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

    def _note_fault(self, peer: KnownPeer, fault: HttpFault, *, is_coming: bool) -> None:
        if is_coming and fault.is_passing:  # its origin has failed, perhaps, or is slow
            peer.num_waits += 1
            if peer.num_waits >= _MOST_FAULTS:
                peer.problem = "announced bytes that did not come"
            peer.rests_until_s = time.monotonic() + _SHORT_REST_S
            peer.answered_s = float("-inf")
            return
        peer.num_faults += 1
        peer.rests_until_s = time.monotonic() + _REST_S
        peer.answered_s = float("-inf")
        peer.problem = str(fault)
        if not fault.is_passing or peer.num_faults >= _MOST_FAULTS:
            self._leave(peer, str(fault))

    def _leave(self, peer: KnownPeer, why: str) -> None:
        if not peer.is_left:
            peer.is_left, peer.problem = True, f"{why}: left alone"
            _log.warning("%s %s", peer.endpoint, peer.problem)

    # Questions to peers, with the lock but for `_ask` and `_find`

    def _ask_due(self, now_s: float, fresh_s: float = _FRESH_S) -> bool:
        """Begins to ask what peers have, if they said so longer ago, and where there are others.

        Returns:
            Whether a peer is being asked.
        """
        if self._questions.is_resolve_due(now_s):
            self._questions.begin(now_s, resolves=True)
            self._workers.submit(self._find)
        for peer in self._peers.values():
            if peer.is_due(now_s, fresh_s):
                peer.is_asking = True
                is_awaited = peer.has_answered or self._questions.is_first
                if is_awaited:
                    self._questions.begin(now_s)
                self._workers.submit(partial(self._ask, peer, is_awaited=is_awaited))
        return any(peer.is_asking for peer in self._peers.values())

    def _find(self) -> None:
        """Finds out where peers are."""
        found: Sequence[Endpoint] = ()
        try:
            found = self._resolve()
        finally:
            with self._changed:
                for endpoint in found:
                    self._peers.setdefault(endpoint, KnownPeer(endpoint, problem="was not asked"))
                if not self._is_stopped:
                    self._ask_due(time.monotonic())
                self._questions.end()
                self._changed.notify_all()

    def _ask(self, peer: KnownPeer, *, is_awaited: bool) -> None:
        """Asks a peer what it has; `is_awaited` if readers wait for the answer."""
        fault = offer = None
        is_own = False
        try:
            with self.connection(peer) as connection:
                index = connection.index(_INDEX_S)
            offer = parse_offer(index, self._digest)
            is_own = str(index.get("id")) in SERVERS
        except HttpFault as error:
            fault = error
        with self._changed:
            peer.is_asking, peer.answered_s, peer.offer = False, time.monotonic(), offer
            peer.has_answered = fault is None
            if is_own:
                peer.offer, peer.is_left, peer.problem = None, True, ""
            elif offer is not None:
                is_known = peer.num_faults or peer.num_waits or peer.is_left
                peer.problem = peer.problem if is_known else ""
            elif fault is None or fault.is_passing:
                peer.problem = str(fault or "has no such checkpoint")
            else:
                self._leave(peer, str(fault))
            if is_awaited:
                self._questions.end()
            self._changed.notify_all()


class _Questions:
    """The questions to peers that have no answer yet.

    Attributes:
        is_first: Whether the first ones are among them, or there was none yet.
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._began_s = 0.0
        self._resolved_s = float("-inf")
        self.is_first = True

    def is_resolve_due(self, now_s: float) -> bool:
        """Whether to find out again where peers are."""
        return now_s - self._resolved_s >= _RESOLVE_S

    def begin(self, now_s: float, *, resolves: bool = False) -> None:
        """Notes a question."""
        if not self._num_open or not self.is_first:
            self._began_s = now_s
        self._num_open += 1
        if resolves:
            self._resolved_s = now_s

    def end(self) -> None:
        """Notes an answer."""
        self._num_open -= 1
        self.is_first = self.is_first and bool(self._num_open)

    def left_s(self, now_s: float) -> float:
        """Returns how long it pays to wait for an answer; 0 or less if it does not."""
        if not self._num_open:
            return 0.0
        return self._began_s + (_GREETING_S if self.is_first else _ANSWER_S) - now_s


def _timeout_s(speed: Speed, nbytes: int, *, is_coming: bool) -> float:
    longest_s = _LATE_S + nbytes / _LEAST_BYTES_S
    if is_coming:
        return 2 * longest_s
    return min(longest_s, max(_LEAST_LATE_S, _LATE_FACTOR * speed.expected_s(nbytes)))
