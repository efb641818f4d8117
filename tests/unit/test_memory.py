"""Host memory: what the system is asked for."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastload.base import memory
from fastload.base.memory import (
    allocate,
    allocate_staging,
    memory_bytes,
    touch,
    touch_all,
    uncollected,
)

MIB = 1 << 20
_NBYTES = 8 * MIB
_LARGE_NBYTES = 512 << 20  # more than malloc has from what other tests have freed; it is never touched


def flags_of(tensor: Tensor) -> set[str]:
    """Returns the kernel's flags of the mapping that holds a tensor's middle."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    mappings = re.findall(
        r"^(\w+)-(\w+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(), re.M | re.S
    )
    return next(
        set(flags.split()) for start, end, flags in mappings if int(start, 16) <= middle < int(end, 16)
    )


@pytest.mark.parametrize("what", ["staging", "destination"])
@pytest.mark.parametrize("order", [None, -1, 9])
def test_large_buffers_ask_for_huge_pages_unless_the_host_takes_them_away(
    what: str, order: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if order is not None:
        (tmp_path / "order").write_text(f"{order}\n")
    monkeypatch.setattr(memory, "_REPORTING", str(tmp_path / "order"))
    if what == "staging":
        tensor = allocate_staging(_NBYTES, pinned=False)
    else:
        tensor = allocate((_LARGE_NBYTES,), torch.uint8, torch.device("cpu"))
    flags = flags_of(tensor)
    assert ("hg" in flags) == (order != 9)
    assert "sh" not in flags  # which would get none


def test_the_collector_runs_in_a_child_that_is_forked_while_it_waits() -> None:
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with uncollected:
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert inside.wait(30)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions of Python warn of threads
            child = os.fork()
        if not child:
            with uncollected:
                was_off = not gc.isenabled()
            os._exit(0 if was_off and gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not gc.isenabled()
    finally:
        done.set()
        thread.join()
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("folder", "most", "now"),
    [("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")],
)
def test_page_cache_of_a_container_is_free(tmp_path: Path, folder: str, most: str, now: str) -> None:
    """As `fastload doctor` tells it, and the memory tier counts on it."""
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / "memory.stat").write_text(
        "anon 1000\ninactive_file 60000000\nactive_file 20000000\nshmem 4096\n"
    )
    (group / now).write_text("90000000\n")
    (group / most).write_text("100000000\n")
    assert memory_bytes(str(tmp_path)) == (100_000_000, 90_000_000)
    (group / most).write_text("max\n" if most == "memory.max" else f"{(1 << 63) - 4096}\n")
    total, available = memory_bytes(str(tmp_path))
    assert total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available is not None
    assert 0 < available < total


def resident_bytes(region: mmap.mmap) -> int:
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    pages = (ctypes.c_ubyte * (len(region) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(region)), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.skipif(
    tuple(int(part) for part in os.uname().release.split(".")[:2]) < (5, 14), reason="needs Linux 5.14"
)
def test_touched_memory_has_pages_and_keeps_its_content() -> None:
    region = mmap.mmap(-1, _NBYTES)
    buffer = memoryview(region)
    buffer[MIB : MIB + 3] = b"abc"
    assert resident_bytes(region) == mmap.PAGESIZE
    touch_all([buffer[MIB + 1 : 2 * MIB + 1], buffer[:0], buffer[3 * MIB : 3 * MIB + 10]])
    assert resident_bytes(region) == MIB + mmap.PAGESIZE  # whole pages, and none for a few bytes
    assert bytes(buffer[MIB : MIB + 4]) == b"abc\0"


def test_memory_of_nobody_is_left_alone() -> None:
    region = mmap.mmap(-1, _NBYTES)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    touch(start, 1 << 45)  # its middle is of nobody
    assert resident_bytes(region) == 0
