"""Communicators of fastload's own between devices: made by all of their ranks together, cached, and aborted.

The group's own ones carry no data, since the caller may be in the middle of a collective on them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastload.base.devices import give_back_streams, poll, take_stream, use_stream
from fastload.base.threads import Task, within
from fastload.comm.hosts import Peer
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, Interrupted

_NO_TIMEOUT = timedelta(days=7)  # of a collective: the load has its own deadlines
_MAX_CTAS = 8  # of each NCCL communicator: the kernels of all phases have to run at once
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_environment_lock = threading.Lock()


class Communicators:
    """The communicators of one load; cached afterwards for the next one.

    Args:
        world: The ranks.
        name: Key in the cache; the same on all ranks, and different for different members.
        members: Number of a communicator of this rank → its ranks, in order. Its number is the same on all
            of these. Communicators with equal numbers have different first ranks.
        device: This rank's accelerator, with its index.
        backend: The backend, as `comm.group.backend_of` returns it.
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
        self._made: CommunicatorSet | None = world.cache.take(self._name)

    def offer(self) -> Any:
        """Returns the token of the cached communicators, and rank 0's for new ones; see `links.Offering`."""
        token = self._made.token if self._made is not None else ""
        return {"token": token, "new": secrets.token_hex(8) if self._world.rank == 0 else ""}

    def renew(self) -> None:
        """Drops the cached communicators; see `links.Offering`."""
        made, self._made = self._made, None
        if made is not None:
            made.drop()

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        """Takes the offers of all ranks; see `links.Offering`. The backend finds its own routes."""
        if self._made is None:
            self._made = CommunicatorSet(offers[0]["new"])
        return ()

    def connect(self, give_up: Callable[[], bool]) -> Mapping[int, Any]:
        """Returns the communicators by number; makes each together with all of its ranks.

        Raises:
            Interrupted: Some rank did not come, or `give_up` returned True.
        """
        made, patience_s = self._made, self._world.patience_s
        assert made is not None
        if not made.by_number:
            try:
                within(patience_s, "connecting", partial(self._make, made), give_up=give_up)
            except (RuntimeError, DeadlineExceeded) as error:
                raise Interrupted(f"the ranks could not connect: {error}") from error
        return made.by_number

    def close(self, *, keep: bool) -> None:
        """Caches the communicators for the next load, or aborts them."""
        made, self._made = self._made, None
        if made is None:
            return
        if keep:
            self._world.cache.put(self._name, made, self._num_clears)
        else:
            made.drop()

    def _make(self, made: CommunicatorSet) -> None:
        store = self._world.store if self._world.store is not None else dist.HashStore()
        # A backend blocks the connection to the store while it waits for others, so it gets its own.
        store = store.clone() if hasattr(store, "clone") else store
        # In one order on all ranks, since each waits for the others.
        for number, members in sorted(self._members.items()):
            namespace = dist.PrefixStore(f"{self._backend}/{made.token}/{number}/{members[0]}", store)
            rank = members.index(self._world.rank)
            # What is made without all ranks waits for them, and cannot be ended meanwhile.
            _meet(namespace, len(members), self._world.patience_s)
            made.add(number, _make_backend(self._backend, namespace, rank, len(members), self._device))
        _use_once(made.by_number.values(), self._device, self._world.patience_s)


