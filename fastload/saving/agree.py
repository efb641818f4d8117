"""What the ranks agree on before they write: that they save the same, and who they are."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastload.comm.world import require_same
from fastload.errors import PlanMismatch
from fastload.geometry.box import Box
from fastload.saving.call import Call
from fastload.saving.compare import (
    Content,
    compare_cells,
    compare_replicas,
    digest_cells,
    group_digests,
    require_alike,
)
from fastload.saving.describe import Described, lay_out_files
from fastload.saving.merge import MergedState, boxes_by_rank, pack_boxes, refuse_merge, unpack_boxes
from fastload.saving.shard_map import Holdings
from fastload.saving.snapshot import Shards

if TYPE_CHECKING:
    pass

__all__ = ["Agreed", "agree", "foresee", "has_to_meet", "merge_parts"]

_MIN_SHARE_BYTES = 32 << 20  # below, one more writer costs more than it saves
_MIN_SHARDED_BYTES = 1 << 20  # where its bytes would have to get to another rank


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of each other.

    Attributes:
        hosts: Host of each rank; see `comm.hosts.node`.
        num_writers: How many ranks write, where the options leave it open.
        metadata: Text to keep with the checkpoint.
        holdings: Which ranks hold which bytes; None if each holds all.
    """

    hosts: Sequence[str]
    num_writers: int
    metadata: Mapping[str, str]
    holdings: Holdings | None


def has_to_meet(call: Call, described: Described) -> bool:
    """Whether the ranks have to agree before they know who writes what.

    That follows from state and options alone, unless it matters which hosts the ranks are on, their tensors
    are to be compared, or placements do not tell what each of them holds. An error that only some ranks
    have seen is to be raised by all, too.
    """
    options = call.options
    by_options = options.writers == "host" or options.shared is False
    by_options |= options.check_replicas == "full"
    is_told = described.held is None or described.held.foreseen is not None
    return by_options or not is_told or call.raise_earlier is not None


def foresee(call: Call, described: Described) -> Agreed:
    """Returns what the ranks will agree on, as far as who writes what follows from it."""
    size, held = call.world.size, described.held
    writers = _good_writers(size, described.layout.nbytes, is_sharded=held is not None)
    foreseen = held.foreseen if held is not None else None
    return Agreed([call.world.node] * size, writers, call.metadata, foreseen)


def agree(
    call: Call, describe: Callable[[], Described], *, went_on: bool = False
) -> tuple[Described, Agreed]:
    """Compares what the ranks are about to save, and learns on which hosts they are.

    Args:
        call: This rank's call.
        describe: Says what this rank is about to save.
        went_on: Whether this rank has copied what it contributes by what it has foreseen.

    Returns:
        What the ranks save together, and what they know of each other.

    Raises:
        FastloadError: Some rank cannot save, or what the ranks save does not go together.
    """
    world, how = call.world, call.options.check_replicas
    made: list[Described] = []

    def introduce() -> dict[str, Any]:
        if call.raise_earlier is not None:
            call.raise_earlier()
        made.append(described := describe())
        return {
            "host": world.node,
            "same": {"call": "save", "path": call.location.given, **call.options.shared_values()},
            "content": described.content.digests(),
            "metadata": call.metadata if world.rank == 0 else {},
            "held": _introduce_held(described, world.rank),
            "went_on": went_on,
        }

    ranks = world.agree(call.what, introduce)
    [described] = made
    require_same([each["same"] for each in ranks])
    what = f"{call.what}: comparing replicas"
    hosts, metadata = [each["host"] for each in ranks], ranks[0]["metadata"]
    if all(each["held"] is None for each in ranks):
        require_alike(world, what, described.content, [each["content"] for each in ranks])
        if how == "full":
            compare_replicas(world, described.layout, described.source, what=what)
        writers = _good_writers(world.size, described.layout.nbytes, is_sharded=False)
        return described, Agreed(hosts, writers, metadata, None)
    if _is_foreseen(ranks) and described.held is not None and described.held.foreseen is not None:
        require_alike(world, what, described.content, [each["content"] for each in ranks])
        holdings, small = described.held.foreseen, described.held.small
        if how == "small" and _differ([each["held"]["small"] for each in ranks]):
            compare_cells(world, described.layout, holdings, lambda: small, what=what)
    else:
        _refuse_foresight(ranks)
        described, holdings = merge_parts(call, described)
    if how == "full" or (how == "small" and not _is_foreseen(ranks)):
        layout, shards = described.layout, Shards(described.layout, described.source)
        digest = partial(digest_cells, layout, holdings, shards, world.rank, how=how)
        compare_cells(world, layout, holdings, digest, what=what)
    writers = _good_writers(world.size, described.layout.nbytes, is_sharded=True)
    return described, Agreed(hosts, writers, metadata, holdings)


