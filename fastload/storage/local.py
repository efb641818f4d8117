"""Files on this host's file systems."""

from __future__ import annotations

import errno
import os
import stat as stat_flags
import threading
from collections.abc import Sequence

from fastload.errors import StorageError
from fastload.storage.base import ByteCounter, FileStat

__all__ = ["LocalStorage"]

_MAX_BUFFERS = 1024  # IOV_MAX on Linux
_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_TRANSIENT = (errno.EIO, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE, errno.EREMOTEIO)
_NETWORK_TYPES = frozenset(
    "nfs nfs4 lustre gpfs beegfs ceph cifs smb3 9p glusterfs wekafs pvfs2 orangefs afs virtiofs".split()
)


class LocalStorage:
    """Read access to a file or directory through the operating system.

    Symbolic links are followed (the Hugging Face cache is made of them). Descriptors are opened once
    and kept, so that a file replaced during a load is still read as it was.
    """

    probes = True

    def __init__(self, root: str) -> None:
        self._root = root
        self._count = ByteCounter()
        self._lock = threading.Lock()
        self._descriptors: dict[str, int] = {}

    @property
    def url(self) -> str:
        return self._root

    @property
    def shared(self) -> bool:
        kind = _file_system_type(os.path.realpath(self._root))
        return kind in _NETWORK_TYPES or kind.startswith("fuse")

    @property
    def bytes_read(self) -> int:
        return self._count.total

    def stat(self, name: str) -> FileStat | None:
        path = self._path(name)
        try:
            mode = os.stat(path).st_mode
            if stat_flags.S_ISDIR(mode):
                return None if name else FileStat(0, "")
            if not stat_flags.S_ISREG(mode):
                return None  # opening a pipe would block
            found = os.fstat(self._descriptor(name))
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise self._error(error, name) from error
        return FileStat(found.st_size, f"{found.st_ino}:{found.st_mtime_ns}")

    def list(self) -> list[str] | None:
        try:
            return sorted(entry.name for entry in os.scandir(self._root) if entry.is_file())
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise self._error(error, "") from error

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        position, wanted = offset, [buffer for buffer in buffers if len(buffer)]
        try:
            descriptor = self._descriptor(name)
            while wanted:
                count = os.preadv(descriptor, wanted[:_MAX_BUFFERS], position)
                if count == 0:
                    raise StorageError(
                        f"the file ends at {os.fstat(descriptor).st_size}: it shrank after it was opened",
                        url=self._path(name), offset=position, nbytes=sum(map(len, wanted)),
                    )  # fmt: skip
                self._count.add(count)
                position += count
                wanted = _skip(wanted, count)
        except StorageError:
            raise
        except OSError as error:
            raise self._error(error, name, position, sum(map(len, wanted))) from error

    def close(self) -> None:
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name) if name else self._root

    def _descriptor(self, name: str) -> int:
        with self._lock:
            if name not in self._descriptors:
                self._descriptors[name] = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[name]

    def _error(
        self, error: OSError, name: str, offset: int | None = None, nbytes: int | None = None
    ) -> StorageError:
        return StorageError(
            f"{error.strerror} ({errno.errorcode.get(error.errno or 0, 'unknown')})",
            url=self._path(name), offset=offset, nbytes=nbytes, transient=error.errno in _TRANSIENT,
        )  # fmt: skip


def _skip(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Drops the first count bytes of the buffers."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def _file_system_type(path: str) -> str:
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
