"""Reports of loads, saves and verifications: bytes, seconds, and the reasons of decisions.

Printed, a report over all ranks is a table.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from fastload.base.registry import find

_BUSY = 0.8  # of all cores

R = TypeVar("R", bound="_RankReport")


def _values_of(report: object) -> dict[str, Any]:
    """Returns the fields and the properties of a report."""
    kind = type(report)
    names = [name for name in dir(kind) if isinstance(getattr(kind, name), property)]
    return {**vars(report), **{name: getattr(report, name) for name in names}}


class Report:
    """Base class of the reports over all ranks."""

    ranks: Sequence[Any]

    def __str__(self) -> str:
        table = find("reports", "table")
        text: str = table.load()(self) if table is not None else repr(self)
        return text

    @property
    def total_s(self) -> float:
        """Seconds of the slowest rank."""
        return max((rank.total_s for rank in self.ranks), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns all values in JSON types, with the totals over all ranks."""
        values = _values_of(self)
        del values["ranks"]
        return {**values, "ranks": [_values_of(rank) for rank in self.ranks]}


class ReadReport(Report):
    """Base class of the reports on reading a checkpoint."""

    def num_bytes(self) -> int:
        """Returns the bytes of what is read, each counted once."""
        raise NotImplementedError

    @property
    def read_amplification(self) -> float:
        """Bytes read over bytes wanted; 1.0 is the minimum without other sources."""
        return self.bytes_read / self.num_bytes() if self.num_bytes() else 1.0

    @property
    def bytes_read(self) -> int:
        """Data bytes read from storage, over all ranks."""
        return sum(rank.bytes_read for rank in self.ranks)

    @property
    def bytes_supplied(self) -> int:
        """Data bytes from the `sources` of the options in place of storage, over all ranks."""
        return sum(rank.bytes_supplied for rank in self.ranks)

    @property
    def bytes_verified(self) -> int:
        """Data bytes checked against checksums, or hashed, over all ranks; each copy of a host counts."""
        return sum(rank.bytes_verified for rank in self.ranks)


