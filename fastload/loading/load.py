"""One load on all ranks: match → plan → read → exchange → place."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from fastload.base.memory import uncollected
from fastload.errors import Interrupted
from fastload.loading.claim import exchange_claims, unwanted_by_all
from fastload.loading.job import BoxRequest, Job, Opened, Request, Wish, open_boxes, open_rest, open_whole
from fastload.ranks.traces import Tracing
from fastload.ranks.world import require_same
from fastload.report import LoadReport, RankReport
from fastload.transfer.route import RoutedPlan

__all__ = ["Loaded", "prepare", "run"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What came of a load.

    Attributes:
        report: What it did.
        broken: Readers that dropped out.
    """

    report: LoadReport
    broken: frozenset[int]


def prepare(opened: Opened, request: Request | BoxRequest) -> Job:
    """Does on all ranks whatever can fail before data moves, and compares the plans.

    Raises:
        FastloadError: Some rank cannot load, or what the ranks ask for does not go together.
    """
    wishes: list[Wish] = []
    jobs: list[Job] = []

    @uncollected
    def make() -> dict[str, str]:
        wish = Wish.of(opened, request)
        wishes.append(wish)
        if wish.is_whole:
            jobs.append(open_whole(wish))
        elif wish.decision.alone:
            jobs.append(open_boxes(wish, None))
        wanted = [destination.entry.name for destination in wish.matched.destinations]
        return {
            "strategy": wish.decision.strategy,
            "into": "not given" if request.is_same else "given",
            "dtype": str(wish.dtype),
            "transport": jobs[0].exchange.transport if jobs else "",
            "names": f"{len(wanted)} tensors ({_digest(wanted)})",
            "plan": jobs[0].plan.digest() if wish.is_whole else "",
            "surplus": _digest(wish.matched.surplus) if wish.matched.surplus else "",
        }

    answers = opened.world.agree(f"preparing to load {opened.access.manifest.url}", make)
    wish = wishes[0]
    _require_same(answers, "strategy", "into", "dtype")
    if request.is_same:
        _require_same(answers, "names", "transport", "plan")
    _raise_unexpected(wish, [answer["surplus"] for answer in answers])
    if wish.decision.alone:
        return jobs[0]
    if all(answer["plan"] for answer in answers) and len({answer["names"] for answer in answers}) == 1:
        _require_same(answers, "transport", "plan")
        return jobs[0]
    jobs.clear()
    return _prepare_boxes(wish)


def _prepare_boxes(wish: Wish) -> Job:
    world, url = wish.opened.world, wish.opened.access.manifest.url
    claims = exchange_claims(world, url, wish.claim)
    jobs: list[Job] = []

    @uncollected
    def make() -> dict[str, str]:
        jobs.append(job := open_boxes(wish, claims))
        return {"plan": job.plan.digest()}

    require_same(world.agree(f"planning to load {url}", make))
    return jobs[0]


def run(opened: Opened, job: Job, tracing: Tracing, *, began: float, retries_before: int) -> Loaded:
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
    passes = [job]
    broken: set[int] = set()

    def move() -> dict[str, Any]:
        if broken:
            passes.append(_open_rest(passes[-1], unread))
        last = passes[-1]
        tracing.follow(last.pipeline.watches)
        last.pipeline.run()
        seconds = time.perf_counter() - began
        report = asdict(_report_rank(opened, passes, seconds, *bytes_before, retries_before))
        return {"report": report, "unread_from": last.pipeline.unread_from}

    try:
        while True:
            answers = world.settle(
                what,
                move,
                ended=lambda error: tracing.leave("load", began, error),
                met=lambda: tracing.write({"what": what, "bytes_wanted": job.plan.total_bytes}),
            )
            unread = {
                rank: answer["unread_from"]
                for rank, answer in enumerate(answers)
                if answer["unread_from"] is not None
            }
            if not unread:
                break
            broken |= unread.keys()
        world.heard()
        report = LoadReport(
            url=url,
            strategy=job.wish.decision.strategy,
            why=job.wish.decision.why,
            transport=job.exchange.transport,
            bytes_wanted=job.plan.total_bytes,
            num_tensors=len(job.wish.matched.destinations),
            chunk_bytes=job.plan.chunk_bytes,
            num_rounds=job.plan.num_rounds,
            depth=job.plan.depth,
            left_out=job.wish.matched.left_out,
            ranks=tuple(RankReport(**answer["report"]) for answer in answers),
        )
        return Loaded(report, frozenset(broken | job.pipeline.broken))
    finally:
        _close(passes[-1])


def _close(job: Job) -> None:
    opened = job.wish.opened
    job.pipeline.close()
    if not job.reader.close(wait_s=min(1.0, opened.world.grace_s)):
        _log.warning("%s: a read is still under way and may yet write", opened.access.manifest.url)


def _open_rest(last: Job, unread_from: dict[int, int]) -> Job:
    """Makes ready what some readers have left unread, for those who can still read.

    Raises:
        FastloadError: Nobody can.
    """
    plan = last.plan
    assert isinstance(plan, RoutedPlan)
    # Who reads for itself alone has a plan of its own, and learns nothing from the others.
    broken = {rank: first for rank, first in unread_from.items() if rank in plan.readers}
    lacking = [(index, rank) for rank, first in broken.items() for index in range(first, plan.num_rounds)]
    rest = plan.without(broken, lacking, plan.num_rounds)
    if rest is None:
        raise last.pipeline.read_error or Interrupted("no rank is left that can read")
    _close(last)
    return open_rest(last.wish, rest)


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
    elif unwanted := sorted(unwanted_by_all(world, manifest, matched.surplus)):
        # Together: a rank that goes takes with it what it has left for the others.
        world.agree(f"preparing to load {manifest.url}", lambda: matched.raise_unexpected(unwanted))


def _require_same(answers: Sequence[dict[str, str]], *keys: str) -> None:
    require_same([{key: answer.get(key) for key in keys} for answer in answers])


def _digest(names: Sequence[str]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(names).encode())


def _report_rank(
    opened: Opened,
    passes: Sequence[Job],
    total_s: float,
    bytes_before: int,
    direct_before: int,
    retries_before: int,
) -> RankReport:
    world, access = opened.world, opened.access
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
        bytes_read=access.storage.bytes_read - bytes_before,
        direct_bytes_read=access.storage.direct_bytes_read - direct_before,
        bytes_verified=sum(job.reader.verified.total for job in passes),
        header_bytes_read=opened.header_bytes,
        bytes_received=sum(pipeline.received_bytes for pipeline in pipelines),
        read_s=read_s,
        exchange_s=exchange_s,
        place_s=place_s,
        exposed_s=max(0.0, total_s - read_s),
        total_s=total_s,
        overlapped_s=max(0.0, read_s + exchange_s + place_s - total_s),
        peak_staging_bytes=max(pipeline.slab_bytes for pipeline in pipelines),
        retries=access.storage.num_retries - retries_before + sum(job.reader.rereads.total for job in passes),
    )
