"""Delta saves: the ranks compare what they would write with the base, and save the changes instead.

Each rank reads the bytes of the base at the places of its share, block by block. The changes that the ranks
find are one-dimensional tensors, of which each rank has parts: the rest is a sharded save of these.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from fastload.base.memory import host_bytes
from fastload.base.threads import Workers, one_torch_thread
from fastload.base.units import format_bytes
from fastload.comm.responses import join_parts, split_parts
from fastload.errors import CheckpointError, FastloadError, OptionError, StorageError
from fastload.ext.deltas.encoding import (
    COUNTS,
    INDICES,
    PIECE_BYTES,
    VALUES,
    PieceChanges,
    element_bytes,
    encode,
    fits_deltas,
    is_own_file,
    layered,
    location_of_base,
    read_chain,
    segment_elements,
    values_dtype,
)
from fastload.formats.manifest import Delta, Manifest
from fastload.formats.names import DELTA_STEM, RECORD_NAME
from fastload.formats.record import CHECKSUM_BYTES, checksum, record_digest
from fastload.formats.safetensors.header import LENGTH_BYTES
from fastload.formats.untrusted import is_plain_path
from fastload.geometry.blocks import Block, num_blocks
from fastload.geometry.box import Box
from fastload.geometry.ranges import ByteRange
from fastload.saving.agree import SaveAgreement
from fastload.saving.call import SaveCall
from fastload.saving.exchange import PartAssembler, connect, connecting
from fastload.saving.layout import Layout, TensorSpec, lay_out
from fastload.saving.plan import PlannedWrite, PlanTransform, SavePlan, make_plan
from fastload.saving.reader import StateReader
from fastload.saving.shard_map import ShardMap
from fastload.saving.snapshot import Snapshot
from fastload.saving.split import WriterShare
from fastload.saving.write import BlockPieces, work_on_parts
from fastload.storage import CheckpointReader, Location, folders, locate
from fastload.storage.base import DEFAULT_WRITES
from fastload.transfer.links import Wire

_log = logging.getLogger(__name__)
_ROW_WORDS = 4  # of a block: number, checksum, values, indices
_USELESS = 0.9  # of the bytes of a complete checkpoint: a delta of that size only makes loads slower
_WHAT_TO_SAVE = (
    "Nearly all elements differ from the base, as float32 weights do after a step of AdamW. "
    "Save without deltas=True and base=; or save what changes in less than a quarter of its elements, as "
    "bfloat16 weights do (docs/recipes/refresh.md). This warning comes once for each folder."
)

_warned: set[str] = set()
"""Folders of checkpoints in which a delta was nearly as large as a complete checkpoint."""


@dataclass(frozen=True)
class Base:
    """The base of a delta, open on this rank.

    Attributes:
        name: Name of its directory.
        manifest: Its files and tensors; if it is a delta, of its result.
        storage: Reads them.
    """

    name: str
    manifest: Manifest
    storage: CheckpointReader

    @property
    def num_deltas(self) -> int:
        """Number of deltas from the first complete checkpoint to it."""
        return self.manifest.delta.num_deltas if self.manifest.delta is not None else 0


@dataclass(frozen=True)
class DeltaTransform:
    """Plans to save the changes of a base, if it finds one and there can be a delta.

    Attributes:
        find_base: Returns, on rank 0, the base, or None for a complete checkpoint.
    """

    find_base: Callable[[], Location | None]

    def __call__(self, call: SaveCall, complete: PlannedWrite, agreed: SaveAgreement) -> PlannedWrite:
        """Finds the changes on all ranks, and plans to save them.

        Args:
            call: This rank's call.
            complete: The plan of a complete save. The memory of its snapshot is released if there is a plan
                for the changes.
            agreed: The agreement of the ranks.

        Raises:
            CheckpointNotFound: There is no base.
            OptionError: Another program saved the base.
            FastloadError: The base is damaged, or some rank failed.
        """
        plan, snapshot = complete.plan, complete.snapshot
        head, manifests = _share_chain(call, self.find_base)
        if not manifests:
            return _complete(call, complete, head["why_complete"], head["problem"])
        storages = [call.open_storage(place) for place in _locate_chain(call, head)]
        try:
            chain = list(zip(reversed(manifests), reversed(storages), strict=True))
            base = Base(head["names"][0], *layered(chain))
            problem = _find_other_copy(call, storages[0], base) if len(plan.leaders) > 1 else ""
            if not problem:
                if reason := _why_complete(call, base, plan.state.layout):
                    return replace(complete, why_complete=reason)
                has_all = agreed.shard_map.is_replicated
                found = _find(call, plan, snapshot, base, in_place=has_all and snapshot is None)
                if found.why_complete:
                    return replace(complete, why_complete=found.why_complete)
                problem = found.problem
            if problem:
                return _complete(call, complete, "", problem)
            return _plan(call, plan, agreed, base, found)
        finally:
            for storage in storages:
                storage.close()


def save_changes(
    location: Location,
    base: str | os.PathLike[str] | None,
    find_base: Callable[[], Location | None] | None,
) -> PlanTransform:
    """Returns what plans to save the changes of a base.

    Args:
        location: The checkpoint to save.
        base: The base, if the user has named it.
        find_base: Else, returns it on rank 0, or None for a complete checkpoint.

    Raises:
        OptionError: `base` has no name that a delta can store, or is the checkpoint to save.
    """
    if base is not None:
        base_name(locate(base), location)
        find_base = find_base or partial(locate_base, base)
    assert find_base is not None
    return DeltaTransform(find_base)


def locate_base(path: str | os.PathLike[str]) -> Location:
    """Returns the location of a base; of a link to a directory next to it, such as ``latest``, its target.

    The link may lead elsewhere by the time of a load.
    """
    found = locate(path)
    return found if found.scheme else locate(folders.resolve_sibling(found.address))


def base_name(base: Location, location: Location) -> str:
    """Returns the name of the directory of a base.

    Raises:
        OptionError: It has none, or is the checkpoint to save.
    """
    folder, _, name = base.url.rstrip("/").rpartition("/")
    if not is_plain_path(name) or folder.endswith(":/"):
        raise OptionError(f"base={base.url!r}: is no directory with a name that a delta can store")
    if base.url.rstrip("/") == location.url.rstrip("/"):
        raise OptionError(f"base={base.url!r}: is the checkpoint to save: save to another path")
    return name


def _complete(call: SaveCall, plan: PlannedWrite, why: str, problem: str) -> PlannedWrite:
    """Returns the plan of a complete checkpoint, with a warning if the base cannot be read."""
    if problem:
        why = f"its base cannot be read: {problem}"
        if call.world.rank == 0:
            _log.warning("%s: %s; a complete checkpoint is written", call.what, why)
    return replace(plan, why_complete=why)


def _share_chain(
    call: SaveCall, find_base: Callable[[], Location | None]
) -> tuple[dict[str, Any], list[Manifest]]:
    """Returns the files of the base and of its bases, and where they are; rank 0 reads them, for all.

    There are none if there is no base, or if it cannot be read and is not the user's choice.
    """
    with call.world.step(f"{call.what}: reading its base") as step:
        if call.world.rank == 0:
            step.answer(attach=_read_chain(call, find_base))
    head, *manifests = split_parts(step.attachment)
    return json.loads(head), list(map(Manifest.from_bytes, manifests))


def _read_chain(call: SaveCall, find_base: Callable[[], Location | None]) -> bytes:
    """Reads the files of the base and of its bases; returns them for the other ranks."""
    why, problem, chain = "", "", list[tuple[Location, Manifest]]()
    try:
        if (base := find_base()) is not None:
            chain = read_chain(base, call.open_storage, call.options.bases)
    except (CheckpointError, StorageError) as error:
        problem = _problem_of_base(call, error)
    for place, _ in chain:
        is_local = not (place.scheme or call.location.scheme)
        if is_local and folders.is_same(place.address, call.location.address):
            raise OptionError(
                f"base={base}: {place} and {call.location} are the same directory, whose contents the "
                "delta would replace: save to another path"
            )
    places = [call.location, *(place for place, _ in chain)]
    parents = [place.sibling("_").url for place in places]
    if len({parent for before, parent in pairwise(parents) if parent != before}) > 1:
        why, chain = "the checkpoints of its chain would be in more than two directories", []
    head = {
        "why_complete": why,
        "problem": problem,
        "names": [base_name(place, call.location) for place, _ in chain],
        "near": [before == parent for before, parent in pairwise(parents[1:])],
    }
    return join_parts([json.dumps(head).encode(), *(manifest.to_bytes() for _, manifest in chain)])


def _locate_chain(call: SaveCall, head: Mapping[str, Any]) -> list[Location]:
    """Returns where the base and its bases are, as this rank names them."""
    first, *others = head["names"]
    given, bases = call.options.base, call.options.bases
    # By the name that rank 0 found: a link may lead elsewhere by now.
    found = [(call.location if given is None else locate(given)).sibling(first)]
    for name, is_near in zip(others, head["near"], strict=True):
        found.append(location_of_base(name, found[-1], None if is_near else bases))
    return found


def _find_other_copy(call: SaveCall, storage: CheckpointReader, base: Base) -> str:
    """Returns why a host has no copy of the base; empty if each has one.

    Raises:
        PeerError: A host has none of the base that the user chose.
    """
    with call.world.step(f"{call.what}: comparing copies of its base") as step:
        problem = ""
        if record_digest(storage) != base.manifest.record_digest:
            url = f"{storage.url}/{RECORD_NAME}"
            problem = _problem_of_base(call, StorageError("not the same checkpoint as on rank 0", url=url))
        step.answer(problem)
    return _first_problem(step.answers)


def _problem_of_base(call: SaveCall, error: FastloadError) -> str:
    """Returns why a base cannot be read; raises if it is the user's choice."""
    if call.options.base is not None:
        raise error
    return str(error)


