"""How much of a region of memory has pages."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

__all__ = ["needs_populate", "resident_bytes"]

needs_populate = pytest.mark.skipif(
    tuple(int(part) for part in os.uname().release.split(".")[:2]) < (5, 14),
    reason="Linux < 5.14 does not provide pages in advance",
)


def resident_bytes(region: mmap.mmap) -> int:
    """Returns the bytes of a region that have pages; it lies in whole ones."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    pages = (ctypes.c_ubyte * (len(region) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(region)), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
