"""Moves tensors from the ranks that hold them to the ranks that want them, without storage.

The tensors of all ranks form one virtual file, in which each part that the same ranks hold is contiguous. The
rest is a load: each byte is read by one of its holders, and arrives in the memory of the ranks that want it.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fastload.base.devices import DeviceStreams
from fastload.base.memory import uncollected
from fastload.base.tracebacks import short_tracebacks
from fastload.comm.failures import require_same
from fastload.comm.group import Meeting, members_of
from fastload.comm.hosts import machine_digest
from fastload.comm.observers import notify, notifying_of_failure
from fastload.comm.responses import Each
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.formats.dtypes import safetensors_spec
from fastload.formats.encoder import StateEncoding, encode_state
from fastload.formats.manifest import FileEntry, Manifest, Piece, TensorEntry, in_order
from fastload.geometry.dtensors import DTensorRanks, is_dtensor, local_of, local_parts
from fastload.geometry.ranges import ByteRange, Space
from fastload.loading.access import Access
from fastload.loading.match import LoadRequest, Match
from fastload.loading.prepare import Job, LoadStart, MatchedRequest, open_job, open_on_all
from fastload.loading.prepare import prepare as prepare_load
from fastload.loading.session import Session
from fastload.loading.targets import TensorWriter
from fastload.options import LoadOptions, Patience, SaveOptions
from fastload.report import LoadReport
from fastload.saving.agree import gather_states
from fastload.saving.layout import TensorSpec, lay_out_files
from fastload.saving.merge import MergedState, pack_state
from fastload.saving.messages import ShardRange
from fastload.saving.reader import StateReader
from fastload.saving.shard_map import MappedShard
from fastload.storage import FileStat, PatientStorage, Storage
from fastload.transfer.messages import Message
from fastload.transfer.plan import StrategyChoice
from fastload.transfer.rounds import Plan
from fastload.transfer.routed_plan import RoutedPlan, RoutedView, SuppliedRange, Supply

_WHAT = "redistributing"
_URL = "the state of the ranks"
_NOTHING_MOVED = "nothing has moved"


class _Shard(NamedTuple):
    """A shard in the virtual file.

    Attributes:
        offset: First byte.
        nbytes: Length in bytes.
        number: Number of the tensor.
        shard: The shard.
        file: Always 0.
    """

    offset: int
    nbytes: int
    number: int
    shard: MappedShard
    file: int = 0


@short_tracebacks
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

    The plan of the last call of a group is kept: a call with the same tensors, in modules, dicts, lists and
    tuples, at the same addresses on all ranks, does not plan again. Nothing keeps the tensors alive.

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
    with Meeting(process_group, _WHAT) as meeting:
        chosen = meeting.choose(options, LoadOptions)
        inputs = _Inputs.of(state, into, dtype, names, strict, chosen.shared_values())
    world, began = meeting.world, time.perf_counter()
    with notifying_of_failure(world, "redistribute", began):
        request = partial(_Request, {} if into is None else into, None, dtype, names, strict)
        report = _redistribute(world, state, request, inputs, chosen)
    notify(world, "redistribute", began, report=report)
    return report


def _redistribute(
    world: World, state: Any, make_request: Callable[..., _Request], inputs: _Inputs, chosen: LoadOptions
) -> LoadReport:
    num_clears = world.cache.num_clears
    kept: KeptPlan | None = world.cache.take(_WHAT)
    with world.together(), world.step(_WHAT) as step:
        step.answer(_compare(world, kept, inputs, chosen))
    responses = step.answers
    require_same([each["options"] for each in responses])
    tokens = {each["kept"] for each in responses}
    if kept is not None and tokens == {kept.token}:
        report = kept.repeat(world, chosen)
        world.cache.put(_WHAT, kept, num_clears)
        return report
    with world.together():
        source = _open(world, state)
    session = Session(world, source.access, replace(chosen, verify=False))
    try:
        with session.usable():
            parts = (part for tensor in source.tensors.values() for _, part in local_parts(tensor))
            memory = frozenset(map(_memory_of, parts))
            request = make_request(memory=memory)
            if chosen.atomic:
                return session.load(request).report
            job = prepare_load(session.opened, request)
            loaded = session.run(job)
            assert loaded is not None, "states have no layout that is inferred"
            if (made := KeptPlan.of(responses[0]["new"], inputs, source, job)) is not None:
                world.cache.put(_WHAT, made, num_clears)
            return loaded.report
    finally:
        session.close()


def _compare(world: World, kept: KeptPlan | None, inputs: _Inputs, options: LoadOptions) -> dict[str, Any]:
    """Returns what the ranks compare: whether all of them have kept the plan of the same call."""
    fits = kept is not None and inputs.key is not None and kept.key == inputs.key
    return {
        "kept": kept.token if kept is not None and fits else "",
        "new": secrets.token_hex(8) if world.rank == 0 else "",
        "options": options.shared_values(),
    }


@uncollected
@torch.no_grad()
def _encode(state: Any) -> StateEncoding:
    encoding = encode_state({} if state is None else state)
    if encoding.own_values:
        raise OptionError("the state has fastload.PerRank values: they belong to one rank, and are not moved")
    return encoding


def _borrowed(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same memory, on any device, that does not keep it.

    It may be used only while another tensor has that memory.
    """
    memory = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _borrowing(reader: StateReader) -> StateReader:
    """Returns a reader of the same memory, which does not keep it; see `_borrowed`."""
    tensors = {name: _borrowed(local_of(tensor)) for name, tensor in reader.tensors.items()}
    parts = {name: [(box, _borrowed(view)) for box, view in reader.parts_of(name)] for name in tensors}
    return reader.replaced(tensors, parts, reader.streams)