def _first_problem(problems: Sequence[str]) -> str:
    """Returns the first problem of some rank; empty without any."""
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")


def _why_complete(call: SaveCall, base: Base, layout: Layout) -> str:
    """Returns why there can be no delta; empty if there can."""
    if not base.manifest.block_bytes or base.manifest.format != "fastload":
        raise OptionError(f"base={base.manifest.url!r}: fastload did not save it: save a complete one first")
    if base.num_deltas >= call.options.max_chain:
        return f"its base is the last of {base.num_deltas} deltas (max_chain={call.options.max_chain})"
    if not fits_deltas(layout.block_bytes):
        return f"block_bytes={layout.block_bytes} is no power of two"
    files = [(f.name, f.nbytes, f.header_digest) for f in base.manifest.files if not is_own_file(f.name)]
    own = [
        (file.name, file.nbytes, xxhash.xxh3_128_hexdigest(file.header[LENGTH_BYTES:]))
        for file in layout.files
    ]
    return "" if files == own else "its base has other tensors, or other files"


class _FoundBlocks(NamedTuple):
    """Adjacent blocks of a tensor of the result.

    Attributes:
        numbers: Their numbers.
        digests: Their checksums.
        sizes: The values and the indices of each.
        changes: Their changes; None without any.
    """

    numbers: range
    digests: Sequence[bytes]
    sizes: Sequence[tuple[int, int]]
    changes: PieceChanges | None


