"""Ranks and their agreement: who is here, what they agree on, and how they learn of a failure.

Everything here goes through the rendezvous store of torch.distributed, not through collectives: a
store can say which rank is missing, works the same under every backend, and stays usable when a
peer has died in the middle of a collective.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from fastload.errors import (
    DeadlineExceeded,
    FastloadError,
    Interrupted,
    PeerError,
    PlanMismatch,
    blames_checkpoint,
    from_wire,
    to_wire,
)
from fastload.ranks.meeting import Verdict
from fastload.ranks.rendezvous import Rendezvous

__all__ = ["Outcome", "World", "grace_of", "require_same"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_ALARM_PERIOD_S = 0.2
_PULSE_PERIOD_S = 1.0
_MIN_GRACE_S = 0.5
_MAX_GRACE_S = 5.0
_ERROR_BYTES = 2 << 20  # of all ranks together, which one value has to hold


def grace_of(timeout_s: float) -> float:
    """How long, after a failure, the others get to say what they know, in seconds."""
    return min(_MAX_GRACE_S, max(0.25 * timeout_s, min(0.5 * timeout_s, _MIN_GRACE_S)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank brought to an agreement: a value, or the error that stopped it."""

    host: str
    value: Any
    error: dict[str, Any] | None


class World:
    """The ranks that make one call together, seen from one of them. One process alone is a world of 1.

    All members take the same steps in the same order, as with collectives. What was decided of the last step
    of a call is to be `heard`.

    Attributes:
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        host: Name of this host.
        group: The caller's process group, or None for a world of 1.
        store: A corner of the rendezvous store that is this world's own, or None for a world of 1.
        rendezvous: The same with deadlines, for what is no agreement of all ranks; None for a world of 1.
        timeout_s: Longest wait without progress, in seconds.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None,
        store: dist.Store | None,
        timeout_s: float,
        rendezvous: Rendezvous | None = None,
        call: str = "",
    ) -> None:
        self.rank = rank
        self.size = size
        self.host = socket.gethostname()
        self.group = group
        self.store = store
        self.timeout_s = timeout_s
        self._hosts = {rank: self.host}
        self._call = call
        self._step = 0
        self._last: _Last | None = None
        self._leavings: list[str] = []
        self.rendezvous = rendezvous
        self._next_alarm_check = 0.0
        self._alarmed = False
        self._left = False
        self._moved = False
        self._next_pulse = 0.0

    @property
    def grace_s(self) -> float:
        """How long, after a failure, the others get to say what they know."""
        return grace_of(self.timeout_s)

    @property
    def patience_s(self) -> float:
        """Longest wait inside a step, such that wait and grace together end within `timeout_s`."""
        return self.timeout_s - self.grace_s

    # Agreement

    def gather(
        self, what: str, value: Any = None, error: BaseException | None = None, *, wait_s: float
    ) -> list[Outcome]:
        """Collects one JSON value, or one error, from every rank; all ranks return the same list.

        Args:
            what: Name of the step, for messages.
            value: What this rank brings.
            error: What stopped this rank, instead of a value.
            wait_s: How long to wait for the others. A rank that has not answered by then is given a
                `DeadlineExceeded` as its error.
        """
        if self.rendezvous is None:
            return [Outcome(self.host, value, to_wire(error) if error is not None else None)]
        step, self._step = self._step, self._step + 1
        answer = self._answer(value, error, self._call if step == 0 else None)
        verdict = self.rendezvous.collect(
            what,
            step,
            answer,
            wait_s=wait_s,
            grace_s=self.grace_s,
            forget=self._last.step if self._last is not None else None,
        )
        outcomes = self._outcomes(verdict)
        failed = any(outcome.error is not None for outcome in outcomes)
        self._last = _Last(step, len(verdict.answers.keys() - {self.rank}), failed)
        if step == 0 and not failed:
            self._require_same_call(verdict)
        return outcomes

    def agree(self, what: str, work: Callable[[], T]) -> list[T]:
        """Does work on every rank and returns what each of them made of it, or raises on all ranks.

        Args:
            what: Name of the step, for messages.
            work: Returns a JSON value; an exception it raises is raised on all ranks.

        Raises:
            FastloadError: Work failed on a rank (see `raise_failures`), or a rank did not answer.
        """
        value, error = None, None
        try:
            value = work()
        except Exception as caught:
            error = caught
        try:
            outcomes = self.gather(what, value, error, wait_s=self.patience_s)
            self.raise_failures(what, outcomes, error)
        finally:
            error = None  # else error → traceback → frame → error would keep all their memory alive
        return [outcome.value for outcome in outcomes]

    def share(self, what: str, source: int, make: Callable[[], bytes]) -> bytes:
        """Makes bytes on one rank and returns them on all.

        Raises:
            CheckpointError: Making them raised it; the same on all ranks.
            PeerError: Making them raised something else, or a rank did not answer.
        """
        if (rendezvous := self.rendezvous) is None:
            return make()
        step = self._step

        def publish() -> int:
            if self.rank != source:
                return 0
            return rendezvous.put_bytes(what, step, make(), limit_s=self.patience_s)

        pieces = self.agree(what, publish)[source]
        return rendezvous.get_bytes(what, step, pieces, limit_s=self.patience_s)

    def leave_bytes(self, what: str, place: str, data: bytes) -> None:
        """Leaves bytes for another rank, which takes them with `take_bytes`, from the same place, once."""
        if self.rendezvous is not None:
            self.rendezvous.leave(what, f"{place}/{self.rank}", data, limit_s=self.grace_s)

    def take_bytes(self, what: str, place: str, rank: int) -> bytes | None:
        """Returns what a rank has left; None if it has left nothing."""
        if self.rendezvous is None:
            return None
        return self.rendezvous.take(what, f"{place}/{rank}", limit_s=self.grace_s)

    def raise_failures(self, what: str, outcomes: list[Outcome], own: BaseException | None = None) -> None:
        """Raises on every rank if an outcome is an error.

        The same fastload error on all ranks is raised as itself. If nothing failed but the checkpoint, which
        is bad whoever reads it, all ranks raise what the first rank that noticed raised. Otherwise all
        ranks raise one `PeerError` with each failing rank's cause.
        """
        failures = {rank: from_wire(o.error) for rank, o in enumerate(outcomes) if o.error is not None}
        if not failures:
            return
        self.heard()
        causes_only = {rank: e for rank, e in failures.items() if not isinstance(e, Interrupted)}
        failures = causes_only or failures
        source = min(failures)
        first = failures[source]
        same = len({(type(error), str(error)) for error in failures.values()}) == 1
        everywhere = same and len(failures) == self.size
        if (everywhere and (isinstance(first, FastloadError) or self.size == 1)) or all(
            map(blames_checkpoint, failures.values())
        ):
            try:
                raise own if own is not None and (everywhere or self.rank == source) else first
            finally:
                # Else error → traceback → frame → error would keep all their memory alive.
                del own, first
                failures.clear()
        causes = "; ".join(f"{self._label(rank)}: {_described(error)}" for rank, error in failures.items())
        raise PeerError(
            f"{what} failed on {len(failures)} of {self.size} ranks "
            f"(this is {self._label(self.rank)}): {causes}",
            failures,
        ) from own

    def raise_missed(self, what: str, verdict: Verdict) -> NoReturn:
        """Raises what the others raised in a call that they made without this rank."""
        self.raise_failures(what, self._outcomes(verdict))
        raise AssertionError("the ranks agreed although this one was not there")

    def corner(self, name: str, member: int) -> dist.Store:
        """Returns a part of the store for a group of Gloo; another one after each agreement.

        Args:
            name: Of the part; nothing has been written to it.
            member: This rank's number in that group, below which Gloo leaves its address.
        """
        assert self.store is not None
        place = f"{name}/{self._step}"
        self._leavings.append(f"{place}/0/{member}")
        return dist.PrefixStore(place, self.store)

    # The end of a call

    def heard(self) -> None:
        """Notes that this rank has heard how a call ended; a rank that hosts the store waits for the others.

        To be called once a call has ended well; one that fails does so by itself. Never raises.
        """
        last, self._last = self._last, None
        leavings, self._leavings = self._leavings, []
        if self.rendezvous is not None and last is not None:
            self.rendezvous.hear(
                last.step,
                num_others=last.num_others,
                failed=last.failed,
                leavings=leavings,
                grace_s=self.grace_s,
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is raised in here has been told to all ranks, or is what makes this rank leave them."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                self.heard()
            else:
                self.leave(error)
            raise

    # Failures outside of an agreement

    def raise_alarm(self) -> None:
        """Tells the other ranks, wherever they are, that this one has failed."""
        self._alarmed = True
        if self.rendezvous is not None:
            self.rendezvous.tell({"alarm": str(self.rank)}, limit_s=self.grace_s)

    def leave(self, error: BaseException) -> None:
        """Answers whatever comes next with an error, since this rank will not be there; never raises."""
        self._alarmed = True
        if self.rendezvous is not None and not self._left:
            self._left = True
            last, self._last = self._last, None
            step, self._step = self._step, self._step + 1
            answer = self._answer(None, error, self._call if step == 0 else None)
            heard = last.step if last is not None else None
            self.rendezvous.resign(heard, step, answer, limit_s=self.grace_s)

    def moved(self) -> None:
        """Notes that this rank gets on; the others learn of it with the next look for an alarm."""
        self._moved = True

    def alarmed(self) -> bool:
        """Whether some rank has failed. Cheap: asks the store a few times a second at most."""
        if self.rendezvous is None or self._alarmed:
            return self._alarmed
        now = time.monotonic()
        if now >= self._next_alarm_check:
            self._next_alarm_check = now + min(_ALARM_PERIOD_S, self.grace_s / 4)
            alive = self._moved and now >= self._next_pulse
            if alive:
                self._moved, self._next_pulse = False, now + min(_PULSE_PERIOD_S, self.grace_s / 4)
            self._alarmed = self.rendezvous.watch("alarm", alive=alive, limit_s=self.patience_s)
        return self._alarmed

    # Inside

    def _answer(self, value: Any, error: BaseException | None, call: str | None) -> str:
        wire = to_wire(error, _ERROR_BYTES // self.size) if error is not None else None
        answer = {"host": self.host, "value": value, "error": wire}
        return json.dumps(answer if call is None else {**answer, "call": call})

    def _outcomes(self, verdict: Verdict) -> list[Outcome]:
        outcomes = []
        for rank in range(self.size):
            answer = verdict.answers.get(rank)
            if answer is None:
                outcomes.append(Outcome("", None, to_wire(self._late(rank, verdict.waited_s))))
            else:
                outcomes.append(Outcome(answer["host"], answer["value"], answer["error"]))
                self._hosts[rank] = answer["host"]
        return outcomes

    def _late(self, rank: int, waited_s: float) -> DeadlineExceeded:
        if rank == self.rank:
            return DeadlineExceeded(f"came too late: the others waited {waited_s:.1f} s for it, and gave up")
        return DeadlineExceeded(
            f"did not answer within {waited_s:.1f} s: killed, stopped, stuck or cut off, "
            "or did not make this call (as inside of `if rank == 0:`)"
        )

    def _require_same_call(self, verdict: Verdict) -> None:
        """Raises on all ranks if they have met in different calls."""
        calls = [verdict.answers[rank]["call"] for rank in range(self.size)]
        if len({call.partition(" ")[0] for call in calls}) == 1:
            words = [call.split(" ") for call in calls]
            num_same = len(list(takewhile(lambda alike: len(set(alike)) == 1, zip(*words, strict=False))))
            require_same([{"path": " ".join(each[num_same:])} for each in words])
            return
        ranks = {call: [str(rank) for rank in range(self.size) if calls[rank] == call] for call in calls}
        places = [
            f"ranks {_some(at)} are {call}" if len(at) > 1 else f"rank {at[0]} is {call}"
            for call, at in ranks.items()
        ]
        raise PlanMismatch(f"the ranks are out of step: {_some(places)}")

    def _label(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}" if rank in self._hosts else f"rank {rank}"


@dataclass(frozen=True, slots=True)
class _Last:
    """The last step, while this rank has not said that it has heard the verdict."""

    step: int
    num_others: int
    failed: bool


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def require_same(asked: Sequence[Mapping[str, Any]]) -> None:
    """Checks that all ranks asked for the same.

    Raises:
        PlanMismatch: They did not; it names what differs and on which ranks.
    """
    lines = []
    for name, first in asked[0].items():
        others = [
            f"rank {rank} {ask.get(name)!r}" for rank, ask in enumerate(asked) if ask.get(name) != first
        ]
        if others:
            lines.append(f"{name}: rank 0 {first!r}, {_some(others)}")
    if lines:
        raise PlanMismatch("the ranks did not ask for the same: " + "; ".join(lines))
