"""One load on all ranks: match → plan → read → exchange → place."""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from operator import and_
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import xxhash

from fastload.base.devices import is_accelerator, parse_device, with_index
from fastload.base.memory import uncollected
from fastload.comm.failures import kinds_of, require_same
from fastload.comm.group import members_of
from fastload.comm.responses import Each, Reports
from fastload.comm.traces import Tracing
from fastload.comm.world import World
from fastload.errors import Interrupted, OptionError
from fastload.formats.manifest import Manifest
from fastload.geometry.box import Runs
from fastload.loading.access import Access
from fastload.loading.boxes import BoxesByName, match_boxes
from fastload.loading.match import Match, match
from fastload.loading.place import Destination, Placer
from fastload.options import LoadOptions
from fastload.report import LoadReport, RankReport
from fastload.storage import PatientStorage
from fastload.transfer.buffers import Buffers, Plan
from fastload.transfer.demand import Part, RankRequest, RankRequests, SharingGroups
from fastload.transfer.links import accept_offers
from fastload.transfer.open_transport import backend_of, open_transport
from fastload.transfer.pipeline import Pipeline, read_threads
from fastload.transfer.plan import TransferPlan, plan_transfer
from fastload.transfer.read import ChunkReader, Guards, Verifier, refuse
from fastload.transfer.routed_plan import RoutedPlan, plan_routes
from fastload.transfer.routing import ring_order
from fastload.transfer.strategy import Decision, choose_strategy
from fastload.transfer.transport import Transport


def request_of(manifest: Manifest, destinations: Sequence[Destination]) -> RankRequest:
    """Returns what is to come to this rank.

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
                    yield index, tuple(map(_runs, parts))
                extent, parts = next(of_extent, (None, ()))

    return RankRequest.of(wants())


def _runs(destination: Destination) -> Runs:
    return destination.runs or Runs(0, destination.extent.nbytes, ())


def _exchange_requests(world: World, url: str, make: Callable[[], RankRequest]) -> list[bytes]:
    """Tells all ranks what each of them wants; returns it packed, by rank.

    Raises:
        FastloadError: A rank could not make its request, or did not answer.
    """
    return world.gather_bytes(f"telling what each rank wants of {url}", lambda: make().packed)


def _unwanted_by_all(world: World, manifest: Manifest, surplus: Sequence[str]) -> set[str]:
    """Returns which names no rank wants.

    Args:
        world: The ranks.
        manifest: The checkpoint.
        surplus: What this rank does not want of it.

    Raises:
        FastloadError: A rank did not answer.
    """
    names = [entry.name for entry in manifest.tensors]
    what = f"comparing what the ranks do not want of {manifest.url}"
    packed = world.gather_bytes(what, lambda: _Names.of(surplus, names).packed())
    everyone = [_Names.unpack(data) for data in set(packed)]
    mask = reduce(and_, (one.tensors for one in everyone))
    others = reduce(and_, (one.others for one in everyone))
    return {name for index, name in enumerate(names) if mask >> index & 1} | others


@dataclass(frozen=True)
class _Names:
    """Some of the names in a checkpoint.

    Attributes:
        tensors: A bit for each stored tensor.
        others: Names of other things.
    """

    tensors: int
    others: frozenset[str]

    @classmethod
    def of(cls, chosen: Sequence[str], names: Sequence[str]) -> _Names:
        wanted = set(chosen)
        bits = "".join("1" if name in wanted else "0" for name in reversed(names))
        return cls(int(bits or "0", 2), frozenset(wanted - set(names)))

    def packed(self) -> bytes:
        """Packs them to be sent to the other ranks."""
        return zlib.compress(json.dumps([f"{self.tensors:x}", sorted(self.others)]).encode(), level=1)

    @classmethod
    def unpack(cls, packed: bytes) -> _Names:
        """Reads what `packed` returned."""
        tensors, others = json.loads(zlib.decompress(packed))
        return cls(int(tensors, 16), frozenset(others))


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """A checkpoint that all ranks have open.

    Attributes:
        world: The ranks.
        access: What is where, and who can read it.
        options: How to load.
        verifier: Knows its checksum blocks; None if none are to be verified.
        header_bytes: Bytes that this rank has read to open it.
    """

    world: World
    access: Access
    options: LoadOptions
    verifier: Verifier | None
    header_bytes: int

    @property
    def block_bytes(self) -> int:
        """Length of the checksum blocks that are to be verified; 0 if none are."""
        return self.access.manifest.block_bytes if self.verifier is not None else 0

    @property
    def ranks_on_host(self) -> int:
        """How many ranks this rank's host has."""
        return self.access.hosts.count(self.access.hosts[self.world.rank])


