"""The rendezvous store of torch.distributed, as the ranks use it to agree: with deadlines throughout."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastload.base.threads import within
from fastload.comm.meeting import Step, Verdict
from fastload.comm.versions import Versions
from fastload.errors import DeadlineExceeded, FastloadError, Interrupted, PeerError

__all__ = ["Rendezvous"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_PIECE_BYTES = 4 << 20  # a TCPStore refuses values of more than 8 MiB
_FIRST_POLL_S = 0.0005
_POLL_OF_A_RANK_S = 0.0001  # what one costs the server, about, which all ranks ask
_LISTENING_S = 1.0
_LAST_POLL_S = 0.05
_SHORTEST_S = 2.0  # deadline of a request: a busy machine may stop a thread for longer than a short timeout


@dataclass
class _Pulse:
    """The counter by which ranks tell that they get on.

    Attributes:
        value: As it was last seen.
        heard_at: When it last changed, by `time.monotonic`.
        next_look: When to look again.
    """

    value: int = 0
    heard_at: float = 0.0
    next_look: float = 0.0


@dataclass
class _Answered:
    """The last step that this rank has answered in the store; its lock is held meanwhile."""

    step: int = -1
    lock: threading.Lock = field(default_factory=threading.Lock)


class Rendezvous:
    """The corner of the store that one world has to itself, seen from one of its ranks.

    Args:
        store: A ``torch.distributed.Store``.
        rank: This rank.
        size: Number of ranks.
        host: The rank that hosts the store, if one of them does.
        if_lost: What it means that the store is gone.
        versions: Those of the ranks, which may turn out to differ while they meet.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        size: int,
        host: int | None,
        if_lost: str,
        versions: Versions | None = None,
    ) -> None:
        self._store = store
        self._versions = versions or Versions(store, rank, size)
        self._rank = rank
        self._size = size
        self._first_poll_s = max(_FIRST_POLL_S, self.turn_s)
        self._host = host
        self._if_lost = if_lost
        self._shared: dict[int, list[str]] = {}
        self._lost: str | None = None
        self._given_up = False
        self._answered = _Answered()
        self._pulse = _Pulse()

    @property
    def store(self) -> Any:
        """The corner, without deadlines; None for a world of 1."""
        return self._store

    @property
    def turn_s(self) -> float:
        """How long to leave the store alone between two looks, such that it has time for all ranks."""
        return self._size * _POLL_OF_A_RANK_S

    def ask(self, what: str, limit_s: float, ask: Callable[[], T]) -> T:
        """Asks the store: a store whose host is stopped or cut off would keep the caller for ever."""
        if self._lost is None:
            try:
                limit_s = max(limit_s, _SHORTEST_S)
                return within(limit_s, "the rendezvous store", ask, since=lambda: self._pulse.heard_at)
            except (RuntimeError, DeadlineExceeded) as error:
                self._lost = str(error).split("\n", 1)[0]
            except BaseException:
                self._given_up = True  # else the thread that was left behind would poll on
                raise
        raise self._explain(what, self._lost)

    def tell(self, values: dict[str, str], *, limit_s: float) -> None:
        """Leaves values in the store, if it is still there."""

        def tell() -> None:
            for key, value in values.items():
                self._store.set(key, value)

        try:
            self.ask("telling the other ranks", limit_s, tell)
        except PeerError as error:
            _log.debug("not told: %s", error)

    def watch(self, key: str, *, alive: bool, limit_s: float) -> bool:
        """Whether somebody has left a value. Tells the others at the same time that this rank gets on."""

        def look() -> bool:
            if alive:
                self._store.add("pulse", 1)
            return bool(self._store.check([key]))

        return self.ask("watching the other ranks", limit_s, look)

    def pulse(self, *, limit_s: float) -> int:
        """Returns a number that changes while ranks get on."""
        return self.ask("watching the other ranks", limit_s, lambda: int(self._store.add("pulse", 0)))

    def post(self, what: str, key: str, text: str, *, forget: Sequence[str], limit_s: float) -> None:
        """Leaves a text for whoever wants it, and deletes others that nobody will want any more."""

        def post() -> None:
            self._store.set(key, text)
            self._delete(forget)

        self.ask(what, limit_s, post)

    def await_text(self, what: str, key: str, source: int, *, wait_s: float, grace_s: float) -> str:
        """Returns a text as soon as a rank has left it.

        Raises:
            PeerError: It has not, for so long.
        """

        def wait() -> str | None:
            return str(self._store.get(key), "utf-8") if self._poll([key], wait_s, listen=False) else None

        text = self.ask(what, wait_s + grace_s, wait)
        if text is None:
            late = DeadlineExceeded(f"did not come to it within {wait_s:.1f} s: killed, stopped or stuck")
            raise PeerError(f"{what}: waiting for rank {source}, which {late}", {source: late})
        return text

    def count(self, what: str, key: str, more: int, *, limit_s: float) -> int:
        """Adds to a number that all ranks share, and returns it."""
        return self.ask(what, limit_s, lambda: int(self._store.add(key, more)))

    def take_turn(self, call: str, *, wait_s: float, limit_s: float) -> tuple[int, Verdict | None]:
        """Draws the number of this rank's next call, in the corner of a group.

        Args:
            call: Its name.
            wait_s: How long to see whether the others make it once more, if they made it without this rank.
            limit_s: Longest wait for the store.

        Returns:
            The number; and the verdict that the others have heard, if this rank is too late for it.
        """

        def draw() -> tuple[int, Verdict | None]:
            self._versions.greet()
            while True:
                # Counted in the store, since a process may initialize torch.distributed anew.
                number = self._store.add(f"{self._rank}/turns", 1)
                verdict = self.passed(number, call, wait_s)
                if verdict is None or verdict.missed:
                    return number, verdict

        return self.ask("joining the other ranks", limit_s, draw)

    def passed(self, number: int, call: str, wait_s: float) -> Verdict | None:
        """Returns what was decided without this rank where it is about to make a call, which may be `missed`.

        Args:
            number: Of the call, in the corner of a group.
            call: Its name.
            wait_s: As for `take_turn`.

        Returns:
            None if this rank is in time.
        """
        step = self._step(f"{number}/0")
        if not step.is_decided():
            return None
        verdict = step.read()
        if verdict.answer_of(self._rank) is not None:
            return None
        if step.hear():
            self._delete([*step.keys, f"{number}/alarm", f"{number}/pulse"])
        wait_s = 0.0 if verdict.left else wait_s
        missed = verdict.is_of(call) and not self._is_made_again(number + 1, call, wait_s)
        return replace(verdict, missed=missed)

    def collect(
        self,
        what: str,
        step: int,
        answer: str,
        *,
        along: bytes = b"",
        wait_s: float,
        grace_s: float,
        forget: int | None,
        since: float | None = None,
    ) -> Verdict:
        """Brings this rank's answer and returns the verdict.

        Args:
            what: Name of the step, for messages.
            step: Its number.
            answer: This rank's answer, a table; perhaps with those of others that this one knows.
            along: What one rank brings along, which the others get with the verdict or, where that comes
                without, have to get elsewhere.
            wait_s: How long to wait for the others, from when one of them was last known to get on.
            grace_s: How long to wait, then, for the rank that decides.
            forget: Number of a step that nobody needs any more once all have answered this one.
            since: When the wait began, if this rank has waited in another way; those that still do so are
                waited for a moment in any case.
        """
        self._versions.are_open = step == 0

        def collect() -> Verdict:
            place = self._step(step)
            if since is not None and place.is_decided():
                return place.read()
            began = time.monotonic()
            if since is not None:
                began = max(since, began - wait_s + min(wait_s, grace_s) / 2)
            if self._answer(step, answer):
                verdict = place.decide(wait_s)
                if forget is not None:
                    self._forget(forget)
                return verdict
            if self._poll([place.verdict], wait_s, listen=True, began=began):
                verdict = place.read()
                if verdict.along_tree:  # decided meanwhile, and nobody counts who hears it
                    self._delete([place.log, place.count])
                return verdict
            # Whoever is to decide may die of it: then all others do.
            if not place.lose_patience() and self._poll([place.verdict], grace_s, listen=False):
                return place.read()
            return place.decide(wait_s)

        return self.ask(what, wait_s + 1.5 * grace_s, collect)

    def hear(
        self, step: int, *, num_others: int, failed: bool, leavings: Sequence[str], grace_s: float
    ) -> None:
        """Notes that this rank has heard the last verdict of a call; never raises.

        Whoever is the last one cleans up. The rank that hosts the store waits for the others a moment, since
        it may leave and take the store with it.

        Args:
            step: Number of the step.
            num_others: How many others have answered.
            failed: Whether the call has.
            leavings: What nobody but this rank is going to delete.
            grace_s: How long to wait for the others.
        """

        def hear() -> None:
            self._delete(leavings)
            if self._host == self._rank:
                place = self._step(step)
                self._wait_until(lambda: place.num_heard() >= num_others, grace_s, listen=False)
            self._hear(step, failed)

        with contextlib.suppress(FastloadError):
            self.ask("ending the call", 2 * grace_s, hear)

    def resign(
        self, heard: int | None, answers: Sequence[tuple[int, str]], *, at_once: bool, limit_s: float
    ) -> None:
        """Answers steps before they come, since this rank will not be there; never raises.

        Args:
            heard: Number of the step whose verdict this rank has heard last, if it has not said so.
            answers: Number of the next step, and this rank's answer, a table (see `answers`). If it waits in
                a step, that comes first; the next one counts if the others get on to it.
            at_once: Whether the others hear of it now, and not once all of them have answered.
            limit_s: Longest wait.
        """

        def resign() -> None:
            self._store.set("alarm", "")
            if heard is not None:
                self._hear(heard, failed=True)
            for step, answer in answers:
                place = self._step(step)
                verdict = None
                if at_once:
                    verdict = place.leave(answer)
                    self._answer(step, "")  # after that, else who comes last would decide without it
                elif self._answer(step, answer):
                    verdict = place.decide(0.0)
                if verdict is None or not verdict.along_tree:
                    self._hear(step, failed=True)
                else:  # nobody counts who hears it
                    self._delete([place.log, place.count])
                if verdict is not None and verdict.num_well < self._size:
                    return

        with contextlib.suppress(FastloadError):
            self.ask("telling the other ranks", limit_s, resign)

    def leave(self, what: str, place: str, data: bytes, *, limit_s: float) -> list[str]:
        """Leaves bytes at a place that nobody else uses; returns the keys that they take."""
        starts = range(0, len(data), _PIECE_BYTES)
        keys = self._piece_keys(place, len(starts))

        def leave() -> None:
            for key, start in zip(keys, starts, strict=True):
                self._store.set(key, data[start : start + _PIECE_BYTES])
            self._store.set(f"{place}/count", str(len(starts)))
            # Answered once the store has all of that: a set does not wait, and others may hear of it first.
            self._store.check([f"{place}/count"])

        self.ask(what, limit_s, leave)
        return [f"{place}/count", *keys]

    def take(self, what: str, place: str, *, keep: bool, limit_s: float) -> bytes | None:
        """Returns what was left at a place; None if nothing was, or not all. Unless `keep`, takes it away."""

        def take() -> bytes | None:
            if not self._store.check([f"{place}/count"]):
                return None
            count = self._store.get(f"{place}/count")
            if not count:  # it is being taken away
                return None
            keys = self._piece_keys(place, int(count))
            data = b"".join(self._store.get(key) for key in keys)
            if not keep:
                self._delete([f"{place}/count", *keys])
            return data

        return self.ask(what, limit_s, take)

    def part(self) -> None:
        """Notes that something has failed; see `Bonded`."""

    def note_shared(self, step: int, place: str, num_keys: int) -> None:
        """Notes what goes with a step: the bytes that a rank has left."""
        self._shared[step] = [f"{place}/count", *self._piece_keys(place, num_keys - 1)]

    def _piece_keys(self, place: str, num_pieces: int) -> list[str]:
        return [f"{place}/piece{index}" for index in range(num_pieces)]

    def _explain(self, what: str, error: str) -> PeerError:
        failures: dict[int, BaseException] = {}
        if self._host is not None:
            failures[self._host] = DeadlineExceeded("hosted the rendezvous store, which is gone")
        return PeerError(f"{what}: the rendezvous store is gone: {self._if_lost} ({error})", failures)

    def _is_made_again(self, number: int, call: str, wait_s: float) -> bool:
        """Whether the others have made a call again from that number on, or come to it in a moment."""
        while (step := self._step(f"{number}/0")).is_decided():
            if step.read().is_of(call):
                return True
            number += 1
        return self._wait_until(step.is_begun, wait_s, listen=False) and step.is_being_made(call)

    def _answer(self, step: int, answer: str) -> bool:
        """Brings the answer of this rank to a step, once; returns whether it was the last of all.

        The thread that it waits in a step with may be about to do so when the rank is interrupted.
        """
        with self._answered.lock:
            is_new, self._answered.step = step > self._answered.step, max(step, self._answered.step)
            return is_new and self._step(step).answer(answer)

    def _step(self, name: int | str) -> Step:
        return Step(self._store, str(name), self._size)

    def _poll(self, keys: list[str], wait_s: float, *, listen: bool, began: float | None = None) -> bool:
        """Waits until all keys exist; see `_wait_until`."""
        return self._wait_until(lambda: bool(self._store.check(keys)), wait_s, listen=listen, began=began)

    def _wait_until(
        self, condition: Callable[[], bool], wait_s: float, *, listen: bool, began: float | None = None
    ) -> bool:
        """Waits for a condition. Polls, since a blocking wait would lock the store for other threads.

        Args:
            condition: Asks the store.
            wait_s: For how long.
            listen: Whether to count from when some rank was last known to get on.
            began: When the wait has begun, if not now.
        """
        first_look = time.monotonic()
        began = began if began is not None else first_look
        while not condition():
            now = time.monotonic()
            if listen and now >= self._pulse.next_look:
                self._pulse.next_look = now + self._period_s(wait_s)
                self._hear_pulse(now)
            if now >= (max(began, self._pulse.heard_at) if listen else began) + wait_s:
                return False
            if self._given_up:
                raise Interrupted("nobody waits for this any more")
            # In proportion to the time waited so far, so that polling adds a few percent to any wait.
            time.sleep(min(max(self._first_poll_s, (now - first_look) / 16), _LAST_POLL_S))
        return True

    def _period_s(self, wait_s: float) -> float:
        """Returns how long to leave the store alone between looks for signs of life."""
        return max(min(_LISTENING_S, wait_s / 32), self.turn_s)

    def _hear_pulse(self, now: float) -> None:
        """Looks for a sign of life: ranks that need not keep step may be far apart.

        Raises:
            WorldError: While the ranks meet, some turn out to run different versions.
        """
        pulse = self._store.add("pulse", 0)
        if pulse != self._pulse.value:
            self._pulse.value, self._pulse.heard_at = pulse, now
        self._versions.look()

    def _hear(self, step: int, failed: bool) -> None:
        if self._step(step).hear():
            self._forget(step)
            if failed and step:  # not all have come to this one together, and so forgotten the one before
                self._forget(step - 1)
            self._delete(["pulse", "alarm"] if failed else ["pulse"])

    def _forget(self, step: int) -> None:
        self._delete(self._step(step).keys + self._shared.pop(step, []))

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            try:
                self._store.delete_key(key)
            except (RuntimeError, NotImplementedError):
                return  # a FileStore keeps its keys; they are small
