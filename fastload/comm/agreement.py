"""Ranks and their agreement: who is here, what they agree on, and how they learn of a failure.

What is agreed on is in the rendezvous store of torch.distributed, not in collectives: a store can say
which rank is missing, works the same under every backend, and stays usable when a peer has died in the
middle of a collective. While nothing is wrong, answers come together along a tree (see `bonded`).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
import xxhash

from fastload.base.threads import await_done
from fastload.comm.alarm import Alarm
from fastload.comm.cache import ConnectionCache, cache_of
from fastload.comm.course import Course, LastStep
from fastload.comm.failures import (
    Outcome,
    grace_of,
    kinds_of,
    logged,
    outcomes_of,
    raise_failures,
    require_left,
    require_same_call,
)
from fastload.comm.hosts import host_of, node
from fastload.comm.meeting import Verdict
from fastload.comm.rendezvous import Rendezvous
from fastload.comm.responses import Column, Each, write_response
from fastload.errors import to_wire

__all__ = ["World"]

T = TypeVar("T")

_ERROR_BYTES = 2 << 20  # of all ranks together, which one value has to hold


def _ignore(*_: object) -> None:
    pass


class World:
    """The ranks that make one call together, seen from one of them. One process alone is a world of 1.

    All members take the same steps in the same order, as with collectives. What was decided of the last step
    of a call is to be `heard`.

    Attributes:
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        host: Name of this host.
        node: The same with what tells machines of one name apart; see `hosts.node`.
        group: The caller's process group, or None for a world of 1.
        rendezvous: The same with deadlines, for what is no agreement of all ranks.
        cache: What the group keeps for its next calls, and drops when one fails.
        timeout_s: Longest wait without progress, in seconds.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None,
        timeout_s: float,
        rendezvous: Rendezvous | None = None,
        cache: ConnectionCache | None = None,
        call: str = "",
    ) -> None:
        self.rank = rank
        self.size = size
        self.host = socket.gethostname()
        self.node = node(self.host)
        self.group = group
        self.cache = (
            cache if cache is not None else cache_of(group) if group is not None else ConnectionCache()
        )
        self.timeout_s = timeout_s
        self._course = Course(call)
        self._nodes: Column | None = None
        if rendezvous is None:
            from fastload.comm.solo import Solo  # not where there are others

            rendezvous = Solo()
        self.rendezvous = rendezvous
        self._alarm = Alarm(self.rendezvous, rank, grace_s=self.grace_s, patience_s=self.patience_s)

    @property
    def store(self) -> dist.Store | None:
        """A corner of the rendezvous store that is this world's own, or None for a world of 1."""
        store: dist.Store | None = self.rendezvous.store
        return store

    @property
    def hosts(self) -> dict[int, str]:
        """Host of each rank, ascending, as far as it is known: of all of them once they have met."""
        return {rank: host_of(node) for rank, node in self.nodes.items()}

    @property
    def nodes(self) -> dict[int, str]:
        """`node` of each rank, likewise."""
        known = self._nodes.by_rank() if self._nodes is not None else {}
        return known | {self.rank: self.node}

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
        self,
        what: str,
        value: Any = None,
        error: BaseException | None = None,
        *,
        wait_s: float,
        along: bytes = b"",
    ) -> list[Outcome]:
        """Collects one JSON value, or one error, from every rank; all ranks return the same list.

        Args:
            what: Name of the step, for messages.
            value: What this rank brings.
            error: What stopped this rank, instead of a value.
            wait_s: How long to wait for the others. A rank that has not answered by then is given a
                `DeadlineExceeded` as its error.
            along: What it brings along; see `share`.
        """
        course = self._course
        step = course.under_way = course.take_step()
        answer = self._answer(value, error, step)
        try:
            verdict = self.rendezvous.collect(
                what,
                step,
                answer,
                along=along,
                wait_s=wait_s,
                grace_s=self.grace_s,
                forget=course.last.step if course.last is not None else None,
            )
        except Exception:
            course.under_way = None
            raise
        course.under_way = None  # else what interrupts this rank makes it leave in the middle of the step
        outcomes = self._outcomes(verdict)
        failed = verdict.num_well < self.size
        course.bytes_along = verdict.bytes_along
        if not verdict.missed:
            course.last = LastStep(step, verdict.num_others(self.rank), failed)
        if step == 0 and not failed:
            require_same_call(verdict)
        return outcomes

    def agree(self, what: str, work: Callable[[], T], *, along: Sequence[bytes] = ()) -> list[T]:
        """Does work on every rank and returns what each of them made of it, or raises on all ranks.

        Args:
            what: Name of the step, for messages.
            work: Returns a JSON value; an exception it raises is raised on all ranks.
            along: Has, after the work, what this rank brings along, if anything; see `share`.

        Raises:
            FastloadError: Work failed on a rank (see `raise_failures`), or a rank did not answer.
        """
        value, error = None, None
        try:
            value = work()
        except Exception as caught:
            error = caught
        try:
            outcomes = self.gather(what, value, error, wait_s=self.patience_s, along=b"".join(along))
            self.raise_failures(what, outcomes, error)
        finally:
            error = None  # else error → traceback → frame → error would keep all their memory alive
        return [outcome.value for outcome in outcomes]

    def settle(
        self,
        what: str,
        work: Callable[[], T],
        *,
        ended: Callable[[BaseException | None], object] = _ignore,
        met: Callable[[], object] = _ignore,
    ) -> list[T]:
        """Does this rank's part of long work; returns what each rank made of its own, or raises on all ranks.

        Unlike with `agree`, a rank that fails tells the others at once, wherever they are, and one that is
        late is waited for as long as it gets on.

        Args:
            what: Name of the step, for messages.
            work: Returns a JSON value.
            ended: Called when this rank's part has ended, with what ended it; before the others hear of it.
            met: Called once the ranks have met, whatever came of it.

        Raises:
            FastloadError: Work failed on a rank (see `raise_failures`), or a rank did not answer.
        """
        value, error = None, None
        try:
            try:
                value = work()
            except Exception as caught:
                error = caught
                self.raise_alarm()
            with logged():
                ended(error)
            # One that is stuck says so itself after its patience: the others wait a little longer than that.
            wait_s = self.grace_s if error is not None else self.timeout_s - self.grace_s / 4
            outcomes = self.gather(what, value, error, wait_s=wait_s)
            with logged():
                met()
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
        step, along = self._course.step, []
        place = f"shared/{step}"

        def publish() -> int:
            if self.rank != source:
                return 0
            along.append(make())
            return len(self.rendezvous.leave(what, place, along[0], limit_s=self.patience_s))

        num_keys = self.agree(what, publish, along=along)[source]
        self.rendezvous.note_shared(step, place, num_keys)
        if (data := self._course.bytes_along) is None:
            data = self.rendezvous.take(what, place, keep=True, limit_s=self.patience_s)
        return require_left(what, data, source)

    def gather_bytes(self, what: str, make: Callable[[], bytes]) -> list[bytes]:
        """Makes bytes on every rank and brings them to all ranks; those that are equal are carried once.

        Rank 0 collects them for the others: that each asks for those of each would be too much for the store.

        Raises:
            FastloadError: Making them failed on a rank, or a rank did not answer.
        """
        place = f"gathered/{self._course.step}"

        def leave() -> str:
            self.show_bytes(what, place, data := make())
            return xxhash.xxh3_128_hexdigest(data)

        digests = self.agree(what, leave)
        sources = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}

        def join() -> bytes:
            found = [
                require_left(what, self.take_bytes(what, place, rank, keep=True), rank)
                for rank in sources.values()
            ]
            return b"".join([json.dumps([len(data) for data in found]).encode(), b"\n", *found])

        lengths, _, joined = self.share(what, 0, join).partition(b"\n")
        ends = list(accumulate(json.loads(lengths), initial=0))
        found = {
            digest: joined[begin:end] for digest, (begin, end) in zip(sources, pairwise(ends), strict=True)
        }
        return [found[digest] for digest in digests]

    def leave_bytes(self, what: str, place: str, data: bytes) -> None:
        """Leaves bytes for another rank, which takes them with `take_bytes`, from the same place, once."""
        self.rendezvous.leave(what, f"{place}/{self.rank}", data, limit_s=self.grace_s)

    def show_bytes(self, what: str, place: str, data: bytes) -> None:
        """Leaves bytes for several ranks, which `take_bytes` and `keep` them, until this one has `heard`."""
        left = self.rendezvous.leave(what, f"{place}/{self.rank}", data, limit_s=self.grace_s)
        self._course.leavings += left

    def tally(self, what: str, key: str, more: int) -> int:
        """Adds to a number that all ranks share, and returns it; once a call has ended it is 0 again."""
        if key not in self._course.leavings:
            self._course.leavings.append(key)
        return self.rendezvous.count(what, key, more, limit_s=self.patience_s)

    def take_bytes(self, what: str, place: str, rank: int, *, keep: bool = False) -> bytes | None:
        """Returns what a rank has left; None if it has left nothing."""
        return self.rendezvous.take(what, f"{place}/{rank}", keep=keep, limit_s=self.grace_s)

    def raise_failures(
        self, what: str, outcomes: Sequence[Outcome], own: BaseException | None = None
    ) -> None:
        """Raises on every rank if an outcome is an error; see `failures.raise_failures`."""
        if any(outcome.error is not None for outcome in kinds_of(outcomes)):
            self.heard()
            try:
                raise_failures(what, outcomes, self.rank, own, hosts=self.hosts)
            finally:
                del own  # else error → traceback → frame → error would keep all their memory alive

    def raise_missed(self, what: str, verdict: Verdict) -> NoReturn:
        """Raises what the others raised in a call that they made without this rank."""
        self.cache.clear()
        self.raise_failures(what, self._outcomes(verdict))
        raise AssertionError("the ranks agreed although this one was not there")

    # The end of a call

    def heard(self) -> None:
        """Notes that this rank has heard how a call ended; a rank that hosts the store waits for the others.

        To be called once a call has ended well; one that fails does so by itself. Never raises.
        """
        course = self._course
        last, course.last = course.last, None
        leavings, course.leavings = course.leavings, []
        if last is not None:
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
            self.cache.clear()
            if isinstance(error, Exception):
                self.heard()
            else:
                self.leave(error)
            raise

    # Failures outside of an agreement

    def raise_alarm(self) -> None:
        """Tells the other ranks, wherever they are, that this one has failed."""
        self._alarm.ring()
        self.rendezvous.part()

    def leave(self, error: BaseException) -> None:
        """Answers whatever comes next with an error, since this rank will not be there; never raises."""
        self._alarm.expect()
        course = self._course
        if not course.has_left:
            course.has_left = True
            last, course.last = course.last, None
            steps = [course.under_way] if course.under_way is not None else []
            steps.append(course.take_step())
            self.rendezvous.resign(
                last.step if last is not None else None,
                [(step, self._answer(None, error, step)) for step in steps],
                at_once=not isinstance(error, Exception),
                limit_s=self.grace_s,
            )

    def moved(self) -> None:
        """Notes that this rank gets on; the others learn of it with the next look for an alarm."""
        self._alarm.moved()

    def alarmed(self) -> bool:
        """Whether some rank has failed. Cheap: asks the store a few times a second at most."""
        return self._alarm.rings()

    def await_work(self, work: Future[T], late: Callable[[], Exception | None]) -> T:
        """Waits for work of this rank's own, no longer than the other ranks go on.

        Args:
            work: The work.
            late: Returns what to raise after the patience of the ranks; None waits on.

        Raises:
            Interrupted: Another rank failed.
        """
        await_done(work, give_up=self.alarmed, limit_s=self.patience_s, late=late)
        self.moved()
        try:
            return work.result()
        finally:
            del work  # else error → traceback → frame → work → error would keep all their memory alive

    # Inside

    def _answer(self, value: Any, error: BaseException | None, step: int) -> str:
        wire = to_wire(error, _ERROR_BYTES // self.size) if error is not None else None
        answer = {"value": value, "error": wire}
        if step == 0:
            answer |= {"node": Each([self.node]), "call": self._course.call}
        return write_response(self.rank, answer)

    def _outcomes(self, verdict: Verdict) -> list[Outcome]:
        self._nodes = verdict.nodes or self._nodes
        return outcomes_of(verdict, self.rank)