def _in_current_streams(reader: StateReader) -> StateReader:
    """Returns a reader that copies in the streams that are the caller's now."""
    if not reader.streams:
        return reader
    parts = {name: reader.parts_of(name) for name in reader.tensors}
    return reader.replaced(reader.tensors, parts, DeviceStreams.of_caller(reader.streams.devices))


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
        self, manifest: Manifest, rank: int = 0, size: int = 1, members: Sequence[int] | None = None
    ) -> Match:
        matched = super().match(manifest, rank, size, members)
        for destination in matched.destinations:
            if destination.nbytes and _memory_of(destination.tensor) in self.memory:
                raise OptionError(
                    f"{destination.entry.name}: into= has memory of the state, which is still to be sent: "
                    "give it tensors of its own"
                )
        return matched


@dataclass(frozen=True)
class _VirtualFile:
    """The states of all ranks as one file.

    Attributes:
        access: Access to the file.
        tensors: The tensors of this rank, by name.
        reader: Reads them.
        shards: The parts of the file.
    """

    access: Access
    tensors: Mapping[str, Tensor]
    reader: StateReader
    shards: Space[_Shard]


def _open(world: World, state: Any) -> _VirtualFile:
    """Gathers which rank holds which part of which tensor.

    Raises:
        FastloadError: The same on all ranks: some rank cannot send its state, or the states do not fit.
    """
    with world.step(_WHAT) as step:
        encoding = _encode(state)
        specs, reader = _look(world, encoding)
        step.answer({"machine": Each([machine_digest(world.host, world.rank)])})
    (machines,) = step.answers[0]["machine"]
    merged = gather_states(
        world,
        _WHAT,
        pack_state(encoding.structure, specs) if specs else b"",
        reader,
        options=SaveOptions(),
        outcome=_NOTHING_MOVED,
    )
    if merged is None:
        raise OptionError("no rank has a tensor to send: state= is None or has no tensors on all ranks")
    shards, manifest = _lay_out(merged)
    supply = Supply(
        tuple(SuppliedRange(0, each.offset, each.nbytes, tuple(each.shard.holders)) for each in shards.ranges)
    )
    reader = reader.with_layout(merged.layout)
    access = Access(
        storage=_connect(world, reader, shards),
        stored=manifest,
        logical=manifest,
        hosts=tuple(world.nodes.values()),
        machines=tuple(machines.values()),
        readers=supply.ranks,
        notes={},
        shared=False,
        supply=supply,
    )
    return _VirtualFile(access, encoding.tensors, reader, shards)


def _connect(world: World, reader: StateReader, shards: Space[_Shard]) -> PatientStorage:
    return PatientStorage(_StateStorage(reader, shards), Patience(0, world.patience_s / 2))


def _look(world: World, encoding: StateEncoding) -> tuple[Sequence[TensorSpec], StateReader]:
    """Returns the tensors of this rank's state, and their reader."""
    group = DTensorRanks(members_of(world.group), place="the state", call="send")
    tensors = encoding.tensors.items()
    problems = [line for name, tensor in tensors for line in group.misfits(name, tensor)]
    if problems:
        raise OptionError("the state cannot be sent: " + "\n  ".join(problems[:_NUM_SHOWN]))
    specs = [TensorSpec(name, *safetensors_spec(tensor), tensor.nbytes) for name, tensor in tensors]
    layout = lay_out_files(specs, SaveOptions())
    return specs, StateReader(layout, encoding.tensors, patience_s=world.patience_s)


_NUM_SHOWN = 20


