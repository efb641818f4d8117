"""Host memory: page-aligned and pinned buffers, views of tensors, available memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
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
_LEAST_TOUCHED_BYTES = 64 << 10  # worth two system calls
_MADV_POPULATE_WRITE = 23  # of Linux 5.14 and newer; others refuse it
_libc = ctypes.CDLL(None, use_errno=True) if _MADV_HUGEPAGE is not None else None


class _Uncollected(ContextDecorator):
    """Turns off the garbage collector while many objects without cycles are made.

    The collector scans all objects again and again as their number grows, which takes longer than making a
    million tensors. It is off in the whole process, so never wait meanwhile. Contexts may be nested and used
    in several threads. A forked child has the original setting.
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


def power_of_two(value: int) -> int:
    """Rounds up to a power of two."""
    return 1 << (value - 1).bit_length()


def allocate_staging(nbytes: int, *, pinned: bool) -> Tensor:
    """Allocates a page-aligned uint8 host buffer, whose pages take memory once they are touched.

    Args:
        nbytes: Length in bytes.
        pinned: Whether to page-lock it, if possible, for asynchronous copies to and from an accelerator.

    Raises:
        MemoryError: The system refuses that much memory.
    """
    pinned = pinned and can_pin()
    if pinned or not nbytes:
        return allocate((nbytes,), torch.uint8, torch.device("cpu"), pinned=pinned)
    try:
        # Private, since shared mappings get no huge pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = mmap.mmap(-1, max(nbytes, PAGE_BYTES), flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot stage {nbytes} bytes: {error}") from None
    buffer = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)
    advise_huge_pages(buffer)
    return buffer


def allocate_buffers(count: int, nbytes: int, *, pinned: bool) -> list[Tensor]:
    """Allocates buffers of one length, each as `allocate_staging` does.

    torch rounds page-locked memory up to a power of two. So several buffers are parts of one allocation where
    that takes less memory.
    """
    length = round_up(nbytes, PAGE_BYTES)

    def taken(together: int) -> int:
        num_full, left = divmod(count, together)
        return num_full * power_of_two(together * length) + (power_of_two(left * length) if left else 0)

    together = min(range(1, count + 1), key=taken) if count and pinned and can_pin() else 1
    buffers: list[Tensor] = []
    while len(buffers) < count:
        number = min(together, count - len(buffers))
        memory = allocate_staging((number - 1) * length + nbytes, pinned=pinned)
        buffers += [memory[at * length : at * length + nbytes] for at in range(number)]
    return buffers


def allocate(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    pinned: bool = False,
    strides: Sequence[int] = (),
) -> Tensor:
    """Allocates an uninitialized tensor.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        device: Its device.
        pinned: Whether host memory is page-locked.
        strides: Strides in elements; row-major without any.

    Raises:
        MemoryError: The device or the host has too little memory.
    """
    try:
        if strides:
            tensor = torch.empty_strided(tuple(shape), strides, dtype=dtype, device=device, pin_memory=pinned)
        else:
            tensor = torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=pinned)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        raise MemoryError(
            f"cannot allocate {list(shape)} {dtype} on {device}: {_first_line(error)}"
        ) from None
    if device.type == "cpu" and not pinned:
        advise_huge_pages(tensor)
    return tensor


def advise_huge_pages(tensor: Tensor) -> None:
    """Asks for 2 MiB pages for a large host tensor, if they are faster."""
    if tensor.nbytes < _HUGE_PAGE_BYTES or not _huge_pages_pay(_REPORTING):
        return
    start = round_up(tensor.data_ptr(), _HUGE_PAGE_BYTES)
    length = tensor.data_ptr() + tensor.nbytes - start
    if length >= _HUGE_PAGE_BYTES and _libc is not None:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)


def touch(address: int, nbytes: int) -> None:
    """Has the system provide the pages of fresh memory that is about to be written, all at once.

    That takes a fifth less time than if each is provided when it is written. The content stays. Memory counts
    as fresh if the page in its middle is missing: those at its ends may belong to what is next to it, too.

    Args:
        address: Of the memory.
        nbytes: Its length.
    """
    if _libc is None or nbytes < _LEAST_TOUCHED_BYTES:
        return
    is_there = ctypes.c_ubyte(1)
    middle = (address + nbytes // 2) // mmap.PAGESIZE * mmap.PAGESIZE  # some systems have pages of 64 KiB
    _libc.mincore(ctypes.c_void_p(middle), ctypes.c_size_t(1), ctypes.byref(is_there))
    if not is_there.value & 1:
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start), _MADV_POPULATE_WRITE)


