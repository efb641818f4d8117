"""The rendezvous store of a call: requests with deadlines, the failure flag, and versions of fastload."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from fastload.base.threads import within
from fastload.base.version import PROTOCOL, __version__
from fastload.errors import DeadlineExceeded, FastloadError, Interrupted, PeerError, WorldError, some_of

_log = logging.getLogger(__name__)
T = TypeVar("T")

PART_BYTES = 4 << 20  # a TCPStore refuses values of more than 8 MiB
_TAKEN_AT_ONCE = 32  # values of mostly some 10 KB, at most 1 MiB
_FIRST_POLL_S = 0.0005
_POLL_OF_A_RANK_S = 0.0001  # roughly what the server takes for one
_PROGRESS_PERIOD_S = 1.0
_LAST_POLL_S = 0.05
_FLAG_PERIOD_S = 0.2
_SHORTEST_S = 2.0  # deadline of a request, since a busy machine may suspend a thread for a moment
_MIN_GRACE_S, _MAX_GRACE_S = 0.5, 5.0
_NAME, _VERSIONS = "name", "versions"
_COLLECTING_S, _VERSION_POLL_S = 2.0, 0.02


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a group.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        store_host: The rank that hosts the store, if one of them does.
        if_lost: Explanation for users when the store is gone.
        store_stays: Whether the store outlives the ranks.
    """

    rank: int
    size: int
    store_host: int | None = None
    if_lost: str = ""
    store_stays: bool = False


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


class CallStore:
    """The store namespace of one call, seen from one of its ranks.

    Args:
        namespace: A namespace of a ``torch.distributed.Store``, of this call or of its group; see
            `StoreRendezvous`.
        member: This rank.
        versions: Compares the versions of the ranks while they meet.
        timeout_s: Longest wait without progress, in seconds.

    Attributes:
        member: As given.
        timeout_s: As given.
    """

    def __init__(self, namespace: Any, member: Member, versions: Versions, *, timeout_s: float) -> None:
        self.member = member
        self.timeout_s = timeout_s
        self._namespace = self._store = namespace
        self._prefix = ""  # of the keys of `_store` in `_namespace`
        self._done: dict[str, None] = {}  # keys in `_namespace` that this rank deletes at the end of the call
        self._versions = versions
        self._lost: str | None = None
        self._given_up = False
        self._progress = _Progress()

    @property
    def store(self) -> Any:
        """The namespace of the call, without deadlines."""
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

    def watch(self, key: str, *, alive: bool) -> bool:
        """Returns whether a key is set; with `alive`, shows that this rank makes progress."""

        def look() -> bool:
            if alive:
                self._store.add("progress", 1)
            return bool(self._store.check([key]))

        return self.ask("watching the other ranks", self.patience_s, look)

    def progress(self) -> int:
        """Returns a number that changes while ranks make progress."""
        return self.ask("watching the other ranks", self.grace_s, self._read_progress)

    def post(self, what: str, key: str, text: str, *, forget: Sequence[str]) -> None:
        """Sets a text, and deletes others that no rank needs any more."""

        def post() -> None:
            self._store.set(key, text)
            self._delete(forget)

        self.ask(what, self.patience_s, post)

    def await_text(self, what: str, key: str, source: int) -> str:
        """Returns a text as soon as a rank has set it.

        Raises:
            PeerError: It did not within `patience_s`.
        """
        wait_s = self.patience_s

        def wait() -> str | None:
            is_set = self._wait_until(lambda: self._store.check([key]), wait_s, listen=False)
            return str(self._store.get(key), "utf-8") if is_set else None

        text = self.ask(what, self.timeout_s, wait)
        if text is None:
            late = DeadlineExceeded(f"did not come to it within {wait_s:.1f} s: killed, stopped or stuck")
            raise PeerError(f"{what}: waiting for rank {source}, which {late}", {source: late})
        return text

    def count(self, what: str, key: str, more: int) -> int:
        """Adds to a number that all ranks share, and returns it."""
        return self.ask(what, self.patience_s, lambda: int(self._store.add(key, more)))

    def leave(self, what: str, place: str, data: bytes, *, limit_s: float) -> list[str]:
        """Stores bytes under a name of their own; returns the keys that they take."""
        starts = range(0, len(data), PART_BYTES)
        keys = part_keys(place, len(starts))

        def leave() -> None:
            for key, start in zip(keys[1:], starts, strict=True):
                self._store.set(key, data[start : start + PART_BYTES])
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
            keys = part_keys(place, int(count))
            data = b"".join(self._store.get(key) for key in keys[1:])
            if not keep:
                self._delete(keys)
            return data

        return self.ask(what, limit_s, take)

    def take_all(self, what: str, places: Sequence[str], *, limit_s: float) -> list[bytes | None]:
        """Returns the bytes of each name, or None, and keeps them; in few requests if all exist.

        Args:
            what: Name of the step, for messages.
            places: The names.
            limit_s: Deadline for some of them. All those of thousands of ranks may take longer.
        """
        found: list[bytes | None] = []
        for begin in range(0, len(places), _TAKEN_AT_ONCE):
            some = places[begin : begin + _TAKEN_AT_ONCE]
            together = self.ask(what, limit_s, partial(self._get_together, some))
            found += together or [self.take(what, place, keep=True, limit_s=limit_s) for place in some]
        return found

    def _get_together(self, places: Sequence[str]) -> list[bytes] | None:
        """Returns the bytes of each name; None if some do not exist, or the store has no such request."""
        counts = [f"{place}/count" for place in places]
        if not self._store.has_extended_api() or not self._store.check(counts):
            return None
        numbers = self._store.multi_get(counts)
        if not all(numbers):
            return None
        keys = [part_keys(place, int(num))[1:] for place, num in zip(places, numbers, strict=True)]
        flat = list(chain.from_iterable(keys))
        parts = iter(self._store.multi_get(flat) if flat else ())
        return [b"".join(islice(parts, len(of_place))) for of_place in keys]

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
            time.sleep(min(max(_FIRST_POLL_S, self.poll_s, (now - first_look) / 16), _LAST_POLL_S))
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
        self._versions.look()

    def _read_progress(self) -> int:
        return int(self._store.compare_set("progress", "0", "0"))  # unlike `add`, leaves no key

    def delete_at_end(self, keys: Sequence[str]) -> None:
        """Has this rank delete keys at the end of the call."""
        self._add_done(self._full(keys))

    def delete_with_last(self, name: str, keys: Sequence[str] | None) -> None:
        """Has the last rank that calls this delete keys; never raises.

        Args:
            name: Of the occasion.
            keys: The keys, from one of the ranks.
        """
        listed, count = f"{name}/keys", f"{name}/num_ranks"

        def leave() -> None:
            if keys is not None:
                self._store.set(listed, json.dumps(keys))
            if self._store.add(count, 1) == self.member.size:
                self._delete([*json.loads(self._store.get(listed)), listed, count])

        with suppress(FastloadError):
            self.ask("ending the call", self.grace_s, leave)

    def _add_done(self, keys: Sequence[str]) -> None:
        self._done.update(dict.fromkeys(keys))

    def _delete_done(self) -> None:
        done, self._done = self._done, {}
        self._delete(done, self._namespace)

    def _full(self, keys: Sequence[str]) -> list[str]:
        """Returns keys of this call as they are called in `_namespace`."""
        return [self._prefix + key for key in keys]

    def _delete(self, keys: Iterable[str], store: Any = None) -> None:
        for key in keys:
            try:
                (store or self._store).delete_key(key)
            except (RuntimeError, NotImplementedError):
                return  # a FileStore keeps its keys; they are small


