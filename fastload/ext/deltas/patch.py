"""Loads of deltas into tensors that hold a base: only the changes are read, and replaced in place.

Each rank hashes the checksum blocks that it has completely, which shows that they hold the base. One of the
ranks with the same blocks also hashes each block with the changes in place, in memory of its own. Everything
else is loaded like any checkpoint, the partial blocks at the ends of shards included. No tensor changes
before all ranks have read and verified everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from fastload.base.memory import byte_view, host_view
from fastload.base.threads import Workers
from fastload.comm.responses import Each
from fastload.errors import FastloadError
from fastload.ext.deltas.encoding import Changes, SegmentTable, bits_of, find_changes, is_own_file
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.geometry.blocks import num_blocks
from fastload.geometry.box import Box, Runs
from fastload.loading.match import BoxRequest, Match, Request
from fastload.loading.prepare import Opened
from fastload.loading.session import Session
from fastload.loading.targets import Destination

_NUM_SAMPLES = 16
_APPLIED_ELEMENTS = 1 << 21  # at once, which bounds the memory for their positions
_COMPARED_BYTES = 2 << 20  # likewise
_NUM_THREADS = 2
_MOST_READ = 1 / 2  # of the bytes of a complete load


def match_rest(session: Session, request: Request) -> Match:
    """Reads the changes for tensors that hold a base, on all ranks, and returns what is left to load.

    The tensors are patched by its `finish`.

    Raises:
        FastloadError: A rank cannot load, or a delta is damaged; nothing has changed.
    """
    opened = session.opened
    world, access = opened.world, opened.access
    levels = [part.logical for part in access.components]
    with world.step(f"comparing tensors with {access.stored.url} and its bases") as step:
        matched = opened.match(request)
        candidates = _Candidates(access.stored, matched.destinations)
        affordable = levels[: _num_affordable(opened) + 1]
        held = [number for number, level in enumerate(affordable) if candidates.may_hold(level)]
        step.answer({"held": held, "regions": Each([candidates.digest])})
    known = set.intersection(*(set(one["held"]) for one in step.answers))
    digests = step.answers[0]["regions"][0].by_rank()
    if not known or not any(digests.values()):
        return matched
    peers = [rank for rank, digest in digests.items() if digest == digests[world.rank]]
    number = min(known)
    proof = _Proof(candidates)
    try:
        if len(peers) > 1 or not number:
            proof.begin(levels[number])
        patches = [
            _read(opened, session.component(delta), levels[delta + 1], candidates)
            for delta in reversed(range(number))
        ]
        with world.step(f"verifying the result of {access.stored.url}", is_long=True):
            for patch in patches:
                patch.require_valid()
            if patches:
                proof.begin(access.stored, patches, peers.index(world.rank), len(peers))
            proof.await_all()
    finally:
        proof.close()
    return _without(matched, proof.held, patches)


def _num_affordable(opened: Opened) -> int:
    """Returns the most deltas that are read instead of the complete checkpoint."""
    left = opened.access.stored.nbytes * _MOST_READ
    deltas = opened.access.components[:-1]
    for number, delta in enumerate(deltas):
        left -= delta.stored.nbytes
        if left < 0:
            return number
    return len(deltas)


class _Region(NamedTuple):
    """Complete checksum blocks of a tensor in a destination.

    Attributes:
        destination: The destination.
        begin: First byte in the tensor of the checkpoint.
        end: The byte after the last one.
        skipped: Bytes of the destination before the first one.
    """

    destination: Destination
    begin: int
    end: int
    skipped: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.begin

    @property
    def entry(self) -> TensorEntry:
        """The tensor in the checkpoint."""
        return self.destination.entry

    def bytes(self, begin: int, end: int) -> Tensor:
        """Returns a byte range of the tensor of the checkpoint as flat uint8, in place."""
        first = self.skipped + begin - self.begin
        return byte_view(self.destination.tensor.detach())[first : first + end - begin]


def _recorded(manifest: Manifest, name: str, first: int, last: int) -> bytes:
    """Returns the checksums of some blocks of a tensor that is not in pieces, joined."""
    entry = manifest.by_name[name]
    block = manifest.blocks.at(entry.file, entry.offset)
    assert block is not None, "not empty"
    begin, _ = manifest.recorded(block)
    within = slice((begin + first) * CHECKSUM_BYTES, (begin + last) * CHECKSUM_BYTES)
    return manifest.files[entry.file].checksums[within]


class _Candidates:
    """What a rank has of a delta's result in complete checksum blocks.

    Args:
        manifest: The result.
        destinations: What the rank wants.

    Attributes:
        regions: The blocks.
        block_bytes: Length of a block.
    """

    def __init__(self, manifest: Manifest, destinations: Sequence[Destination]) -> None:
        self.block_bytes = length = manifest.block_bytes
        self.regions: list[_Region] = []
        for one in destinations:
            runs = one.runs or Runs(0, one.entry.nbytes, ())
            is_own = is_own_file(manifest.files[one.entry.file].name)
            if is_own or one.piece or one.decoding or one.alias or runs.steps or not one.is_plain:
                continue
            begin, end = num_blocks(runs.start, length) * length, runs.end
            if end < one.entry.nbytes:
                end -= end % length
            if begin < end:
                self.regions.append(_Region(one, begin, end, begin - runs.start))

    @property
    def digest(self) -> int:
        """A digest of what the regions are of; 0 without any."""
        ranges = [(region.entry.name, region.begin, region.end) for region in self.regions]
        return xxhash.xxh3_64_intdigest(repr(ranges).encode()) if ranges else 0

    def may_hold(self, manifest: Manifest) -> bool:
        """Whether some blocks, spread over all, are those of a checkpoint."""
        if manifest.block_bytes != self.block_bytes:
            return False
        step = max(1, len(self.regions) // _NUM_SAMPLES)
        return all(
            self.holds(region, region.begin, min(region.begin + self.block_bytes, region.end), manifest)
            for region in self.regions[::step]
        )

    def holds(
        self, region: _Region, begin: int, end: int, manifest: Manifest, patches: Sequence[_Patch] = ()
    ) -> bool:
        """Whether blocks are those of a checkpoint, once they are patched, in memory of their own."""
        data, name, length = region.bytes(begin, end), region.entry.name, self.block_bytes
        if patches or not data.is_cpu:
            data = data.clone() if data.is_cpu else data.cpu()
        for patch in patches:
            patch.apply(name, begin, end, data)
        view = host_view(data)
        found = b"".join(checksum(view[at : at + length]) for at in range(0, len(view), length))
        return found == _recorded(manifest, name, begin // length, num_blocks(end, length))


class _Proof:
    """Compares regions with checkpoints, in threads.

    Args:
        candidates: The regions.
    """

    def __init__(self, candidates: _Candidates) -> None:
        self._candidates = candidates
        self._workers = Workers(_NUM_THREADS, "fastload-patch")
        self._begun: list[Future[None]] = []
        self._wrong: set[int] = set()
        self._is_closed = False

    def begin(
        self, manifest: Manifest, patches: Sequence[_Patch] = (), share: int = 0, num_shares: int = 1
    ) -> None:
        """Begins to compare one of some equal shares of the regions with a checkpoint.

        Args:
            manifest: The checkpoint.
            patches: Changes that make the regions those of the checkpoint.
            share: Number of the share.
            num_shares: Number of shares.
        """
        regions, length = self._candidates.regions, self._candidates.block_bytes
        step = max(1, _COMPARED_BYTES // length) * length

        def compare(number: int, begin: int, end: int) -> None:
            if self._is_closed or number in self._wrong:
                return
            if not self._candidates.holds(regions[number], begin, end, manifest, patches):
                self._wrong.add(number)

        units = [
            (number, begin, min(begin + step, region.end))
            for number, region in enumerate(regions)
            for begin in range(region.begin, region.end, step)
        ]
        self._begun += [self._workers.submit(partial(compare, *each)) for each in units[share::num_shares]]

    def await_all(self) -> None:
        """Waits until all is compared."""
        for each in self._begun:
            each.result()

    @property
    def held(self) -> list[_Region]:
        """The regions without a difference."""
        return [one for number, one in enumerate(self._candidates.regions) if number not in self._wrong]

    def close(self) -> None:
        """Ends the threads."""
        self._is_closed = True
        self._workers.close(wait_s=0.0)


class _Part(NamedTuple):
    """The changes of one tensor in some segments.

    Attributes:
        changes: The changed tensor.
        table: Its segments.
        segments: Those whose changes are here.
        indices: Their indices; int16 with the bits of U16.
        values: Their values; integers of the length of an element.
    """

    changes: Changes
    table: SegmentTable
    segments: range
    indices: Tensor
    values: Tensor

    def within(self, starts: Tensor, segments: range) -> slice:
        """Returns where the indices or values of some segments are, given where each segment's begin."""
        first = int(starts[self.segments.start])
        return slice(int(starts[segments.start]) - first, int(starts[segments.stop]) - first)


