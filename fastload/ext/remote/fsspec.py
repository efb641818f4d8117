"""Storage through fsspec: sftp, hdfs, memory, and others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from os import PathLike
from typing import Any, TypeVar

import fsspec

from fastload.errors import OptionError, StorageError
from fastload.storage.base import CHANGED, FileStat, Folder, ObjectWriter, WritableStorage
from fastload.storage.location import Secrets, locate

T = TypeVar("T")


# Permanent errors.
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)


class FsspecStorage(WritableStorage):
    """Access through an fsspec file system.

    Args:
        url: URL of the root.
        options: Arguments of the fsspec file system.

    Raises:
        OptionError: The scheme or an option is unknown, or a package is missing.
        StorageError: The file system connects at once, and that failed.
    """

    def __init__(self, url: str | PathLike[str], options: Mapping[str, Any]) -> None:
        super().__init__(url)
        location = locate(url)
        self._putting = threading.Lock()  # some file systems refuse two writers of one file
        self.secrets = Secrets(location, options)
        with self.secrets.errors(location.url, is_transient=_is_transient):
            try:
                self._files, self._root = fsspec.core.url_to_fs(location.address, **options)
            except (ValueError, ImportError, TypeError) as error:
                raise OptionError(f"cannot open {location}: {self.secrets.hide(str(error))}") from None

    def stat(self, name: str) -> FileStat | None:
        try:
            info = self._call(name, lambda path: self._files.info(path))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise
        if info["type"] == "directory":
            return None if name else FileStat(0, "")
        return _stat(info)

    def _ask_for_version(self, name: str) -> str:
        """Returns the current version of a file, not that of an earlier listing; empty if unknown."""
        self._files.invalidate_cache(self._path(name).rpartition("/")[0])
        found = self.stat(name)
        return found.version if found is not None else ""

    def list(self) -> list[str] | None:
        found = self._entries("")
        return None if found is None else sorted(_of_type("file", found))

    def folders(self, prefix: str = "") -> Mapping[str, Folder]:
        self._files.invalidate_cache()
        names = sorted(_of_type("directory", self._entries("") or []))
        found = {name: self._folder(name) for name in names if name.startswith(prefix)}
        return {name: folder for name, folder in found.items() if folder is not None}

    def _folder(self, name: str) -> Folder | None:
        try:
            found = self._entries(name)
        except StorageError as error:
            if error.transient:
                raise
            return Folder(problem=str(error.args[0]))
        return None if found is None else Folder({n: _stat(i) for n, i in _of_type("file", found).items()})

    def _entries(self, name: str) -> Sequence[Mapping[str, Any]] | None:
        """Lists a directory; None if there is none."""
        try:
            found: Sequence[Mapping[str, Any]] = self._call(
                name, lambda path: self._files.ls(path, detail=True)
            )
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise
        is_single = len(found) == 1 and found[0]["name"].strip("/") == self._path(name).strip("/")
        return None if is_single and found[0]["type"] == "file" else found

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        nbytes = sum(map(len, buffers))
        if nbytes == 0:
            return  # a range request cannot ask for nothing
        data = self._call(
            name, lambda path: self._files.cat_file(path, start=offset, end=offset + nbytes), offset, nbytes
        )
        self.fill(name, offset, buffers, data)
        if version and self._ask_for_version(name) != version:
            raise StorageError(CHANGED, self.label(name), offset, nbytes)

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def put(self, name: str, content: bytes, *, fresh: bool = False) -> bool:
        self._make_folder(name)
        with self._putting:
            self._files.pipe_file(self._path(name), content)
        return True

    def writer(self, name: str) -> ObjectWriter:
        self._make_folder(name)
        writer: ObjectWriter = self._files.open(self._path(name), "wb")
        return writer

    def move(self, name: str, to: str) -> None:
        self._make_folder(to)
        self._files.mv(self._path(name), self._path(to))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

    def delete_folder(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm(self._path(folder), recursive=True)

    def files(self, folder: str) -> dict[str, int]:
        self._files.invalidate_cache()
        found = self._entries(folder) or []
        return {name: info["size"] for name, info in _of_type("file", found).items()}

    def modified_s(self, name: str) -> float:
        try:
            modified: datetime = self._files.modified(self._path(name))
        except FileNotFoundError:
            return float("inf")
        return modified.timestamp()

    def _make_folder(self, name: str) -> None:
        self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _call(
        self, name: str, ask: Callable[[str], T], offset: int | None = None, nbytes: int | None = None
    ) -> T:
        with self.secrets.errors(self.label(name), offset, nbytes, is_transient=_is_transient):
            return ask(self._path(name))


def _is_transient(error: Exception) -> bool:
    return isinstance(error, OSError) and not isinstance(error, _PERMANENT)


def _of_type(kind: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the files, or the directories, of a listing, by name."""
    return {info["name"].rstrip("/").rsplit("/", 1)[-1]: info for info in found if info["type"] == kind}


def _stat(info: Mapping[str, Any]) -> FileStat:
    tag, when = info.get("ETag") or info.get("etag"), info.get("mtime") or info.get("created")
    modified_s = _seconds(when)  # listings may spell it in another way
    return FileStat(int(info["size"]), str(tag or modified_s or when or ""), modified_s)


def _seconds(when: Any) -> float:
    """Returns a time in seconds since 1970; file systems differ in its type."""
    if isinstance(when, datetime):
        return when.timestamp()
    return float(when) if isinstance(when, int | float) else 0.0
