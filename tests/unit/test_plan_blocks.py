"""Plans that keep checksum blocks whole: every byte once, no block cut, within staging, evenly."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.base.memory import PAGE_BYTES
from fastload.errors import OptionError
from fastload.formats.manifest import TensorEntry
from fastload.transfer.plan import TransferPlan
from tests.unit.plans import drop_out, plan_for_all, staged_bytes
from tests.unit.test_plan import entries, share_bytes, wanted_bytes, wanted_tensors

MIB = 1 << 20


def block_bounds(wanted: list[TensorEntry], block_bytes: int) -> set[int]:
    """Where a chunk may begin or end in the wanted space."""
    bounds, start = {0}, 0
    for entry in wanted:
        bounds.update(range(start, start + entry.nbytes, block_bytes))
        start += entry.nbytes
    return bounds | {start}


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[TensorEntry], TransferPlan, int, int]:
    wanted = draw(wanted_tensors)
    world_size = draw(st.integers(1, 9))
    readers = sorted(draw(st.sets(st.integers(0, world_size - 1), min_size=1)))
    staging_bytes = draw(st.integers(1 << 17, 1 << 22))
    chunk_bytes = draw(st.none() | st.sampled_from([1, 7, 64, 4088, 4097, 10_000]))
    block_bytes = draw(st.sampled_from([1, 3, 64, 1000, 4096, 1 << 40]))
    plan = plan_for_all(
        wanted,
        world_size=world_size,
        readers=readers,
        staging_bytes=staging_bytes,
        chunk_bytes=chunk_bytes,
        block_bytes=block_bytes,
        even_slots=draw(st.booleans()),
    )
    return wanted, plan, staging_bytes, block_bytes


def check_cover(plan: TransferPlan, wanted: list[TensorEntry], block_bytes: int) -> list[int]:
    """Checks that no chunk cuts a block or is too long; returns the bytes read, of the wanted space."""
    bounds = block_bounds(wanted, block_bytes)
    longest = min(block_bytes, max((entry.nbytes for entry in wanted), default=0))
    read: list[int] = []
    for index in range(plan.num_rounds):
        for rank in plan.readers_in(index):
            chunk = plan.chunk(index, rank)
            assert chunk.nbytes < plan.chunk_bytes + max(longest, 1)
            byte_ranges = plan.byte_ranges(chunk)
            for before, after in pairwise(byte_ranges):
                assert before.start + before.nbytes <= after.start
            for each in byte_ranges:
                assert each.start in bounds
                assert each.start + each.nbytes in bounds
            read += wanted_bytes(plan, index, rank)
    return read


@given(plans())
def test_every_byte_is_read_once_and_no_block_is_cut(
    drawn: tuple[list[TensorEntry], TransferPlan, int, int],
) -> None:
    wanted, plan, _, block_bytes = drawn
    read = check_cover(plan, wanted, block_bytes)
    assert read == list(range(sum(entry.nbytes for entry in wanted)))
    assert sum(share_bytes(plan, rank) for rank in range(len(plan.recipients))) == plan.total_bytes


@given(plans())
def test_the_buffers_fit_into_staging_and_hold_every_slot(
    drawn: tuple[list[TensorEntry], TransferPlan, int, int],
) -> None:
    _, plan, staging_bytes, _ = drawn
    assert plan.depth >= 1
    assert staged_bytes(plan) <= staging_bytes
    for index in range(plan.num_rounds):
        slots = plan.slots(index)
        assert sum(slots.values()) <= plan.buffer_bytes
        for rank, slot in slots.items():
            assert slot % PAGE_BYTES == 0
            needed = plan.chunk(index, rank).nbytes
            assert needed <= slot <= plan.own_bytes
            assert plan.even_slots or slot - needed < PAGE_BYTES
        if plan.even_slots:
            assert len(set(slots.values())) == 1


@given(plans(), st.data())
def test_healing_keeps_blocks_whole(
    drawn: tuple[list[TensorEntry], TransferPlan, int, int], data: st.DataObject
) -> None:
    wanted, plan, _, block_bytes = drawn
    left, read = drop_out(data, plan)
    placed = check_cover(left, wanted, block_bytes)
    placed += [at for index, rank in read for at in wanted_bytes(plan, index, rank)]
    assert sorted(placed) == list(range(sum(entry.nbytes for entry in wanted)))
    for index in range(left.num_rounds):
        assert sum(left.slots(index).values()) <= plan.buffer_bytes
        assert max(left.slots(index).values()) <= plan.own_bytes


@pytest.mark.parametrize("block_bytes", [MIB, 3 * MIB])
@pytest.mark.parametrize("world", [4, 16, 48])
def test_large_tensors_are_shared_evenly(world: int, block_bytes: int) -> None:
    wanted = entries(*[(97 * MIB + 13 * number, 0, False) for number in range(60)])
    plan = plan_for_all(
        wanted,
        world_size=world,
        readers=range(world),
        staging_bytes=256 * MIB,
        chunk_bytes=None,
        block_bytes=block_bytes,
    )
    assert plan.num_windows == (1 if world * block_bytes < 60 * MIB else 3)
    shares = [share_bytes(plan, rank) for rank in plan.readers]
    assert sum(shares) == plan.total_bytes
    # The bounds within one tensor all move by the same, so only those in different ones differ.
    assert max(shares) - min(shares) <= 0.05 * max(shares) + 2 * plan.chunk_bytes


@pytest.mark.parametrize(
    ("nbytes", "shares"),
    [(500, [500, 0, 0, 0]), (2500, [1000, 1000, 500, 0]), (5500, [2000, 1500, 1000, 1000])],
)
def test_few_blocks_for_many_readers(nbytes: int, shares: list[int]) -> None:
    plan = plan_for_all(
        entries((nbytes, 0, False)),
        world_size=4,
        readers=range(4),
        staging_bytes=256 * MIB,
        chunk_bytes=None,
        block_bytes=1000,
    )
    assert [share_bytes(plan, rank) for rank in range(4)] == shares


def test_a_block_that_does_not_fit_says_what_to_do() -> None:
    with pytest.raises(OptionError, match=r"checksum blocks have 1048576: verify=False reads without"):
        plan_for_all(
            entries((1 << 22, 0, False)),
            world_size=2,
            readers=range(2),
            staging_bytes=MIB,
            chunk_bytes=None,
            block_bytes=MIB,
        )


def test_the_digest_tells_grids_apart() -> None:
    def digest(sizes: tuple[int, ...], block_bytes: int, even_slots: bool = False) -> str:
        wanted = entries(*[(size, 0, False) for size in sizes])
        return plan_for_all(
            wanted, world_size=2, readers=range(2), staging_bytes=MIB, chunk_bytes=640,
            block_bytes=block_bytes, even_slots=even_slots,
        ).digest()  # fmt: skip

    found = [
        digest((6400, 6400), 0),
        digest((6400, 6400), 64),
        digest((6400, 6400), 640),
        digest((12_800,), 64),
        digest((6464, 6336), 64),
        digest((6400, 6400), 64, even_slots=True),
    ]
    assert len(set(found)) == len(found)


def test_planning_a_large_job_takes_no_time_worth_naming() -> None:
    wanted = entries(*[(MIB, 8 * (number % 3 == 0), number % 1000 == 0) for number in range(100_000)])
    began = time.process_time()
    plan = plan_for_all(
        wanted,
        world_size=1024,
        readers=range(1024),
        staging_bytes=256 * MIB,
        chunk_bytes=None,
        block_bytes=256 << 10,
    )
    plan.digest()
    for index in (0, plan.num_rounds // 2, plan.num_rounds - 1):
        plan.byte_ranges(plan.chunk(index, plan.readers[-1]))
    assert time.process_time() - began < 5
    assert plan.total_bytes == 100_000 * MIB