def _lay_out(merged: MergedState) -> tuple[Space[_Shard], Manifest]:
    """Lays all tensors out in one virtual file."""
    numbers = {entry.name: number for number, entry in enumerate(merged.layout.space.ranges)}
    shards: list[_Shard] = []
    tensors: list[TensorEntry] = []
    position = 0
    for spec in merged.specs:
        of_tensor = merged.shard_map.tensor(numbers[spec.name]).shards if spec.name in numbers else []
        begin, pieces = position, []
        for shard in of_tensor:
            shards.append(_Shard(position, shard.runs.total, numbers[spec.name], shard))
            pieces.append(Piece(shard.box, 0, position, shard.runs.total))
            position += shard.runs.total
        is_cut = len(pieces) > 1
        entry = TensorEntry(
            spec.name, spec.dtype, spec.shape, 0, begin, spec.nbytes, tuple(pieces) if is_cut else ()
        )
        tensors.append(entry)
    file = FileEntry("", position, "", "")
    return Space(shards), Manifest(_URL, (file,), tuple(in_order(tensors)), structure=merged.structure)


class _StateStorage(Storage):
    """The tensors of this rank as parts of the virtual file.

    Args:
        reader: Reads the tensors.
        shards: The shards of all ranks, in the order of the file.
    """

    def __init__(self, reader: StateReader, shards: Space[_Shard]) -> None:
        super().__init__(_URL)
        self.url = _URL
        self._reader = reader
        self._shards = shards

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

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        for buffer in buffers:
            if len(buffer):
                ranges = list(self._ranges(offset, offset + len(buffer)))
                self._reader.copy(ranges, torch.frombuffer(buffer, dtype=torch.uint8))
                self._count.add(len(buffer))
                offset += len(buffer)
        self._reader.wait_copied()

    def _ranges(self, begin: int, end: int) -> Iterator[ShardRange]:
        for index, first, last in self._shards.cut(begin, end - begin):
            found = self._shards.ranges[index]
            yield ShardRange(found.number, found.shard, first, last)


# Plans that are kept for the next call


