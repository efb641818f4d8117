"""What was read is copied into buffers of any lengths, and nothing keeps them afterwards."""

from __future__ import annotations

import os

import obstore
import pytest
from obstore.store import MemoryStore

from fastload.storage.base import fill

_DATA = os.urandom(3 << 20)


@pytest.mark.parametrize("lengths", [(3 << 20,), (1 << 20, 7, (2 << 20) - 7), (0, (3 << 20) - 65536, 65536)])
def test_buffers_are_filled_in_order(lengths: tuple[int, ...]) -> None:
    store = MemoryStore()
    obstore.put(store, "x", _DATA)
    for data in (memoryview(_DATA), memoryview(obstore.get(store, "x").bytes())):
        buffers = [bytearray(length) for length in lengths]
        fill([memoryview(buffer) for buffer in buffers], data)
        assert b"".join(buffers) == _DATA
        for buffer in buffers:
            buffer.append(0)  # refused while something refers to its memory


def test_what_may_not_be_written_is_left_alone() -> None:
    before = bytes(1 << 20)
    with pytest.raises(TypeError):
        fill([memoryview(before)], memoryview(_DATA)[: 1 << 20])
    assert before == bytes(1 << 20)
