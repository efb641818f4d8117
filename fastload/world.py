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
    DeadlineExceeded,
    FastloadError,
    Interrupted,
    PeerError,
    WorldError,
    from_wire,
    to_wire,
)

__all__ = ["Outcome", "World", "initialize", "join"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_PIECE_BYTES = 4 << 20  # a TCPStore refuses values of more than 8 MiB
_FIRST_POLL_S = 0.0005
_LAST_POLL_S = 0.05
_ALARM_PERIOD_S = 0.2
_MAX_GRACE_S = 5.0


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
    ) -> None:
        self.rank = rank
        self.size = size
        self.host = socket.gethostname()
        self.group = group
        self.store = store
        self.timeout_s = timeout_s
        self._hosts = {rank: self.host}
        self._step = 0
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
        mine = {"host": self.host, "value": value, "error": to_wire(error) if error is not None else None}
        if self.store is None:
            return [Outcome(**mine)]
        step, self._step = self._step, self._step + 1
        with self._lost_store(what):
            self.store.set(f"{step}/{self.rank}", json.dumps(mine))
            answers = self._verdict(what, step, wait_s)
            if self.rank == 0 and step >= 2:
                self._forget(step - 2)  # everyone who is here has read it
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
        outcomes = self.gather(what, value, error, wait_s=self.patience_s)
        self.raise_failures(what, outcomes, error)
        return [outcome.value for outcome in outcomes]

    def share(self, what: str, source: int, make: Callable[[], bytes]) -> bytes:
        """Makes bytes on one rank and returns them on all, or raises there what making them raised."""
        if self.store is None:
            return make()
        step, self._step = self._step, self._step + 1
        with self._lost_store(what):
            if self.rank == source:
                return self._publish(step, make)
            head = json.loads(self._wait_for(f"{step}/head", what, source))
            if head["error"] is not None:
                raise from_wire(head["error"])
            return b"".join(self.store.get(f"{step}/{piece}") for piece in range(head["pieces"]))

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

    def corner(self, name: str) -> dist.Store:
        """Returns a part of the store that nothing has written to; another one after each agreement."""
        assert self.store is not None
        return dist.PrefixStore(f"{name}/{self._step}", self.store)

    # Failures outside of an agreement

    def raise_alarm(self) -> None:
        """Tells the other ranks, wherever they are, that this one has failed."""
        self._alarmed = True
        if self.store is not None:
            try:
                self.store.set("alarm", str(self.rank))
            except RuntimeError as error:
                _log.debug("no alarm: %s", error)

    def alarmed(self) -> bool:
        """Whether some rank has failed. Cheap: asks the store a few times a second at most."""
        if self.store is None or self._alarmed:
            return self._alarmed
        now = time.monotonic()
        if now >= self._next_alarm_check:
            self._next_alarm_check = now + _ALARM_PERIOD_S
            with self._lost_store("watching the other ranks"):
                self._alarmed = self.store.check(["alarm"])
        return self._alarmed

    # Inside

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

    def _publish(self, step: int, make: Callable[[], bytes]) -> bytes:
        assert self.store is not None
        try:
            data = make()
        except Exception as error:
            self.store.set(f"{step}/head", json.dumps({"error": to_wire(error)}))
            raise
        pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
        for index, piece in enumerate(pieces):
            self.store.set(f"{step}/{index}", piece)  # type: ignore[arg-type]  # bytes are fine
        self.store.set(f"{step}/head", json.dumps({"error": None, "pieces": len(pieces)}))
        return data

    def _wait_for(self, key: str, what: str, source: int) -> bytes:
        assert self.store is not None
        if not self._poll([key], time.monotonic() + self.patience_s):
            error = DeadlineExceeded(
                f"did not answer within {self.patience_s:.1f} s: killed, stopped, stuck or cut off"
            )
            raise PeerError(f"{what} failed: {self._label(source)}: {error}", {source: error})
        return bytes(self.store.get(key))

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
        for name in ("all", "ticket", "head", *map(str, range(self.size))):
            try:
                self.store.delete_key(f"{step}/{name}")
            except (RuntimeError, NotImplementedError):
                return  # a FileStore keeps its keys; they are small

    def _label(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}" if rank in self._hosts else f"rank {rank}"

    def _lost_store(self, what: str) -> _LostStore:
        return _LostStore(what)


class _LostStore:
    """Turns the store's own errors into one that says what a lost store means."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, FastloadError):
            failures: dict[int, BaseException] = {}
            hint = "the launcher that hosted it has ended"
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                hint = "rank 0 of the job, which hosts it, was killed or cut off"
                failures[0] = DeadlineExceeded("hosted the rendezvous store, which does not answer any more")
            raise PeerError(
                f"{self._what}: the rendezvous store is gone: {hint} ({error})", failures
            ) from error


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
    turn = root.add(f"fastload/{name}/{rank}/turns", 1)
    store = dist.PrefixStore(f"fastload/{name}/{turn}", root)
    return World(rank=rank, size=len(members), group=group, store=store, timeout_s=timeout_s)


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
