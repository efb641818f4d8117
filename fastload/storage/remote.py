"""Everything that fsspec reaches: sftp, hdfs, memory; object stores where obstore is not installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import fsspec

from fastload.errors import OptionError, StorageError
from fastload.storage.base import ByteCounter, FileStat

__all__ = ["RemoteStorage"]

T = TypeVar("T")

# What another try will not change.
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)

_Names = list[str]  # the classes have a `list` of their own


class RemoteStorage:
    """Read access through an fsspec file system.

    Args:
        url: Root, with its scheme.
        options: Arguments of the fsspec file system.

    Raises:
        OptionError: The scheme is unknown, or what it needs is not installed.
    """

    shared = True
    probes = False
    direct_bytes_read = 0
    io = "buffered"

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/")
        self._count = ByteCounter()
        try:
            self._files, self._root = fsspec.core.url_to_fs(self._url, **options)
        except (ValueError, ImportError, TypeError) as error:
            raise OptionError(f"cannot open {url}: {error}") from error

    @property
    def url(self) -> str:
        return self._url

    @property
    def bytes_read(self) -> int:
        return self._count.total

    def stat(self, name: str) -> FileStat | None:
        try:
            info = self._call(name, lambda path: self._files.info(path))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise
        if info["type"] == "directory":
            return None if name else FileStat(0, "")
        version = info.get("ETag") or info.get("etag") or info.get("mtime") or info.get("created") or ""
        return FileStat(int(info["size"]), str(version), _seconds(info.get("mtime") or info.get("created")))

    def list(self) -> list[str] | None:
        return self._names("file")

    def folders(self) -> Sequence[str]:
        self._files.invalidate_cache()
        return self._names("directory") or []

    def _names(self, kind: str) -> _Names | None:
        try:
            found = self._call("", lambda path: self._files.ls(path, detail=True))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise
        is_file = len(found) == 1 and found[0]["name"].strip("/") == self._root.strip("/")
        names = (entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in found if entry["type"] == kind)
        return None if is_file and found[0]["type"] == "file" else sorted(names)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        nbytes = sum(map(len, buffers))
        if nbytes == 0:
            return  # a range request cannot ask for nothing
        data = self._call(
            name, lambda path: self._files.cat_file(path, start=offset, end=offset + nbytes), offset, nbytes
        )
        self._count.add(len(data))
        if len(data) != nbytes:
            raise StorageError(
                f"got {len(data)} of {nbytes} bytes",
                url=self._label(name),
                offset=offset,
                nbytes=nbytes,
                transient=True,
            )
        position = 0
        for buffer in buffers:
            buffer[:] = data[position : position + len(buffer)]
            position += len(buffer)

    def close(self) -> None:
        pass  # fsspec shares its connections between file systems of the same arguments

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _label(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def _call(
        self, name: str, ask: Callable[[str], T], offset: int | None = None, nbytes: int | None = None
    ) -> T:
        try:
            return ask(self._path(name))
        except Exception as error:
            raise StorageError(
                _first_line(error),
                url=self._label(name),
                offset=offset,
                nbytes=nbytes,
                transient=isinstance(error, OSError) and not isinstance(error, _PERMANENT),
            ) from error


def _seconds(when: Any) -> float:
    """Returns the time that a file system tells, in seconds since 1970: each does it in its own way."""
    if isinstance(when, datetime):
        return when.timestamp()
    return float(when) if isinstance(when, int | float) else 0.0


def _first_line(error: Any) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]
