"""What the files of a checkpoint are called: storage knows none of it, and is told by whoever opens it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Names"]


@dataclass(frozen=True)
class Names:
    """The names that some storages and targets have to know.

    Attributes:
        record: The commit record, the last file of a checkpoint to be written: without it there is none.
        marker: On object stores, stands beside the files while they are published; without a record next
            to it, what is there is the rest of a save that has not ended, or never will.
        receipt: What a copy on a host holds next to its files; stands for the record if that has none.
        likely: What to look for, in this order, where nothing can be listed; one of them is there if any
            checkpoint is. The first may be refused, and counts as missing then.
        file_endings: How the names of files end that a save writes tensors to.
        single_endings: How those end that may be a checkpoint by themselves.
        part_endings: How the names of all files end that may be read as a part of a checkpoint.
        own: Returns which of the names of all files at a place are those of a checkpoint of fastload's,
            given the contents of its record and its receipt, as far as there are any.
        others: Names of files that tell a checkpoint of another program, where one may be replaced; `own`
            returns its files where there is neither record nor receipt.
    """

    record: str
    marker: str
    receipt: str
    likely: tuple[str, ...]
    file_endings: tuple[str, ...]
    single_endings: tuple[str, ...]
    part_endings: tuple[str, ...]
    own: Callable[[Iterable[str], Sequence[bytes]], set[str]]
    others: tuple[str, ...] = ()
