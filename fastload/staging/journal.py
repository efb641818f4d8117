"""The journal of a copy that is being made: which blocks are there, for the next try to go on from."""

from __future__ import annotations

from fastload.formats.record import CHECKSUM_BYTES

JOURNAL_ENTRY_BYTES = 8 + CHECKSUM_BYTES


def journal_entry(number: int, digest: bytes) -> bytes:
    """Returns what the journal says of a block that is there: its number and its checksum."""
    return number.to_bytes(8, "big") + digest


def parse_journal(journal: bytes, most: int) -> dict[int, bytes]:
    """Returns the checksum of each block that a journal says is there; a torn last entry is passed over."""
    noted = {}
    for begin in range(0, len(journal) - JOURNAL_ENTRY_BYTES + 1, JOURNAL_ENTRY_BYTES):
        number = int.from_bytes(journal[begin : begin + 8], "big")
        if number < most:
            noted[number] = journal[begin + 8 : begin + JOURNAL_ENTRY_BYTES]
    return noted
