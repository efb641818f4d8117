"""What exchanges between devices stand on: communicators of their own, and a thread that waits for events."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastload.base.devices import use_stream
from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import background, within
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.transfer.transport import TICK_S, Round

__all__ = ["Communicators", "Endings"]

_NO_TIMEOUT = timedelta(days=7)  # of a collective: the load has its own deadlines
_MAX_CTAS = 8  # of each NCCL communicator: those of all phases have to run at once
_environment_lock = threading.Lock()


class Communicators:
    """Some that one load uses, made by its ranks.

    Args:
        world: The ranks.
        name: Under which they are kept; the same on all ranks, and other for other members.
        members: The ranks of each one that this rank is in, in order, by its number. All ranks of it know it
            by the same number, and no others of this number have the same first rank.
        device: This rank's accelerator, with its number.
        backend: What moves data between the devices, as `open_transport.backend_of` names it.
    """

    def __init__(
        self,
        world: World,
        name: str,
        members: Mapping[int, Sequence[int]],
        device: torch.device,
        backend: str,
    ) -> None:
        self._world = world
        self._members = members
        self._device = device
        self._num_clears = world.cache.num_clears
        self._backend = backend
        self._name = f"{backend} {name} {device}"
        self._made: _Made | None = world.cache.take(self._name)

    def offer(self) -> Any:
        """Says which ones this rank has; see `Transport.offer`."""
        draw = secrets.token_hex(8) if self._world.rank == 0 else ""
        return {"token": self._made.token if self._made is not None else "", "draw": draw}

    def renew(self) -> None:
        """Drops those that were kept; see `Transport.renew`."""
        made, self._made = self._made, None
        if made is not None:
            made.drop()

    def accept(self, offers: Sequence[Any]) -> None:
        """Learns what the others have offered; see `Transport.accept`."""
        if self._made is None:
            self._made = _Made(offers[0]["draw"])

    def meet(self, give_up: Callable[[], bool]) -> Mapping[int, Any]:
        """Returns them by number; the first time all ranks of each have to come.

        Raises:
            Interrupted: Some rank did not come, or `give_up` said so.
        """
        assert self._made is not None
        if not self._made.groups:
            try:
                self._made.groups = within(self._world.patience_s, "connecting", self._make, give_up=give_up)
            except (RuntimeError, DeadlineExceeded) as error:
                raise Interrupted(f"the ranks could not connect: {error}") from error
        return self._made.groups

    def close(self, *, keep: bool) -> None:
        """Leaves them to the next load, or ends them, with what is under way on them."""
        made, self._made = self._made, None
        if made is None:
            return
        if keep:
            self._world.cache.put(self._name, made, self._num_clears)
        else:
            made.drop()

    def _make(self) -> dict[int, Any]:
        assert self._made is not None
        store = self._world.store if self._world.store is not None else dist.HashStore()
        # A backend waits for the others inside of the store's connection, which is not to be ours.
        store = store.clone() if hasattr(store, "clone") else store
        groups: dict[int, Any] = {}
        for number, members in sorted(
            self._members.items()
        ):  # in one order on all ranks: each waits for others
            meeting = dist.PrefixStore(f"{self._backend}/{self._made.token}/{number}/{members[0]}", store)
            place = members.index(self._world.rank)
            groups[number] = _make_backend(self._backend, meeting, place, len(members), self._device)
        return groups


class _Made:
    """Some that all ranks have made together; see `comm.cache.CachedResource`.

    Args:
        token: Names them.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.groups: dict[int, Any] = {}

    def drop(self) -> None:
        """Ends them, and what is under way on them, which other ranks may never enter."""
        groups, self.groups = self.groups, {}

        def abort() -> None:
            for group in groups.values():
                with contextlib.suppress(RuntimeError):
                    group.abort()

        try:
            background(abort, "fastload-down").start()
        except RuntimeError:  # at the end of the process
            abort()

    def disown(self) -> None:
        """A forked child has no use for them, nor for the device."""


