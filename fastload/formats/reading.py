"""Small reads from storage, for all formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeVar

from fastload.base.threads import Workers
from fastload.errors import ManifestError
from fastload.formats.untrusted import show
from fastload.storage.base import FileStat, Storage

_NUM_READERS = 8  # headers read at once; network storage answers each after a round trip

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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


def in_threads(
    function: Callable[[_Item], _Result], items: Sequence[_Item], at_once: int = _NUM_READERS
) -> list[_Result]:
    """Maps items in threads. Raises the first failure in the order of the items, which is deterministic.

    Args:
        function: Called in threads.
        items: Its arguments.
        at_once: Most threads.
    """
    places, results, errors = count(), dict[int, _Result](), dict[int, BaseException]()

    def work() -> None:
        # All items before one that fails have begun, and end.
        while not errors and (place := next(places)) < len(items):
            try:
                results[place] = function(items[place])
            except BaseException as error:
                errors[place] = error

    num_threads = max(1, min(at_once, len(items)))
    workers = Workers(num_threads, "fastload-header")
    try:
        # Not a future for each of perhaps thousands of items.
        for serving in [workers.submit(work) for _ in range(num_threads)]:
            serving.result()
    finally:
        workers.close(wait_s=0.0)  # a read without an answer must not delay the exit
    if errors:
        try:
            raise errors[min(errors)]
        finally:
            errors.clear()  # else error → traceback → frame → error would keep all their memory alive
    return [results[place] for place in range(len(items))]
