"""One rank's part of a save: with whom it writes, what, and where."""

from __future__ import annotations

from dataclasses import dataclass

from fastload.saving.agree import Agreed
from fastload.saving.assign import Share, assign
from fastload.saving.call import Call
from fastload.saving.describe import Described
from fastload.saving.team import Team, choose_team
from fastload.storage import Target

__all__ = ["Part", "take_part"]

_GOOD_PIECE_BYTES = 4 << 20  # more would leave the cache before it is hashed, and touch more new memory


@dataclass(frozen=True)
class Part:
    """One rank's part of a save.

    Attributes:
        described: What is saved.
        team: With whom this rank writes.
        share: What it writes.
        target: Where to.
    """

    described: Described
    team: Team
    share: Share
    target: Target


def take_part(call: Call, described: Described, agreed: Agreed) -> Part:
    """Finds this rank's part, without asking anyone.

    Raises:
        OptionError: The URL cannot be written to, or what it needs is not installed.
    """
    options, layout, rank = call.options, described.layout, call.world.rank
    team = choose_team(
        rank,
        agreed.hosts,
        writers=options.writers if options.writers != "auto" else agreed.num_writers,
        shared=options.shared is not False,
    )
    target = call.open_target()
    share = assign(
        layout,
        team.writers,
        rank,
        align_bytes=target.align_bytes(max(file.nbytes for file in layout.files)),
        piece_bytes=min(_GOOD_PIECE_BYTES, options.staging_bytes // (options.write_threads + 1)),
    )
    return Part(described, team, share, target)