class CommunicatorSet:
    """Communicators that all ranks made together; see `comm.cache.CachedResource`.

    Args:
        token: Identifies them.

    Attributes:
        token: As given.
        by_number: The communicators, backends of torch; empty until they are made.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.by_number: dict[int, Any] = {}
        self._is_dropped = False

    def add(self, number: int, communicator: Any) -> None:
        """Adds a communicator; aborts it if nobody waits for it any more."""
        self.by_number[number] = communicator
        if self._is_dropped:
            self.drop()

    def drop(self) -> None:
        """Aborts them, since other ranks may never enter the collectives under way."""
        self._is_dropped = True
        communicators, self.by_number = self.by_number, {}
        if not threading.main_thread().is_alive():
            # The process ends, and would not wait for aborts, nor for them to abort themselves.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicators))
            return
        for communicator in communicators.values():
            # A thread each: an abort frees memory, and so waits for all kernels on the device, also for those
            # of other communicators, which end when these are aborted.
            with contextlib.suppress(RuntimeError):  # no more threads
                Task(partial(_abort, communicator), "fastload-down").start()

    def disown(self) -> None:
        """Does nothing: a forked child cannot use the device."""


def _abort(communicator: Any) -> None:
    with contextlib.suppress(RuntimeError):
        communicator.abort()


def _meet(store: Any, num_ranks: int, limit_s: float) -> None:
    """Waits until all ranks of a communicator have come.

    Raises:
        RuntimeError: Some rank has not come in time.
    """
    if store.add("come", 1) == num_ranks:
        store.set("all have come", "")
    store.wait(["all have come"], timedelta(seconds=limit_s))


def _use_once(communicators: Iterable[Any], device: torch.device, limit_s: float) -> None:
    """Runs a first operation on communicators.

    The first call waits until its communicator is ready, and cannot be ended meanwhile.

    Raises:
        RuntimeError: A backend failed.
        DeadlineExceeded: It took too long.
    """
    stream = take_stream(device)
    with torch.inference_mode(), use_stream(stream):
        nothing = torch.zeros(1, dtype=torch.uint8, device=device)
        for communicator in communicators:
            join_stream(communicator, broadcast(communicator, nothing, 0))
        poll(stream.record_event().query, "the first operation of a communicator", limit_s)
    give_back_streams([stream])


def broadcast(communicator: Any, data: Tensor, root: int) -> Any:
    """Broadcasts a tensor from a member of a communicator, by its number there; returns its work."""
    options = _on_this_stream(dist.BroadcastOptions())
    options.rootRank = root
    return communicator.broadcast([data], options)


def all_gather(communicator: Any, part: Tensor, into: Tensor) -> Any:
    """Gathers equally long tensors of all members, in their order; returns its work."""
    return communicator._allgather_base(into, part, _on_this_stream(dist.distributed_c10d.AllgatherOptions()))


def _on_this_stream(options: Any) -> Any:
    """Has an operation run on the current stream, if torch is 2.8 or newer; else it runs on the backend's."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def join_stream(communicator: Any, work: Any) -> None:
    """Has the current stream wait for a work of a communicator, unless it runs there and so is None.

    `Work.wait` would block the host: it does without a watchdog.
    """
    if work is None:
        return
    if communicator.name() == "nccl" and _TORCH >= (2, 9):  # without a warning
        work.block_current_stream()
    else:
        work.synchronize()


def _make_backend(name: str, store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Makes a communicator outside of torch's registry of process groups, and connects it if the backend can.

    It has no watchdog, which would end the process when another rank aborts, or have the group of the caller
    end it minutes later: fastload reports the failure itself.

    Args:
        name: The backend, as `comm.group.backend_of` returns it.
        store: A namespace that no other communicator uses.
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
    if _TORCH >= (2, 10):  # before, such communicators hang at random (pytorch issues 153960, 169484)
        options.config.blocking = 0  # else a call that waits for a missing rank cannot be aborted
    options._timeout = _NO_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _make_xccl(name: str, store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupXCCL.Options()
    options._timeout = _NO_TIMEOUT
    return dist.ProcessGroupXCCL(store, rank, size, options)


def _make_registered(name: str, store: Any, rank: int, size: int) -> Any:
    """Makes a backend that was registered with `torch.distributed.Backend.register_backend`."""
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
    """Disables torch's watchdog for backends made meanwhile, which read the environment."""
    settings = {"ASYNC_ERROR_HANDLING": "0"}
    if name != "xccl":  # whose `wait` fails at once then
        settings["BLOCKING_WAIT"] = "1"
    wanted = {f"TORCH_{name.upper()}_{setting}": value for setting, value in settings.items()}
    with _environment_lock:
        before = {variable: os.environ.get(variable) for variable in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for variable, value in before.items():
                os.environ.pop(variable)
                if value is not None:
                    os.environ[variable] = value
