"""The base classes `Storage` and `WritableStorage`, and the protocols of targets and what they write to."""

from __future__ import annotations

import math
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Protocol

from fastload.base.memory import copy_bytes
from fastload.errors import StorageError
from fastload.storage.location import Secrets, locate

CHANGED = "it was changed after it was opened: load it again once nobody writes to it"
"""Error text for a file that was written to while it was read."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """Metadata of one file.

    Attributes:
        nbytes: Size in bytes.
        version: Opaque text that changes when the file is replaced and is the same on every host
            that sees the same file (inode and modification time, an ETag); empty where storage has none.
        modified_s: Modification time in seconds since 1970; 0 if unknown.
    """

    nbytes: int
    version: str
    modified_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Folder:
    """Listing of one directory.

    Attributes:
        files: Metadata of the files directly in it, by name.
        place: Path with links resolved; empty where storage has no links.
        is_link: Whether it is a symbolic link.
        problem: Why it cannot be listed; empty if it can.
    """

    files: Mapping[str, FileStat] = field(default_factory=dict)
    place: str = ""
    is_link: bool = False
    problem: str = ""


def take(buffers: Sequence[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """Splits a list of buffers at a number of bytes."""
    taken: list[memoryview] = []
    for index, buffer in enumerate(buffers):
        if nbytes < len(buffer):
            cut = [buffer[:nbytes]] if nbytes else []
            return [*taken, *cut], [buffer[nbytes:], *buffers[index + 1 :]]
        taken.append(buffer)
        nbytes -= len(buffer)
    return taken, []


_LONG_BYTES = 64 << 10  # from which the GIL matters more than a call


def fill(buffers: Sequence[memoryview], data: memoryview) -> None:
    """Copies bytes into buffers of the same total length, in order."""
    position = 0
    for buffer in buffers:
        part = data[position : position + len(buffer)]
        position += len(buffer)
        if len(buffer) < _LONG_BYTES:
            buffer[:] = part
        else:
            copy_bytes(part, buffer)


_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<[!?a-zA-Z]")
HEAD_BYTES = 64
"""Bytes to read of a file for `is_page`."""


def is_page(head: bytes) -> bool:
    """Whether a file that begins so is a page of HTML or XML, as servers show for names that they lack."""
    return _PAGE.match(head) is not None


class ByteCounter:
    """A thread-safe sum of bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0

    def add(self, nbytes: int) -> None:
        """Adds to the sum."""
        with self._lock:
            self.total += nbytes


def ignore(after_s: float) -> None:
    """Takes no notice of the time to a first byte; see `Storage.listen`."""


