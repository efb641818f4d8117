"""The contracts of storage: reading files, writing a checkpoint, what object stores have to offer."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastload.errors import StorageError
from fastload.storage.location import Secrets

CHANGED = "it was changed after it was opened: load it again once nobody writes to it"
"""What is said of a file of which some bytes may be older than others."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """What storage says of one file.

    Attributes:
        nbytes: Size in bytes.
        version: Opaque text that changes when the file is replaced and is the same on every host
            that sees the same file (inode and modification time, an ETag); empty where storage has none.
        modified_s: When it was written, in seconds since 1970; 0 where storage does not say.
    """

    nbytes: int
    version: str
    modified_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Folder:
    """What storage says of one directory.

    Attributes:
        files: Name → what is known of it, for each file directly in it.
        place: Where it really is, links followed; empty where storage knows no links.
        is_link: Whether its name is a link.
        problem: Why it cannot be listed; empty if it can.
    """

    files: Mapping[str, FileStat] = field(default_factory=dict)
    place: str = ""
    is_link: bool = False
    problem: str = ""


def take(buffers: Sequence[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """Splits a list of buffers after so many bytes."""
    taken: list[memoryview] = []
    for index, buffer in enumerate(buffers):
        if nbytes < len(buffer):
            cut = [buffer[:nbytes]] if nbytes else []
            return [*taken, *cut], [buffer[nbytes:], *buffers[index + 1 :]]
        taken.append(buffer)
        nbytes -= len(buffer)
    return taken, []


def fill(buffers: Sequence[memoryview], data: memoryview) -> None:
    """Copies bytes into buffers, one after the other; there are as many in both."""
    position = 0
    for buffer in buffers:
        buffer[:] = data[position : position + len(buffer)]
        position += len(buffer)


class ByteCounter:
    """Adds up bytes from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0

    def add(self, nbytes: int) -> None:
        """Counts some more bytes."""
        with self._lock:
            self.total += nbytes


class Storage(Protocol):
    """Read access to the files of one checkpoint, below a root fixed when it was opened.

    A name is relative to the root, with ``/`` between parts; the empty name is the root itself.
    Every method raises `StorageError` when storage fails, and may be called from several threads.

    Attributes:
        url: The root, for messages.
        shared: Whether every host reads the same bytes through one link (object store, network file
            system) rather than from a disk of its own.
        probes: Whether each rank may look for the files itself; False where metadata requests cost
            and the first rank asks for all.
        in_order: Whether requests are to come one by one, in the order of the bytes: what serves them reads
            ahead, and begins anew where another one comes.
        bytes_read: Bytes that came from storage so far, retries included.
        direct_bytes_read: Those of them that did not go through the page cache.
    """

    @property
    def url(self) -> str: ...

    @property
    def shared(self) -> bool: ...

    @property
    def probes(self) -> bool: ...

    @property
    def in_order(self) -> bool: ...

    @property
    def bytes_read(self) -> int: ...

    @property
    def direct_bytes_read(self) -> int: ...

    def stat(self, name: str) -> FileStat | None:
        """Returns size and version of a file, or None if there is no such file or directory."""
        ...

    def list(self) -> list[str] | None:
        """Returns the sorted names of the files directly below the root, or None if it is no directory."""
        ...

    def folders(self, prefix: str = "") -> Mapping[str, Folder]:
        """Returns the directories (common prefixes) directly below the root, by name, and what is in them.

        One listing tells all, or one for each directory. One that cannot be listed hides no other.

        Args:
            prefix: How the names of those begin that are wanted.

        Raises:
            StorageError: There is no asking for them (HTTP).
        """
        ...

    def read_into(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        version: str = "",
        via_cache: bool = False,
    ) -> None:
        """Fills the buffers, one after the other, with the bytes from offset on.

        Args:
            name: File below the root.
            offset: First byte.
            buffers: What to fill.
            version: What `stat` said of the file, maybe on another host; empty to take any.
            via_cache: Whether others on this host read the same bytes now, such that a cache which they
                have in common is the better way; for storage that has none it means nothing.

        Raises:
            StorageError: The file ends before the buffers are full, it is another one by now, or
                reading failed.
        """
        ...

    def read_all(self, name: str, about: FileStat) -> bytes:
        """Returns all of a small file, and keeps nothing open for it.

        Args:
            name: File below the root.
            about: What a listing said of it.

        Raises:
            StorageError: It is another one by now, or reading failed.
        """
        ...

    def close(self) -> None:
        """Releases descriptors and connections; the storage cannot be used afterwards."""
        ...


