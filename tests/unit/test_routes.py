"""Plans where ranks want different bytes: each byte is read once, and comes once to whoever wants it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from fastload.geometry.box import Box, Runs, runs_of
from fastload.geometry.ranges import ByteRange
from fastload.transfer.demand import RankRequest, RankRequests, SharingGroups
from fastload.transfer.messages import Message, Routing, sharing_domains
from fastload.transfer.routed_plan import RoutedPlan, plan_routes
from tests.drawn import draws

Want = list[tuple[int, tuple[Runs, ...]]]


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """Some box of a tensor, not empty."""
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return Box(offsets, sizes)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[ByteRange], list[Want], int]:
    """Tensors, what each rank wants of them, and the length of a checksum block."""
    num_ranks = draw(st.integers(1, 5))
    tensors: list[ByteRange] = []
    wants: list[Want] = [[] for _ in range(num_ranks)]
    file = offset = 0
    for index in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
        itemsize = draw(st.sampled_from([1, 2, 4]))
        nbytes = prod(shape) * itemsize
        tensors.append(ByteRange(file, offset, nbytes))
        offset += nbytes + draw(st.integers(0, 3))
        if draw(st.integers(0, 4)) == 0:
            file, offset = file + 1, draw(st.integers(0, 9))
        if not nbytes:
            continue
        cuts = [Box.whole(shape), *(draw(boxes(shape)) for _ in range(draw(st.integers(1, 4))))]
        for want in wants:
            chosen = draw(st.lists(st.sampled_from(cuts), min_size=0, max_size=2))
            if chosen:
                part = tuple(runs_of(box, shape).scaled(itemsize) for box in chosen)
                want.append((index, part))
    return tensors, wants, draw(st.sampled_from([0, 0, 1, 5, 16]))


def byte_numbers(runs: Runs) -> list[int]:
    return [at for start in runs.starts() for at in range(start, start + runs.length)]


def plan_of(
    job: tuple[list[ByteRange], list[Want], int],
    readers: Sequence[int],
    chunk_bytes: int,
    *,
    contiguous: bool,
) -> RoutedPlan:
    tensors, wants, block_bytes = job
    requests = RankRequests.join([RankRequest.unpack(RankRequest.of(want).packed) for want in wants])
    sharing = SharingGroups(tensors, requests, block_bytes, contiguous=contiguous)
    order = tuple(reversed(range(len(wants))))
    return plan_routes(sharing, tuple(readers), order=order, staging_bytes=1 << 24, chunk_bytes=chunk_bytes)


def run(plan: RoutedPlan, machines: Sequence[int], broken_from: dict[int, int]) -> tuple[Counter, list[list]]:
    """Moves (tensor, byte) as the plan says; returns how often each was read, and what each rank got."""
    everyone = range(len(machines))
    domains = sharing_domains(machines, plan.recipient_sets)
    views = [plan.view(rank) for rank in everyone]
    routings = [Routing(rank, plan.order, [domains[each] for each in plan.order]) for rank in everyone]
    expected: list[set[tuple[int, int]]] = [set() for _ in everyone]  # (reader, the other end)
    for rank, routing in enumerate(routings):
        for reader, ranks in plan.pairs(rank):
            route = routing.route(reader, ranks)
            expected[rank] |= {(reader, target) for target in route.targets}
            expected[rank] |= {(reader, route.source)} if route.source is not None else set()
    read: Counter[tuple[int, int]] = Counter()
    arrived: list[list[tuple[int, int, int]]] = [[] for _ in everyone]
    for index in range(plan.num_rounds):
        wires: dict[tuple[int, int, int], list[Message]] = {}
        held: list[dict[tuple[int, tuple[int, ...]], Message]] = [{} for _ in everyone]
        received = []
        for rank, view in enumerate(views):
            read.update((s.tensor, s.begin + at) for s in view.tensor_ranges(index) for at in range(s.nbytes))
            for message in view.outgoing(index):
                assert message.reader == rank
                held[rank][rank, message.ranks] = message
                for target in routings[rank].route(rank, message.ranks).targets:
                    wires.setdefault((rank, target, rank), []).append(message)
            received += [
                (routings[rank].route(message.reader, message.ranks), rank, message)
                for message in view.incoming(index)
            ]
        for route, rank, message in sorted(received, key=lambda one: one[0].num_hops):
            if route.source is not None:
                assert (message.reader, route.source) in expected[rank]
                got = wires[route.source, rank, message.reader].pop(0)
                assert (got.ranks, got.nbytes) == (message.ranks, message.nbytes)
                held[rank][message.reader, message.ranks] = message
            for target in route.targets:
                assert (message.reader, target) in expected[rank]
                wires.setdefault((rank, target, message.reader), []).append(message)
        assert not any(wires.values())  # nothing is sent that nobody receives
        for route, rank, message in received:
            assert domains[route.holder] == domains[rank]
            assert held[route.holder][message.reader, message.ranks].nbytes == message.nbytes
        for rank, view in enumerate(views):
            for message in (*view.outgoing(index), *view.incoming(index)):
                if message.ranges and index < broken_from.get(message.reader, plan.num_rounds):
                    assert sum(nbytes for _, nbytes in message.ranges) == message.nbytes
                    arrived[rank] += [at for start, n in message.ranges for at in range(start, start + n)]
    return read, arrived


def everything(want: Want) -> list[int]:
    """The bytes that a rank wants, laid end to end."""
    return list(range(sum(runs.total for _, part in want for runs in part)))


@draws(60)
@given(jobs(), st.integers(1, 40), st.data())
def test_each_byte_is_read_once_and_comes_once_to_whoever_wants_it(
    job: tuple[list[ByteRange], list[Want], int], chunk_bytes: int, data: st.DataObject
) -> None:
    _tensors, wants, _ = job
    num_ranks = len(wants)
    readers = data.draw(st.sets(st.sampled_from(range(num_ranks)), min_size=1).map(sorted))
    contiguous = data.draw(st.booleans())
    plan = plan_of(job, readers, max(chunk_bytes, job[2]), contiguous=contiguous)
    machines = data.draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    read, arrived = run(plan, machines, {})
    assert set(read.values()) <= {1}
    assert sum(read.values()) == plan.total_bytes == plan.sharing.total_bytes
    for want, got in zip(wants, arrived, strict=True):
        assert sorted(got) == everything(want)


@draws(40)
@given(jobs(), st.integers(1, 40), st.data())
def test_what_readers_that_drop_out_leave_unread_others_read(
    job: tuple[list[ByteRange], list[Want], int], chunk_bytes: int, data: st.DataObject
) -> None:
    _, wants, block_bytes = job
    num_ranks = len(wants)
    contiguous = data.draw(st.booleans())
    plan = plan_of(job, range(num_ranks), max(chunk_bytes, block_bytes), contiguous=contiguous)
    broken = data.draw(st.dictionaries(st.integers(0, num_ranks - 1), st.integers(0, 5), max_size=num_ranks))
    broken = {rank: first for rank, first in broken.items() if plan.chunk(first, rank).nbytes}
    machines = range(num_ranks)
    _, arrived = run(plan, machines, broken)
    if broken:
        lacking = [(at, rank) for rank, first in broken.items() for at in range(first, plan.num_rounds)]
        rest = plan.without(broken, lacking, plan.num_rounds)
        if rest is None:
            assert len(broken) == num_ranks
            return
        assert not set(broken) & set(rest.readers)
        _, more = run(rest, machines, {})
        arrived = [[*first, *second] for first, second in zip(arrived, more, strict=True)]
    for want, got in zip(wants, arrived, strict=True):
        assert sorted(got) == everything(want)
