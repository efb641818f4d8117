"""The state of each rank, and the agreement of the ranks on what they save.

A rank takes its state apart into tensors in a layout of files, and everything else as plain values. The ranks
agree on the state, on which rank holds which bytes, and on which host.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fastload.base.memory import uncollected
from fastload.comm.failures import require_same
from fastload.comm.group import members_of
from fastload.comm.world import World
from fastload.errors import OptionError, PlanMismatch, ReplicaMismatch, first_lines
from fastload.formats.dtypes import safetensors_spec
from fastload.formats.encoder import encode_state, strides_of
from fastload.formats.names import MODEL_STEM
from fastload.geometry.box import Box
from fastload.geometry.dtensors import BoxesByRank, DTensorRanks, is_sharded
from fastload.geometry.shards import BY_HAND
from fastload.options import SaveOptions
from fastload.saving.call import SaveCall
from fastload.saving.compare import (
    HOW_TO_ALIGN,
    DeviceComparison,
    ShardDigests,
    StateContent,
    begin_digests,
    differing_groups,
    digest_by_holders,
    find_differences,
    require_same_content,
    small_tensors,
)
from fastload.saving.layout import Layout, TensorSpec, lay_out_files
from fastload.saving.merge import (
    NOTHING_SAVED,
    MergedState,
    merge_states,
    pack_boxes,
    pack_state,
)
from fastload.saving.per_rank import pack_own
from fastload.saving.reader import StateReader
from fastload.saving.shard_map import ShardMap

_log = logging.getLogger(__name__)
_MIN_SHARE_BYTES = 32 << 20  # below, one more writer costs more than it saves
_MIN_SHARDED_BYTES = 1 << 20  # likewise, if the bytes have to be sent to the writer

_DIFFERENT = "replicas of these tensors differ, and the checkpoint has a mixture of them:"
_HOW_TO_STOP = "With check_replicas='full' that is an error. Each tensor is named once."
_ONE_NAME = "Different tensors, such as the experts of each rank, need different names."

_warned: dict[str, set[str]] = {}
"""Folder of checkpoints → names of tensors in it whose replicas differ, and that a warning has named."""


@dataclass(frozen=True)
class RankState:
    """The state that one rank is about to save.

    Attributes:
        content: The structure of the state, and what else the ranks compare.
        layout: The files.
        reader: Reads this rank's tensors.
        own: This rank's own values, packed; empty without any.
        shard_map: Which ranks hold which bytes, by placements on meshes of all ranks, assuming that all have
            the same state; None if placements do not tell.
        digests: Digests of shards that other ranks hold, too; see `compare.ShardDigests`. Small plain tensors
            are compared with the content.
        strides: Strides of tensors; see `encoder.strides_of`.
        on_devices: The comparison of replicas on accelerators, once it has begun; None without any.
    """

    content: StateContent
    layout: Layout
    reader: StateReader
    own: bytes
    shard_map: ShardMap | None
    digests: bytes = b""
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    on_devices: DeviceComparison | None = None


@uncollected
@torch.no_grad()  # else each access to a DTensor switches gradients off and on
def describe(call: SaveCall, state: Any) -> RankState:
    """Separates tensors from structure, and lays the tensors out in files.

    Raises:
        OptionError: Something in the state or the metadata cannot be stored; or the call has a problem.
    """
    options, world = call.options, call.world
    if call.problem is not None:
        raise call.problem
    if not all(isinstance(text, str) for pair in call.metadata.items() for text in pair):
        raise OptionError(f"metadata={call.metadata!r}: must be text by text")
    if state is None:  # the result of some method, by mistake
        raise OptionError("the state is None: there is nothing to save")
    description = encode_state(state, world.rank)
    tensors = description.tensors
    specs = [TensorSpec(name, *safetensors_spec(tensor), tensor.nbytes) for name, tensor in tensors.items()]
    layout = lay_out_files(specs, options, call.stem)
    reader = StateReader(
        layout, tensors, description.uncounted, description.shards, patience_s=world.patience_s
    )
    sharded = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor)}
    shard_map = _predict_shards(world, tensors, sharded, layout, reader, options)
    compared, digests = {}, b""
    if options.check_replicas == "small":
        compared = small_tensors(specs, tensors, description.starts)
    content = StateContent(description.structure, layout.digest, specs, compared)
    if options.check_replicas == "small" and shard_map is not None and world.size > 1:
        how, plain = _how(call, content), tensors.keys() - sharded.keys()
        digests = how.of(layout, shard_map, reader, world.rank, limit_s=world.patience_s, skip=plain)
    call.observers.follow({"snapshot": reader.watch})
    own_values = pack_own(description.own_values, description.own_tensors, world.rank, world.size)
    return RankState(content, layout, reader, own_values, shard_map, digests, strides_of(tensors))


def _how(
    call: SaveCall,
    content: StateContent,
    meshes: Mapping[str, Collection[str]] = MappingProxyType({}),
    *,
    is_mixed: bool = False,
) -> ShardDigests:
    """Returns how to compare shards, given the meshes of tensors if the states were merged.

    Ranks that hold the same elements on different meshes may have replicas, as of parameters that are not in
    the plan for tensor parallelism, or different tensors. So may ranks with their own parts of a state, and
    those whose boxes overlap.
    """
    by_hand = [{BY_HAND}, {""}] if call.options.parts else [{BY_HAND}]
    return ShardDigests(
        call.options.check_replicas,
        f"{call.occasion} {content.form}",  # equal on all ranks, and a form has the numbers of steps
        complete=frozenset(name for name, of_tensor in meshes.items() if len(of_tensor) > 1),
        strict=frozenset(name for name, of_tensor in meshes.items() if of_tensor in by_hand),
        is_mixed=is_mixed,
    )


def _predict_shards(
    world: World,
    tensors: Mapping[str, Tensor],
    sharded: Mapping[str, Tensor],
    layout: Layout,
    reader: StateReader,
    options: SaveOptions,
) -> ShardMap | None:
    """Returns the shard map if placements tell it.

    Raises:
        OptionError: A DTensor does not match its placements.
    """
    if not sharded and not options.parts:
        return ShardMap.of(layout, world.size, None)
    group = DTensorRanks(members_of(world.group), place="the state", call="save")
    problems = [line for name, tensor in sharded.items() for line in group.misfits(name, tensor)]
    if problems:
        raise OptionError("the state cannot be saved: " + "\n  ".join(first_lines(problems)))
    if options.parts:
        return None
    boxes: dict[str, BoxesByRank] = {}
    for name, tensor in tensors.items():
        if name not in sharded:
            boxes[name] = _on_all_ranks(reader.boxes(name), world.size)
        elif (of_all := group.boxes_of_all(tensor)) is not None:
            boxes[name] = of_all
        else:
            return None
    return ShardMap.of(layout, world.size, boxes)


@lru_cache(maxsize=4096)  # equal boxes share one object, also from save to save
def _on_all_ranks(boxes: tuple[Box, ...], num_ranks: int) -> BoxesByRank:
    return ((boxes, tuple(range(num_ranks))),)


@dataclass(frozen=True)
class SaveAgreement:
    """The agreement of all ranks.

    Attributes:
        hosts: Host of each rank; see `comm.hosts.node`.
        num_writers: Number of writers, unless the options give it.
        metadata: Text to store with the checkpoint.
        shard_map: Which ranks hold which bytes.
        strides: Strides of tensors; see `encoder.strides_of`. Values of rank 0, or of the first rank that has
            the tensor: equal replicas may have others.
        how: How replicas are compared.
    """

    hosts: Sequence[str]
    num_writers: int
    metadata: Mapping[str, str]
    shard_map: ShardMap
    strides: Mapping[str, tuple[int, ...]]
    how: ShardDigests


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
    hosts = [call.world.node] * call.world.size
    how = _how(call, state.content)
    return _agreement(call, state, state.shard_map, hosts, call.metadata, state.strides, how)


def agree(call: SaveCall, state: Any, *, has_copied: bool = False) -> tuple[RankState, SaveAgreement]:
    """Compares the states that the ranks are about to save, and gathers their hosts.

    Args:
        call: This rank's call.
        state: The state; a `RankState` if this rank has described it before the ranks meet.
        has_copied: Whether this rank has copied its bytes by its prediction.

    Returns:
        The state that the ranks save together, and their agreement.

    Raises:
        FastloadError: Some rank cannot save, or the states do not fit together.
    """
    world = call.world
    with world.step(call.what) as step:
        if call.raise_earlier is not None:
            call.raise_earlier()
        described = state if isinstance(state, RankState) else describe(call, state)
        step.answer(_introduction(call, described, has_copied=has_copied))
    ranks = step.answers
    require_same([rank["same"] for rank in ranks])
    is_mixed = len({rank["places"] for rank in ranks}) > 1
    by_holders = [rank["digests"] for rank in ranks]
    if _predicted_the_same(ranks):
        assert described.shard_map is not None
        shard_map, strides = described.shard_map, ranks[0]["strides"]
        require_same_content(world, _comparing(call), described.content, [rank["content"] for rank in ranks])
        how = _how(call, described.content, is_mixed=is_mixed)
        has_to_digest = how.how == "full"
    else:
        _require_no_prediction(ranks)
        described, merged = _merge_states(call, described)
        shard_map, strides = merged.shard_map, merged.strides
        how = _how(call, described.content, merged.meshes, is_mixed=is_mixed)
        has_to_digest = how.how != "off"
    if has_to_digest or differing_groups(by_holders):
        with world.step(_comparing(call)) as step:
            digests = described.digests
            if has_to_digest:
                reader, limit_s = described.reader, world.patience_s
                digests = how.of(described.layout, shard_map, reader, world.rank, limit_s=limit_s)
            step.answer([digest_by_holders(shard_map, world.rank, digests)])
        found = [of_rank for [of_rank] in step.answers]
        _check_replicas(call, described.layout, shard_map, how, digests, found)
    hosts = [rank["host"] for rank in ranks]
    return described, _agreement(call, described, shard_map, hosts, ranks[0]["metadata"], strides, how)


def _introduction(call: SaveCall, state: RankState, *, has_copied: bool) -> dict[str, Any]:
    """Returns what this rank tells the others of its state."""
    rank, shard_map = call.world.rank, state.shard_map
    return {
        "host": call.world.node,
        "same": {"call": "save", "path": call.location.given, **call.options.shared_values()},
        "content": state.content.digests(),
        "metadata": call.metadata if rank == 0 else {},
        "strides": state.strides if rank == 0 else {},
        "shards": shard_map.digest if shard_map is not None else "",
        "digests": digest_by_holders(shard_map, rank, state.digests) if shard_map and state.digests else {},
        "places": state.reader.places(),
        "has_copied": has_copied,
    }


def _comparing(call: SaveCall) -> str:
    return f"{call.what}: comparing replicas"


def _agreement(
    call: SaveCall,
    state: RankState,
    shard_map: ShardMap,
    hosts: Sequence[str],
    metadata: Mapping[str, str],
    strides: Mapping[str, tuple[int, ...]],
    how: ShardDigests,
) -> SaveAgreement:
    # More writers where each rank holds its own part of the bytes.
    least_bytes = _MIN_SHARE_BYTES if shard_map.is_replicated else _MIN_SHARDED_BYTES
    num_writers = max(1, min(call.world.size, state.layout.nbytes // least_bytes))
    return SaveAgreement(hosts, num_writers, metadata, shard_map, strides, how)


def _check_replicas(
    call: SaveCall,
    layout: Layout,
    shard_map: ShardMap,
    how: ShardDigests,
    digests: bytes,
    by_holders: Sequence[Mapping[str, str]],
) -> None:
    """Raises or warns if shards differ, given the digests of this rank, and the `digest_by_holders` of all.

    Replicas that were not compared to be equal are a warning: the checkpoint loads, and the training has this
    problem with or without it.

    Raises:
        ReplicaMismatch: Shards differ whose difference is an error; see `ShardDigests.is_error`.
    """
    differing = differing_groups(by_holders)
    if not differing:
        return
    differences = find_differences(call.world, _comparing(call), layout, shard_map, how, digests, differing)
    if differences is None:
        return
    names = {name for name, *_ in differences.of_tensors}
    if any(is_error for *_, is_error in differences.of_tensors):
        head = "the ranks hold different tensors, so nothing was saved:"
        hint = _ONE_NAME if names.intersection({*how.complete, *how.strict}) else HOW_TO_ALIGN
        raise ReplicaMismatch("\n".join([head, *differences.lines(), hint]))
    warned = _warned.setdefault(call.occasion.rpartition("/")[0], set())
    if call.world.rank == 0 and not names <= warned:
        lines = "\n".join(differences.lines())
        _log.warning("%s: %s\n%s\n%s %s", call.what, _DIFFERENT, lines, HOW_TO_ALIGN, _HOW_TO_STOP)
    warned |= names


def compare_on_devices(
    call: SaveCall, state: RankState, agreed: SaveAgreement, *, overlaps: bool = False
) -> RankState:
    """Begins to compare replicas on accelerators, if the ranks have not done so before they agreed.

    Args:
        call: This rank's call.
        state: The state.
        agreed: The agreement of the ranks.
        overlaps: Whether the caller's streams go on meanwhile, as with ``snapshot="overlap"``. They wait
            only for tensors whose changes torch does not count.

    Returns:
        The state with the comparison, which `finish_comparison` ends.
    """
    world, reader, how = call.world, state.reader, replace(agreed.how, on_devices=True)
    if how.how != "small" or world.size == 1:
        return state
    comparison = DeviceComparison(how, state.layout, agreed.shard_map)
    if reader.on_device:
        ranges = how.ranges_on_devices(state.layout, agreed.shard_map, reader, world.rank)
        first = {at for at, shard in ranges.items() if overlaps and not reader.versions(shard.tensor)}
        order = sorted(ranges, key=lambda at: at not in first)
        try:
            pending = begin_digests(reader, [ranges[at] for at in order], num_first=len(first))
            comparison = replace(comparison, numbers=order, pending=pending)
        except (MemoryError, OptionError, RuntimeError) as error:
            # A full device, one without 64-bit integers, or no extension.
            _log.warning("%s: replicas on accelerators are not compared: %s", call.what, error)
    return replace(state, on_devices=comparison)


def finish_comparison(
    call: SaveCall, comparison: DeviceComparison, by_holders: Sequence[Mapping[str, str]]
) -> None:
    """Ends the comparison of replicas on accelerators.

    Args:
        call: This rank's call.
        comparison: The comparison.
        by_holders: The `DeviceComparison.by_holders` of each rank.

    Raises:
        ReplicaMismatch: Shards differ that may be no replicas; see `ShardDigests.is_error`.
    """
    if differing_groups(by_holders):
        world, layout, shard_map = call.world, comparison.layout, comparison.shard_map
        with world.step(_comparing(call)) as step:
            digests = comparison.digests(world.rank, world.patience_s)
            step.answer([digest_by_holders(shard_map, world.rank, digests)])
        found = [of_rank for [of_rank] in step.answers]
        _check_replicas(call, layout, shard_map, comparison.how, digests, found)


def _predicted_the_same(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all ranks predicted the same shard map; replicated ones match even if the states differ."""
    maps = {answer["shards"] for answer in ranks}
    forms = {answer["content"][0] for answer in ranks}
    return maps == {"replicated"} or (len(maps) == len(forms) == 1 and "" not in maps)


