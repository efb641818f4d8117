"""Moves tensors from the ranks that hold them to the ranks that want them, without storage.

The tensors of all ranks form one virtual file, in which each part that the same ranks hold is contiguous. The
rest is a load: each byte is read by one of its holders, and arrives in the memory of the ranks that want it.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch import Tensor

from fastload.base.memory import uncollected
from fastload.comm.failures import require_same
from fastload.comm.group import meet, members_of
from fastload.comm.hosts import machine
from fastload.comm.responses import Each
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.formats.dtypes import safetensors_spec
from fastload.formats.encoder import StateEncoding, encode_state
from fastload.formats.manifest import FileEntry, Manifest, Piece, TensorEntry, in_order
from fastload.geometry.dtensors import DTensorRanks, local_of
from fastload.loading.access import Access
from fastload.loading.load import Session
from fastload.loading.match import LoadRequest, Match
from fastload.options import SETTINGS, LoadOptions, SaveOptions
from fastload.report import LoadReport
from fastload.saving.describe import lay_out_files
from fastload.saving.layout import Layout, TensorSpec
from fastload.saving.merge import MergedState, boxes_by_rank, pack_boxes, refuse_merge, unpack_boxes
from fastload.saving.messages import ShardRange
from fastload.saving.shard_map import MappedShard, ShardMap
from fastload.saving.snapshot import StateReader
from fastload.storage import FileStat, PatientStorage, Storage
from fastload.transfer.routed_plan import HeldRange, Holders

_WHAT = "redistributing"
_URL = "the state of the ranks"
_NOTHING_MOVED = "nothing has moved"


def redistribute(
    state: Any,
    into: Any,
    *,
    dtype: torch.dtype | str | None = None,
    names: Sequence[str] | str | None = None,
    strict: bool = True,
    process_group: Any = None,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Fills the tensors of some ranks with those of others, such as an inference engine's with a trainer's.

    A call of all ranks of the group. Meshes and placements may differ, and the ranks may be disjoint or the
    same. Each byte leaves one of the ranks that hold it, which share the sending evenly, and enters each host
    that wants it once. Replicas are not compared. Bytes go between devices if the group has a backend for
    them; the sender reads them through host memory.

    Args:
        state: What this rank has, as for `fastload.save`: nested dicts of tensors, DTensors, modules,
            optimizers, plain values. None if it has nothing. Keys are merged over all ranks, as with
            `SaveOptions.parts`. It may not change before the call returns.
        into: What this rank wants, as for `fastload.load`. None if it wants nothing. Not the memory of
            `state`.
        dtype: The dtype, or its name, that floating point tensors are cast to; None for no cast.
        names: Names or glob patterns of the tensors to move; None for all.
        strict: As for `fastload.load`.
        process_group: A group of which this rank is a member, or a one-dimensional ``DeviceMesh``; None for
            the default group.
        options: `timeout_s`, `staging_bytes`, `chunk_bytes`, `progress`, `on_report` and `trace` apply.

    Returns:
        The report over all ranks. Its `bytes_read` of a rank are those that it read from `state`.

    Raises:
        MismatchError: Names, shapes or dtypes do not fit; nothing has moved.
        PlanMismatch: The states of the ranks do not go together, or no rank has some part of a tensor;
            nothing has moved.
        OptionError: The states hold nothing, or something that cannot be sent; nothing has moved.
        PeerError: Ranks failed, were killed, or did not respond in time. The contents of `into` are undefined
            if data were moving.
    """

    def prepare() -> tuple[StateEncoding, LoadOptions]:
        return _encode(state), options if options is not None else LoadOptions()

    world, (encoding, chosen) = meet(
        process_group,
        _WHAT,
        prepare,
        timeout_s=lambda prepared: prepared[1].timeout_s,
        default_s=getattr(options, "timeout_s", SETTINGS["timeout_s"].default),
    )
    with world.together():
        access = _open(world, encoding, chosen)
    session = Session(world, access, replace(chosen, verify=False))
    try:
        with session.usable():
            memory = frozenset(map(_memory_of, encoding.tensors.values()))
            request = _Request({} if into is None else into, None, dtype, names, strict, memory=memory)
            return session.load(request).report
    finally:
        session.close()


@uncollected
@torch.no_grad()
def _encode(state: Any) -> StateEncoding:
    encoding = encode_state({} if state is None else state)
    if encoding.own_values:
        raise OptionError("the state has fastload.PerRank values: they belong to one rank, and are not moved")
    return encoding


def _memory_of(tensor: Tensor) -> tuple[torch.device, int]:
    local = local_of(tensor)
    return local.device, local.untyped_storage().data_ptr()


@dataclass(frozen=True)
class _Request(LoadRequest):
    """The arguments of a call.

    Attributes:
        memory: The memory of the state.
    """

    memory: frozenset[tuple[torch.device, int]] = frozenset()

    def match(
        self, manifest: Manifest, rank: int = 0, size: int = 1, group: Sequence[int] | None = None
    ) -> Match:
        matched = super().match(manifest, rank, size, group)
        for destination in matched.destinations:
            if destination.nbytes and _memory_of(destination.tensor) in self.memory:
                raise OptionError(
                    f"{destination.entry.name}: into= has memory of the state, which is still to be sent: "
                    "give it tensors of its own"
                )
        return matched


