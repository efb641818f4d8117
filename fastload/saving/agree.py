"""The ranks agree that they save the same, and learn which rank holds what, on which host."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastload.comm.failures import require_same
from fastload.errors import PlanMismatch
from fastload.saving.call import SaveCall
from fastload.saving.compare import (
    StateContent,
    compare_shards,
    differing_groups,
    digest_by_holders,
    digest_shards,
    require_same_content,
)
from fastload.saving.describe import RankState, lay_out_files
from fastload.saving.merge import MergedState, boxes_by_rank, pack_boxes, refuse_merge, unpack_boxes
from fastload.saving.shard_map import ShardMap

_MIN_SHARE_BYTES = 32 << 20  # below, one more writer costs more than it saves
_MIN_SHARDED_BYTES = 1 << 20  # where its bytes would have to get to another rank


@dataclass(frozen=True)
class SaveAgreement:
    """What all ranks know of each other.

    Attributes:
        hosts: Host of each rank; see `comm.hosts.node`.
        num_writers: How many ranks write, where the options leave it open.
        metadata: Text to keep with the checkpoint.
        shard_map: Which ranks hold which bytes.
    """

    hosts: Sequence[str]
    num_writers: int
    metadata: Mapping[str, str]
    shard_map: ShardMap


def has_to_meet(call: SaveCall, state: RankState) -> bool:
    """Whether the ranks have to agree before they know who writes what.

    That follows from state and options alone, unless it matters which hosts the ranks are on, their tensors
    are to be compared, or placements do not tell what each of them holds. An error that only some ranks
    have seen is to be raised by all, too.
    """
    options = call.options
    by_options = options.writers == "host" or options.shared is False
    by_options |= options.check_replicas == "full"
    return by_options or state.shard_map is None or call.raise_earlier is not None


def foresee(call: SaveCall, state: RankState) -> SaveAgreement:
    """Returns what the ranks will agree on, as far as who writes what follows from it."""
    assert state.shard_map is not None
    return _agreement(call, state, state.shard_map, [call.world.node] * call.world.size, call.metadata)


def agree(
    call: SaveCall, describe: Callable[[], RankState], *, went_on: bool = False
) -> tuple[RankState, SaveAgreement]:
    """Compares what the ranks are about to save, and learns on which hosts they are.

    Args:
        call: This rank's call.
        describe: Returns what this rank is about to save.
        went_on: Whether this rank has copied what it contributes by what it has foreseen.

    Returns:
        What the ranks save together, and what they know of each other.

    Raises:
        FastloadError: Some rank cannot save, or what the ranks save does not go together.
    """
    world, how = call.world, call.options.check_replicas
    made: list[RankState] = []

    def introduce() -> dict[str, Any]:
        if call.raise_earlier is not None:
            call.raise_earlier()
        made.append(state := describe())
        shard_map = state.shard_map
        return {
            "host": world.node,
            "same": {"call": "save", "path": call.location.given, **call.options.shared_values()},
            "content": state.content.digests(),
            "metadata": call.metadata if world.rank == 0 else {},
            "shards": shard_map.digest if shard_map is not None else "",
            "small": digest_by_holders(shard_map, world.rank, state.small)
            if shard_map and state.small
            else {},
            "went_on": went_on,
        }

    ranks = world.agree(call.what, introduce)
    [state] = made
    require_same([each["same"] for each in ranks])
    what = f"{call.what}: comparing replicas"
    shard_map = state.shard_map if _have_foreseen_the_same(ranks) else None
    if shard_map is not None:
        require_same_content(world, what, state.content, [each["content"] for each in ranks])
        if how == "small" and differing_groups([each["small"] for each in ranks]):
            compare_shards(world, state.layout, shard_map, lambda: state.small, what=what)
    else:
        _refuse_foresight(ranks)
        state, shard_map = _merge_states(call, state)
        if how == "small":
            _compare(call, state, shard_map, what)
    if how == "full":
        _compare(call, state, shard_map, what)
    hosts = [each["host"] for each in ranks]
    return state, _agreement(call, state, shard_map, hosts, ranks[0]["metadata"])


def _agreement(
    call: SaveCall,
    state: RankState,
    shard_map: ShardMap,
    hosts: Sequence[str],
    metadata: Mapping[str, str],
) -> SaveAgreement:
    # More writers where each rank holds its own part of the bytes.
    least_bytes = _MIN_SHARE_BYTES if shard_map.is_replicated else _MIN_SHARDED_BYTES
    num_writers = max(1, min(call.world.size, state.layout.nbytes // least_bytes))
    return SaveAgreement(hosts, num_writers, metadata, shard_map)


def _compare(call: SaveCall, state: RankState, shard_map: ShardMap, what: str) -> None:
    """Compares the shards that several ranks hold."""
    world, layout, how = call.world, state.layout, call.options.check_replicas
    digest = partial(digest_shards, layout, shard_map, state.reader, world.rank, how=how)
    compare_shards(world, layout, shard_map, digest, what=what)


def _have_foreseen_the_same(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the ranks have told alike who holds what; of replicas even where the states differ."""
    maps = {each["shards"] for each in ranks}
    forms = {each["content"][0] for each in ranks}
    return maps == {"replicated"} or (len(maps) == len(forms) == 1 and "" not in maps)


def _refuse_foresight(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raises if a rank has copied what it contributes, though only the others could tell what that is."""
    by_themselves = [rank for rank, each in enumerate(ranks) if each["went_on"]]
    if by_themselves:
        raise PlanMismatch(
            f"the ranks hold different parts of the state, which rank {by_themselves[0]} could not foresee: "
            "with SaveOptions(parts=True) they meet before they copy it"
        )


def _merge_states(call: SaveCall, state: RankState) -> tuple[RankState, ShardMap]:
    """Tells the other ranks what this one has, and merges what all have.

    Raises:
        PlanMismatch: The parts do not go together, or some tensor is not whole; the same on all ranks.
        FastloadError: Some rank could not tell.
    """
    world, what = call.world, f"{call.what}: telling what each rank has"
    content, reader = state.content, state.reader
    form = zlib.compress(json.dumps([content.structure, content.specs]).encode(), level=1)
    forms = world.gather_bytes(what, lambda: form)
    packed = world.gather_bytes(
        what, lambda: pack_boxes({spec.name: reader.boxes(spec.name) for spec in content.specs})
    )
    merged = MergedState.of(forms)
    layout = lay_out_files(merged.specs, call.options)
    shard_map = ShardMap(layout, world.size, boxes_by_rank([unpack_boxes(each) for each in packed]))
    if missing := shard_map.missing():
        refuse_merge("the ranks together do not have the whole state", missing)
    content = StateContent(merged.structure, layout.digest(), merged.specs, {})
    return replace(state, content=content, layout=layout, reader=reader.with_layout(layout)), shard_map