class _Found(NamedTuple):
    """The result of the comparison with the base.

    Attributes:
        blocks: The blocks of this rank's share, by the first number.
        rows: Number, checksum, values and indices of each block of each rank's share.
        problem: Why some rank cannot read the base, if so.
        why_complete: Why there can be no delta, if so.
    """

    blocks: Mapping[int, _FoundBlocks]
    rows: Sequence[list[list[int]]] = ()
    problem: str = ""
    why_complete: str = ""


def _find(
    call: SaveCall,
    plan: SavePlan,
    snapshot: Snapshot | None,
    base: Base,
    *,
    in_place: bool,
) -> _Found:
    """Compares with the base on all ranks. If there can be a delta, the memory of the snapshot is released.

    Args:
        call: This rank's call.
        plan: Its plan of a complete save.
        snapshot: The bytes that it contributes; None reads them from the state.
        base: The base.
        in_place: Whether to read the share from the tensors, if they are contiguous, without a copy.
    """
    world = call.world
    assembler = PartAssembler(world, plan, snapshot, _connect(call, plan))
    comparer = _Comparer(call, plan, base)
    found = _Found(comparer.found)
    try:
        with world.step(f"{call.what}: comparing with {base.manifest.url}", is_long=True) as comparing:
            assembler.open()
            comparer.run(plan.share, assembler, _in_place(plan) if in_place else None)
            assembler.finish()
            comparing.answer(comparer.problem)
        found = found._replace(problem=_first_problem(comparing.answers))
        if not found.problem:
            with world.gathering_step(f"{call.what}: gathering the changes") as gathering:
                gathering.answer(_pack(comparer.found))
            rows = list(map(_unpack, gathering.answers))
            why = _why_copies_differ(rows) if len(plan.leaders) > 1 else ""
            found = found._replace(rows=rows, why_complete=why)
    finally:
        assembler.close()
        if comparer.close() and snapshot is not None and not found.problem and not found.why_complete:
            snapshot.release()
    return found


