"""The copy that an asynchronous save writes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

import pytest
import torch

from fastload.base.memory import PAGE_BYTES
from fastload.formats.dtypes import safetensors_spec
from fastload.geometry.ranges import ByteRange
from fastload.saving import snapshot
from fastload.saving.layout import Layout, TensorSpec, lay_out
from fastload.saving.messages import ShardMessage, plan_messages
from fastload.saving.reader import StateReader
from fastload.saving.shard_map import ShardMap
from fastload.saving.snapshot import BufferPool, Snapshot, buffer_pool
from fastload.saving.split import cut_shares

_BUFFER_BYTES = 8 * PAGE_BYTES
_LONGEST_BYTES = 3 * PAGE_BYTES


class NotingPool(BufferPool):
    """Notes the lengths that it is asked for."""

    def __init__(self, num_snapshots: int) -> None:
        super().__init__(num_snapshots)
        self.asked: list[Sequence[int]] = []

    def take(self, lengths: Sequence[int], *, pinned: bool) -> list[torch.Tensor]:
        self.asked.append(lengths)
        return super().take(lengths, pinned=pinned)


def messages_of(layout: Layout, part_bytes: int) -> list[ShardMessage]:
    """What one rank alone contributes to the first file."""
    shares = cut_shares(layout, {0: [ByteRange(0, 0, layout.files[0].nbytes)]}, part_bytes)
    plan = plan_messages(layout, ShardMap(layout, 1), [shares], 0, [range(1)], part_bytes)
    return plan.contributed


def power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """With one thread, and with several, bytes are copied in different ways."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("nbytes", [0, 1, PAGE_BYTES, 9 * PAGE_BYTES, 33 * PAGE_BYTES, 257 * PAGE_BYTES + 17])
def test_a_share_takes_little_more_memory_than_it_has_even_rounded_to_powers_of_two(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(snapshot, "_BUFFER_BYTES", _BUFFER_BYTES)
    tensor = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    specs = [TensorSpec("t", *safetensors_spec(tensor), tensor.nbytes)]
    layout = lay_out(specs, max_shard_bytes=1 << 30, block_bytes=1 << 20)
    messages = messages_of(layout, _LONGEST_BYTES)
    pool = NotingPool(1)
    taken = Snapshot(StateReader(layout, {"t": tensor}), messages, pool)
    assert b"".join(taken.get(each).numpy().tobytes() for each in messages) == tensor.numpy().tobytes()
    [asked] = pool.asked
    assert taken.nbytes == sum(asked)
    # What is left over in a buffer is less than a message; of the last one, less than half.
    num_buffers = max(1, -(-len(messages) // (_BUFFER_BYTES // _LONGEST_BYTES)))
    assert len(asked) == num_buffers
    assert sum(map(power_of_two, asked)) <= num_buffers * _BUFFER_BYTES


@pytest.mark.parametrize("num_messages", [1, 3, 11, 20])
def test_messages_longer_than_a_buffer_share_longer_ones(
    monkeypatch: pytest.MonkeyPatch, num_messages: int
) -> None:
    monkeypatch.setattr(snapshot, "_BUFFER_BYTES", _BUFFER_BYTES)
    tensor = torch.arange(num_messages * 9 * PAGE_BYTES, dtype=torch.int64).to(torch.uint8)
    specs = [TensorSpec("t", *safetensors_spec(tensor), tensor.nbytes)]
    layout = lay_out(specs, max_shard_bytes=1 << 30, block_bytes=1 << 20)
    messages = messages_of(layout, 9 * PAGE_BYTES)
    pool = NotingPool(1)
    taken = Snapshot(StateReader(layout, {"t": tensor}), messages, pool)
    assert b"".join(taken.get(each).numpy().tobytes() for each in messages) == tensor.numpy().tobytes()
    [asked] = pool.asked
    alone = power_of_two(9 * PAGE_BYTES)  # of one message
    assert sum(map(power_of_two, asked)) <= min(len(messages) * alone, 1.15 * tensor.nbytes + alone)


def test_memory_is_used_again_by_a_snapshot_of_the_same_length() -> None:
    tensor = torch.zeros(1 << 20)
    specs = [TensorSpec("t", *safetensors_spec(tensor), tensor.nbytes)]
    layout = lay_out(specs, max_shard_bytes=1 << 30, block_bytes=1 << 20)
    messages = messages_of(layout, 1 << 30)
    first = Snapshot(StateReader(layout, {"t": tensor}), messages, buffer_pool)
    addresses = [first.get(each).data_ptr() for each in messages]
    first.release()
    second = Snapshot(StateReader(layout, {"t": tensor}), messages, buffer_pool)
    assert [second.get(each).data_ptr() for each in messages] == addresses


def test_memory_for_all_that_may_be_in_flight_is_taken_by_the_first_and_kept() -> None:
    pool = BufferPool(3)
    first = pool.take([4096, 8192], pinned=False)
    others = [pool.take([4096, 8192], pinned=False) for _ in range(2)]
    addresses = {buffer.data_ptr() for buffers in (first, *others) for buffer in buffers}
    fourth = pool.take([4096, 8192], pinned=False)
    assert not addresses & {buffer.data_ptr() for buffer in fourth}, "one more than was said is not kept"
    for buffers in (first, *others, fourth):
        pool.give_back(buffers)
    again = [pool.take([4096, 8192], pinned=False) for _ in range(3)]
    assert {buffer.data_ptr() for buffers in again for buffer in buffers} == addresses
    grown = pool.take([4096, 16384], pinned=False)
    assert [buffer.numel() for buffer in grown] == [4096, 16384]
    pool.give_back(again[0])  # of a state that has another size now
    assert [buffer.numel() for buffer in pool.take([4096, 16384], pinned=False)] == [4096, 16384]


def test_memory_of_states_that_are_saved_in_turn_is_kept_for_each() -> None:
    pool = BufferPool(1, num_kinds=2)

    alive = WeakValueDictionary[int, torch.Tensor]()

    def saved(*lengths: int) -> set[int]:
        buffers = pool.take(lengths, pinned=False)
        pool.give_back(buffers)
        alive.update({buffer.data_ptr(): buffer for buffer in buffers})
        return {buffer.data_ptr() for buffer in buffers}

    of_model, of_optimizer = saved(4096, 8192), saved(16384)
    assert (saved(4096, 8192), saved(16384)) == (of_model, of_optimizer)
    for _ in range(2):
        saved(32768)  # from here on
    assert [buffer.numel() for buffer in alive.values()] == [32768], "what is saved no more is let go of"