class Request(Protocol):
    """What a rank asks for, in one way or another.

    Attributes:
        device: Where new tensors live.
        dtype: Cast of floating point tensors, or None for none.
    """

    @property
    def device(self) -> torch.device | str | None: ...  # noqa: D102
    @property
    def dtype(self) -> torch.dtype | str | None: ...  # noqa: D102
    @property
    def is_same(self) -> bool:
        """Whether all ranks have to ask for the same."""
        ...

    def match(self, opened: Opened, device: torch.device) -> Match:
        """Finds the memory for it."""
        ...


@dataclass(frozen=True)
class LoadRequest:
    """What a caller asks for; see `fastload.load`."""

    into: Any
    device: torch.device | str | None
    dtype: torch.dtype | str | None
    names: Sequence[str] | str | None
    strict: bool

    @property
    def is_same(self) -> bool:
        """Whether all ranks have to ask for the same."""
        return self.into is None

    def match(self, opened: Opened, device: torch.device) -> Match:
        """Finds the memory for it."""
        return match(
            opened.access.manifest,
            names=self.names,
            into=self.into,
            device=device,
            dtype=_dtype(self.dtype),
            strict=self.strict,
            rank=opened.world.rank,
            size=opened.world.size,
            group=members_of(opened.world.group),
        )


@dataclass(frozen=True)
class Wish:
    """What this rank wants, whatever the others want.

    Attributes:
        opened: Of what.
        matched: Which tensors go where.
        device: Where they are: the first of them that are not in host memory.
        dtype: Cast of floating point tensors, or None for none.
        decision: The strategy.
        backend: What moves data between the devices of all ranks, such as ``nccl``; empty if nothing does.
        detour: Why bytes go through host memory; empty if `backend` is not.
    """

    opened: Opened
    matched: Match
    device: torch.device
    dtype: torch.dtype | None
    decision: Decision
    backend: str
    detour: str

    @classmethod
    def of(cls, opened: Opened, request: Request) -> Wish:
        """Finds out what a request means for this rank.

        Raises:
            FastloadError: This rank cannot load it.
        """
        world = opened.world
        device = target_device(request.device)
        matched = request.match(opened, device)
        device = matched.device or device
        backend, detour = "", "the tensors are in host memory"
        if is_accelerator(device):
            backend = backend_of(world.group, device.type)
            detour = "" if backend else f"the process group has no backend between {device.type} devices"
        decision = decide(opened, fast_links=bool(backend))
        if matched.stream_buffer is not None and matched.stream_buffer.is_mapped:
            decision = replace(decision, why=f"{decision.why}; mapped, not read")
        return cls(opened, matched, device, _dtype(request.dtype), decision, backend, detour)

    def through_hosts(self) -> Wish:
        """Returns the same, decided as if no backend connected devices: what all ranks can tell alike."""
        decision = decide(self.opened)
        detour = "not all ranks load to devices that one backend connects"
        return replace(self, decision=decision, backend="", detour=detour)

    def why_transport(self, transport: Transport) -> str:
        """Returns why a transport carries the bytes, for the report."""
        if transport.name == "none":
            return "no rank needs bytes from another one"
        if not self.backend:
            return self.detour
        if transport.name.startswith(self.backend):
            return f"the process group's backend between {self.device.type} devices"
        return "no two ranks want the same bytes, or they form too many groups for communicators of devices"

    @property
    def is_whole(self) -> bool:
        """Whether no tensor, and no piece of one, is wanted in parts."""
        return all(destination.runs is None for destination in self.matched.destinations)


def decide(opened: Opened, *, fast_links: bool = False) -> Decision:
    """Chooses the strategy of a load.

    Args:
        opened: The checkpoint.
        fast_links: Whether the exchange runs between devices.
    """
    access = opened.access
    if access.holders is not None:
        return Decision("allgather", "each host has a part, which no other rank reads", access.readers)
    return choose_strategy(
        opened.options.strategy,
        world_size=opened.world.size,
        readers=access.readers,
        hosts=access.hosts,
        shared=access.shared,
        fast_links=fast_links,
    )


