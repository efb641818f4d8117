"""The calls of a group, and their decisions in the rendezvous store.

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
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple

import torch.distributed as dist
import xxhash

from fastload.comm.responses import Column, join_responses, read_responses
from fastload.comm.store import PART_BYTES, CallStore, Member, Versions, part_keys
from fastload.errors import FastloadError

# One number has three counts: responses, acknowledgements of the decision, impatient ranks.
_ACKNOWLEDGED = 1 << 20
_IMPATIENT = 1 << 40
_IN_STORE, _IN_TREE, _LEFT = "store", "tree", "left"  # how a decision came about
_IN_PARTS = "\x04"  # begins the value of a decision that is in parts
_SEPARATOR = "\x03"  # between the response of a rank that leaves and earlier ones

JOINING = "joining the other ranks"

_Runs = Sequence[tuple[dict[str, Any] | None, int]]


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
        return next((response["node"][0] for response, _ in self.came if "node" in response), None)

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
        return Decision.from_text(self.put_decision(Decision.write(waited_s, table)), self._size)

    def leave(self, response: str) -> Decision:
        """Decides at once, since this rank leaves.

        Its response replaces one that it may have sent along the tree before.
        """
        self._store.append(self.log, "")  # else there may be none
        table = join_responses([str(self._store.get(self.log), "ascii")])
        text = self.put_decision(Decision.write(0.0, f"{response}{_SEPARATOR}{table}", left=True))
        return Decision.from_text(text, self._size)

    def put_decision(self, decision: str) -> str:
        """Stores a decision unless there is one; returns the one that is stored."""
        keys, value = self._parts_of(decision), decision
        if keys:
            value = f"{_IN_PARTS}{keys[0].rpartition('/')[0]} {len(keys)}"
            for number, key in enumerate(keys):
                begin = number * PART_BYTES
                self._store.set(key, decision[begin : begin + PART_BYTES])
        stored = str(self._store.compare_set(self.decision, "", value), "ascii")
        return decision if stored == value else self._complete(stored)

    def keys_of(self, decision: str) -> list[str]:
        """Returns the keys that hold a decision."""
        return [self.decision, *self._parts_of(decision)]

    def _parts_of(self, decision: str) -> list[str]:
        """Returns the keys of the parts of a decision; none if it fits into one value of the store.

        Those of another decision are others: ranks may store theirs at the same time.
        """
        if len(decision) <= PART_BYTES:
            return []
        name = f"{self.decision}/{xxhash.xxh3_128_hexdigest(decision.encode())}"
        return [f"{name}/{number}" for number in range(-(-len(decision) // PART_BYTES))]

    def _complete(self, value: str) -> str:
        """Returns the decision, given the value of its key."""
        if not value.startswith(_IN_PARTS):
            return value
        name, num_parts = value.removeprefix(_IN_PARTS).split(" ")
        parts = (self._store.get(f"{name}/{number}") for number in range(int(num_parts)))
        return str(b"".join(parts), "ascii")

    def is_decided(self) -> bool:
        """Whether there is a decision."""
        return bool(self._store.check([self.decision]))

    def read(self) -> Decision:
        """Returns the decision, which must exist."""
        return Decision.from_text(self._complete(str(self._store.get(self.decision), "ascii")), self._size)

    def all_keys(self) -> list[str]:
        """Returns all keys of the step, also those of the parts of a decision, once there is one."""
        keys = self.keys
        if self._store.check([self.decision]):
            value = str(self._store.get(self.decision), "ascii")
            keys += self._parts_of(self._complete(value)) if value.startswith(_IN_PARTS) else []
        return keys

    def acknowledge(self) -> bool:
        """Notes that this rank has read the decision; returns whether all have."""
        return bool(self._store.add(self.count, _ACKNOWLEDGED) // _ACKNOWLEDGED % _ACKNOWLEDGED == self._size)

    def are_acknowledged(self, num_ranks: int) -> bool:
        """Whether so many ranks have read the decision."""
        return bool(self._store.add(self.count, 0) // _ACKNOWLEDGED % _ACKNOWLEDGED >= num_ranks)


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
        in_tree: Whether all responses came along the tree of the group.
    """

    step: int
    num_others: int
    failed: bool
    in_tree: bool


# Numbers of calls


class ExpiringKeys:
    """Keys in the store that late ranks may still read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[str] = []
        self._old: list[str] = []

    def add(self, keys: Sequence[str]) -> None:
        """Adds keys."""
        with self._lock:
            self._new += keys

    def rotate(self) -> list[str]:
        """Returns the keys that were added before the last rotation, to be deleted."""
        with self._lock:
            expired, self._old, self._new = self._old, self._new, []
        return expired


class CallCounter:
    """Numbers the calls of a group on one rank, in the order in which it begins them.

    Ranks count without communication, since threads make calls concurrently and notice a broken tree at
    different times. If only some ranks make a call, the others find the first step of that number decided
    without them, and take the next number. So the ranks meet again in the next call that all of them make.

    Attributes:
        numbers: The next numbers.
        expiring: Keys of first steps in which not all ranks met.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.expiring = ExpiringKeys()


_counters: dict[tuple[str, int], CallCounter] = {}  # by name of a namespace, and rank