@dataclass(frozen=True)
class _Inputs:
    """The arguments of a call on one rank, as far as its plan depends on them.

    Attributes:
        tensors: The tensors in `state` and `into`.
        key: Addresses, shapes and places of the tensors, and all other arguments; None if there is more than
            tensors and plain values.
    """

    tensors: Sequence[Tensor]
    key: Any

    @classmethod
    @uncollected
    @torch.no_grad()  # else each access to a DTensor switches gradients off and on
    def of(cls, state: Any, into: Any, *arguments: Any) -> _Inputs:
        """Looks at the arguments; changes nothing but what `state_dict` of their modules does."""
        tensors: list[Tensor] = []
        key: list[Any] = [*arguments]
        meshes: dict[int, Any] = {}
        try:
            _describe(state, tensors, key, meshes)
            key.append(";")
            _describe(into, tensors, key, meshes)
        except (_NotKept, RecursionError):
            return cls((), None)
        return cls(tensors, key)

    def have(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the memory of tensors is that of the arguments, rather than of copies."""
        own = {_memory_of(tensor) for tensor in self.tensors}
        return all(not tensor.nbytes or _memory_of(tensor) in own for tensor in tensors)


class _NotKept(Exception):
    """Something has no description that is enough to know it again."""


_PLAIN_VALUES = frozenset({str, int, float, bool, type(None)})
_DICTS = frozenset({dict, OrderedDict})
_TENSORS = frozenset({Tensor, nn.Parameter})


def _describe(value: Any, tensors: list[Tensor], key: list[Any], meshes: dict[int, Any]) -> None:
    """Appends the tensors below a value, and a description of all of it."""
    kind = type(value)
    if kind in _DICTS:
        key.append((kind, len(value)))
        for name, child in value.items():
            key.append(name)
            _describe(child, tensors, key, meshes)
    elif kind in _TENSORS:
        tensors.append(value)
        key.append(_place_of(value))
    elif kind is list or kind is tuple:
        key.append((kind, len(value)))
        for child in value:
            _describe(child, tensors, key, meshes)
    elif kind in _PLAIN_VALUES:
        key.append((kind, value))
    elif isinstance(value, Tensor) and is_dtensor(value):
        tensors.append(value)
        mesh: Any = value.device_mesh  # type: ignore[attr-defined]
        if id(mesh) not in meshes:
            meshes[id(mesh)] = mesh.mesh.tolist()  # not the mesh, which would keep its groups alive
        local = value.to_local()  # type: ignore[attr-defined]
        key.append((_place_of(local), value.shape, value.placements, meshes[id(mesh)]))  # type: ignore[attr-defined]
    elif isinstance(value, nn.Module) and kind.state_dict is nn.Module.state_dict:
        key.append(kind)
        _describe(dict(value.state_dict(keep_vars=True)), tensors, key, meshes)
    else:
        raise _NotKept


def _place_of(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
        raise _NotKept
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


@dataclass
class KeptPlan:
    """The plan of a call, for the next call with tensors at the same addresses.

    It knows the memory of the tensors by address, and does not keep it.

    Attributes:
        token: Identifies it: equal on all ranks, which made it together.
        key: The key of its call.
        call: What the call has computed.
    """

    token: str
    key: Any
    call: _KeptCall

    @classmethod
    def of(cls, token: str, inputs: _Inputs, source: _VirtualFile, job: Job) -> KeptPlan | None:
        """Returns the plan of a load that has ended; None if another one needs more than that."""
        matched, writer, plan = job.matched, job.writer, job.pipeline.plan
        assert isinstance(writer, TensorWriter)
        local = [local_of(tensor) for tensor in source.tensors.values()]
        used = [*local, *(each.tensor for each in writer.destinations)]
        if inputs.key is None or not matched.match.is_in_place or not inputs.have(used):
            return None
        destinations = [replace(each, tensor=_borrowed(each.tensor)) for each in writer.destinations]
        world, reader = matched.opened.world, _borrowing(source.reader)
        call = _KeptCall(
            access=replace(source.access, storage=_connect(world, reader, source.shards)),
            reader=reader,
            shards=source.shards,
            match=replace(matched.match, destinations=destinations, finish=dict),
            decision=matched.decision,
            backend=matched.backend,
            detour=matched.detour,
            plan=_repeated(plan, world.rank),
            writer=TensorWriter(destinations),
            bytes_wanted=job.bytes_wanted,
        )
        return cls(token, inputs.key, call)

    def repeat(self, world: World, options: LoadOptions) -> LoadReport:
        """Moves the tensors as they are now; a call of all ranks, which have all kept it.

        Raises:
            FastloadError: As for `redistribute`.
        """
        call = self.call
        storage = _connect(world, _in_current_streams(call.reader), call.shards)
        session = Session(world, replace(call.access, storage=storage), replace(options, verify=False))
        try:
            with session.usable():
                start = LoadStart.now(session.opened)
                matched = MatchedRequest(
                    session.opened, call.match, call.decision, call.backend, call.detour, start
                )
                open_own = partial(open_job, matched, call.plan, call.bytes_wanted, call.writer)
                loaded = session.run(open_on_all(session.opened, open_own))
                assert loaded is not None, "states have no layout that is inferred"
                return loaded.report
        finally:
            session.close()

    def drop(self) -> None:
        """Does nothing: it holds no more than memory of its own."""

    def disown(self) -> None:
        """Likewise."""


@dataclass(frozen=True)
class _KeptCall:
    """What a call has computed."""

    access: Access
    reader: StateReader
    shards: Space[_Shard]
    match: Match
    decision: StrategyChoice
    backend: str
    detour: str
    plan: Plan
    writer: TensorWriter
    bytes_wanted: int


class _RepeatedPlan(RoutedPlan):
    """A plan that several transfers follow. It keeps the messages of one rank."""

    @cached_property
    def _views(self) -> dict[int, RoutedView]:
        return {}

    def view(self, rank: int) -> RoutedView:
        """Returns the plan as one rank sees it; the same view each time."""
        if rank not in self._views:
            self._views[rank] = _RepeatedView(self, rank)
        return self._views[rank]


class _RepeatedView(RoutedView):
    """A view that has computed all rounds."""

    def __init__(self, plan: RoutedPlan, rank: int) -> None:
        super().__init__(plan, rank)
        rounds = range(plan.num_rounds)
        self._reads = [RoutedView.reads(self, index) for index in rounds]
        self._outgoing = [RoutedView.outgoing(self, index) for index in rounds]
        self._incoming = [RoutedView.incoming(self, index) for index in rounds]

    def reads(self, index: int) -> list[ByteRange]:
        return self._reads[index]

    def outgoing(self, index: int) -> list[Message]:
        return self._outgoing[index]

    def incoming(self, index: int) -> list[Message]:
        return self._incoming[index]


def _repeated(plan: Plan, rank: int) -> _RepeatedPlan:
    """Returns the plan with the messages of a rank."""
    routed = cast(RoutedPlan, plan)  # as of each load from a supply
    repeated = _RepeatedPlan(**{field.name: getattr(routed, field.name) for field in fields(routed)})
    repeated.view(rank)
    return repeated