def _open(world: World, encoding: StateEncoding, options: LoadOptions) -> Access:
    """Gathers which rank holds which part of which tensor.

    Raises:
        FastloadError: The same on all ranks: some rank cannot send its state, or the states do not fit.
    """
    held: list[tuple[bytes, StateReader]] = []

    def look() -> dict[str, Any]:
        held.append(_look(world, encoding))
        name = machine(world.host, world.rank).encode()
        return {"machine": Each([xxhash.xxh3_64_hexdigest(name)]), "options": options.shared_values()}

    responses = world.agree(_WHAT, look)
    require_same([each["options"] for each in responses])
    (machines,) = responses[0]["machine"]
    [(form, reader)] = held
    boxes = pack_boxes({name: reader.boxes(name) for name in encoding.tensors})
    forms = dict(enumerate(world.gather_bytes(f"{_WHAT}: gathering what the ranks have", lambda: form)))
    packed = world.gather_bytes(f"{_WHAT}: gathering the parts of tensors", lambda: boxes)
    of_senders = {rank: form for rank, form in forms.items() if form}
    if not of_senders:
        raise OptionError("no rank has a tensor to send: state= is None or has no tensors on all ranks")
    merged = MergedState.of(of_senders, _NOTHING_MOVED)
    layout = lay_out_files(merged.specs, SaveOptions())
    shard_map = ShardMap(layout, world.size, boxes_by_rank([unpack_boxes(each) for each in packed]))
    if missing := shard_map.missing():
        refuse_merge("the ranks together do not have all of the state", missing, _NOTHING_MOVED)
    shards, manifest = _lay_out(merged, layout, shard_map)
    held_ranges = [
        HeldRange(0, offset, offset + shard.runs.total, tuple(shard.holders)) for offset, _, shard in shards
    ]
    holders = Holders(tuple(held_ranges))
    storage = _StateStorage(reader.with_layout(layout), shards)
    return Access(
        storage=PatientStorage(storage, retries=0, timeout_s=world.patience_s / 2),
        manifest=manifest,
        hosts=tuple(world.nodes.values()),
        machines=tuple(machines.values()),
        readers=holders.ranks,
        notes={},
        shared=False,
        holders=holders,
    )


def _look(world: World, encoding: StateEncoding) -> tuple[bytes, StateReader]:
    """Returns the packed structure and specs of this rank's state, and a reader of its tensors."""
    group = DTensorRanks(members_of(world.group), place="the state", call="send")
    tensors = encoding.tensors.items()
    problems = [line for name, tensor in tensors for line in group.misfits(name, tensor)]
    if problems:
        raise OptionError("the state cannot be sent: " + "\n  ".join(problems[:_NUM_SHOWN]))
    specs = [TensorSpec(name, *safetensors_spec(tensor), tensor.nbytes) for name, tensor in tensors]
    reader = StateReader(lay_out_files(specs, SaveOptions()), encoding.tensors)
    if not specs:
        return b"", reader
    return zlib.compress(json.dumps([encoding.structure, specs]).encode(), level=1), reader


_NUM_SHOWN = 20
_NUM_SHOWN = 20
_Shard = tuple[int, int, MappedShard]  # first byte in the virtual file, number of the tensor, the shard


def _lay_out(merged: MergedState, layout: Layout, shard_map: ShardMap) -> tuple[list[_Shard], Manifest]:
    """Lays all tensors out in one virtual file."""
    numbers = {entry.name: number for number, entry in enumerate(layout.space.ranges)}
    shards: list[_Shard] = []
    tensors: list[TensorEntry] = []
    position = 0
    for spec in merged.specs:
        of_tensor = shard_map.tensor(numbers[spec.name]).shards if spec.name in numbers else []
        begin, pieces = position, []
        for shard in of_tensor:
            shards.append((position, numbers[spec.name], shard))
            pieces.append(Piece(shard.box, 0, position, shard.runs.total))
            position += shard.runs.total
        is_cut = len(pieces) > 1
        entry = TensorEntry(
            spec.name, spec.dtype, spec.shape, 0, begin, spec.nbytes, tuple(pieces) if is_cut else ()
        )
        tensors.append(entry)
    file = FileEntry("", position, "", "")
    return shards, Manifest(_URL, (file,), tuple(in_order(tensors)), structure=merged.structure)


class _StateStorage(Storage):
    """The tensors of this rank as parts of the virtual file.

    Args:
        reader: Reads the tensors.
        shards: The shards of all ranks, in the order of the file.
    """

    def __init__(self, reader: StateReader, shards: Sequence[_Shard]) -> None:
        super().__init__(_URL)
        self.url = _URL
        self._reader = reader
        self._shards = shards
        self._begins = [begin for begin, _, _ in shards]

    @property
    def shared(self) -> bool:
        return False

    @property
    def probes(self) -> bool:
        return True  # what is between two parts is with other ranks, and cannot be read along

    def stat(self, name: str) -> FileStat | None:
        return None

    def list(self) -> list[str] | None:
        return None

    def read_into(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        version: str = "",
        via_cache: bool = False,
    ) -> None:
        for buffer in buffers:
            if len(buffer):
                ranges = list(self._ranges(offset, offset + len(buffer)))
                self._reader.copy(ranges, torch.frombuffer(buffer, dtype=torch.uint8))
                self._count.add(len(buffer))
                offset += len(buffer)
        self._reader.settle()

    def _ranges(self, begin: int, end: int) -> Iterator[ShardRange]:
        for at in range(bisect_right(self._begins, begin) - 1, len(self._shards)):
            first, number, shard = self._shards[at]
            if first >= end:
                return
            yield ShardRange(number, shard, max(0, begin - first), min(end - first, shard.runs.total))
