"""Decisions of all ranks, and values for each other, in the rendezvous store; with deadlines throughout.

A *call* (a load, a save, ...) is a series of steps. In each step every rank brings a response, and all ranks
get the same decision:

1. A rank appends its response to the log of the step, and counts it. Whoever counts the last one decides: the
   log is the decision. A rank that runs out of patience, or leaves, decides with what the log then holds. The
   store takes the first decision only (`compare_set`), so all ranks get the same one, however late.
2. A rank continues only from a decision that has all ranks and no error. So all ranks return from a call, or
   all raise.
3. The keys of a step are deleted once all ranks have responded to the next one, and those of the last step
   once all have acknowledged its decision.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple, TypeVar

from fastload.base.threads import within
from fastload.base.version import PROTOCOL, __version__
from fastload.comm.responses import Column, join_responses, read_responses
from fastload.errors import DeadlineExceeded, FastloadError, Interrupted, PeerError, WorldError, some_of

_log = logging.getLogger(__name__)
T = TypeVar("T")

# One number has three counts: responses, acknowledgements of the decision, impatient ranks.
_ACKNOWLEDGED = 1 << 20
_IMPATIENT = 1 << 40
_IN_STORE, _IN_TREE, _LEFT = "store", "tree", "left"  # how a decision came about
_SEPARATOR = "\x03"  # between the response of a rank that leaves and earlier ones

_PART_BYTES = 4 << 20  # a TCPStore refuses values of more than 8 MiB
_FIRST_POLL_S = 0.0005
_POLL_OF_A_RANK_S = 0.0001  # roughly what the server takes for one
_PROGRESS_PERIOD_S = 1.0
_LAST_POLL_S = 0.05
_FLAG_PERIOD_S = 0.2
_SHORTEST_S = 2.0  # deadline of a request, since a busy machine may suspend a thread for a moment
_MIN_GRACE_S, _MAX_GRACE_S = 0.5, 5.0
_NAME, _VERSIONS = "name", "versions"
_COLLECTING_S, _VERSION_POLL_S = 2.0, 0.02

_Runs = Sequence[tuple[dict[str, Any] | None, int]]


# Decisions


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a step; the same on all ranks.

    Attributes:
        waited_s: Patience of the rank that decided, in seconds.
        runs: The responses, None for ranks that did not come in time; each with the number of consecutive
            ranks that gave it.
        in_tree: Whether all responses came along the tree of the group.
        left: Whether a rank left the call, and decided without waiting for the others.
        attachment: Bytes that came along with the decision; None if it was read from the store.
    """

    waited_s: float
    runs: _Runs
    in_tree: bool = False
    left: bool = False
    attachment: bytes | None = None

    @classmethod
    def from_text(cls, text: str, size: int, attachment: bytes | None = None) -> Decision:
        """Parses the text of `write`."""
        head, _, table = text.partition("\n")
        waited_s, how = head.split()
        if how != _LEFT:
            runs = read_responses(table, size)
            return cls(float(waited_s), runs, how == _IN_TREE, attachment=attachment)
        leaving, table = table.split(_SEPARATOR)
        each = zip(
            _by_rank(read_responses(leaving, size)), _by_rank(read_responses(table, size)), strict=True
        )
        return cls(float(waited_s), [(last or response, 1) for last, response in each], left=True)

    @staticmethod
    def write(waited_s: float, table: str, *, in_tree: bool = False, left: bool = False) -> str:
        """Returns a decision as text; see `responses` for the table."""
        how = _IN_TREE if in_tree else _LEFT if left else _IN_STORE
        return f"{waited_s} {how}\n{table}"

    def response_of(self, rank: int) -> dict[str, Any] | None:
        """Returns the response of a rank; None if it did not come in time."""
        ends = accumulate(count for _, count in self.runs)
        return next(response for (response, _), end in zip(self.runs, ends, strict=True) if rank < end)

    @property
    def came(self) -> list[tuple[dict[str, Any], int]]:
        """`runs` of the ranks that came in time."""
        return [(response, count) for response, count in self.runs if response is not None]

    @property
    def num_came(self) -> int:
        """Number of the ranks that came in time."""
        return sum(count for _, count in self.came)

    @property
    def values(self) -> list[Any]:
        """The value of each rank, if all succeeded; one object for ranks that brought the same."""
        return [value for response, count in self.came for value in [response["value"]] * count]

    @property
    def failed(self) -> bool:
        """Whether a rank brought an error, or did not come in time."""
        return any(response is None or response["error"] is not None for response, _ in self.runs)

    @property
    def nodes(self) -> Column | None:
        """`hosts.node` of each rank, in the first step of a call."""
        return next((response["node"] for response, _ in self.came if "node" in response), None)

    def binds(self, rank: int, call: str) -> bool:
        """Whether a rank that makes a call of that name is bound by this decision of its first step.

        So it is if its response is included, or if another rank has left the same call.
        """
        if self.response_of(rank) is not None:
            return True
        return self.left and any(response.get("call") == call for response, _ in self.came)


