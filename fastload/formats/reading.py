"""Small reads from storage, for all formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from fastload.base.threads import in_threads
from fastload.errors import IncompleteCheckpoint, ManifestError
from fastload.formats.untrusted import show
from fastload.storage.base import HEAD_BYTES, FileStat, Storage, is_page

ReadRange = Callable[[int, int], bytes]
"""Returns the bytes at an offset, given offset and length."""

_FEW, _MANY = 8, 100


def reads_at_once(storage: Storage) -> int:
    """Returns the number of small requests at once: many if each takes a round trip."""
    return _FEW if storage.probes else _MANY


def do_at_once(storage: Storage, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Does tasks that read, all at once if each request takes a round trip; returns the results."""
    if storage.probes or len(tasks) == 1:
        return [task() for task in tasks]
    return in_threads(lambda task: task(), tasks, len(tasks))


def read_bytes(storage: Storage, name: str, offset: int, nbytes: int) -> bytes:
    """Reads a range of a file."""
    if not nbytes:
        return b""
    buffer = bytearray(nbytes)
    storage.read_into(name, offset, [memoryview(buffer)])
    return bytes(buffer)


_LFS = b"version https://git-lfs"
_TAR_BYTES, _TAR_SIGN = 512, (257, 5, b"ustar")


def what_instead(storage: Storage, name: str, nbytes: int) -> str:
    """Returns what a file is that is no part of a checkpoint, and what to do; empty if that is unknown."""
    if instead := _what_begins(read_bytes(storage, name, 0, min(nbytes, HEAD_BYTES))):
        return instead
    if nbytes > _TAR_BYTES and read_bytes(storage, name, *_TAR_SIGN[:2]) == _TAR_SIGN[2]:
        return "a tar archive, which fastload does not read"
    return ""


def _what_begins(head: bytes) -> str:
    if head.startswith(_LFS):
        return "a pointer of git-lfs in place of the file: run `git lfs pull` there, or download the file"
    return "a page of HTML or XML in place of the file" if is_page(head) else ""


def stat_all(storage: Storage, names: Sequence[str]) -> dict[str, FileStat]:
    """Returns size and version of files, by name.

    Raises:
        IncompleteCheckpoint: Some are missing.
    """
    stats = dict(zip(names, in_threads(storage.stat, names, reads_at_once(storage)), strict=True))
    missing = [name for name, stat in stats.items() if stat is None]
    if missing:
        count = f"{len(missing)} of {len(names)}"
        raise IncompleteCheckpoint(f"{storage.url}: {count} files missing: {show(missing)}")
    return {name: stat for name, stat in stats.items() if stat is not None}


def read_limited(storage: Storage, name: str, what: str, max_bytes: int) -> bytes:
    """Reads a complete file.

    Args:
        storage: The storage.
        name: The file.
        what: Its kind, such as ``index``, for messages.
        max_bytes: Most bytes that such a file may have.

    Raises:
        IncompleteCheckpoint: It is missing.
        ManifestError: It is too long, or a file of another kind.
    """
    nbytes = stat_all(storage, [name])[name].nbytes
    if nbytes > max_bytes:
        raise ManifestError(
            f"{storage.label(name)}: {what} of {nbytes} bytes is over the limit of {max_bytes}"
        )
    data = read_bytes(storage, name, 0, nbytes)
    if instead := _what_begins(data[:HEAD_BYTES]):
        raise ManifestError(f"{storage.label(name)}: {instead}")
    return data


def digest_of_file(storage: Storage, name: str, max_bytes: int) -> str:
    """Returns the xxh3-128 of a file as this rank sees it; empty if it is missing, or too long."""
    about = storage.stat(name)
    if about is None or about.nbytes > max_bytes:
        return ""
    return xxhash.xxh3_128_hexdigest(read_bytes(storage, name, 0, about.nbytes))
