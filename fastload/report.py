"""What a load, a save or a verification did: bytes, seconds, and why it went that way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

__all__ = [
    "LoadReport",
    "RankReport",
    "SaveRankReport",
    "SaveReport",
    "StageRankReport",
    "StageReport",
    "VerifyReport",
]

R = TypeVar("R", bound="_RankReport")


class _Report:
    """What all reports over all ranks have."""

    ranks: Sequence[Any]

    @property
    def total_s(self) -> float:
        """Seconds of the slowest rank."""
        return max((rank.total_s for rank in self.ranks), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything in JSON types, the totals over all ranks too."""
        own = {name: value for name, value in vars(self).items() if name != "ranks"}
        kind = type(self)
        totals = {
            name: getattr(self, name) for name in dir(kind) if isinstance(getattr(kind, name), property)
        }
        return {**own, **totals, "ranks": [asdict(rank) for rank in self.ranks]}


class _RankReport:
    """What the reports of a rank have: the ranks tell them each other, and of thousands every byte counts."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    _follows: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}  # what follows from the rest, and how

    def pack(self) -> list[Any]:
        """Returns its values but for the rank, in order; of seconds four digits."""
        values = [value for name, value in vars(self).items() if name not in ("rank", *self._follows)]
        return [float(f"{value:.4g}") if isinstance(value, float) else value for value in values]

    @classmethod
    def unpack(cls: type[R], rank: int, values: Sequence[Any]) -> R:
        """Returns what a rank has packed."""
        report = cls.__new__(cls)  # a frozen one is made one attribute after the other, in ten times as long
        names = [name for name in cls.__dataclass_fields__ if name not in cls._follows]
        vars(report).update(zip(names, (rank, *values), strict=True))
        vars(report).update({name: follow(report) for name, follow in cls._follows.items()})
        return report


@dataclass(frozen=True, kw_only=True)
class RankReport(_RankReport):
    """What one rank did.

    Attributes:
        rank: Rank in the group.
        host: Name of its host.
        reader: Whether it read data from storage.
        note: Why it did not read, where it could not.
        bytes_read: Data bytes it read from storage.
        direct_bytes_read: Those of them that did not go through the page cache (O_DIRECT).
        bytes_verified: Data bytes it checked against the commit record; 0 for checkpoints without one.
        header_bytes_read: Bytes of headers and indexes it read.
        bytes_received: Data bytes it got from the other ranks.
        bytes_in: Bytes that came in to it over the network, from ranks that share no memory with it: for
            itself, and for the ranks of its host. 0 with NCCL, where nobody counts them.
        read_s: Seconds in which at least one read was under way.
        exchange_s: Seconds in which at least one exchange was under way.
        place_s: Seconds spent moving bytes from buffers into tensors.
        exposed_s: Seconds of `total_s` in which it read nothing: what reading did not hide.
        total_s: Seconds from the agreement on the plan to the last tensor in place.
        overlapped_s: Work done at the same time as other work: read + exchange + place - total, at least 0.
        peak_staging_bytes: Bytes of its staging buffers.
        retries: Attempts at reads beyond the first, those after a checksum that did not fit included.
    """

    rank: int
    host: str
    reader: bool
    note: str = ""
    bytes_read: int = 0
    direct_bytes_read: int = 0
    bytes_verified: int = 0
    header_bytes_read: int = 0
    bytes_received: int = 0
    bytes_in: int = 0
    read_s: float = 0.0
    exchange_s: float = 0.0
    place_s: float = 0.0
    exposed_s: float = 0.0
    total_s: float = 0.0
    overlapped_s: float = 0.0
    peak_staging_bytes: int = 0
    retries: int = 0

    _follows = MappingProxyType(
        {
            "exposed_s": lambda rank: max(0.0, rank.total_s - rank.read_s),
            "overlapped_s": lambda rank: max(
                0.0, rank.read_s + rank.exchange_s + rank.place_s - rank.total_s
            ),
        }
    )


@dataclass(frozen=True, kw_only=True)
class LoadReport(_Report):
    """What a load did, over all ranks; the same on every rank.

    Attributes:
        url: The checkpoint.
        strategy: What was done: ``allgather``, ``broadcast`` or ``direct``.
        why: Why that strategy.
        transport: What carried the bytes between ranks.
        why_transport: Why that transport.
        bytes_wanted: Bytes of the tensors asked for, once.
        num_tensors: Tensors asked for.
        chunk_bytes: Unit of reading and of exchange.
        num_rounds: Rounds of exchange.
        depth: Rounds in flight at once.
        left_out: What was not loaded, with ``strict=False``: what was saved for another number of ranks, and
            what is not read.
        source: ``storage``, or ``memory`` if a `CheckpointManager` restored it from there.
        source_why: Of a manager with a memory tier, why not from the other.
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

    @property
    def bytes_read(self) -> int:
        """Data bytes read from storage, over all ranks."""
        return sum(rank.bytes_read for rank in self.ranks)

    @property
    def bytes_verified(self) -> int:
        """Data bytes checked against the commit record, over all ranks."""
        return sum(rank.bytes_verified for rank in self.ranks)

    @property
    def read_amplification(self) -> float:
        """Bytes read over bytes wanted: 1.0 is the least possible."""
        return self.bytes_read / self.bytes_wanted if self.bytes_wanted else 1.0


