"""The plan of one rank for a save: its group of writers, its share, its messages and its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastload.base.memory import uncollected
from fastload.errors import OptionError
from fastload.formats.manifest import Delta
from fastload.options import named_staging
from fastload.saving.agree import RankState, SaveAgreement
from fastload.saving.call import SaveCall
from fastload.saving.layout import Layout
from fastload.saving.messages import MessagePlan, plan_messages, receiving_writers
from fastload.saving.shard_map import ShardMap
from fastload.saving.split import (
    WriterGroup,
    WriterShare,
    choose_writers,
    cut_shares,
    hashing_writers,
    round_to_units,
    split,
)
from fastload.storage import Target
from fastload.storage.base import DEFAULT_WRITES

if TYPE_CHECKING:
    from fastload.saving.snapshot import Snapshot

_PART_BYTES = 4 << 20  # larger parts leave the cache before they are hashed, and touch more new memory
_SNAPSHOT_PART_BYTES = 16 << 20  # bytes of a snapshot are in no cache, and each part takes the GIL
_GOOD_BATCH_BYTES = 32 << 20  # several parts, and a fraction of a share
_WRITES_OF_A_JOB = 512  # S3 takes 3,500 a second below a prefix, and a part has some 0.2 s

# The last plan, by its inputs: a training saves states of the same layout.
_last: dict[tuple[Any, ...], tuple[WriterShare, MessagePlan]] = {}


class StagingDepths(NamedTuple):
    """The number of buffers of a save.

    Attributes:
        parts: Parts that are filled or written at once.
        incoming: Incoming batches at once.
        outgoing: Outgoing messages at once.
    """

    parts: int
    incoming: int = 0
    outgoing: int = 0

    @property
    def num_buffers(self) -> int:
        """All buffers, and one for a message on its way into a part."""
        return self.parts + 1 + self.incoming + self.outgoing

    @property
    def exchanges(self) -> bool:
        """Whether ranks may need bytes from other ranks."""
        return self.incoming > 0

    @classmethod
    def within(cls, staging_bytes: int, unit_bytes: int, *, num_writes: int) -> StagingDepths:
        """Chooses the numbers for parts of which other ranks hold some bytes.

        Args:
            staging_bytes: Most bytes of all buffers.
            unit_bytes: The shortest part that storage takes.
            num_writes: Parts that may be written at once; fewer if there is no room for so many.

        Raises:
            OptionError: `staging_bytes` is too small for the fewest buffers.
        """
        least, room = cls(1, 1, 1), staging_bytes // unit_bytes - cls(1, 2, 4).num_buffers
        for depths in (cls(min(num_writes, max(2, room)) + 1, 2, 4), cls(2, 2, 2), least):
            if depths.num_buffers * unit_bytes <= staging_bytes:
                return depths
        raise OptionError(
            f"{named_staging(staging_bytes)}: a save of shards to this storage needs at least "
            f"{least.num_buffers * unit_bytes}: {least.num_buffers} buffers of {unit_bytes} bytes, the "
            "shortest part that it takes"
        )

    def batch_bytes(self, staging_bytes: int, part_bytes: int) -> int:
        """Returns the most bytes of a batch of parts."""
        if not self.exchanges:
            return part_bytes
        left = staging_bytes - (self.parts + 1) * part_bytes
        return max(part_bytes, min(_GOOD_BATCH_BYTES, left // (self.incoming + self.outgoing)))


@dataclass(frozen=True)
class SavePlan:
    """The plan of one rank for a save.

    Attributes:
        state: The state.
        group: The ranks that write one copy together, this one among them.
        leaders: The leaders of all groups, each of which writes a copy.
        share: The bytes that it writes.
        messages: The messages that it sends and receives.
        depths: The numbers of its buffers.
        num_writes: Parts that it writes at once.
        target: Write access to the destination.
    """

    state: RankState
    group: WriterGroup
    leaders: Sequence[int]
    share: WriterShare
    messages: MessagePlan
    depths: StagingDepths
    num_writes: int
    target: Target


@dataclass(frozen=True)
class PlannedWrite:
    """What one rank writes of a planned state.

    Attributes:
        plan: The plan; for the changes of a base that of a sharded save of these.
        snapshot: The bytes that this rank contributes; None if it reads them from the state, or for changes.
        delta: The base, and the checksums of the result; None for a complete checkpoint.
        base: URL of the base.
        why_complete: Why the checkpoint has to be complete, although there is a base.
    """

    plan: SavePlan
    snapshot: Snapshot | None = None
    delta: Delta | None = None
    base: str = ""
    why_complete: str = ""


class PlanTransform(Protocol):
    """Plans to write something else in place of a complete state.

    Only that of deltas is known, ``delta`` among the ``plan_transforms`` of `fastload.ext`: a function of the
    location to save to, `SaveOptions.base`, and what returns the location of another base, or None for a
    complete checkpoint, on rank 0.
    """

    def __call__(self, call: SaveCall, complete: PlannedWrite, agreed: SaveAgreement) -> PlannedWrite:
        """Returns what this rank writes. Called on all ranks, before anything is written.

        Args:
            call: This rank's call.
            complete: The plan of a complete save. If its snapshot is not used, release it.
            agreed: The agreement of the ranks.

        Raises:
            FastloadError: Some rank failed.
        """


def make_plan(
    call: SaveCall,
    state: RankState,
    agreed: SaveAgreement,
    target: Target | None = None,
    *,
    from_snapshot: bool = False,
) -> SavePlan:
    """Makes this rank's plan, without communication.

    Args:
        call: The save.
        state: The state.
        agreed: The agreement of the ranks.
        target: The target, if it is open; then the plan is for this state alone, and is not kept.
        from_snapshot: Whether the bytes are copied before they are written.

    Raises:
        OptionError: The URL cannot be written to, a package for it is not installed, or `staging_bytes` is
            too small for the parts that storage takes.
    """
    options, layout, rank = call.options, state.layout, call.world.rank
    writers = options.writers if options.writers != "auto" else agreed.num_writers
    groups = choose_writers(agreed.hosts, writers=writers, shared=options.shared is not False)
    is_kept = target is None
    target = target or call.open_target()
    align_bytes = target.align_bytes(max(file.nbytes for file in layout.files))
    num_writes = options.write_threads or _writes_at_once(target, max(len(each.writers) for each in groups))
    if agreed.shard_map.is_replicated:
        depths = StagingDepths(1)
        if align_bytes is not None and any(len(group.writers) > 1 for group in groups):
            depths = depths._replace(incoming=1, outgoing=1)  # for the tails of shares
        if not from_snapshot:  # whose parts need no buffers
            room = options.staging_bytes // (align_bytes or 1) - depths.num_buffers
            num_writes = min(num_writes, max(1, room))
        depths = depths._replace(parts=num_writes + 1)
    else:
        depths = StagingDepths.within(options.staging_bytes, align_bytes or 1, num_writes=num_writes)
        num_writes = min(num_writes, depths.parts)
    staged = options.staging_bytes // depths.num_buffers
    good_bytes = _SNAPSHOT_PART_BYTES if from_snapshot else _PART_BYTES
    if target.writes_at_once > DEFAULT_WRITES:  # each unit is a request of its own
        good_bytes = 1
    part_bytes = round_to_units(min(good_bytes, staged), align_bytes)
    lengths = align_bytes, part_bytes, depths.batch_bytes(options.staging_bytes, part_bytes)
    key = (state.content.layout, agreed.shard_map.digest, rank, tuple(groups), *lengths)
    plan = _last.get(key) if is_kept else None
    if plan is None:
        plan = _plan(layout, agreed.shard_map, rank, groups, *lengths)
        if is_kept:
            _last.clear()
            _last[key] = plan
    [group] = [group for group in groups if rank in group.members]
    return SavePlan(state, group, [each.leader for each in groups], *plan, depths, num_writes, target)


def _writes_at_once(target: Target, num_writers: int) -> int:
    """Returns the writes under way on each of the writers with which storage is fast."""
    return min(target.writes_at_once, max(DEFAULT_WRITES, _WRITES_OF_A_JOB // num_writers))


@uncollected
def _plan(
    layout: Layout,
    shard_map: ShardMap,
    rank: int,
    groups: Sequence[WriterGroup],
    align_bytes: int | None,
    part_bytes: int,
    batch_bytes: int,
) -> tuple[WriterShare, MessagePlan]:
    """Returns the share of a rank, and its messages."""
    shares = []
    for group in groups:
        ranges = split(layout, shard_map, group.writers, align_bytes)
        if not shard_map.is_replicated:
            writers = receiving_writers(layout, shard_map, ranges, rank)
        else:  # the others need nothing from this rank
            writers = hashing_writers(layout, ranges, rank) if rank in ranges else set()
        shares.append(cut_shares(layout, ranges, part_bytes, sorted(writers)))
    members = [group.members for group in groups]
    messages = plan_messages(layout, shard_map, shares, rank, members, batch_bytes)
    own = [of_group[rank] for of_group in shares if rank in of_group]
    return own[0] if own else WriterShare(), messages