@dataclass(frozen=True)
class Job:
    """One load, ready to run.

    Attributes:
        wish: What this rank wants.
        plan: Who reads what when.
        bytes_wanted: Bytes that any rank wants.
        reader: Reads this rank's chunks.
        transport: Takes messages to the other ranks.
        pipeline: Moves them.
    """

    wish: Wish
    plan: Plan
    bytes_wanted: int
    reader: ChunkReader
    transport: Transport
    pipeline: Pipeline

    def close(self) -> None:
        """Ends its threads; reads that storage does not answer end when it does."""
        opened = self.wish.opened
        self.pipeline.close()
        if not self.reader.close(wait_s=min(1.0, opened.world.grace_s)):
            _log.warning("%s: a read is still under way and may yet write", opened.access.manifest.url)


def _open_whole(wish: Wish) -> Job:
    """Makes a load ready in which all ranks want what this one wants, and no tensor in parts.

    Raises:
        FastloadError: Options do not fit.
        MemoryError: Staging does not fit into memory.
    """
    opened, decision = wish.opened, wish.decision
    world, options, access = opened.world, opened.options, opened.access
    stream_buffer = wish.matched.stream_buffer
    is_stream = stream_buffer is not None
    extents = [destination.extent for destination in wish.matched.destinations]
    staging_bytes = options.staging_bytes // (2 if is_stream else 1)  # the rest is that of the stream buffer
    between_devices = bool(wish.backend) and not decision.alone
    shares_memory = not between_devices and not decision.alone
    plan = plan_transfer(
        [] if stream_buffer is not None and stream_buffer.is_mapped else extents,
        decision.supply(world.rank),
        decision.demand(world.rank, world.size),
        staging_bytes=staging_bytes,
        chunk_bytes=options.chunk_bytes,
        block_bytes=opened.block_bytes,
        even_slots=between_devices,
        contiguous=access.is_mounted and not is_stream,
        hosts=access.hosts,
        num_sharing=min(Counter(access.machines).values()) if shares_memory else 1,
    )
    if is_stream:
        plan = plan.deeper(staging_bytes)
    return _open_job(wish, plan, sum(extent.nbytes for extent in extents))


def _open_job(wish: Wish, plan: Plan, bytes_wanted: int) -> Job:
    """Makes a load ready, from its plan.

    Args:
        wish: What this rank wants.
        plan: Who reads what when.
        bytes_wanted: Bytes that any rank wants.

    Raises:
        MemoryError: Staging does not fit into memory.
    """
    opened, options, access = wish.opened, wish.opened.options, wish.opened.access
    reader = ChunkReader(
        access.storage,
        access.manifest.files,
        threads=read_threads(
            options.read_threads,
            plan,
            ranks_on_host=opened.ranks_on_host,
            in_order=access.storage.in_order,
        ),
        verifier=opened.verifier,
        on_damage=refuse,
        via_cache=wish.decision.alone and opened.ranks_on_host > 1,
        guards=_guards(access.manifest, in_parts=not isinstance(plan, TransferPlan)),
    )
    placer = wish.matched.stream_buffer or Placer(wish.matched.destinations)
    transport = open_transport(
        opened.world,
        plan,
        order=ring_order(access.hosts),
        machines=access.machines,
        hosts=access.hosts,
        device=wish.device,
        backend="" if wish.decision.alone else wish.backend,
    )
    buffers = Buffers(plan, opened.world.rank, transport, placer)
    pipeline = Pipeline(opened.world, plan, reader, transport, placer, buffers, options.progress)
    return Job(wish, plan, bytes_wanted, reader, transport, pipeline)


def _guards(manifest: Manifest, *, in_parts: bool) -> Guards | None:
    return Guards(manifest, in_parts=in_parts) if manifest.guards else None


@contextmanager
def _closing_unused(jobs: list[Job]) -> Iterator[None]:
    """Closes the jobs that are left in a list in the end; nothing of them has begun."""
    try:
        yield
    finally:
        while jobs:
            jobs.pop().close()


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise OptionError(f"dtype={dtype!r}: must be a torch.dtype or the name of one, such as bfloat16")
    return found