def part_keys(place: str, num_parts: int) -> list[str]:
    """Returns the keys of `CallStore.leave`: their number, and the parts."""
    return [f"{place}/count", *(f"{place}/part{index}" for index in range(num_parts))]


class FailureFlag:
    """The failure flag of a call: a key in the store that ranks poll while they do not exchange messages.

    Args:
        store: The store of the call.
    """

    def __init__(self, store: CallStore) -> None:
        self._store = store
        self._is_up = False
        self._period_s = min(max(_FLAG_PERIOD_S, store.poll_s), store.grace_s / 4)
        self._next_look = time.monotonic() + self._period_s  # short calls need no look
        self._moved = False
        self._next_progress = 0.0

    def set(self) -> None:
        """Tells the other ranks that this one has failed."""
        self._is_up = True
        self._store.tell("failed", limit_s=self._store.grace_s)

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
                self._next_progress = now + min(_PROGRESS_PERIOD_S, self._store.grace_s / 4)
            self._is_up = self._store.watch("failed", alive=alive)
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
        version = _own_version()
        greeting = f"{secrets.token_hex(8)} {self._member.rank} {version}"
        name, _, first = str(self._store.compare_set(_NAME, "", greeting), "ascii").partition(" ")
        if first.partition(" ")[2] != version:
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
            versions = {rank: version for rank, _, version in (line.partition(" ") for line in said) if rank}
            if len(versions) == self._member.size or time.monotonic() > until:
                break
            time.sleep(_VERSION_POLL_S)
        ranks: dict[str, list[str]] = defaultdict(list)
        for rank in sorted(versions, key=int):
            ranks[versions[rank]].append(rank)
        parts = [f"{version} on rank{'s' * (len(at) > 1)} {some_of(at)}" for version, at in ranks.items()]
        if not first:
            parts.append("one from before 0.2.0 on another rank")
        return WorldError(
            f"the ranks run different versions of fastload: {'; '.join(parts)}: install the same on all hosts"
        )