@dataclass(frozen=True)
class Names:
    """The names that some storages and targets have to know.

    Attributes:
        record: The commit record, the last file of a checkpoint to be written: without it there is none.
        owner: On object stores, the owner file next to the files while they are published; without a record,
            what is there is the rest of a save that has not ended, or never will.
        receipt: What a copy on a host holds next to its files; stands for the record if that has none.
        likely: What to look for, in this order, where nothing can be listed; one of them is there if any
            checkpoint is. The first may be refused, and counts as missing then.
        file_endings: How the names of files end that a save writes tensors to.
        single_endings: How those end that may be a checkpoint by themselves.
        part_endings: How the names of all files end that may be read as a part of a checkpoint.
        own: Returns which of the names of all files at a place are those of a checkpoint of fastload's,
            given the contents of its record and its receipt, as far as there are any.
        others: Names of files that tell a checkpoint of another program, where one may be replaced; `own`
            returns its files where there is neither record nor receipt.
    """

    record: str
    owner: str
    receipt: str
    likely: tuple[str, ...]
    file_endings: tuple[str, ...]
    single_endings: tuple[str, ...]
    part_endings: tuple[str, ...]
    own: Callable[[Iterable[str], Sequence[bytes]], set[str]]
    others: tuple[str, ...] = ()


_PENDING = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.saving", re.DOTALL)


