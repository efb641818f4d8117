"""The transports between devices: the group's backend, on communicators and streams of fastload's own.

`DeviceTransport` serves plans in which all ranks request the same bytes. Chunks are in adjacent slots and
move along the axes of a grid. `RoutedDeviceTransport` serves the other plans, with messages among few groups.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from fastload.base.devices import copy_async, use_stream
from fastload.base.memory import allocate
from fastload.base.threads import Task, Workers, within
from fastload.base.trace import Stopwatch
from fastload.comm.hosts import Peer
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.transfer.messages import Grid, Message, Move, Ranks, is_gather
from fastload.transfer.routed_plan import RoutedPlan
from fastload.transfer.transport import FAILED, TICK_S, Delivery, OwnChunk, Round, Slots, Transport

_NO_TIMEOUT = timedelta(days=7)  # of a collective: the load has its own deadlines
_MAX_CTAS = 8  # of each NCCL communicator: the kernels of all phases have to run at once
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

    def accept(self, offers: Sequence[Any]) -> None:
        """Takes the offers of all ranks; see `links.Offering`."""
        if self._made is None:
            self._made = CommunicatorSet(offers[0]["new"])

    def connect(self, give_up: Callable[[], bool]) -> Mapping[int, Any]:
        """Returns the communicators by number; makes each together with all of its ranks.

        Raises:
            Interrupted: Some rank did not come, or `give_up` returned True.
        """
        assert self._made is not None
        if not self._made.groups:
            try:
                self._made.groups = within(self._world.patience_s, "connecting", self._make, give_up=give_up)
            except (RuntimeError, DeadlineExceeded) as error:
                raise Interrupted(f"the ranks could not connect: {error}") from error
        return self._made.groups

    def close(self, *, keep: bool) -> None:
        """Caches the communicators for the next load, or aborts them."""
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
        # A backend blocks the connection to the store while it waits for others, so it gets its own.
        store = store.clone() if hasattr(store, "clone") else store
        groups: dict[int, Any] = {}
        # In one order on all ranks, since each waits for the others.
        for number, members in sorted(self._members.items()):
            namespace = dist.PrefixStore(f"{self._backend}/{self._made.token}/{number}/{members[0]}", store)
            rank = members.index(self._world.rank)
            groups[number] = _make_backend(self._backend, namespace, rank, len(members), self._device)
        return groups


class CommunicatorSet:
    """Communicators that all ranks made together; see `comm.cache.CachedResource`.

    Args:
        token: Identifies them.

    Attributes:
        token: As given.
        groups: The backend of each communicator, by number; empty until they are made.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.groups: dict[int, Any] = {}

    def drop(self) -> None:
        """Aborts them, since other ranks may never enter the collectives under way."""
        groups, self.groups = self.groups, {}

        def abort() -> None:
            for group in groups.values():
                with contextlib.suppress(RuntimeError):
                    group.abort()

        try:
            Task(abort, "fastload-down").start()
        except RuntimeError:  # at the end of the process
            abort()

    def disown(self) -> None:
        """Does nothing: a forked child cannot use the device."""


