"""A new checkpoint on this host's file systems: staged beside its place, then renamed into it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

from fastload.errors import CheckpointExists, FastloadError, OptionError, StorageError
from fastload.memory import PAGE_BYTES, round_up
from fastload.storage import staging
from fastload.storage.local import IN_MEMORY_TYPES, file_system_type, is_network
from fastload.storage.target import RECORD_NAME, Written, check_written

__all__ = ["LocalTarget", "os_errors"]

_ALIGN_BYTES = 1 << 20
_MIN_DIRECT_BYTES = 1 << 20
_BOUNCE_BYTES = 4 << 20
_NUM_TRIES = 10  # against others that publish at the same instant
_UNABLE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class LocalTarget:
    """Write access through the operating system.

    Large writes go past the page cache (O_DIRECT) on the file systems that do it, which is several times
    faster than filling the cache and waiting until it is empty again; what fills no page is buffered. A
    page is never written both ways: the ranges of different ranks meet at multiples of `align_bytes`,
    and within one range a page that two writes share is buffered in both.

    Args:
        path: Where the checkpoint will be; symbolic links in it are followed.
        io: ``auto``, ``buffered`` or ``direct``.
    """

    ordered = False
    _signs: tuple[str, ...] = (RECORD_NAME,)  # files that tell a checkpoint of fastload's from anything else

    def __init__(self, path: str, *, io: str) -> None:
        self._path = os.path.realpath(path)
        self._io = io
        self._written = Written()
        self._sizes: dict[str, int] = {}
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()
        self._own = threading.local()
        self._staging = ""
        self._owner: int | None = None

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
        parent, name = os.path.split(self._path)
        self._sizes = dict(files)
        try:
            with os_errors(parent):
                staging.make_folders(parent)
            self._check_free(overwrite=overwrite)
            self.clean_abandoned()
            with os_errors(parent):
                self._staging, self._owner = staging.stage(parent, name)
            for file, nbytes in files:
                with os_errors(self._data(file), 0, nbytes):
                    staging.reserve(self._data(file), nbytes)
        except FastloadError:
            self.abort()
            raise
        return {"staging": self._staging, "files": self._sizes}

    def join(self, ticket: Mapping[str, Any]) -> None:
        self._staging, self._sizes = ticket["staging"], ticket["files"]
        with os_errors(self._staging):
            os.stat(self._data(""))

    def write(self, name: str, offset: int, data: memoryview) -> None:
        nbytes = len(data)
        assert offset + nbytes <= self._sizes[name], (name, offset, nbytes)
        begin, end = round_up(offset, PAGE_BYTES), (offset + nbytes) // PAGE_BYTES * PAGE_BYTES
        with self._noted(), os_errors(self._data(name), offset, nbytes):
            file = self._file(name)
            if end - begin < _MIN_DIRECT_BYTES or file.direct() is None:
                begin = end = offset + nbytes
            written = begin + self._write_direct(file, begin, data[begin - offset : end - offset])
            _write_all(file.buffered(), offset, data[: begin - offset])
            _write_all(file.buffered(), written, data[written - offset :])
        self._written.add(name, offset, offset + nbytes)

    def _write_direct(self, file: _File, offset: int, data: memoryview) -> int:
        """Writes whole pages past the page cache; returns how many bytes of them, if it cannot do all."""
        done = 0
        bounce = None if _is_aligned(data) else self._bounce_buffer()
        while done < len(data) and (direct := file.direct()) is not None:
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
                file.never_directly()
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
                self._files[name] = _File(self._data(name), directly=auto or self._io == "direct")
            return self._files[name]

    def flush(self) -> dict[str, Any]:
        self._written.check()
        for name, file in list(self._files.items()):
            with self._noted(), os_errors(self._data(name)):
                file.sync()
        return {"written": self._written.to_json()}

    def publish(
        self,
        receipts: Sequence[Mapping[str, Any]],
        small_files: Sequence[tuple[str, bytes]],
        *,
        overwrite: bool,
    ) -> None:
        self._written.check()
        check_written(self._sizes, receipts, self._path)
        for name, content in small_files:
            with os_errors(self._data(name), 0, len(content)):
                _write_whole(self._data(name), content)
        with os_errors(self._path):
            staging.sync(self._data(""))
            self._swap_in(overwrite=overwrite)
        self._release()

    def _swap_in(self, *, overwrite: bool) -> None:
        """Renames the staged directory into its place: the step that makes the checkpoint exist."""
        undo = self._rename_in(overwrite=overwrite)
        try:
            staging.sync(os.path.dirname(self._path))
            staging.sync(self._staging)
        except OSError:
            # The caller is told that there is no new checkpoint, so the old one has to be there.
            (staging.exchange if undo == "exchange" else os.rename)(self._path, self._data(""))
            staging.restore(self._staging)
            raise

    def _rename_in(self, *, overwrite: bool) -> str:
        for _ in range(_NUM_TRIES):
            try:
                # A plain rename takes the place of nothing, or of an empty directory, but of nothing else.
                os.rename(self._data(""), self._path)
                return "rename"
            except OSError as error:
                if error.errno not in staging.NOT_FREE:
                    raise
            self._check_free(overwrite=overwrite)
            try:
                staging.exchange(self._data(""), self._path)
                return "exchange"
            except FileNotFoundError:
                continue  # somebody removed it: its place is free
            except OSError as error:
                if error.errno not in _UNABLE:
                    raise
            os.rename(self._path, os.path.join(self._staging, "old"))
        raise CheckpointExists(f"{self._path}: others publish there at the same time")

    def _check_free(self, *, overwrite: bool) -> None:
        """Refuses to take the place of what is there, unless it is a checkpoint that may be replaced."""
        try:
            with os_errors(self._path):
                entries = list(os.scandir(self._path))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return
            if isinstance(error.__cause__, NotADirectoryError):
                raise CheckpointExists(f"{self._path} is a file") from None
            raise
        if not entries:
            return
        if not overwrite:
            raise CheckpointExists(
                f"{self._path} exists already: to replace it, ask for overwrite=True (--overwrite)"
            )
        if all(entry.name not in self._signs for entry in entries):
            raise OptionError(
                f"{self._path} has no {' or '.join(self._signs)}: "
                "overwrite=True replaces checkpoints of fastload's only"
            )
        folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        if folders:
            raise OptionError(f"{self._path} holds directories, overwrite=True would delete them: {folders}")

    def abort(self) -> None:
        self._written.fail(StorageError("the save was given up", url=self._path))
        self._release()
        self.close()

    def clean_abandoned(self) -> list[str]:
        return staging.clean_abandoned(os.path.dirname(self._path))

    def remove(self) -> None:
        with os_errors(self._path):
            staging.remove(self._path)

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            if self._owner is not None:
                os.close(self._owner)
                self._owner = None

    def _release(self) -> None:
        """Removes the staging directory, if this rank made it, and only then lets go of its lock."""
        if self._owner is not None:
            with suppress(OSError):  # who cleans next gets another chance
                staging.discard(self._staging)
            os.close(self._owner)
            self._owner = None

    def _data(self, name: str) -> str:
        return os.path.join(self._staging, "data", name) if name else os.path.join(self._staging, "data")

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keeps an error for good: after it nobody knows what is on storage."""
        try:
            yield
        except StorageError as error:
            self._written.fail(error)
            raise


