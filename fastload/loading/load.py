"""Loads from an open checkpoint: request → matched destinations → plan → job → report."""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import groupby
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import xxhash

from fastload.base.devices import is_accelerator
from fastload.base.memory import PAGE_BYTES, uncollected
from fastload.base.state_copies import state_copies
from fastload.comm.failures import kinds_of, require_same
from fastload.comm.group import backend_of, members_of
from fastload.comm.responses import Each, Reports
from fastload.comm.traces import Tracing
from fastload.comm.world import World
from fastload.errors import FastloadError, Interrupted, WorldError
from fastload.formats.manifest import Manifest
from fastload.geometry.box import Runs
from fastload.loading.access import Access, reopen_exactly
from fastload.loading.match import Match
from fastload.loading.patch import patched
from fastload.loading.prefetch import BackgroundReads, Prefetch
from fastload.loading.targets import Destination, TensorWriter, parse_dtype
from fastload.options import LoadOptions
from fastload.report import LoadReport, RankReport
from fastload.transfer.buffers import Plan
from fastload.transfer.demand import Part, RankRequest, RankRequests, SharingGroups
from fastload.transfer.links import accept_offers
from fastload.transfer.messages import ring_order
from fastload.transfer.pipeline import Pipeline, read_threads
from fastload.transfer.plan import StrategyChoice, TransferPlan, choose_strategy, plan_transfer
from fastload.transfer.read import ChunkReader, Guards, HeldBytes, Verifier
from fastload.transfer.routed_plan import Holders, RoutedPlan, plan_routes
from fastload.transfer.transport import Transport

