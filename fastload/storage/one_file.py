"""One local file that several ranks write: pending under another name until all of it is durable."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fastload.errors import CheckpointExists
from fastload.storage.local_files import os_errors

__all__ = ["make_pending", "opened", "publish", "remove", "write_at"]


def make_pending(path: str, *, overwrite: bool) -> str:
    """Makes the file that is to be at `path`, under another name; returns that.

    Raises:
        CheckpointExists: There is something at `path`, and it is not to be replaced, or is no file.
        StorageError: It cannot be made.
    """
    _require_free(path, overwrite=overwrite)
    pending = f"{path}.fastload-{secrets.token_hex(4)}"
    with os_errors(pending):
        os.close(os.open(pending, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return pending


@contextmanager
def opened(pending: str) -> Iterator[int]:
    """Gives a descriptor to write with; what was written is durable after that.

    Raises:
        StorageError: It cannot be.
    """
    with os_errors(pending):
        descriptor = os.open(pending, os.O_WRONLY)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_at(descriptor: int, offset: int, data: memoryview | bytes) -> None:
    """Writes all of some bytes."""
    left = memoryview(data)
    while left:
        count = os.pwrite(descriptor, left, offset)
        offset, left = offset + count, left[count:]


def publish(pending: str, path: str, *, overwrite: bool) -> None:
    """Gives the file its name, in one step.

    Raises:
        CheckpointExists: There is something by now.
        StorageError: It cannot be.
    """
    with os_errors(path):
        if overwrite:
            _require_free(path, overwrite=True)
            os.replace(pending, path)
        else:
            try:
                os.link(pending, path)  # which, unlike a rename, replaces nothing
            except FileExistsError:
                raise CheckpointExists(f"{path} exists") from None
            os.remove(pending)
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove(pending: str) -> None:
    """Removes what will not be published."""
    with suppress(OSError):
        os.remove(pending)


def _require_free(path: str, *, overwrite: bool) -> None:
    if os.path.lexists(path) and not (overwrite and os.path.isfile(path)):
        raise CheckpointExists(f"{path} exists" + (", and is no file" if overwrite else ""))
