"""Sources: other places than its storage that have the bytes of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

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