def target_device(device: torch.device | str | None) -> torch.device:
    """Returns where new tensors are to live.

    Raises:
        OptionError: That is no device, has no memory, or is not served by torch in this process.
    """
    target = parse_device(device if device is not None else "cpu")
    if target.type == "meta":
        raise OptionError(f"device={device!r}: the meta device has no memory to load into; name a real one")
    return with_index(target)


@dataclass(frozen=True)
class BoxRequest:
    """What a caller asks for; see `Checkpoint.read`."""

    boxes: BoxesByName
    cast: bool = False
    device: None = None
    dtype: None = None
    is_same: ClassVar[bool] = False

    def match(self, opened: Opened, device: torch.device) -> Match:
        """Finds what it is of."""
        return match_boxes(opened.access.manifest, self.boxes, cast=self.cast)


def _prepare_sharded(wish: Wish) -> Job:
    """Tells all ranks what each of them wants, and makes the load ready.

    Raises:
        FastloadError: On some rank options do not fit, or it did not answer.
    """
    opened = wish.opened
    manifest = opened.access.manifest
    packed = _exchange_requests(opened.world, manifest.url, lambda: _request(wish))

    def open_it() -> Job:
        requests = RankRequests.unpack(packed)
        # What a mount reads ahead is to be what its reader asks for next, whoever wants it.
        contiguous = opened.access.is_mounted and not wish.decision.alone
        sharing = SharingGroups(manifest.extents, requests, opened.block_bytes, contiguous=contiguous)
        if not wish.decision.alone:
            return _open(wish, sharing, sharing.union_bytes)
        alone = RankRequests((_request(wish),), ((opened.world.rank,),))
        return _open(wish, SharingGroups(manifest.extents, alone, opened.block_bytes), sharing.union_bytes)

    return _agree(wish, open_it)


def _prepare_rest(job: Job, unread_from: dict[int, int]) -> Job:
    """Ends a load, and makes ready what some readers have left unread, for those who can still read.

    Args:
        job: The load.
        unread_from: Readers that dropped out, each with the first round that it could not read in.

    Raises:
        FastloadError: Nobody can.
    """
    return _agree(job.wish, lambda: _open_rest(job, unread_from))


def _agree(wish: Wish, open_it: Callable[[], Job]) -> Job:
    """Opens a load on all ranks, and compares the plans."""
    jobs: list[Job] = []

    @uncollected
    def make() -> dict[str, Any]:
        jobs.append(job := open_it())
        plan = job.plan.digest() if not wish.decision.alone else "each its own"
        return {"plan": plan, "transport": job.transport.name, "offer": job.transport.offer()}

    world, what = wish.opened.world, f"planning to load {wish.opened.access.manifest.url}"
    with _closing_unused(jobs):
        answers = world.agree(what, make)
        require_same(answers, "plan", "transport")
        accept_offers(world, what, jobs[0].transport, [answer["offer"] for answer in answers])
        return jobs.pop()


def _open_rest(job: Job, unread_from: dict[int, int]) -> Job:
    plan = job.plan
    assert isinstance(plan, RoutedPlan)
    lacking = [(at, rank) for rank, first in unread_from.items() for at in range(first, plan.num_rounds)]
    rest = plan.without(unread_from, lacking, plan.num_rounds)
    if rest is None:
        raise job.pipeline.read_error or Interrupted("no rank is left that can read")
    job.close()
    opened = job.wish.opened
    progress, placed_bytes = opened.options.progress, job.pipeline.placed_bytes
    if progress is not None:

        def goes_on(now: int, wanted: int) -> None:
            # Between devices, ranks place what could not be read like anything else, and have counted it.
            progress(min(placed_bytes + now, wanted), wanted)

        opened = replace(opened, options=replace(opened.options, progress=goes_on))
    return _open_job(replace(job.wish, opened=opened), rest, job.bytes_wanted)


def _request(wish: Wish) -> RankRequest:
    return request_of(wish.opened.access.manifest, wish.matched.destinations)


def _open(wish: Wish, sharing: SharingGroups, bytes_wanted: int) -> Job:
    opened = wish.opened
    plan = plan_routes(
        sharing,
        wish.decision.supply(opened.world.rank),
        order=ring_order(opened.access.hosts),
        staging_bytes=opened.options.staging_bytes,
        chunk_bytes=opened.options.chunk_bytes,
        holders=opened.access.holders,
    )
    return _open_job(wish, plan, bytes_wanted)


