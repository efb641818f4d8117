"""The report of `fastload.stage`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastload.report import ReadReport


@dataclass(frozen=True, kw_only=True)
class StageRankReport:
    """The report of one rank on staging a checkpoint.

    Attributes:
        rank: Rank in the group.
        host: Name of its host.
        leads: Whether it makes the copy of its host; the other ranks of the host wait.
        note: Why it could not read; else empty.
        bytes_read: Bytes it read from the source.
        bytes_supplied: Bytes that came from `StageOptions.sources` in place of the source.
        problems: Of these, which have not delivered and why, separated by semicolons; else empty.
        bytes_fed: Bytes it read from its host's copy for hosts without one.
        bytes_received: Bytes it received from other hosts.
        bytes_written: Bytes it wrote to its host's copy.
        bytes_kept: Bytes of earlier attempts.
        bytes_verified: Bytes it compared with the commit record on arrival.
        read_s: Seconds with at least one read under way.
        exchange_s: Seconds with at least one exchange under way.
        write_s: Seconds with at least one write under way.
        flush_s: Seconds from the last write until its bytes were durable.
        total_s: Seconds from the call until its host had the copy.
        peak_staging_bytes: Bytes of its staging buffers.
        retries: Attempts at reads beyond the first.
    """

    rank: int
    host: str
    leads: bool
    note: str = ""
    bytes_read: int = 0
    bytes_supplied: int = 0
    problems: str = ""
    bytes_fed: int = 0
    bytes_received: int = 0
    bytes_written: int = 0
    bytes_kept: int = 0
    bytes_verified: int = 0
    read_s: float = 0.0
    exchange_s: float = 0.0
    write_s: float = 0.0
    flush_s: float = 0.0
    total_s: float = 0.0
    peak_staging_bytes: int = 0
    retries: int = 0


@dataclass(frozen=True, kw_only=True)
class StageReport(ReadReport):
    """The report of staging a checkpoint over all ranks; the same on every rank.

    Attributes:
        url: The source.
        path: The path of each host's copy, to load. A single file is in the directory that was made.
        nbytes: Bytes of the files.
        num_files: Number of files.
        num_hosts: Number of hosts, each with a copy.
        digest: A digest of all bytes, the same on all hosts.
        ranks: One entry per rank.
    """

    url: str
    path: str
    nbytes: int
    num_files: int
    num_hosts: int
    digest: str
    ranks: Sequence[StageRankReport] = field(default_factory=tuple)

    def num_bytes(self) -> int:
        """Returns `nbytes`."""
        return self.nbytes

    @property
    def bytes_written(self) -> int:
        """Bytes written, over all hosts."""
        return sum(rank.bytes_written for rank in self.ranks)