def _make_backend(name: str, store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Makes a communicator of fastload's own, outside of torch's registry of process groups.

    Connects at once where the backend can. Its watchdog does not end the process when another rank aborts:
    fastload reports the failure itself.

    Args:
        name: The backend, as `open_transport.backend_of` returns it.
        store: Where its members meet; no other communicator uses it.
        rank: This rank's number among the members.
        size: Number of members.
        device: This rank's accelerator.

    Raises:
        RuntimeError: The backend failed.
    """
    with _without_watchdog(name):
        backend = _MAKERS.get(name, _make_registered)(name, store, rank, size)
    backend.eager_connect_single_device(device)
    return backend


def _make_nccl(name: str, store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MAX_CTAS
    options.config.blocking = 0  # else a call that waits for a rank that never comes cannot be aborted
    options._timeout = _NO_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _make_xccl(name: str, store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupXCCL.Options()
    options._timeout = _NO_TIMEOUT
    return dist.ProcessGroupXCCL(store, rank, size, options)


def _make_registered(name: str, store: Any, rank: int, size: int) -> Any:
    """Makes a backend that somebody registered with `torch.distributed.Backend.register_backend`."""
    plugin = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, _NO_TIMEOUT)
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout = _NO_TIMEOUT
    options.group_id = f"fastload {name} {rank}/{size}"
    options.global_ranks_in_group = []
    return plugin.creator_fn(options, None)


_MAKERS: Mapping[str, Callable[[str, Any, int, int], Any]] = {"nccl": _make_nccl, "xccl": _make_xccl}


@contextmanager
def _without_watchdog(name: str) -> Iterator[None]:
    """Has torch's watchdog leave the process alone; read from the environment as a backend is made."""
    variable = f"TORCH_{name.upper()}_ASYNC_ERROR_HANDLING"
    with _environment_lock:
        before = os.environ.get(variable)
        os.environ[variable] = "0"
        try:
            yield
        finally:
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before


_Running = tuple[Round, torch.Event, Callable[[], None]]


class Endings:
    """A thread that waits for the rounds on a device, one after the other.

    Args:
        device: This rank's accelerator, with its number.
        watch: Stopped when a round is here.
    """

    def __init__(self, device: torch.device, watch: Stopwatch) -> None:
        self._watch = watch
        self._broke = False
        self._is_closed = False
        self._stream = torch.Stream(device)
        self._running: queue.SimpleQueue[_Running | None] = queue.SimpleQueue()
        self._thread = background(self._wait_all, "fastload-events")

    def begin(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def follow(self, work: Round, ended: torch.Event, note: Callable[[], None]) -> None:
        """Has a round end as soon as an event has come.

        Args:
            work: The round.
            ended: Recorded after all that belongs to it, unless it broke.
            note: Called then, unless it broke.
        """
        self._running.put((work, ended, note))

    def close(self) -> bool:
        """Ends the thread; returns whether all rounds have ended well. Those that have not are given up."""
        self._is_closed = True
        if self._thread.is_alive():
            self._running.put(None)
            self._thread.join(2 * TICK_S)
        return not self._broke and not self._thread.is_alive()

    def _wait_all(self) -> None:
        # A new thread is on the default stream of the first device, both of which others use.
        with torch.inference_mode(), use_stream(self._stream):
            while (running := self._running.get()) is not None:
                self._wait(*running)

    def _wait(self, work: Round, ended: torch.Event, note: Callable[[], None]) -> None:
        try:
            while work.error is None and not ended.query():
                if self._is_closed:  # a rank that is gone lets it never come
                    raise RuntimeError("the load ended before the round did")
                time.sleep(0.0002)  # a blocking wait could not be abandoned
            if work.error is None:
                note()
        except RuntimeError as error:  # of any kernel before it
            work.broke(error)
        self._broke |= work.error is not None
        self._watch.stop(work.began, round=work.index)
        work.done.set()
