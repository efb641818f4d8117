"""A new checkpoint on this host's file systems: pending beside its place, then renamed into it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any

from fastload.base.memory import PAGE_BYTES, round_up
from fastload.errors import FastloadError, StorageError
from fastload.storage import folders, leftovers, pending
from fastload.storage.descriptors import Descriptor, DescriptorPool
from fastload.storage.local import IN_MEMORY_TYPES, file_system_type, is_network
from fastload.storage.names import Names
from fastload.storage.pending import Pending
from fastload.storage.site import Site
from fastload.storage.target import Written, check_written

__all__ = ["LocalTarget", "os_errors"]

_ALIGN_BYTES = 1 << 20
_MIN_DIRECT_BYTES = 1 << 20
_BOUNCE_BYTES = 4 << 20


class LocalTarget:
    """Write access through the operating system.

    Large writes go past the page cache (O_DIRECT) on the file systems that do it, which is several times
    faster than filling the cache and waiting until it is empty again; what fills no page is buffered. A
    page is never written both ways: the ranges of different ranks meet at multiples of `align_bytes`,
    and within one range a page that two writes share is buffered in both.

    Args:
        path: Where the checkpoint will be; symbolic links in it are followed.
        names: What files of a checkpoint are called.
        io: ``auto``, ``buffered`` or ``direct``.
    """

    ordered = False

    def __init__(self, path: str, names: Names, *, io: str) -> None:
        self._names = names
        self._site = Site(path, names, self._signs)
        self._path = self._site.path
        self._io = io
        self._written = Written()
        self._sizes: dict[str, int] = {}
        self._files: dict[str, _File] = {}
        self._pool = DescriptorPool()
        self._lock = threading.Lock()
        self._own = threading.local()
        self._pending_path = ""
        self._held: Pending | None = None  # by the rank that made it
        self._data: int | None = None  # descriptor of the directory that becomes the checkpoint

    @property
    def _signs(self) -> tuple[str, ...]:
        """Files that tell a checkpoint of fastload's from anything else."""
        return (self._names.record,)

    @property
    def url(self) -> str:
        return self._path

    @property
    def shared(self) -> bool:
        return is_network(self._kind)

    @cached_property
    def _kind(self) -> str:
        return file_system_type(self._path)

    def align_bytes(self, largest_bytes: int) -> int | None:
        return _ALIGN_BYTES

    def prepare(self, files: Sequence[tuple[str, int]], *, overwrite: bool) -> dict[str, Any]:
        self._sizes = dict(files)
        try:
            with os_errors(self._path):
                self._site.check(list(self._sizes), overwrite=overwrite)
            self.clean_abandoned()
            with os_errors(os.path.dirname(self._path)):
                data = self._hold(pending.begin(self._path, self._site.parent))
            for file, nbytes in files:
                with os_errors(self._place(file), 0, nbytes):
                    folders.reserve(file, nbytes, data)
        except FastloadError:
            self.abort()
            raise
        return {"pending": self._pending_path, "files": self._sizes}

    def _hold(self, held: Pending) -> int:
        """Keeps a pending directory; returns the descriptor of what will be the checkpoint."""
        self._held, self._pending_path = held, held.path
        self._data = held.open_data()
        return self._data

    def join(self, ticket: Mapping[str, Any]) -> None:
        self._pending_path, self._sizes = ticket["pending"], ticket["files"]
        with os_errors(self._pending_path):
            folder = folders.open_folder(self._pending_path)
            try:
                self._data = folders.open_folder("data", folder)
            finally:
                os.close(folder)

    def write(self, name: str, offset: int, data: memoryview) -> None:
        nbytes = len(data)
        assert offset + nbytes <= self._sizes[name], (name, offset, nbytes)
        begin, end = round_up(offset, PAGE_BYTES), (offset + nbytes) // PAGE_BYTES * PAGE_BYTES
        with self._noted(), os_errors(self._place(name), offset, nbytes):
            file = self._file(name)
            if end - begin < _MIN_DIRECT_BYTES or not file.directly:
                begin = end = offset + nbytes
            written = begin + self._write_direct(file, begin, data[begin - offset : end - offset])
            if begin > offset or written < offset + nbytes:
                with file.cached.use() as cached:
                    _write_all(cached, offset, data[: begin - offset])
                    _write_all(cached, written, data[written - offset :])
        self._written.add(name, offset, offset + nbytes)

    def _write_direct(self, file: _File, offset: int, data: memoryview) -> int:
        """Writes whole pages past the page cache; returns how many bytes of them, if it cannot do all."""
        done = 0
        if not len(data):
            return done
        bounce = None if _is_aligned(data) else self._bounce_buffer()
        with file.direct() as direct:
            while done < len(data) and direct is not None:
                piece = data[done:]
                if bounce is not None:
                    piece = piece[:_BOUNCE_BYTES]
                    bounce[: len(piece)] = piece
                    piece = bounce[: len(piece)]
                try:
                    count = os.pwrite(direct, piece, offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    file.directly = False
                    break
                if count < PAGE_BYTES:
                    break
                done += count // PAGE_BYTES * PAGE_BYTES
        return done

    def _bounce_buffer(self) -> memoryview:
        """Returns this thread's own page-aligned buffer."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))
        buffer: memoryview = self._own.buffer
        return buffer

    def _file(self, name: str) -> _File:
        with self._lock:
            if name not in self._files:
                auto = self._io == "auto" and self._kind not in IN_MEMORY_TYPES and not self.shared
                if self._data is None:
                    raise StorageError("the save has ended", url=self._path)
                directly = auto or self._io == "direct"
                sync = partial(self._sync, self._place(name))
                self._files[name] = _File(self._pool, name, self._data, sync, directly=directly)
            return self._files[name]

    def flush(self) -> dict[str, Any]:
        self._written.check()
        for file in list(self._files.values()):
            file.finish()
        self._written.check()
        return {"written": self._written.to_json()}

    def _sync(self, path: str, descriptor: int) -> None:
        """Makes the writes of a descriptor durable before it is closed: only it hears of their errors."""
        with self._noted(), os_errors(path):
            os.fsync(descriptor)

    def publish(
        self,
        receipts: Sequence[Mapping[str, Any]],
        small_files: Sequence[tuple[str, bytes]],
        *,
        overwrite: bool,
    ) -> None:
        self._written.check()
        check_written(self._sizes, receipts, self._path)
        assert self._held is not None
        assert self._data is not None
        for name, content in small_files:
            with os_errors(self._place(name), 0, len(content)):
                _write_whole(name, content, self._data)
        names = [*self._sizes, *(name for name, _ in small_files)]
        with os_errors(self._path):
            self._site.take(self._held, self._data, names, overwrite=overwrite)
        self._release()

    def abort(self) -> None:
        self._written.fail(StorageError("the save was given up", url=self._path))
        self._release()
        self.close()

    def clean_abandoned(self) -> list[str]:
        return leftovers.clean_abandoned(os.path.dirname(self._path))

    def remove(self) -> None:
        with os_errors(self._path):
            try:
                pending.remove(self._path, self._site.parent)
            finally:
                self._site.close()

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            held, self._held = self._held, None
            if held is not None:
                held.close()
            if self._data is not None:
                os.close(self._data)
                self._data = None
            self._site.close()

    def _release(self) -> None:
        """Removes the pending directory, if this rank made it, and only then lets go of its lock."""
        held, self._held = self._held, None
        if held is not None:
            with suppress(OSError):  # who cleans next gets another chance
                held.discard()
            held.close()

    def _place(self, name: str) -> str:
        return os.path.join(self._pending_path, "data", name)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keeps an error for good: after it nobody knows what is on storage."""
        try:
            yield
        except StorageError as error:
            self._written.fail(error)
            raise


class _File:
    """A file that is being written: a descriptor for the page cache and one for past it, as needed.

    Attributes:
        cached: The descriptor for the page cache.
        directly: Whether it can be written past it, as far as is known.
    """

    def __init__(
        self,
        pool: DescriptorPool,
        name: str,
        folder: int,
        sync: Callable[[int], None],
        *,
        directly: bool,
    ) -> None:
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.directly = directly
        self.cached = Descriptor(pool, partial(os.open, name, flags, dir_fd=folder), sync)
        self._direct = Descriptor(pool, partial(os.open, name, flags | os.O_DIRECT, dir_fd=folder), sync)

    def direct(self) -> AbstractContextManager[int | None]:
        """Lends the descriptor for direct writes; None if there can be none."""
        if self.directly:
            try:
                return self._direct.use()
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.directly = False
        return nullcontext()

    def finish(self) -> None:
        """Makes the writes durable, by the descriptors that did them."""
        self.cached.finish()
        self._direct.finish()

    def close(self) -> None:
        self.cached.close()
        self._direct.close()


@contextmanager
def os_errors(path: str, offset: int | None = None, nbytes: int | None = None) -> Iterator[None]:
    """Turns errors of the operating system into fastload's."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FastloadError):
            raise
        message = f"{error.strerror} ({errno.errorcode.get(error.errno or 0, 'unknown')})"
        raise StorageError(message, path, offset, nbytes) from error


def _write_all(file: int, offset: int, data: memoryview) -> None:
    while len(data):
        count = os.pwrite(file, data, offset)
        offset += count
        data = data[count:]


def _write_whole(name: str, content: bytes, folder: int) -> None:
    """Writes a small file that has all of its content, durably, from its first instant."""
    new = f"{name}.new"
    file = folders.open_file(new, folder, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        _write_all(file, 0, memoryview(content))
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)


def _is_aligned(data: memoryview) -> bool:
    if data.readonly or not len(data):
        return False  # its address cannot be asked for
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) % PAGE_BYTES == 0
