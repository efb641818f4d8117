"""The transports between devices: the group's backend, on communicators and streams of fastload's own.

`DeviceExchange` serves plans in which all ranks want the same: chunks lie side by side in slots, and go along
the lines of a grid. `DeviceRoutedExchange` serves the others: messages among few groups. Both make their
communicators with `Communicators`, and wait for their rounds with `Endings`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections import Counter, defaultdict
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
from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import background, within
from fastload.comm.hosts import Peer
from fastload.comm.world import World
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.transfer.grid import Grid, Move, is_gather
from fastload.transfer.message import Message, Ranks
from fastload.transfer.routed_plan import RoutedPlan
from fastload.transfer.transport import FAILED, TICK_S, Delivery, FlatBuffer, Round, Slots, Transport

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


_NUM_KNOWN = 1024  # windows of readers whose moves are kept


class _DeviceTransport(Transport):
    """What both transports between devices have in common. `bytes_in` is unknown: the backend does not count.

    Args:
        name: For the report.
        world: The ranks.
        device: This rank's accelerator, with its number.
        communicators: The communicators that carry the rounds.
    """

    def __init__(self, name: str, world: World, device: torch.device, communicators: Communicators) -> None:
        super().__init__(name, world.rank, device, pinned=True)
        self._communicators = communicators
        self._endings = Endings(device, self.watch)

    def offer(self) -> Any:
        return self._communicators.offer()

    def renew(self) -> None:
        self._communicators.renew()

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        self._communicators.accept(offers)
        return ()  # the backend finds its own routes

    def close(self) -> None:
        self._communicators.close(keep=self._endings.close())


class DeviceExchange(_DeviceTransport):
    """Collectives on device buffers, on streams and communicators of fastload's own.

    Each line of the grid of ranks has a communicator, which is kept for the next loads of the group. The
    group's own communicator is never used: the caller may be in the middle of a collective on it.

    Args:
        world: The ranks.
        device: This rank's accelerator, with its number.
        backend: What moves data between the devices, as `open_transport.backend_of` names it.
        hosts: Host of each rank.
    """

    def __init__(self, world: World, device: torch.device, backend: str, hosts: Sequence[str]) -> None:
        self._grid = Grid.of(hosts)
        phases = [phase for phase in range(self._grid.num_phases) if self._grid.has_line(world.rank, phase)]
        lines = {phase: self._grid.line(world.rank, phase) for phase in phases}
        communicators = Communicators(world, f"grid {self._grid.dims}", lines, device, backend)
        super().__init__(backend, world, device, communicators)
        # One for each phase: rounds overlap, each in another one.
        self._streams = [torch.Stream(device) for _ in range(self._grid.num_phases)]
        self._last = self._streams[0]
        self._statuses: list[Tensor] = []
        self._num_started = 0
        self._lines: Lines | None = None

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        found = self._communicators.meet(give_up)
        groups = [found.get(phase) for phase in range(self._grid.num_phases)]
        self._lines = Lines(self._grid, self._rank, groups, self._within)
        self._endings.begin()

    def allocate(self, buffer_bytes: int, own_bytes: int) -> tuple[FlatBuffer, Tensor | None]:
        buffer = allocate((buffer_bytes,), torch.uint8, self.device)
        # Allocated here: a rank that ran out of memory in a round would leave the others alone in it.
        statuses = allocate((len(self._grid.ranks),), torch.uint8, self.device)
        for stream in self._streams:
            # Kernels of the caller's that still use what was freed here come first; and whoever gets the
            # memory next has to wait for what an abandoned load has left on the stream.
            stream.wait_stream(torch.accelerator.current_stream(self.device))
            buffer.record_stream(stream)
            statuses.record_stream(stream)
        self._statuses.append(statuses)
        return FlatBuffer(buffer), self.allocate_own(own_bytes)

    def start(self, work: Round) -> None:
        work.began = self.watch.start()
        ended = torch.Event(self.device)
        assert work.slots is not None, "made for this transport"
        statuses = self._statuses[self._num_started % len(self._statuses)][: len(work.slots.each)]
        self._num_started += 1
        try:
            # What the caller's thread has allocated in inference mode cannot be written in another mode.
            self._last = self._streams[0]
            with torch.inference_mode(), use_stream(self._last):
                self._bring(work.slots, work, statuses)
                ended.record(self._last)
        except (RuntimeError, MemoryError) as error:
            work.broke(error)
        work.started.set()
        self._endings.follow(work, ended, partial(_note, work, tuple(work.slots.each), statuses))

    def _bring(self, slots: Slots, work: Round, statuses: Tensor) -> None:
        """Brings chunks, and one status for each reader, to all ranks."""
        assert self._lines is not None
        owners = tuple(slots.each)
        statuses.zero_()
        if work.own is not None:
            copy_async(work.own, slots.each[self._rank])
            statuses[owners.index(self._rank)].fill_(work.status)
        self._lines.bring(owners, slots.whole, statuses)

    @contextmanager
    def _within(self, phase: int) -> Iterator[None]:
        """What is called here comes after what was called before, and beside other phases of other rounds."""
        self._streams[phase].wait_stream(self._last)
        self._last = self._streams[phase]
        with use_stream(self._last):
            yield


def _note(work: Round, readers: Sequence[int], statuses: Tensor) -> None:
    """Notes which chunks of a round could not be read.

    Args:
        work: The round, which is here.
        readers: Those of it.
        statuses: What each of them says, (readers,), on the device.
    """
    found = zip(readers, statuses.tolist(), strict=True)
    work.statuses = {rank: status for rank, status in found if status}


class Lines:
    """The lines of one rank, each with a process group.

    Args:
        grid: Of all ranks.
        rank: This one.
        groups: The backend of a process group for its line in each phase, with the same numbers; None where
            this rank is the only one of it.
        within: Returns what the collectives of a phase are to be called in: a stream of their own.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        groups: Sequence[Any],
        within: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        self._groups = groups
        self._within = within
        self._moves = lru_cache(_NUM_KNOWN)(lambda owners: grid.moves(owners, rank))

    def bring(self, owners: tuple[int, ...], *rows: Tensor) -> None:
        """Brings what each of some ranks has put into its part to all ranks.

        Args:
            owners: Who has put something there, in the order of their parts.
            rows: What has such parts, equally long, and nothing else; (owners x length,).
        """
        for phase, (group, moves) in enumerate(zip(self._groups, self._moves(owners), strict=True)):
            if group is not None and moves:
                with self._within(phase):
                    self._move(group, moves, rows, len(owners))

    def _move(self, group: Any, moves: Sequence[Move], rows: Sequence[Tensor], num_parts: int) -> None:
        for row in rows:
            part = row.numel() // num_parts
            if is_gather(moves, group.size()):
                own = moves[group.rank()]
                into = row[moves[0].begin * part : moves[-1].end * part]
                group._allgather_base(into, row[own.begin * part : own.end * part]).wait()
            else:
                _at_once(
                    group,
                    [
                        partial(_broadcast, group, row[move.begin * part : move.end * part], move.root)
                        for move in moves
                    ],
                )


