"""One load on all ranks: match → plan → read → exchange → place."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash

from fastload.base.memory import uncollected
from fastload.errors import OptionError
from fastload.loading.access import Access
from fastload.loading.match import Match, match
from fastload.loading.place import Placer
from fastload.loading.unfit import raise_unfit
from fastload.options import LoadOptions
from fastload.ranks.traces import Tracing
from fastload.ranks.world import World, require_same
from fastload.report import LoadReport, RankReport
from fastload.transfer.exchange import has_nccl, open_exchange
from fastload.transfer.pipeline import Pipeline, read_threads
from fastload.transfer.plan import TransferPlan, plan_transfer
from fastload.transfer.read import ChunkReader
from fastload.transfer.rounds import Exchange
from fastload.transfer.strategy import Decision, choose_strategy
from fastload.transfer.verify import Verifier, refuse

__all__ = ["Job", "Opened", "Request", "prepare", "run"]

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


@dataclass(frozen=True)
class Request:
    """What a caller asks for; see `fastload.load`."""

    into: Any
    device: torch.device | str | None
    dtype: torch.dtype | str | None
    names: Sequence[str] | str | None
    strict: bool


@dataclass(frozen=True)
class Job:
    """One load, ready to run.

    Attributes:
        matched: Which tensors go where.
        decision: The strategy.
        plan: Who reads what when.
        reader: Reads this rank's chunks.
        exchange: Takes the chunks to the other ranks.
        pipeline: Moves them.
    """

    matched: Match
    decision: Decision
    plan: TransferPlan
    reader: ChunkReader
    exchange: Exchange
    pipeline: Pipeline


def prepare(opened: Opened, request: Request) -> Job:
    """Does on all ranks whatever can fail before data moves, and compares the plans.

    Raises:
        FastloadError: Some rank cannot load, or the ranks did not ask for the same.
    """
    jobs: list[Job] = []

    @uncollected
    def make() -> dict[str, str]:
        device, dtype = _target_device(request.device), _dtype(request.dtype)
        matched = match(
            opened.access.manifest,
            names=request.names,
            into=request.into,
            device=device,
            dtype=dtype,
            strict=request.strict,
            rank=opened.world.rank,
            size=opened.world.size,
        )
        matched.raise_unexpected(matched.surplus)
        _refuse_boxes(matched)
        jobs.append(job := _open(opened, matched, matched.device or device))
        wanted = json.dumps([d.entry.name for d in matched.destinations])
        return {
            "strategy": job.decision.strategy,
            "transport": job.exchange.transport,
            "names": f"{len(matched.destinations)} tensors ({xxhash.xxh3_64_hexdigest(wanted.encode())})",
            "dtype": str(dtype),
            "plan": job.plan.digest(),
        }

    require_same(opened.world.agree(f"preparing to load {opened.access.manifest.url}", make))
    return jobs[0]


def run(opened: Opened, job: Job, tracing: Tracing, *, began: float, retries_before: int) -> LoadReport:
    """Moves the data, and settles on all ranks whether all of them have it.

    Args:
        opened: The checkpoint.
        job: What to load.
        tracing: Records it.
        began: `time.perf_counter` when the load began.
        retries_before: Retries of reads that were reported before.

    Raises:
        FastloadError: Some rank has not got its bytes; the tensors may hold some of them.
    """
    world, storage, url = opened.world, opened.access.storage, opened.access.manifest.url
    what = f"loading {url}"
    bytes_before = storage.bytes_read, storage.direct_bytes_read
    tracing.follow(job.pipeline.watches)

    def move() -> dict[str, Any]:
        job.pipeline.run()
        seconds = time.perf_counter() - began
        return asdict(_report_rank(opened, job, seconds, *bytes_before, retries_before))

    try:
        ranks = world.settle(
            what,
            move,
            ended=lambda error: tracing.leave("load", began, error),
            met=lambda: tracing.write({"what": what, "bytes_wanted": job.plan.total_bytes}),
        )
        world.heard()
        return LoadReport(
            url=url,
            strategy=job.decision.strategy,
            why=job.decision.why,
            transport=job.exchange.transport,
            bytes_wanted=job.plan.total_bytes,
            num_tensors=len(job.matched.destinations),
            chunk_bytes=job.plan.chunk_bytes,
            num_rounds=job.plan.num_rounds,
            depth=job.plan.depth,
            left_out=job.matched.left_out,
            ranks=tuple(RankReport(**rank) for rank in ranks),
        )
    finally:
        job.pipeline.close()
        if not job.reader.close(wait_s=min(1.0, world.grace_s)):
            _log.warning("%s: a read is still under way and may yet write", url)


def _open(opened: Opened, matched: Match, device: torch.device) -> Job:
    """Decides how to load, and makes everything ready for it."""
    world, options, access = opened.world, opened.options, opened.access
    fast_links = device.type == "cuda" and has_nccl(world)
    decision = choose_strategy(
        options.strategy,
        world_size=world.size,
        readers=access.readers,
        hosts=access.hosts,
        shared=access.shared,
        fast_links=fast_links,
    )
    ranks_on_host = access.hosts.count(access.hosts[world.rank])
    if options.io == "auto":
        # Ranks of one host that read the same bytes share the page cache.
        access.storage.io = "buffered" if decision.alone and ranks_on_host > 1 else "auto"
    plan = plan_transfer(
        [d.entry for d in matched.destinations],
        decision.supply(world.rank),
        decision.demand(world.rank, world.size),
        staging_bytes=options.staging_bytes,
        chunk_bytes=options.chunk_bytes,
        block_bytes=access.manifest.block_bytes if opened.verifier is not None else 0,
        even_slots=fast_links and not decision.alone,
        contiguous=access.is_mounted,
    )
    reader = ChunkReader(
        access.storage,
        access.manifest.files,
        threads=read_threads(
            options.read_threads,
            depth=plan.depth,
            exchanges=plan.exchanges,
            ranks_on_host=ranks_on_host,
            in_order=access.storage.in_order,
        ),
        verifier=opened.verifier,
        on_damage=refuse,
    )
    exchange = open_exchange(world, hosts=access.hosts, local=decision.alone, device=device)
    placer = Placer(matched.destinations)
    pipeline = Pipeline(world, plan, reader, exchange, placer, options.progress)
    return Job(matched, decision, plan, reader, exchange, pipeline)


def _report_rank(
    opened: Opened, job: Job, total_s: float, bytes_before: int, direct_before: int, retries_before: int
) -> RankReport:
    world, access, pipeline = opened.world, opened.access, job.pipeline
    read_s, exchange_s, place_s = (watch.seconds for watch in pipeline.watches.values())
    return RankReport(
        rank=world.rank,
        host=world.host,
        reader=world.rank in job.decision.readers,
        note=pipeline.drop_out or access.notes.get(world.rank, ""),
        bytes_read=access.storage.bytes_read - bytes_before,
        direct_bytes_read=access.storage.direct_bytes_read - direct_before,
        bytes_verified=job.reader.verified.total,
        header_bytes_read=opened.header_bytes,
        bytes_received=pipeline.received_bytes,
        read_s=read_s,
        exchange_s=exchange_s,
        place_s=place_s,
        exposed_s=max(0.0, total_s - read_s),
        total_s=total_s,
        overlapped_s=max(0.0, read_s + exchange_s + place_s - total_s),
        peak_staging_bytes=pipeline.slab_bytes,
        retries=access.storage.num_retries - retries_before + job.reader.rereads.total,
    )


def _refuse_boxes(matched: Match) -> None:
    names = dict.fromkeys(d.entry.name for d in matched.destinations if d.box is not None)
    lines = [f'{name}: into= has a sharded tensor (DTensor); see "DDP and FSDP" in README' for name in names]
    raise_unfit(matched.url, mismatched=lines)


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
    if target.type == "meta":
        raise OptionError(f"device={device!r}: the meta device has no memory to load into; name a real one")
    if target.type == "cuda":
        if not torch.cuda.is_available():
            raise OptionError(f"device={device!r}: torch sees no CUDA device")
        if target.index is None:
            return torch.device("cuda", torch.cuda.current_device())
    return target