def _require_no_prediction(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raises if a rank has copied its bytes by a wrong prediction."""
    predicted = [rank for rank, answer in enumerate(ranks) if answer["has_copied"]]
    if predicted:
        raise PlanMismatch(
            f"the ranks hold different parts of the state, which rank {predicted[0]} could not foresee: "
            "with SaveOptions(parts=True) they meet before they copy it"
        )


def _merge_states(call: SaveCall, state: RankState) -> tuple[RankState, MergedState]:
    """Gathers and merges the parts of the state that the ranks hold; raises as `gather_states`.

    Returns:
        The merged state, as this rank saves it, and as all ranks know it.
    """
    content, reader = state.content, state.reader
    merged = gather_states(
        call.world,
        call.what,
        pack_state(content.structure, content.specs, state.strides),
        reader,
        options=call.options,
        stem=call.stem,
    )
    assert merged is not None
    layout = merged.layout
    content = StateContent(merged.structure, layout.digest, merged.specs, {})
    reader = reader.with_layout(layout)
    state = replace(state, content=content, layout=layout, reader=reader, strides=merged.strides)
    return state, merged


def gather_states(
    world: World,
    what: str,
    form: bytes,
    reader: StateReader,
    *,
    options: SaveOptions,
    stem: str = MODEL_STEM,
    outcome: str = NOTHING_SAVED,
) -> MergedState | None:
    """Gathers and merges the states of all ranks.

    Args:
        world: The ranks.
        what: Name of the call, for messages.
        form: The `pack_state` of this rank; empty if it has no part.
        reader: Reads this rank's tensors.
        options: As for `merge_states`, like what follows.
        stem: See there.
        outcome: See there.

    Returns:
        As for `merge_states`.

    Raises:
        PlanMismatch: The states do not fit together, or a tensor is incomplete; the same on all ranks.
        FastloadError: Some rank failed.
    """
    what = f"{what}: gathering the parts of the state"
    with world.gathering_step(what) as forms:
        forms.answer(form)
    with world.gathering_step(what) as boxes:
        boxes.answer(pack_boxes(reader.boxes_and_meshes()))
    return merge_states(forms.answers, boxes.answers, options=options, stem=stem, outcome=outcome)