class Target(Protocol):
    """Write access to one checkpoint that does not exist yet, for all ranks that write it together.

    One rank (the coordinator) calls `prepare` and hands its ticket to the others, which `join`. All
    `write` and `flush`. The coordinator collects their receipts and calls `publish`: before it returns
    there is no new checkpoint, afterwards there is. Anybody may `abort` at any time instead.

    Names are plain, without ``/``. Errors of the storage are `StorageError`.

    Attributes:
        url: Where the checkpoint will be, for messages.
        shared: Whether every host writes to the same place (object store, network file system), as far
            as storage can tell.
        ordered: Whether the writes of one file must be started in order of their offsets: each waits
            for those before it.
    """

    @property
    def url(self) -> str: ...

    @property
    def shared(self) -> bool: ...

    @property
    def ordered(self) -> bool: ...

    def align_bytes(self, largest_bytes: int) -> int | None:
        """Says where a file may be cut between writers, and one writer's file between writes.

        Args:
            largest_bytes: Size of the largest file, since a store may take so many parts of a file only.

        Returns:
            Bytes of which every cut must be a multiple; None if a file has one writer only.
        """
        ...

    def prepare(self, files: Sequence[tuple[str, int]], *, overwrite: bool) -> dict[str, Any]:
        """Makes room for the files, on the coordinator, and removes what dead saves left next to them.

        Args:
            files: Name and size in bytes of each file that will be written in ranges.
            overwrite: Whether a checkpoint that is there may be replaced.

        Returns:
            The ticket for the other ranks, in JSON types.

        Raises:
            CheckpointExists: There is something at the path, and `overwrite` is off.
            OptionError: What is there is no checkpoint of fastload's, so it is not replaced.
            StorageError: There is no room, or no permission.
        """
        ...

    def join(self, ticket: Mapping[str, Any]) -> None:
        """Takes part in a save that the coordinator prepared.

        Raises:
            StorageError: This rank does not see what the coordinator prepared.
        """
        ...

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Writes a range of one file; from any thread, several at once. Nobody may write it again."""
        ...

    def flush(self) -> dict[str, Any]:
        """Makes what this rank wrote durable, once all its writes have returned.

        Returns:
            The receipt for `publish`, in JSON types.

        Raises:
            StorageError: Something was not written; the same again at every further call.
        """
        ...

    def publish(
        self,
        receipts: Sequence[Mapping[str, Any]],
        small_files: Sequence[tuple[str, bytes]],
        *,
        overwrite: bool,
    ) -> None:
        """Makes the checkpoint exist, on the coordinator.

        Args:
            receipts: What `flush` returned on every rank.
            small_files: Name and content of whole files; the last one is the commit record.
            overwrite: Whether a checkpoint that is there may be replaced.

        Raises:
            CheckpointExists: Another save was faster, and `overwrite` is off.
            StorageError: Bytes are missing, or storage failed. What was there before is still there
                (on object stores: unless it was being replaced).
        """
        ...

    def abort(self) -> None:
        """Gives up, and removes what is pending if this rank prepared it; never raises."""
        ...

    def clean_abandoned(self) -> list[str]:
        """Removes what dead saves left next to the checkpoint, never what living ones need; returns it."""
        ...

    def remove(self) -> None:
        """Deletes the checkpoint that is at the path; no reader sees half of it as a whole one."""
        ...

    def close(self) -> None:
        """Releases descriptors and connections; the target cannot be used afterwards."""
        ...


def new_token() -> str:
    """Returns a name for one save that no other save has."""
    return secrets.token_hex(8)


def pending_name(name: str, token: str) -> str:
    """Returns the name of the directory, next to the checkpoint, where one save gathers its files."""
    return f".{name}.{token}.saving"


def saved_name(pending: str) -> str | None:
    """Returns the name of the checkpoint that a pending directory is for; None if it is no such directory."""
    match = _PENDING.fullmatch(pending)
    return match["name"] if match else None


class Written:
    """The ranges that one rank wrote, and the error that broke them; from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        self._failure: tuple[str, str, int | None, int | None] | None = None

    def add(self, name: str, begin: int, end: int) -> None:
        """Notes that a range was written."""
        with self._lock:
            self._ranges.setdefault(name, []).append((begin, end))

    def fail(self, error: StorageError) -> StorageError:
        """Notes an error, for good: after a failed write or fsync nobody knows what is on storage."""
        with self._lock:
            if self._failure is None:  # its fields, since the error would keep its frames' memory alive
                self._failure = (str(error.args[0]), error.url, error.offset, error.nbytes)
        return error

    def check(self) -> None:
        """Raises the first error again, if there was one."""
        if self._failure is not None:
            raise StorageError(*self._failure)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes the error that what is done within ends with; raises the first again, if there was one."""
        self.check()
        try:
            yield
        except StorageError as error:
            self.fail(error)
            raise

    def require_all(self, files: Mapping[str, int], receipts: Sequence[Mapping[str, Any]], url: str) -> None:
        """Checks that nothing went wrong here, and that every byte of every file was written by somebody.

        Raises:
            StorageError: It was not.
        """
        self.check()
        check_written(files, receipts, url)

    def to_json(self) -> dict[str, list[list[int]]]:
        """Returns name → disjoint ranges."""
        with self._lock:
            return {name: _merged(ranges) for name, ranges in sorted(self._ranges.items())}


def check_written(files: Mapping[str, int], receipts: Sequence[Mapping[str, Any]], url: str) -> None:
    """Checks that every byte of every file was written by somebody.

    Raises:
        StorageError: Bytes are missing.
    """
    for name, nbytes in files.items():
        ranges = [(begin, end) for receipt in receipts for begin, end in receipt["written"].get(name, [])]
        merged = _merged([(0, 0), *ranges, (nbytes, nbytes)])
        if len(merged) > 1:
            begin, end = merged[0][1], merged[1][0]
            raise StorageError("nobody wrote it", url=f"{url}/{name}", offset=begin, nbytes=end - begin)


def _merged(ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    merged: list[list[int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


class Writer(Protocol):
    """An object that is being written from its first byte to its last; it is there once closed."""

    def write(self, data: memoryview, /) -> object: ...

    def close(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of what one save has on a store, below the parent of the checkpoint.

    Attributes:
        name: The checkpoint's.
        token: The save's.
    """

    name: str
    token: str

    @property
    def folder(self) -> str:
        """Prefix of what is pending."""
        return pending_name(self.name, self.token)

    @property
    def owner(self) -> str:
        """Key of what says who saves: the first that is there, and the last."""
        return self.pending("owner.json")

    def pending(self, name: str) -> str:
        """Returns the key of a file as long as it is pending."""
        return f"{self.folder}/{name}"

    def published(self, name: str) -> str:
        """Returns the key of a file of the checkpoint."""
        return f"{self.name}/{name}"