def _introduce_held(described: Described, rank: int) -> dict[str, Any] | None:
    """Returns what the ranks compare of what they hold; None if this one holds all of its state."""
    held = described.held
    if held is None:
        return None
    if held.foreseen is None:
        return {"holdings": "", "small": {}}
    small = group_digests(described.layout, held.foreseen, rank, held.small)
    return {"holdings": held.foreseen.digest, "small": small}


def _is_foreseen(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all ranks have the same state, and have foreseen alike who holds what of it."""
    has_one_form = len({each["content"][0] for each in ranks}) == 1
    holdings = {each["held"]["holdings"] if each["held"] is not None else "" for each in ranks}
    return has_one_form and len(holdings) == 1 and "" not in holdings


def _differ(digests: Sequence[Mapping[str, str]]) -> bool:
    """Whether some ranks have different digests of the same."""
    known: dict[str, str] = {}
    return any(
        known.setdefault(group, sums) != sums for of_rank in digests for group, sums in of_rank.items()
    )


def _refuse_foresight(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raises if a rank has copied what it contributes, though only the others could tell what that is."""
    by_themselves = [rank for rank, each in enumerate(ranks) if each["went_on"]]
    if by_themselves:
        raise PlanMismatch(
            f"the ranks hold different parts of the state, which rank {by_themselves[0]} could not foresee: "
            "with SaveOptions(parts=True) they meet before they copy it"
        )


def _good_writers(num_ranks: int, nbytes: int, *, is_sharded: bool) -> int:
    """Returns how many writers so many bytes are worth; more, if each rank holds its own part of them."""
    least_bytes = _MIN_SHARDED_BYTES if is_sharded else _MIN_SHARE_BYTES
    return max(1, min(num_ranks, nbytes // least_bytes))


def merge_parts(call: Call, described: Described) -> tuple[Described, Holdings]:
    """Tells the other ranks what this one has, and merges what all have.

    Raises:
        PlanMismatch: The parts do not go together, or some tensor is not whole; the same on all ranks.
        FastloadError: Some rank could not tell.
    """
    world, what = call.world, f"{call.what}: telling what each rank has"
    content = described.content
    form = zlib.compress(json.dumps([content.structure, content.specs]).encode(), level=1)
    forms = world.gather_bytes(what, lambda: form)
    boxes = world.gather_bytes(what, lambda: pack_boxes(_boxes_of(described)))
    whole = MergedState.of(forms)
    layout = lay_out_files(whole.specs, call.options)
    held = boxes_by_rank([unpack_boxes(packed) for packed in boxes])
    holdings = Holdings(layout, held)
    if holdings.missing:
        refuse_merge("the ranks together do not have the whole state", holdings.missing)
    merged = Content(whole.structure, layout.digest(), whole.specs, {})
    return replace(
        described, content=merged, layout=layout, source=described.source.laid_out(layout)
    ), holdings


def _boxes_of(described: Described) -> Mapping[str, tuple[Box, ...]]:
    if described.held is not None:
        return described.held.boxes
    names = (spec.name for spec in described.content.specs)
    return {name: (Box.whole(described.source.tensor(name).shape),) for name in names}
