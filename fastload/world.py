"""Ranks and their agreement: who is here, what they agree on, and how they learn of a failure.

Everything here goes through the rendezvous store of torch.distributed, not through collectives: a
store can say which rank is missing, works the same under every backend, and stays usable when a
peer has died in the middle of a collective.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
import xxhash

from fastload.errors import (
    CheckpointError,
    FastloadError,
    Interrupted,
    PeerError,
    WorldError,
    from_wire,
    to_wire,
)
from fastload.rendezvous import Rendezvous

__all__ = ["Outcome", "World", "initialize", "join"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_ALARM_PERIOD_S = 0.2
_PULSE_PERIOD_S = 1.0
_MIN_GRACE_S = 0.5
_MAX_GRACE_S = 5.0
_ERROR_BYTES = 2 << 20  # of all ranks together, which one value has to hold


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank brought to an agreement: a value, or the error that stopped it."""

    host: str
    value: Any
    error: dict[str, Any] | None


class World:
    """The ranks that load together, seen from one of them. One process alone is a world of 1.

    All members make the same calls in the same order, as with collectives.

    Attributes:
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        host: Name of this host.
        group: The caller's process group, or None for a world of 1.
        store: A corner of the rendezvous store that is this world's own, or None for a world of 1.
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
    ) -> None:
        self.rank = rank
        self.size = size
        self.host = socket.gethostname()
        self.group = group
        self.store = store
        self.timeout_s = timeout_s
        self._hosts = {rank: self.host}
        self._step = 0
        self._rendezvous = rendezvous
        self._next_alarm_check = 0.0
        self._alarmed = False
        self._moved = False
        self._next_pulse = 0.0

    @property
    def grace_s(self) -> float:
        """How long, after a failure, the others get to say what they know."""
        return min(_MAX_GRACE_S, max(0.25 * self.timeout_s, min(0.5 * self.timeout_s, _MIN_GRACE_S)))

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
        if self._rendezvous is None:
            return [Outcome(self.host, value, to_wire(error) if error is not None else None)]
        step, self._step = self._step, self._step + 1
        mine = self._answer(value, error)
        answers = self._rendezvous.collect(what, step, mine, wait_s=wait_s, grace_s=self.grace_s)
        outcomes = [Outcome(**answer) for answer in answers]
        self._hosts.update({rank: outcome.host for rank, outcome in enumerate(outcomes) if outcome.host})
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
        if (rendezvous := self._rendezvous) is None:
            return make()
        step, spoiled = self._step, list[CheckpointError]()

        def publish() -> int:
            if self.rank != source:
                return 0
            try:
                data = make()
            except CheckpointError as error:
                spoiled.append(error)
                raise
            return rendezvous.put_bytes(what, step, data, limit_s=self.patience_s)

        try:
            pieces = self.agree(what, publish)[source]
        except PeerError as failed:
            cause = failed.failures.get(source)
            if isinstance(cause, CheckpointError):
                raise (spoiled or [cause])[0] from None  # the checkpoint is bad, not the rank
            raise
        finally:
            spoiled.clear()
        return rendezvous.get_bytes(what, step, pieces, limit_s=self.patience_s)

    def clock_offset_s(self, hosts: Sequence[str]) -> float | None:
        """Returns what takes this rank's `time.perf_counter` to rank 0's; None if that cannot be said.

        Args:
            hosts: Host of each rank; on one host all clocks are the same.
        """
        if self._rendezvous is None or len(set(hosts)) == 1:
            return 0.0
        step, self._step = self._step, self._step + 1
        leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
        return self._rendezvous.compare_clocks(
            "comparing clocks", step, leaders, hosts.index(hosts[self.rank]), limit_s=self.patience_s
        )

    def leave_bytes(self, what: str, place: str, data: bytes) -> None:
        """Leaves bytes for another rank, which takes them with `take_bytes`, from the same place, once."""
        if self._rendezvous is not None:
            self._rendezvous.leave(what, f"{place}/{self.rank}", data, limit_s=self.grace_s)

    def take_bytes(self, what: str, place: str, rank: int) -> bytes | None:
        """Returns what a rank has left; None if it has left nothing."""
        if self._rendezvous is None:
            return None
        return self._rendezvous.take(what, f"{place}/{rank}", limit_s=self.grace_s)

    def raise_failures(self, what: str, outcomes: list[Outcome], own: BaseException | None = None) -> None:
        """Raises on every rank if an outcome is an error.

        The same fastload error on all ranks is raised as itself; otherwise all ranks raise one
        `PeerError` with each failing rank's cause.
        """
        failures = {rank: from_wire(o.error) for rank, o in enumerate(outcomes) if o.error is not None}
        if not failures:
            return
        causes_only = {rank: e for rank, e in failures.items() if not isinstance(e, Interrupted)}
        failures = causes_only or failures
        first = failures[min(failures)]
        same = len({(type(error), str(error)) for error in failures.values()}) == 1
        if same and len(failures) == self.size and (isinstance(first, FastloadError) or self.size == 1):
            try:
                raise own if own is not None else first
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

    def corner(self, name: str) -> dist.Store:
        """Returns a part of the store that nothing has written to; another one after each agreement."""
        assert self.store is not None
        return dist.PrefixStore(f"{name}/{self._step}", self.store)

    # Failures outside of an agreement

    def raise_alarm(self) -> None:
        """Tells the other ranks, wherever they are, that this one has failed."""
        self._alarmed = True
        if self._rendezvous is not None:
            self._rendezvous.tell({"alarm": str(self.rank)}, limit_s=self.grace_s)

    def leave(self, error: BaseException) -> None:
        """Answers whatever comes next with an error, since this rank will not be there; never raises."""
        self._alarmed = True
        if self._rendezvous is not None:
            answer = self._answer(None, error)
            steps = {f"{step}/{self.rank}": answer for step in (self._step, self._step + 1)}
            self._rendezvous.tell({**steps, "alarm": str(self.rank)}, limit_s=self.grace_s)

    def moved(self) -> None:
        """Notes that this rank gets on; the others learn of it with the next look for an alarm."""
        self._moved = True

    def alarmed(self) -> bool:
        """Whether some rank has failed. Cheap: asks the store a few times a second at most."""
        if self._rendezvous is None or self._alarmed:
            return self._alarmed
        now = time.monotonic()
        if now >= self._next_alarm_check:
            self._next_alarm_check = now + min(_ALARM_PERIOD_S, self.grace_s / 4)
            alive = self._moved and now >= self._next_pulse
            if alive:
                self._moved, self._next_pulse = False, now + min(_PULSE_PERIOD_S, self.grace_s / 4)
            self._alarmed = self._rendezvous.watch("alarm", alive=alive, limit_s=self.patience_s)
        return self._alarmed

    # Inside

    def _answer(self, value: Any, error: BaseException | None) -> str:
        wire = to_wire(error, _ERROR_BYTES // self.size) if error is not None else None
        return json.dumps({"host": self.host, "value": value, "error": wire})

    def _label(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}" if rank in self._hosts else f"rank {rank}"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def join(process_group: Any = None, *, timeout_s: float) -> World:
    """Forms the world of the ranks of a group; without torch.distributed it is this process alone.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or None for the default group.
        timeout_s: Longest wait without progress, in seconds.

    Raises:
        WorldError: This process is not in the group, or the mesh has more than one dimension.
    """
    group = _as_group(process_group)
    if group is None or dist.get_world_size(group) == 1:
        return World(rank=0, size=1, group=group, store=None, timeout_s=timeout_s)
    members = dist.get_process_group_ranks(group)
    root = dist.distributed_c10d._get_default_store()
    name = xxhash.xxh3_64_hexdigest(json.dumps(members).encode())
    rank = dist.get_rank(group)
    # Counting in the store, not in this process, stays right when torch.distributed is initialized anew.
    turns = f"fastload/{name}/{rank}/turns"
    knows = _fate_of_store(members)
    whole = Rendezvous(root, rank=rank, size=len(members), **knows)
    turn = whole.ask("joining the other ranks", timeout_s, lambda: root.add(turns, 1))
    store = dist.PrefixStore(f"fastload/{name}/{turn}", root)
    rendezvous = Rendezvous(store, rank=rank, size=len(members), **knows)
    return World(
        rank=rank, size=len(members), group=group, store=store, timeout_s=timeout_s, rendezvous=rendezvous
    )


def _fate_of_store(members: list[int]) -> dict[str, Any]:
    """Says who takes the rendezvous store along when it goes: the launcher, or rank 0 of the whole job."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {"host": None, "if_lost": "the launcher that hosted it has ended"}
    return {
        "host": members.index(0) if 0 in members else None,
        "if_lost": "rank 0 of the job, which hosts it, was killed, stopped or cut off",
    }


def initialize(device: str = "cpu") -> tuple[int, str]:
    """Joins the job that torchrun describes in the environment; without one, does nothing.

    Args:
        device: Where tensors will go. ``cuda`` becomes the device of this rank's local rank.

    Returns:
        This process's rank, 0 without a job, and the device.
    """
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 0, device
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
    return dist.get_rank(), device


def _as_group(process_group: Any) -> dist.ProcessGroup | None:
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise WorldError("process_group= is given but torch.distributed is not initialized")
        return None
    group: Any = process_group if process_group is not None else dist.group.WORLD
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise WorldError(
                f"process_group= is a DeviceMesh of {group.ndim} dimensions: pass one, such as mesh['dp']"
            )
        group = group.get_group()
    if dist.get_rank(group) < 0:
        raise WorldError(f"rank {dist.get_rank()} is not a member of process_group=")
    return group  # type: ignore[no-any-return]