class _RankReport:
    """Base class of the reports of one rank, which the ranks exchange in a compact form."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def pack(self) -> list[Any]:
        """Returns its values but for the rank, in order; seconds with four digits."""
        values = [value for name, value in vars(self).items() if name != "rank"]
        return [float(f"{value:.4g}") if isinstance(value, float) else value for value in values]

    @classmethod
    def unpack(cls: type[R], rank: int, values: Sequence[Any]) -> R:
        """Returns the report that a rank has packed."""
        report = cls.__new__(cls)  # ten times as fast as __init__ of a frozen dataclass
        vars(report).update(zip(cls.__dataclass_fields__, (rank, *values), strict=True))
        return report


@dataclass(frozen=True, kw_only=True)
class RankReport(_RankReport):
    """The report of one rank.

    Attributes:
        rank: Rank in the group.
        host: Name of its host.
        reader: Whether it read data from storage.
        note: Why it could not read; else empty.
        bytes_read: Data bytes it read from storage.
        direct_bytes_read: Data bytes it read without the page cache (O_DIRECT).
        bytes_verified: Data bytes it checked against the commit record; 0 for checkpoints without one.
        bytes_supplied: Data bytes that came from `LoadOptions.sources` in place of storage.
        problems: Of these sources, which have not delivered and why, separated by semicolons; else empty.
        bytes_patched: Bytes of its tensors that held a base of a delta: it read their changes only.
        header_bytes_read: Bytes of headers and indexes it read.
        bytes_received: Data bytes it received from other ranks.
        bytes_in: Bytes it received from ranks that share no memory with it, for itself and for other ranks of
            its host. 0 with NCCL, which does not count them.
        read_s: Seconds in which at least one read was under way.
        num_reads: Number of its reads, without retries.
        reads_in_flight: Reads under way at once, on average over `read_s`.
        first_byte_s: Seconds from a request to its first byte, on average; 0 where storage does not tell.
        exchange_s: Seconds in which at least one exchange was under way.
        place_s: Seconds spent moving bytes from buffers into tensors.
        cpu_s: Seconds of CPU time of its process.
        total_s: Seconds from the beginning of the load to the last tensor in place.
        peak_staging_bytes: Bytes of its staging buffers.
        retries: Attempts at reads beyond the first, including those after a wrong checksum.
    """

    rank: int
    host: str
    reader: bool
    note: str = ""
    bytes_read: int = 0
    direct_bytes_read: int = 0
    bytes_verified: int = 0
    bytes_supplied: int = 0
    problems: str = ""
    bytes_patched: int = 0
    header_bytes_read: int = 0
    bytes_received: int = 0
    bytes_in: int = 0
    read_s: float = 0.0
    num_reads: int = 0
    reads_in_flight: float = 0.0
    first_byte_s: float = 0.0
    exchange_s: float = 0.0
    place_s: float = 0.0
    cpu_s: float = 0.0
    total_s: float = 0.0
    peak_staging_bytes: int = 0
    retries: int = 0

    @property
    def exposed_s(self) -> float:
        """Seconds of `total_s` without a read under way."""
        return max(0.0, self.total_s - self.read_s)

    @property
    def overlapped_s(self) -> float:
        """Seconds of work that overlapped other work: read + exchange + place - total, at least 0."""
        return max(0.0, self.read_s + self.exchange_s + self.place_s - self.total_s)


@dataclass(frozen=True, kw_only=True)
class LoadReport(ReadReport):
    """The report of a load over all ranks; the same on every rank.

    Attributes:
        url: The checkpoint.
        strategy: The strategy: ``allgather``, ``broadcast`` or ``direct``.
        why: Why that strategy.
        transport: The transport of bytes between ranks.
        why_transport: Why that transport.
        bytes_wanted: Bytes of the requested tensors, each counted once.
        num_tensors: Number of requested tensors.
        chunk_bytes: Unit of reading and of exchange.
        num_rounds: Rounds of exchange.
        depth: Rounds in flight at once.
        left_out: Values that were wanted and not loaded: `PerRank` values of another number of ranks (see
            `LoadOptions.per_rank_mismatch`), and, with ``strict=False``, values that fastload cannot load.
        source: ``storage``, or the name of the tier that a `CheckpointManager` restored it from, such as
            ``memory``.
        source_why: Why a manager with a tier used this source.
        ranks: One entry per rank.
    """

    url: str
    strategy: str
    why: str
    transport: str
    why_transport: str
    bytes_wanted: int
    num_tensors: int
    chunk_bytes: int
    num_rounds: int
    depth: int
    left_out: tuple[str, ...] = ()
    source: str = "storage"
    source_why: str = ""
    ranks: Sequence[RankReport] = field(default_factory=tuple)

    def num_bytes(self) -> int:
        """Returns `bytes_wanted`."""
        return self.bytes_wanted

    @property
    def limit(self) -> str:
        """What the load has waited for most of the time: ``storage``, ``network`` or ``CPU``."""
        hosts = {rank.host for rank in self.ranks}
        cores_s = (os.cpu_count() or 1) * self.total_s * len(hosts)
        if sum(rank.cpu_s for rank in self.ranks) > _BUSY * cores_s:
            return "CPU"
        longest = {
            "storage": max(rank.read_s for rank in self.ranks),
            "network": max(rank.exchange_s for rank in self.ranks) if self.transport != "none" else 0.0,
            "CPU": max(rank.place_s for rank in self.ranks),
        }
        return max(longest, key=lambda name: longest[name])


@dataclass(frozen=True, kw_only=True)
class VerifyReport(ReadReport):
    """The report of reading a complete checkpoint, to verify or to seal it; the same on every rank.

    Attributes:
        url: The checkpoint.
        num_files: Number of files.
        num_blocks: Number of checksum blocks; of one copy, if hosts have their own disks. 0 if the files were
            compared with the SHA-256 of the Hugging Face hub.
        nbytes: Bytes of its tensors.
        outcome: ``intact``, or ``sealed`` by `fastload.seal`, which computes the checksums.
        ranks: One entry per rank.
    """

    url: str
    num_files: int
    num_blocks: int
    nbytes: int
    outcome: str = "intact"
    ranks: Sequence[RankReport] = field(default_factory=tuple)

    def num_bytes(self) -> int:
        """Returns `nbytes`."""
        return self.nbytes


@dataclass(frozen=True, kw_only=True)
class SaveRankReport(_RankReport):
    """The report of one rank on a save.

    Attributes:
        rank: Rank in the group.
        host: Name of its host.
        bytes_written: Bytes of files that it wrote.
        bytes_sent: Bytes of its shards that other ranks wrote or hashed.
        stall_s: Seconds that the caller was blocked: until the end of the snapshot, or of the save. Of a
            `CheckpointManager` that is in `save`, so it includes the wait for earlier saves.
        snapshot_s: Seconds copying from the state.
        snapshot_wait_s: Seconds of `stall_s` after the call, with ``snapshot="overlap"``: steps that waited.
        waited_s: Seconds that its copy waited, in the background, until earlier saves were written.
        write_s: Seconds with at least one write under way.
        flush_s: Seconds from the last write until its bytes were durable.
        commit_s: Seconds from then until the checkpoint existed: waiting for other ranks, and publishing.
        total_s: Seconds from the call until the checkpoint existed.
        peak_staging_bytes: Peak of the host memory used for it.
    """

    rank: int
    host: str
    bytes_written: int
    bytes_sent: int = 0
    stall_s: float
    snapshot_s: float
    snapshot_wait_s: float = 0.0
    waited_s: float = 0.0
    write_s: float
    flush_s: float
    commit_s: float
    total_s: float
    peak_staging_bytes: int


@dataclass(frozen=True, kw_only=True)
class SaveReport(Report):
    """The report of a save over all ranks; the same on every rank.

    Attributes:
        url: The checkpoint.
        nbytes: Bytes of its files, without index and record.
        num_tensors: Number of tensors.
        num_files: Number of safetensors files.
        block_bytes: Length of a checksum block.
        num_writers: Number of ranks that wrote; of each copy, if hosts wrote their own copies.
        num_copies: Number of copies: 1, or one for each host.
        base: URL of the base of a delta; empty for a complete checkpoint.
        why_complete: Why it is complete, if a delta was wanted.
        came_instead_of: URLs of earlier saves that were skipped, since this one was newer when storage was
            free; see `CheckpointManager`.
        tier: ``storage``, or the name of the tier that a `CheckpointManager` saved it to, such as ``memory``.
            Then `url` is where storage would have it.
        step: The step, of a save by a `CheckpointManager`; else None.
        ranks: One entry per rank.
    """

    url: str
    nbytes: int
    num_tensors: int
    num_files: int
    block_bytes: int
    num_writers: int
    num_copies: int
    base: str = ""
    why_complete: str = ""
    came_instead_of: tuple[str, ...] = ()
    tier: str = "storage"
    step: int | None = None
    ranks: Sequence[SaveRankReport] = field(default_factory=tuple)

    @property
    def bytes_written(self) -> int:
        """Bytes of safetensors files written, over all ranks."""
        return sum(rank.bytes_written for rank in self.ranks)

    @property
    def waited_s(self) -> float:
        """Seconds until earlier saves were written on all ranks."""
        return max((rank.waited_s for rank in self.ranks), default=0.0)

    @property
    def stall_s(self) -> float:
        """Seconds that the slowest rank's caller waited."""
        return max((rank.stall_s for rank in self.ranks), default=0.0)

    @property
    def background_s(self) -> float:
        """Seconds of the save after the callers continued, without the wait for earlier saves."""
        return max(0.0, self.total_s - self.stall_s - self.waited_s)