def _connect(call: SaveCall, plan: SavePlan) -> Wire | None:
    """Returns connections to other ranks; None if no rank needs bytes from another one."""
    if not plan.depths.exchanges:
        return None
    what = f"{call.what}: connecting the ranks"
    with connecting(call.world, plan.messages.partners) as wire:
        with call.world.step(what) as step:
            step.answer({"sends": bool(plan.messages.outgoing), "offer": wire.offer()})
        return connect(call.world, what, wire, step.answers)


def _why_copies_differ(rows: Sequence[list[list[int]]]) -> str:
    """Returns why the copies of several hosts would not be the same delta; empty if they would."""
    known: dict[int, list[int]] = {}
    if all(known.setdefault(row[0], row) == row for of_rank in rows for row in of_rank):
        return ""
    return "the replicas of the hosts differ, so their copies would be different deltas"


def _in_place(plan: SavePlan) -> dict[int, memoryview] | None:
    """Returns the tensors of a rank's share by number; None if some cannot be read without a copy."""
    layout, found = plan.state.layout, dict[int, memoryview]()
    within = (layout.space.overlapping(each.file, each.offset, each.end) for each in plan.share.ranges)
    for number in {number for of_range in within for number, *_ in of_range}:
        view = plan.state.reader.view(number)
        if view is None:
            return None
        found[number] = view
    return found