class Storage(ABC):
    """Read access to the files below a root; the base class of storages.

    A name is relative to the root, with ``/`` between parts; the empty name is the root itself.
    Every method may be called from several threads, and raises `StorageError` when storage fails: transient
    errors are retried. Register a subclass with `register_storage`, and test it with
    `fastload.testing.StorageContract`.

    Args:
        url: URL of the root, with credentials if it has any.

    Attributes:
        url: The root without credentials, for messages.
        shared: Whether every host reads the same bytes through one link (object store, network file
            system) rather than from a disk of its own.
        probes: Whether each rank may look for the files itself; False where metadata requests cost
            and the first rank asks for all.
        in_order: Whether to send one request at a time, in file order: the server reads ahead, and a request
            for another place throws that away.
        bytes_read: Bytes read so far, retries included.
        direct_bytes_read: The part of `bytes_read` that bypassed the page cache.
        secrets: Redacts credentials from messages and library errors.
    """

    def __init__(self, url: str | PathLike[str]) -> None:
        location = locate(url)
        self.url = location.url
        self.secrets = Secrets(location, {})
        self._first_byte_s = 0.0
        self._count = ByteCounter()
        self._listener: Callable[[float], object] = ignore

    @property
    def shared(self) -> bool:
        return True

    @property
    def probes(self) -> bool:
        return False

    @property
    def in_order(self) -> bool:
        return False

    @property
    def first_byte_s(self) -> float:
        """Least time in seconds from a request for data to its first byte; 0 before one, or if not known."""
        return self._first_byte_s

    @property
    def bytes_read(self) -> int:
        return self._count.total

    @property
    def direct_bytes_read(self) -> int:
        return 0

    @abstractmethod
    def stat(self, name: str) -> FileStat | None:
        """Returns size and version of a file, or None if there is no such file.

        Of the root (the empty name), returns metadata if it is a file; if it is a directory,
        ``FileStat(0, "")``, or None where storage does not know directories.
        """

    @abstractmethod
    def list(self) -> list[str] | None:
        """Returns the sorted names of the files directly below the root, or None if it is no directory."""

    def folders(self, prefix: str = "") -> Mapping[str, Folder]:
        """Lists the directories (common prefixes) directly below the root, by name.

        `CheckpointManager` and saves need it; loads do not. A directory that cannot be listed has a
        `problem`; the others are listed all the same.

        Args:
            prefix: Lists only directories whose names begin so.

        Raises:
            StorageError: The storage has no listings (HTTP).
        """
        raise StorageError("it cannot list directories", self.url)

    @abstractmethod
    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        """Fills the buffers, in order, with the bytes from an offset on.

        Args:
            name: File below the root.
            offset: First byte.
            buffers: Buffers of any sizes.
            version: `FileStat.version` of the file, from any host; empty to accept any version.

        Raises:
            StorageError: The file is too short, was replaced, or cannot be read.
        """

    def share_reads(self, shared: bool) -> None:  # noqa: B027 (most have no page cache)
        """Notes whether other processes of this host read the same bytes from now on.

        If they do, reads through the page cache cost less than direct ones.
        """

    def listen(self, note: Callable[[float], object]) -> None:
        """Has a function called with the seconds from each request for data to its first byte, if known."""
        self._listener = note

    def note_first_byte(self, after_s: float) -> None:
        """Notes that the first byte of a request for data came so many seconds after it."""
        self._first_byte_s = min(self._first_byte_s or after_s, after_s)
        self._listener(after_s)

    def read_all(self, name: str, about: FileStat) -> bytes:
        """Returns all of a small file, and keeps no descriptor open.

        Args:
            name: File below the root.
            about: Its metadata from a listing.

        Raises:
            StorageError: The file was replaced, or cannot be read.
        """
        data = bytearray(about.nbytes)
        self.read_into(name, 0, [memoryview(data)], about.version)
        return bytes(data)

    def sha256(self, name: str, version: str) -> str:
        """Returns the SHA-256 that a file has at its origin, in hex digits; empty if it is unknown.

        Args:
            name: File below the root.
            version: Its `FileStat.version`, from any host.
        """
        return ""

    def label(self, name: str) -> str:
        """Returns the URL of a file, for messages."""
        return f"{self.url.rstrip('/')}/{name}" if name else self.url

    def close(self) -> None:  # noqa: B027 (most have nothing to release)
        """Releases descriptors and connections; the storage cannot be used afterwards."""

    # For subclasses

    def fill(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        data: bytes | memoryview,
        file_nbytes: int | None = None,
    ) -> None:
        """Copies what was read into the buffers of `read_into`, and adds it to `bytes_read`.

        Args:
            name: As for `read_into`.
            offset: Likewise.
            buffers: Likewise.
            data: The bytes that were read.
            file_nbytes: Size of the file, if known: another attempt cannot read beyond its end.

        Raises:
            StorageError: It is less than the buffers take.
        """
        self.note_read(name, offset, sum(map(len, buffers)), len(data), file_nbytes)
        fill(buffers, memoryview(data))

    def note_read(
        self, name: str, offset: int, nbytes: int, num_read: int, file_nbytes: int | None = None
    ) -> None:
        """Adds what was read to `bytes_read`.

        Args:
            name: As for `read_into`.
            offset: Likewise.
            nbytes: The bytes that were requested.
            num_read: Those that were read.
            file_nbytes: As for `fill`.

        Raises:
            StorageError: It is less, or more, than was requested.
        """
        self._count.add(num_read)
        if num_read != nbytes:
            has = "" if file_nbytes is None else f"; the file has {file_nbytes}"
            is_within = file_nbytes is None or offset + nbytes <= file_nbytes
            message = f"got {num_read} of {nbytes} bytes{has}"
            raise StorageError(message, self.label(name), offset, nbytes, transient=is_within)


