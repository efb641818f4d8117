"""Messages among groups: each comes once to whoever wants it, and nobody waits in a circle."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fastload.comm.group import backend_of
from fastload.geometry.box import Runs
from fastload.geometry.ranges import ByteRange
from fastload.transfer.device_transport import broadcasts_of, communicator_ranks, root_of, sent_to_roots
from fastload.transfer.messages import Route
from fastload.transfer.routed_plan import RoutedPlan, RoutedView
from fastload.transfer.transport import Delivery
from tests.drawn import draws
from tests.unit.test_routes import Want, jobs, plan_of

_NOTHING = torch.empty(0, dtype=torch.uint8)


def deliveries_of(routes: RoutedView, index: int) -> list[Delivery]:
    messages = (*routes.outgoing(index), *routes.incoming(index))
    return [Delivery(message, Route(0), _NOTHING) for message in messages]


@draws(60)
@given(jobs(), st.integers(1, 40), st.data())
def test_each_message_comes_once_to_whoever_wants_it_in_one_order(
    job: tuple[list[ByteRange], list[Want], int], chunk_bytes: int, data: st.DataObject
) -> None:
    _, wants, block_bytes = job
    size = len(wants)
    readers = data.draw(st.sets(st.sampled_from(range(size)), min_size=1).map(sorted))
    plan = plan_of(job, readers, max(chunk_bytes, block_bytes), contiguous=data.draw(st.booleans()))
    groups = communicator_ranks(plan)
    routes = [RoutedView(plan, rank) for rank in range(size)]
    for index in range(plan.num_rounds):
        deliveries = [deliveries_of(of_rank, index) for of_rank in routes]
        has = Counter(
            (rank, each.message.ranks, each.message.reader)
            for rank, of_rank in enumerate(deliveries)
            for each in of_rank
            if each.message.ranges and each.message.reader == rank
        )
        hands: dict[tuple[int, int, bool], list[object]] = {}
        for rank, of_rank in enumerate(deliveries):
            for each in sent_to_roots(of_rank, rank):
                message, sends = each.message, each.message.reader == rank
                assert not groups or tuple(range(size)) in groups
                ends = (rank, root_of(message)) if sends else (message.reader, rank)
                hands.setdefault((*ends, sends), []).append((message.ranks, message.nbytes))
                has[rank, message.ranks, message.reader] += not sends
        assert all(found == hands[source, to, not sends] for (source, to, sends), found in hands.items())
        broadcasts = [broadcasts_of(of_rank) for of_rank in deliveries]
        for rank, of_rank in enumerate(broadcasts):
            assert all(first < second for first, second in pairwise(of_rank))
            for ranks, found in of_rank.items():
                assert not groups or ranks in groups
                readers_here = [
                    (each.message.reader, root_of(each.message), each.message.nbytes) for each in found
                ]
                for other in ranks:
                    there = [
                        (each.message.reader, root_of(each.message), each.message.nbytes)
                        for each in broadcasts[other][ranks]
                    ]
                    assert there == readers_here
                for reader, root, _ in readers_here:
                    assert has[root, ranks, reader] == 1
                    has[rank, ranks, reader] += rank != root
        wanted = {
            (rank, each.message.ranks, each.message.reader): 1
            for rank, of_rank in enumerate(deliveries)
            for each in of_rank
            if each.message.ranges
        }
        assert {key: count for key, count in has.items() if count} == wanted


def plan_of_wants(*wants: Want, contiguous: bool = False) -> RoutedPlan:
    return plan_of(([ByteRange(0, 0, 60)], list(wants), 0), range(len(wants)), 64, contiguous=contiguous)


def part(begin: int, end: int) -> Want:
    return [(0, (Runs(begin, end - begin, ()),))]


def test_few_communicator_ranks_each_rank_are_used() -> None:
    halves = part(0, 30), part(30, 60)
    assert communicator_ranks(plan_of_wants(*halves)) == ()  # nobody wants what another one wants
    assert communicator_ranks(plan_of_wants(*halves, *halves)) == ((0, 2), (1, 3))
    everyone = (0, 1, 2, 3)  # where some read what they do not want
    assert communicator_ranks(plan_of_wants(*halves, *halves, contiguous=True)) == (everyone, (0, 2), (1, 3))
    more = [
        part(0, end) for end in range(10, 60, 10)
    ]  # the first bytes are for all five, the next for four, …
    assert communicator_ranks(plan_of_wants(*more)) == ((0, 1, 2, 3, 4), (1, 2, 3, 4), (2, 3, 4), (3, 4))
    assert communicator_ranks(plan_of_wants(*more, part(0, 60))) == ()


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ("cpu:gloo,cuda:nccl", "nccl"),
        ("cpu:gloo,cuda:ucc", ""),  # no communicators of fastload's own can be made of it
        ("cpu:gloo,cuda:gloo", ""),
        ("cpu:fake,cuda:fake", ""),
        ("cpu:gloo", ""),
        ("cpu:gloo,cuda:plugin", "plugin"),
    ],
)
def test_backends_between_devices(monkeypatch: pytest.MonkeyPatch, config: str, found: str) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setitem(dist.Backend._plugins, "PLUGIN", None)
    monkeypatch.setitem(dist.Backend._plugins, "FAKE", None)
    assert backend_of(object(), "cuda") == found