class _Comparer:
    """Compares the blocks of a share with the base, in threads.

    Args:
        call: This rank's call.
        plan: The plan of a complete save.
        base: The base.

    Attributes:
        found: The blocks by the first number.
        problem: Why the base cannot be read, unless it is the user's choice; nothing is compared after that.
    """

    def __init__(self, call: SaveCall, plan: SavePlan, base: Base) -> None:
        self.found: dict[int, _FoundBlocks] = {}
        self.problem = ""
        self._call = call
        self._world = call.world
        self._layout = plan.state.layout
        self._base = base
        self._versions = {file.name: file.version for file in base.manifest.files}
        self._workers = Workers(call.options.write_threads or DEFAULT_WRITES, "fastload-compare")
        self._buffers: deque[bytearray] = deque()

    def run(
        self, share: WriterShare, source: PartAssembler, in_place: Mapping[int, memoryview] | None
    ) -> None:
        """Compares all blocks that begin in the share.

        Args:
            share: The share.
            source: The bytes of its parts.
            in_place: The tensors by number, if they need not be copied.

        Raises:
            StorageError: The base cannot be read.
            Interrupted: Another rank failed.
        """
        cutter = _BlockCutter(self._layout.blocks_of(share.ranges))

        def begin(index: int) -> Callable[[], None] | None:
            part = share.parts[index]
            if in_place is None:
                blocks = cutter.feed(part, source.part(index))
            elif index in share.tails:
                source.part(index)  # sent all the same, but each block is compared as it is on this rank
                blocks = []
            else:
                blocks = self._cut(part, in_place)
            return partial(self._compare, blocks) if blocks else None

        work_on_parts(self._world, self._workers, share.parts, source.depth, begin, self._late)

    def close(self) -> bool:
        """Ends the threads; returns whether all calls have ended."""
        return self._workers.close(wait_s=min(1.0, self._world.grace_s))

    def _cut(self, part: ByteRange, tensors: Mapping[int, memoryview]) -> list[_Run]:
        """Returns the blocks that begin in a part."""
        found = []
        within = self._layout.blocks.between(part.file, part.offset, part.end)
        for number, group in groupby(within, key=itemgetter(0)):
            blocks = [block for _, block in group]
            begin = blocks[0].offset - self._layout.space.ranges[number].offset
            found.append(_Run(blocks, tensors[number][begin : begin + _length(blocks)]))
        return found

    def _late(self, _: ByteRange) -> StorageError:
        return StorageError(
            f"storage did not answer within {self._world.patience_s:.1f} s", url=self._base.manifest.url
        )

    def _compare(self, runs: Sequence[_Run]) -> None:
        """Compares adjacent blocks of a file."""
        if self.problem:
            return
        first, last = runs[0].blocks[0], runs[-1].blocks[-1]
        nbytes = last.end - first.offset
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = bytearray()
        if len(buffer) < nbytes:
            buffer = bytearray(nbytes)
        name = self._layout.files[first.file].name
        into = memoryview(buffer)[:nbytes]
        try:
            self._base.storage.read_into(name, first.offset, [into], self._versions[name])
        except (CheckpointError, StorageError) as error:
            self.problem = _problem_of_base(self._call, error)
            return
        with one_torch_thread():
            for run in runs:
                begin = run.blocks[0].offset - first.offset
                for some, data, before in self._pieces(run, into[begin : begin + len(run.data)]):
                    self.found[some[0].number] = self._found(some, data, before)
        self._buffers.append(buffer)

    def _pieces(
        self, run: _Run, before: memoryview
    ) -> Iterator[tuple[Sequence[Block], memoryview, memoryview]]:
        """Yields some blocks of one tensor, their data, and those of the base."""
        blocks, start = self._layout.blocks, run.blocks[0].offset
        step = max(1, PIECE_BYTES // blocks.block_bytes)
        for _, group in groupby(run.blocks, key=lambda block: blocks.owner(block.number)):
            of_tensor = list(group)
            for at in range(0, len(of_tensor), step):
                some = of_tensor[at : at + step]
                within = slice(some[0].offset - start, some[0].offset - start + _length(some))
                yield some, run.data[within], before[within]

    def _found(self, some: Sequence[Block], data: memoryview, before: memoryview) -> _FoundBlocks:
        blocks, start = self._layout.blocks, some[0].offset
        itemsize = element_bytes(blocks.space.ranges[blocks.owner(some[0].number)].dtype)
        segment = segment_elements(blocks.block_bytes, itemsize)
        new, old = (torch.frombuffer(each, dtype=torch.uint8) for each in (data, before))
        changes = encode(new, old, itemsize, segment)
        sizes = [(0, 0)] * len(some)
        if changes is not None:
            per_block = blocks.block_bytes // (segment * itemsize)
            sizes = changes.sizes(len(new) // itemsize, segment, per_block)
        digests = [checksum(data[one.offset - start :][: one.nbytes]) for one in some]
        return _FoundBlocks(range(some[0].number, some[-1].number + 1), digests, sizes, changes)


class _Run(NamedTuple):
    """Adjacent blocks of a file, in contiguous memory."""

    blocks: Sequence[Block]
    data: memoryview


def _length(blocks: Sequence[Block]) -> int:
    return blocks[-1].end - blocks[0].offset


class _BlockCutter:
    """Cuts parts of files into complete blocks.

    Args:
        blocks: The blocks, in the order of the parts.
    """

    def __init__(self, blocks: Iterator[Block]) -> None:
        self._pieces = BlockPieces(blocks)
        self._begun = bytearray()

    def feed(self, part: ByteRange, data: memoryview) -> list[_Run]:
        """Returns the blocks that end in the next part, which are adjacent."""
        found, complete = [], list[Block]()
        for block, piece, ends in self._pieces.feed(part, data):
            if len(piece) == block.nbytes:
                complete.append(block)
                continue
            self._begun += piece
            if ends:
                found.append(_Run([block], memoryview(self._begun)))
                self._begun = bytearray()
        if complete:
            begin = complete[0].offset - part.offset
            found.append(_Run(complete, data[begin : begin + _length(complete)]))
        return found


# The plan of a save of the changes


def _plan(call: SaveCall, plan: SavePlan, agreed: SaveAgreement, base: Base, found: _Found) -> PlannedWrite:
    """Plans the save of the changes."""
    world, layout, state, rows = call.world, plan.state.layout, plan.state, found.rows
    checksums = _checksums(layout, [rows[rank] for rank in plan.group.members], call.what)
    specs: list[TensorSpec] = []
    boxes: dict[str, Any] = {}
    parts: dict[str, list[tuple[Box, Tensor]]] = {}
    for number, of_tensor in _by_tensor(layout, rows):
        runs = {rank: _runs(of_tensor, rank) for rank in sorted({row[0] for row in of_tensor})}
        for stored in _stored_tensors(layout, number, of_tensor):
            name = stored.spec.name
            specs.append(stored.spec)
            boxes[name] = tuple((stored.boxes(of_rank), (rank,)) for rank, of_rank in runs.items())
            own = [blocks for blocks in runs.get(world.rank, ()) if stored.boxes([blocks])]
            parts[name] = [(stored.box(blocks), stored.data(blocks, found.blocks)) for blocks in own]
    changes_layout = replace(
        lay_out(
            specs,
            max_shard_bytes=call.options.max_shard_bytes,
            block_bytes=layout.block_bytes,
            stem=DELTA_STEM,
        ),
        index=None,
    )
    _warn_of_size(call, changes_layout, layout)
    reader = StateReader(changes_layout, {})
    reader = reader.replaced({}, parts, reader.streams)
    changes_state = replace(state, layout=changes_layout, reader=reader, shard_map=None)
    shard_map = ShardMap(changes_layout, world.size, boxes)
    of_changes = make_plan(call, changes_state, replace(agreed, shard_map=shard_map), target=plan.target)
    delta = Delta(base.name, base.manifest.record_digest, base.num_deltas + 1, checksums)
    return PlannedWrite(of_changes, None, delta, base.manifest.url)


def _warn_of_size(call: SaveCall, changes: Layout, complete: Layout) -> None:
    """Warns if a delta takes nearly as many bytes as a complete checkpoint."""
    folder = call.occasion.rpartition("/")[0]
    if changes.nbytes < _USELESS * complete.nbytes or folder in _warned:
        return
    _warned.add(folder)
    if call.world.rank == 0:
        sizes = format_bytes(changes.nbytes), format_bytes(complete.nbytes)
        _log.warning("%s: the delta takes %s, a complete checkpoint %s. %s", call.what, *sizes, _WHAT_TO_SAVE)


def _pack(found: Mapping[int, _FoundBlocks]) -> bytes:
    rows = [
        (number, int.from_bytes(digest, "big", signed=True), *sizes)
        for first in sorted(found)
        for number, digest, sizes in zip(*found[first][:3], strict=True)
    ]
    return host_bytes(torch.tensor(rows, dtype=torch.int64).flatten())


def _unpack(packed: bytes) -> list[list[int]]:
    rows = torch.frombuffer(bytearray(packed), dtype=torch.int64) if packed else torch.empty(0)
    return rows.view(-1, _ROW_WORDS).tolist()


def _checksums(layout: Layout, rows: Sequence[list[list[int]]], what: str) -> dict[str, str]:
    """Returns the checksums of the result, by file."""
    digests = {number: digest for of_rank in rows for number, digest, _, _ in of_rank}
    if len(digests) != len(layout.blocks):
        raise CheckpointError(f"{what}: {len(layout.blocks) - len(digests)} blocks were compared by no rank")
    found = {}
    for index, file in enumerate(layout.files):
        numbers = range(layout.blocks.first_of(index), layout.blocks.first_of(index + 1))
        found[file.name] = b"".join(
            digests[number].to_bytes(CHECKSUM_BYTES, "big", signed=True) for number in numbers
        ).hex()
    return found


_Row = tuple[int, int, int, int]  # rank, number of the block, its values, its indices


def _by_tensor(layout: Layout, rows: Sequence[list[list[int]]]) -> Iterator[tuple[int, list[_Row]]]:
    """Yields the numbers of the changed tensors, each with its blocks in order."""
    blocks = layout.blocks
    every = sorted(
        (number, rank, values, indices)
        for rank, of_rank in enumerate(rows)
        for number, _, values, indices in of_rank
    )
    for tensor, group in groupby(every, key=lambda row: blocks.owner(row[0])):
        of_tensor = [(rank, number, values, indices) for number, rank, values, indices in group]
        if any(values for _, _, values, _ in of_tensor):
            yield tensor, of_tensor


def _runs(rows: Sequence[_Row], rank: int) -> list[range]:
    """Returns the consecutive blocks of a tensor that a rank has compared."""
    numbers = [number for owner, number, _, _ in rows if owner == rank]
    runs = (list(group) for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]))
    return [range(run[0][1], run[-1][1] + 1) for run in runs]