@dataclass(frozen=True, kw_only=True)
class VerifyReport(_Report):
    """What a verification that found no damage did, over all ranks; the same on every rank.

    Attributes:
        url: The checkpoint.
        num_files: Its files.
        num_blocks: Its checksum blocks; where hosts have disks of their own, of one copy.
        nbytes: Bytes of its tensors.
        ranks: One entry per rank.
    """

    url: str
    num_files: int
    num_blocks: int
    nbytes: int
    ranks: Sequence[RankReport] = field(default_factory=tuple)

    @property
    def bytes_verified(self) -> int:
        """Data bytes checked, over all ranks: more than `nbytes` where hosts have copies of their own."""
        return sum(rank.bytes_verified for rank in self.ranks)


@dataclass(frozen=True, kw_only=True)
class SaveRankReport(_RankReport):
    """What one rank did in a save.

    Attributes:
        rank: Rank in the group.
        host: Name of its host.
        bytes_written: Bytes of the files that this rank wrote.
        bytes_sent: Bytes that this rank holds and others wrote, or hashed; of sharded states.
        stall_s: Seconds until the caller went on: until the snapshot was taken, or the save over.
        snapshot_s: Seconds copying from the state.
        waited_s: Seconds until earlier saves were written, and it was the turn of this one.
        write_s: Seconds with at least one write under way.
        flush_s: Seconds until what it wrote was durable, after the last write.
        commit_s: Seconds from then until the checkpoint existed: waiting for the others, and publishing.
        total_s: Seconds from the call until the checkpoint existed.
        peak_staging_bytes: Most host memory used for it.
    """

    rank: int
    host: str
    bytes_written: int
    bytes_sent: int = 0
    stall_s: float
    snapshot_s: float
    waited_s: float = 0.0
    write_s: float
    flush_s: float
    commit_s: float
    total_s: float
    peak_staging_bytes: int


@dataclass(frozen=True, kw_only=True)
class SaveReport(_Report):
    """What a save did, over all ranks; the same on every rank.

    Attributes:
        url: The checkpoint.
        nbytes: Bytes of its files, without index and record.
        num_tensors: Its tensors.
        num_files: Its safetensors files.
        block_bytes: Bytes with one checksum.
        num_writers: Ranks that wrote; of each copy, where hosts wrote copies of their own.
        num_copies: Copies: 1, or one for each host.
        came_instead_of: Where the earlier saves would be that were not written, since this one was newer
            when storage was free; see `CheckpointManager`.
        ranks: One entry per rank.
    """

    url: str
    nbytes: int
    num_tensors: int
    num_files: int
    block_bytes: int
    num_writers: int
    num_copies: int
    came_instead_of: tuple[str, ...] = ()
    ranks: Sequence[SaveRankReport] = field(default_factory=tuple)

    @property
    def bytes_written(self) -> int:
        """Bytes of safetensors files written, over all ranks."""
        return sum(rank.bytes_written for rank in self.ranks)

    @property
    def waited_s(self) -> float:
        """Seconds until it was its turn on all ranks, after earlier saves."""
        return max((rank.waited_s for rank in self.ranks), default=0.0)

    @property
    def stall_s(self) -> float:
        """Seconds that the slowest rank's caller waited."""
        return max((rank.stall_s for rank in self.ranks), default=0.0)

    @property
    def background_s(self) -> float:
        """Seconds that it took to write it once the callers went on, without waiting for its turn."""
        return max(0.0, self.total_s - self.stall_s - self.waited_s)


@dataclass(frozen=True, kw_only=True)
class StageRankReport:
    """What one rank did to stage a checkpoint.

    Attributes:
        rank: Rank in the group.
        host: Name of its host.
        leads: Whether it works for its host; the other ranks of a host only wait.
        note: Why it did not read, where it could not.
        bytes_read: Bytes it read from where the checkpoint comes from.
        bytes_fed: Bytes it read from its host's own copy for hosts that have none.
        bytes_received: Bytes it got from other hosts.
        bytes_written: Bytes it wrote to its host's copy.
        bytes_kept: Bytes that were there already.
        bytes_verified: Bytes it compared with the commit record as they came.
        read_s: Seconds with at least one read under way.
        exchange_s: Seconds with at least one exchange under way.
        write_s: Seconds with at least one write under way.
        flush_s: Seconds until what it wrote was durable, after the last write.
        total_s: Seconds from the call until its host had the copy.
        peak_staging_bytes: Bytes of its staging buffers.
        retries: Attempts at reads beyond the first.
    """

    rank: int
    host: str
    leads: bool
    note: str = ""
    bytes_read: int = 0
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
class StageReport(_Report):
    """What staging a checkpoint did, over all ranks; the same on every rank.

    Attributes:
        url: Where the checkpoint comes from.
        path: Where each host has its copy: what to load. Of one file, it is in the directory that was made.
        nbytes: Bytes of its files.
        num_files: Its files.
        num_hosts: Hosts, each with a copy.
        digest: One digest of all bytes, which all hosts found the same.
        ranks: One entry per rank.
    """

    url: str
    path: str
    nbytes: int
    num_files: int
    num_hosts: int
    digest: str
    ranks: Sequence[StageRankReport] = field(default_factory=tuple)

    @property
    def bytes_read(self) -> int:
        """Bytes read from where the checkpoint comes from, over all ranks; headers, read first, are extra."""
        return sum(rank.bytes_read for rank in self.ranks)

    @property
    def bytes_written(self) -> int:
        """Bytes written, over all hosts."""
        return sum(rank.bytes_written for rank in self.ranks)

    @property
    def read_amplification(self) -> float:
        """Bytes read over bytes of the checkpoint: at most 1.0 unless reads were repeated."""
        return self.bytes_read / self.nbytes if self.nbytes else 0.0