class Before(NamedTuple):
    """What was there when a load began, and is not to be counted with it.

    Attributes:
        began: `time.perf_counter`.
        bytes_read: Bytes read from storage.
        direct_bytes_read: Those of them that did not go through the page cache.
        retries: Retries that were reported.
    """

    began: float
    bytes_read: int
    direct_bytes_read: int
    retries: int

    @classmethod
    def of(cls, storage: PatientStorage, *, began: float, retries: int) -> Before:
        """Looks at a storage, of which so many retries were reported."""
        return cls(began, storage.bytes_read, storage.direct_bytes_read, retries)


@dataclass(frozen=True)
class Loaded:
    """What came of a load.

    Attributes:
        report: What it did.
        broken: Readers that dropped out.
        calls: Whether some rank has to call what is the caller's own before all have what they want.
        is_misread: Whether data do not lie where the manifest says, which took them to be like others.
    """

    report: LoadReport
    broken: frozenset[int]
    calls: bool
    is_misread: bool


def prepare(opened: Opened, request: Request) -> Job:
    """Does on all ranks whatever can fail before data moves, and compares the plans.

    Raises:
        FastloadError: Some rank cannot load, or what the ranks ask for does not go together.
    """
    wishes: list[Wish] = []
    jobs: list[Job] = []

    @uncollected
    def make() -> dict[str, Any]:
        wish = Wish.of(opened, request)
        wishes.append(wish)
        is_plain = wish.is_whole and opened.access.holders is None
        if is_plain:
            jobs.append(_open_whole(wish))
        wanted = [
            one.entry.name if one.piece is None else f"{one.entry.name} {one.piece.box.offsets}"
            for one in wish.matched.destinations
        ]
        return {
            "strategy": wish.decision.strategy,
            "backend": wish.backend,
            "detour": wish.detour,
            "into": "not given" if request.is_same else "given",
            "dtype": str(wish.dtype),
            "transport": jobs[0].transport.name if jobs else "",
            "names": f"{wish.matched.num_tensors} tensors ({_digest(wanted)})",
            "plan": jobs[0].plan.digest() if is_plain else "",
            "surplus": _digest(wish.matched.surplus) if wish.matched.surplus else "",
            "offer": jobs[0].transport.offer() if jobs else None,
        }

    what = f"preparing to load {opened.access.manifest.url}"
    with _closing_unused(jobs):
        answers = opened.world.agree(what, make)
        wish = wishes[0]
        require_same(answers, "into", "dtype")
        if request.is_same:
            require_same(answers, "strategy", "names", "transport", "plan")
        kinds = kinds_of(answers)
        _raise_unexpected(wish, [answer["surplus"] for answer in kinds])
        if all(answer["plan"] for answer in kinds) and _is_same(kinds, "names", "strategy", "detour"):
            require_same(answers, "transport", "plan")
            accept_offers(opened.world, what, jobs[0].transport, [answer["offer"] for answer in answers])
            return jobs.pop()
    if not _is_same(kinds, "backend", "detour"):
        wish = wish.through_hosts()  # where tensors are differs between ranks, and with it what each decides
    return _prepare_sharded(wish)


def run(
    opened: Opened, job: Job, tracing: Tracing, before: Before, *, moves: Callable[[Job], object]
) -> Loaded:
    """Moves the data, and settles on all ranks whether all of them have it.

    Args:
        opened: The checkpoint.
        job: What to load.
        tracing: Records it.
        before: What was there when the load began.
        moves: Moves the data of a job.

    Raises:
        FastloadError: Some rank has not got its bytes; the tensors may hold some of them.
    """
    world, url = opened.world, opened.access.manifest.url
    what = f"loading {url}"
    passes = [job]
    broken: set[int] = set()

    def move() -> dict[str, Any]:
        last = passes[-1]
        moves(last)
        report = _report_rank(opened, passes, before).pack()
        calls = job.wish.matched.calls or opened.options.on_report is not None
        is_misread = any(one.reader.guards is not None and one.reader.guards.is_broken for one in passes)
        return {
            "report": Each(report),
            "unread_from": last.pipeline.unread_from,
            "calls": calls,
            "is_misread": is_misread,
        }

    try:
        while True:
            answers = world.settle(
                what,
                move,
                ended=lambda error: tracing.leave("load", before.began, error),
                met=lambda: tracing.write({"what": what, "bytes_wanted": job.bytes_wanted}),
            )
            kinds = kinds_of(answers)
            if all(answer["unread_from"] is None for answer in kinds):
                break
            unread = {
                rank: answer["unread_from"]
                for rank, answer in enumerate(answers)
                if answer["unread_from"] is not None
            }
            broken |= unread.keys()
            passes.append(_prepare_rest(passes[-1], unread))
        report = LoadReport(
            url=url,
            strategy=job.wish.decision.strategy,
            why=job.wish.decision.why,
            transport=job.transport.name,
            why_transport=job.wish.why_transport(job.transport),
            bytes_wanted=job.bytes_wanted,
            num_tensors=job.wish.matched.num_tensors,
            chunk_bytes=job.plan.chunk_bytes,
            num_rounds=job.plan.num_rounds,
            depth=job.plan.depth,
            left_out=job.wish.matched.left_out,
            ranks=Reports(RankReport, answers[0]["report"]),
        )
        calls = any(answer["calls"] for answer in kinds)
        is_misread = any(answer["is_misread"] for answer in kinds)
        return Loaded(report, frozenset(broken | job.pipeline.broken), calls, is_misread)
    finally:
        passes[-1].close()


