"""Agreement of the ranks on what they save, which rank holds which bytes, and on which host."""

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
from fastload.saving.merge import MergedState, boxes_by_rank, pack_boxes, refuse_merge
from fastload.saving.shard_map import ShardMap

_MIN_SHARE_BYTES = 32 << 20  # below, one more writer costs more than it saves
_MIN_SHARDED_BYTES = 1 << 20  # likewise, if the bytes have to be sent to the writer


@dataclass(frozen=True)
class SaveAgreement:
    """The agreement of all ranks.

    Attributes:
        hosts: Host of each rank; see `comm.hosts.node`.
        num_writers: Number of writers, unless the options give it.
        metadata: Text to store with the checkpoint.
        shard_map: Which ranks hold which bytes.
    """

    hosts: Sequence[str]
    num_writers: int
    metadata: Mapping[str, str]
    shard_map: ShardMap


def has_to_meet(call: SaveCall, state: RankState) -> bool:
    """Whether the ranks have to meet before they know which rank writes which bytes.

    State and options alone tell that, unless the hosts of the ranks matter, tensors are to be compared, or
    placements do not tell what each rank holds. The ranks also meet to raise an error that only some have
    seen.
    """
    options = call.options
    by_options = options.writers == "host" or options.shared is False
    by_options |= options.check_replicas == "full"
    return by_options or state.shard_map is None or call.raise_earlier is not None


def predict(call: SaveCall, state: RankState) -> SaveAgreement:
    """Predicts the agreement, as far as the plan depends on it."""
    assert state.shard_map is not None
    return _agreement(call, state, state.shard_map, [call.world.node] * call.world.size, call.metadata)


def agree(
    call: SaveCall, describe: Callable[[], RankState], *, went_on: bool = False
) -> tuple[RankState, SaveAgreement]:
    """Compares the states that the ranks are about to save, and gathers their hosts.

    Args:
        call: This rank's call.
        describe: Returns this rank's state.
        went_on: Whether this rank has copied its bytes by its prediction.

    Returns:
        The state that the ranks save together, and their agreement.

    Raises:
        FastloadError: Some rank cannot save, or the states do not fit together.
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
    shard_map = state.shard_map if _predicted_the_same(ranks) else None
    if shard_map is not None:
        require_same_content(world, what, state.content, [each["content"] for each in ranks])
        if how == "small" and differing_groups([each["small"] for each in ranks]):
            compare_shards(world, state.layout, shard_map, lambda: state.small, what=what)
    else:
        _require_no_prediction(ranks)
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
    """Compares shards that several ranks hold."""
    world, layout, how = call.world, state.layout, call.options.check_replicas
    digest = partial(digest_shards, layout, shard_map, state.reader, world.rank, how=how)
    compare_shards(world, layout, shard_map, digest, what=what)


def _predicted_the_same(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all ranks predicted the same shard map; replicated ones match even if the states differ."""
    maps = {each["shards"] for each in ranks}
    forms = {each["content"][0] for each in ranks}
    return maps == {"replicated"} or (len(maps) == len(forms) == 1 and "" not in maps)


def _require_no_prediction(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raises if a rank has copied its bytes by a wrong prediction."""
    predicted = [rank for rank, each in enumerate(ranks) if each["went_on"]]
    if predicted:
        raise PlanMismatch(
            f"the ranks hold different parts of the state, which rank {predicted[0]} could not foresee: "
            "with SaveOptions(parts=True) they meet before they copy it"
        )


def _merge_states(call: SaveCall, state: RankState) -> tuple[RankState, ShardMap]:
    """Gathers and merges the parts of the state that the ranks hold.

    Raises:
        PlanMismatch: The parts do not fit together, or a tensor is incomplete; the same on all ranks.
        FastloadError: Some rank failed.
    """
    world, what = call.world, f"{call.what}: gathering the parts of the state"
    content, reader = state.content, state.reader
    form = zlib.compress(json.dumps([content.structure, content.specs]).encode(), level=1)
    forms = world.gather_bytes(what, lambda: form)
    packed = world.gather_bytes(
        what, lambda: pack_boxes({spec.name: reader.boxes(spec.name) for spec in content.specs})
    )
    merged = MergedState.of(dict(enumerate(forms)))
    layout = lay_out_files(merged.specs, call.options, call.stem)
    shard_map = ShardMap(layout, world.size, boxes_by_rank(packed))
    if missing := shard_map.missing():
        refuse_merge("the ranks together do not have the whole state", missing)
    content = StateContent(merged.structure, layout.digest, merged.specs, {})
    return replace(state, content=content, layout=layout, reader=reader.with_layout(layout)), shard_map