class WritableStorage(Storage):
    """Read and write access to the files below a root; the base class of storages for saves.

    To save, fastload opens the parent of the checkpoint. Each file is written under a pending name, and moved
    to its own once all files are complete. Errors of any type become `StorageError`. They are not retried.
    """

    @abstractmethod
    def folders(self, prefix: str = "") -> Mapping[str, Folder]:
        """As `Storage.folders`, and never from a cache."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """Returns a small file as it is now, or None if there is none."""

    @abstractmethod
    def put(self, name: str, content: bytes, *, fresh: bool = False) -> bool:
        """Writes a small file in one step; directories are made as needed.

        Args:
            name: File below the root.
            content: All of its bytes.
            fresh: Whether to leave a file that exists as it is. Storage that cannot do so in one step
                ignores this; then of two saves to one place both may pause to find out which came last.

        Returns:
            Whether the file was written.
        """

    @abstractmethod
    def writer(self, name: str) -> ObjectWriter:
        """Opens a new file for sequential writes. It exists, complete and durable, once it is closed."""

    @abstractmethod
    def move(self, name: str, to: str) -> None:
        """Renames a file in one step, and replaces what is there; directories are made as needed."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Deletes files in this order; missing ones are no error."""

    def delete_folder(self, folder: str) -> None:
        """Deletes a directory directly below the root, with its files; a missing one is no error."""
        self.delete([f"{folder}/{name}" for name in self.files(folder)])

    def files(self, folder: str) -> dict[str, int]:
        """Returns the sizes in bytes of the files in a directory directly below the root, by name."""
        listing = self.folders(folder).get(folder, Folder())
        if listing.problem:
            raise StorageError(listing.problem, self.label(folder))
        return {name: about.nbytes for name, about in listing.files.items()}

    def modified_s(self, name: str) -> float:
        """Returns the modification time in seconds since 1970; infinity if there is no file."""
        about = self.stat(name)
        return math.inf if about is None else about.modified_s


@dataclass(frozen=True)
class Names:
    """Names of files of a checkpoint; formats define them, storages and targets use them.

    Attributes:
        record: The commit record. It is written last: a directory without it is no checkpoint.
        owner: The owner file next to the files while an object store publishes them.
        receipt: The receipt of a staged copy. It replaces the record if there is none.
        likely: Names to probe, in this order, where storage cannot list: any checkpoint has one of them. If
            access to the first is denied, it counts as missing.
        file_endings: Endings of the files that a save writes tensors to.
        single_endings: Endings of files that may be a whole checkpoint.
        part_endings: Endings of files that a reader takes for a part of a checkpoint.
        own: Returns which of the names in a directory belong to fastload's checkpoint, given the contents of
            its record and receipt.
        to_replace: What a caller passes to replace a checkpoint, for messages.
        others: Files by which to know a checkpoint of another program that may be replaced. `own` returns its
            files if there is neither record nor receipt.
    """

    record: str
    owner: str
    receipt: str
    likely: tuple[str, ...]
    file_endings: tuple[str, ...]
    single_endings: tuple[str, ...]
    part_endings: tuple[str, ...]
    own: Callable[[Iterable[str], Sequence[bytes]], set[str]]
    to_replace: str
    others: tuple[str, ...] = ()


DEFAULT_WRITES = 2
"""Writes under way on each rank, unless storage is faster with more."""

_PENDING = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.saving", re.DOTALL)


