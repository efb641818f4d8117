"""The world of a call: its ranks, their agreements, and how they learn of a failure.

Agreements are in the rendezvous store of torch.distributed rather than in collectives. A store can tell which
rank is missing, works under every backend, and stays usable when a peer has died inside a collective. While
nothing is wrong, responses are collected along a tree (see `tree`).
"""

from __future__ import annotations

import json
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastload.base.threads import await_done
from fastload.comm.cache import ConnectionCache, cache_of
from fastload.comm.failures import require_left, require_same_call, require_same_step
from fastload.comm.hosts import host_of, node
from fastload.comm.rendezvous import Decision, LastStep, Proposal, StoreRendezvous
from fastload.comm.responses import Column, Each, read_responses, write_response
from fastload.comm.steps import GatheringStep, Step
from fastload.comm.store import FailureFlag
from fastload.errors import to_wire

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

_BLOCK = 64  # decisions that are counted together
_DELETED_AT_ONCE = 2  # decisions; deleting takes time
_ERROR_BYTES = 2 << 20  # of all ranks together, to fit into one value of the store


@dataclass(slots=True)
class CallState:
    """The progress of one rank through the steps of a call.

    Attributes:
        step: Number of the next step.
        last: The step before it, until its decision is acknowledged.
        under_way: Number of the step that this rank waits in, if any.
        has_left: Whether this rank has left the call.
        in_block: Whether this rank is in the block of a step.
        has_failed: Whether the last step has raised, so that the other ranks know of the failure.
    """

    step: int = 0
    last: LastStep | None = None
    under_way: int | None = None
    has_left: bool = False
    in_block: bool = False
    has_failed: bool = False

    def take_step(self) -> int:
        """Returns the number of the next step."""
        step, self.step = self.step, self.step + 1
        return step