def _make_backend(name: str, store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Makes a communicator outside of torch's registry of process groups, and connects it if the backend can.

    Its watchdog does not end the process when another rank aborts: fastload reports the failure itself.

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


class RoundEvents:
    """A thread that waits for the events at the ends of rounds, one after the other.

    Args:
        device: This rank's accelerator, with its index.
        watch: Stopped when a round has ended.
    """

    def __init__(self, device: torch.device, watch: Stopwatch) -> None:
        self._watch = watch
        self._broke = False
        self._is_closed = False
        self._stream = torch.Stream(device)
        self._thread = Workers(1, "fastload-events")

    def follow(self, work: Round, ended: torch.Event, note: Callable[[], None]) -> None:
        """Ends a round after an event.

        Args:
            work: The round.
            ended: Recorded after all kernels of the round, unless it broke.
            note: Called then, unless it broke.
        """
        self._thread.submit(partial(self._wait, work, ended, note))

    def close(self) -> bool:
        """Ends the thread and abandons rounds; returns whether all of them had ended without an error."""
        self._is_closed = True
        return self._thread.close(wait_s=2 * TICK_S) and not self._broke

    def _wait(self, work: Round, ended: torch.Event, note: Callable[[], None]) -> None:
        try:
            # A new thread starts on the default stream of the first device, which other code uses.
            with torch.inference_mode(), use_stream(self._stream):
                while work.error is None and not ended.query():
                    if self._is_closed:  # it may never come, if a rank is gone
                        raise RuntimeError("the load ended before the round did")
                    time.sleep(0.0002)  # a blocking wait could not be abandoned
                if work.error is None:
                    note()
        except RuntimeError as error:  # of any earlier kernel
            work.broke(error)
        self._broke |= work.error is not None
        self._watch.stop(work.began, round=work.index)
        work.done.set()


class _BackendTransport(Transport):
    """A transport by a backend between devices, which does not count `bytes_in`.

    Args:
        name: For the report.
        world: The ranks.
        device: This rank's accelerator, with its index.
        communicators: The communicators that carry the rounds.
    """

    def __init__(self, name: str, world: World, device: torch.device, communicators: Communicators) -> None:
        super().__init__(name, world.rank, device, pinned=True)
        self._communicators = communicators
        self._events = RoundEvents(device, self.watch)

    def offer(self) -> Any:
        return self._communicators.offer()

    def renew(self) -> None:
        self._communicators.renew()

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        self._communicators.accept(offers)
        return ()  # the backend finds its own routes

    def close(self) -> None:
        self._communicators.close(keep=self._events.close())
        super().close()


class DeviceTransport(_BackendTransport):
    """Collectives on device buffers.

    Each axis of the grid of ranks has a communicator. The group's own one is never used, since the caller may
    be in the middle of a collective on it.

    Args:
        world: The ranks.
        device: This rank's accelerator, with its index.
        backend: The backend, as `comm.group.backend_of` returns it.
        hosts: Host of each rank.
    """

    def __init__(self, world: World, device: torch.device, backend: str, hosts: Sequence[str]) -> None:
        self._grid = Grid.of(hosts)
        axes = {phase: self._grid.axis(world.rank, phase) for phase in range(self._grid.num_phases)}
        members = {phase: ranks for phase, ranks in axes.items() if len(ranks) > 1}
        communicators = Communicators(world, f"grid {self._grid.dims}", members, device, backend)
        super().__init__(backend, world, device, communicators)
        # One for each phase, so that rounds in different phases overlap.
        self._streams = [torch.Stream(device) for _ in range(self._grid.num_phases)]
        self._last = self._streams[0]
        self._statuses: list[Tensor] = []
        self._num_started = 0
        self._broadcast: GridBroadcast | None = None

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        found = self._communicators.connect(give_up)
        groups = [found.get(phase) for phase in range(self._grid.num_phases)]
        self._broadcast = GridBroadcast(self._grid, self._rank, groups, self._in_phase)

    def allocate(self, nbytes: int) -> None:
        buffer = allocate((nbytes,), torch.uint8, self.device)
        # Allocated here: a rank that ran out of memory in a round would leave the others waiting.
        statuses = allocate((len(self._grid.ranks),), torch.uint8, self.device)
        for stream in self._streams:
            # The caller's kernels may still use the memory, and an abandoned load's kernels after this one.
            stream.wait_stream(torch.accelerator.current_stream(self.device))
            buffer.record_stream(stream)
            statuses.record_stream(stream)
        self._statuses.append(statuses)
        self._buffers.append(buffer)

    def start(self, work: Round, status: int) -> None:
        work.began = self.watch.start()
        ended = torch.Event(self.device)
        assert work.slots is not None, "made for this transport"
        statuses = self._statuses[self._num_started % len(self._statuses)][: len(work.slots.each)]
        self._num_started += 1
        try:
            self._last = self._streams[0]
            # Tensors that the caller allocated in inference mode cannot be written in another mode.
            with torch.inference_mode(), use_stream(self._last):
                self._run(work.slots, work.own, status, statuses)
                ended.record(self._last)
        except (RuntimeError, MemoryError) as error:
            work.broke(error)
        work.started.set()
        self._events.follow(work, ended, partial(_note, work, tuple(work.slots.each), statuses))

    def _run(self, slots: Slots, own: OwnChunk | None, status: int, statuses: Tensor) -> None:
        """Sends chunks, and one status of each reader, to all ranks."""
        assert self._broadcast is not None
        readers = tuple(slots.each)
        statuses.zero_()
        if own is not None:
            (chunk,) = own.memory
            copy_async(chunk, slots.each[self._rank][: chunk.numel()])
            statuses[readers.index(self._rank)].fill_(status)
        self._broadcast.run(readers, slots.memory, statuses)

    @contextmanager
    def _in_phase(self, phase: int) -> Iterator[None]:
        """Queues kernels after earlier phases of this round, and next to other phases of other rounds."""
        self._streams[phase].wait_stream(self._last)
        self._last = self._streams[phase]
        with use_stream(self._last):
            yield


def _note(work: Round, readers: Sequence[int], statuses: Tensor) -> None:
    """Notes which chunks of a round could not be read.

    Args:
        work: The round, which has ended.
        readers: Its readers.
        statuses: Status of each of them, (readers,), on the device.
    """
    found = zip(readers, statuses.tolist(), strict=True)
    work.statuses = {rank: status for rank, status in found if status}


_NUM_KNOWN = 1024  # windows of readers whose moves are cached


class GridBroadcast:
    """Broadcasts to all ranks along the axes of a grid.

    Args:
        grid: The grid of all ranks.
        rank: This rank.
        groups: The backend of a process group for its axis in each phase, in the order of `Grid.axis`; None
            where it is alone.
        in_phase: Returns a context for the collectives of a phase, such as a stream of their own.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        groups: Sequence[Any],
        in_phase: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        self._groups = groups
        self._in_phase = in_phase
        self._moves = lru_cache(_NUM_KNOWN)(lambda readers: grid.moves(readers, rank))

    def run(self, readers: tuple[int, ...], *rows: Tensor) -> None:
        """Sends the part of each reader to all ranks.

        Args:
            readers: The ranks that have filled their parts, in the order of the parts.
            rows: Tensors of equally long parts, (readers x length,).
        """
        for phase, (group, moves) in enumerate(zip(self._groups, self._moves(readers), strict=True)):
            if group is not None and moves:
                with self._in_phase(phase):
                    self._move(group, moves, rows, len(readers))

    def _move(self, group: Any, moves: Sequence[Move], rows: Sequence[Tensor], num_parts: int) -> None:
        for row in rows:
            part = row.numel() // num_parts
            if is_gather(moves, group.size()):
                own = moves[group.rank()]
                into = row[moves[0].begin * part : moves[-1].end * part]
                group._allgather_base(into, row[own.begin * part : own.end * part]).wait()
            else:
                _coalesced(
                    group,
                    [
                        partial(_broadcast, group, row[move.begin * part : move.end * part], move.root)
                        for move in moves
                    ],
                )


_MAX_NUM_GROUPS = 4  # of one rank: each takes a communicator


class RoutedDeviceTransport(_BackendTransport):
    """Messages between devices, each from its reader to its recipients.

    Chunks are read into host memory and packed on the device. A rank that cannot read goes on taking part,
    and reports it when the ranks meet after the rounds.

    Args:
        world: The ranks.
        groups: See `groups_of`; not empty.
        device: This rank's accelerator, with its index.
        backend: The backend, as `comm.group.backend_of` returns it.
    """

    def __init__(self, world: World, groups: Sequence[Ranks], device: torch.device, backend: str) -> None:
        self._members = {number: ranks for number, ranks in enumerate(groups) if world.rank in ranks}
        name = f"routed {xxhash.xxh3_64_hexdigest(repr(groups).encode())}"
        communicators = Communicators(world, name, self._members, device, backend)
        super().__init__(f"{backend} routed", world, device, communicators)
        self._groups: Mapping[Ranks, Any] = {}
        self._packing, self._moving = torch.Stream(device), torch.Stream(device)

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        made = self._communicators.connect(give_up)
        self._groups = {self._members[number]: group for number, group in made.items()}

    def allocate(self, nbytes: int) -> None:
        buffer = allocate((nbytes,), torch.uint8, self.device)
        buffer.record_stream(self._packing)
        buffer.record_stream(self._moving)
        self._buffers.append(buffer)

    def post(self, work: Round) -> None:
        # The caller's kernels may still use the memory.
        here = torch.accelerator.current_stream(self.device)
        self._packing.wait_stream(here)
        self._moving.wait_stream(here)

    def packing(self) -> AbstractContextManager[None]:
        return self._on(self._packing)

    def start(self, work: Round, status: int) -> None:
        work.began = self.watch.start()
        ended = torch.Event(self.device)
        try:
            with self._on(self._moving):
                self._moving.wait_stream(self._packing)
                deliveries = (*work.packed, *work.incoming)
                for each in deliveries:  # some have memory outside of the buffer
                    each.data.record_stream(self._moving)
                self._exchange(deliveries)
                ended.record(self._moving)
        except (RuntimeError, MemoryError) as error:
            work.broke(error)
        work.started.set()
        self._events.follow(work, ended, partial(self._note, work, status))

    def _note(self, work: Round, status: int) -> None:
        if status == FAILED:
            work.statuses = {self._rank: FAILED}

    def _exchange(self, deliveries: Collection[Delivery]) -> None:
        """Sends and receives all messages of a round that concern this rank.

        All ranks make their calls in one order: by round, point to point before broadcasts, by recipients.
        So they cannot deadlock, though some ranks are ahead of others.
        """
        if found := sent_to_roots(deliveries, self._rank):
            # A group of all ranks, with their own numbers.
            everyone = self._groups[max(self._groups, key=len)]
            _coalesced(everyone, [partial(_send_to_root, everyone, self._rank, each) for each in found])
        for ranks, found in broadcasts_of(deliveries).items():
            group = self._groups[ranks]
            _coalesced(
                group,
                [partial(_broadcast, group, each.data, ranks.index(root_of(each.message))) for each in found],
            )

    @contextmanager
    def _on(self, stream: torch.Stream) -> Iterator[None]:
        # Tensors that the caller allocated in inference mode cannot be written in another mode.
        with torch.inference_mode(), use_stream(stream):
            yield


def _send_to_root(group: Any, rank: int, each: Delivery) -> Any:
    if each.message.reader == rank:
        return group.send([each.data], root_of(each.message), 0)
    return group.recv([each.data], each.message.reader, 0)


def _broadcast(group: Any, data: Tensor, root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return group.broadcast([data], options)


def root_of(message: Message) -> int:
    """Returns the recipient that broadcasts a message: the reader, or one that the reader sends to."""
    if message.reader in message.ranks:
        return message.reader
    return message.ranks[message.reader % len(message.ranks)]


def _coalesced(group: Any, calls: Sequence[Callable[[], Any]]) -> None:
    """Makes calls of a group, in one launch where its backend can; else they run one after the other."""
    coalesced = group.supports_coalescing
    if coalesced:
        group._start_coalescing()
    works = [call() for call in calls]
    if coalesced:
        works = [group._end_coalescing()]
    for work in works:
        work.wait()


def groups_of(plan: RoutedPlan) -> tuple[Ranks, ...]:
    """Returns the groups that need a communicator, ascending; the same on all ranks.

    These are the recipients of each message, and all ranks if some reader is no recipient. The result is
    empty if no message has two recipients, if some rank were in too many groups, or if chunks in host memory
    do not fit into staging next to the buffers on the device.

    Args:
        plan: The plan.
    """
    if plan.buffer_bytes + plan.largest_chunk_bytes(plan.readers[0]) > plan.staging_bytes:
        return ()
    groups = {ranks for ranks in plan.groups if len(ranks) > 1}
    counts = Counter(rank for ranks in groups for rank in ranks)
    if max(counts.values(), default=0) > _MAX_NUM_GROUPS or not groups:
        return ()
    needs_all = any(
        not of_group <= set(ranks)
        for group, of_group in plan.readers_of.items()
        for ranks in plan.sharing.densities[group]
    )
    return tuple(sorted(groups | {tuple(sorted(plan.order))} if needs_all else groups))


def sent_to_roots(deliveries: Iterable[Delivery], rank: int) -> list[Delivery]:
    """Returns the messages between a reader that is no recipient and a root, in one order on both.

    Args:
        deliveries: All messages of a round that concern the rank.
        rank: The rank, as reader or root.
    """
    return _in_order(
        each
        for each in deliveries
        if each.message.reader not in each.message.ranks
        and rank in (each.message.reader, root_of(each.message))
    )


def broadcasts_of(deliveries: Iterable[Delivery]) -> dict[Ranks, list[Delivery]]:
    """Returns the messages to broadcast, by recipients; both in one order on all ranks.

    Args:
        deliveries: All messages of a round that concern the rank.
    """
    found: dict[Ranks, list[Delivery]] = {}
    for each in _in_order(each for each in deliveries if each.message.ranges and len(each.message.ranks) > 1):
        found.setdefault(each.message.ranks, []).append(each)
    return found


def _in_order(deliveries: Iterable[Delivery]) -> list[Delivery]:
    # A round has at most one message for each reader and recipients.
    return sorted(deliveries, key=lambda each: (each.message.ranks, each.message.reader))
