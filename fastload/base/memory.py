"""Staging buffers and destinations: page-aligned host memory, pinned where a device needs it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ContextDecorator, suppress
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fastload.base.devices import can_pin, copy_async

PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20
_REPORTING = "/sys/module/page_reporting/parameters/page_reporting_order"
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
_libc = ctypes.CDLL(None, use_errno=True) if _MADV_HUGEPAGE is not None else None


class _Uncollected(ContextDecorator):
    """Keeps the garbage collector from running while many objects are made that form no cycles.

    It looks at all objects there are, again and again while they become more: with a million tensors that
    takes longer than making them. Off for the whole process, so not for work that waits. May be nested, and
    used by several threads. In a forked child, where none of them goes on, the collector is as it was.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._was_on = False
        os.register_at_fork(after_in_child=self._start_anew)

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_users:
                self._was_on = gc.isenabled()
                gc.disable()
            self._num_users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_users -= 1
            if not self._num_users and self._was_on:
                gc.enable()

    def _start_anew(self) -> None:
        self._lock = threading.Lock()
        if self._num_users and self._was_on:
            gc.enable()
        self._num_users = 0


uncollected = _Uncollected()


def round_up(value: int, multiple: int) -> int:
    """Rounds up to a multiple."""
    return -(-value // multiple) * multiple


def allocate_staging(nbytes: int, *, pinned: bool) -> Tensor:
    """Allocates a page-aligned uint8 host buffer; memory is used only once it is touched.

    Args:
        nbytes: Length in bytes.
        pinned: Page-locks it, where that can be done, for asynchronous copies to and from an accelerator.

    Raises:
        MemoryError: The system refuses that much.
    """
    pinned = pinned and can_pin()
    if pinned or not nbytes:
        return allocate((nbytes,), torch.uint8, torch.device("cpu"), pinned=pinned)
    try:
        # Private: what could be shared with a fork gets no huge pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = mmap.mmap(-1, max(nbytes, PAGE_BYTES), flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot stage {nbytes} bytes: {error}") from None
    advise_huge_pages(pages)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)


def advise_huge_pages(pages: mmap.mmap) -> None:
    """Asks for 2 MiB pages in a large mapping, where that pays."""
    if len(pages) >= _HUGE_PAGE_BYTES and _huge_pages_pay(_REPORTING):
        pages.madvise(mmap.MADV_HUGEPAGE)


def allocate(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> Tensor:
    """Allocates an uninitialized tensor with a storage of its own.

    Raises:
        MemoryError: The device or the host has not that much memory.
    """
    try:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=pinned)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        raise MemoryError(
            f"cannot allocate {list(shape)} {dtype} on {device}: {_first_line(error)}"
        ) from None
    if device.type == "cpu" and not pinned:
        _advise_huge_pages(tensor)
    return tensor


def _advise_huge_pages(tensor: Tensor) -> None:
    """Asks for 2 MiB pages below a large host tensor, where the system leaves that to programs."""
    if tensor.nbytes < _HUGE_PAGE_BYTES or not _huge_pages_pay(_REPORTING):
        return
    start = round_up(tensor.data_ptr(), _HUGE_PAGE_BYTES)
    length = tensor.data_ptr() + tensor.nbytes - start
    if length >= _HUGE_PAGE_BYTES and _libc is not None:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)


@cache
def _huge_pages_pay(reporting: str) -> bool:
    """Whether the first touch of large memory is cheaper by 2 MiB: several times, as a rule.

    Not in a virtual machine that reports its free pages to its host, which takes them away: only free blocks
    of at least 2 MiB are reported, so a huge page always has to come back from the host, while small pages
    come out of what is left.

    Args:
        reporting: Where Linux tells the order from which on it reports free blocks; -1 if it does not.
    """
    if _MADV_HUGEPAGE is None:
        return False
    try:
        return int(Path(reporting).read_text()) < 0
    except (OSError, ValueError):
        return True


