"""One load on all ranks: match → plan → read → exchange → place."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import xxhash

from fastload.base.memory import uncollected
from fastload.comm.failures import kinds_of, require_same
from fastload.comm.responses import Each, Reports
from fastload.comm.traces import Tracing
from fastload.loading.job import Job, Opened, Request, Wish, closing_unused, open_whole
from fastload.loading.match import Match
from fastload.report import LoadReport, RankReport
from fastload.storage import PatientStorage
from fastload.transfer.wire import accept_offers

__all__ = ["Before", "Loaded", "prepare", "restore", "run", "sharded"]

_log = logging.getLogger(__name__)


def sharded() -> Any:
    """Returns the module for loads in which ranks want different bytes: the others need not import it."""
    return import_module("fastload.loading.sharded")


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
            jobs.append(open_whole(wish))
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
    with closing_unused(jobs):
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
    job: Job = sharded().prepare(wish)
    return job


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
            passes.append(sharded().prepare_rest(passes[-1], unread))
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
    elif unwanted := sorted(sharded().unwanted_by_all(world, manifest, matched.surplus)):
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
