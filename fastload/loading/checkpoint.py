"""A checkpoint that all ranks of a group have open, and what they do with it together."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import xxhash

from fastload.base.memory import uncollected
from fastload.base.threads import ProcessLock
from fastload.errors import FastloadError, IncompleteCheckpoint, OptionError, WorldError
from fastload.formats.names import RECORD_NAME
from fastload.loading.access import Access
from fastload.loading.match import Match, match
from fastload.loading.place import Placer
from fastload.loading.sweep import Sweep
from fastload.options import LoadOptions
from fastload.ranks.traces import Tracing
from fastload.ranks.world import World, require_same
from fastload.report import LoadReport, RankReport, VerifyReport
from fastload.transfer.exchange import has_nccl, open_exchange
from fastload.transfer.pipeline import Pipeline, read_threads
from fastload.transfer.plan import DISTRESS_BYTES, ReadPlan, plan_reads
from fastload.transfer.read import ChunkReader
from fastload.transfer.rounds import Exchange
from fastload.transfer.strategy import Decision, choose_strategy
from fastload.transfer.verify import Verifier, refuse

__all__ = ["Checkpoint"]

_log = logging.getLogger(__name__)


class Checkpoint:
    """A checkpoint that all ranks of a group have open. Made by `fastload.open`.

    Attributes:
        manifest: Its files and tensors, and where each tensor is.
        report: What the last `load` did, or None.
        trace_error: Why rank 0 could not write the trace of the last `load`, or None: that ends no load.
    """

    _opened: ClassVar[WeakSet[Checkpoint]] = WeakSet()
    _opening: ClassVar[ProcessLock] = ProcessLock()

    def __init__(self, world: World, access: Access, options: LoadOptions) -> None:
        self.manifest = access.manifest
        self.report: LoadReport | None = None
        self._world = world
        self._storage = access.storage
        self._access = access
        self._options = options
        self._header_bytes = access.storage.bytes_read
        self._counted_retries = 0
        self._failed = False
        self._closed = False
        with self._opening:
            self._opened.add(self)
        self._last_reader: ChunkReader | None = None
        self._tracing = Tracing(world, options.trace)
        self._tracing.synchronize(access.hosts)
        self._verifier = Verifier(self.manifest) if self.manifest.block_bytes and options.verify else None

    @property
    def metadata(self) -> dict[str, str]:
        """Text that the writer attached: that of the commit record, if there is one."""
        return dict(self.manifest.metadata)

    @property
    def trace_error(self) -> FastloadError | None:  # noqa: D102  (as above)
        return self._tracing.error

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Releases files and connections, those that a read still waits for as soon as it ends."""
        self._closed = True
        with self._opening:
            self._opened.discard(self)
        if self._last_reader is None:
            self._storage.close()
        else:
            # Not before: the number of a closed descriptor may soon stand for another file.
            self._last_reader.at_end(self._storage.close)

    @classmethod
    def urls_in_use(cls) -> set[str]:
        """Returns where the checkpoints are that this process has open, to be left alone."""
        with cls._opening:
            return {checkpoint._storage.url for checkpoint in cls._opened}

    def load(
        self,
        *,
        into: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        names: Sequence[str] | str | None = None,
        strict: bool = True,
    ) -> Any:
        """Loads on all ranks; see `fastload.load` for arguments, result and errors."""
        with self._at_most_one_failure():
            began = time.perf_counter()
            job = self._prepare(into, device, dtype, names, strict)
            self._run(job, began)
        job.matched.attach()
        if self._options.on_report is not None and self.report is not None:
            self._options.on_report(self.report)
        return job.matched.restore()

    def verify(self) -> VerifyReport:
        """Checks every byte, whatever `LoadOptions.verify` says; see `fastload.verify` for errors."""
        if not self.manifest.block_bytes:
            raise IncompleteCheckpoint(
                f"{self.manifest.url}: it has no checksums to verify: no commit record ({RECORD_NAME}), "
                "such as `fastload convert` writes"
            )
        with self._at_most_one_failure():
            verifier = self._verifier or Verifier(self.manifest)
            sweep = Sweep(self._world, self._access, verifier, self._options)
            self._last_reader = sweep.reader
            return sweep.run()

    @contextmanager
    def _at_most_one_failure(self) -> Iterator[None]:
        """After a failure the ranks may be anywhere: nothing more is done with this open checkpoint."""
        if self._failed:
            raise WorldError("an earlier load of this open checkpoint failed: open it again")
        if self._closed:
            closed = WorldError(f"{self.manifest.url}: this checkpoint is closed: open it again")
            self._world.leave(closed)  # to whom it may still be open
            raise closed
        try:
            with self._world.together():
                yield
        except BaseException:
            self._failed = True
            raise

    def _prepare(
        self,
        into: Any,
        device: torch.device | str | None,
        dtype: torch.dtype | str | None,
        names: Sequence[str] | str | None,
        strict: bool,
    ) -> _Job:
        """Does on all ranks whatever can fail before data moves, and compares the plans."""
        jobs: list[_Job] = []

        @uncollected
        def prepare() -> dict[str, str]:
            target, cast = _target_device(device), _dtype(dtype)
            matched = match(self.manifest, names=names, into=into, device=target, dtype=cast, strict=strict)
            job = self._plan(matched, matched.device or target)
            jobs.append(job)
            wanted = json.dumps([d.entry.name for d in matched.destinations])
            return {
                "strategy": job.decision.strategy,
                "transport": job.exchange.transport,
                "names": f"{len(matched.destinations)} tensors ({xxhash.xxh3_64_hexdigest(wanted.encode())})",
                "dtype": str(cast),
                "plan": job.plan.digest(),
                "distress": secrets.token_hex(DISTRESS_BYTES),
            }

        asked = self._world.agree(f"preparing to load {self._access.manifest.url}", prepare)
        distress = asked[0].pop("distress", "")  # rank 0's is everybody's
        require_same(asked)
        return replace(jobs[0], distress=bytes.fromhex(distress))

    def _plan(self, matched: Match, device: torch.device) -> _Job:
        world, options, access = self._world, self._options, self._access
        fast_links = device.type == "cuda" and has_nccl(world)
        decision = choose_strategy(
            options.strategy,
            world_size=world.size,
            readers=access.readers,
            hosts=access.hosts,
            shared=access.shared,
            fast_links=fast_links,
        )
        alone = decision.strategy == "direct"
        ranks_on_host = access.hosts.count(access.hosts[world.rank])
        if options.io == "auto":
            # Ranks of one host that read the same bytes share the page cache.
            self._storage.io = "buffered" if alone and ranks_on_host > 1 else "auto"
        plan = plan_reads(
            [d.entry for d in matched.destinations],
            world_size=1 if alone else world.size,
            readers=(0,) if alone else decision.readers,
            staging_bytes=options.staging_bytes,
            chunk_bytes=options.chunk_bytes,
            block_bytes=self.manifest.block_bytes if self._verifier is not None else 0,
            even_slots=fast_links and not alone,
        )
        threads = read_threads(
            options.read_threads,
            depth=plan.depth,
            exchanges=plan.world_size > 1,
            ranks_on_host=ranks_on_host,
        )
        reader = ChunkReader(
            self._storage,
            self.manifest.files,
            threads=threads,
            verifier=self._verifier,
            on_damage=refuse,
        )
        exchange = open_exchange(world, hosts=access.hosts, local=alone, device=device)
        placer = Placer(matched.destinations)
        pipeline = Pipeline(
            world, plan, 0 if alone else world.rank, reader, exchange, placer, options.progress
        )
        return _Job(matched, decision, plan, reader, exchange, pipeline)

    def _run(self, job: _Job, began: float) -> None:
        """Moves the data, and settles on all ranks whether all of them have it."""
        error: Exception | None = None
        already_read = self._storage.bytes_read, self._storage.direct_bytes_read
        self._last_reader = job.reader
        self._tracing.follow(job.pipeline.watches)
        try:
            try:
                job.pipeline.run(job.distress)
            except Exception as caught:
                error = caught
                self._world.raise_alarm()
            self._settle(job, began, already_read, error)
        finally:
            error = None  # else error → traceback → frame → error would keep all their memory alive
            job.pipeline.close()
            if not job.reader.close(wait_s=min(1.0, self._world.grace_s)):
                _log.warning("%s: a read is still under way and may yet write", self.manifest.url)

    def _settle(
        self, job: _Job, began: float, already_read: tuple[int, int], error: Exception | None
    ) -> None:
        mine = self._rank_report(job, time.perf_counter() - began, *already_read)
        what = f"loading {self.manifest.url}"
        # One that is stuck says so itself after its patience: the others wait a little longer than that.
        wait_s = self._world.grace_s if error is not None else self._world.timeout_s - self._world.grace_s / 4
        self._tracing.leave("load", began, error)
        outcomes = self._world.gather(what, asdict(mine), error, wait_s=wait_s)
        self._tracing.write({"what": what, "bytes_wanted": job.plan.total_bytes})
        try:
            self._world.raise_failures(what, outcomes, error)
        finally:
            error = None  # as above
        self._world.heard()
        self.report = LoadReport(
            url=self.manifest.url,
            strategy=job.decision.strategy,
            why=job.decision.why,
            transport=job.exchange.transport,
            bytes_wanted=job.plan.total_bytes,
            num_tensors=len(job.matched.destinations),
            chunk_bytes=job.plan.chunk_bytes,
            num_rounds=job.plan.num_rounds,
            depth=job.plan.depth,
            ranks=tuple(RankReport(**outcome.value) for outcome in outcomes),
        )
        self._access = self._access.without(job.pipeline.broken)
        for rank in self.report.ranks:
            if rank.rank in job.pipeline.broken and self._world.rank == 0:
                _log.warning("%s: rank %d on %s %s", self.manifest.url, rank.rank, rank.host, rank.note)

    def _rank_report(self, job: _Job, total_s: float, already_read: int, already_direct: int) -> RankReport:
        world, pipeline = self._world, job.pipeline
        read_s, exchange_s, place_s = (
            job.reader.watch.seconds,
            job.exchange.watch.seconds,
            pipeline.place_watch.seconds,
        )
        # Those of opening count with the first load; a later one counts its own.
        num_retries = self._storage.num_retries - self._counted_retries
        self._counted_retries = self._storage.num_retries
        return RankReport(
            rank=world.rank,
            host=world.host,
            reader=world.rank in job.decision.readers,
            note=pipeline.drop_out or self._access.notes.get(world.rank, ""),
            bytes_read=self._storage.bytes_read - already_read,
            direct_bytes_read=self._storage.direct_bytes_read - already_direct,
            bytes_verified=job.reader.verified.total,
            header_bytes_read=self._header_bytes,
            bytes_received=pipeline.received_bytes,
            read_s=read_s,
            exchange_s=exchange_s,
            place_s=place_s,
            exposed_s=max(0.0, total_s - read_s),
            total_s=total_s,
            overlapped_s=max(0.0, read_s + exchange_s + place_s - total_s),
            peak_staging_bytes=pipeline.staging_bytes,
            retries=num_retries + job.reader.rereads.total,
        )


@dataclass(frozen=True)
class _Job:
    """One load, ready to run."""

    matched: Match
    decision: Decision
    plan: ReadPlan
    reader: ChunkReader
    exchange: Exchange
    pipeline: Pipeline
    distress: bytes = b""


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise OptionError(f"dtype={dtype!r}: must be a torch.dtype or the name of one, such as bfloat16")
    return found


def _target_device(device: torch.device | str | None) -> torch.device:
    try:
        target = torch.device(device if device is not None else "cpu")
    except RuntimeError as error:
        raise OptionError(f"device={device!r}: {error}") from None
    if target.type == "cuda":
        if not torch.cuda.is_available():
            raise OptionError(f"device={device!r}: torch sees no CUDA device")
        if target.index is None:
            return torch.device("cuda", torch.cuda.current_device())
    return target