@dataclass(frozen=True)
class _StoredTensor:
    """One of the stored tensors for a changed tensor.

    Attributes:
        spec: Its name, dtype and shape.
        first_block: The first block of the changed tensor.
        firsts: For each block of that tensor, the first element that belongs to it, or to a later one; in the
            end the number of elements.
    """

    spec: TensorSpec
    first_block: int
    firsts: Sequence[int]

    def box(self, blocks: range) -> Box:
        """Returns the elements that belong to some blocks."""
        first, end = (self.firsts[number - self.first_block] for number in (blocks.start, blocks.stop))
        return Box((first,), (end - first,))

    def boxes(self, runs: Iterable[range]) -> tuple[Box, ...]:
        """Returns the elements that belong to each of some runs of blocks, if there are any."""
        return tuple(box for box in map(self.box, runs) if box.sizes != (0,))

    def data(self, blocks: range, found: Mapping[int, _FoundBlocks]) -> Tensor:
        """Returns the elements that belong to some blocks, which this rank has compared."""
        parts, number = list[Tensor](), blocks.start
        while number < blocks.stop:
            numbers, changes = found[number].numbers, found[number].changes
            number = numbers.stop
            if changes is not None:
                parts.append(changes.of(self.spec.name))
            elif self.spec.name.endswith(COUNTS):
                parts.append(torch.zeros(self.box(numbers).sizes, dtype=torch.int32))
        return torch.cat(parts)


def _stored_tensors(layout: Layout, number: int, rows: Sequence[_Row]) -> list[_StoredTensor]:
    """Returns the stored tensors for a changed tensor, by its number in `Layout.space` and its blocks."""
    entry = layout.space.ranges[number]
    itemsize = element_bytes(entry.dtype)
    segment_bytes = segment_elements(layout.block_bytes, itemsize) * itemsize
    num_segments, per_block = num_blocks(entry.nbytes, segment_bytes), layout.block_bytes // segment_bytes
    sizes = {block: (values, indices) for _, block, values, indices in rows}  # hosts may have copies
    segments = [min(block * per_block, num_segments) for block in range(len(sizes) + 1)]
    values, indices = (list(accumulate(each, initial=0)) for each in zip(*sizes.values(), strict=True))
    kinds = (
        (COUNTS, "I32", 4, segments),
        (INDICES, "U16", 2, indices),
        (VALUES, values_dtype(entry.dtype), itemsize, values),
    )
    return [
        _StoredTensor(
            TensorSpec(entry.name + ending, dtype, (firsts[-1],), nbytes * firsts[-1]),
            layout.blocks.firsts[number],
            firsts,
        )
        for ending, dtype, nbytes, firsts in kinds
    ]
