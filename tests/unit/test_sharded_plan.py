"""Who writes and sends what where ranks hold different bytes: every byte once, from a rank that holds it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fastload.formats.record import checksum
from fastload.geometry.blocks import num_blocks
from fastload.geometry.box import Box
from fastload.geometry.dtensors import BoxesByRank
from fastload.geometry.ranges import ByteRange
from fastload.geometry.shards import shard_boxes, shard_intervals
from fastload.saving.layout import Layout, TensorSpec, lay_out
from fastload.saving.merge import merge
from fastload.saving.messages import MessagePlan, ShardMessage, plan_messages, positions_in, receiving_writers
from fastload.saving.shard_map import ShardMap
from fastload.saving.split import WriterShare, cut_shares, split
from fastload.saving.write import BlockHasher
from tests.unit.test_layout import SIZES

MIB = 1 << 20


def placed_on(mesh: Sequence[int], placements: Sequence[Any], shape: Sequence[int]) -> BoxesByRank:
    """What each rank holds of a tensor that is spread over all of them."""
    return tuple(
        (
            tuple(box for box, _ in shard_boxes(shard_intervals(shape, mesh, coordinate, placements)[0])),
            (rank,),
        )
        for rank, coordinate in enumerate(product(*map(range, mesh)))
    )


def drawn_placement(draw: st.DrawFn, num_dims: int) -> Any:
    if not num_dims:
        return Replicate()
    dim = draw(st.integers(0, num_dims - 1))
    return draw(st.sampled_from([Replicate(), Shard(dim), Shard(dim), _StridedShard(dim, split_factor=2)]))


@st.composite
def saves(draw: st.DrawFn) -> tuple[Layout, dict[str, BoxesByRank] | None, int]:
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (2, 3), (1, 2, 2)]))
    num_ranks = prod(mesh)
    specs, boxes = [], {}
    for number in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 13]), max_size=3)))
        dtype = draw(st.sampled_from(sorted(SIZES)))
        specs.append(TensorSpec(f"t{number}", dtype, shape, SIZES[dtype] * prod(shape)))
        how = draw(st.integers(0, 3))
        if how == 0:  # as a stage of a pipeline has it
            some = tuple(sorted(draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))))
            boxes[f"t{number}"] = (((Box.whole(shape),), some),)
        else:
            placements = [drawn_placement(draw, len(shape)) for _ in mesh]
            boxes[f"t{number}"] = placed_on(mesh, placements, shape)
        if how == 1:  # somebody has all of it besides
            boxes[f"t{number}"] += (((Box.whole(shape),), (draw(st.integers(0, num_ranks - 1)),)),)
    layout = lay_out(
        specs,
        max_shard_bytes=draw(st.sampled_from([200, 1000, 10**9])),
        block_bytes=draw(st.sampled_from([1, 3, 64, 1 << 18])),
    )
    return layout, draw(st.sampled_from([boxes, boxes, None])), num_ranks  # None: all hold everything


def bytes_of(layout: Layout, *, seed: int = 0) -> list[bytes]:
    """The files, with any data but ``?``."""
    rng = random.Random(seed)
    return [
        file.header + rng.randbytes(file.nbytes - len(file.header)).replace(b"?", b"!")
        for file in layout.files
    ]


def packed(layout: Layout, message: ShardMessage, files: Sequence[bytes]) -> bytes:
    """What the sender sends."""
    data = b""
    for number, shard, begin, end in message.ranges:
        assert message.sender in shard.holders
        entry = layout.space.ranges[number]
        tensor = files[entry.file][entry.offset : entry.offset + entry.nbytes]
        whole = b"".join(tensor[at : at + shard.runs.length] for at in shard.runs.starts())
        data += whole[begin:end]
    return data


def assembled(
    layout: Layout, part: ByteRange, coming: Sequence[ShardMessage], sent: Sequence[bytes]
) -> bytes:
    header = layout.files[part.file].header[part.offset : part.end]
    slot = bytearray(header.ljust(part.nbytes, b"?"))
    for message, data in zip(coming, sent, strict=True):
        position = 0
        for runs in positions_in(layout, part, message):
            for start in runs.starts():
                slot[start : start + runs.length] = data[position : position + runs.length]
                position += runs.length
        assert position == len(data) == message.nbytes
    return bytes(slot)


@given(saves(), st.data())
def test_every_byte_is_written_once_and_every_block_hashed_once(
    save: tuple[Layout, dict[str, BoxesByRank] | None, int], data: st.DataObject
) -> None:
    layout, boxes, num_ranks = save
    shard_map = ShardMap(layout, num_ranks, boxes)
    assert not shard_map.missing()
    align_bytes = data.draw(st.sampled_from([None, 1, 4, 64, 4096]))
    part_bytes = data.draw(st.integers(1, 4)) * (align_bytes or 100)
    cut = data.draw(st.integers(0, num_ranks - 1))
    teams = [tuple(range(cut)), tuple(range(cut, num_ranks))] if cut else [tuple(range(num_ranks))]
    shares, ranges_of_teams = [], []
    for members in teams:
        writers = sorted(data.draw(st.sets(st.sampled_from(members), min_size=1)))
        ranges_of_teams.append(split(layout, shard_map, writers, align_bytes))
        shares.append(cut_shares(layout, ranges_of_teams[-1], part_bytes))
    batch_bytes = data.draw(st.integers(1, 3)) * part_bytes
    messages = [
        plan_messages(layout, shard_map, shares, rank, teams, batch_bytes) for rank in range(num_ranks)
    ]
    check_both_ends(messages)
    for rank in range(num_ranks) if boxes is not None else ():
        some = [sorted(receiving_writers(layout, shard_map, each, rank)) for each in ranges_of_teams]
        narrowed = [
            cut_shares(layout, ranges, part_bytes, writers)
            for ranges, writers in zip(ranges_of_teams, some, strict=True)
        ]
        found = plan_messages(layout, shard_map, narrowed, rank, teams, batch_bytes)
        assert found == messages[rank], "other shares do not matter"
    for of_team in shares:
        for writer, share in of_team.items():
            check_batches(share.parts, messages[writer], batch_bytes)
    files = bytes_of(layout)
    replicas = [bytes_of(layout, seed=rank) for rank in range(num_ranks)]
    for of_team in shares:
        written, sums = written_by(layout, of_team, messages, [files] * num_ranks)
        assert written == files
        assert sums == all_sums(layout, files)
        written, sums = written_by(layout, of_team, messages, replicas)
        assert sums == all_sums(layout, written), "of what is written, whoever has something else"


def written_by(
    layout: Layout,
    shares: Mapping[int, WriterShare],
    messages: Sequence[MessagePlan],
    files: Sequence[Sequence[bytes]],
) -> tuple[list[bytes], dict[int, bytes]]:
    """What some ranks write if each holds files of its own, and the checksums by the number of the block."""
    written = [bytearray(b"?" * len(content)) for content in files[0]]
    sums: dict[int, bytes] = {}
    for writer, share in shares.items():
        hasher = BlockHasher(layout.blocks_of(share.ranges))
        for index, part in enumerate(share.parts):
            coming = messages[writer].parts[index]
            sent = [packed(layout, each, files[each.sender]) for each in coming]
            found = assembled(layout, part, coming, sent)
            hasher.feed(part, memoryview(found))()
            if index not in share.tails:
                assert set(written[part.file][part.offset : part.end]) <= {ord("?")}
                written[part.file][part.offset : part.end] = found
        for first, digests in hasher.checksums():
            for number in range(len(digests) // 8):
                assert first + number not in sums
                sums[first + number] = digests[8 * number : 8 * number + 8]
    return [bytes(content) for content in written], sums


def test_writers_of_few_parts_write_about_as_much() -> None:
    shape = (4400, 512)
    specs = [TensorSpec(f"t{number}", "BF16", shape, 2 * 4400 * 512) for number in range(29)]
    layout = lay_out(specs, max_shard_bytes=1 << 30, block_bytes=None)
    halves = tuple(((Box((first, 0), (2200, 512)),), ranks) for first, ranks in ((0, (0, 2)), (2200, (1, 3))))
    shard_map = ShardMap(layout, 4, {spec.name: halves for spec in specs})
    ranges = split(layout, shard_map, range(4), 8 << 20)
    most = max(sum(each.nbytes for each in of_writer) for of_writer in ranges.values())
    assert 15 < layout.nbytes / (8 << 20) < 16
    assert most == 4 * 8 << 20


def check_both_ends(messages: Sequence[MessagePlan]) -> None:
    """Between two ranks the same messages leave and come, in the same order."""
    for sender, writer in product(range(len(messages)), repeat=2):
        leaving = [message for message in messages[sender].outgoing if message.writer == writer]
        coming = [
            message
            for number in range(len(messages[writer].batches))
            for message in messages[writer].incoming(number)
            if message.sender == sender
        ]
        assert leaving == coming


def check_batches(parts: Sequence[ByteRange], messages: MessagePlan, batch_bytes: int) -> None:
    """They are the parts in order, and what comes for one is what its parts consist of, one by one."""
    assert [part for batch in messages.batches for part in batch] == list(range(len(parts)))
    for number, batch in enumerate(messages.batches):
        assert len(batch) == 1 or sum(parts[part].nbytes for part in batch) <= batch_bytes
        for message in messages.incoming(number):
            of_parts = [each for part in batch for each in messages.parts[part]]
            same = [each for each in of_parts if each.sender == message.sender]
            assert bytewise(message) == [one for each in same for one in bytewise(each)]


def bytewise(message: ShardMessage) -> list[tuple[int, Box, int]]:
    return [(s.tensor, s.shard.box, at) for s in message.ranges for at in range(s.begin, s.end)]


def all_sums(layout: Layout, files: Sequence[bytes]) -> dict[int, bytes]:
    sums: dict[int, bytes] = {}
    for entry in layout.space.ranges:
        for at in range(num_blocks(entry.nbytes, layout.block_bytes)):
            begin = entry.offset + at * layout.block_bytes
            end = min(begin + layout.block_bytes, entry.offset + entry.nbytes)
            sums[len(sums)] = checksum(files[entry.file][begin:end])
    return sums


@pytest.mark.parametrize(
    ("mesh", "placements", "most_sent"),
    [
        ((4,), [Shard(0)], 0.04),
        ((2, 2), [Replicate(), Shard(0)], 0.04),
        ((4,), [Replicate()], 0.001),
        ((4,), [Shard(1)], 0.76),
        ((2, 2), [Replicate(), Shard(1)], 0.51),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], 0.04),
    ],
    ids=str,
)
def test_who_holds_long_ranges_writes_them_and_all_write_as_much(
    mesh: tuple[int, ...], placements: list[Any], most_sent: float
) -> None:
    specs = [TensorSpec(f"t{number}", "F32", (16384, 2000), 16384 * 8000) for number in range(8)]
    layout = lay_out(specs, max_shard_bytes=10**9, block_bytes=None)
    shard_map = ShardMap(layout, 4, {spec.name: placed_on(mesh, placements, spec.shape) for spec in specs})
    ranges = split(layout, shard_map, range(4), MIB)
    sizes = [sum(each.nbytes for each in of_writer) for of_writer in ranges.values()]
    assert sum(sizes) == layout.nbytes
    assert max(sizes) <= layout.nbytes / 4 + 2.5 * MIB
    shares = cut_shares(layout, ranges, 4 * MIB)
    messages = [plan_messages(layout, shard_map, [shares], rank, [range(4)], 16 * MIB) for rank in range(4)]
    sent = [sum(message.nbytes for message in of_rank.outgoing) for of_rank in messages]
    assert sum(sent) <= most_sent * layout.nbytes
    assert max(sent) <= sum(sent) / 4 + 0.02 * layout.nbytes


def test_what_is_on_no_rank_is_named() -> None:
    layout = lay_out([TensorSpec("w", "F32", (8, 2), 64)], max_shard_bytes=10**9, block_bytes=None)
    held = (((Box((0, 0), (3, 2)),), (0, 2)), ((Box((6, 0), (2, 1)),), (1,)))
    assert ShardMap(layout, 3, {"w": held}).missing() == [
        "rows 3-5 of w are on no rank",
        "elements [6:8, 1:2] of w are on no rank",
    ]


def items(**values: Any) -> dict[str, Any]:
    return {"dict": [part for pair in values.items() for part in pair]}


def test_parts_are_merged_by_key_in_the_order_of_the_whole() -> None:
    first = items(step=3, model=items(a={}, b={}), loss=1.5)
    second = items(step=3, model=items(c={}, d={}), loss=1.5)
    third = items(step=3, model=items(a={}, e={}, b={}), extra=[1, {"tuple": [2]}], loss=1.5)
    whole = items(step=3, model=items(a={}, e={}, b={}, c={}, d={}), extra=[1, {"tuple": [2]}], loss=1.5)
    assert merge([(first, [0]), (second, [1]), (third, [2, 3])]) == (whole, [])


def test_what_cannot_be_merged_is_named_with_the_ranks() -> None:
    first = items(step=3, part=items(a=[1, 2]), kind={})
    second = items(step=4, part=items(a=[1]), kind=items(x=1))
    _, problems = merge([(first, [0, 2]), (second, [1])])
    assert problems == [
        "state['step']: rank 0, 2 3, rank 1 4",
        "state['part']['a']: rank 0, 2 a list of 2, rank 1 a list of 1",
        "state['kind']: rank 0, 2 a tensor, rank 1 a dict",
    ]
