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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
import xxhash

from fastload.errors import (
    CheckpointError,
    DeadlineExceeded,
    FastloadError,
    Interrupted,
    PeerError,
    WorldError,
    from_wire,
    to_wire,
)
from fastload.patience import within

__all__ = ["Outcome", "World", "initialize", "join"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_PIECE_BYTES = 4 << 20  # a TCPStore refuses values of more than 8 MiB
_FIRST_POLL_S = 0.0005
_LAST_POLL_S = 0.05
_ALARM_PERIOD_S = 0.2
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
        store_host: The member that hosts the rendezvous store, if one does.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None,
        store: dist.Store | None,
        timeout_s: float,
        store_host: int | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.host = socket.gethostname()
        self.group = group
        self.store = store
        self.timeout_s = timeout_s
        self.store_host = store_host
        self._hosts = {rank: self.host}
        self._step = 0
        self._num_pieces: dict[int, int] = {}
        self._store_is_lost: PeerError | None = None
        self._next_alarm_check = 0.0
        self._alarmed = False

    @property
    def grace_s(self) -> float:
        """How long, after a failure, the others get to say what they know."""
        return min(_MAX_GRACE_S, 0.25 * self.timeout_s)

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
        if self.store is None:
            return [Outcome(self.host, value, to_wire(error) if error is not None else None)]
        step, self._step = self._step, self._step + 1
        mine = self._answer(value, error)

        def ask() -> list[dict[str, Any]]:
            assert self.store is not None
            self.store.set(f"{step}/{self.rank}", mine)
            answers = self._verdict(what, step, wait_s)
            if self.rank == 0 and step >= 2:
                self._forget(step - 2)  # everyone who is here has read it
            return answers

        outcomes = [Outcome(**answer) for answer in self._ask(what, wait_s + 1.5 * self.grace_s, ask)]
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
        if self.store is None:
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
            return self._ask(what, self.patience_s, lambda: self._publish(step, data))

        try:
            pieces = self.agree(what, publish)[source]
        except PeerError as failed:
            cause = failed.failures.get(source)
            if isinstance(cause, CheckpointError):
                raise (spoiled or [cause])[0] from None  # the checkpoint is bad, not the rank
            raise
        finally:
            spoiled.clear()
        self._num_pieces[step] = pieces
        return self._ask(what, self.patience_s, lambda: self._collect(step, pieces))

    def raise_failures(self, what: str, outcomes: list[Outcome], own: BaseException | None = None) -> None:
        """Raises on every rank if an outcome is an error.

        The same fastload error on all ranks is raised as itself; otherwise all ranks raise one
        `PeerError` with each failing rank's cause, or `DeadlineExceeded` if waiting is all that failed.
        """
        failures = {rank: from_wire(o.error) for rank, o in enumerate(outcomes) if o.error is not None}
        if not failures:
            return
        causes_only = {rank: e for rank, e in failures.items() if not isinstance(e, Interrupted)}
        failures = causes_only or failures
        first = failures[min(failures)]
        same = len({(type(error), str(error)) for error in failures.values()}) == 1
        if same and len(failures) == self.size and (isinstance(first, FastloadError) or self.size == 1):
            raise own if own is not None else first
        causes = "; ".join(f"{self._label(rank)}: {_described(error)}" for rank, error in failures.items())
        raise PeerError(
            f"{what} failed on {len(failures)} of {self.size} ranks "
            f"(this is {self._label(self.rank)}): {causes}",
            failures,
        ) from own

    # Failures outside of an agreement

    def raise_alarm(self) -> None:
        """Tells the other ranks, wherever they are, that this one has failed."""
        self._alarmed = True
        if self.store is not None:
            self._tell({"alarm": str(self.rank)})

    def leave(self, error: BaseException) -> None:
        """Answers whatever comes next with an error, since this rank will not be there; never raises."""
        self._alarmed = True
        if self.store is not None:
            answer = self._answer(None, error)
            steps = {f"{step}/{self.rank}": answer for step in (self._step, self._step + 1)}
            self._tell({**steps, "alarm": str(self.rank)})

    def alarmed(self) -> bool:
        """Whether some rank has failed. Cheap: asks the store a few times a second at most."""
        if self.store is None or self._alarmed:
            return self._alarmed
        now = time.monotonic()
        if now >= self._next_alarm_check:
            self._next_alarm_check = now + min(_ALARM_PERIOD_S, self.grace_s / 4)
            store = self.store
            what = "watching the other ranks"
            self._alarmed = self._ask(what, self.patience_s, lambda: store.check(["alarm"]))
        return self._alarmed

    # Inside

    def _ask(self, what: str, limit_s: float, ask: Callable[[], T]) -> T:
        """Asks the store: a store whose host is stopped or cut off would keep the caller for ever."""
        if self._store_is_lost is not None:
            raise self._store_is_lost
        try:
            return within(limit_s, "the rendezvous store", ask)
        except (RuntimeError, DeadlineExceeded) as error:
            self._store_is_lost = self._lost_store(what, error)
        raise self._store_is_lost

    def _tell(self, values: dict[str, str]) -> None:
        """Leaves values in the store, if it is still there."""

        def tell() -> None:
            assert self.store is not None
            for key, value in values.items():
                self.store.set(key, value)

        try:
            self._ask("telling the other ranks", self.grace_s, tell)
        except PeerError as error:
            _log.debug("not told: %s", error)

    def _lost_store(self, what: str, error: Exception) -> PeerError:
        failures: dict[int, BaseException] = {}
        hint = "the launcher that hosted it has ended"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            hint = "rank 0 of the job, which hosts it, was killed, stopped or cut off"
            if self.store_host is not None:
                failures[self.store_host] = DeadlineExceeded("hosted the rendezvous store, which is gone")
        first_line = str(error).split("\n", 1)[0]
        return PeerError(f"{what}: the rendezvous store is gone: {hint} ({first_line})", failures)

    def _answer(self, value: Any, error: BaseException | None) -> str:
        wire = to_wire(error, _ERROR_BYTES // self.size) if error is not None else None
        return json.dumps({"host": self.host, "value": value, "error": wire})

    def _verdict(self, what: str, step: int, wait_s: float) -> list[dict[str, Any]]:
        """Returns the one list of answers that all ranks use: the first that anyone could publish.

        Rank 0 publishes as soon as all have answered. Where it does not, whoever runs out of patience
        first publishes in its place, so that even then all ranks see the same list.
        """
        assert self.store is not None
        everyone = [f"{step}/{rank}" for rank in range(self.size)]
        awaited = everyone if self.rank == 0 else [f"{step}/all"]
        present = self._poll(awaited, time.monotonic() + wait_s)
        if not self.store.check([f"{step}/all"]):
            if (self.rank == 0 or not present) and self.store.add(f"{step}/ticket", 1) == 1:
                self.store.set(f"{step}/all", json.dumps(self._answers(what, everyone, wait_s)))
            elif not self._poll([f"{step}/all"], time.monotonic() + self.grace_s):
                return self._answers(what, everyone, wait_s)  # whoever took the ticket died with it
        answers: list[dict[str, Any]] = json.loads(self.store.get(f"{step}/all"))
        return answers

    def _answers(self, what: str, keys: list[str], wait_s: float) -> list[dict[str, Any]]:
        assert self.store is not None
        if self.store.check(keys):
            return [json.loads(text) for text in self.store.multi_get(keys)]
        error = DeadlineExceeded(f"did not answer within {wait_s:.1f} s: killed, stopped, stuck or cut off")
        late = {"host": "", "value": None, "error": to_wire(error)}
        return [json.loads(self.store.get(key)) if self.store.check([key]) else late for key in keys]

    def _publish(self, step: int, data: bytes) -> int:
        assert self.store is not None
        pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
        for index, piece in enumerate(pieces):
            self.store.set(f"{step}/piece{index}", piece)  # type: ignore[arg-type]  # bytes are fine
        return len(pieces)

    def _collect(self, step: int, pieces: int) -> bytes:
        assert self.store is not None
        return b"".join(self.store.get(f"{step}/piece{index}") for index in range(pieces))

    def _poll(self, keys: list[str], until: float) -> bool:
        """Waits until all keys exist. Polls, since a blocking wait would lock the store for other threads."""
        assert self.store is not None
        pause = _FIRST_POLL_S
        while not self.store.check(keys):
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _LAST_POLL_S)
        return True

    def _forget(self, step: int) -> None:
        assert self.store is not None
        pieces = [f"piece{index}" for index in range(self._num_pieces.pop(step, 0))]
        for name in ("all", "ticket", *map(str, range(self.size)), *pieces):
            try:
                self.store.delete_key(f"{step}/{name}")
            except (RuntimeError, NotImplementedError):
                return  # a FileStore keeps its keys; they are small

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
    world = World(
        rank=rank,
        size=len(members),
        group=group,
        store=root,
        timeout_s=timeout_s,
        store_host=members.index(0) if 0 in members else None,
    )
    turn = world._ask("joining", timeout_s, lambda: root.add(turns, 1))
    world.store = dist.PrefixStore(f"fastload/{name}/{turn}", root)
    return world


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
