"""What one rank does in a save: writer group, ranges, messages, buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastload.base.memory import uncollected
from fastload.errors import OptionError
from fastload.saving.agree import Agreed
from fastload.saving.call import Call
from fastload.saving.describe import Described
from fastload.saving.layout import Layout
from fastload.saving.messages import Packets, make_packets
from fastload.saving.shard_map import Holdings
from fastload.saving.snapshot import Shards
from fastload.saving.split import Share, Team, assign, choose_team, spread, whole_units
from fastload.storage import Target

__all__ = ["Depths", "Part", "take_part"]


class Depths(NamedTuple):
    """How much of a save an assembly has in memory.

    Attributes:
        slots: Pieces that are put together, or written, at once.
        coming: Batches that come in.
        leaving: Packets that are on their way.
    """

    slots: int
    coming: int
    leaving: int

    @property
    def num_batches(self) -> int:
        """Those that come and those that leave, of which a packet may be all."""
        return self.coming + self.leaving

    @property
    def num_pieces(self) -> int:
        """All of them together, if a batch is one piece; and a scratch."""
        return self.slots + 1 + self.num_batches

    @classmethod
    def within(cls, staging_bytes: int, unit_bytes: int, *, num_writes: int) -> Depths:
        """Chooses them for pieces of at least so many bytes.

        Args:
            staging_bytes: Most memory of all.
            unit_bytes: The shortest piece that may be written by itself.
            num_writes: Pieces that may be written at once.

        Raises:
            OptionError: There is no room for the fewest.
        """
        least = cls(1, 1, 1)
        for depths in (cls(num_writes + 1, 2, 4), cls(2, 2, 2), least):
            if depths.num_pieces * unit_bytes <= staging_bytes:
                return depths
        raise OptionError(
            f"staging_bytes={staging_bytes}: to save shards there takes at least "
            f"{least.num_pieces * unit_bytes}: {least.num_pieces} pieces of {unit_bytes} bytes, the shortest "
            "that this storage takes"
        )

    def batch_bytes(self, staging_bytes: int, piece_bytes: int) -> int:
        """Returns how many bytes of pieces may come together."""
        return max(piece_bytes, (staging_bytes - (self.slots + 1) * piece_bytes) // self.num_batches)


_GOOD_PIECE_BYTES = 4 << 20  # more would leave the cache before it is hashed, and touch more new memory
_GOOD_BATCH_BYTES = 32 << 20  # of pieces whose packets come together: several pieces, a part of a share
# The plan of the last save, by all that it follows from: a training saves the same again and again.
_last: dict[tuple[Any, ...], tuple[Share, Packets]] = {}


@dataclass(frozen=True)
class Part:
    """One rank's part of a save.

    Attributes:
        described: What is saved.
        team: With whom this rank writes.
        share: What it writes.
        target: Where to.
        shards: What it contributes; None if it takes what it writes from the whole state.
        packets: To whom that goes, and what comes from others, likewise.
        depths: How many pieces are in memory, likewise.
    """

    described: Described
    team: Team
    share: Share
    target: Target
    shards: Shards | None = None
    packets: Packets | None = None
    depths: Depths | None = None


def take_part(call: Call, described: Described, agreed: Agreed) -> Part:
    """Finds this rank's part, without asking anyone.

    Raises:
        OptionError: The URL cannot be written to, what it needs is not installed, or the pieces that the
            storage takes are too long for `staging_bytes`.
    """
    options, layout, rank = call.options, described.layout, call.world.rank
    team = _team_of(call, agreed, rank)
    target = call.open_target()
    align_bytes = target.align_bytes(max(file.nbytes for file in layout.files))
    if agreed.holdings is not None:
        teams = [team if leader == team.leader else _team_of(call, agreed, leader) for leader in team.leaders]
        return _take_of_shards(call, described, agreed.holdings, teams, target, align_bytes)
    share = assign(
        layout,
        team.writers,
        rank,
        align_bytes=align_bytes,
        piece_bytes=min(_GOOD_PIECE_BYTES, options.staging_bytes // (options.write_threads + 1)),
    )
    return Part(described, team, share, target)


def _take_of_shards(
    call: Call,
    described: Described,
    holdings: Holdings,
    teams: Sequence[Team],
    target: Target,
    align_bytes: int | None,
) -> Part:
    """Finds this rank's part where ranks hold different bytes: each copy is made of what all of them hold."""
    options, layout, rank = call.options, described.layout, call.world.rank
    depths = Depths.within(options.staging_bytes, align_bytes or 1, num_writes=options.write_threads)
    staged = options.staging_bytes // depths.num_pieces
    piece_bytes = whole_units(min(_GOOD_PIECE_BYTES, staged), align_bytes)
    batch_bytes = min(_GOOD_BATCH_BYTES, depths.batch_bytes(options.staging_bytes, piece_bytes))
    lengths = align_bytes, piece_bytes, batch_bytes
    key = (described.content.layout, holdings.digest, rank, tuple(teams), *lengths)
    plan = _last.get(key)
    if plan is None:
        plan = _plan(layout, holdings, rank, teams, *lengths)
        _last.clear()
        _last[key] = plan
    [team] = [team for team in teams if rank in team.members]
    return Part(described, team, plan[0], target, Shards(layout, described.source), plan[1], depths)


@uncollected
def _plan(
    layout: Layout,
    holdings: Holdings,
    rank: int,
    teams: Sequence[Team],
    align_bytes: int | None,
    piece_bytes: int,
    batch_bytes: int,
) -> tuple[Share, Packets]:
    """Returns what a rank writes, and the packets that it has to do with."""
    shares = [
        {
            writer: Share.of(layout, ranges, piece_bytes)
            for writer, ranges in spread(layout, holdings, team.writers, align_bytes).items()
        }
        for team in teams
    ]
    packets = make_packets(
        layout,
        holdings,
        [{writer: share.pieces for writer, share in of_team.items()} for of_team in shares],
        rank,
        [team.members for team in teams],
        batch_bytes,
    )
    own = [of_team[rank] for of_team in shares if rank in of_team]
    return own[0] if own else Share((), (), frozenset()), packets


def _team_of(call: Call, agreed: Agreed, rank: int) -> Team:
    options = call.options
    return choose_team(
        rank,
        agreed.hosts,
        writers=options.writers if options.writers != "auto" else agreed.num_writers,
        shared=options.shared is not False,
    )