def touch_all(buffers: Iterable[memoryview]) -> None:
    """Has the system provide the pages of buffers that are about to be filled; see `touch`."""
    for buffer in buffers:
        if len(buffer) >= _LEAST_TOUCHED_BYTES:
            touch(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer))


@cache
def _huge_pages_pay(reporting: str) -> bool:
    """Whether the first touch of large memory is faster with 2 MiB pages; mostly it is, several times.

    It is slower in a virtual machine that reports free blocks of 2 MiB and more to its host, which takes them
    away. Each huge page then has to come back from the host; small pages need not.

    Args:
        reporting: Path of the order from which on Linux reports free blocks; -1 if it reports none.
    """
    if _MADV_HUGEPAGE is None:
        return False
    try:
        return int(Path(reporting).read_text()) < 0
    except (OSError, ValueError):
        return True


def memory_bytes(cgroups: str = "/sys/fs/cgroup") -> tuple[int | None, int | None]:
    """Returns the total and the available memory of the system or of the container, whichever is less.

    Args:
        cgroups: Directory of the control groups of the container.

    Returns:
        Both in bytes; None if unknown.
    """
    both = zip(_memory_of_system(), _memory_of_container(cgroups), strict=True)
    total, available = (min((value for value in pair if value is not None), default=None) for pair in both)
    return total, available


def _memory_of_system() -> tuple[int | None, int | None]:
    sizes = {}
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            sizes[name] = 1024 * int(rest.split()[0])
    return sizes.get("MemTotal"), sizes.get("MemAvailable")


def _memory_of_container(cgroups: str) -> tuple[int | None, int | None]:
    """Returns the limit of the container and the rest of it; for control groups of both versions."""
    for root, most, now in (
        (cgroups, "memory.max", "memory.current"),
        (f"{cgroups}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            values = {}
            for line in Path(root, "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                values[name] = value
            # The system frees the page cache of files on disks when memory is short, but not that of a tmpfs.
            cached = int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))
            limit, used = (int(Path(root, name).read_text()) for name in (most, now))
            return limit, max(0, limit - used + cached)
        except (OSError, ValueError):  # no limit, or "max"
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
    """Copies a flat uint8 tensor into another one of equal length; to or from a device with `copy_async`.

    Within host memory the C library copies if torch has one thread: torch takes 1.5 times as long unless both
    tensors begin on a cache line, and tensors in files do not.
    """
    if source.is_cpu and out.is_cpu and torch.get_num_threads() == 1:
        assert source.numel() == out.numel(), (source.numel(), out.numel())
        touch(out.data_ptr(), out.numel())
        ctypes.memmove(out.data_ptr(), source.data_ptr(), out.numel())
    else:
        copy_async(source, out)


class _Buffer(ctypes.Structure):
    """``Py_buffer``, of which only the address is used."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def copy_bytes(source: memoryview, out: memoryview) -> None:
    """Copies bytes between buffers of equal length, without the GIL.

    An assignment between memoryviews keeps it, also while the system provides pages that are touched first.
    """
    assert len(source) == len(out), (len(source), len(out))
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(source), ctypes.byref(buffer), 0)
    try:
        address = ctypes.addressof(ctypes.c_char.from_buffer(out))
        touch(address, len(out))
        ctypes.memmove(address, buffer.buf, len(out))
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def host_view(flat: Tensor) -> memoryview:
    """Returns a writable memoryview of a flat uint8 host tensor, which keeps its memory alive."""
    if flat.numel() == 0:
        return memoryview(bytearray())
    array = _array_type(flat.numel()).from_address(flat.data_ptr())
    array._owner = flat  # type: ignore[attr-defined]  # a read that outlasts its load must not hit freed memory
    return memoryview(array).cast("B")


@lru_cache(maxsize=256)  # making a type takes ten times as long as making a view with it
def _array_type(length: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * length


def host_bytes(tensor: Tensor) -> bytes:
    """Returns a copy of the bytes of a small host tensor of any strides, in row-major order."""
    dense = tensor.detach().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b""


def runs(tensor: Tensor, start: int, count: int) -> Iterator[Tensor]:
    """Yields views of a tensor of any strides that together cover a run of elements in row-major order.

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


def copy_run(tensor: Tensor, start: int, out: Tensor) -> None:
    """Copies the elements that `runs` covers into a tensor of one dimension, on the same device."""
    position = 0
    for run in runs(tensor, start, out.numel()):
        out[position : position + run.numel()].view(run.shape).copy_(run)
        position += run.numel()