def available_bytes() -> int | None:
    """Returns how much memory this process may still ask for; None if the system does not say.

    What the system has available, or what is left of the limit of the container, if that is less.
    """
    return memory_bytes()[1]


def memory_bytes(cgroups: str = "/sys/fs/cgroup") -> tuple[int | None, int | None]:
    """Returns how much memory this process may have, and how much it may still ask for.

    Args:
        cgroups: Where the control groups of the container are.

    Returns:
        That of the system, or of the container, if that is less; None where the system does not say.
    """
    both = zip(_memory_of_system(), _memory_of_container(cgroups), strict=True)
    total, available = (min((value for value in pair if value is not None), default=None) for pair in both)
    return total, available


def _memory_of_system() -> tuple[int | None, int | None]:
    found = {}
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            found[name] = 1024 * int(rest.split()[0])
    return found.get("MemTotal"), found.get("MemAvailable")


def _memory_of_container(cgroups: str) -> tuple[int | None, int | None]:
    """Returns the limit of the whole container, and what is left of it; control groups of both versions."""
    for root, most, now in (
        (cgroups, "memory.max", "memory.current"),
        (f"{cgroups}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            values = {}
            for line in Path(root, "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                values[name] = value
            # The page cache of files on disks goes when memory is wanted; that of a tmpfs does not.
            cached = int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))
            limit, used = (int(Path(root, name).read_text()) for name in (most, now))
            return limit, max(0, limit - used + cached)
        except (OSError, ValueError):  # there is no limit, or it is called "max"
            continue
    return None, None


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


def byte_view(tensor: Tensor) -> Tensor:
    """Views a contiguous tensor's bytes as a flat uint8 tensor, whatever its dtype."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), offset, (tensor.nbytes,), (1,))


def copy_flat(source: Tensor, out: Tensor) -> None:
    """Copies a flat uint8 tensor into another one, as long; to or from a device as `copy_async` does.

    Within host memory not by torch where it has one thread for it: its copy takes half as long again as that
    of the C library where not both begin on a cache line, and what tensors are in files does not.
    """
    if source.is_cpu and out.is_cpu and torch.get_num_threads() == 1:
        assert source.numel() == out.numel(), (source.numel(), out.numel())
        ctypes.memmove(out.data_ptr(), source.data_ptr(), out.numel())
    else:
        copy_async(source, out)


def host_view(flat: Tensor) -> memoryview:
    """Views a flat uint8 host tensor as a writable memoryview, which keeps its memory alive."""
    if flat.numel() == 0:
        return memoryview(bytearray())
    array = _array_type(flat.numel()).from_address(flat.data_ptr())
    array._owner = flat  # type: ignore[attr-defined]  # a read that outlasts its load must not hit freed memory
    return memoryview(array).cast("B")


@lru_cache(maxsize=256)  # to make a type takes ten times as long as to view something by it
def _array_type(length: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * length


def host_bytes(tensor: Tensor) -> bytes:
    """Returns a copy of the bytes of a small host tensor of any strides, in row-major order."""
    dense = tensor.detach().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b""


def runs(tensor: Tensor, start: int, count: int) -> Iterator[Tensor]:
    """Yields views of a tensor of any strides that together are a run of its elements in row-major order.

    Args:
        tensor: Any shape.
        start: Index of the first element in row-major order.
        count: Number of elements.
    """
    if count == 0:
        return
    if tensor.dim() <= 1:
        yield tensor.reshape(-1)[start : start + count]
        return
    row = tensor[0].numel()
    first, within = divmod(start, row)
    if within or count < row:
        head = min(row - within, count)
        yield from runs(tensor[first], within, head)
        yield from runs(tensor, start + head, count - head)
        return
    rows = count // row
    yield tensor[first : first + rows]
    yield from runs(tensor, start + rows * row, count - rows * row)
