"""Plans where readers have different bytes: each byte is read once, by a rank that has it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastload.geometry.box import Runs
from fastload.geometry.ranges import ByteRange
from fastload.transfer.demand import RankRequest, RankRequests, SharingGroups
from fastload.transfer.routed_plan import RoutedPlan, RoutedView, SuppliedRange, Supply, plan_routes
from tests.drawn import draws
from tests.unit.test_routes import Want, everything, jobs, run

BLOCK_BYTES = 16


def drawn_supply(data: st.DataObject, tensors: list[ByteRange], num_ranks: int) -> Supply:
    """Of each block some ranks, at least one."""
    some = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    kinds = data.draw(st.lists(some, min_size=1, max_size=3))
    held = []
    for extent in tensors:
        for begin in range(0, extent.nbytes, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, extent.nbytes)
            ranks = data.draw(st.sampled_from(kinds))
            held.append(SuppliedRange(extent.file, extent.offset + begin, end - begin, ranks))
    return Supply(tuple(sorted(held)))


def read_by_suppliers(plan: RoutedPlan, num_ranks: int) -> None:
    assert plan.supply is not None
    for rank in range(num_ranks):
        routes = RoutedView(plan, rank)
        for index in range(plan.num_rounds):
            for file, offset, nbytes, _ in routes.reads(index):
                held = list(plan.supply.within(file, offset, offset + nbytes))
                assert sum(one.nbytes for one in held) == nbytes
                assert all(rank in one.ranks for one in held)


@draws(60)
@given(jobs(), st.integers(16, 60), st.data())
def test_each_byte_is_read_once_by_a_rank_that_has_it(
    job: tuple[list[ByteRange], list[Want], int], chunk_bytes: int, data: st.DataObject
) -> None:
    tensors, wants, _ = job
    num_ranks = len(wants)
    sharing = SharingGroups(tensors, RankRequests.join([RankRequest.of(want) for want in wants]), BLOCK_BYTES)
    supply = drawn_supply(data, tensors, num_ranks)
    assert supply.lacking(tensors) == 0
    plan = plan_routes(
        sharing,
        supply.ranks or (0,),
        order=range(num_ranks),
        staging_bytes=1 << 24,
        chunk_bytes=chunk_bytes,
        supply=supply,
    )
    read_by_suppliers(plan, num_ranks)
    read, arrived = run(plan, range(num_ranks), {})
    assert set(read.values()) <= {1}
    assert sum(read.values()) == sharing.total_bytes
    for want, got in zip(wants, arrived, strict=True):
        assert sorted(got) == everything(want)
    # A reader drops out: the others read what they have of the rest, if they have all of it.
    broken = data.draw(st.sampled_from(plan.readers))
    if not plan.chunk(0, broken).nbytes:
        return
    lacking = [(index, broken) for index in range(plan.num_rounds)]
    rest = plan.without({broken}, lacking, plan.num_rounds)
    if rest is None:
        assert any(held.ranks == (broken,) for held in supply.ranges)
        return
    read_by_suppliers(rest, num_ranks)
    _, first = run(plan, range(num_ranks), {broken: 0})
    _, more = run(rest, range(num_ranks), {})
    for want, one, other in zip(wants, first, more, strict=True):
        assert sorted([*one, *other]) == everything(want)


def test_what_nobody_has_is_told() -> None:
    tensors = [ByteRange(0, 0, 64), ByteRange(1, 10, 32)]
    supply = Supply((SuppliedRange(0, 0, 32, (0,)), SuppliedRange(1, 10, 32, (1,))))
    assert supply.lacking(tensors) == 32
    assert supply.lacking(tensors[1:]) == 0
    assert supply.ranks == (0, 1)


def test_no_rank_gets_more_at_a_time_than_its_link_takes() -> None:
    """From shards by rows on four ranks to tensors split by rows and by columns, in turn, on four others."""
    rows, row_bytes, num_tensors = 64, 4096, 8
    part, column = rows // 4 * row_bytes, row_bytes // 4
    tensors = [ByteRange(0, rows * row_bytes * number, rows * row_bytes) for number in range(num_tensors)]
    wants: list[Want] = [[] for _ in range(8)]
    for rank in range(4):
        for number in range(num_tensors):
            by_columns = Runs(rank * column, column, ((rows, row_bytes),))
            runs = by_columns if number % 2 else Runs(rank * part, part, ())
            wants[4 + rank].append((number, (runs,)))
    supply = Supply(
        tuple(
            SuppliedRange(0, each.offset + rank * part, part, (rank,))
            for each in tensors
            for rank in range(4)
        )
    )
    plan = plan_routes(
        SharingGroups(tensors, RankRequests.join([RankRequest.of(want) for want in wants]), 4096),
        supply.ranks,
        order=range(8),
        staging_bytes=1 << 24,
        chunk_bytes=part,
        supply=supply,
    )
    views = [plan.view(rank) for rank in range(8)]
    for index in range(plan.num_rounds):
        received = [sum(message.nbytes for message in view.incoming(index)) for view in views[4:]]
        assert max(received) <= 1.1 * part, (index, received)
