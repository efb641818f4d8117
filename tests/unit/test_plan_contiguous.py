"""Plans for storage that reads ahead: each reader reads one range; all else as ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastload.base.memory import PAGE_BYTES
from fastload.formats.manifest import TensorEntry
from fastload.transfer.plan import TransferPlan
from tests.unit.plans import drop_out, plan_for_all, staged_bytes
from tests.unit.test_plan import entries, share_bytes, wanted_bytes, wanted_tensors
from tests.unit.test_plan_blocks import check_cover


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[TensorEntry], TransferPlan, int, int]:
    wanted = draw(wanted_tensors)
    world_size = draw(st.integers(1, 9))
    readers = sorted(draw(st.sets(st.integers(0, world_size - 1), min_size=1)))
    staging_bytes = draw(st.integers(1 << 20, 1 << 22))
    block_bytes = draw(st.sampled_from([0, 1, 3, 64, 1000]))
    plan = plan_for_all(
        wanted,
        world_size=world_size,
        readers=readers,
        staging_bytes=staging_bytes,
        chunk_bytes=draw(st.none() | st.sampled_from([1, 7, 64, 4088, 4097])),
        block_bytes=block_bytes,
        even_slots=draw(st.booleans()),
        contiguous=True,
    )
    return wanted, plan, staging_bytes, block_bytes


@given(plans())
def test_each_reader_reads_one_range_and_all_read_every_byte_once(
    drawn: tuple[list[TensorEntry], TransferPlan, int, int],
) -> None:
    wanted, plan, _, block_bytes = drawn
    if plan.readers and plan.contiguous:
        shares = [[plan.chunk(index, rank) for index in range(plan.num_rounds)] for rank in plan.readers]
        position = 0
        for chunk in (chunk for share in shares for chunk in share if chunk.nbytes):
            assert chunk.start == position
            position += chunk.nbytes
        assert position == plan.total_bytes
    if block_bytes:
        read = check_cover(plan, wanted, block_bytes)
    else:
        rounds = range(plan.num_rounds)
        read = [at for index in rounds for rank in plan.readers for at in wanted_bytes(plan, index, rank)]
    assert sorted(read) == list(range(sum(entry.nbytes for entry in wanted)))


@given(plans())
def test_shares_are_even_and_buffers_fit_into_staging(
    drawn: tuple[list[TensorEntry], TransferPlan, int, int],
) -> None:
    wanted, plan, staging_bytes, block_bytes = drawn
    longest = min(block_bytes, max((entry.nbytes for entry in wanted), default=0))
    most = max(share_bytes(plan, rank) for rank in plan.readers)
    uneven = longest if plan.contiguous else longest + plan.chunk_bytes
    assert most <= -(-plan.total_bytes // len(plan.readers)) + uneven
    assert staged_bytes(plan) <= staging_bytes
    for index in range(plan.num_rounds):
        slots = plan.slots(index)
        assert sum(slots.values()) <= plan.buffer_bytes
        for rank, slot in slots.items():
            assert plan.chunk(index, rank).nbytes <= slot <= plan.own_bytes
            assert slot % PAGE_BYTES == 0


@given(plans(), st.data())
def test_without_broken_readers_the_others_read_exactly_what_is_left(
    drawn: tuple[list[TensorEntry], TransferPlan, int, int], data: st.DataObject
) -> None:
    wanted, plan, _, block_bytes = drawn
    left, read = drop_out(data, plan)
    placed = [at for index, rank in read for at in wanted_bytes(plan, index, rank)]
    for index in range(left.num_rounds):
        for rank in left.readers:
            placed += wanted_bytes(left, index, rank)
    assert sorted(placed) == list(range(sum(entry.nbytes for entry in wanted)))
    if block_bytes:
        check_cover(left, wanted, block_bytes)


def test_where_staging_is_short_readers_take_turns() -> None:
    """There is not enough for a chunk of each, with a block more; nor for a few of them."""
    wanted = entries((1 << 30, 0, False))
    plans = [
        plan_for_all(
            wanted, world_size=64, readers=range(64), staging_bytes=staging_bytes, chunk_bytes=None,
            block_bytes=1 << 20, contiguous=True,
        )
        for staging_bytes in (32 << 20, 256 << 20, 1 << 30)
    ]  # fmt: skip
    assert [plan.contiguous for plan in plans] == [False, True, True]
    assert [plan.num_windows for plan in plans][1:] == [8, 1]
    assert len({plan.digest() for plan in plans}) == 3
