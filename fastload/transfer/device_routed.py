"""The exchange between devices where ranks want different bytes: messages among few groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from fastload.base.devices import use_stream
from fastload.base.memory import allocate, allocate_staging
from fastload.base.stopwatch import Stopwatch
from fastload.comm.hosts import Peer
from fastload.comm.world import World
from fastload.transfer.communicators import Communicators, Endings
from fastload.transfer.message import Message, Ranks
from fastload.transfer.route import RoutedPlan
from fastload.transfer.routing import Route
from fastload.transfer.transport import FAILED, Delivery, FlatBuffer, Round

__all__ = ["DeviceRoutedExchange", "groups_of", "handed", "spread"]

_MAX_NUM_GROUPS = 4  # of one rank: each takes a communicator


class DeviceRoutedExchange:
    """Messages between devices, each from the rank that reads it to a group that wants it.

    Chunks are read into host memory, and packed on the device. A rank that cannot read takes part all the
    same, and says so when all of them meet after the rounds; see `HostTransport`.

    Args:
        world: The ranks.
        groups: See `groups_of`; not empty.
        device: This rank's accelerator, with its number.
        backend: What moves data between the devices, as `open_transport.backend_of` names it.
    """

    shares_memory = False
    bytes_in = 0  # nobody counts what the backend takes between hosts

    def __init__(self, world: World, groups: Sequence[Ranks], device: torch.device, backend: str) -> None:
        self.name = f"{backend} routed"
        self.device = device
        self.watch = Stopwatch()
        self._rank = world.rank
        self._members = {number: ranks for number, ranks in enumerate(groups) if world.rank in ranks}
        name = f"routed {xxhash.xxh3_64_hexdigest(repr(groups).encode())}"
        self._communicators = Communicators(world, name, self._members, device, backend)
        self._spreads = Spreads(world.rank, {})
        self._packing, self._moving = torch.Stream(device), torch.Stream(device)
        self._endings = Endings(device, self.watch)

    def route(self, message: Message) -> Route:
        return Route(self._rank)

    def offer(self) -> Any:
        return self._communicators.offer()

    def renew(self) -> None:
        self._communicators.renew()

    def accept(self, offers: Sequence[Any]) -> Sequence[Peer]:
        self._communicators.accept(offers)
        return ()  # the backend has ways of its own

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        made = self._communicators.meet(give_up)
        self._spreads = Spreads(self._rank, {self._members[number]: group for number, group in made.items()})
        self._endings.begin()

    def reserve(self, index: int, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass

    def allocate(self, buffer_bytes: int, own_bytes: int) -> tuple[FlatBuffer, Tensor | None]:
        buffer = allocate((buffer_bytes,), torch.uint8, self.device)
        buffer.record_stream(self._packing)
        buffer.record_stream(self._moving)
        return FlatBuffer(buffer), self.allocate_own(own_bytes)

    def allocate_own(self, nbytes: int) -> Tensor:
        return allocate_staging(nbytes, pinned=True)

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
                self._spreads.bring(deliveries)
                ended.record(self._moving)
        except (RuntimeError, MemoryError) as error:
            work.broke(error)
        work.started.set()
        self._endings.follow(work, ended, partial(self._note, work))

    def release(self, work: Round, *, until_s: float, give_up: Callable[[], bool]) -> None:
        pass  # the round is done, and with it what this rank has sent

    def close(self) -> None:
        self._communicators.close(keep=self._endings.close())

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


class Spreads:
    """The groups of one rank, each with a process group.

    All ranks call what they have part in in one order: by round, what is handed before what is spread, by
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
        for ranks, found in spread(deliveries).items():
            group = self._groups[ranks]
            _at_once(group, [partial(_broadcast, group, each) for each in found])

    def _hand(self, each: Delivery) -> Any:
        """The group of all has the ranks' own numbers."""
        assert self._everyone is not None
        if each.message.reader == self._rank:
            return self._everyone.send([each.data], root_of(each.message), 0)
        return self._everyone.recv([each.data], each.message.reader, 0)


def _broadcast(group: Any, each: Delivery) -> Any:
    how = dist.BroadcastOptions()
    how.rootRank = each.message.ranks.index(root_of(each.message))
    return group.broadcast([each.data], how)


def root_of(message: Message) -> int:
    """Returns the first rank of a group that has a message: the reader, or the one that it is handed to."""
    if message.reader in message.ranks:
        return message.reader
    return message.ranks[message.reader % len(message.ranks)]


def _at_once(group: Any, calls: Sequence[Callable[[], Any]]) -> None:
    """Calls what a group is to do, at once where its backend can."""
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
        readers[share.lane].add(share.reader)
    wanting = {ranks for lane in readers for ranks in plan.lanes.densities[lane]}
    groups = {ranks for ranks in wanting if len(ranks) > 1}
    counts = Counter(rank for ranks in groups for rank in ranks)
    if max(counts.values(), default=0) > _MAX_NUM_GROUPS or not groups:
        return ()
    is_handed = any(
        not of_lane <= set(ranks) for lane, of_lane in readers.items() for ranks in plan.lanes.densities[lane]
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


def spread(deliveries: Iterable[Delivery]) -> dict[Ranks, list[Delivery]]:
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