class Bucket(Protocol):
    """The objects below a prefix; keys are relative to it. Errors are those of the library.

    Attributes:
        secrets: What must not be shown of those errors.
    """

    secrets: Secrets

    def get(self, key: str) -> bytes | None:
        """Returns an object, or None if there is none."""
        ...

    def put(self, key: str, content: bytes, *, fresh: bool = False) -> bool:
        """Writes an object.

        Args:
            key: Its key.
            content: All of it.
            fresh: Only if there is none, where the store can do that; elsewhere it means nothing.

        Returns:
            Whether it was written.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, in that order; those that are not there as well."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Deletes all objects below a prefix."""
        ...

    def files(self, folder: str) -> dict[str, int]:
        """Returns name → bytes of the objects directly below a prefix."""
        ...

    def folders(self) -> list[str]:
        """Returns the names of the prefixes directly below the root."""
        ...

    def modified_s(self, key: str) -> float:
        """Returns when an object was written, in seconds since 1970; infinity if there is none."""
        ...

    def move(self, key: str, to: str) -> None:
        """Renames an object, without its bytes coming here."""
        ...

    def writer(self, key: str) -> Writer:
        """Begins to write an object."""
        ...


NUM_REQUESTS = 8
"""How many files are begun, published or given up at the same time."""


class Uploads(Protocol):
    """The uploads of one save, on one rank. Errors are those of the library.

    Attributes:
        ordered: As of a target.
    """

    @property
    def ordered(self) -> bool: ...

    def align_bytes(self, largest_bytes: int) -> int | None:
        """Says where a file may be cut, as a target does; a write gets no more than that."""
        ...

    def begin(self, keys: Keys, sizes: Mapping[str, int]) -> dict[str, str]:
        """Begins them, on the coordinator; returns what names them, by file. If it fails, none is left."""
        ...

    def join(self, keys: Keys, sizes: Mapping[str, int], uploads: Mapping[str, str]) -> None:
        """Takes part in what the coordinator began."""
        ...

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Uploads a range of a file; from any thread, several at once."""
        ...

    def end(self, name: str) -> None:
        """Makes what this rank wrote of a file durable."""
        ...

    def receipt(self) -> dict[str, Any]:
        """Returns what `publish` has to know of this rank, in JSON types."""
        ...

    def publish(self, name: str, receipts: Sequence[Mapping[str, Any]]) -> None:
        """Makes a file appear under its name, once all ranks have uploaded it."""
        ...

    def give_up(self, name: str, uploads: Mapping[str, str]) -> None:
        """Ends uploads to the checkpoint of that name, which will not be finished."""
        ...

    def give_up_old(self, age_s: float) -> list[str]:
        """Ends uploads next to the checkpoint that are that old and have no owner; returns their URLs."""
        ...

    def close(self) -> None:
        """Releases connections."""
        ...
