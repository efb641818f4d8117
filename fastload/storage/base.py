"""The storage seam: bytes in and out of files, never tensors."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["CHANGED", "ByteCounter", "FileStat", "Folder", "Storage", "take"]

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