def counter_in(namespace: Any, member: Member) -> CallCounter:
    """Returns the counter of a rank in a group's namespace of the store.

    It outlives the group: one of the same name and members may be made again in the same namespace. In
    another store the count begins anew.

    Raises:
        WorldError: The ranks run different versions of fastload.
    """
    return _counters.setdefault((Versions(namespace, member).greet(), member.rank), CallCounter())


class GroupState:
    """What a rank keeps of a group from call to call.

    Attributes:
        counter: Numbers of the calls; None until the first call has found them.
    """

    def __init__(self) -> None:
        self.counter: CallCounter | None = None


class StoreRendezvous(CallStore):
    """The steps of one call, decided in the store.

    Args:
        namespace: The group's namespace in a ``torch.distributed.Store``.
        state: What this rank keeps of the group.
        member: This rank.
        call: Name of the call, which the ranks compare when they meet.
        timeout_s: Longest wait without progress, in seconds.

    Attributes:
        call: As given.
    """

    def __init__(
        self, namespace: Any, state: GroupState, member: Member, *, call: str, timeout_s: float
    ) -> None:
        super().__init__(namespace, member, Versions(namespace, member), timeout_s=timeout_s)
        self.call = call
        self._state = state
        self._number = 0  # of the call; 0 before it has one
        self._shared: dict[int, list[str]] = {}
        self._responded = -1  # the last step that this rank has responded to in the store
        self._responding = threading.Lock()

    def begin(self) -> None:
        """Numbers the call."""
        self._take_number()
        if self._number == 1 and self.member.rank == 0:
            self._skip_decided(JOINING)

    def decide(self, proposal: Proposal) -> Decision:
        """Brings this rank's response to a step and returns the decision."""
        decision = self._decide(proposal)
        if proposal.step:
            return decision
        while not decision.binds(self.member.rank, self.call):
            self._skip()
            decision = self._decide(proposal)
        if decision.num_came == self.member.size:
            self._add_done(self._counter.expiring.rotate())
        elif not decision.left:
            self._expire_meeting()
        return decision

    def _decide(self, proposal: Proposal) -> Decision:
        return self._decide_in_store(proposal)

    def _decide_in_store(self, proposal: Proposal, *, since: float | None = None) -> Decision:
        """Brings this rank's response to the store and returns the decision.

        Args:
            proposal: The response.
            since: When the wait began, if this rank has waited in another way. Ranks that still do so get a
                moment in any case.
        """
        what, step, response, wait_s, _ = proposal
        self._versions.is_meeting = step == 0
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

    def acknowledge(self, last: LastStep) -> None:
        """Notes that this rank has the last decision of a call; never raises.

        The last rank deletes the keys of the call. The rank that hosts the store waits for the others for a
        moment, since it may exit and take the store with it.

        Args:
            last: The step.
        """

        def acknowledge() -> None:
            self._delete_done()
            if self.member.store_host == self.member.rank:
                all_know = partial(self._step(last.step).are_acknowledged, last.num_others)
                self._wait_until(all_know, self.grace_s, listen=False)
            self._acknowledge(last.step, last.failed)

        with contextlib.suppress(FastloadError):
            self.ask("ending the call", 2 * self.grace_s, acknowledge)

    def withdraw(self, last: LastStep | None, responses: Sequence[tuple[int, str]], *, at_once: bool) -> None:
        """Responds to steps in advance, since this rank leaves the call; never raises.

        Args:
            last: The step whose decision this rank has but has not acknowledged.
            responses: Number and response of the next step. A step that this rank waits in comes first; the
                next one counts if the others continue to it.
            at_once: Whether to decide now, and not once all ranks have responded.
        """

        def withdraw() -> None:
            self._store.set("failed", "")
            if last is not None:
                self._acknowledge(last.step, failed=True)
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
            if not self._number:
                self._take_number()
            if responses[0][0] == 0:
                self._skip_decided("leaving")
            self.ask("telling the other ranks", self.grace_s, withdraw)

    def note_shared(self, step: int, place: str, num_keys: int) -> None:
        """Notes that the bytes a rank has left go with the keys of a step."""
        self._shared[step] = part_keys(place, num_keys - 1)

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
        self._delete(self._step(step).all_keys() + self._shared.pop(step, []))

    def _step(self, number: int) -> StoreStep:
        return StoreStep(self._store, str(number), self.member.size)

    # The number of the call

    @property
    def _counter(self) -> CallCounter:
        if self._state.counter is None:
            find = partial(counter_in, self._namespace, self.member)
            alone = self.member.size == 1  # in a namespace that no other call uses
            self._state.counter = CallCounter() if alone else self.ask(JOINING, self.timeout_s, find)
        return self._state.counter

    def _take_number(self) -> None:
        """Gives the call the next number, in whose namespace this rank is from now on."""
        self._number = next(self._counter.numbers)
        self._prefix = f"{self._number}/"
        self._store, self._responded = dist.PrefixStore(str(self._number), self._namespace), -1

    def _skip(self) -> None:
        """Takes the next number, since the ranks have met under the present one without this rank."""
        self._expire_meeting()
        self._take_number()

    def _skip_decided(self, what: str) -> None:
        """Takes the first number under which the ranks have not met without this rank."""

        def is_over() -> bool:
            first = self._step(0)
            return first.is_decided() and not first.read().binds(self.member.rank, self.call)

        while self.ask(what, self.timeout_s, is_over):
            self._skip()

    def _expire_meeting(self) -> None:
        self._counter.expiring.add(self._full([*self._step(0).keys, "progress", "failed"]))
