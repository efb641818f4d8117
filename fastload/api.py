"""What `fastload.load`, `fastload.open` and `fastload.inspect` do."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch
import xxhash
from torch import Tensor

from fastload.errors import CheckpointNotFound, OptionError, WorldError
from fastload.formats.manifest import Manifest
from fastload.formats.safetensors import read_manifest
from fastload.loading.access import Access, agree_on_access, require_same
from fastload.loading.exchange import has_nccl, open_exchange
from fastload.loading.match import Match, match
from fastload.loading.pipeline import Pipeline, read_threads
from fastload.loading.place import Placer
from fastload.loading.plan import ReadPlan, plan_reads
from fastload.loading.read import ChunkReader
from fastload.loading.rounds import Exchange
from fastload.loading.strategy import Decision, choose_strategy
from fastload.options import SETTINGS, LoadOptions
from fastload.report import LoadReport, RankReport
from fastload.storage import PatientStorage, open_storage
from fastload.tracing import Tracing
from fastload.world import World, join

__all__ = ["Checkpoint", "inspect", "load", "open"]

_log = logging.getLogger(__name__)

_MAX_ATTEMPT_S = 30.0  # for one request: what takes longer has stalled

Path = str | os.PathLike[str]


def load(
    path: Path,
    *,
    into: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    process_group: Any = None,
    names: Sequence[str] | str | None = None,
    strict: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> dict[str, Tensor]:
    """Loads a checkpoint on all ranks of a group; together they read every byte once.

    Every rank of the group has to call it, with the same arguments (`device` may differ). Either all
    ranks return, with identical tensors, or all ranks raise.

    Args:
        path: A ``.safetensors`` file, or a directory with an index or with several such files; a
            local path or a URL.
        into: A module or nested dicts and lists of tensors, to be loaded in place. Meta tensors are
            replaced by real ones on `device`; tied tensors stay tied. If the load fails while data
            moves, the contents of its tensors are undefined; and if storage did not answer a read (the
            error and a warning say so), they stay so until it does or the process ends.
        device: Where new tensors live; the CPU if None.
        dtype: Casts floating point tensors to this dtype; None keeps what is stored.
        process_group: A group this rank is a member of, or a one-dimensional ``DeviceMesh``; None for
            the default group, or for this process alone if torch.distributed is not initialized.
        names: Names or glob patterns of the tensors to load; only their bytes are read.
        strict: With `into`, whether its names and the checkpoint's have to be the same.
        storage_options: Passed on to obstore (object stores, HTTP) or fsspec (other URLs), in addition
            to what the environment says of credentials and endpoints.
        options: How to load; None for the defaults.

    Returns:
        Tensors by name, each with a storage of its own; with `into`, its tensors that were loaded.

    Raises:
        CheckpointNotFound: No rank sees a checkpoint there.
        ManifestError: It is malformed.
        MismatchError: Names, shapes or dtypes do not fit. Nothing was loaded.
        PlanMismatch: The ranks did not ask for the same.
        PeerError: Some ranks failed, or were killed, or did not answer in time; with every cause.
        StorageError: With one rank only: storage did not deliver.
        OptionError: An option or argument cannot be used.
    """
    with open(
        path, process_group=process_group, storage_options=storage_options, options=options
    ) as checkpoint:
        return checkpoint.load(into=into, device=device, dtype=dtype, names=names, strict=strict)


def open(
    path: Path,
    *,
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> Checkpoint:
    """Opens a checkpoint on all ranks of a group; use it as a context manager.

    Args and errors are those of `load`, as far as they go.
    """
    world, location, options = _meet(path, process_group, options)

    def connect() -> PatientStorage:
        attempt_s = min(_MAX_ATTEMPT_S, world.patience_s / 6)
        storage = open_storage(location, storage_options, io=options.io, attempt_s=attempt_s)
        return PatientStorage(storage, retries=options.retries, timeout_s=world.patience_s / 2)

    try:
        access = agree_on_access(world, location, connect, {"path": location, **options.shared()})
    except BaseException as error:
        if not isinstance(error, Exception):
            world.leave(error)
        raise
    return Checkpoint(world, access, options)


def _meet(path: Path, process_group: Any, options: LoadOptions | None) -> tuple[World, str, LoadOptions]:
    """Forms the world even if this rank cannot go on: the others are not to wait for it in vain."""
    problem: Exception | None = None
    location, timeout_s = "", SETTINGS["timeout_s"].default
    try:
        location = os.fspath(path)
        options = options if options is not None else LoadOptions()
        timeout_s = options.timeout_s
    except Exception as error:
        problem = error
    world = join(process_group, timeout_s=timeout_s)
    if problem is None and options is not None:
        return world, location, options

    def fail() -> NoReturn:
        assert problem is not None
        raise problem

    world.agree(f"opening {path}", fail)
    raise AssertionError("the ranks agreed although this one failed")


def inspect(path: Path, *, storage_options: Mapping[str, Any] | None = None) -> Manifest:
    """Reads what is in a checkpoint, without its data and without a process group.

    Args:
        path: As for `load`.
        storage_options: As for `load`.

    Raises:
        CheckpointNotFound: There is none.
        ManifestError: It is malformed.
        StorageError: Storage did not deliver the headers.
    """
    options = LoadOptions()
    connected = open_storage(path, storage_options)
    storage = PatientStorage(connected, retries=options.retries, timeout_s=options.timeout_s)
    try:
        manifest = read_manifest(storage)
    finally:
        storage.close()
    if manifest is None:
        raise CheckpointNotFound(f"{storage.url}: no such checkpoint")
    return manifest


class Checkpoint:
    """A checkpoint that all ranks of a group have open. Made by `open`.

    Attributes:
        manifest: What is where.
        report: What the last `load` did, or None.
    """

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
        self._last_reader: ChunkReader | None = None
        self._tracing = Tracing(world, access.hosts, options.trace)

    @property
    def metadata(self) -> dict[str, str]:
        """Text that the writer attached."""
        return dict(self.manifest.metadata)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Releases files and connections, those that a read still waits for as soon as it ends."""
        if self._last_reader is None:
            self._storage.close()
        else:
            # Not before: the number of a closed descriptor may soon stand for another file.
            self._last_reader.at_end(self._storage.close)

    def load(
        self,
        *,
        into: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        names: Sequence[str] | str | None = None,
        strict: bool = True,
    ) -> dict[str, Tensor]:
        """Loads tensors on all ranks; see `fastload.load` for arguments and errors."""
        if self._failed:
            raise WorldError("an earlier load of this open checkpoint failed: open it again")
        try:
            began = time.perf_counter()
            job = self._prepare(into, device, dtype, names, strict)
            self._run(job, began)
        except BaseException as error:
            self._failed = True
            if not isinstance(error, Exception):
                self._world.leave(error)
            raise
        job.matched.attach()
        if self._options.on_report is not None and self.report is not None:
            self._options.on_report(self.report)
        return job.matched.tensors()

    def _prepare(
        self,
        into: Any,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        names: Sequence[str] | str | None,
        strict: bool,
    ) -> _Job:
        """Does on all ranks whatever can fail before data moves, and compares the plans."""
        jobs: list[_Job] = []

        def prepare() -> dict[str, str]:
            target = _target_device(device)
            matched = match(self.manifest, names=names, into=into, device=target, dtype=dtype, strict=strict)
            job = self._plan(matched, matched.device or target)
            jobs.append(job)
            wanted = json.dumps([d.entry.name for d in matched.destinations])
            return {
                "strategy": job.decision.strategy,
                "transport": job.exchange.transport,
                "names": f"{len(matched.destinations)} tensors ({xxhash.xxh3_64_hexdigest(wanted.encode())})",
                "dtype": str(dtype),
                "plan": job.plan.digest(),
            }

        require_same(self._world.agree(f"preparing to load {self._access.manifest.url}", prepare))
        return jobs[0]

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
        )
        threads = read_threads(options.read_threads, plan, ranks_on_host=ranks_on_host)
        reader = ChunkReader(self._storage, self.manifest.files, threads=threads)
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
                job.pipeline.run()
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
            header_bytes_read=self._header_bytes,
            bytes_received=pipeline.received_bytes,
            read_s=read_s,
            exchange_s=exchange_s,
            place_s=place_s,
            exposed_s=max(0.0, total_s - read_s),
            total_s=total_s,
            overlapped_s=max(0.0, read_s + exchange_s + place_s - total_s),
            peak_staging_bytes=pipeline.staging_bytes,
            retries=num_retries,
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
