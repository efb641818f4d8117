"""Loads from an open checkpoint, one after the other, each to its end on all ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

from fastload.base.devices import is_accelerator
from fastload.comm.failures import kinds_of
from fastload.comm.observers import Observers, notify, notifying_of_failure, observe
from fastload.comm.responses import Each, Reports
from fastload.comm.world import World
from fastload.errors import FastloadError, Interrupted, WorldError
from fastload.formats.manifest import Manifest
from fastload.loading.access import Access, reopen_exactly
from fastload.loading.aliases import raise_differing
from fastload.loading.match import Match, Request
from fastload.loading.prepare import Job, LoadStart, Opened, open_on_all, open_rest, prepare
from fastload.options import LoadOptions
from fastload.report import LoadReport, RankReport
from fastload.transfer.read import BackgroundReads, CachedBytes, Verifier
from fastload.transfer.routed_plan import Supply

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


class Supplied(NamedTuple):
    """Bytes of a checkpoint in the memory of the ranks.

    Attributes:
        cached: Those of this rank.
        supply: Which ranks can deliver each byte, from memory or from storage; the same on all ranks.
    """

    cached: CachedBytes
    supply: Supply


class Supplier(Protocol):
    """Gets bytes of a checkpoint into the memory of the ranks before they are loaded."""

    @property
    def is_done(self) -> bool:
        """Whether this rank has all that it is to have, so that `wait` does not wait for it."""

    def wait(self, session: Session) -> None:
        """Waits until all ranks have what they are to have, verified. A call of all ranks.

        Raises:
            FastloadError: A rank failed.
        """

    def supplied(self) -> Supplied | None:
        """Returns what it has got, after `wait`; None if loads are to read storage."""

    def covers(self, manifest: Manifest) -> bool:
        """Whether it can still serve, now that layouts were read again."""

    def close(self, *, wait_s: float) -> None:
        """Ends what it has under way."""


class Session:
    """Loads from an open checkpoint. After a failure the ranks may be anywhere: no other load is possible.

    Args:
        world: The ranks.
        access: The checkpoint.
        options: How to load.
        observers: Observe the loads; None for those of the options and of the process.

    Attributes:
        opened: The checkpoint as the next load finds it.
        report: The report of the last load, or None.
        supplier: Has bytes in memory for the loads; None without one.
        has_failed: Whether a load has failed.
        is_closed: Whether it is closed.
    """

    def __init__(
        self, world: World, access: Access, options: LoadOptions, observers: Observers | None = None
    ) -> None:
        verifier = Verifier(access.stored) if access.stored.block_bytes and options.verify else None
        try:
            if observers is None:
                observers = observe(world, options.trace)
            with world.together():
                observers.begin(access.hosts)
        except BaseException:
            access.storage.close()
            raise
        self.opened = Opened(world, access, options, verifier, observers, access.storage.bytes_read)
        self.report: LoadReport | None = None
        self.supplier: Supplier | None = None
        self.has_failed = False
        self.is_closed = False
        self._opened_in = os.getpid()
        self._components: dict[int, Session] = {}  # those of `Access.components` that are in use

    @property
    def stored(self) -> Manifest:
        """The files of the checkpoint and their tensors."""
        return self.opened.access.stored

    @property
    def is_inherited(self) -> bool:
        """Whether the parent of this process opened it."""
        return self._opened_in != os.getpid()

    def require_own(self) -> None:
        """Requires that this process opened it.

        Raises:
            WorldError: Its parent did, for whose rank this process would speak.
        """
        if self.is_inherited:
            raise WorldError(
                f"{self.stored.url}: the parent of this process has this checkpoint open: use it there"
            )

    @contextmanager
    def usable(self) -> Iterator[None]:
        """Requires that no load has failed, and notes a failure within.

        Raises:
            WorldError: A load has failed, or the session is closed.
        """
        if self.has_failed:
            raise WorldError("an earlier load of this open checkpoint failed: open it again")
        if self.is_closed:
            closed = WorldError(f"{self.stored.url}: this checkpoint is closed: open it again")
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
        self.is_closed = True
        self.drop_supplier()
        self.opened.access.storage.close()

    def await_supply(self) -> None:
        """Waits until its supplier has what it is to have on all ranks; see `Supplier.wait`.

        Raises:
            FastloadError: A rank failed.
        """
        for session in self._components.values():
            session.await_supply()
        if self.supplier is not None:
            try:
                self.supplier.wait(self)
            except BaseException:
                self.drop_supplier()
                raise

    @property
    def is_supplied(self) -> bool:
        """Whether its supplier, if any, has on this rank what it is to have."""
        is_done = self.supplier is None or self.supplier.is_done
        return is_done and all(session.is_supplied for session in self._components.values())

    def component(self, number: int) -> Session:
        """Returns a component as it is stored, open by itself, by its number in `Access.components`."""
        if number not in self._components:
            opened, access = self.opened, self.opened.access.components[number]
            options = replace(opened.options, atomic=False, trace=None, progress=None, on_report=None)
            access = replace(access, logical=access.stored)
            self._components[number] = Session(opened.world, access, options, Observers())
        return self._components[number]

    def serve(self, request: Request) -> Loaded:
        """Loads on all ranks, by way of a layer that serves loads if there is one.

        Args:
            request: The request of this rank.

        Raises:
            FastloadError: A rank failed.
        """
        world, began = self.opened.world, time.perf_counter()
        with notifying_of_failure(world, "load", began, tier=self.opened.access.source):
            self.await_supply()
            start, match = LoadStart.now(self.opened), None
            for layer in self.opened.access.layers:
                match = match or layer.serve(self, request)
            loaded = self.load(request, match, start=start)
        notify(world, "load", began, report=loaded.report)
        return loaded

    def drop_supplier(self) -> None:
        """Ends what its supplier has under way, and releases its memory."""
        for session in self._components.values():
            session.drop_supplier()
        supplier, self.supplier = self.supplier, None
        if supplier is not None:
            supplier.close(wait_s=min(1.0, self.opened.world.grace_s))

    def load(
        self,
        request: Request,
        matched: Match | None = None,
        *,
        start: LoadStart | None = None,
        staging_bytes: int | None = None,
    ) -> Loaded:
        """Loads on all ranks.

        Args:
            request: The request of this rank.
            matched: Its destinations, if they are known.
            start: The beginning of the load; None for now.
            staging_bytes: Memory for it, if not that of the options; the load is then into new memory.

        Raises:
            FastloadError: A rank failed.
        """
        self.await_supply()
        start = start or LoadStart.now(self.opened)
        while True:
            opened = self.opened
            if self.supplier is not None and (supplied := self.supplier.supplied()) is not None:
                opened = replace(opened, access=replace(opened.access, **supplied._asdict()))
            if staging_bytes is not None:
                options = replace(opened.options, staging_bytes=staging_bytes, atomic=False)
                opened = replace(opened, options=options)
            job = prepare(opened, request, matched, start=start)
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
        is_ready = False
        try:
            with world.step(f"reading {self.stored.url}", is_long=True) as step:
                view, cached = plan.view(world.rank), reader.cached or CachedBytes()
                chunks = [cached.lacking(view.reads(index)) for index in range(plan.num_rounds)]
                reader.cached = cached.joined(BackgroundReads(reader, chunks).wait(world))
                step.answer(reader.is_misread)
            is_ready = not any(step.answers)
        finally:
            if not is_ready:
                job.close()
        return is_ready

    def run(self, job: Job) -> Loaded | None:
        """Moves the data, agrees with all ranks on the outcome of the load, and restores the state.

        Args:
            job: The load; closed in the end.

        Returns:
            The outcome; None if the data have to be loaded again: they were not laid out as the manifest
            inferred, or were compared with what a reader that failed has sent.

        Raises:
            FastloadError: A rank failed, or tensors of one memory differ. Some may have new bytes by then.
        """
        try:
            responses, broken = self._move(job)
            access = self.opened.access
            self.opened = replace(
                self.opened, access=access.without(broken), num_retries=access.storage.num_retries
            )
            kinds = kinds_of(responses)
            if any(one["is_misread"] for one in kinds) or (broken and any(one["is_unsure"] for one in kinds)):
                return None
            differing = list(dict.fromkeys(chain(*(one["differing"] for one in kinds))))
            raise_differing(access.stored.url, differing)
            self.report = _report(job, Reports(RankReport, responses[0]["report"]))
            if self.opened.world.rank == 0:
                _warn(self.report, broken)
            return self._restore(job, self.report, calls=any(one["calls"] for one in kinds))
        except FastloadError as error:
            error.is_partial = job.matched.match.writer is None  # which else has taken the bytes
            raise

    def _move(self, job: Job) -> tuple[list[dict[str, Any]], Collection[int]]:
        """Moves all data, those of readers that fail too.

        Returns:
            The responses of the ranks, and the readers that failed.
        """
        passes, broken = [job], set[int]()
        try:
            while True:
                responses = self._move_on_all(passes)
                unread_from = {
                    rank: one["unread_from"]
                    for rank, one in enumerate(responses)
                    if one["unread_from"] is not None
                }
                if not unread_from:
                    return responses, broken | job.pipeline.broken
                broken |= unread_from.keys()
                passes.append(open_on_all(self.opened, partial(open_rest, passes[-1], unread_from)))
        finally:
            passes[-1].close()

    def _move_on_all(self, passes: Sequence[Job]) -> list[dict[str, Any]]:
        """Moves the data of the last pass on all ranks; returns their responses."""
        job, observers, what = passes[0], self.opened.observers, f"loading {self.stored.url}"
        try:
            with self.opened.world.step(what, is_long=True) as step:
                with observers.ending("load", job.matched.start.at_s):
                    try:
                        passes[-1].run()
                    except Interrupted as error:
                        if not self.is_closed:
                            raise
                        # Perhaps no other rank has failed.
                        closed = f"{self.stored.url}: this checkpoint was closed during a load"
                        raise WorldError(closed) from error
                    response = _response(passes)
                step.answer(response)
        finally:
            observers.close({"what": what, "bytes_wanted": job.bytes_wanted})
        return step.answers

    def _restore(self, job: Job, report: LoadReport, *, calls: bool) -> Loaded:
        """Restores everything but tensors.

        Args:
            job: The load.
            report: Its report.
            calls: Whether some rank calls the caller's code, so that all ranks have to agree.

        Raises:
            FastloadError: Some rank's ``load_state_dict``, hook or `on_report` failed.
        """
        opened, match = job.matched.opened, job.matched.match
        if calls:
            with opened.world.step(f"restoring {report.url}"):
                result = match.finish()
                if opened.options.on_report is not None:
                    opened.options.on_report(report)
        else:
            result = match.finish()
        opened.world.acknowledge()
        return Loaded(report, result)

    def reopen_exactly(self) -> None:
        """Reads the layouts that the manifest has inferred."""
        self.opened = replace(self.opened, access=reopen_exactly(self.opened.world, self.opened.access))
        if self.supplier is not None and not self.supplier.covers(self.stored):
            self.drop_supplier()


def _report(job: Job, ranks: Sequence[RankReport]) -> LoadReport:
    matched = job.matched
    return LoadReport(
        url=matched.opened.access.stored.url,
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
        source=matched.opened.access.source,
        ranks=ranks,
    )


def _response(passes: Sequence[Job]) -> dict[str, Any]:
    """Returns the response of this rank after the last of some passes."""
    match, pipeline = passes[0].matched.match, passes[-1].pipeline
    return {
        "report": Each(_report_rank(passes).pack()),
        "unread_from": pipeline.unread_from,
        "calls": match.calls or passes[0].matched.opened.options.on_report is not None,
        "is_misread": any(one.pipeline.reader.is_misread for one in passes),
        "differing": [line for memory in match.aliases for line in memory.differing],
        # Between devices, chunks that could not be read are placed, too, before they are read again.
        "is_unsure": bool(match.aliases) and is_accelerator(match.device),
    }


def _report_rank(passes: Sequence[Job]) -> RankReport:
    matched = passes[0].matched
    opened, world, access = matched.opened, matched.opened.world, matched.opened.access
    total_s = time.perf_counter() - matched.start.at_s
    pipelines = [job.pipeline for job in passes]
    read_s, exchange_s, place_s = (
        sum(pipeline.watches[stage].seconds for pipeline in pipelines)
        for stage in ("read", "exchange", "place")
    )
    times = [pipeline.reader.pace.times for pipeline in pipelines]
    num_answers = sum(pace.num_answers for pace in times)
    drop_outs = [pipeline.drop_out for pipeline in pipelines if pipeline.drop_out]
    return RankReport(
        rank=world.rank,
        host=world.host,
        reader=world.rank in matched.decision.readers,
        note=drop_outs[0] if drop_outs else access.notes.get(world.rank, ""),
        bytes_read=access.storage.bytes_read - matched.start.bytes_read,
        direct_bytes_read=access.storage.direct_bytes_read - matched.start.direct_bytes_read,
        bytes_verified=sum(job.pipeline.reader.verified.total for job in passes),
        bytes_supplied=access.storage.supplied_bytes - matched.start.bytes_supplied,
        problems="; ".join(access.storage.problems),
        bytes_patched=matched.match.bytes_patched,
        header_bytes_read=opened.header_bytes,
        bytes_received=sum(pipeline.received_bytes for pipeline in pipelines),
        bytes_in=sum(pipeline.transport.bytes_in for pipeline in pipelines),
        read_s=read_s,
        num_reads=sum(pace.num_reads for pace in times),
        reads_in_flight=sum(pace.reading_s for pace in times) / read_s if read_s else 0.0,
        first_byte_s=sum(pace.first_byte_s for pace in times) / num_answers if num_answers else 0.0,
        exchange_s=exchange_s,
        place_s=place_s,
        cpu_s=time.process_time() - matched.start.cpu_s,
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
