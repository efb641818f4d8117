"""A load in which ranks want different bytes, made ready: what all want, and the plan that follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fastload.base.memory import uncollected
from fastload.comm.failures import require_same
from fastload.errors import Interrupted
from fastload.loading.boxes import BoxesByName, match_boxes
from fastload.loading.claim import claim_of, exchange_claims, unwanted_by_all
from fastload.loading.job import Job, Opened, Wish, closing_unused, open_job
from fastload.loading.match import Match
from fastload.transfer.claims import Claim, Claims
from fastload.transfer.lanes import Lanes
from fastload.transfer.route import RoutedPlan, plan_routes
from fastload.transfer.routing import ring_order
from fastload.transfer.wire import accept_offers

__all__ = ["BoxRequest", "prepare", "prepare_rest", "unwanted_by_all"]


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


def prepare(wish: Wish) -> Job:
    """Tells all ranks what each of them wants, and makes the load ready.

    Raises:
        FastloadError: On some rank options do not fit, or it did not answer.
    """
    opened = wish.opened
    manifest = opened.access.manifest
    packed = exchange_claims(opened.world, manifest.url, lambda: _claim(wish))

    def open_it() -> Job:
        claims = Claims.unpack(packed)
        # What a mount reads ahead is to be what its reader asks for next, whoever wants it.
        contiguous = opened.access.is_mounted and not wish.decision.alone
        lanes = Lanes(manifest.extents, claims, opened.block_bytes, contiguous=contiguous)
        if not wish.decision.alone:
            return _open(wish, lanes, lanes.union_bytes)
        alone = Claims((_claim(wish),), ((opened.world.rank,),))
        return _open(wish, Lanes(manifest.extents, alone, opened.block_bytes), lanes.union_bytes)

    return _agree(wish, open_it)


def prepare_rest(job: Job, unread_from: dict[int, int]) -> Job:
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
    with closing_unused(jobs):
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
        goes_on = replace(opened.options, progress=lambda now, wanted: progress(placed_bytes + now, wanted))
        opened = replace(opened, options=goes_on)
    return open_job(replace(job.wish, opened=opened), rest, job.bytes_wanted)


def _claim(wish: Wish) -> Claim:
    return claim_of(wish.opened.access.manifest, wish.matched.destinations)


def _open(wish: Wish, lanes: Lanes, bytes_wanted: int) -> Job:
    opened = wish.opened
    plan = plan_routes(
        lanes,
        wish.decision.supply(opened.world.rank),
        order=ring_order(opened.access.hosts),
        staging_bytes=opened.options.staging_bytes,
        chunk_bytes=opened.options.chunk_bytes,
        holders=opened.access.holders,
    )
    return open_job(wish, plan, bytes_wanted)