if TYPE_CHECKING:
    from fastload.loading.stream import StreamBuffer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The outcome of a load.

    Attributes:
        report: The report over all ranks.
        result: The result on this rank.
    """

    report: LoadReport
    result: Any


class Session:
    """Loads from an open checkpoint. After a failure the ranks may be anywhere: no other load is possible.

    Args:
        world: The ranks.
        access: The checkpoint.
        options: How to load.

    Attributes:
        opened: The checkpoint as the next load finds it.
        report: The report of the last load, or None.
        has_failed: Whether a load has failed.
        is_closed: Whether it is closed.
    """

    def __init__(self, world: World, access: Access, options: LoadOptions) -> None:
        verifier = Verifier(access.manifest) if access.manifest.block_bytes and options.verify else None
        tracing = Tracing(world, options.trace)
        tracing.synchronize(access.hosts)
        self.opened = Opened(world, access, options, verifier, tracing, access.storage.bytes_read)
        self.report: LoadReport | None = None
        self.has_failed = False
        self.is_closed = False
        self._prefetch: Prefetch | None = None  # until all ranks have read their shares
        self._held: tuple[HeldBytes, Holders] | None = None  # from then on
        self._deltas: dict[int, Session] = {}  # those of `Access.deltas` that are in use

    @property
    def manifest(self) -> Manifest:
        """The files and tensors of the checkpoint."""
        return self.opened.access.manifest

    @contextmanager
    def usable(self) -> Iterator[None]:
        """Requires that no load has failed, and notes a failure within.

        Raises:
            WorldError: A load has failed, or the session is closed.
        """
        if self.has_failed:
            raise WorldError("an earlier load of this open checkpoint failed: open it again")
        if self.is_closed:
            closed = WorldError(f"{self.manifest.url}: this checkpoint is closed: open it again")
            self.opened.world.leave(closed)  # other ranks may have it open
            raise closed
        try:
            with self.opened.world.together():
                yield
        except BaseException:
            self.has_failed = True
            raise

    def leave(self, error: BaseException) -> None:
        """Tells the other ranks that this one takes part in no more loads."""
        if not (self.has_failed or self.is_closed):
            self.opened.world.leave(error)

    def close(self) -> None:
        """Closes storage, once no read is under way."""
        self.is_closed, self._held = True, None
        self._end_prefetch()
        self.opened.access.storage.close()

    def prefetch(self) -> None:
        """Begins to read this rank's share into host memory, on all ranks.

        Raises:
            FastloadError: A rank failed.
        """
        if self._prefetch is not None or self._held is not None:
            return
        if self.opened.access.deltas:  # a model that holds the base needs no more
            self._delta(0).prefetch()
            return

        def begin() -> None:
            self._prefetch = Prefetch(self.opened)

        try:
            self.opened.world.agree(f"prefetching {self.manifest.url}", begin)
        except BaseException:
            self._end_prefetch()
            raise

    def await_prefetch(self) -> None:
        """Waits until all ranks have read and verified their shares, if they are being read.

        Raises:
            FastloadError: A rank failed.
        """
        for session in self._deltas.values():
            session.await_prefetch()
        while (prefetch := self._prefetch) is not None:
            held: list[HeldBytes] = []

            def work(prefetch: Prefetch = prefetch, held: list[HeldBytes] = held) -> bool:
                held.append(prefetch.wait(self.opened.world))
                return prefetch.reader.is_misread

            try:
                responses = self.opened.world.settle(f"prefetching {self.manifest.url}", work)
            finally:
                self._end_prefetch()
            if any(responses):
                self.reopen_exactly()
                self.prefetch()
            else:
                self._held = held[0], prefetch.holders()

    @property
    def is_prefetched(self) -> bool:
        """Whether no read of what this rank prefetches is under way."""
        is_done = self._prefetch is None or self._prefetch.is_done
        return is_done and all(session.is_prefetched for session in self._deltas.values())

    def _delta(self, number: int) -> Session:
        """Returns the open files of a delta, by its number in `Access.deltas`."""
        if number not in self._deltas:
            opened = self.opened
            options = replace(opened.options, atomic=False, trace=None, progress=None, on_report=None)
            self._deltas[number] = Session(opened.world, opened.access.deltas[number], options)
        return self._deltas[number]

    def _end_prefetch(self) -> None:
        for session in self._deltas.values():
            session._end_prefetch()
        pending, self._prefetch = self._prefetch, None
        if pending is not None:
            pending.close(wait_s=min(1.0, self.opened.world.grace_s))

    def load(self, request: Request, *, staging_bytes: int | None = None) -> Loaded:
        """Loads on all ranks.

        Args:
            request: The request of this rank.
            staging_bytes: Memory for it, if not that of the options.

        Raises:
            FastloadError: A rank failed.
        """
        self.await_prefetch()
        opened, start = self.opened, LoadStart.now(self.opened)
        if opened.access.deltas and staging_bytes is None:
            request = patched(opened, request, partial(opened.match, request), self._delta)
        while True:
            opened = self.opened
            if self._held is not None:
                held, holders = self._held
                opened = replace(opened, access=replace(opened.access, held=held, holders=holders))
            if staging_bytes is not None:  # for a part of a stream, in new memory
                options = replace(opened.options, staging_bytes=staging_bytes, atomic=False)
                opened = replace(opened, options=options)
            job = prepare(opened, request, start)
            if not opened.options.atomic or self._read_first(job):
                loaded = self.run(job)
                if loaded is not None:
                    return loaded
            self.reopen_exactly()

    def _read_first(self, job: Job) -> bool:
        """Reads and verifies what this rank will send or place, on all ranks, before anything is placed.

        Returns:
            Whether data were laid out as the manifest inferred; if not, the job is closed.

        Raises:
            FastloadError: A rank failed; nothing has changed.
        """
        world, plan, reader = job.matched.opened.world, job.pipeline.plan, job.pipeline.reader

        def work() -> bool:
            view, held = plan.view(world.rank), reader.held or HeldBytes()
            chunks = [held.lacking(view.reads(index)) for index in range(plan.num_rounds)]
            reader.held = held.joined(BackgroundReads(reader, chunks).wait(world))
            return reader.is_misread

        is_ready = False
        try:
            is_ready = not any(world.settle(f"reading {self.manifest.url}", work))
        finally:
            if not is_ready:
                job.close()
        return is_ready

    def run(self, job: Job, errors: list[BaseException] | None = None) -> Loaded | None:
        """Runs a load, agrees with all ranks on its outcome, and restores the state.

        Args:
            job: The load.
            errors: The errors of this rank, if it is a stream, which has run; None to run it.

        Returns:
            The outcome; None if data were not laid out as the manifest inferred, and have to be loaded again.

        Raises:
            FastloadError: A rank failed; the tensors may hold some of their bytes.
        """
        try:
            responses, broken = self._move(job, errors)
            access = self.opened.access
            self.opened = replace(
                self.opened, access=access.without(broken), num_retries=access.storage.num_retries
            )
            kinds = kinds_of(responses)
            if any(one["is_misread"] for one in kinds):
                return None
            self.report = _report(job, Reports(RankReport, responses[0]["report"]))
            if self.opened.world.rank == 0:
                _warn(self.report, broken)
            return self._restore(job, self.report, calls=any(one["calls"] for one in kinds))
        except FastloadError as error:
            if errors is None:
                error.is_partial = True
            raise

    def _move(
        self, job: Job, errors: list[BaseException] | None
    ) -> tuple[list[dict[str, Any]], Collection[int]]:
        """Moves all data, those of readers that fail too.

        Args:
            job: The load; closed in the end.
            errors: As for `run`.

        Returns:
            The responses of the ranks, and the readers that failed.
        """
        opened, world = job.matched.opened, job.matched.opened.world
        what = f"loading {self.manifest.url}"
        passes, broken = [job], set[int]()

        def work() -> dict[str, Any]:
            if errors is None:
                passes[-1].run()
            elif errors:
                _raise_first(errors)
            return {
                "report": Each(_report_rank(passes).pack()),
                "unread_from": passes[-1].pipeline.unread_from,
                "calls": job.matched.match.calls or opened.options.on_report is not None,
                "is_misread": any(one.pipeline.reader.is_misread for one in passes),
            }

        try:
            while True:
                responses = world.settle(
                    what,
                    work,
                    ended=lambda error: opened.tracing.leave("load", job.matched.start.at_s, error),
                    met=lambda: opened.tracing.write({"what": what, "bytes_wanted": job.bytes_wanted}),
                )
                unread_from = {
                    rank: one["unread_from"]
                    for rank, one in enumerate(responses)
                    if one["unread_from"] is not None
                }
                if not unread_from:
                    return responses, broken | job.pipeline.broken
                broken |= unread_from.keys()
                rest = partial(_open_rest, passes[-1], unread_from)
                passes.append(open_on_all(job.matched, rest))
        finally:
            passes[-1].close()

    def _restore(self, job: Job, report: LoadReport, *, calls: bool) -> Loaded:
        """Restores everything but tensors.

        Args:
            job: The load.
            report: Its report.
            calls: Whether some rank calls the caller's code, so that all ranks have to agree.

        Raises:
            FastloadError: Some rank's ``load_state_dict``, hook or `on_report` failed.
        """
        opened, results = job.matched.opened, list[Any]()

        def finish() -> None:
            results.append(job.matched.match.finish())
            if opened.options.on_report is not None:
                opened.options.on_report(report)

        if calls:
            opened.world.agree(f"restoring {report.url}", finish)
        else:
            finish()
        opened.world.acknowledge()
        return Loaded(report, results[0])

    def reopen_exactly(self) -> None:
        """Reads the layouts that the manifest has inferred."""
        self.opened = replace(self.opened, access=reopen_exactly(self.opened.world, self.opened.access))
        if self._held is not None and self._held[1].lacking(self.manifest.extents):
            self._held = None


def _raise_first(errors: list[BaseException]) -> None:
    try:
        raise errors[0]
    finally:
        errors.clear()  # else error → traceback → frame → error would keep all their memory alive


def _report(job: Job, ranks: Sequence[RankReport]) -> LoadReport:
    matched = job.matched
    return LoadReport(
        url=matched.opened.access.manifest.url,
        strategy=matched.decision.strategy,
        why=matched.decision.why,
        transport=job.pipeline.transport.name,
        why_transport=matched.why_transport(job.pipeline.transport),
        bytes_wanted=job.bytes_wanted,
        num_tensors=matched.match.num_tensors,
        chunk_bytes=job.pipeline.plan.chunk_bytes,
        num_rounds=job.pipeline.plan.num_rounds,
        depth=job.pipeline.plan.depth,
        left_out=matched.match.left_out,
        ranks=ranks,
    )


def _report_rank(passes: Sequence[Job]) -> RankReport:
    matched = passes[0].matched
    opened, world, access = matched.opened, matched.opened.world, matched.opened.access
    total_s = time.perf_counter() - matched.start.at_s
    pipelines = [job.pipeline for job in passes]
    read_s, exchange_s, place_s = (
        sum(pipeline.watches[stage].seconds for pipeline in pipelines)
        for stage in ("read", "exchange", "place")
    )
    drop_outs = [pipeline.drop_out for pipeline in pipelines if pipeline.drop_out]
    return RankReport(
        rank=world.rank,
        host=world.host,
        reader=world.rank in matched.decision.readers,
        note=drop_outs[0] if drop_outs else access.notes.get(world.rank, ""),
        bytes_read=access.storage.bytes_read - matched.start.bytes_read,
        direct_bytes_read=access.storage.direct_bytes_read - matched.start.direct_bytes_read,
        bytes_verified=sum(job.pipeline.reader.verified.total for job in passes),
        bytes_patched=matched.match.bytes_patched,
        header_bytes_read=opened.header_bytes,
        bytes_received=sum(pipeline.received_bytes for pipeline in pipelines),
        bytes_in=sum(pipeline.transport.bytes_in for pipeline in pipelines),
        read_s=read_s,
        exchange_s=exchange_s,
        place_s=place_s,
        total_s=total_s,
        peak_staging_bytes=max(pipeline.buffer_bytes for pipeline in pipelines),
        retries=access.storage.num_retries
        - opened.num_retries
        + sum(job.pipeline.reader.rereads.total for job in passes),
    )


def _warn(report: LoadReport, broken: Collection[int]) -> None:
    """Logs the readers that failed, and what was left out."""
    for rank in report.ranks:
        if rank.rank in broken:
            _log.warning("%s: rank %d on %s %s", report.url, rank.rank, rank.host, rank.note)
    if report.left_out:
        _log.warning("%s: left out: %s", report.url, ", ".join(report.left_out))


# Preparing a load on all ranks: everything that can fail before data move


@dataclass(frozen=True)
class Opened:
    """A checkpoint that all ranks have open, as one load finds it.

    Attributes:
        world: The ranks.
        access: The checkpoint and its readers.
        options: How to load.
        verifier: Knows the checksum blocks; None if they are not verified.
        tracing: Records the loads.
        header_bytes: Bytes that this rank read to open it.
        num_retries: Retries that earlier loads have reported.
    """

    world: World
    access: Access
    options: LoadOptions
    verifier: Verifier | None
    tracing: Tracing
    header_bytes: int
    num_retries: int = 0

    @property
    def block_bytes(self) -> int:
        """Length of the parts of a tensor with one reader: checksum blocks; 0 for parts of any length."""
        if self.verifier is not None:
            return self.access.manifest.block_bytes
        return PAGE_BYTES if self.access.holders is not None else 0

    @property
    def ranks_on_host(self) -> int:
        """Number of ranks on this rank's host."""
        return self.access.hosts.count(self.access.hosts[self.world.rank])

    def read_threads(self, plan: Plan) -> int:
        """Returns how many reads this rank has in flight."""
        in_order = self.access.storage.in_order
        return read_threads(
            self.options.read_threads, plan, ranks_on_host=self.ranks_on_host, in_order=in_order
        )

    def open_reader(self, plan: Plan, *, in_parts: bool, via_cache: bool = False) -> ChunkReader:
        """Opens the reader of this rank's chunks.

        Args:
            plan: The plan.
            in_parts: Whether data may be read without their first byte; see `Guards`.
            via_cache: Whether other ranks of this host read the same bytes.
        """
        manifest = self.access.manifest
        return ChunkReader(
            self.access.storage,
            manifest.files,
            threads=self.read_threads(plan),
            verifier=self.verifier,
            via_cache=via_cache,
            guards=Guards(manifest, in_parts=in_parts) if manifest.guards else None,
            held=self.access.held,
        )

    def match(self, request: Request) -> Match:
        """Finds the destinations of a request of this rank; errors are those of `LoadRequest.match`."""
        world = self.world
        return request.match(self.access.tensors, world.rank, world.size, members_of(world.group))

    @property
    def cores(self) -> int:
        """This rank's share of its host's cores, at least 1."""
        return max(1, (os.cpu_count() or 1) // self.ranks_on_host)


class LoadStart(NamedTuple):
    """The beginning of a load, from which its report counts.

    Attributes:
        at_s: By `time.perf_counter`.
        bytes_read: Bytes read from storage until then.
        direct_bytes_read: The part of them that bypassed the page cache.
    """

    at_s: float
    bytes_read: int
    direct_bytes_read: int

    @classmethod
    def now(cls, opened: Opened) -> LoadStart:
        """Returns the beginning of a load that begins now."""
        storage = opened.access.storage
        return cls(time.perf_counter(), storage.bytes_read, storage.direct_bytes_read)


class Request(Protocol):
    """A request of one rank, made by one of the methods of `Checkpoint`.

    Attributes:
        dtype: The dtype that floating point tensors are cast to, or None.
        is_same: Whether all ranks have to request the same.
    """

    @property
    def dtype(self) -> torch.dtype | str | None: ...  # noqa: D102
    @property
    def is_same(self) -> bool: ...  # noqa: D102

    def match(self, manifest: Manifest, rank: int, size: int, members: Sequence[int] | None) -> Match:
        """Finds the destinations; see `LoadRequest.match`."""
        ...


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
    def of(cls, opened: Opened, request: Request, start: LoadStart) -> MatchedRequest:
        """Matches a request.

        Raises:
            FastloadError: This rank cannot load it.
        """
        match = opened.match(request)
        backend, detour = "", "the tensors are in host memory"
        if is_accelerator(match.device):
            backend = backend_of(opened.world.group, match.device.type)
            detour = (
                "" if backend else f"the process group has no backend between {match.device.type} devices"
            )
        decision = decide(opened, fast_links=bool(backend))
        if match.stream_buffer is not None and match.stream_buffer.is_mapped:
            decision = replace(decision, why=f"{decision.why}; mapped, not read")
        return cls(opened, match, decision, backend, detour, start)

    def through_hosts(self) -> MatchedRequest:
        """Returns the request with the strategy of a group whose devices no backend connects."""
        detour = "not all ranks load to devices that one backend connects"
        return replace(self, decision=decide(self.opened), backend="", detour=detour)

    def why_transport(self, transport: Transport) -> str:
        """Returns why a transport carries the bytes, for the report."""
        if transport.name == "none":
            return "no rank needs bytes from another one"
        if not self.backend:
            return self.detour
        if transport.name.startswith(self.backend):
            return f"the process group's backend between {self.match.device.type} devices"
        return "no two ranks want the same bytes, or they form too many groups for communicators of devices"


def decide(opened: Opened, *, fast_links: bool = False) -> StrategyChoice:
    """Chooses the strategy of a load.

    Args:
        opened: The checkpoint.
        fast_links: Whether a backend moves data between devices.
    """
    access = opened.access
    if access.holders is not None:
        return StrategyChoice("allgather", "readers have different parts in memory", access.readers)
    strategy, why = opened.options.strategy, ""
    if opened.options.atomic and strategy == "auto":
        strategy, why = "allgather", "until all is read, each rank holds what it reads"
    choice = choose_strategy(
        strategy,
        world_size=opened.world.size,
        readers=access.readers,
        hosts=access.hosts,
        shared=access.shared,
        fast_links=fast_links,
    )
    return replace(choice, why=why) if why and choice.strategy == strategy else choice


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
    writer: TensorWriter | StreamBuffer
    pipeline: Pipeline

    def run(self) -> None:
        """Runs the rounds of a load that is no stream; see `Pipeline.steps` for errors."""
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
            _log.warning("%s: a read is still under way and may yet write", opened.access.manifest.url)


def prepare(opened: Opened, request: Request, start: LoadStart | None = None) -> Job:
    """Does everything on all ranks that can fail before data move, and compares the plans.

    Args:
        opened: The checkpoint.
        request: The request of this rank.
        start: The beginning of the load; None for now.

    Raises:
        FastloadError: A rank cannot load, or the requests of the ranks do not fit each other.
    """
    start = start or LoadStart.now(opened)
    found: list[MatchedRequest] = []
    jobs: list[Job] = []

    @uncollected
    def make() -> dict[str, Any]:
        found.append(matched := MatchedRequest.of(opened, request, start))
        destinations = matched.match.destinations
        if all(one.runs is None for one in destinations) and opened.access.holders is None:
            jobs.append(_open_common(matched))
        wanted = [
            one.entry.name if one.piece is None else f"{one.entry.name} {one.piece.box.offsets}"
            for one in destinations
        ]
        return {
            "strategy": matched.decision.strategy,
            "backend": matched.backend,
            "detour": matched.detour,
            "into": "not given" if request.is_same else "given",
            "dtype": str(parse_dtype(request.dtype)),
            "names": f"{matched.match.num_tensors} tensors ({_digest(wanted)})",
            "surplus": _digest(matched.match.surplus) if matched.match.surplus else "",
            **(_terms(jobs[0]) if jobs else {"transport": "", "plan": "", "offer": None}),
        }

    what = f"preparing to load {opened.access.manifest.url}"
    state_copies.wait()
    with _closing_unused(jobs):
        responses = opened.world.agree(what, make)
        matched = found[0]
        require_same(responses, "into", "dtype")
        if request.is_same:
            require_same(responses, "strategy", "names", "transport", "plan")
        kinds = kinds_of(responses)
        _raise_unexpected(matched, [one["surplus"] for one in kinds])
        if all(one["plan"] for one in kinds) and _is_same(kinds, "names", "strategy", "detour"):
            return _accepted(what, jobs, responses)
    if not _is_same(kinds, "backend", "detour"):
        matched = matched.through_hosts()  # the devices differ between the ranks, and so do their strategies
    return _prepare_sharded(matched)


def _raise_unexpected(matched: MatchedRequest, digests: Sequence[str]) -> None:
    """Raises on all ranks if the checkpoint has names that no rank wants and some rank has to.

    Raises:
        MismatchError: It has.
    """
    if not all(digests):
        return
    match, world, manifest = matched.match, matched.opened.world, matched.opened.access.manifest
    if len(set(digests)) == 1:
        match.raise_unexpected(manifest.url, match.surplus)
    elif unwanted := sorted(_unwanted_by_all(world, manifest, match.surplus)):
        # Together: a rank that leaves takes the bytes along that it has left for the others.
        what = f"preparing to load {manifest.url}"
        world.agree(what, lambda: match.raise_unexpected(manifest.url, unwanted))


def _is_same(responses: Sequence[dict[str, Any]], *keys: str) -> bool:
    return len({tuple(one[key] for key in keys) for one in responses}) == 1


def _digest(names: Sequence[str]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(names).encode())


@contextmanager
def _closing_unused(jobs: list[Job]) -> Iterator[None]:
    """Closes the jobs that are still in a list at the end, none of which has begun."""
    try:
        yield
    finally:
        while jobs:
            jobs.pop().close()


# All ranks want the same tensors, none in parts


def _open_common(matched: MatchedRequest) -> Job:
    """Opens a load in which all ranks want the tensors that this one wants.

    Raises:
        FastloadError: Options do not fit.
        MemoryError: Staging buffers do not fit into memory.
    """
    opened, decision = matched.opened, matched.decision
    world, options, access = opened.world, opened.options, opened.access
    stream_buffer = matched.match.stream_buffer
    is_stream = stream_buffer is not None
    extents = [destination.extent for destination in matched.match.destinations]
    staging_bytes = options.staging_bytes // (2 if is_stream else 1)  # the stream buffer has the other half
    between_devices = bool(matched.backend) and not decision.alone
    shares_memory = not between_devices and not decision.alone
    plan = plan_transfer(
        [] if stream_buffer is not None and stream_buffer.is_mapped else extents,
        decision.readers_for(world.rank),
        decision.recipients_with(world.rank, world.size),
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
    return open_job(matched, plan, sum(extent.nbytes for extent in extents))


def open_job(
    matched: MatchedRequest, plan: Plan, bytes_wanted: int, writer: TensorWriter | StreamBuffer | None = None
) -> Job:
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
    via_cache = matched.decision.alone and opened.ranks_on_host > 1
    reader = opened.open_reader(plan, in_parts=not isinstance(plan, TransferPlan), via_cache=via_cache)
    writer = writer or matched.match.stream_buffer
    writer = writer or TensorWriter(matched.match.destinations, opened.cores)
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
    opened.tracing.follow(pipeline.watches)
    return Job(matched, bytes_wanted, writer, pipeline)


# Ranks want different bytes


def _prepare_sharded(matched: MatchedRequest) -> Job:
    """Gathers what each rank wants, and opens the load.

    Raises:
        FastloadError: On some rank options do not fit, or it did not respond.
    """
    opened = matched.opened
    manifest = opened.access.manifest
    what = f"telling what each rank wants of {manifest.url}"
    wanted: list[RankRequest] = []

    def tell() -> bytes:
        wanted.append(request_of(manifest, matched.match.destinations))
        return wanted[0].packed

    packed = opened.world.gather_bytes(what, tell)

    def open_it() -> Job:
        requests = RankRequests.unpack(packed)
        # What a mount reads ahead is to be what its reader asks for next, whoever wants it.
        contiguous = opened.access.is_mounted and not matched.decision.alone
        sharing = SharingGroups(manifest.extents, requests, opened.block_bytes, contiguous=contiguous)
        bytes_wanted = sharing.union_bytes
        if matched.decision.alone:
            alone = RankRequests((wanted[0],), ((opened.world.rank,),))
            sharing = SharingGroups(manifest.extents, alone, opened.block_bytes)
        plan = plan_routes(
            sharing,
            matched.decision.readers_for(opened.world.rank),
            order=ring_order(opened.access.hosts),
            staging_bytes=opened.options.staging_bytes,
            chunk_bytes=opened.options.chunk_bytes,
            holders=opened.access.holders,
        )
        return open_job(matched, plan, bytes_wanted)

    return open_on_all(matched, open_it)


def open_on_all(matched: MatchedRequest, open_it: Callable[[], Job]) -> Job:
    """Opens a load on all ranks, and compares the plans."""
    jobs: list[Job] = []

    @uncollected
    def make() -> dict[str, Any]:
        jobs.append(open_it())
        return _terms(jobs[0])

    what = f"planning to load {matched.opened.access.manifest.url}"
    with _closing_unused(jobs):
        return _accepted(what, jobs, matched.opened.world.agree(what, make))


def _terms(job: Job) -> dict[str, Any]:
    """Returns what the ranks compare of a job that each has opened, and how they connect."""
    plan, transport = job.pipeline.plan, job.pipeline.transport
    is_own = job.matched.decision.alone and isinstance(plan, RoutedPlan)
    digest = "each rank its own" if is_own else plan.digest()
    return {"transport": transport.name, "plan": digest, "offer": transport.offer()}


def _accepted(what: str, jobs: list[Job], responses: Sequence[Mapping[str, Any]]) -> Job:
    """Takes a job from a list, once its transport has the offers of all ranks."""
    require_same(responses, "transport", "plan")
    world, transport = jobs[0].matched.opened.world, jobs[0].pipeline.transport
    accept_offers(world, what, transport, [one["offer"] for one in responses])
    return jobs.pop()


def _open_rest(job: Job, unread_from: Mapping[int, int]) -> Job:
    """Ends a job, and opens one for what its failed readers did not read.

    Args:
        job: The job.
        unread_from: Readers that failed, each with the first round that it did not read.

    Raises:
        FastloadError: No rank can read it.
    """
    plan = job.pipeline.plan
    assert isinstance(plan, RoutedPlan)
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
    what = f"comparing what the ranks do not want of {manifest.url}"
    packed = world.gather_bytes(what, lambda: _pack_names(surplus, names))
    found = [_unpack_names(data) for data in set(packed)]
    mask = reduce(and_, (mask for mask, _ in found))
    others = reduce(and_, (others for _, others in found))
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