_MAX_NUM_GROUPS = 4  # of one rank: each takes a communicator


class DeviceRoutedExchange(_DeviceTransport):
    """Messages between devices, each from the rank that reads it to a group that wants it.

    Chunks are read into host memory, and packed on the device. A rank that cannot read takes part all the
    same, and says so when all of them meet after the rounds; see `HostTransport`.

    Args:
        world: The ranks.
        groups: See `groups_of`; not empty.
        device: This rank's accelerator, with its number.
        backend: What moves data between the devices, as `open_transport.backend_of` names it.
    """

    def __init__(self, world: World, groups: Sequence[Ranks], device: torch.device, backend: str) -> None:
        self._members = {number: ranks for number, ranks in enumerate(groups) if world.rank in ranks}
        name = f"routed {xxhash.xxh3_64_hexdigest(repr(groups).encode())}"
        communicators = Communicators(world, name, self._members, device, backend)
        super().__init__(f"{backend} routed", world, device, communicators)
        self._broadcasts = GroupBroadcasts(world.rank, {})
        self._packing, self._moving = torch.Stream(device), torch.Stream(device)

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        made = self._communicators.meet(give_up)
        self._broadcasts = GroupBroadcasts(
            self._rank, {self._members[number]: group for number, group in made.items()}
        )
        self._endings.begin()

    def allocate(self, buffer_bytes: int, own_bytes: int) -> tuple[FlatBuffer, Tensor | None]:
        buffer = allocate((buffer_bytes,), torch.uint8, self.device)
        buffer.record_stream(self._packing)
        buffer.record_stream(self._moving)
        return FlatBuffer(buffer), self.allocate_own(own_bytes)

    def post(self, work: Round) -> None:
        # Kernels of the caller's that still use what was freed here come first.
        here = torch.accelerator.current_stream(self.device)
        self._packing.wait_stream(here)
        self._moving.wait_stream(here)
        work.pack = partial(self._pack, work.pack)

    def start(self, work: Round) -> None:
        work.began = self.watch.start()
        ended = torch.Event(self.device)
        try:
            with self._on(self._moving):
                self._moving.wait_stream(self._packing)
                deliveries = (*work.kept, *work.incoming)
                for each in deliveries:  # some have memory besides the buffer
                    each.data.record_stream(self._moving)
                self._broadcasts.bring(deliveries)
                ended.record(self._moving)
        except (RuntimeError, MemoryError) as error:
            work.broke(error)
        work.started.set()
        self._endings.follow(work, ended, partial(self._note, work))

    def _pack(self, pack: Callable[[Round], None], work: Round) -> None:
        with self._on(self._packing):
            pack(work)

    def _note(self, work: Round) -> None:
        if work.status == FAILED:
            work.statuses = {self._rank: FAILED}

    @contextmanager
    def _on(self, stream: torch.Stream) -> Iterator[None]:
        # What the caller's thread has allocated in inference mode cannot be written in another mode.
        with torch.inference_mode(), use_stream(stream):
            yield