def _by_rank(runs: _Runs) -> Iterator[dict[str, Any] | None]:
    return chain.from_iterable(repeat(response, count) for response, count in runs)


class StoreStep:
    """The keys of one step in the store.

    Args:
        store: A ``torch.distributed.Store``.
        name: Prefix of the keys.
        size: Number of ranks.
    """

    def __init__(self, store: Any, name: str, size: int) -> None:
        self._store = store
        self._size = size
        self.log, self.count, self.decision = f"{name}/responses", f"{name}/count", f"{name}/decision"

    @property
    def keys(self) -> list[str]:
        """All keys of the step."""
        return [self.log, self.count, self.decision]

    def respond(self, response: str) -> bool:
        """Adds the response of a rank, a table; returns whether it was the last one."""
        self._store.append(self.log, response)
        return bool(self._store.add(self.count, 1) % _ACKNOWLEDGED == self._size)

    def lose_patience(self) -> bool:
        """Returns whether this rank is the first to lose patience, and so the one to decide."""
        return bool(self._store.add(self.count, _IMPATIENT) // _IMPATIENT == 1)

    def decide(self, waited_s: float) -> Decision:
        """Decides with the log, and returns the first decision of all. This rank must have responded."""
        table = join_responses([str(self._store.get(self.log), "ascii")])
        return Decision.from_text(self.settle(Decision.write(waited_s, table)), self._size)

    def leave(self, response: str) -> Decision:
        """Decides at once, since this rank leaves.

        Its response replaces one that it may have sent along the tree before.
        """
        self._store.append(self.log, "")  # else there may be none
        table = join_responses([str(self._store.get(self.log), "ascii")])
        text = self.settle(Decision.write(0.0, f"{response}{_SEPARATOR}{table}", left=True))
        return Decision.from_text(text, self._size)

    def settle(self, decision: str) -> str:
        """Stores a decision unless there is one; returns the one that is stored."""
        return str(self._store.compare_set(self.decision, "", decision), "ascii")

    def is_decided(self) -> bool:
        """Whether there is a decision."""
        return bool(self._store.check([self.decision]))

    def read(self) -> Decision:
        """Returns the decision, which must exist."""
        return Decision.from_text(str(self._store.get(self.decision), "ascii"), self._size)

    def acknowledge(self) -> bool:
        """Notes that this rank has read the decision; returns whether all have."""
        return bool(self._store.add(self.count, _ACKNOWLEDGED) // _ACKNOWLEDGED % _ACKNOWLEDGED == self._size)

    def are_acknowledged(self, num_ranks: int) -> bool:
        """Whether so many ranks have read the decision."""
        return bool(self._store.add(self.count, 0) // _ACKNOWLEDGED % _ACKNOWLEDGED >= num_ranks)


# The store of a world


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a group.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        store_host: The rank that hosts the store, if one of them does.
        if_lost: Explanation for users when the store is gone.
    """

    rank: int
    size: int
    store_host: int | None = None
    if_lost: str = ""


class Proposal(NamedTuple):
    """The contribution of one rank to a step.

    Attributes:
        what: Name of the step, for messages.
        step: Its number.
        response: The rank's response, a table, perhaps with those of others; see `responses`.
        wait_s: How long to wait for the others, from when one of them last made progress.
        attachment: Bytes from one rank for all. A decision along the tree carries them; ranks that read it
            from the store get them elsewhere.
    """

    what: str
    step: int
    response: str
    wait_s: float
    attachment: bytes = b""


class LastStep(NamedTuple):
    """The last step of a call, for its acknowledgement.

    Attributes:
        step: Its number.
        num_others: Number of the other ranks that have responded.
        failed: Whether the call has failed.
    """

    step: int
    num_others: int
    failed: bool


@dataclass
class _Progress:
    """The counter with which ranks show that they make progress.

    Attributes:
        value: Its last known value.
        changed_at: When it last changed, by `time.monotonic`.
        next_look: When to look again.
    """

    value: int = 0
    changed_at: float = 0.0
    next_look: float = 0.0


class StoreRendezvous:
    """The store namespace of one call, seen from one of its ranks.

    Args:
        store: A ``torch.distributed.Store`` that only this call uses.
        member: This rank.
        call: Name of the call, which the ranks compare when they meet.
        timeout_s: Longest wait without progress, in seconds.
        versions: Compares the versions of the ranks while they meet; None to compare none.

    Attributes:
        member: As given.
        call: As given.
        timeout_s: As given.
    """

    def __init__(
        self, store: Any, member: Member, *, call: str, timeout_s: float, versions: Versions | None = None
    ) -> None:
        self.member = member
        self.call = call
        self.timeout_s = timeout_s
        self._store = store
        self._versions = versions
        self._first_poll_s = max(_FIRST_POLL_S, self.poll_s)
        self._shared: dict[int, list[str]] = {}
        self._lost: str | None = None
        self._given_up = False
        self._responded = -1  # the last step that this rank has responded to in the store
        self._responding = threading.Lock()
        self._progress = _Progress()

    @property
    def store(self) -> Any:
        """The namespace, without deadlines."""
        return self._store

    @property
    def grace_s(self) -> float:
        """How long, after a failure, the others get to report their errors, in seconds."""
        least_s = min(0.5 * self.timeout_s, _MIN_GRACE_S)
        return min(_MAX_GRACE_S, max(0.25 * self.timeout_s, least_s))

    @property
    def patience_s(self) -> float:
        """Longest wait inside a step, such that wait and grace together end within `timeout_s`."""
        return self.timeout_s - self.grace_s

    @property
    def poll_s(self) -> float:
        """How long a rank should leave the store alone between two looks."""
        return self.member.size * _POLL_OF_A_RANK_S

    def ask(self, what: str, limit_s: float, ask: Callable[[], T]) -> T:
        """Makes requests with a deadline: a store whose host is stopped or cut off never responds.

        Raises:
            PeerError: The store is gone.
        """
        if self.member.size == 1:
            return ask()
        if self._lost is None:
            try:
                limit_s = max(limit_s, _SHORTEST_S)
                return within(limit_s, "the rendezvous store", ask, since=lambda: self._progress.changed_at)
            except (RuntimeError, DeadlineExceeded) as error:
                self._lost = str(error).split("\n", 1)[0]
            except BaseException:
                self._given_up = True  # else the thread that was left behind would poll on
                raise
        host, failures = self.member.store_host, dict[int, BaseException]()
        if host is not None:
            failures[host] = DeadlineExceeded("hosted the rendezvous store, which is gone")
        raise PeerError(
            f"{what}: the rendezvous store is gone: {self.member.if_lost} ({self._lost})", failures
        )

    # Values for other ranks

    def tell(self, key: str, *, limit_s: float) -> None:
        """Sets a key, if the store still exists."""
        try:
            self.ask("notifying the other ranks", limit_s, lambda: self._store.set(key, ""))
        except PeerError as error:
            _log.debug("not set: %s", error)

    def watch(self, key: str, *, alive: bool, limit_s: float) -> bool:
        """Returns whether a key is set; with `alive`, shows that this rank makes progress."""

        def look() -> bool:
            if alive:
                self._store.add("progress", 1)
            return bool(self._store.check([key]))

        return self.ask("watching the other ranks", limit_s, look)

    def progress(self, *, limit_s: float) -> int:
        """Returns a number that changes while ranks make progress."""
        return self.ask("watching the other ranks", limit_s, self._read_progress)

    def post(self, what: str, key: str, text: str, *, forget: Sequence[str], limit_s: float) -> None:
        """Sets a text, and deletes others that no rank needs any more."""

        def post() -> None:
            self._store.set(key, text)
            self._delete(forget)

        self.ask(what, limit_s, post)

    def await_text(self, what: str, key: str, source: int, *, wait_s: float, grace_s: float) -> str:
        """Returns a text as soon as a rank has set it.

        Raises:
            PeerError: It did not within `wait_s`.
        """

        def wait() -> str | None:
            is_set = self._wait_until(lambda: self._store.check([key]), wait_s, listen=False)
            return str(self._store.get(key), "utf-8") if is_set else None

        text = self.ask(what, wait_s + grace_s, wait)
        if text is None:
            late = DeadlineExceeded(f"did not come to it within {wait_s:.1f} s: killed, stopped or stuck")
            raise PeerError(f"{what}: waiting for rank {source}, which {late}", {source: late})
        return text

    def count(self, what: str, key: str, more: int, *, limit_s: float) -> int:
        """Adds to a number that all ranks share, and returns it."""
        return self.ask(what, limit_s, lambda: int(self._store.add(key, more)))

    def leave(self, what: str, place: str, data: bytes, *, limit_s: float) -> list[str]:
        """Stores bytes under a name of their own; returns the keys that they take."""
        starts = range(0, len(data), _PART_BYTES)
        keys = _part_keys(place, len(starts))

        def leave() -> None:
            for key, start in zip(keys[1:], starts, strict=True):
                self._store.set(key, data[start : start + _PART_BYTES])
            self._store.set(keys[0], str(len(starts)))
            # The response shows that the store has all values; a set does not wait for one.
            self._store.check(keys[:1])

        self.ask(what, limit_s, leave)
        return keys

    def take(self, what: str, place: str, *, keep: bool, limit_s: float) -> bytes | None:
        """Returns the bytes of a name, or None; deletes them unless `keep`."""

        def take() -> bytes | None:
            if not self._store.check([f"{place}/count"]):
                return None
            count = self._store.get(f"{place}/count")
            if not count:  # it is being deleted
                return None
            keys = _part_keys(place, int(count))
            data = b"".join(self._store.get(key) for key in keys[1:])
            if not keep:
                self._delete(keys)
            return data

        return self.ask(what, limit_s, take)

    # Steps

    def decide(self, proposal: Proposal, *, since: float | None = None) -> Decision:
        """Brings this rank's response to a step and returns the decision.

        Args:
            proposal: The response.
            since: When the wait began, if this rank has waited in another way. Ranks that still do so get a
                moment in any case.
        """
        what, step, response, wait_s, _ = proposal
        grace_s = self.grace_s

        def decide() -> Decision:
            place = self._step(step)
            if since is not None and place.is_decided():
                return place.read()
            began = time.monotonic()
            if since is not None:
                began = max(since, began - wait_s + min(wait_s, grace_s) / 2)
            if self._respond(step, response):
                decision = place.decide(wait_s)
                if step:  # all ranks have responded, so they have the decision before
                    self._forget(step - 1)
                return decision
            if self._wait_until(place.is_decided, wait_s, listen=True, began=began):
                decision = place.read()
                if decision.in_tree:  # decided meanwhile, without acknowledgements in the store
                    self._delete([place.log, place.count])
                return decision
            # The rank that should decide may have died: then all others decide.
            if not place.lose_patience() and self._wait_until(place.is_decided, grace_s, listen=False):
                return place.read()
            return place.decide(wait_s)

        return self.ask(what, wait_s + 1.5 * grace_s, decide)

    def acknowledge(self, last: LastStep, keys_left: Sequence[str]) -> None:
        """Notes that this rank has the last decision of a call; never raises.

        The last rank deletes the keys of the call. The rank that hosts the store waits for the others for a
        moment, since it may exit and take the store with it.

        Args:
            last: The step.
            keys_left: Keys that only this rank deletes.
        """

        def acknowledge() -> None:
            self._delete(keys_left)
            if self.member.store_host == self.member.rank:
                all_know = partial(self._step(last.step).are_acknowledged, last.num_others)
                self._wait_until(all_know, self.grace_s, listen=False)
            self._acknowledge(last.step, last.failed)

        with contextlib.suppress(FastloadError):
            self.ask("ending the call", 2 * self.grace_s, acknowledge)

    def withdraw(self, last: int | None, responses: Sequence[tuple[int, str]], *, at_once: bool) -> None:
        """Responds to steps in advance, since this rank leaves the call; never raises.

        Args:
            last: Number of the step whose decision this rank has but has not acknowledged.
            responses: Number and response of the next step. A step that this rank waits in comes first; the
                next one counts if the others continue to it.
            at_once: Whether to decide now, and not once all ranks have responded.
        """

        def withdraw() -> None:
            self._store.set("failed", "")
            if last is not None:
                self._acknowledge(last, failed=True)
            for step, response in responses:
                place = self._step(step)
                decision = None
                if at_once:
                    decision = place.leave(response)
                    self._respond(step, "")  # afterwards, or the last rank would decide without it
                elif self._respond(step, response):
                    decision = place.decide(0.0)
                if decision is None or not decision.in_tree:
                    self._acknowledge(step, failed=True)
                else:  # acknowledgements are not counted
                    self._delete([place.log, place.count])
                if decision is not None and decision.failed:
                    return

        with contextlib.suppress(FastloadError):
            self.ask("telling the other ranks", self.grace_s, withdraw)

    def note_shared(self, step: int, place: str, num_keys: int) -> None:
        """Notes that the bytes a rank has left go with the keys of a step."""
        self._shared[step] = _part_keys(place, num_keys - 1)

    def disconnect(self) -> None:
        """Notes that the call has failed; see `tree.TreeRendezvous`."""

    def _respond(self, step: int, response: str) -> bool:
        """Responds to a step, once; returns whether this was the last rank.

        A thread that waits in the step may be about to respond when the rank is interrupted.
        """
        with self._responding:
            is_new, self._responded = step > self._responded, max(step, self._responded)
            return is_new and self._step(step).respond(response)

    def _acknowledge(self, step: int, failed: bool) -> None:
        if self._step(step).acknowledge():
            self._forget(step)
            if failed and step:  # not all have come to this one together, and so forgotten the one before
                self._forget(step - 1)
            self._delete(["progress", "failed"] if failed else ["progress"])

    def _forget(self, step: int) -> None:
        self._delete(self._step(step).keys + self._shared.pop(step, []))

    def _step(self, number: int) -> StoreStep:
        return StoreStep(self._store, str(number), self.member.size)

    # Waiting

    def _wait_until(
        self, condition: Callable[[], bool], wait_s: float, *, listen: bool, began: float | None = None
    ) -> bool:
        """Polls until a condition holds, since a blocking wait would lock the store for other threads.

        Args:
            condition: Asks the store.
            wait_s: For how long.
            listen: Whether to count from when a rank last made progress.
            began: When the wait has begun, if not now.
        """
        first_look = time.monotonic()
        began = began if began is not None else first_look
        while not condition():
            now = time.monotonic()
            if listen and now >= self._progress.next_look:
                self._progress.next_look = now + self._period_s(wait_s)
                self._look(now)
            if now >= (max(began, self._progress.changed_at) if listen else began) + wait_s:
                return False
            if self._given_up:
                raise Interrupted("the call was abandoned")
            # In proportion to the time waited so far, so that polling adds a few percent to any wait.
            time.sleep(min(max(self._first_poll_s, (now - first_look) / 16), _LAST_POLL_S))
        return True

    def _period_s(self, wait_s: float) -> float:
        """Returns how long to leave the store alone between looks at the progress of others."""
        return max(min(_PROGRESS_PERIOD_S, wait_s / 32), self.poll_s)

    def _look(self, now: float) -> None:
        """Looks at the progress of others, who may be at other stages of the same call.

        Raises:
            WorldError: The ranks turn out to run different versions.
        """
        value = self._read_progress()
        if value != self._progress.value:
            self._progress.value, self._progress.changed_at = value, now
        if self._versions is not None:
            self._versions.look()

    def _read_progress(self) -> int:
        return int(self._store.compare_set("progress", "0", "0"))  # unlike `add`, leaves no key

    def _delete(self, keys: Sequence[str], store: Any = None) -> None:
        for key in keys:
            try:
                (store or self._store).delete_key(key)
            except (RuntimeError, NotImplementedError):
                return  # a FileStore keeps its keys; they are small


def _part_keys(place: str, num_parts: int) -> list[str]:
    return [f"{place}/count", *(f"{place}/part{index}" for index in range(num_parts))]


class FailureFlag:
    """The failure flag of a call: a key in the store that ranks poll while they do not exchange messages.

    Args:
        rendezvous: Namespace of the call.
    """

    def __init__(self, rendezvous: StoreRendezvous) -> None:
        self._rendezvous = rendezvous
        self._is_up = False
        self._period_s = min(max(_FLAG_PERIOD_S, rendezvous.poll_s), rendezvous.grace_s / 4)
        self._next_look = time.monotonic() + self._period_s  # short calls need no look
        self._moved = False
        self._next_progress = 0.0

    def set(self) -> None:
        """Tells the other ranks that this one has failed."""
        self._is_up = True
        self._rendezvous.tell("failed", limit_s=self._rendezvous.grace_s)

    def assume(self) -> None:
        """Takes the flag for set, without a request."""
        self._is_up = True

    def note_progress(self) -> None:
        """Notes that this rank makes progress; the next look shows it to the others."""
        self._moved = True

    def is_set(self) -> bool:
        """Whether a rank has failed; asks the store a few times a second at most."""
        now = time.monotonic()
        if not self._is_up and now >= self._next_look:
            self._next_look = now + self._period_s
            alive = self._moved and now >= self._next_progress
            if alive:
                self._moved = False
                self._next_progress = now + min(_PROGRESS_PERIOD_S, self._rendezvous.grace_s / 4)
            limit_s = self._rendezvous.patience_s
            self._is_up = self._rendezvous.watch("failed", alive=alive, limit_s=limit_s)
        return self._is_up


# Versions


def _own_version() -> str:
    return f"{__version__} (protocol {PROTOCOL})"


class Versions:
    """Compares the fastload versions of the ranks of a group, before anything else.

    The first rank sets its version in the group's namespace, with a random name for the namespace. Ranks with
    another version append theirs to a list, which waiting ranks poll while they meet. These two keys are the
    same in every version of fastload; everything else may change.

    Args:
        store: The group's namespace.
        member: This rank.

    Attributes:
        is_meeting: Whether the ranks meet, and may find that they differ.
    """

    def __init__(self, store: Any, member: Member) -> None:
        self._store = store
        self._member = member
        self.is_meeting = False

    def greet(self) -> str:
        """Returns the name of the namespace.

        Raises:
            WorldError: The rank that came first has another version of fastload.
        """
        own = _own_version()
        greeting = f"{secrets.token_hex(8)} {self._member.rank} {own}"
        name, _, first = str(self._store.compare_set(_NAME, "", greeting), "ascii").partition(" ")
        if first.partition(" ")[2] != own:
            raise self._differ()
        return name

    def look(self) -> None:
        """Looks whether a rank has reported another version.

        Raises:
            WorldError: It has.
        """
        if self.is_meeting and self._store.check([_VERSIONS]):
            raise self._differ()

    def _differ(self) -> WorldError:
        """Returns the error with the versions of all ranks that report theirs within a moment."""
        store = self._store
        store.append(_VERSIONS, f"{self._member.rank} {_own_version()}\n")
        until = time.monotonic() + _COLLECTING_S
        while True:
            first = str(store.get(_NAME), "ascii").partition(" ")[2]
            said = [*str(store.get(_VERSIONS), "ascii").splitlines(), first]
            found = {each: version for each, _, version in (line.partition(" ") for line in said) if each}
            if len(found) == self._member.size or time.monotonic() > until:
                break
            time.sleep(_VERSION_POLL_S)
        ranks: dict[str, list[str]] = defaultdict(list)
        for each in sorted(found, key=int):
            ranks[found[each]].append(each)
        parts = [f"{version} on rank{'s' * (len(at) > 1)} {some_of(at)}" for version, at in ranks.items()]
        if not first:
            parts.append("one from before 0.2.0 on another rank")
        return WorldError(
            f"the ranks run different versions of fastload: {'; '.join(parts)}: install the same on all hosts"
        )
