"""Storage systems behind one protocol."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from typing import Any

from fastload.storage.base import FileStat, Storage, take
from fastload.storage.local import LocalStorage
from fastload.storage.remote import RemoteStorage
from fastload.storage.retry import PatientStorage

__all__ = ["FileStat", "PatientStorage", "Storage", "open_storage", "take"]

_log = logging.getLogger(__name__)

_OBJECT_STORES = frozenset("s3 s3a gs az adl azure abfs abfss http https".split())


def open_storage(
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    *,
    io: str = "auto",
    attempt_s: float = 30.0,
) -> Storage:
    """Opens read access to what is at a path: a local one, or a URL of a scheme that obstore or fsspec knows.

    Nothing is asked of the storage yet.

    Args:
        path: Local path or URL.
        options: Passed on to obstore or fsspec; they add to what the environment says.
        io: How to read local files: ``auto``, ``buffered`` or ``direct``.
        attempt_s: Longest time in seconds for one request to an object store.

    Raises:
        OptionError: The URL's scheme is unknown, or what it needs is not installed.
    """
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if not separator or scheme == "file":
        return LocalStorage(rest if separator else text, io)
    if scheme in _OBJECT_STORES:
        if importlib.util.find_spec("obstore") is not None:
            from fastload.storage.objects import ObjectStorage

            return ObjectStorage(text, options or {}, attempt_s)
        _log.warning("reading %s:// through fsspec, the slower way: pip install 'fastload[remote]'", scheme)
    return RemoteStorage(text, options or {})
