"""What a save writes before its commit: prepared by leaders, seen by each rank before it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastload.errors import OptionError, StorageError
from fastload.saving.call import Call
from fastload.saving.part import Part
from fastload.storage import Target
from fastload.transfer.wire import Wire, accept_offers

__all__ = ["Pending", "open_pending"]


@dataclass(frozen=True)
class Pending:
    """What is prepared.

    Attributes:
        wire: What connects this rank to others, if any rank needs something from another one.
        join: To be called before this rank writes.
    """

    wire: Wire | None
    join: Callable[[], object]


def open_pending(call: Call, part: Part) -> Pending:
    """Has the leaders prepare the place, while the ranks tell each other where they are found.

    Each joins its leader once it writes; where each host has a copy of its own, before any rank does.

    Raises:
        OptionError: The hosts see one place although each was to have its own.
        PeerError: Some rank cannot write there, with its cause.
        CheckpointExists: There is a checkpoint already.
    """
    world, team, target = call.world, part.team, part.target
    leads = world.rank == team.leader
    files = [(file.name, file.nbytes) for file in part.described.layout.files]
    packets = part.packets
    wire = Wire(world, range(world.size), packets.partners) if packets is not None else None

    def prepare() -> dict[str, Any]:
        return {
            "ticket": target.prepare(files, overwrite=bool(call.options.overwrite)) if leads else None,
            "exchanges": packets is not None and bool(packets.leaving),
            "offer": wire.offer() if wire is not None else None,
        }

    what = f"preparing to save to {target.url}"
    try:
        ranks = world.agree(what, prepare)
        if any(each["exchanges"] for each in ranks):
            accept_offers(world, what, wire, [each["offer"] for each in ranks])
        elif wire is not None:
            wire.close(keep=True)
            wire = None
        tickets = [each["ticket"] for each in ranks]
        join = _nothing if leads else partial(_join, call, target, tickets[team.leader], team.leader)
        if team.num_copies > 1:
            others = [tickets[leader] for leader in team.leaders if leads and leader != team.leader]
            _join_all(call, target.url, join, others)
            join = _nothing
    except BaseException:
        if wire is not None:
            wire.close(keep=False)
        raise
    return Pending(wire, join)


def _nothing() -> None:
    pass


def _join_all(call: Call, url: str, join: Callable[[], object], others: Sequence[Any]) -> None:
    """Has every rank join its team before any of them writes, and look for what the others have prepared."""

    def meet() -> None:
        join()
        _look_for_others(call.open_target, others)

    call.world.agree(f"joining the save to {url}", meet)


def _join(call: Call, target: Target, ticket: Any, leader: int) -> None:
    try:
        target.join(ticket)
    except StorageError as error:
        why = (
            f"both are on {call.world.host}, but have no disk in common there; save to one that they share, "
            "or give containers host names of their own"
            if call.options.shared is False
            else "the hosts do not share this path; save to one that they share, or a copy on each host with "
            "shared=False"
        )
        raise StorageError(
            f"this rank does not see what rank {leader} prepared there ({error.args[0]}): {why}",
            url=target.url,
        ) from error


def _look_for_others(another: Callable[[], Target], tickets: Sequence[Any]) -> None:
    """Looks whether what another team has prepared can be seen from here."""
    for ticket in tickets:
        target = another()
        try:
            target.join(ticket)
        except StorageError:
            continue
        finally:
            target.close()
        raise OptionError(
            f"shared=False, but the hosts share {target.url}: each would replace the other's copy"
        )
