"""The writing seam of storage: one checkpoint that does not exist yet; bytes, never tensors."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from fastload.errors import StorageError

__all__ = [
    "Target",
    "Written",
    "check_written",
    "new_token",
    "pending_name",
    "saved_name",
]

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
        """Makes room for the files, on the coordinator, and removes what dead saves left beside them.

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
        """Removes what dead saves left beside the checkpoint, never what living ones need; returns it."""
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
    """Returns the name of the directory, beside the checkpoint, where one save gathers its files."""
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