class _File:
    """A file that is being written: a descriptor for the page cache and one for past it, as needed."""

    def __init__(self, path: str, *, directly: bool) -> None:
        self._path = path
        self._directly = directly
        self._opened: dict[int, int] = {}
        self._lock = threading.Lock()

    def buffered(self) -> int:
        """Returns the descriptor for writes through the page cache."""
        return self._open(0)

    def direct(self) -> int | None:
        """Returns the descriptor for direct writes, or None if there can be none."""
        if self._directly:
            try:
                return self._open(os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._directly = False
        return None

    def never_directly(self) -> None:
        """Notes that this file system or device does no direct writes after all."""
        self._directly = False

    def _open(self, flags: int) -> int:
        with self._lock:
            if flags not in self._opened:
                self._opened[flags] = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | flags)
            return self._opened[flags]

    def sync(self) -> None:
        """Makes the writes durable, by the descriptors that did them: only they hear of their errors."""
        for file in self._opened.values():
            os.fsync(file)

    def close(self) -> None:
        for file in self._opened.values():
            os.close(file)


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


def _write_whole(path: str, content: bytes) -> None:
    """Writes a small file that has all of its content, durably, from its first instant."""
    new = f"{path}.new"
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write_all(file, 0, memoryview(content))
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(new, path)


def _is_aligned(data: memoryview) -> bool:
    if data.readonly or not len(data):
        return False  # its address cannot be asked for
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) % PAGE_BYTES == 0
