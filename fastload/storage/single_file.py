"""Single local files: one that several ranks write and then publish, and small ones such as traces."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from fastload.errors import CheckpointExists, StorageError
from fastload.storage.folders import os_errors, write_all


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


def replace(path: str, content: bytes) -> None:
    """Writes all of a small file, which may be there, in one step.

    Raises:
        CheckpointExists: There is something else at `path`.
        StorageError: It cannot be written.
    """
    pending = make_pending(path, overwrite=True)
    try:
        with opened(pending) as descriptor:
            write_all(descriptor, 0, content)
        publish(pending, path, overwrite=True)
    finally:
        remove(pending)


def remove(pending: str) -> None:
    """Removes what will not be published."""
    with suppress(OSError):
        os.remove(pending)


def _require_free(path: str, *, overwrite: bool) -> None:
    if os.path.lexists(path) and not (overwrite and os.path.isfile(path)):
        raise CheckpointExists(f"{path} exists" + (", and is no file" if overwrite else ""))


def require_writable(path: str) -> None:
    """Finds out whether a file of a user's own could be written, and leaves everything as it is.

    Raises:
        StorageError: It could not.
    """
    try:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except FileNotFoundError:
            # Under no name: another process may make a file of this one meanwhile.
            tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
    except OSError as error:
        raise StorageError(f"it cannot be written: {error.strerror}", url=path) from error


def write_text(path: str, pieces: Iterable[str]) -> None:
    """Writes a small file of a user's own: text, piece by piece.

    Raises:
        StorageError: It cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(pieces)
    except OSError as error:
        raise StorageError(str(error.strerror), url=path) from error
