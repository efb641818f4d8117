"""Files that a local save writes in one directory, past the page cache where that pays."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from fastload.base.memory import PAGE_BYTES, round_up
from fastload.errors import FastloadError, StorageError
from fastload.storage import folders
from fastload.storage.descriptors import Descriptor, DescriptorPool
from fastload.storage.target import Written

__all__ = ["LocalFiles", "os_errors"]

_MIN_DIRECT_BYTES = 256 << 10
_BOUNCE_BYTES = 4 << 20


class LocalFiles:
    """The files of one save, as one rank writes them.

    Large writes go past the page cache (O_DIRECT) on the file systems that do it, which is several times
    faster than filling the cache and waiting until it is empty again; what fills no page is buffered. A
    page is never written both ways: the ranges of different ranks meet at multiples of a page, and within
    one range a page that two writes share is buffered in both.

    Args:
        folder: Descriptor of the directory that they are in; closed with them.
        path: Where that is, for messages.
        written: Where errors are noted.
        directly: Whether to try to write past the page cache.

    Attributes:
        folder: Descriptor of the directory.
    """

    def __init__(self, folder: int, path: str, written: Written, *, directly: bool) -> None:
        self.folder = folder
        self._path = path
        self._written = written
        self._directly = directly
        self._files: dict[str, _File] = {}
        self._pool = DescriptorPool()
        self._closed = False
        self._lock = threading.Lock()
        self._own = threading.local()

    def place(self, name: str) -> str:
        """Returns where a file is, for messages."""
        return os.path.join(self._path, name)

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Writes a range of a file that is there; from any thread, several at once.

        Raises:
            StorageError: It failed, or something before it did.
        """
        nbytes = len(data)
        begin, end = round_up(offset, PAGE_BYTES), (offset + nbytes) // PAGE_BYTES * PAGE_BYTES
        with self._written.noted(), os_errors(self.place(name), offset, nbytes):
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
            if self._closed:
                raise StorageError("the save has ended", url=self.place(name))
            if name not in self._files:
                sync = partial(self._sync, self.place(name))
                self._files[name] = _File(self._pool, name, self.folder, sync, directly=self._directly)
            return self._files[name]

    def _sync(self, path: str, descriptor: int) -> None:
        """Makes the writes of a descriptor durable before it is closed: only it hears of their errors."""
        with self._written.noted(), os_errors(path):
            os.fsync(descriptor)

    def finish(self) -> None:
        """Makes all that was written durable.

        Raises:
            StorageError: Something was not.
        """
        for file in list(self._files.values()):
            file.finish()
        self._written.check()

    def put(self, name: str, content: bytes) -> None:
        """Writes a small file that has all of its content, durably, from its first instant.

        Raises:
            StorageError: It failed.
        """
        new = f"{name}.new"
        with os_errors(self.place(name), 0, len(content)):
            file = folders.open_file(new, self.folder, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                _write_all(file, 0, memoryview(content))
                os.fsync(file)
            finally:
                os.close(file)
            os.rename(new, name, src_dir_fd=self.folder, dst_dir_fd=self.folder)

    def close(self) -> None:
        """Closes all of them, as soon as no write uses them, and the directory."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            if not self._closed:
                self._closed = True
                os.close(self.folder)


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


def _is_aligned(data: memoryview) -> bool:
    if data.readonly or not len(data):
        return False  # its address cannot be asked for
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) % PAGE_BYTES == 0