class Target(Protocol):
    """Write access to one new checkpoint, for all ranks that write it together.

    One rank (the coordinator) calls `prepare` and hands its ticket to the others, which `join`. All
    `write` and `flush`. The coordinator collects their receipts and calls `publish`: before it returns
    there is no new checkpoint, afterwards there is. Any rank may `abort` at any time instead.

    Names are plain, without ``/``. Errors of the storage are `StorageError`.

    Attributes:
        url: Where the checkpoint will be, for messages.
        ordered: Whether the writes of one file must be started in order of their offsets: each waits
            for those before it.
        writes_at_once: Writes under way on each rank with which storage is fast.
    """

    @property
    def url(self) -> str: ...

    @property
    def ordered(self) -> bool: ...

    @property
    def writes_at_once(self) -> int: ...

    def align_bytes(self, largest_bytes: int) -> int | None:
        """Returns the alignment of cuts between writers of a file, and between writes of one writer.

        Args:
            largest_bytes: Size of the largest file, since stores limit the number of parts.

        Returns:
            Alignment in bytes; None if a file can have only one writer.
        """

    def prepare(self, files: Sequence[tuple[str, int]], *, overwrite: bool) -> dict[str, Any]:
        """Reserves space for the files, on the coordinator, and removes orphans of dead saves.

        Args:
            files: Name and size in bytes of each file that will be written in ranges.
            overwrite: Whether to replace a checkpoint.

        Returns:
            The ticket for the other ranks, in JSON types.

        Raises:
            CheckpointExists: There is something at the path, and `overwrite` is off.
            OptionError: The path holds something other than a checkpoint, which is never replaced.
            StorageError: There is no room, or no permission.
        """

    def join(self, ticket: Mapping[str, Any]) -> None:
        """Joins a save that the coordinator prepared.

        Raises:
            StorageError: This rank does not see what the coordinator prepared.
        """

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Writes a range of one file, once. Thread-safe."""

    def flush(self) -> dict[str, Any]:
        """Makes what this rank wrote durable, once all its writes have returned.

        Returns:
            The receipt for `publish`, in JSON types.

        Raises:
            StorageError: A write failed. Every further call raises the same error.
        """

    def publish(
        self, receipts: Sequence[Mapping[str, Any]], small_files: Sequence[tuple[str, bytes]]
    ) -> None:
        """Makes the checkpoint exist, on the coordinator.

        Args:
            receipts: The receipts of all ranks, from `flush`.
            small_files: Name and content of whole files; the last one is the commit record.

        Raises:
            CheckpointExists: Another save was faster, and `prepare` was not to replace a checkpoint.
            StorageError: Bytes are missing, or storage failed. The old checkpoint, if any, is still there
                (on object stores: unless it was being replaced).
        """

    def abort(self) -> None:
        """Ends the save and, on the coordinator, removes its pending files; never raises."""

    def clean_abandoned(self) -> list[str]:
        """Removes orphans of dead saves next to the checkpoint; returns their paths or URLs."""

    def remove(self) -> None:
        """Deletes the checkpoint at the path; no reader takes a part of it for complete."""

    def close(self) -> None:
        """Releases descriptors and connections; the target cannot be used afterwards."""


def new_token() -> str:
    """Returns a unique name for one save: 16 hex digits."""
    return secrets.token_hex(8)


def pending_name(name: str, token: str) -> str:
    """Returns the name of the pending directory of a save, which is next to the checkpoint."""
    return f".{name}.{token}.saving"


def saved_name(pending: str) -> str | None:
    """Returns the checkpoint's name from that of a pending directory; None if it is no pending directory."""
    match = _PENDING.fullmatch(pending)
    return match["name"] if match else None


class Written:
    """The ranges that one rank wrote, and its first error. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        self._failure: tuple[str, str, int | None, int | None] | None = None

    def add(self, name: str, begin: int, end: int) -> None:
        """Adds a range that was written."""
        with self._lock:
            self._ranges.setdefault(name, []).append((begin, end))

    def fail(self, error: StorageError) -> StorageError:
        """Keeps the first error: after a failed write or fsync, the content of storage is unknown."""
        with self._lock:
            if self._failure is None:  # its fields, since the error would keep its frames' memory alive
                self._failure = (str(error.args[0]), error.url, error.offset, error.nbytes)
        return error

    def check(self) -> None:
        """Raises the first error, if there was one."""
        if self._failure is not None:
            raise StorageError(*self._failure)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Raises the first error, if there was one; keeps an error raised in the block."""
        self.check()
        try:
            yield
        except StorageError as error:
            self.fail(error)
            raise

    def require_all(self, files: Mapping[str, int], receipts: Sequence[Mapping[str, Any]], url: str) -> None:
        """Checks that this rank had no error, and that the ranks together wrote every byte of every file.

        Raises:
            StorageError: This rank had an error, or bytes are missing.
        """
        self.check()
        for name, nbytes in files.items():
            ranges = [(begin, end) for receipt in receipts for begin, end in receipt["written"].get(name, [])]
            merged = _merged([(0, 0), *ranges, (nbytes, nbytes)])
            if len(merged) > 1:
                begin, end = merged[0][1], merged[1][0]
                raise StorageError("no rank wrote it", url=f"{url}/{name}", offset=begin, nbytes=end - begin)

    def to_json(self) -> dict[str, list[list[int]]]:
        """Returns disjoint ranges by file name."""
        with self._lock:
            return {name: _merged(ranges) for name, ranges in sorted(self._ranges.items())}


def _merged(ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    merged: list[list[int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


class ObjectWriter(Protocol):
    """An object that is written sequentially, and exists once it is closed."""

    def write(self, data: memoryview, /) -> object: ...

    def close(self) -> object: ...
