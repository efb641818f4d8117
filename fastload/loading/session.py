"""The loads from an open checkpoint on one rank: runs them one after the other, until one fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from fastload.comm.failures import kinds_of
from fastload.comm.responses import Each, Reports
from fastload.comm.traces import Tracing
from fastload.comm.world import World
from fastload.errors import WorldError
from fastload.formats.manifest import Manifest
from fastload.loading.access import Access, reopen_exactly
from fastload.loading.prepare import Job, Opened, Request, prepare, prepare_rest
from fastload.options import LoadOptions
from fastload.report import LoadReport, RankReport
from fastload.transfer.read import ChunkReader, Verifier

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
        reader: Reads the chunks of the last load; None before the first.
        has_failed: Whether a load has failed.
        is_closed: Whether it is closed.
    """

    def __init__(self, world: World, access: Access, options: LoadOptions) -> None:
        verifier = Verifier(access.manifest) if access.manifest.block_bytes and options.verify else None
        tracing = Tracing(world, options.trace)
        tracing.synchronize(access.hosts)
        self.opened = Opened(world, access, options, verifier, tracing, access.storage.bytes_read)
        self.report: LoadReport | None = None
        self.reader: ChunkReader | None = None
        self.has_failed = False
        self.is_closed = False

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
        """Closes storage, once no read is under way: a closed descriptor may soon be another file's."""
        self.is_closed = True
        close = self.opened.access.storage.close
        if self.reader is None:
            close()
        else:
            self.reader.at_end(close)

    def load(self, request: Request, *, staging_bytes: int | None = None) -> Loaded:
        """Loads on all ranks.

        Args:
            request: The request of this rank.
            staging_bytes: Memory for it, if not that of the options.

        Raises:
            FastloadError: A rank failed.
        """
        while True:
            job = self.prepare(request, staging_bytes=staging_bytes)
            loaded = self.settle(job)
            if loaded is not None:
                return loaded
            self.reopen_exactly()

    def prepare(self, request: Request, *, staging_bytes: int | None = None) -> Job:
        """Prepares a load on all ranks; see `load` and `prepare.prepare`."""
        opened = self.opened
        if staging_bytes is not None:
            opened = replace(opened, options=replace(opened.options, staging_bytes=staging_bytes))
        job = prepare(opened, request)
        self.reader = job.reader
        return job

    def settle(self, job: Job, errors: list[BaseException] | None = None) -> Loaded | None:
        """Runs a load, agrees with all ranks on its outcome, and restores the state.

        Args:
            job: The load.
            errors: The errors of this rank, if the job has run; None to run it.

        Returns:
            The outcome; None if data were not laid out as the manifest inferred, and have to be loaded again.

        Raises:
            FastloadError: A rank failed; the tensors may hold some of their bytes.
        """
        opened, world, url = job.request.opened, job.request.opened.world, self.manifest.url
        what = f"loading {url}"
        passes, broken = [job], set[int]()

        def work() -> dict[str, Any]:
            if errors is None:
                passes[-1].pipeline.run()
            elif errors:
                _raise_first(errors)
            return {
                "report": Each(_report_rank(passes).pack()),
                "unread_from": passes[-1].pipeline.unread_from,
                "calls": job.request.matched.calls or opened.options.on_report is not None,
                "is_misread": any(
                    one.reader.guards is not None and one.reader.guards.is_broken for one in passes
                ),
            }

        try:
            while True:
                responses = world.settle(
                    what,
                    work,
                    ended=lambda error: opened.tracing.leave("load", job.request.began, error),
                    met=lambda: opened.tracing.write({"what": what, "bytes_wanted": job.bytes_wanted}),
                )
                unread_from = {
                    rank: one["unread_from"]
                    for rank, one in enumerate(responses)
                    if one["unread_from"] is not None
                }
                if not unread_from:
                    break
                broken |= unread_from.keys()
                passes.append(prepare_rest(passes[-1], unread_from))
                self.reader = passes[-1].reader
            broken |= job.pipeline.broken
        finally:
            passes[-1].close()
        access = self.opened.access
        self.opened = replace(
            self.opened, access=access.without(broken), num_retries=access.storage.num_retries
        )
        kinds = kinds_of(responses)
        if any(one["is_misread"] for one in kinds):
            return None
        self.report = _report(job, Reports(RankReport, responses[0]["report"]))
        if world.rank == 0:
            _warn(self.report, broken)
        return self._restore(job, self.report, calls=any(one["calls"] for one in kinds))

    def _restore(self, job: Job, report: LoadReport, *, calls: bool) -> Loaded:
        """Restores everything but tensors.

        Args:
            job: The load.
            report: Its report.
            calls: Whether some rank calls the caller's code, so that all ranks have to agree.

        Raises:
            FastloadError: Some rank's ``load_state_dict``, hook or `on_report` failed.
        """
        opened, results = job.request.opened, list[Any]()

        def finish() -> None:
            results.append(job.request.matched.finish())
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


def _raise_first(errors: list[BaseException]) -> None:
    try:
        raise errors[0]
    finally:
        errors.clear()  # else error → traceback → frame → error would keep all their memory alive


def _report(job: Job, ranks: Sequence[RankReport]) -> LoadReport:
    request = job.request
    return LoadReport(
        url=request.opened.access.manifest.url,
        strategy=request.decision.strategy,
        why=request.decision.why,
        transport=job.transport.name,
        why_transport=request.why_transport(job.transport),
        bytes_wanted=job.bytes_wanted,
        num_tensors=request.matched.num_tensors,
        chunk_bytes=job.plan.chunk_bytes,
        num_rounds=job.plan.num_rounds,
        depth=job.plan.depth,
        left_out=request.matched.left_out,
        ranks=ranks,
    )


def _report_rank(passes: Sequence[Job]) -> RankReport:
    request = passes[0].request
    opened, world, access = request.opened, request.opened.world, request.opened.access
    total_s = time.perf_counter() - request.began
    pipelines = [job.pipeline for job in passes]
    read_s, exchange_s, place_s = (
        sum(pipeline.watches[stage].seconds for pipeline in pipelines)
        for stage in ("read", "exchange", "place")
    )
    drop_outs = [pipeline.drop_out for pipeline in pipelines if pipeline.drop_out]
    return RankReport(
        rank=world.rank,
        host=world.host,
        reader=world.rank in request.decision.readers,
        note=drop_outs[0] if drop_outs else access.notes.get(world.rank, ""),
        bytes_read=access.storage.bytes_read - request.bytes_read_before,
        direct_bytes_read=access.storage.direct_bytes_read - request.direct_bytes_read_before,
        bytes_verified=sum(job.reader.verified.total for job in passes),
        header_bytes_read=opened.header_bytes,
        bytes_received=sum(pipeline.received_bytes for pipeline in pipelines),
        bytes_in=sum(pipeline.bytes_in for pipeline in pipelines),
        read_s=read_s,
        exchange_s=exchange_s,
        place_s=place_s,
        total_s=total_s,
        peak_staging_bytes=max(pipeline.buffer_bytes for pipeline in pipelines),
        retries=access.storage.num_retries
        - opened.num_retries
        + sum(job.reader.rereads.total for job in passes),
    )


def _warn(report: LoadReport, broken: set[int]) -> None:
    """Logs the readers that failed, and what was left out."""
    for rank in report.ranks:
        if rank.rank in broken:
            _log.warning("%s: rank %d on %s %s", report.url, rank.rank, rank.host, rank.note)
    if report.left_out:
        _log.warning("%s: left out: %s", report.url, ", ".join(report.left_out))