class GroupBroadcasts:
    """The groups of one rank, each with a process group.

    All ranks call what they have part in in one order: by round, what is handed before what is broadcast, by
    group. So they cannot wait for each other in a circle, though some are ahead of others.

    Args:
        rank: This one.
        groups: The backend of a process group for each of this rank's groups; see `groups_of`.
    """

    def __init__(self, rank: int, groups: Mapping[Ranks, Any]) -> None:
        self._rank = rank
        self._groups = groups
        self._everyone = groups[max(groups, key=len)] if groups else None

    def bring(self, deliveries: Collection[Delivery]) -> None:
        """Brings the messages of a round to those who want them.

        Args:
            deliveries: All that goes through this rank.
        """
        if found := handed(deliveries, self._rank):
            _at_once(self._everyone, [partial(self._hand, each) for each in found])
        for ranks, found in broadcasts_of(deliveries).items():
            group = self._groups[ranks]
            roots = [ranks.index(root_of(each.message)) for each in found]
            _at_once(
                group,
                [
                    partial(_broadcast, group, each.data, root)
                    for each, root in zip(found, roots, strict=True)
                ],
            )

    def _hand(self, each: Delivery) -> Any:
        """The group of all has the ranks' own numbers."""
        assert self._everyone is not None
        if each.message.reader == self._rank:
            return self._everyone.send([each.data], root_of(each.message), 0)
        return self._everyone.recv([each.data], each.message.reader, 0)


def _broadcast(group: Any, data: Tensor, root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return group.broadcast([data], options)


def root_of(message: Message) -> int:
    """Returns the first rank of a group that has a message: the reader, or the one that it is handed to."""
    if message.reader in message.ranks:
        return message.reader
    return message.ranks[message.reader % len(message.ranks)]


def _at_once(group: Any, calls: Sequence[Callable[[], Any]]) -> None:
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
    """Returns the groups that the messages of a plan go around in, ascending; the same on all ranks.

    These are the ranks that want the same, and all ranks if some message is read by a rank that does not want
    it. There are none if no two ranks want the same, if some rank were in too many groups, or if there is no
    room for chunks in host memory besides buffers on devices.

    Args:
        plan: The plan.
    """
    if plan.buffer_bytes + plan.longest_chunk_bytes > plan.staging_bytes:
        return ()
    readers: dict[int, set[int]] = defaultdict(set)
    for share in plan.shares:
        readers[share.group].add(share.reader)
    wanting = {ranks for group in readers for ranks in plan.sharing.densities[group]}
    groups = {ranks for ranks in wanting if len(ranks) > 1}
    counts = Counter(rank for ranks in groups for rank in ranks)
    if max(counts.values(), default=0) > _MAX_NUM_GROUPS or not groups:
        return ()
    is_handed = any(
        not of_group <= set(ranks)
        for group, of_group in readers.items()
        for ranks in plan.sharing.densities[group]
    )
    return tuple(sorted(groups | {tuple(sorted(plan.order))} if is_handed else groups))


def handed(deliveries: Iterable[Delivery], rank: int) -> list[Delivery]:
    """Returns what a rank hands to, or gets from, a rank that reads but does not want it.

    In an order that is the same on both of them.

    Args:
        deliveries: All that goes through the rank in a round.
        rank: The rank.
    """
    return _in_order(
        each
        for each in deliveries
        if each.message.reader not in each.message.ranks
        and rank in (each.message.reader, root_of(each.message))
    )


def broadcasts_of(deliveries: Iterable[Delivery]) -> dict[Ranks, list[Delivery]]:
    """Returns what is broadcast in each group of a rank's; groups, and messages, in one order on all ranks.

    Args:
        deliveries: All that goes through the rank in a round.
    """
    found: dict[Ranks, list[Delivery]] = {}
    for each in _in_order(each for each in deliveries if each.message.ranges and len(each.message.ranks) > 1):
        found.setdefault(each.message.ranks, []).append(each)
    return found


def _in_order(deliveries: Iterable[Delivery]) -> list[Delivery]:
    # Of one reader, each group has at most one message in a round.
    return sorted(deliveries, key=lambda each: (each.message.ranks, each.message.reader))
