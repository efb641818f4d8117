"""Files on this host's file systems."""

from __future__ import annotations

import errno
import mmap
import os
import stat as stat_flags
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from fastload.errors import StorageError
from fastload.memory import PAGE_BYTES, round_up
from fastload.storage.base import ByteCounter, FileStat, take

__all__ = ["IN_MEMORY_TYPES", "LocalStorage", "file_system_type", "is_network", "write_text"]

_MAX_BUFFERS = 1024  # IOV_MAX on Linux
_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_TRANSIENT = (errno.EIO, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE, errno.EREMOTEIO)
_MIN_DIRECT_BYTES = 1 << 20
_DIRECT_BLOCK_BYTES = 4 << 20
IN_MEMORY_TYPES = frozenset("tmpfs ramfs hugetlbfs".split())
_NETWORK_TYPES = frozenset(
    "nfs nfs4 lustre gpfs beegfs ceph cifs smb3 9p glusterfs wekafs pvfs2 orangefs afs virtiofs".split()
)

_Names = list[str]  # the classes have a `list` of their own


class LocalStorage:
    """Read access to a file or directory through the operating system.

    Symbolic links are followed (the Hugging Face cache is made of them). Descriptors are opened once
    and kept, that of the directory too, so that what is replaced during a load is still read as it was,
    and never mixed with what took its place.

    Each request is direct or buffered, whichever is faster. Direct (past the page cache) pays for large
    reads that are not cached, on file systems that do it; the head and tail that fill no page stay
    buffered, so that no byte is read that is not wanted.

    Args:
        root: A file or a directory.
        io: ``auto``, ``buffered`` or ``direct``; may be changed later.
    """

    probes = True

    def __init__(self, root: str, io: str = "auto") -> None:
        self.io = io
        self._root = root
        self._count = ByteCounter()
        self._direct_count = ByteCounter()
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}
        self._folder: int | None = None
        self._own = threading.local()

    @property
    def url(self) -> str:
        return self._root

    @property
    def shared(self) -> bool:
        return is_network(self._kind)

    @cached_property
    def _kind(self) -> str:
        return file_system_type(os.path.realpath(self._root))

    @property
    def bytes_read(self) -> int:
        return self._count.total

    @property
    def direct_bytes_read(self) -> int:
        return self._direct_count.total

    def stat(self, name: str) -> FileStat | None:
        try:
            path, folder = self._place(name)
            mode = os.stat(path, dir_fd=folder).st_mode
            if stat_flags.S_ISDIR(mode):
                return None if name else FileStat(0, "")
            if not stat_flags.S_ISREG(mode):
                return None  # opening a pipe would block
            found = os.fstat(self._file(name).buffered)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise self._error(error, name) from error
        return FileStat(found.st_size, f"{found.st_ino}:{found.st_mtime_ns}", found.st_mtime)

    def list(self) -> list[str] | None:
        return self._scan(os.DirEntry.is_file)

    def folders(self) -> Sequence[str]:
        return self._scan(os.DirEntry.is_dir) or []

    def _scan(self, wanted: Callable[[os.DirEntry[str]], bool]) -> _Names | None:
        try:
            return sorted(entry.name for entry in os.scandir(self._root) if wanted(entry))
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise self._error(error, "") from error

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        wanted = [buffer for buffer in buffers if len(buffer)]
        nbytes = sum(map(len, wanted))
        try:
            file = self._file(name)
            begin, end = round_up(offset, PAGE_BYTES), (offset + nbytes) // PAGE_BYTES * PAGE_BYTES
            if not self._reads_directly(file, offset, nbytes):
                begin = end = offset + nbytes
            head, rest = take(wanted, begin - offset)
            middle, tail = take(rest, end - begin)
            self._read_buffered(file, offset, head)
            self._read_direct(file, begin, middle)
            self._read_buffered(file, end, tail)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise self._error(error, name, offset, nbytes) from error

    def _reads_directly(self, file: _File, offset: int, nbytes: int) -> bool:
        """Decides between the page cache and direct reads, for one request."""
        if self.io == "buffered" or nbytes < 2 * PAGE_BYTES:
            return False
        if self.io == "auto" and not (nbytes >= _MIN_DIRECT_BYTES and _is_cold(file, offset, nbytes)):
            return False
        return file.direct() is not None

    def _read_buffered(self, file: _File, offset: int, wanted: Sequence[memoryview]) -> None:
        while wanted:
            count = os.preadv(file.buffered, wanted[:_MAX_BUFFERS], offset)
            if count == 0:
                raise self._short(file, offset, wanted)
            self._count.add(count)
            offset += count
            _, wanted = take(wanted, count)

    def _read_direct(self, file: _File, offset: int, wanted: Sequence[memoryview]) -> None:
        """Reads whole pages past the page cache, by way of an aligned buffer."""
        while wanted and (direct := file.direct()) is not None:
            block = self._aligned_buffer()[: sum(map(len, wanted))]
            try:
                count = os.preadv(direct, [block], offset) // PAGE_BYTES * PAGE_BYTES
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                file.never_directly()
                break
            if count == 0:
                raise self._short(file, offset, wanted)
            filled, wanted = take(wanted, count)
            copied = 0
            for buffer in filled:
                buffer[:] = block[copied : copied + len(buffer)]
                copied += len(buffer)
            self._count.add(count)
            self._direct_count.add(count)
            offset += count
        self._read_buffered(file, offset, wanted)

    def _aligned_buffer(self) -> memoryview:
        """Returns this thread's own page-aligned buffer."""
        if not hasattr(self._own, "block"):
            self._own.block = memoryview(mmap.mmap(-1, _DIRECT_BLOCK_BYTES))
        block: memoryview = self._own.block
        return block

    def _short(self, file: _File, offset: int, wanted: Sequence[memoryview]) -> StorageError:
        size = os.fstat(file.buffered).st_size
        return StorageError(
            f"the file ends at {size}: it shrank after it was opened",
            url=file.path, offset=offset, nbytes=sum(map(len, wanted)),
        )  # fmt: skip

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            if self._folder is not None:
                os.close(self._folder)
                self._folder = None

    def _place(self, name: str) -> tuple[str, int | None]:
        """Says where a file is: its path, and the directory in which that begins, if not the current one."""
        with self._lock:
            if name and self._folder is None:
                try:
                    self._folder = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                except OSError as error:
                    if error.errno not in _ABSENT:
                        raise
            return (name, self._folder) if name and self._folder is not None else (self._path(name), None)

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name) if name else self._root

    def _file(self, name: str) -> _File:
        place = self._place(name)
        with self._lock:
            if name not in self._files:
                directly = self.io == "direct" or (self.io == "auto" and self._kind not in IN_MEMORY_TYPES)
                self._files[name] = _File(self._path(name), *place, directly=directly and not self.shared)
            return self._files[name]

    def _error(
        self, error: OSError, name: str, offset: int | None = None, nbytes: int | None = None
    ) -> StorageError:
        return StorageError(
            f"{error.strerror} ({errno.errorcode.get(error.errno or 0, 'unknown')})",
            url=self._path(name), offset=offset, nbytes=nbytes, transient=error.errno in _TRANSIENT,
        )  # fmt: skip