class World:
    """The ranks that make one call together, seen from one of them; a process alone is a world of 1.

    All members take the same steps in the same order, as with collectives, and `acknowledge` the last one.

    Attributes:
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        host: Name of this host.
        node: Identifier of this machine; see `hosts.node`.
        group: The caller's process group, or None for a world of 1.
        rendezvous: The store namespace of the call, for what is no agreement of all ranks.
        cache: Connections that the group keeps between calls.
        timeout_s: Longest wait without progress, in seconds.
    """

    def __init__(
        self,
        rendezvous: StoreRendezvous,
        *,
        group: dist.ProcessGroup | None = None,
        cache: ConnectionCache | None = None,
    ) -> None:
        self.rendezvous = rendezvous
        self.rank = rendezvous.member.rank
        self.size = rendezvous.member.size
        self.timeout_s = rendezvous.timeout_s
        self.host = socket.gethostname()
        self.node = node(self.host)
        self.group = group
        if cache is None:
            cache = cache_of(group) if group is not None else ConnectionCache()
        self.cache = cache
        self._state = CallState()
        self._nodes: Column | None = None
        self._flag = FailureFlag(rendezvous)

    @property
    def store(self) -> dist.Store | None:
        """The store namespace of this call, without deadlines; None for a world of 1."""
        store: dist.Store = self.rendezvous.store
        return store if self.size > 1 else None

    @property
    def hosts(self) -> dict[int, str]:
        """Host of each rank, ascending; before the first step of this rank only."""
        return {rank: host_of(node) for rank, node in self.nodes.items()}

    @property
    def nodes(self) -> dict[int, str]:
        """`node` of each rank, likewise."""
        known = self._nodes.by_rank() if self._nodes is not None else {}
        return known | {self.rank: self.node}

    @property
    def grace_s(self) -> float:
        """How long, after a failure, the others get to report their errors."""
        return self.rendezvous.grace_s

    @property
    def patience_s(self) -> float:
        """Longest wait inside a step, such that wait and grace together end within `timeout_s`."""
        return self.rendezvous.patience_s

    # Agreement

    def step(self, what: str = "", *, is_long: bool = False) -> Step:
        """Returns a block in which each rank does its part of a step and answers; see `steps.Step`.

            with world.step("opening a checkpoint") as step:
                step.answer(read())
            found = step.answers

        All ranks take the same steps, one after the other: a rank that takes another one, by its place in the
        code, is a `PlanMismatch` on all.

        Args:
            what: Name of the step, for messages; empty for that of the call.
            is_long: Whether a rank that fails sets the failure flag at once, and a late rank is waited for as
                long as it makes progress.
        """
        return Step(self, what or self.rendezvous.call, _place(), is_long=is_long)

    def gathering_step(self, what: str) -> GatheringStep:
        """Returns the block of a step in which each rank answers bytes; these are two agreements."""
        return GatheringStep(self, what, _place())

    @property
    def next_step(self) -> int:
        """Number of the next step of the call."""
        return self._state.step

    def begin_step(self) -> int:
        """Begins the block of a step; returns its number."""
        assert not self._state.in_block, "a step in the block of another one"
        self._state.in_block = True
        return self.next_step

    def end_step(self) -> None:
        """Ends the block of a step."""
        self._state.in_block = False

    def gather(
        self,
        what: str,
        answer: str = "",
        error: BaseException | None = None,
        *,
        wait_s: float,
        attachment: bytes = b"",
        place: str = "",
    ) -> Decision:
        """Collects one answer, or one error, from every rank.

        Args:
            what: Name of the step, for messages.
            answer: The answer of this rank, in the form of `responses`.
            error: The error that stopped this rank, instead of an answer.
            wait_s: How long to wait for the others.
            attachment: Bytes of this rank for all; see `Step.answer`.
            place: Where the code takes the step.

        Raises:
            PlanMismatch: The ranks make different calls, or take different steps; on all ranks.
        """
        state = self._state
        step = state.under_way = state.take_step()
        state.has_failed = True  # whatever is raised below
        response = self._respond(answer, error, step, place)
        try:
            if self.size == 1:
                decision = Decision(0.0, read_responses(response, 1))
            else:
                decision = self.rendezvous.decide(Proposal(what, step, response, wait_s, attachment))
        except Exception:
            state.under_way = None
            raise
        state.under_way = None  # an interrupt from here on does not concern this step
        self._nodes = decision.nodes or self._nodes
        num_others = decision.num_came - (decision.response_of(self.rank) is not None)
        state.last = LastStep(step, num_others, decision.failed, decision.in_tree)
        if not decision.failed:
            if step == 0:
                require_same_call(decision)
            require_same_step(decision)
        state.has_failed = decision.failed
        return decision

    def tell(
        self, what: str, report: T, on_report: Callable[[T], object] | None, *, some_listen: bool
    ) -> None:
        """Calls the caller's `on_report`; if it raises on one rank, all ranks raise.

        Args:
            what: Name of the call, for messages.
            report: The report.
            on_report: The function of this rank, or None.
            some_listen: Whether any rank has one; the same on all ranks.

        Raises:
            FastloadError: It raised on some rank.
        """
        if some_listen:
            with self.step(f"{what}: on_report"):
                if on_report is not None:
                    on_report(report)

    def acknowledge(self) -> None:
        """Ends the call on this rank, which has its last decision; never raises.

        Call it when a call has ended well; one that fails does so itself. A rank that hosts the store waits
        for the others.
        """
        last, self._state.last = self._state.last, None
        if last is not None:
            self.rendezvous.acknowledge(last)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Ends the call if the block raises: this rank leaves it, unless a step has raised on all ranks."""
        try:
            yield
        except BaseException as error:
            self.cache.clear()
            if isinstance(error, Exception) and self._state.has_failed:
                self.acknowledge()
            else:
                self.leave(error)
            raise

    @contextmanager
    def ending(self) -> Iterator[None]:
        """The block of the last steps of a call: as `together`, and then acknowledges the last one."""
        with self.together():
            yield
        self.acknowledge()

    # Bytes

    def leave_bytes(self, what: str, place: str, data: bytes) -> None:
        """Leaves bytes for one rank, which takes them with `take_bytes`, from the same place, once."""
        self.rendezvous.leave(what, f"{place}/{self.rank}", data, limit_s=self.grace_s)

    def show_bytes(self, what: str, place: str, data: bytes) -> None:
        """Leaves bytes for several ranks, which `take_bytes` and `keep` them, until the end of the call."""
        keys = self.rendezvous.leave(what, f"{place}/{self.rank}", data, limit_s=self.grace_s)
        self.rendezvous.delete_at_end(keys)

    def take_bytes(self, what: str, place: str, rank: int, *, keep: bool = False) -> bytes | None:
        """Returns the bytes that a rank has left; None if it has left none."""
        return self.rendezvous.take(what, f"{place}/{rank}", keep=keep, limit_s=self.grace_s)

    def take_shown(self, what: str, place: str, ranks: Iterable[int]) -> list[bytes]:
        """Returns the bytes that each of some ranks has shown.

        Raises:
            WorldError: Those of a rank are gone.
        """
        ranks = list(ranks)
        places = [f"{place}/{rank}" for rank in ranks]
        found = self.rendezvous.take_all(what, places, limit_s=self.grace_s)
        return [require_left(what, data, rank) for rank, data in zip(ranks, found, strict=True)]

    def tally(self, what: str, key: str, more: int) -> int:
        """Adds to a number that all ranks share until the end of the call, and returns it."""
        self.rendezvous.delete_at_end([key])
        return self.rendezvous.count(what, key, more)

    # Failures outside of an agreement

    def flag_failure(self) -> None:
        """Sets the failure flag, which the other ranks notice in any step."""
        self._flag.set()
        self.rendezvous.disconnect()

    def peer_failed(self) -> bool:
        """Whether a rank has failed; asks the store a few times a second at most."""
        return self._flag.is_set()

    def note_progress(self) -> None:
        """Notes that this rank makes progress; its next look at the flag shows it to the others."""
        self._flag.note_progress()

    def leave(self, error: BaseException) -> None:
        """Responds to what comes next with an error, since this rank leaves the call; never raises."""
        self._flag.assume()
        state = self._state
        if not state.has_left:
            state.has_left = True
            last, state.last = state.last, None
            steps = [state.under_way] if state.under_way is not None else []
            steps.append(state.take_step())
            self.rendezvous.withdraw(
                last,
                [(step, self._respond("", error, step)) for step in steps],
                at_once=not isinstance(error, Exception),
            )

    def await_work(self, work: Future[T], late: Callable[[], Exception | None]) -> T:
        """Waits for work of this rank, no longer than the other ranks continue.

        Args:
            work: The work.
            late: Returns the error to raise after the patience of the ranks; None waits on.

        Raises:
            Interrupted: Another rank failed.
        """
        await_done(work, give_up=self.peer_failed, limit_s=self.patience_s, late=late)
        self.note_progress()
        try:
            return work.result()
        finally:
            del work  # else error → traceback → frame → work → error would keep all their memory alive

    def _respond(self, answer: str, error: BaseException | None, step: int, place: str = "") -> str:
        """Returns this rank's response to a step, in the form of `responses`."""
        about: dict[str, Any] = {"error": None, "place": place}
        if error is not None:
            about, answer = {"error": to_wire(error, _ERROR_BYTES // self.size)}, ""
        if step == 0:
            about |= {"node": Each([self.node]), "call": self.rendezvous.call}
        return answer + write_response(self.rank, about)


def _place() -> str:
    """Returns where the caller's caller is in the code: its module, and the line."""
    frame = sys._getframe(2)
    return f"{frame.f_globals['__name__']}:{frame.f_lineno}"


# Decisions of rank 0


class Decisions:
    """Rank 0's decisions, which the other ranks read in the same order through the rendezvous store.

    Rank 0 posts them, perhaps ahead, and all ranks take them. It deletes decisions that all ranks have read:
    these count them in blocks. The last rank that closes deletes the rest, if the store stays.

    Args:
        world: The ranks.
        name: Of the decisions, in the store.
        what: They are about, for messages.
    """

    def __init__(self, world: World, name: str, what: str) -> None:
        self._world = world
        self._name = name
        self._what = what
        self._num_made = 0  # on rank 0 those that it has posted, on others those that they have taken
        self._posted: deque[Any] = deque()  # on rank 0, which takes them as well
        self._num_read_blocks = 0
        self._stale: list[str] = []

    def post(self, decision: Any) -> None:
        """Posts the next decision, a JSON value; on rank 0 only.

        Raises:
            PeerError: The store is gone.
        """
        world, number = self._world, self._num_made
        self._num_made += 1
        self._posted.append(decision)
        if world.size > 1:
            if number % _BLOCK == 0:
                self._look_for_stale(number // _BLOCK)
            forget, self._stale = self._stale[:_DELETED_AT_ONCE], self._stale[_DELETED_AT_ONCE:]
            world.rendezvous.post(self._what, self._key(number), json.dumps(decision), forget=forget)

    def take(self) -> Any:
        """Returns the next decision; rank 0 has posted it.

        Raises:
            PeerError: Rank 0 did not come to this call in time.
        """
        if self._world.rank == 0:
            return self._posted.popleft()
        number = self._num_made
        self._num_made += 1
        text = self._world.rendezvous.await_text(self._what, self._key(number), 0)
        if self._num_made % _BLOCK == 0:
            self._world.rendezvous.count(self._what, self._count_key(number // _BLOCK), 1)
        return json.loads(text)

    def close(self, *keys: str) -> None:
        """Ends the decisions on this rank; never raises.

        A store that one of the ranks hosts is left alone: it may be gone, and ends with that rank.

        Args:
            keys: Further keys in the store that no rank needs once all have closed.
        """
        if self._world.rendezvous.member.store_stays:
            begin, end = self._num_read_blocks * _BLOCK, self._num_made
            counters = map(self._count_key, range(self._num_read_blocks, -(-end // _BLOCK)))
            left = [*self._stale, *map(self._key, range(begin, end)), *counters, *keys]
            self._world.rendezvous.delete_with_last(
                f"{self._name}/closed", left if self._world.rank == 0 else None
            )

    def _look_for_stale(self, num_blocks: int) -> None:
        """Notes the blocks of decisions as stale that all ranks have read."""
        world = self._world
        while self._num_read_blocks < num_blocks:
            block = self._num_read_blocks
            counter = self._count_key(block)
            if world.rendezvous.count(self._what, counter, 0) < world.size - 1:
                return
            self._num_read_blocks += 1
            self._stale += map(self._key, range(block * _BLOCK, (block + 1) * _BLOCK))
            self._stale.append(counter)

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}"

    def _count_key(self, block: int) -> str:
        return f"{self._name}/read/{block}"
