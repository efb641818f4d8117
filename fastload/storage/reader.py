"""Read access to the files of a checkpoint: what a load needs of it, and readers that are made of others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from fastload.errors import StorageError
from fastload.storage.base import FileStat, Folder, Storage

if TYPE_CHECKING:
    from fastload.storage.local import Mapped


class CheckpointReader(Storage):
    """A storage that loads read from: it retries after transient errors, and can be stopped.

    Attributes:
        num_retries: Retries so far.
    """

    @property
    @abstractmethod
    def num_retries(self) -> int: ...

    @property
    def supplied_bytes(self) -> int:
        """Bytes that came from sources in place of the storage; not in `bytes_read`."""
        return 0

    @property
    def problems(self) -> tuple[str, ...]:
        """A line for each part of a source that has not delivered what it was asked for."""
        return ()

    def skip_sources(self, skipped: bool) -> None:
        """Notes whether to read from storage alone from now on, as for a verification of what is there."""

    @abstractmethod
    def agrees_with(self, fresh: Storage) -> bool:
        """Whether another storage, opened just now, returns the same listing and metadata as this one did.

        Files without a version never agree: they may have been replaced.
        """

    @abstractmethod
    def map(self, name: str) -> Mapped | None:
        """Maps a file; None if it is not local, or cannot be mapped."""

    @abstractmethod
    def stop(self) -> None:
        """Ends pauses and refuses new requests, with `Interrupted`."""


StorageT = TypeVar("StorageT", bound=Storage)


class ForwardingReader(CheckpointReader, Generic[StorageT]):
    """A reader made of storages. What a subclass leaves out is that of the first one, or concerns all.

    Args:
        first: Has the listing.
        others: Are counted with it.
    """

    def __init__(self, first: StorageT, *others: StorageT) -> None:
        super().__init__(first.url)
        self._first = first
        self._readers = [first, *others]

    @property
    def shared(self) -> bool:
        return any(reader.shared for reader in self._readers)

    @property
    def probes(self) -> bool:
        return self._first.probes

    @property
    def in_order(self) -> bool:
        return any(reader.in_order for reader in self._readers)

    @property
    def first_byte_s(self) -> float:
        return min((least_s for reader in self._readers if (least_s := reader.first_byte_s)), default=0.0)

    @property
    def bytes_read(self) -> int:
        return sum(reader.bytes_read for reader in self._readers)

    @property
    def direct_bytes_read(self) -> int:
        return sum(reader.direct_bytes_read for reader in self._readers)

    def sha256(self, name: str, version: str) -> str:
        return self._first.sha256(name, version)

    def share_reads(self, shared: bool) -> None:
        for reader in self._readers:
            reader.share_reads(shared)

    def listen(self, note: Callable[[float], object]) -> None:
        for reader in self._readers:
            reader.listen(note)


class LayeredReader(ForwardingReader[CheckpointReader]):
    """The files of one reader, for which a layer also reads others. They are stopped and closed with it."""

    @property
    def num_retries(self) -> int:
        return sum(reader.num_retries for reader in self._readers)

    @property
    def supplied_bytes(self) -> int:
        return sum(reader.supplied_bytes for reader in self._readers)

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(line for reader in self._readers for line in reader.problems)

    def stat(self, name: str) -> FileStat | None:
        return self._first.stat(name)

    def list(self) -> list[str] | None:
        return self._first.list()

    def agrees_with(self, fresh: Storage) -> bool:
        return self._first.agrees_with(fresh)

    def folders(self, prefix: str = "") -> Mapping[str, Folder]:
        return self._first.folders(prefix)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        self._first.read_into(name, offset, buffers, version)

    def read_all(self, name: str, about: FileStat) -> bytes:
        return self._first.read_all(name, about)

    def label(self, name: str) -> str:
        return self._first.label(name)

    def map(self, name: str) -> Mapped | None:
        return self._first.map(name)

    def skip_sources(self, skipped: bool) -> None:
        for reader in self._readers:
            reader.skip_sources(skipped)

    def stop(self) -> None:
        for reader in self._readers:
            reader.stop()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


class FileWithSibling(LayeredReader):
    """A reader whose root may be a single file, with the file next to it as a file below the root.

    Args:
        reader: The reader.
        sibling: The name below the root; next to a file ``NAME`` it is ``NAME.sibling``.
        open_sibling: Opens the file next to it, which may be missing.
    """

    def __init__(
        self, reader: CheckpointReader, sibling: str, open_sibling: Callable[[], CheckpointReader]
    ) -> None:
        super().__init__(reader)
        self.sibling = sibling
        self._open_sibling = open_sibling
        self._opened: CheckpointReader | None = None

    def stat(self, name: str) -> FileStat | None:
        if not self._is_sibling(name):
            return super().stat(name)
        try:
            return self._sibling_reader().stat("")
        except StorageError as error:
            if error.transient or self.probes:
                raise
            return None  # object stores deny access to what does not exist, to those who may not list it

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        reader, name = (self._sibling_reader(), "") if self._is_sibling(name) else (self._first, name)
        reader.read_into(name, offset, buffers, version)

    def label(self, name: str) -> str:
        return f"{self.url}.{name}" if self._is_sibling(name) else super().label(name)

    def _is_sibling(self, name: str) -> bool:
        return name == self.sibling and self.list() is None

    def _sibling_reader(self) -> CheckpointReader:
        if self._opened is None:
            self._opened = self._open_sibling()
            self._readers.append(self._opened)
        return self._opened
