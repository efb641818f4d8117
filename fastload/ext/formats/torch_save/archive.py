"""The directories of zip archives, as torch.save writes them.

A directory is checked against itself and the size of the archive: records do not overlap and are within it,
each name is unique, nothing is encrypted. So no record costs more than the bytes of the archive.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from fastload.base.threads import in_threads
from fastload.errors import ManifestError
from fastload.formats.reading import ReadRange
from fastload.formats.untrusted import show

END = struct.Struct("<4s4H2LH")
END_64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR_64 = struct.Struct("<4sLQL")
ENTRY = struct.Struct("<4s6H3L5H2L")
LOCAL = struct.Struct("<4s5H3L2H")
PADDING = struct.Struct("<2sH")
_FULL_2, FULL_4 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED, _DESCRIBED_AFTER = 0x2041, 0x8  # flags
TAIL_BYTES = 64 << 10
"""Bytes that are read at first, from the end of an archive."""
_MAX_COMMENT_BYTES = 0xFFFF
_MAX_DIRECTORY_BYTES = 1 << 30
ALIGNMENT = 64  # of the data in what torch writes


class ZipRecord(NamedTuple):
    """The place of a record, in bytes from the beginning of the archive.

    Attributes:
        name: Its name.
        header: Offset of its local header.
        offset: Offset of its data.
        nbytes: Stored length of its data.
        head: The bytes expected right before its data; empty if they were read.
    """

    name: str
    header: int
    offset: int
    nbytes: int
    head: bytes = b""


class ZipDirectory(NamedTuple):
    """The records of an archive.

    Attributes:
        records: By name, in the order of their bytes.
        text: The bytes of the directory.
        compressed: Names of the compressed records.
    """

    records: dict[str, ZipRecord]
    text: bytes
    compressed: tuple[str, ...]


class _Entry(NamedTuple):
    name: str
    header: int
    nbytes: int
    is_described_after: bool
    is_compressed: bool


def read_directory(
    read: ReadRange, nbytes: int, where: str, *, exact: bool, num_reads: int = 1
) -> ZipDirectory:
    """Reads the directory of an archive.

    Args:
        read: Reads from the archive.
        nbytes: Its length.
        where: The archive, for messages.
        exact: Whether to read the header of each record; else most are assumed to be as torch writes them.
        num_reads: Most reads at once.

    Raises:
        ManifestError: It is no archive, or not as torch.save writes it.
    """
    if nbytes < END.size:
        raise ManifestError(f"{where}: {nbytes} bytes are too few for a zip archive")
    begin = max(0, nbytes - TAIL_BYTES)
    tail = read(begin, nbytes - begin)

    def read_new(offset: int, length: int) -> bytes:
        return tail[offset - begin :][:length] if offset >= begin else read(offset, length)

    try:
        start, length, count = _find(read_new, tail, begin)
        if length > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {length} bytes")
        text = read_new(start, length)
        entries = sorted(_entries(text, count), key=lambda entry: entry.header)
        compressed = tuple(entry.name for entry in entries if entry.is_compressed)
        return ZipDirectory(_locate(read_new, entries, start, num_reads, exact=exact), text, compressed)
    except struct.error:
        raise ManifestError(f"{where}: the directory of the zip archive is cut off") from None
    except ValueError as error:
        if isinstance(error, ManifestError):
            raise
        raise ManifestError(f"{where}: not a zip archive as torch.save writes it: {error}") from None


def _find(read: ReadRange, tail: bytes, begin: int) -> tuple[int, int, int]:
    """Returns begin, length and number of entries of the directory."""
    at = len(tail) - END.size
    while at + END.size + _comment_length(tail, at) != len(tail):
        at = tail.rfind(b"PK\5\6", 0, at + 3)
        if at < max(0, len(tail) - END.size - _MAX_COMMENT_BYTES):
            raise ValueError("it has no end record: perhaps it is cut off")
    _, disk, first_disk, here, count, length, start, _ = END.unpack_from(tail, at)
    end = begin + at
    if start + length != end or _FULL_2 in (here, count) or FULL_4 in (length, start):
        end, disk, first_disk, here, count, length, start = _find_64(read, end)
    if disk or first_disk or here != count:
        raise ValueError("it is in several parts")
    if start + length != end:
        raise ValueError(f"its directory is not where the end record says: {length} bytes at {start}")
    return start, length, count


def _comment_length(tail: bytes, at: int) -> int:
    """Returns the length of the comment after an end record; -1 without an end record."""
    return int(END.unpack_from(tail, at)[-1]) if tail.startswith(b"PK\5\6", at) else -1


def _find_64(read: ReadRange, end: int) -> tuple[int, ...]:
    at = end - LOCATOR_64.size - END_64.size
    if at < 0:
        raise ValueError("its directory is not where the end record says")
    both = read(at, end - at)
    sign, _, _, _, disk, first_disk, here, count, length, start = END_64.unpack_from(both)
    locator, first, place, _ = LOCATOR_64.unpack_from(both, END_64.size)
    if sign != b"PK\6\6" or locator != b"PK\6\7" or first or place != at:
        raise ValueError("its directory is not where the end record says")
    return at, disk, first_disk, here, count, length, start


def _entries(text: bytes, count: int) -> Iterator[_Entry]:
    at, names = 0, set[str]()
    while at < len(text):
        sign, _, _, flags, method, _, _, _, stored, nbytes, *lengths, disk, _, _, header = ENTRY.unpack_from(
            text, at
        )
        at += ENTRY.size
        end = at + sum(lengths)
        if sign != b"PK\1\2" or end > len(text):
            raise ValueError("an entry of its directory is malformed")
        name = text[at : at + lengths[0]].decode()
        extra = text[at + lengths[0] : at + lengths[0] + lengths[1]]
        if flags & _ENCRYPTED:
            raise ValueError(f"{show(name)} is encrypted")
        nbytes, stored, header = _wide(extra, nbytes, stored, header)
        if (stored != nbytes and not method) or disk:
            raise ValueError(f"{show(name)} takes {stored} bytes for {nbytes}")
        if name in names:
            raise ValueError(f"{show(name)} is in it twice")
        names.add(name)
        yield _Entry(name, header, stored, bool(flags & _DESCRIBED_AFTER), bool(method))
        at = end
    if len(names) & _FULL_2 != count & _FULL_2:
        raise ValueError(f"it has {len(names)} records where {count} are announced")


def _wide(extra: bytes, *fields: int) -> tuple[int, ...]:
    """Returns 32-bit fields; full ones are replaced by those of the 64-bit extra field."""
    if FULL_4 not in fields:
        return fields
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, at)
        if tag == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            return tuple(next(wide, field) if field == FULL_4 else field for field in fields)
        at += 4 + length
    raise ValueError("sizes of 64 bits are missing in its directory")


def _locate(
    read: ReadRange, entries: list[_Entry], end: int, num_reads: int, *, exact: bool
) -> dict[str, ZipRecord]:
    """Finds the data of each record from the record after it, or else from its header."""
    records, to_read = {}, []
    for entry, after in zip(entries, [*(entry.header for entry in entries[1:]), end], strict=False):
        least = entry.header + LOCAL.size + len(entry.name.encode())
        if least + entry.nbytes > after:
            raise ValueError(f"{show(entry.name)} overlaps what is after it")
        is_wide = max(entry.nbytes, entry.header) >= FULL_4
        described = (24 if is_wide else 16) if entry.is_described_after else 0
        offset = after - described - entry.nbytes
        aligned = offset % ALIGNMENT == 0 and least <= offset < least + 2 * ALIGNMENT
        head = _head(entry, offset - least) if aligned and not exact else b""
        if not head:
            to_read.append((entry, least, after))
        records[entry.name] = ZipRecord(entry.name, entry.header, offset, entry.nbytes, head)

    def find(one: tuple[_Entry, int, int]) -> int:
        return _data_after(read, *one[:2])

    offsets = in_threads(find, to_read, num_reads) if num_reads > 1 else [find(one) for one in to_read]
    for (entry, _, after), offset in zip(to_read, offsets, strict=True):
        if offset + entry.nbytes > after:
            raise ValueError(f"{show(entry.name)} overlaps what is after it")
        records[entry.name] = records[entry.name]._replace(offset=offset)
    return records


def _head(entry: _Entry, nbytes: int) -> bytes:
    """Returns the bytes that torch writes between the header of a record and its data: name, sizes, padding.

    Args:
        entry: The record in the directory.
        nbytes: Number of bytes from the beginning of the name to the data, without the name.

    Returns:
        The bytes; empty if torch writes nothing of this length.
    """
    wide = [entry.nbytes, 0] if entry.nbytes >= FULL_4 else []  # the other length comes after the data
    wide += [entry.header] if entry.header >= FULL_4 else []
    sizes = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    filling = nbytes - len(sizes) - 4
    if filling < 0:
        return b""
    return entry.name.encode() + sizes + PADDING.pack(b"FB", filling) + b"Z" * filling


def _data_after(read: ReadRange, entry: _Entry, least: int) -> int:
    name = entry.name.encode()
    header = read(entry.header, LOCAL.size + len(name))
    sign, *_, name_length, extra_length = LOCAL.unpack_from(header)
    if sign != b"PK\3\4" or name_length != len(name) or header[LOCAL.size :] != name:
        raise ValueError(f"{show(entry.name)} is not where the directory says")
    return least + int(extra_length)