class _File:
    """An open file: a descriptor for the page cache and, once it is wanted, one for past it."""

    def __init__(self, url: str, path: str, folder: int | None, *, directly: bool) -> None:
        self.path = url
        self.buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
        self._directly = directly
        self._direct: int | None = None
        self._lock = threading.Lock()

    def direct(self) -> int | None:
        """Returns the descriptor for direct reads, or None if there can be none."""
        with self._lock:
            if self._direct is None and self._directly:
                try:  # by way of the other descriptor: the path may lead to another file by now
                    link = f"/proc/self/fd/{self.buffered}"
                    self._direct = os.open(link, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                except OSError:
                    self._directly = False
            return self._direct if self._directly else None

    def never_directly(self) -> None:
        """Notes that this file system or device does no direct reads after all."""
        self._directly = False

    def close(self) -> None:
        os.close(self.buffered)
        if self._direct is not None:
            os.close(self._direct)


def write_text(path: str, pieces: Iterable[str]) -> None:
    """Writes a small file of a user's own: text, piece by piece.

    Raises:
        StorageError: It cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(pieces)
    except OSError as error:
        raise StorageError(str(error.strerror), url=path) from error


def _is_cold(file: _File, offset: int, nbytes: int) -> bool:
    """Asks the page cache for three bytes of a range; it is cold if none of them is there."""
    for position in (offset, offset + nbytes // 2, offset + nbytes - 1):
        try:
            if os.preadv(file.buffered, [bytearray(1)], position, os.RWF_NOWAIT):
                return False
        except BlockingIOError:
            continue
        except OSError:
            return False  # cannot say
    return True


def is_network(kind: str) -> bool:
    """Tells whether a file system of this type is, or may be, the same one on several hosts."""
    return kind in _NETWORK_TYPES or kind.startswith("fuse")


def file_system_type(path: str) -> str:
    """Looks up the type of the file system that holds a path; empty where the system does not say."""
    best, kind = "", ""
    try:
        with open("/proc/self/mountinfo") as mounts:
            for line in mounts:
                fields = line.split()
                point, after = fields[4], fields[fields.index("-") + 1]
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, after
    except OSError:
        return ""
    return kind