def restore(opened: Opened, matched: Match, loaded: Loaded) -> Any:
    """Does what is left once the data are there, on all ranks or on none; returns the result of the load.

    The ranks meet once more only if some of them call what is the caller's own, which may fail on one alone.

    Args:
        opened: The checkpoint.
        matched: Where the tensors belong.
        loaded: What came of moving the data.

    Raises:
        FastloadError: Some rank's ``load_state_dict``, hook or `on_report` failed.
    """
    results: list[Any] = []

    def work() -> None:
        matched.attach()
        results.append(matched.restore())
        if opened.options.on_report is not None:
            opened.options.on_report(loaded.report)

    if loaded.calls:
        opened.world.agree(f"restoring {opened.access.manifest.url}", work)
    else:
        work()
    opened.world.acknowledge()
    return results[0]


def _raise_unexpected(wish: Wish, digests: Sequence[str]) -> None:
    """Raises on all ranks if the checkpoint has what no rank wants and some rank has to.

    Raises:
        MismatchError: It has.
    """
    if not all(digests):
        return
    matched, world, manifest = wish.matched, wish.opened.world, wish.opened.access.manifest
    if len(set(digests)) == 1:
        matched.raise_unexpected(matched.surplus)
    elif unwanted := sorted(_unwanted_by_all(world, manifest, matched.surplus)):
        # Together: a rank that goes takes with it what it has left for the others.
        world.agree(f"preparing to load {manifest.url}", lambda: matched.raise_unexpected(unwanted))


def _is_same(answers: Sequence[dict[str, Any]], *keys: str) -> bool:
    return len({tuple(answer[key] for key in keys) for answer in answers}) == 1


def _digest(names: Sequence[str]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(names).encode())


def _report_rank(opened: Opened, passes: Sequence[Job], before: Before) -> RankReport:
    world, access = opened.world, opened.access
    total_s = time.perf_counter() - before.began
    pipelines = [job.pipeline for job in passes]
    read_s, exchange_s, place_s = (
        sum(pipeline.watches[stage].seconds for pipeline in pipelines)
        for stage in ("read", "exchange", "place")
    )
    drop_outs = [pipeline.drop_out for pipeline in pipelines if pipeline.drop_out]
    return RankReport(
        rank=world.rank,
        host=world.host,
        reader=world.rank in passes[0].wish.decision.readers,
        note=drop_outs[0] if drop_outs else access.notes.get(world.rank, ""),
        bytes_read=access.storage.bytes_read - before.bytes_read,
        direct_bytes_read=access.storage.direct_bytes_read - before.direct_bytes_read,
        bytes_verified=sum(job.reader.verified.total for job in passes),
        header_bytes_read=opened.header_bytes,
        bytes_received=sum(pipeline.received_bytes for pipeline in pipelines),
        bytes_in=sum(pipeline.bytes_in for pipeline in pipelines),
        read_s=read_s,
        exchange_s=exchange_s,
        place_s=place_s,
        total_s=total_s,
        peak_staging_bytes=max(pipeline.buffer_bytes for pipeline in pipelines),
        retries=access.storage.num_retries - before.retries + sum(job.reader.rereads.total for job in passes),
    )
