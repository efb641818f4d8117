"""Checkpoints written to file systems: pending next to the destination, then renamed into place."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any

from fastload.base.memory import PAGE_BYTES, round_up
from fastload.errors import FastloadError, StorageError
from fastload.storage import folders, pending
from fastload.storage.base import DEFAULT_WRITES, Names, Written
from fastload.storage.descriptors import AlignedBuffer, DescriptorPool, DirectFile
from fastload.storage.destination import LocalDestination
from fastload.storage.folders import os_errors, write_all
from fastload.storage.mounts import IN_MEMORY_TYPES, file_system_type, is_network
from fastload.storage.pending import Pending

_ALIGN_BYTES = 64 << 10  # the largest pages, for O_DIRECT; a larger unit would send more bytes of shards
_MIN_DIRECT_BYTES = 256 << 10


class LocalTarget:
    """Write access to a checkpoint on a file system.

    Args:
        path: Path of the checkpoint; symbolic links are followed.
        names: Names of files of a checkpoint.
        io: ``auto``, ``buffered`` or ``direct``.
        signs: Names of files that prove that a directory may be replaced; by default the record.

    Attributes:
        destination: The path and its parent directory.
        written: The ranges that this rank wrote.
    """

    ordered = False
    writes_at_once = DEFAULT_WRITES

    def __init__(self, path: str, names: Names, *, io: str, signs: Sequence[str] = ()) -> None:
        self.destination = LocalDestination(path, names, signs or (names.record,))
        self.written = Written()
        self._io = io
        self._sizes: dict[str, int] = {}
        self._pending: Pending | None = None  # by the rank that made it
        self._files: LocalFiles | None = None

    @property
    def url(self) -> str:
        return self.destination.path

    @cached_property
    def _kind(self) -> str:
        return file_system_type(self.url)

    def align_bytes(self, largest_bytes: int) -> int | None:
        return _ALIGN_BYTES

    def prepare(self, files: Sequence[tuple[str, int]], *, overwrite: bool) -> dict[str, Any]:
        try:
            with os_errors(self.url):
                self.destination.check([name for name, _ in files], overwrite=overwrite)
            self.clean_abandoned()
            directory = self._hold(lambda: pending.begin(self.url, self.destination.parent), files)
            self._reserve()
        except FastloadError:
            self.abort()
            raise
        return {"pending": directory.path, "files": self._sizes}

    def _hold(self, begin: Callable[[], Pending], files: Sequence[tuple[str, int]]) -> Pending:
        """Takes ownership of a pending directory, and opens its files for writes."""
        with os_errors(os.path.dirname(self.url)):
            self._pending = directory = begin()
            self._gather(directory.open_data(), directory.path, dict(files))
        return directory

    def _reserve(self) -> None:
        """Allocates the space of the files that are not there yet.

        In memory it is only checked: pages take as long to allocate as to write, and all writers would wait.
        """
        in_memory = self._kind in IN_MEMORY_TYPES
        if in_memory:
            with os_errors(self.url):
                _require_memory(self._sizes, self._gathered.folder)
        for name, nbytes in self._sizes.items():
            with os_errors(self._gathered.place(name), 0, nbytes):
                _make_room(name, nbytes, self._gathered.folder, allocate=not in_memory)

    def join(self, ticket: Mapping[str, Any]) -> None:
        path = ticket["pending"]
        with os_errors(path):
            self._gather(pending.open_data(path), path, ticket["files"])

    def _gather(self, folder: int, path: str, sizes: Mapping[str, int]) -> None:
        auto = self._io == "auto" and self._kind not in IN_MEMORY_TYPES and not is_network(self._kind)
        self._sizes = dict(sizes)
        self._files = LocalFiles(
            folder, os.path.join(path, pending.DATA), self.written, directly=auto or self._io == "direct"
        )

    @property
    def _gathered(self) -> LocalFiles:
        assert self._files is not None, "prepare or join first"
        return self._files

    def write(self, name: str, offset: int, data: memoryview) -> None:
        assert offset + len(data) <= self._sizes[name], (name, offset, len(data))
        self._gathered.write(name, offset, data)

    def flush(self) -> dict[str, Any]:
        self.written.check()
        self._gathered.finish()
        return {"written": self.written.to_json()}

    def publish(
        self, receipts: Sequence[Mapping[str, Any]], small_files: Sequence[tuple[str, bytes]]
    ) -> None:
        self.written.require_all(self._sizes, receipts, self.url)
        assert self._pending is not None
        for name, content in small_files:
            self._gathered.put(name, content)
        names = [*self._sizes, *(name for name, _ in small_files)]
        with os_errors(self.url):
            self.destination.take(self._pending, self._gathered.folder, names)
        self._release()

    def abort(self) -> None:
        self.written.fail(StorageError("the save was aborted", url=self.url))
        self._release(restore=True)
        self.close()

    def _release(self, *, restore: bool = False) -> None:
        """Removes the pending directory, if this rank created it, and only then releases its lock."""
        directory, self._pending = self._pending, None
        if directory is not None:
            with suppress(OSError):  # the next save cleans it
                if restore:  # the old checkpoint may still be in there
                    directory.restore()
                directory.discard()
            directory.close()

    def clean_abandoned(self) -> list[str]:
        return pending.clean_abandoned(os.path.dirname(self.url))

    def remove(self) -> None:
        with os_errors(self.url):
            try:
                pending.remove(self.url, self.destination.parent)
            finally:
                self.destination.close()

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
        directory, self._pending = self._pending, None
        if directory is not None:
            directory.close()
        self.destination.close()


class LocalFiles:
    """The files of one save, as one rank writes them.

    Large writes use direct I/O (O_DIRECT) where the file system supports it: several times faster than to
    fill the page cache and flush it. Partial pages are buffered. No page is written both ways: ranges of
    different ranks meet at multiples of a page, and a page that two writes of one range share is buffered.

    Args:
        folder: Descriptor of their directory; closed with them.
        path: Path of that directory, for messages.
        written: Collects ranges and errors.
        directly: Whether to try direct I/O.
        flags: Flags to open files with.

    Attributes:
        folder: Descriptor of the directory.
    """

    def __init__(
        self, folder: int, path: str, written: Written, *, directly: bool, flags: int = os.O_WRONLY
    ) -> None:
        self.folder = folder
        self._path = path
        self._written = written
        self._directly = directly
        self._flags = flags
        self._files: dict[str, DirectFile] = {}
        self._pool = DescriptorPool()
        self._closed = False
        self._lock = threading.Lock()
        self._buffer = AlignedBuffer()

    def place(self, name: str) -> str:
        """Returns the path of a file, for messages."""
        return os.path.join(self._path, name)

    @contextmanager
    def use(self, name: str, offset: int, nbytes: int) -> Iterator[int]:
        """Yields the descriptor of a file; errors name the range."""
        with os_errors(self.place(name), offset, nbytes), self._file(name).cached.use() as descriptor:
            yield descriptor

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Writes a range of an existing file. Thread-safe.

        Raises:
            StorageError: This write or an earlier one failed.
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
                    write_all(cached, offset, data[: begin - offset])
                    write_all(cached, written, data[written - offset :])
        self._written.add(name, offset, offset + nbytes)

    def _write_direct(self, file: DirectFile, offset: int, data: memoryview) -> int:
        """Writes whole pages with direct I/O; returns the number of bytes written."""
        done = 0
        if not len(data):
            return done
        bounce = None if _is_aligned(data) else self._buffer.data
        with file.direct() as direct:
            while done < len(data) and direct is not None:
                piece = data[done:]
                if bounce is not None:
                    piece = piece[: len(bounce)]
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

    def _file(self, name: str) -> DirectFile:
        with self._lock:
            if self._closed:
                raise StorageError("the save has ended", url=self.place(name))
            if name not in self._files:
                sync = partial(self._sync, self.place(name))
                self._files[name] = DirectFile(
                    self._pool, partial(self._open, name), sync, directly=self._directly
                )
            return self._files[name]

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, self._flags | os.O_NOFOLLOW | flags, dir_fd=self.folder)

    def _sync(self, path: str, descriptor: int) -> None:
        """Makes the writes of a descriptor durable before it is closed: only it reports their errors."""
        with self._written.noted(), os_errors(path):
            os.fsync(descriptor)

    def finish(self) -> None:
        """Makes all writes durable.

        Raises:
            StorageError: A write failed.
        """
        for file in list(self._files.values()):
            file.finish()
        self._written.check()

    def put(self, name: str, content: bytes) -> None:
        """Writes a small file atomically and durably.

        Raises:
            StorageError: Storage failed.
        """
        with os_errors(self.place(name), 0, len(content)):
            folders.put(name, content, self.folder)

    def close(self) -> None:
        """Closes all files, once no write uses them, and the directory."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            if not self._closed:
                self._closed = True
                os.close(self.folder)


def _is_aligned(data: memoryview) -> bool:
    if data.readonly or not len(data):
        return False  # a read-only buffer has no address
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) % PAGE_BYTES == 0


def _require_memory(sizes: Mapping[str, int], folder: int) -> None:
    """Requires that the pages that files still lack are free.

    Raises:
        OSError: ``ENOSPC`` if they are not.
    """
    missing = 0
    for name, nbytes in sizes.items():
        about_file = folders.find(name, folder)
        missing += nbytes - (512 * about_file.st_blocks if about_file is not None else 0)
    about = os.fstatvfs(folder)
    free = about.f_bavail * about.f_frsize
    if about.f_blocks and missing > free:  # without a limit there are none
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {missing} bytes needed, {free} free")


def _make_room(name: str, nbytes: int, folder: int, *, allocate: bool) -> None:
    with suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_size == nbytes:
            return
        os.unlink(name, dir_fd=folder)
    folders.create(name, nbytes, folder, allocate=allocate)
