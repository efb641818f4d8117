"""Files on this host's file systems."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import stat as stat_flags
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property

from fastload.base.memory import PAGE_BYTES, round_up, touch_all
from fastload.errors import StorageError
from fastload.storage.base import CHANGED, ByteCounter, FileStat, Folder, Storage, take
from fastload.storage.descriptors import AlignedBuffer, DirectFile
from fastload.storage.folders import os_errors, to_storage_error
from fastload.storage.mounts import IN_MEMORY_TYPES, file_system_type, is_fuse, is_network
from fastload.storage.process import read_descriptors

_MAX_BUFFERS = 1024  # IOV_MAX on Linux
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_UNMAPPABLE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_MIN_DIRECT_BYTES = 1 << 20
_SHA_256 = re.compile("[0-9a-f]{64}")
_HUB_METADATA = ".cache/huggingface/download/{}.metadata"
_NEWER_S = 1.0  # than this metadata: a file that was changed since


class LocalStorage(Storage):
    """Read access to a file or directory of a file system.

    Symbolic links are followed (the Hugging Face cache consists of them). Descriptors stay open, that of the
    directory too, so a file that is replaced during a load is still read as it was. Beyond the limit of
    descriptors some are closed and reopened; if the file is another one by then, that is an error. Each read
    ends with a check of size and modification time, so concurrent writes are an error, too.

    Each request uses direct or buffered I/O, whichever is faster. Direct I/O pays for large uncached reads on
    disks; it reads whole pages. Small reads next to them disable the kernel's read-ahead, since other ranks
    read what follows. On network file systems the kernel may read ahead.

    A storage that is dropped without `close` closes its descriptors.

    Args:
        root: Path of a file or a directory.
        io: ``auto``, ``buffered`` or ``direct``.

    Attributes:
        url: The path.
    """

    probes = True

    def __init__(self, root: str, io: str = "auto") -> None:
        super().__init__(root)
        self._files: dict[str, _File] = {}
        self._folder: int | None = None
        self._io = io
        self._shares_reads = False
        self._direct_count = ByteCounter()
        self._lock = threading.Lock()
        self._buffer = AlignedBuffer()

    @property
    def shared(self) -> bool:
        return is_network(self._kind)

    @cached_property
    def _kind(self) -> str:
        return file_system_type(os.path.realpath(self.url))

    @property
    def in_order(self) -> bool:
        return is_fuse(self._kind)

    @property
    def _numbered(self) -> bool:
        """Whether inode numbers identify files, on all hosts."""
        return not is_fuse(self._kind)

    def _about(self, status: os.stat_result) -> FileStat:
        inode = f"{status.st_ino}:" if self._numbered else ""
        return FileStat(status.st_size, f"{inode}{status.st_mtime_ns}", status.st_mtime)

    @property
    def direct_bytes_read(self) -> int:
        return self._direct_count.total

    def stat(self, name: str) -> FileStat | None:
        with os_errors(self._path(name)), _unless(*_ABSENT):
            path, folder = self._place(name)
            mode = os.stat(path, dir_fd=folder).st_mode
            if stat_flags.S_ISDIR(mode):
                return None if name else FileStat(0, "")
            if stat_flags.S_ISREG(mode):  # opening a pipe would block
                with self._file(name).cached.use() as cached:
                    return self._about(os.fstat(cached))
        return None

    def sha256(self, name: str, version: str) -> str:
        return _sha_256_on_hub(self.url, name)

    def list(self) -> list[str] | None:
        with os_errors(self.url), _unless(*_ABSENT), os.scandir(self.url) as entries:
            return sorted(entry.name for entry in entries if _may_be_file(entry))
        return None

    def folders(self, prefix: str = "") -> Mapping[str, Folder]:
        entries: Sequence[os.DirEntry[str]] = ()
        with os_errors(self.url), _unless(*_ABSENT), os.scandir(self.url) as found_here:
            entries = [entry for entry in found_here if entry.name.startswith(prefix)]
        place = os.path.realpath(self.url)
        looked_into = {
            entry.name: self._look_into(entry, place) for entry in sorted(entries, key=lambda one: one.name)
        }
        return {name: folder for name, folder in looked_into.items() if folder is not None}

    def _look_into(self, entry: os.DirEntry[str], parent: str) -> Folder | None:
        """Lists a directory; None if it is no directory, or is gone."""
        place = os.path.join(parent, entry.name)
        is_link = False
        try:
            if is_link := entry.is_symlink():
                place = os.path.realpath(place)
            return Folder(self._files_in(entry.path), place, is_link)
        except OSError as error:
            if error.errno == errno.ENOTDIR or (error.errno == errno.ENOENT and not is_link):
                return None
            failure = to_storage_error(error, self._path(entry.name))
            if failure.transient:
                raise failure from error
            return Folder({}, place, is_link, problem=error.strerror or str(error))

    def _files_in(self, path: str) -> dict[str, FileStat]:
        """Lists the files directly in a directory; links to files are files."""
        files = {}
        with os.scandir(path) as entries:
            for entry in entries:
                with _unless(*_ABSENT):  # deleted meanwhile, or a link that leads nowhere
                    status = entry.stat()
                    if stat_flags.S_ISREG(status.st_mode):
                        files[entry.name] = self._about(status)
        return files

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        wanted = [buffer for buffer in buffers if len(buffer)]
        nbytes = sum(map(len, wanted))
        io = "buffered" if self._shares_reads and self._io == "auto" else self._io
        file = self._file(name)
        with os_errors(file.path, offset, nbytes), file.cached.use() as cached:
            done = 0
            if _reads_directly(io, file, cached, offset, nbytes):
                done = self._read_direct(file, offset, wanted)
            self._read_buffered(io, file, cached, offset + done, take(wanted, done)[1])
            if change := file.change(cached):
                raise StorageError(change, file.path, offset, nbytes)

    def share_reads(self, shared: bool) -> None:
        self._shares_reads = shared

    def read_all(self, name: str, about: FileStat) -> bytes:
        path = self._path(name)
        with os_errors(path, 0, about.nbytes):
            # O_NONBLOCK, since a pipe may have taken its place.
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            with open(file, "rb") as opened:
                if self._about(os.fstat(file)) != about:
                    raise StorageError("it was replaced", path, 0, about.nbytes)
                data = opened.read(about.nbytes)
                if self._about(os.fstat(file)) != about:
                    raise StorageError(CHANGED, path, 0, about.nbytes)
        self._count.add(len(data))
        return data

    def _read_buffered(
        self, io: str, file: _File, cached: int, offset: int, wanted: Sequence[memoryview]
    ) -> None:
        if wanted:
            nbytes = sum(map(len, wanted))
            alone = file.directly and nbytes < _MIN_DIRECT_BYTES and io != "buffered"
            strays = self.in_order and offset != file.read_to  # other ranks may read what follows
            if alone or strays or file.is_random:  # a call less for each of very many reads
                file.is_random = alone or strays
                advice = os.POSIX_FADV_RANDOM if file.is_random else os.POSIX_FADV_NORMAL
                os.posix_fadvise(cached, 0, 0, advice)
            file.read_to = offset + nbytes
        while wanted:
            touch_all(wanted[:_MAX_BUFFERS])
            count = os.preadv(cached, wanted[:_MAX_BUFFERS], offset)
            if count == 0:
                raise _short(file, cached, offset, wanted)
            self._count.add(count)
            offset += count
            _, wanted = take(wanted, count)

    def _read_direct(self, file: _File, offset: int, wanted: Sequence[memoryview]) -> int:
        """Reads with direct I/O, in complete pages.

        Buffers that lie in their pages as their bytes lie in the file are read into; for others, the pages go
        through an aligned buffer.

        Returns:
            The number of bytes read: all, unless this file does not support direct I/O.
        """
        done = 0
        with file.direct() as direct:
            while wanted and direct is not None:
                at = offset + done
                read = self._read_pages if _lies_as_in_file(wanted[0], at) else self._read_and_copy
                try:
                    count = read(direct, at, wanted)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    file.directly = False
                    break
                if count <= 0:
                    raise _short(file, direct, at, wanted)
                self._count.add(count)
                self._direct_count.add(count)
                done += count
                _, wanted = take(wanted, count)
        return done

    def _read_pages(self, direct: int, offset: int, wanted: Sequence[memoryview]) -> int:
        """Reads the first of some buffers, all but the pages at its ends straight into it."""
        buffer, before, pages = wanted[0], offset % PAGE_BYTES, self._buffer.data
        begin = -offset % PAGE_BYTES
        end = begin + (len(buffer) - begin) // PAGE_BYTES * PAGE_BYTES
        first, last = pages[:PAGE_BYTES], pages[PAGE_BYTES : 2 * PAGE_BYTES]
        parts = [*([first] if begin else ()), buffer[begin:end], *([last] if end < len(buffer) else ())]
        count = os.preadv(direct, parts, offset - before) - before
        buffer[:begin] = first[before : before + begin]
        buffer[end:] = last[: len(buffer) - end]
        return min(count, len(buffer))

    def _read_and_copy(self, direct: int, offset: int, wanted: Sequence[memoryview]) -> int:
        """Reads what fits into the aligned buffer, and copies it to some buffers."""
        left, before = sum(map(len, wanted)), offset % PAGE_BYTES
        block = self._buffer.data[: round_up(before + left, PAGE_BYTES)]
        count = min(os.preadv(direct, [block], offset - before) - before, left)
        if count > 0:
            _copy(block[before : before + count], take(wanted, count)[0])
        return count

    def map(self, name: str) -> Mapped | None:
        """Maps a file, copy-on-write.

        Returns:
            The mapped file; None if it is empty, on shared storage, or beyond the limits of the process: each
            mapping takes a descriptor.
        """
        if self.shared or self.in_order or self._io == "direct":
            return None
        with os_errors(self._path(name)), _unless(*_UNMAPPABLE):
            file = self._file(name)
            with file.cached.use() as cached:
                if nbytes := os.fstat(cached).st_size:
                    return Mapped(file, mmap.mmap(cached, nbytes, access=mmap.ACCESS_COPY))
        return None

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            if self._folder is not None:
                os.close(self._folder)
                self._folder = None

    def __del__(self) -> None:
        for file in self._files.values():
            file.abandon()
        if self._folder is not None:
            os.close(self._folder)

    def _place(self, name: str) -> tuple[str, int | None]:
        """Returns the path of a file, and the descriptor of the directory that it is relative to, if any."""
        with self._lock:
            if name and self._folder is None:
                with os_errors(self._path(name)), _unless(*_ABSENT):
                    self._folder = os.open(self.url, os.O_PATH | os.O_DIRECTORY)
            return (name, self._folder) if name and self._folder is not None else (self._path(name), None)

    def _path(self, name: str) -> str:
        return os.path.join(self.url, name) if name else self.url

    def _file(self, name: str) -> _File:
        place = self._place(name)
        with self._lock:
            if name not in self._files:
                on_disk = not self.shared and self._kind not in IN_MEMORY_TYPES
                directly = self._io == "direct" or (self._io == "auto" and on_disk)
                path, numbered = self._path(name), self._numbered
                self._files[name] = _File(path, *place, directly=directly, numbered=numbered)
            return self._files[name]


class Mapped:
    """A mapped file.

    Attributes:
        data: Its bytes. Writes to them are private to this process.
    """

    def __init__(self, file: _File, data: mmap.mmap) -> None:
        self._file = file
        self.data = data

    def check(self) -> None:
        """Checks that the file has not changed since it was opened.

        Raises:
            StorageError: The file changed, so the bytes taken from it may be inconsistent.
        """
        with os_errors(self._file.path), self._file.cached.use() as cached:
            if change := self._file.change(cached):
                raise StorageError(change, self._file.path, 0, len(self.data))


class _File(DirectFile):
    """A file that may be reopened, but not replaced or changed.

    Attributes:
        path: Its path, for messages.
        read_to: End of the last buffered read.
        is_random: Whether the kernel was told to read nothing ahead.
    """

    def __init__(self, url: str, path: str, folder: int | None, *, directly: bool, numbered: bool) -> None:
        super().__init__(read_descriptors, self._open, directly=directly)
        self.path = url
        self.read_to = 0
        self.is_random = False
        self._numbered = numbered
        self._place = (path, folder) if folder is not None else (os.path.abspath(path), None)
        self._first: os.stat_result | None = None

    def _open(self, flags: int) -> int:
        if flags:  # past the page cache: the path may lead to another file by now
            with self.cached.use() as number:
                return os.open(f"/proc/self/fd/{number}", os.O_RDONLY | flags)
        path, folder = self._place
        try:
            number = os.open(path, os.O_RDONLY, dir_fd=folder)
        except OSError as error:
            if self._first is not None and error.errno in _ABSENT:
                raise StorageError("it was removed or replaced after it was opened", url=self.path) from error
            raise
        status = os.fstat(number)
        if self._first is None:
            self._first = status
        elif self._identity(status) != self._identity(self._first):
            os.close(number)
            raise StorageError("it was changed or replaced after it was opened", url=self.path)
        return number

    def change(self, number: int) -> str:
        """Describes the change of the file since it was first opened; empty if there is none."""
        assert self._first is not None
        status = os.fstat(number)
        if self._identity(status) == self._identity(self._first):
            return ""
        return _ends_at(status.st_size) if status.st_size < self._first.st_size else CHANGED

    def _identity(self, status: os.stat_result) -> tuple[int, ...]:
        place = (status.st_dev, status.st_ino) if self._numbered else ()
        return (*place, status.st_size, status.st_mtime_ns)


def _short(file: _File, opened: int, offset: int, wanted: Sequence[memoryview]) -> StorageError:
    nbytes = sum(map(len, wanted))
    return StorageError(_ends_at(os.fstat(opened).st_size), url=file.path, offset=offset, nbytes=nbytes)


def _ends_at(size: int) -> str:
    return f"the file ends at {size}: it shrank after it was opened"


@contextmanager
def _unless(*numbers: int) -> Iterator[None]:
    """Ignores errors of the operating system with these numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def _may_be_file(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a file, or a link to a place that this user may not see; opening that says why."""
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno not in (errno.EACCES, *_ABSENT):
            raise
        return error.errno == errno.EACCES


def _reads_directly(io: str, file: _File, cached: int, offset: int, nbytes: int) -> bool:
    """Whether to use direct I/O for one request."""
    if io == "auto":
        return file.directly and nbytes >= _MIN_DIRECT_BYTES and _is_cold(cached, offset, nbytes)
    return file.directly and nbytes >= 2 * PAGE_BYTES and io == "direct"


def _lies_as_in_file(buffer: memoryview, offset: int) -> bool:
    """Whether a buffer lies in its pages as its bytes, from an offset of the file on, lie in the file."""
    return len(buffer) >= 2 * PAGE_BYTES and _address(buffer) % PAGE_BYTES == offset % PAGE_BYTES


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_byte.from_buffer(buffer))


def _copy(source: memoryview, buffers: Sequence[memoryview]) -> None:
    """Copies to buffers of the same total length, in order; other threads run meanwhile."""
    address = _address(source)
    for buffer in buffers:
        ctypes.memmove(_address(buffer), address, len(buffer))
        address += len(buffer)


def _is_cold(opened: int, offset: int, nbytes: int) -> bool:
    """Probes three bytes of a range in the page cache; it is cold if none of them is cached.

    None at its ends, since the first page may hold the end of the header, which was read before.
    """
    for position in (offset + nbytes * part // 4 for part in (1, 2, 3)):
        try:
            if os.preadv(opened, [bytearray(1)], position, os.RWF_NOWAIT):
                return False
        except BlockingIOError:
            continue
        except OSError:
            return False  # cannot say
    return True


# Files that come from the Hugging Face hub


def hub_blob(path: str) -> str:
    """Returns the name of the blob that a file in the hub's cache links to, which is its ETag; or empty."""
    blobs, name = os.path.split(os.path.realpath(path))
    return name if os.path.basename(blobs) == "blobs" else ""


def _sha_256_on_hub(folder: str, name: str) -> str:
    """Returns the SHA-256 that a file has on the Hugging Face hub; empty if the hub's cache does not say.

    The file is in the cache, named after its SHA-256, or in a directory of ``hf download --local-dir``.
    """
    path = os.path.join(folder, name)
    if _SHA_256.fullmatch(digest := hub_blob(path)):
        return digest
    with suppress(OSError, ValueError):
        with open(os.path.join(folder, _HUB_METADATA.format(name)), encoding="ascii") as file:
            _, digest, when = file.read(1000).split()[:3]
        if os.stat(path).st_mtime <= float(when) + _NEWER_S and _SHA_256.fullmatch(digest):
            return digest
    return ""
