"""Prepares a load on all ranks: everything that can fail before data move. Request → match → plan → job."""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from operator import and_
from typing import Any, NamedTuple

import xxhash

from fastload.base.devices import is_accelerator
from fastload.base.memory import PAGE_BYTES, uncollected
from fastload.base.state_copies import wait_for_copies
from fastload.comm.failures import kinds_of, require_same
from fastload.comm.group import backend_of, members_of
from fastload.comm.observers import Observers
from fastload.comm.world import World
from fastload.errors import Interrupted, OptionError
from fastload.formats.manifest import Manifest
from fastload.geometry.box import Runs
from fastload.loading.access import Access
from fastload.loading.match import Match, Request
from fastload.loading.targets import Destination, TensorWriter, parse_dtype
from fastload.options import LoadOptions, named_staging
from fastload.transfer.buffers import Writer
from fastload.transfer.demand import Part, RankRequest, RankRequests, SharingGroups
from fastload.transfer.links import accept_offers, offer_of
from fastload.transfer.messages import ring_order
from fastload.transfer.pipeline import Pipeline, pace_of
from fastload.transfer.plan import StrategyChoice, choose_strategy, plan_transfer
from fastload.transfer.read import ChecksumCollector, ChunkReader, Guards, Verifier
from fastload.transfer.rounds import Plan
from fastload.transfer.routed_plan import plan_routes
from fastload.transfer.transport import Transport

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """A checkpoint that all ranks have open, as one load finds it.

    Attributes:
        world: The ranks.
        access: The checkpoint and its readers.
        options: How to load.
        verifier: Knows the checksum blocks; None if they are not verified.
        observers: Observe the loads.
        header_bytes: Bytes that this rank read to open it.
        num_retries: Retries that earlier loads have reported.
    """

    world: World
    access: Access
    options: LoadOptions
    verifier: Verifier | ChecksumCollector | None
    observers: Observers
    header_bytes: int
    num_retries: int = 0

    @property
    def block_bytes(self) -> int:
        """Length of the parts of a tensor with one reader: checksum blocks; 0 for parts of any length."""
        if self.verifier is not None:
            return self.access.stored.block_bytes
        return PAGE_BYTES if self.access.supply is not None else 0

    @property
    def ranks_on_host(self) -> int:
        """Number of ranks on this rank's host."""
        return self.access.hosts.count(self.access.hosts[self.world.rank])

    @property
    def cores(self) -> int:
        """This rank's share of its host's cores, at least 1."""
        return max(1, (os.cpu_count() or 1) // self.ranks_on_host)

    def open_reader(self, plan: Plan, *, in_parts: bool, shared: bool = False) -> ChunkReader:
        """Opens the reader of this rank's chunks.

        Args:
            plan: The plan.
            in_parts: Whether data may be read without their first byte; see `Guards`.
            shared: Whether other ranks of this host read the same bytes.
        """
        access, manifest, storage = self.access, self.access.stored, self.access.storage
        storage.share_reads(shared)
        pace = pace_of(
            self.options.read_threads,
            plan,
            storage,
            ranks_on_host=self.ranks_on_host,
            first_byte_s=access.first_byte_s,
        )
        return ChunkReader(
            storage,
            manifest.files,
            pace=pace,
            verifier=self.verifier,
            guards=Guards(manifest, in_parts=in_parts) if manifest.guards else None,
            cached=access.cached,
        )

    def match(self, request: Request) -> Match:
        """Finds the destinations of a request of this rank; errors are those of `LoadRequest.match`."""
        world = self.world
        return request.match(self.access.logical, world.rank, world.size, members_of(world.group))

    def choose_strategy(self, *, fast_links: bool = False) -> StrategyChoice:
        """Chooses the strategy of a load.

        Args:
            fast_links: Whether a backend moves data between devices.

        Raises:
            OptionError: Every rank is to read, and some rank cannot.
        """
        access = self.access
        if access.supply is not None:
            return StrategyChoice("allgather", "readers have different parts in memory", access.readers)
        strategy, why = self.options.strategy, ""
        if self.options.atomic and strategy == "auto":
            strategy, why = "allgather", "until all is read, each rank holds what it reads"
        choice = choose_strategy(
            strategy,
            world_size=self.world.size,
            readers=access.readers,
            hosts=access.hosts,
            shared=access.shared,
            fast_links=fast_links,
        )
        return replace(choice, why=why) if why and choice.strategy == strategy else choice


class LoadStart(NamedTuple):
    """The beginning of a load, from which its report counts.

    Attributes:
        at_s: By `time.perf_counter`.
        bytes_read: Bytes read from storage until then.
        direct_bytes_read: The part of them that bypassed the page cache.
        bytes_supplied: Bytes that came from sources.
        cpu_s: CPU time of the process until then.
    """

    at_s: float
    bytes_read: int
    direct_bytes_read: int
    bytes_supplied: int
    cpu_s: float

    @classmethod
    def now(cls, opened: Opened) -> LoadStart:
        """Returns the beginning of a load that begins now."""
        storage = opened.access.storage
        counted = storage.bytes_read, storage.direct_bytes_read, storage.supplied_bytes
        return cls(time.perf_counter(), *counted, time.process_time())


@dataclass(frozen=True)
class MatchedRequest:
    """A request of this rank with its destinations and its strategy.

    Attributes:
        opened: The checkpoint.
        match: The destinations.
        decision: The strategy.
        backend: The backend that moves data between the devices of all ranks, such as ``nccl``; empty if
            none.
        detour: Why data go through host memory; empty with a backend.
        start: The beginning of the load.
    """

    opened: Opened
    match: Match
    decision: StrategyChoice
    backend: str
    detour: str
    start: LoadStart

    @classmethod
    def of(cls, opened: Opened, match: Match, start: LoadStart) -> MatchedRequest:
        """Begins to load what a request has matched, and chooses how.

        Raises:
            FastloadError: This rank cannot load it.
        """
        for memory in match.aliases:
            memory.reset()
        backend, detour = "", match.detour or "the tensors are in host memory"
        if is_accelerator(match.device) and not match.detour:
            backend = backend_of(opened.world.group, match.device.type)
            lacking = f"fastload knows no backend of the process group between {match.device.type} devices"
            detour = "" if backend else lacking
        decision = opened.choose_strategy(fast_links=bool(backend))
        if match.is_mapped:
            decision = replace(decision, why=f"{decision.why}; mapped, not read")
        return cls(opened, match, decision, backend, detour, start)

    def through_hosts(self) -> MatchedRequest:
        """Returns the request with the strategy of a group whose devices no backend connects."""
        detour = "not all ranks load to devices that one backend connects"
        return replace(self, decision=self.opened.choose_strategy(), backend="", detour=detour)

    def why_transport(self, transport: Transport) -> str:
        """Returns why a transport carries the bytes, for the report."""
        if transport.name == "none":
            return "no rank needs bytes from another one"
        if not self.backend:
            return self.detour
        if transport.name.startswith(self.backend):
            return f"the process group's backend between {self.match.device.type} devices"
        return "no two ranks want the same bytes, or they form too many groups for communicators of devices"


@dataclass(frozen=True)
class Job:
    """A load that is ready to run.

    Attributes:
        matched: The request of this rank.
        bytes_wanted: Bytes that any rank wants, each counted once.
        writer: Writes the bytes into tensors.
        pipeline: Runs the rounds of the plan.
    """

    matched: MatchedRequest
    bytes_wanted: int
    writer: Writer
    pipeline: Pipeline

    def run(self) -> None:
        """Moves the data into tensors; see `Pipeline.steps` for errors."""
        assert isinstance(self.writer, TensorWriter)
        before: Sequence[tuple[int, int]] = ()
        try:
            for in_place in self.pipeline.steps():
                if self.pipeline.plan.exchanges:
                    # From the next round on, no message of this one is sent from its memory.
                    before, in_place = in_place, before
                self.writer.count(in_place)
            self.writer.count(before)
        finally:
            self.writer.close()

    def close(self) -> None:
        """Ends its threads; a read without an answer from storage ends later."""
        opened = self.matched.opened
        self.pipeline.close()
        if not self.pipeline.reader.close(wait_s=min(1.0, opened.world.grace_s)):
            _log.warning("%s: a read is still under way and may yet write", opened.access.stored.url)


def prepare(
    opened: Opened, request: Request, match: Match | None = None, *, start: LoadStart | None = None
) -> Job:
    """Does everything on all ranks that can fail before data move, and compares the plans.

    Args:
        opened: The checkpoint.
        request: The request of this rank.
        match: Its destinations, if they are known.
        start: The beginning of the load; None for now.

    Raises:
        FastloadError: A rank cannot load, or the requests of the ranks do not fit each other.
    """
    start = start or LoadStart.now(opened)
    what = f"preparing to load {opened.access.stored.url}"
    wait_for_copies()
    with ExitStack() as unused:
        with opened.world.step(what) as step:
            matched, job = _match(opened, request, match, start)
            if job is not None:
                unused.enter_context(closing(job))
            step.answer(_proposal(request, matched, job))
        responses = step.answers
        require_same(responses, "into", "dtype")
        if request.is_same:
            require_same(responses, "strategy", "names", "transport", "plan")
        kinds = kinds_of(responses)
        _raise_unexpected(matched, [one["surplus"] for one in kinds])
        is_common = all(one["plan"] for one in kinds) and _is_same(kinds, "names", "strategy", "detour")
        if job is not None and is_common:
            _accept(what, job, responses)
            unused.pop_all()
            return job
    job = None  # closed, and its buffers go before others are made
    if not _is_same(kinds, "backend", "detour"):
        matched = matched.through_hosts()  # the devices differ between the ranks, and so do their strategies
    return _prepare_sharded(matched)


@uncollected
def _match(
    opened: Opened, request: Request, match: Match | None, start: LoadStart
) -> tuple[MatchedRequest, Job | None]:
    """Matches a request of this rank, and opens its load if all ranks may want the same."""
    matched = MatchedRequest.of(opened, match or opened.match(request), start)
    if opened.access.supply is not None or any(one.runs is not None for one in matched.match.destinations):
        return matched, None
    return matched, _open_common(matched)


def _proposal(request: Request, matched: MatchedRequest, job: Job | None) -> dict[str, Any]:
    """Returns what the ranks compare of their requests."""
    wanted = [
        one.entry.name if one.piece is None else f"{one.entry.name} {one.piece.box.offsets}"
        for one in matched.match.destinations
    ]
    return {
        "strategy": matched.decision.strategy,
        "backend": matched.backend,
        "detour": matched.detour,
        "into": "not given" if request.is_same else "given",
        "dtype": str(parse_dtype(request.dtype)),
        "names": f"{matched.match.num_tensors} tensors ({_digest(wanted)})",
        "surplus": _digest(surplus) if (surplus := matched.match.surplus.names) else "",
        **(_terms_of(job) if job is not None else {"transport": "", "plan": "", "offer": None}),
    }


def _raise_unexpected(matched: MatchedRequest, digests: Sequence[str]) -> None:
    """Raises on all ranks if the checkpoint has names that no rank wants and some rank has to.

    Raises:
        MismatchError: It has.
    """
    if not all(digests):
        return
    surplus, world, manifest = matched.match.surplus, matched.opened.world, matched.opened.access.stored
    if len(set(digests)) == 1:
        surplus.raise_unwanted(manifest.url, surplus.names)
    elif unwanted := sorted(_unwanted_by_all(world, manifest, surplus.names)):
        # Together: a rank that leaves takes the bytes along that it has left for the others.
        with world.step(f"preparing to load {manifest.url}"):
            surplus.raise_unwanted(manifest.url, unwanted)


def _is_same(responses: Sequence[dict[str, Any]], *keys: str) -> bool:
    return len({tuple(one[key] for key in keys) for one in responses}) == 1


def _digest(names: Sequence[str]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(names).encode())


# All ranks want the same tensors, none in parts


def _open_common(matched: MatchedRequest) -> Job:
    """Opens a load in which all ranks want the tensors that this one wants.

    Raises:
        FastloadError: Options do not fit.
        MemoryError: Staging buffers do not fit into memory.
    """
    opened, decision = matched.opened, matched.decision
    world, options, access = opened.world, opened.options, opened.access
    has_buffer = matched.match.writer is not None
    extents = [destination.extent for destination in matched.match.destinations]
    staging_bytes = options.staging_bytes // (2 if has_buffer else 1)  # the buffer has the other half
    between_devices = bool(matched.backend) and not decision.alone
    shares_memory = not between_devices and not decision.alone
    try:
        plan = plan_transfer(
            [] if matched.match.is_mapped else extents,
            decision.readers_for(world.rank),
            decision.recipients_with(world.rank, world.size),
            staging_bytes=staging_bytes,
            chunk_bytes=options.chunk_bytes,
            block_bytes=opened.block_bytes,
            even_slots=between_devices,
            contiguous=access.is_mounted and not has_buffer,
            hosts=access.hosts,
            num_sharing=min(Counter(access.machines).values()) if shares_memory else 1,
            to_device=is_accelerator(matched.match.device) and not between_devices,
        )
    except OptionError as error:
        if not has_buffer:
            raise
        raise OptionError(f"{error}, half of {named_staging(options.staging_bytes)}") from None
    if has_buffer:
        plan = plan.deeper(staging_bytes)
    return open_job(matched, plan, sum(extent.nbytes for extent in extents))


def open_job(matched: MatchedRequest, plan: Plan, bytes_wanted: int, writer: Writer | None = None) -> Job:
    """Opens a load with its plan.

    Args:
        matched: The request of this rank.
        plan: The plan.
        bytes_wanted: Bytes that any rank wants, each counted once.
        writer: Writes the bytes; None for a new one.

    Raises:
        MemoryError: Staging buffers do not fit into memory.
    """
    opened, options, access = matched.opened, matched.opened.options, matched.opened.access
    shared = matched.decision.alone and opened.ranks_on_host > 1
    reader = opened.open_reader(plan, in_parts=plan.reads_in_parts, shared=shared)
    writer = writer or matched.match.writer or TensorWriter(matched.match.destinations, opened.cores)
    pipeline = Pipeline(
        opened.world,
        plan,
        reader,
        writer,
        machines=access.machines,
        device=matched.match.device,
        backend="" if matched.decision.alone else matched.backend,
        progress=options.progress,
    )
    opened.observers.follow(pipeline.watches)
    return Job(matched, bytes_wanted, writer, pipeline)


# Ranks want different bytes


def _prepare_sharded(matched: MatchedRequest) -> Job:
    """Gathers what each rank wants, and opens the load.

    Raises:
        FastloadError: On some rank options do not fit, or it did not respond.
    """
    world, manifest = matched.opened.world, matched.opened.access.stored
    with world.gathering_step(f"telling what each rank wants of {manifest.url}") as gathered:
        request = request_of(manifest, matched.match.destinations)
        gathered.answer(request.packed)
    return open_on_all(matched.opened, lambda: _open_sharded(matched, request, gathered.answers))


@uncollected
def _open_sharded(matched: MatchedRequest, request: RankRequest, packed: Sequence[bytes]) -> Job:
    """Opens a load whose ranks want different bytes.

    Args:
        matched: The request of this rank.
        request: The bytes that it wants.
        packed: `RankRequest.packed` of each rank.
    """
    opened, decision = matched.opened, matched.decision
    extents = opened.access.stored.extents
    # What a mount reads ahead is to be what its reader asks for next, whoever wants it.
    contiguous = opened.access.is_mounted and not decision.alone
    requests = RankRequests.unpack(packed)
    sharing = SharingGroups(extents, requests, opened.block_bytes, contiguous=contiguous)
    bytes_wanted = sharing.union_bytes
    if decision.alone:
        requests = RankRequests((request,), ((opened.world.rank,),))
        sharing = SharingGroups(extents, requests, opened.block_bytes)
    plan = plan_routes(
        sharing,
        decision.readers_for(opened.world.rank),
        order=ring_order(opened.access.hosts),
        staging_bytes=opened.options.staging_bytes,
        chunk_bytes=opened.options.chunk_bytes,
        supply=opened.access.supply,
        to_device=bool(matched.backend) or (decision.alone and is_accelerator(matched.match.device)),
    )
    return open_job(matched, plan, bytes_wanted)


def open_on_all(opened: Opened, open_own: Callable[[], Job]) -> Job:
    """Opens a job on all ranks, compares their plans, and connects them.

    Args:
        opened: The checkpoint.
        open_own: Opens the job of this rank.

    Raises:
        FastloadError: Some rank cannot open its job, or the plans differ.
    """
    what = f"planning to load {opened.access.stored.url}"
    with ExitStack() as unused:
        with opened.world.step(what) as step:
            job = unused.enter_context(closing(open_own()))
            step.answer(_terms_of(job))
        _accept(what, job, step.answers)
        unused.pop_all()
    return job


def _terms_of(job: Job) -> dict[str, Any]:
    """Returns what the ranks compare of a job that each has opened, and how they connect."""
    plan, transport = job.pipeline.plan, job.pipeline.transport
    digest = plan.digest(alone=job.matched.decision.alone)
    return {"transport": transport.name, "plan": digest, "offer": offer_of(transport.connections)}


def _accept(what: str, job: Job, responses: Sequence[Mapping[str, Any]]) -> None:
    """Compares the jobs of all ranks, given `_terms_of` each, and passes their offers to the transport."""
    require_same(responses, "transport", "plan")
    world, transport = job.matched.opened.world, job.pipeline.transport
    accept_offers(world, what, transport.connections, [one["offer"] for one in responses])


def open_rest(job: Job, unread_from: Mapping[int, int]) -> Job:
    """Ends a job, and opens one for what its failed readers did not read.

    Args:
        job: The job.
        unread_from: Readers that failed, each with the first round that it did not read.

    Raises:
        FastloadError: No rank can read it.
    """
    plan = job.pipeline.plan
    lacking = [(at, rank) for rank, first in unread_from.items() for at in range(first, plan.num_rounds)]
    rest = plan.without(unread_from, lacking, plan.num_rounds)
    if rest is None:
        raise job.pipeline.read_error or Interrupted("no rank is left that can read")
    job.close()
    opened = job.matched.opened
    progress, placed_bytes = opened.options.progress, job.pipeline.placed_bytes
    if progress is not None:

        def goes_on(now: int, wanted: int) -> None:
            # Between devices, ranks place what could not be read like anything else, and have counted it.
            progress(min(placed_bytes + now, wanted), wanted)

        opened = replace(opened, options=replace(opened.options, progress=goes_on))
    return open_job(replace(job.matched, opened=opened), rest, job.bytes_wanted)


def request_of(manifest: Manifest, destinations: Sequence[Destination]) -> RankRequest:
    """Returns the bytes that this rank wants.

    Args:
        manifest: The checkpoint.
        destinations: In the order of `Manifest.extents`.
    """

    def wants() -> Iterator[tuple[int, Part]]:
        of_extent = groupby(destinations, lambda destination: id(destination.extent))
        extent, parts = next(of_extent, (None, ()))
        for index, candidate in enumerate(manifest.extents):
            if id(candidate) == extent:
                if candidate.nbytes:
                    yield index, tuple(one.runs or Runs(0, one.extent.nbytes, ()) for one in parts)
                extent, parts = next(of_extent, (None, ()))

    return RankRequest.of(wants())


def _unwanted_by_all(world: World, manifest: Manifest, surplus: Sequence[str]) -> set[str]:
    """Returns the names that are surplus on all ranks.

    Raises:
        FastloadError: A rank did not respond.
    """
    names = [entry.name for entry in manifest.tensors]
    with world.gathering_step(f"comparing what the ranks do not want of {manifest.url}") as step:
        step.answer(_pack_names(surplus, names))
    unwanted = [_unpack_names(data) for data in set(step.answers)]
    mask = reduce(and_, (mask for mask, _ in unwanted))
    others = reduce(and_, (others for _, others in unwanted))
    return {name for index, name in enumerate(names) if mask >> index & 1} | others


def _pack_names(chosen: Sequence[str], names: Sequence[str]) -> bytes:
    """Packs names: a bit for each of those that all ranks know, and the text of others."""
    wanted = set(chosen)
    bits = "".join("1" if name in wanted else "0" for name in reversed(names))
    texts = json.dumps([f"{int(bits or '0', 2):x}", sorted(wanted - set(names))])
    return zlib.compress(texts.encode(), level=1)


def _unpack_names(packed: bytes) -> tuple[int, frozenset[str]]:
    mask, others = json.loads(zlib.decompress(packed))
    return int(mask, 16), frozenset(others)
