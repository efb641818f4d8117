"""Huge pages for a process that others are forked from: a fork copies one entry for each, not 512 entries."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

__all__ = ["collapse_memory"]

_HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # from Linux 6.1 on; elsewhere forks only take longer
_libc = ctypes.CDLL(None)


def collapse_memory() -> None:
    """Puts the anonymous memory of this process into huge pages, as far as they are free."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.fullmatch(r"(\w+)-(\w+) rw-p \S+ \S+ 0 *(?:\[heap\])?", line)
        if found is None:
            continue
        begin, end = (int(address, 16) for address in found.groups())
        first, last = -(-begin // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
        if first < last:
            _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE)
