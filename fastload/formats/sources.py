"""Sources: other places than its storage that have the bytes of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fastload.formats.manifest import Manifest
    from fastload.storage import CheckpointReader


class ByteSource(ABC):
    """A place that may have the bytes of a checkpoint; an entry of `LoadOptions.sources`.

    A package registers one as an entry point of the group ``fastload.sources``: a function that returns it,
    given a text. That is then an option ``--NAME`` of ``fastload load`` and ``fastload stage``, and the
    environment variable ``FASTLOAD_NAME``.
    """

    @abstractmethod
    def connect(self, origin: CheckpointReader, manifest: Manifest, *, is_base: bool) -> CheckpointReader:
        """Returns a reader of a checkpoint, which reads from its storage what the source has not. No request.

        Args:
            origin: Reads from the storage of the checkpoint.
            manifest: The checkpoint as stored; the bytes that the reader returns have its checksums.
            is_base: Whether it is the base of a delta that is loaded.

        Raises:
            FastloadError: The checkpoint is not the one that the source is for.
        """


class CopyInProgress(Protocol):
    """A copy that `fastload.stage` makes on this host; any thread may ask it what is there."""

    @property
    def manifest(self) -> Manifest:
        """The checkpoint that is copied."""

    @property
    def path(self) -> str:
        """The path that it will have."""

    @property
    def folder(self) -> str:
        """The directory that it is in until it is complete."""

    @property
    def names(self) -> Mapping[str, str]:
        """The files: the name in the checkpoint, empty for a single file → the name in the directory."""

    def has(self, name: str, begin: int, end: int) -> bool:
        """Whether a byte range of a file, by its name in the checkpoint, is there and verified."""

    def ranges(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Returns all byte ranges that are there and verified: disjoint (begin, end), ascending."""
