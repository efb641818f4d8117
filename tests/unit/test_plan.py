"""The plan: every wanted byte once, in order, evenly, within staging, and the same everywhere."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as st

from fastload.base.memory import PAGE_BYTES
from fastload.errors import OptionError
from fastload.formats.manifest import TensorEntry
from fastload.geometry.ranges import ByteRange
from fastload.transfer.plan import Chunk, ReaderWindows, TransferPlan, plan_transfer
from tests.unit.plans import plan_for_all, staged_bytes


def entries(*sizes_and_gaps: tuple[int, int, bool]) -> list[TensorEntry]:
    """Tensors of so many bytes, each after a gap, in the same file as the one before it or in the next."""
    made, file, end = [], 0, 0
    for number, (nbytes, gap, next_file) in enumerate(sizes_and_gaps):
        if next_file:
            file, end = file + 1, 0
        made.append(TensorEntry(f"t{number}", "U8", (nbytes,), file, end + gap, nbytes))
        end += gap + nbytes
    return made


def share_bytes(plan: TransferPlan, rank: int) -> int:
    return sum(plan.chunk(index, rank).nbytes for index in range(plan.num_rounds))


wanted_tensors = st.lists(
    st.tuples(
        st.integers(0, 5000), st.sampled_from([0, 0, 0, 1, 8, 333]), st.sampled_from([False, False, True])
    ),
    max_size=12,
).map(lambda rows: entries(*rows))


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[TensorEntry], TransferPlan, int]:
    wanted = draw(wanted_tensors)
    world_size = draw(st.integers(1, 9))
    readers = sorted(draw(st.sets(st.integers(0, world_size - 1), min_size=1)))
    staging_bytes = draw(st.integers(1 << 15, 1 << 17) | st.integers(1 << 17, 1 << 22))
    chunk_bytes = draw(st.none() | st.sampled_from([1, 7, 64, 4088, 4089, 4097, 10_000]))
    plan = plan_for_all(
        wanted, world_size=world_size, readers=readers, staging_bytes=staging_bytes, chunk_bytes=chunk_bytes,
        hosts=draw(hosts_of(world_size)), num_sharing=draw(st.integers(1, 2)),
    )  # fmt: skip
    assert plan.readers == tuple(readers)
    if chunk_bytes is not None:
        assert plan.chunk_bytes <= chunk_bytes
    return wanted, plan, staging_bytes


def hosts_of(world_size: int) -> st.SearchStrategy[list[str]]:
    """The host of each rank, in any order; or nothing said about them."""
    each = st.lists(st.sampled_from("abcd"), min_size=world_size, max_size=world_size)
    return st.just([]) | each


@pytest.mark.slow
def test_readers_take_turns_in_some_of_the_plans_that_are_drawn() -> None:
    find(
        plans(),
        lambda drawn: drawn[1].num_windows > 2 and drawn[1].num_rounds > drawn[1].num_windows,
        settings=settings(max_examples=50_000, phases=[Phase.generate]),
    )


@given(plans())
def test_every_wanted_byte_is_read_once_and_in_order(
    drawn: tuple[list[TensorEntry], TransferPlan, int],
) -> None:
    wanted, plan, _ = drawn
    position = 0
    read: list[tuple[int, int]] = []
    for index in range(plan.num_rounds):
        assert [rank for rank in plan.readers if plan.chunk(index, rank).nbytes] == sorted(
            rank for rank in plan.readers_in(index) if plan.chunk(index, rank).nbytes
        )
        for rank in plan.readers_in(index):
            assert index in plan.rounds_of(rank, 0, plan.num_rounds)
            chunk = plan.chunk(index, rank)
            if chunk.nbytes:
                assert chunk.start == position
            position += chunk.nbytes
            spans = plan.byte_ranges(chunk)
            assert all(span.nbytes for span in spans)
            assert sum(span.nbytes for span in spans) == chunk.nbytes
            read += [
                (span.file, at) for span in spans for at in range(span.offset, span.offset + span.nbytes)
            ]
        assert sum(plan.chunk(index, rank).nbytes for rank in plan.readers) > 0
    assert read == [(e.file, at) for e in wanted for at in range(e.offset, e.offset + e.nbytes)]
    assert position == plan.total_bytes == sum(entry.nbytes for entry in wanted)


@given(plans())
def test_shares_differ_by_less_than_a_chunk_and_rounds_are_even(
    drawn: tuple[list[TensorEntry], TransferPlan, int],
) -> None:
    _, plan, _ = drawn
    shares = [share_bytes(plan, rank) for rank in plan.readers]
    assert sum(shares) == plan.total_bytes
    assert max(shares) - min(shares) <= plan.chunk_bytes
    for rank in range(len(plan.recipients)):
        if rank not in plan.readers:
            assert share_bytes(plan, rank) == 0
    for index in range(plan.num_rounds):
        sizes = [plan.chunk(index, rank).nbytes for rank in plan.readers_in(index)]
        longest = plan.chunk_bytes_of(index)
        assert max(sizes) == sizes[0] <= longest
        assert sizes == sorted(sizes, reverse=True)  # equal, and the ragged end comes last
        assert sizes[0] == longest or index == plan.num_rounds - 1
        assert len(sizes) in (plan.windows.most_readers, plan.windows.most_readers - 1)
        if index < (plan.num_rounds - 1) // plan.num_windows * plan.num_windows:
            assert sizes == [plan.chunk_bytes] * len(sizes)
        for place, size in enumerate(sizes):
            assert size in (longest, 0) or sum(sizes[place + 1 :]) == 0


@given(plans())
def test_the_buffers_fit_into_staging_and_hold_every_slot(
    drawn: tuple[list[TensorEntry], TransferPlan, int],
) -> None:
    _, plan, staging_bytes = drawn
    assert plan.depth >= 1
    assert staged_bytes(plan) <= staging_bytes
    assert staged_bytes(plan) >= plan.depth * plan.buffer_bytes // plan.num_sharing
    if plan.num_windows > 1:
        assert plan.ahead >= plan.depth
        own = plan.part_of(plan.num_own * plan.own_bytes)
        assert staged_bytes(plan) >= plan.depth * plan.buffer_bytes // plan.num_sharing + own
        for rank in plan.readers:  # the chunk that had the memory of another one before is over
            own_rounds = plan.rounds_of(rank, 0, plan.num_rounds)
            for before, after in zip(own_rounds, own_rounds[plan.num_reads :], strict=False):
                assert after - before >= plan.ahead
    for index in range(plan.num_rounds):
        slots = plan.slots(index)
        assert sum(slots.values()) <= plan.buffer_bytes
        assert tuple(slots) == plan.readers_in(index)
        for rank, slot in slots.items():
            assert slot % PAGE_BYTES == 0
            assert slot >= plan.chunk(index, rank).nbytes
            assert len(set(slots.values())) == 1


@given(
    total=st.integers(0, 1 << 34),
    world_size=st.integers(1, 20_000),
    staging_bytes=st.integers(1 << 16, 1 << 30),
)
@example(total=1 << 20, world_size=4, staging_bytes=1 << 16)
@example(total=1 << 20, world_size=16, staging_bytes=1 << 16)
@example(total=1 << 40, world_size=512, staging_bytes=256 << 20)
@example(total=1 << 43, world_size=16384, staging_bytes=256 << 20)
def test_chosen_chunks_are_of_useful_size(total: int, world_size: int, staging_bytes: int) -> None:
    plan = plan_for_all(
        entries((total, 8, False)),
        world_size=world_size,
        readers=range(world_size),
        staging_bytes=staging_bytes,
        chunk_bytes=None,
    )
    assert staged_bytes(plan) <= staging_bytes
    assert plan.num_rounds <= 600 * plan.num_windows or plan.chunk_bytes >= 1 << 19 or staging_bytes < 1 << 26
    share = -(-total // len(plan.readers))
    assert plan.chunk_bytes >= min(PAGE_BYTES, max(share, 1))
    assert plan.chunk_bytes <= 8 << 20
    if total >= 1 << 30 and staging_bytes >= 64 << 20:
        assert plan.chunk_bytes >= min(share, 256 << 10)
        assert plan.windows.most_readers >= min(world_size, 8)


@pytest.mark.parametrize(
    ("num_hosts", "num_locals"), [(8, 8), (13, 8), (128, 8), (384, 8), (2048, 8), (640, 1)]
)
@pytest.mark.parametrize("num_sharing", [1, 8])
def test_all_read_however_many_there_are(num_hosts: int, num_locals: int, num_sharing: int) -> None:
    """Long chunks, as many of each rank of a host in a round; reads run ahead."""
    num_ranks = num_hosts * num_locals
    plan = plan_for_all(
        entries((140 * 10**9, 0, False)), world_size=num_ranks, readers=range(num_ranks),
        staging_bytes=256 << 20, chunk_bytes=None, num_sharing=min(num_sharing, num_locals),
        hosts=[f"host{rank // num_locals}" for rank in range(num_ranks)],
    )  # fmt: skip
    assert len(plan.readers) == num_ranks
    assert plan.chunk_bytes >= 3 << 18
    assert staged_bytes(plan) <= 256 << 20
    assert plan.depth == 4
    assert 1 << 27 <= (plan.ahead or plan.depth) * plan.windows.most_readers * plan.chunk_bytes <= 5 << 30
    for window in plan.windows.readers:
        assert 32 <= len(window) <= 512
        locals_of = Counter(rank % num_locals for rank in window)
        assert max(locals_of.values()) - min(locals_of.values()) <= 2
        hosts_of = Counter(rank // num_locals for rank in window)
        assert max(hosts_of.values()) - min(hosts_of.values()) <= 1 or len(hosts_of) <= num_hosts


@given(num_hosts=st.integers(1, 40), num_locals=st.integers(1, 8), data=st.data())
def test_windows_are_even(num_hosts: int, num_locals: int, data: st.DataObject) -> None:
    readers = range(num_hosts * num_locals)
    hosts = [f"host{rank // num_locals}" for rank in readers]
    num_windows = data.draw(st.integers(1, len(readers)))
    windows = ReaderWindows.of(readers, hosts, num_windows)
    assert sorted(windows.order) == list(readers)
    assert [rank for window in windows.readers for rank in window] == list(windows.order)
    sizes = [len(window) for window in windows.readers]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == windows.most_readers
    if num_hosts % num_windows == 0:
        distance = num_windows
        for window in windows.readers:
            for local in range(num_locals):
                hosts_of = sorted(rank // num_locals for rank in window if rank % num_locals == local)
                assert len(hosts_of) == num_hosts // num_windows
                assert {after - before for before, after in pairwise(hosts_of)} <= {distance}


def test_nothing_wanted() -> None:
    for wanted in ([], entries((0, 0, False), (0, 8, True))):
        plan = plan_for_all(wanted, world_size=3, readers=(0, 2), staging_bytes=1 << 20, chunk_bytes=None)
        assert (plan.total_bytes, plan.num_rounds, plan.ranges) == (0, 0, ())
        assert [share_bytes(plan, rank) for rank in range(3)] == [0, 0, 0]
        assert plan.byte_ranges(Chunk(0, 0)) == []


def test_a_chunk_that_does_not_fit_is_an_option_error() -> None:
    def plan(chunk_bytes: int) -> TransferPlan:
        return plan_for_all(
            entries((1 << 30, 0, False)),
            world_size=4,
            readers=(0, 1, 2),
            staging_bytes=1 << 20,
            chunk_bytes=chunk_bytes,
        )

    largest = 1 << 19  # one that this rank reads, and one on its way
    assert (plan(largest).depth, plan(largest).num_windows) == (1, 3)
    with pytest.raises(OptionError, match=rf"chunk_bytes={largest + 1}: .* fit into staging_bytes=1048576"):
        plan(largest + 1)


def test_errors_name_no_option_that_nobody_gave() -> None:
    def message(*, chunk_bytes: int | None, staging_bytes: int) -> str:
        with pytest.raises(OptionError) as raised:
            plan_transfer(
                entries((1 << 30, 0, False)),
                (0,),
                (0,),
                staging_bytes=staging_bytes,
                chunk_bytes=chunk_bytes,
                block_bytes=1 << 29,
            )
        return str(raised.value)

    chosen = message(chunk_bytes=None, staging_bytes=256 << 20)
    assert "chunk_bytes" not in chosen
    assert "fit into staging_bytes=268435456, the default (checksum blocks have 536870912" in chosen
    given = message(chunk_bytes=1 << 29, staging_bytes=1 << 20)
    assert given.startswith("chunk_bytes=536870912: ")
    assert "fit into staging_bytes=1048576 (checksum blocks" in given


@given(plans(), st.data())
def test_without_broken_readers_the_others_read_exactly_what_is_left(
    drawn: tuple[list[TensorEntry], TransferPlan, int], data: st.DataObject
) -> None:
    wanted, plan, _ = drawn
    broken = data.draw(st.sets(st.sampled_from(plan.readers), min_size=1))
    num_done = data.draw(st.integers(0, plan.num_rounds))
    num_posted = data.draw(st.integers(num_done, plan.num_rounds))
    lacking = [(index, rank) for index in range(num_done, num_posted) for rank in sorted(broken)]
    left = plan.without(broken, lacking, num_posted)
    if broken == set(plan.readers):
        assert left is None
        return
    assert left is not None
    assert left.buffer_bytes <= plan.buffer_bytes
    assert left.num_reads <= plan.num_reads or not plan.ahead
    assert left.readers == tuple(rank for rank in plan.readers if rank not in broken)

    placed: list[int] = []
    for index in range(num_posted):
        for rank in plan.readers:
            if index < num_done or rank not in broken:
                placed += wanted_bytes(plan, index, rank)
    for index in range(left.num_rounds):
        for rank in left.readers:
            placed += wanted_bytes(left, index, rank)
    assert sorted(placed) == list(range(sum(entry.nbytes for entry in wanted)))


def wanted_bytes(plan: TransferPlan, index: int, rank: int) -> list[int]:
    spans = plan.byte_ranges(plan.chunk(index, rank))
    return [at for span in spans for at in range(span.start, span.start + span.nbytes)]


def test_a_chunk_longer_than_a_share_is_cut_to_it() -> None:
    plan = plan_for_all(
        entries((10, 0, False)), world_size=4, readers=range(4), staging_bytes=1 << 20, chunk_bytes=1 << 30
    )
    assert plan.num_rounds == 1
    assert [plan.chunk(0, rank).nbytes for rank in range(4)] == [3, 3, 3, 1]


def test_spans_lead_back_to_the_files_across_gaps() -> None:
    a, b, c, d = entries((10, 100, False), (5, 0, False), (7, 3, False), (4, 8, True))
    plan = plan_for_all([a, b, c, d], world_size=1, readers=(0,), staging_bytes=1 << 20, chunk_bytes=1 << 10)
    assert plan.ranges == (ByteRange(0, 100, 15, 0), ByteRange(0, 118, 7, 15), ByteRange(1, 8, 4, 22))
    assert plan.byte_ranges(Chunk(0, 26)) == list(plan.ranges)
    assert plan.byte_ranges(Chunk(14, 9)) == [
        ByteRange(0, 114, 1, 14),
        ByteRange(0, 118, 7, 15),
        ByteRange(1, 8, 1, 22),
    ]
    assert plan.byte_ranges(Chunk(15, 7)) == [ByteRange(0, 118, 7, 15)]
    assert plan.byte_ranges(Chunk(16, 1)) == [ByteRange(0, 119, 1, 16)]
    # Without the tensor in the middle the two that are left are no neighbours.
    subset = plan_for_all([a, c], world_size=1, readers=(0,), staging_bytes=1 << 20, chunk_bytes=1 << 10)
    assert subset.byte_ranges(Chunk(9, 2)) == [ByteRange(0, 109, 1, 9), ByteRange(0, 118, 1, 10)]


def test_the_digest_tells_plans_apart() -> None:
    wanted = entries((1000, 0, False), (500, 8, False))
    base = plan_for_all(wanted, world_size=3, readers=(0, 1), staging_bytes=1 << 20, chunk_bytes=64)
    others = [
        replace(base, recipients=(0, 1, 2, 3)),
        replace(base, readers=(0, 2)),
        replace(base, readers=(0, 1, 2)),
        replace(base, chunk_bytes=65),
        replace(base, depth=base.depth - 1),
        replace(base, ranges=base.ranges[:1]),
        replace(base, ranges=tuple(extent._replace(file=1) for extent in base.ranges)),
        replace(base, ranges=tuple(extent._replace(offset=extent.offset + 1) for extent in base.ranges)),
    ]
    digests = [plan.digest() for plan in (base, *others)]
    assert len(set(digests)) == len(digests)
    assert base.digest() == replace(base).digest()


def digest_of_a_plan() -> str:
    return plan_for_all(
        entries((9999, 0, False), (5, 3, True)),
        world_size=5,
        readers=(1, 3, 4),
        staging_bytes=1 << 20,
        chunk_bytes=None,
    ).digest()


def test_planning_a_large_job_takes_no_time_worth_naming() -> None:
    wanted = entries(*[(1 << 20, 8 * (number % 3 == 0), number % 1000 == 0) for number in range(100_000)])
    began = time.process_time()
    plan = plan_for_all(
        wanted, world_size=1024, readers=range(1024), staging_bytes=256 << 20, chunk_bytes=None
    )
    plan.digest()
    for index in (0, plan.num_rounds // 2, plan.num_rounds - 1):
        plan.byte_ranges(plan.chunk(index, plan.readers[-1]))
    assert time.process_time() - began < 5
    assert plan.total_bytes == 100_000 << 20