class _Patch:
    """The changes of one delta for the tensors of this rank.

    Args:
        url: The delta.
        parts: By name of the tensor, the changes, each in a part of it.
    """

    def __init__(self, url: str, parts: Mapping[str, Sequence[_Part]]) -> None:
        self._url = url
        self._parts = parts

    def require_valid(self) -> None:
        """Requires that the indices are within their segments.

        Raises:
            ManifestError: They are not.
        """
        for part in chain.from_iterable(self._parts.values()):
            part.table.require_ascending(part.segments, part.indices, self._url)

    def apply(self, name: str, begin: int, end: int, data: Tensor) -> None:
        """Replaces the elements that change in a byte range of a tensor, which begins with a segment.

        Args:
            name: The tensor.
            begin: First byte.
            end: The byte after the last one.
            data: The bytes; flat uint8, on any device.
        """
        for part in self._parts.get(name, ()):
            size, table = part.changes.itemsize, part.table
            step = max(1, _APPLIED_ELEMENTS // table.segment)
            elements = data.view(bits_of(size))
            wanted = table.within(begin // size, end // size)
            last = min(wanted.stop, part.segments.stop)
            for at in range(max(wanted.start, part.segments.start), last, step):
                segments = range(at, min(at + step, last))
                values = part.values[part.within(table.value_starts, segments)]
                if not len(values):
                    continue
                indices = part.indices[part.within(table.index_starts, segments)]
                positions = table.positions(segments, indices).sub_(begin // size)
                elements.scatter_(0, positions.to(data.device), values.to(data.device))


def _read(opened: Opened, session: Session, base: Manifest, candidates: _Candidates) -> _Patch:
    """Reads the changes of a delta for the tensors of this rank.

    Raises:
        FastloadError: A rank failed, or the delta is damaged.
    """
    stored = session.stored
    try:
        changes = find_changes(base, stored)
        wanted: dict[str, list[_Region]] = {}
        for region in candidates.regions:
            if region.entry.name in changes:
                wanted.setdefault(region.entry.name, []).append(region)
        with session.usable():
            counts = {name: _new(changes[name].counts, 0, changes[name].counts.shape[0]) for name in wanted}
            session.load(
                BoxRequest({changes[name].counts.name: [box] for name, box in counts.items() if box[0].numel})
            )
            parts: dict[str, list[tuple[_Part, tuple[Box, Tensor], tuple[Box, Tensor]]]] = {}
            # Together: only the ranks that want a tensor see its counts.
            with opened.world.step(f"finding the changes in {stored.url}"):
                for name, regions in wanted.items():
                    table = SegmentTable.of(changes[name], stored.block_bytes, counts[name][1], stored.url)
                    parts[name] = [_new_part(changes[name], table, region) for region in regions]
            boxes: dict[str, list[tuple[Box, Tensor]]] = {}
            for of_tensor in parts.values():
                for part, *of_part in of_tensor:
                    for entry, box in zip((part.changes.indices, part.changes.values), of_part, strict=True):
                        if box[0].numel:
                            boxes.setdefault(entry.name, []).append(box)
            session.load(BoxRequest(boxes))
    except FastloadError as error:
        error.is_partial = False
        raise
    return _Patch(stored.url, {name: [part for part, *_ in found] for name, found in parts.items()})


def _new(entry: TensorEntry, first: int, last: int) -> tuple[Box, Tensor]:
    dtype, _ = torch_spec(entry)
    return Box((first,), (last - first,)), torch.empty(last - first, dtype=dtype)


def _new_part(
    changes: Changes, table: SegmentTable, region: _Region
) -> tuple[_Part, tuple[Box, Tensor], tuple[Box, Tensor]]:
    """Returns the changes in a region, and what to read for them."""
    segments = table.within(region.begin // changes.itemsize, region.end // changes.itemsize)
    bounds = slice(segments.start, segments.stop + 1, max(1, len(segments)))
    indices = _new(changes.indices, *table.index_starts[bounds].tolist())
    values = _new(changes.values, *table.value_starts[bounds].tolist())
    bits = values[1].view(bits_of(changes.itemsize))
    return _Part(changes, table, segments, indices[1].view(torch.int16), bits), indices, values


def _without(matched: Match, regions: Sequence[_Region], patches: Sequence[_Patch]) -> Match:
    """Returns what is left to load, with the patches of regions in `finish`."""
    held = {id(region.destination): region for region in regions}
    left: list[Destination] = []
    for one in matched.destinations:
        region = held.get(id(one))
        left += [one] if region is None else _ends(region)

    @torch.no_grad()
    def finish() -> object:
        for region in regions:
            tensor = region.destination.tensor
            with torch.inference_mode() if tensor.is_inference() else nullcontext():
                for patch in patches:
                    data = region.bytes(region.begin, region.end)
                    patch.apply(region.entry.name, region.begin, region.end, data)
        return matched.finish()

    nbytes = sum(region.nbytes for region in regions)
    return replace(
        matched, destinations=left, finish=finish, calls=True, is_in_place=False, bytes_patched=nbytes
    )


def _ends(region: _Region) -> Iterator[Destination]:
    """Yields what is left of the destination of a region: before and after it."""
    one, size = region.destination, region.destination.stored.itemsize
    start = region.begin - region.skipped
    end = start + one.nbytes
    flat = one.tensor.detach().view(-1)
    for begin, stop in ((start, region.begin), (region.end, end)):
        if begin < stop:
            view = flat[(begin - start) // size : (stop - start) // size]
            yield replace(one, tensor=view, runs=Runs(begin, stop - begin, ()))
