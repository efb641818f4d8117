"""Files of a user's own, such as traces: small, on this host, and no part of a checkpoint."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable

from fastload.errors import StorageError

__all__ = ["require_writable", "write_text"]


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
