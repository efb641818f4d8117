"""Storage systems behind one protocol."""

from __future__ import annotations

import os

from fastload.storage.base import FileStat, Storage
from fastload.storage.local import LocalStorage
from fastload.storage.remote import RemoteStorage

__all__ = ["FileStat", "Storage", "open_storage"]


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """Opens read access to what is at a path: a local one, or a URL of any scheme that fsspec knows.

    Nothing is asked of the storage yet.

    Raises:
        OptionError: The URL's scheme is unknown, or what it needs is not installed.
    """
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStorage(text)
    if scheme == "file":
        return LocalStorage(rest)
    return RemoteStorage(text)
