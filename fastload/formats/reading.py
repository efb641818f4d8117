"""Small reads from storage, for all formats."""

from __future__ import annotations

from collections.abc import Sequence

from fastload.base.threads import in_threads
from fastload.errors import ManifestError
from fastload.formats.untrusted import show
from fastload.storage.base import FileStat, Storage


def url_of(storage: Storage, name: str) -> str:
    """Returns the URL of a file, for messages."""
    return f"{storage.url.rstrip('/')}/{name}" if name else storage.url


def read_bytes(storage: Storage, name: str, offset: int, nbytes: int) -> bytes:
    """Reads a range of a file."""
    buffer = bytearray(nbytes)
    storage.read_into(name, offset, [memoryview(buffer)])
    return bytes(buffer)


def stat_all(storage: Storage, names: Sequence[str]) -> dict[str, FileStat]:
    """Returns size and version of files, by name.

    Raises:
        ManifestError: Some are missing.
    """
    stats = dict(zip(names, in_threads(storage.stat, names), strict=True))
    missing = [name for name, stat in stats.items() if stat is None]
    if missing:
        raise ManifestError(f"{storage.url}: {len(missing)} of {len(names)} files missing: {show(missing)}")
    return {name: stat for name, stat in stats.items() if stat is not None}


def read_limited(storage: Storage, name: str, what: str, max_bytes: int) -> bytes:
    """Reads a complete file.

    Args:
        storage: The storage.
        name: The file.
        what: Its kind, such as ``index``, for messages.
        max_bytes: Most bytes that such a file may have.

    Raises:
        ManifestError: It is missing or too long.
    """
    nbytes = stat_all(storage, [name])[name].nbytes
    if nbytes > max_bytes:
        raise ManifestError(
            f"{url_of(storage, name)}: {what} of {nbytes} bytes is over the limit of {max_bytes}"
        )
    return read_bytes(storage, name, 0, nbytes)
