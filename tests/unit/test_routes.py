"""Plans where ranks want different bytes: each byte is read once, and comes once to whoever wants it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.geometry.box import Box, Runs, runs_of
from fastload.geometry.extents import Extent
from fastload.transfer.claims import Claim, Claims
from fastload.transfer.demand import Supply
from fastload.transfer.lanes import Lanes, Stretch
from fastload.transfer.partners import partners
from fastload.transfer.route import RoutedPlan, Routes, plan_routes

Want = list[tuple[int, tuple[Runs, ...]]]


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """Some box of a tensor, not empty."""
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return Box(offsets, sizes)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Extent], list[Want], int]:
    """Tensors, what each rank wants of them, and the length of a checksum block."""
    num_ranks = draw(st.integers(1, 5))
    tensors: list[Extent] = []
    wants: list[Want] = [[] for _ in range(num_ranks)]
    file = offset = 0
    for index in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
        itemsize = draw(st.sampled_from([1, 2, 4]))
        nbytes = prod(shape) * itemsize
        tensors.append(Extent(file, offset, nbytes))
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
    job: tuple[list[Extent], list[Want], int], readers: Sequence[int], chunk_bytes: int, *, contiguous: bool
) -> RoutedPlan:
    tensors, wants, block_bytes = job
    claims = Claims.join([Claim.unpack(Claim.of(want).packed) for want in wants])
    lanes = Lanes(tensors, claims, block_bytes, contiguous=contiguous)
    order = tuple(reversed(range(len(wants))))
    return plan_routes(
        lanes, Supply(tuple(readers)), order=order, staging_bytes=1 << 24, chunk_bytes=chunk_bytes
    )


def run(plan: RoutedPlan, num_ranks: int, broken_from: dict[int, int]) -> tuple[Counter, list[list]]:
    """Moves (tensor, byte) as the plan says; returns how often each was read, and what each rank got."""
    routes = [Routes(plan, rank) for rank in range(num_ranks)]
    near = [partners(plan, rank) for rank in range(num_ranks)]
    assert all(rank in near[other] for rank, others in enumerate(near) for other in others)
    read: Counter[tuple[int, int]] = Counter()
    arrived: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    for index in range(plan.num_rounds):
        messages: dict[tuple[int, int, int], list[tuple[Stretch, ...]]] = {}
        for rank, own in enumerate(routes):
            read.update((s.tensor, s.begin + at) for s in own.reads(index) for at in range(s.nbytes))
            for parcel in own.sent(index):
                assert parcel.reader == rank
                assert parcel.hop == 0
                if parcel.is_own and index < broken_from.get(rank, plan.num_rounds):
                    arrived[rank] += contents(own, parcel.stretches, rank)
                if parcel.next is not None:
                    assert parcel.next in near[rank]
                    messages.setdefault((rank, parcel.next, rank), []).append(parcel.stretches)
        incoming = [(rank, parcel) for rank, own in enumerate(routes) for parcel in own.received(index)]
        for rank, parcel in sorted(incoming, key=lambda one: one[1].hop):
            got = messages[parcel.source, rank, parcel.reader].pop(0)
            assert got == parcel.stretches
            assert parcel.is_own
            found = contents(routes[rank], got, rank)
            assert len(found) == parcel.nbytes
            if index < broken_from.get(parcel.reader, plan.num_rounds):
                arrived[rank] += found
            if parcel.next is not None:
                assert parcel.next in near[rank]
                messages.setdefault((rank, parcel.next, parcel.reader), []).append(got)
        assert not any(messages.values())  # nothing is sent that nobody receives
    return read, arrived


def contents(routes: Routes, stretches: Sequence[Stretch], rank: int) -> list[tuple[int, int, int]]:
    """(tensor, box, byte) of what a rank wants of stretches, in the order in which it is packed."""
    found = []
    for tensor, begin, nbytes in stretches:
        for box, runs in enumerate(routes.part(rank, tensor)):
            numbers = byte_numbers(runs)[runs.before(begin) : runs.before(begin + nbytes)]
            assert all(begin <= at < begin + nbytes for at in numbers)
            found += [(tensor, box, at) for at in numbers]
    return found


def everything(want: Want) -> list[tuple[int, int, int]]:
    return sorted(
        (tensor, box, at)
        for tensor, part in want
        for box, runs in enumerate(part)
        for at in byte_numbers(runs)
    )


@settings(max_examples=60)
@given(jobs(), st.integers(1, 40), st.data())
def test_each_byte_is_read_once_and_comes_once_to_whoever_wants_it(
    job: tuple[list[Extent], list[Want], int], chunk_bytes: int, data: st.DataObject
) -> None:
    _tensors, wants, _ = job
    num_ranks = len(wants)
    readers = data.draw(st.sets(st.sampled_from(range(num_ranks)), min_size=1).map(sorted))
    contiguous = data.draw(st.booleans())
    plan = plan_of(job, readers, max(chunk_bytes, job[2]), contiguous=contiguous)
    read, arrived = run(plan, num_ranks, {})
    assert set(read.values()) <= {1}
    assert sum(read.values()) == plan.total_bytes == plan.lanes.total_bytes
    for want, got in zip(wants, arrived, strict=True):
        assert sorted(got) == everything(want)


@settings(max_examples=40)
@given(jobs(), st.integers(1, 40), st.data())
def test_what_readers_that_drop_out_leave_unread_others_read(
    job: tuple[list[Extent], list[Want], int], chunk_bytes: int, data: st.DataObject
) -> None:
    _, wants, block_bytes = job
    num_ranks = len(wants)
    contiguous = data.draw(st.booleans())
    plan = plan_of(job, range(num_ranks), max(chunk_bytes, block_bytes), contiguous=contiguous)
    broken = data.draw(st.dictionaries(st.integers(0, num_ranks - 1), st.integers(0, 5), max_size=num_ranks))
    broken = {rank: first for rank, first in broken.items() if plan.chunk(first, rank).nbytes}
    _, arrived = run(plan, num_ranks, broken)
    if broken:
        lacking = [(at, rank) for rank, first in broken.items() for at in range(first, plan.num_rounds)]
        rest = plan.without(broken, lacking, plan.num_rounds)
        if rest is None:
            assert len(broken) == num_ranks
            return
        assert not set(broken) & set(rest.readers)
        _, more = run(rest, num_ranks, {})
        arrived = [[*first, *second] for first, second in zip(arrived, more, strict=True)]
    for want, got in zip(wants, arrived, strict=True):
        assert sorted(got) == everything(want)
