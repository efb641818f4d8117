"""The copy that an asynchronous save writes from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastload.base.memory import PAGE_BYTES
from fastload.formats.dtypes import safetensors_spec
from fastload.saving import snapshot
from fastload.saving.layout import FileRange, TensorSpec, cut, lay_out
from fastload.saving.snapshot import Snapshot, Source, Spares

_SLAB_BYTES = 8 * PAGE_BYTES
_LONGEST_BYTES = 3 * PAGE_BYTES


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
    monkeypatch.setattr(snapshot, "_SLAB_BYTES", _SLAB_BYTES)
    tensor = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    specs = [TensorSpec("t", *safetensors_spec(tensor), tensor.nbytes)]
    layout = lay_out(specs, max_shard_bytes=1 << 30, block_bytes=1 << 20, metadata={})
    [file] = layout.files
    pieces = cut([FileRange(0, 0, file.nbytes)], _LONGEST_BYTES)
    taken = Snapshot(Source(layout, {"t": tensor}), pieces)
    whole = b"".join(taken.piece(index) for index in range(len(pieces)))
    assert whole == file.header + tensor.numpy().tobytes()
    asked = [slab.numel() for slab in taken._slabs]
    assert taken.nbytes == sum(asked)
    # What is left over in a slab is less than a piece; of the last one, less than half.
    num_slabs = -(-len(pieces) // (_SLAB_BYTES // _LONGEST_BYTES))
    assert len(asked) == max(1, num_slabs)
    assert sum(map(power_of_two, asked)) <= num_slabs * _SLAB_BYTES


def test_memory_is_used_again_by_a_snapshot_of_the_same_length() -> None:
    tensor = torch.zeros(1 << 20)
    specs = [TensorSpec("t", *safetensors_spec(tensor), tensor.nbytes)]
    layout = lay_out(specs, max_shard_bytes=1 << 30, block_bytes=1 << 20, metadata={})
    pieces = [FileRange(0, 0, layout.files[0].nbytes)]
    first = Snapshot(Source(layout, {"t": tensor}), pieces)
    addresses = [slab.data_ptr() for slab in first._slabs]
    first.keep()
    second = Snapshot(Source(layout, {"t": tensor}), pieces)
    assert [slab.data_ptr() for slab in second._slabs] == addresses


def test_memory_for_all_that_may_be_in_flight_is_taken_by_the_first_and_kept() -> None:
    spares = Spares(3)
    first = spares.take([4096, 8192], pinned=False)
    others = [spares.take([4096, 8192], pinned=False) for _ in range(2)]
    addresses = {slab.data_ptr() for slabs in (first, *others) for slab in slabs}
    fourth = spares.take([4096, 8192], pinned=False)
    assert not addresses & {slab.data_ptr() for slab in fourth}, "one more than was said is not kept"
    for slabs in (first, *others, fourth):
        spares.keep(slabs)
    again = [spares.take([4096, 8192], pinned=False) for _ in range(3)]
    assert {slab.data_ptr() for slabs in again for slab in slabs} == addresses
    grown = spares.take([4096, 16384], pinned=False)
    assert [slab.numel() for slab in grown] == [4096, 16384]
    spares.keep(again[0])  # of a state that has another size now
    assert [slab.numel() for slab in spares.take([4096, 16384], pinned=False)] == [4096, 16384]


def test_memory_of_states_that_are_saved_in_turn_is_kept_for_each() -> None:
    spares = Spares(1, num_kinds=2)

    def saved(*lengths: int) -> set[int]:
        slabs = spares.take(lengths, pinned=False)
        spares.keep(slabs)
        return {slab.data_ptr() for slab in slabs}

    of_model, of_optimizer = saved(4096, 8192), saved(16384)
    assert (saved(4096, 8192), saved(16384)) == (of_model, of_optimizer)
    for _ in range(2):
        saved(32768)  # from here on
    assert list(spares._free) == [((32768,), False)], "what is saved no more is let go of"
