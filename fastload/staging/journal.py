"""The journal of an incomplete copy: the blocks that it has, from which the next attempt resumes."""

from __future__ import annotations

from fastload.formats.record import CHECKSUM_BYTES

JOURNAL_ENTRY_BYTES = 8 + CHECKSUM_BYTES


def journal_entry(number: int, digest: bytes) -> bytes:
    """Returns the entry of a block: its number and its checksum."""
    return number.to_bytes(8, "big") + digest


def parse_journal(journal: bytes, most: int) -> dict[int, bytes]:
    """Returns the checksums of the blocks in a journal. Ignores a torn last entry."""
    noted = {}
    for begin in range(0, len(journal) - JOURNAL_ENTRY_BYTES + 1, JOURNAL_ENTRY_BYTES):
        number = int.from_bytes(journal[begin : begin + 8], "big")
        if number < most:
            noted[number] = journal[begin + 8 : begin + JOURNAL_ENTRY_BYTES]
    return noted
